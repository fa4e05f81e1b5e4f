"""The account's pictures show every table and size; the step's curve obeys the laws of links; the report names all."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from experiments.accuracy.fabric import buildable
from experiments.accuracy.report import families
from experiments.accuracy.step_curve import curve, draw_curves, measured_steps, predict_step
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.measure.accuracy import MeasuredRow, TableAccuracy, own_tables
from tasp_lab.measure.readers import parse_table, read_table
from tasp_lab.plots.accuracy import FEW_SIZES, MAX_LINES, MAX_PANELS, draw_tables, plot_table
from tasp_lab.plots.timelines import render
from tasp_lab.prediction.interval import Interval, residual_interval
from tasp_lab.prediction.residuals import KERNELS


def size_row(
    size: int, measured_s: float, predicted_s: float, interval: Interval | None = None, counts: bool = True
) -> MeasuredRow:
    """A size of a collective."""
    reason = "" if counts else "too small"
    return MeasuredRow(measured_s, predicted_s, reason, interval=interval, size_bytes=size)


HEADERS = "# profile: h100-8\n# collective: sendrecv\n# ranks: 8\nsize_B,time_us\n"

errors = st.floats(-0.9, 9)
rows = st.builds(
    lambda size, measured_s, error, counts: size_row(size, measured_s, measured_s * (1 + error), counts=counts),
    st.integers(1, 2**40),
    st.floats(1e-7, 1e3),
    errors,
    st.booleans(),
)


@dataclass(frozen=True)
class Compared:
    """A table with these rows."""

    name: str
    rows: Sequence[MeasuredRow]

    def accuracy(self, reason: str = "") -> TableAccuracy:
        return TableAccuracy(parse_table(HEADERS + "1,1\n", f"{self.name}.csv"), reason, tuple(self.rows), "port")


tables = st.lists(
    st.builds(Compared, st.sampled_from(["first", "second $x_1$", "third"]), st.lists(rows, max_size=6)), max_size=5
).map(lambda found: [each.accuracy() for each in found])


def lines_of(figure: Figure) -> list[str]:
    """The tables of the overview, from top to bottom."""
    overview = [axes for axes in figure.axes if axes.get_xlabel().startswith("predicted over measured")]
    return [label.get_text() for axes in overview for label in axes.get_yticklabels()]


class TestPictures:
    @settings(max_examples=8, deadline=None)
    @given(tables)
    def test_every_table_with_rows_is_there_once(self, found: list[TableAccuracy]) -> None:
        figure = draw_tables(found)
        panels = [axes for axes in figure.axes if axes.get_yscale() == "log" and axes.get_visible()]
        assert len(panels) == sum(len(each.rows) > FEW_SIZES for each in found)
        assert len(lines_of(figure)) == sum(0 < len(each.rows) <= FEW_SIZES for each in found)
        assert render(figure, "svg")

    @given(st.lists(rows, min_size=1, max_size=8))
    def test_a_panel_has_every_measured_and_predicted_time(self, found: list[MeasuredRow]) -> None:
        axes = Figure().subplots()
        plot_table(Compared("table", found).accuracy(), axes)
        predicted, *points = axes.get_lines()
        assert np.asarray(predicted.get_ydata()).tolist() == [row.predicted_s for row in found]
        drawn = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in points])
        assert sorted(drawn) == sorted(row.measured_s for row in found)

    def test_a_panel_has_the_interval_of_each_time(self) -> None:
        found = [size_row(2**k, 1.0, 1.0, residual_interval(1.0 + k, KERNELS, "")) for k in range(FEW_SIZES + 1)]
        axes = Figure().subplots()
        plot_table(Compared("table", found).accuracy(), axes)
        (band,) = axes.collections
        drawn = np.unique(band.get_paths()[0].vertices[:, 1])  # type: ignore[index]
        ends = [end for row in found if row.interval is not None for end in (row.interval.low_s, row.interval.high_s)]
        assert drawn == pytest.approx(sorted(ends))

    def test_a_single_time_next_to_a_power_of_ten_has_a_range(self) -> None:
        time_s = float(np.nextafter(1e-7, 1))
        axes = Figure().subplots()
        plot_table(Compared("table", [size_row(1, time_s, time_s)]).accuracy(), axes)
        low, high = axes.get_ylim()
        assert low < time_s < high

    @pytest.mark.parametrize(("count", "sizes"), [(1, 1), (1, 9), (12, 9), (13, 9), (42, 20), (200, 1)])
    def test_sizes_stay_bounded_and_worst_tables_are_last(self, count: int, sizes: int) -> None:
        each = [
            Compared(f"table{i}", [size_row(2**k, 1.0, 1.01 + i) for k in range(sizes)]).accuracy()
            for i in range(count)
        ]
        figure = draw_tables(each)
        width, height = struct.unpack(">II", render(figure, "png")[16:24])
        assert width == 1500
        assert height < 2100
        lines = [label.partition(":")[0] for label in lines_of(figure)]
        few = sizes <= FEW_SIZES or count > MAX_PANELS
        assert lines == [f"table{i}" for i in range(max(0, count - MAX_LINES), count)] * few
        assert (f"the 60 of {count} tables with the largest errors" in figure.get_suptitle()) == (few and count > 60)

    def test_axes_are_shared_and_labelled_with_units(self) -> None:
        each = [Compared("t", [size_row(2**k, 10.0**-i, 1.0) for k in range(20)]).accuracy() for i in range(5)]
        figure = draw_tables(each)
        render(figure, "png")
        times = [axes for axes in figure.axes if axes.get_yscale() == "log" and axes.get_visible()]
        assert len({(axes.get_xlim(), axes.get_ylim()) for axes in times}) == 1
        assert any("KiB" in label.get_text() for axes in figure.axes for label in axes.get_xticklabels())
        assert any(label.get_text().endswith("ms") for label in times[0].get_yticklabels())
        assert {axes.get_ylabel() for axes in figure.axes} == {"time", "error", ""}


class TestReport:
    def test_families_have_what_is_predicted(self) -> None:
        some, none = Compared("a", [size_row(1, 1.0, 1.0)]).accuracy(), Compared("b", []).accuracy("none")
        assert families([some, none]) == {"h100": [some]}


class TestStepCurve:
    @settings(max_examples=25, deadline=None)
    @given(st.integers(2**20, 2**30))
    def test_two_messages_of_half_take_no_longer_than_one_after_the_other(self, size_bytes: int) -> None:
        machine = load_machine("h100-8")
        step, half = predict_step(machine, size_bytes), predict_step(machine, size_bytes // 2)
        assert half.ring_s < step.ring_of_two_s < 2 * half.ring_s

    def test_links_of_their_own_gain_at_most_their_number_and_ever_more(self) -> None:
        gains = [step.speed_up for step in curve(load_machine("mi300x-8"), 1)]
        assert gains == sorted(gains)
        assert 6.5 < gains[-1] < 7

    def test_behind_a_switch_a_step_takes_at_least_what_its_bytes_take_on_the_wire(self) -> None:
        machine, wires = load_machine("h100-8"), load_machine("h100-8", library="ideal")
        for step, bare in zip(curve(machine, 1), curve(wires, 1), strict=True):
            assert bare.ring_s < step.ring_s
            assert bare.tasp_s < step.tasp_s

    def test_measured_steps_lie_between_measured_sizes(self) -> None:
        times = dict(read_table(own_tables() / "h100_xxrjun_1x8_alltoall.csv").rows)
        for step in measured_steps():
            assert times[step.size_bytes] < step.tasp_s < times[2 * step.size_bytes]

    def test_the_picture_has_a_panel_per_machine(self) -> None:
        curves = {name: [predict_step(load_machine(name), 2**20)] for name in ("h100-8", "mi300x-8")}
        figure = draw_curves(curves, measured_steps())
        assert [axes.get_title(loc="left") for axes in figure.axes] == list(curves)


def test_only_what_has_a_way_is_run_on_a_fabric() -> None:
    ring, mesh = load_machine("ring:5").topology, load_machine("full-mesh:6").topology
    assert buildable("direct", ring, 64) is None
    assert buildable("all-to-all", ring, 64) is None
    assert buildable("ring", ring, 64) is not None
    assert buildable("direct", mesh, 64) is not None


def test_the_report_names_pictures_that_are_there() -> None:
    folder = Path(__file__).parents[2] / "experiments" / "accuracy"
    text = (folder / "README.md").read_text()
    pictures = {path.name for path in folder.glob("*.png")}
    assert pictures == {name for name in pictures if name in text}
