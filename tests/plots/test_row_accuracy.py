"""Pictures of layers and kernels beside their predictions: each row with a prediction is a point over its interval."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from tasp_lab.plots.accuracy import (
    MAX_LINES,
    MAX_PANELS,
    REACH,
    draw_tables,
    error_ends,
    plot_lines,
    plot_rows,
    summary,
)
from tasp_lab.plots.timelines import render


class Ends(NamedTuple):
    low_s: float
    high_s: float


class Row(NamedTuple):
    measured_s: float | None
    relative_error: float | None
    in_scope: bool = True
    regime: str | None = "gpu-bound"
    interval: Ends | None = None


class Judged(NamedTuple):
    label: str
    rows: Sequence[Row]


regimes = st.sampled_from(["gpu-bound", "host-bound"])
intervals = st.none() | st.builds(Ends, st.floats(1e-6, 1), st.floats(1, 20))
rows = st.lists(
    st.builds(Row, st.floats(1e-5, 10), st.floats(-0.99, 5), st.booleans(), regimes, intervals),
    min_size=1,
    max_size=6,
)  # fmt: skip


def drawn(axes: Axes) -> set[tuple[float, float]]:
    """The points, without shaded ranges and intervals."""
    found = [each.get_offsets() for each in axes.collections if isinstance(each, PathCollection)]
    return {(float(x), float(y)) for each in found for x, y in np.asarray(each)}


@settings(max_examples=20, deadline=None)
@given(rows)
def test_every_row_is_a_point_at_its_time_and_error(found: list[Row]) -> None:
    axes = Figure().subplots()
    plot_rows(Judged("table", [*found, Row(None, None), Row(1.0, None)]), axes)
    expected = {(row.measured_s, min(row.relative_error, REACH)) for row in found}
    assert drawn(axes) == expected


@settings(max_examples=20, deadline=None)
@given(st.lists(rows, min_size=1, max_size=3))
def test_the_overview_has_a_line_per_table(found: list[list[Row]]) -> None:
    axes = Figure().subplots()
    plot_lines([Judged(f"table {number}", each) for number, each in enumerate(found)], axes)
    expected = {(min(row.relative_error, REACH), float(place)) for place, each in enumerate(found) for row in each}
    assert drawn(axes) == expected
    assert [label.get_text() for label in axes.get_yticklabels()] == [f"table {n}" for n in range(len(found))]


@pytest.mark.parametrize(("tables", "panels"), [(1, 1), (5, 5), (MAX_PANELS, MAX_PANELS), (MAX_PANELS + 1, 1)])
def test_few_tables_have_panels_and_many_a_line_each(tables: int, panels: int) -> None:
    figure = draw_tables([Judged(f"table {number}", [Row(1.0, 0.1)]) for number in range(tables)])
    assert sum(axes.get_visible() for axes in figure.axes) == panels


@pytest.mark.parametrize("count", [MAX_PANELS + 1, MAX_LINES, 200])
def test_an_overview_stays_bounded_and_its_worst_tables_are_last(count: int) -> None:
    figure = draw_tables([Judged(f"table{number}", [Row(1.0, 0.01 * number)]) for number in range(count)])
    width, height = struct.unpack(">II", render(figure, "png")[16:24])
    assert width == 1500
    assert height < 2100
    lines = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert lines == [f"table{number}" for number in range(max(0, count - MAX_LINES), count)]
    assert (f"the {MAX_LINES} of {count} tables with the largest errors" in figure.get_suptitle()) == (count > 60)


def test_tables_without_a_prediction_are_left_out() -> None:
    assert not draw_tables([Judged("none", [Row(1.0, None, False)])]).axes


def test_rows_that_do_not_count_are_hollow_and_not_in_the_median() -> None:
    axes = Figure().subplots()
    plot_rows(Judged("table", [Row(1.0, 0.1), Row(2.0, -0.5, False, "host-bound")]), axes)
    assert "median 10.0% of 1" in axes.get_title(loc="left")
    alpha = {each.get_label(): each.get_facecolors()[0][3] for each in axes.collections if len(each.get_offsets())}
    assert alpha == {"gpu-bound": 1, "host-bound": 0}


@given(st.floats(1e-6, 10), st.floats(-0.9, 5), st.floats(0.01, 1), st.floats(1, 20))
def test_a_point_is_on_its_bar_if_the_measured_time_is_inside(
    measured_s: float, error: float, low: float, high: float
) -> None:
    predicted_s = measured_s * (1 + error)
    assume(min(abs(low * (1 + error) - 1), abs(high * (1 + error) - 1)) > 1e-9)
    row = Row(measured_s, error, interval=Ends(low * predicted_s, high * predicted_s))
    ends = error_ends(row)
    assert ends is not None
    assert ends == pytest.approx((1 / high - 1, 1 / low - 1))
    inside = low * predicted_s <= measured_s <= high * predicted_s
    assert summary([row]).endswith(f"{inside:.0%} inside")
    assert (ends[0] <= error <= ends[1]) == inside


def test_bars_are_drawn_where_there_are_intervals() -> None:
    axes = Figure().subplots()
    plot_rows(Judged("table", [Row(1.0, 0.1, interval=Ends(0.5, 2.2)), Row(2.0, 0.1)]), axes)
    (bars,) = (each for each in axes.collections if isinstance(each, LineCollection))
    (bar,) = bars.get_segments()
    assert np.asarray(bar) == pytest.approx(np.array([(1.0, 1.1 / 2.2 - 1), (1.0, REACH)]))


def test_the_overview_has_the_median_interval_of_each_table() -> None:
    axes = Figure().subplots()
    with_interval = Row(1.0, 0.0, interval=Ends(0.8, 1.25))
    plot_lines([Judged("one", [with_interval, Row(1.0, 0.3)]), Judged("two", [Row(1.0, 0.1)])], axes)
    (bar,) = [each for each in axes.patches if isinstance(each, Rectangle) and each.get_height() == 0.55]
    assert (bar.get_x(), bar.get_x() + bar.get_width()) == pytest.approx((-0.2, 0.25))
