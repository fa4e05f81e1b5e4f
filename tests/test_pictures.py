"""Pictures show every timeline and every bar, stay drawable at any size, and set nothing global."""

from __future__ import annotations

import copy
import itertools
import struct
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from fractions import Fraction

import matplotlib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Annotation

from tasp_lab import pictures
from tasp_lab.errors import OutputError
from tasp_lab.pictures import ComparisonBar, draw_comparison, draw_timelines, render
from tasp_lab.timeline import ATTEND, COMPUTE_LANE, DIFFERENTIATE, Event, Timeline


def regular(ranks: int, lanes: int, steps: int, step_s: Fraction = Fraction(1, 1000)) -> Timeline:
    """Every rank sends on every lane in every step, with a gap of a tenth of a step in between."""
    busy_s = step_s * 9 / 10
    events = [
        Event(rank, lane, step, "send", (rank + 1) % ranks, rank, 1, step * step_s, step * step_s + busy_s, "", "")
        for step in range(steps)
        for rank in range(ranks)
        for lane in range(lanes)
    ]
    return Timeline("predicted", "ring", f"full-mesh:{ranks}", ranks, tuple(events))


def panels(figure: Figure) -> list[Axes]:
    return [axes for axes in figure.axes if axes.get_ylabel() == "rank"]


def bars(panel: Axes) -> PolyCollection:
    """What stands for transfers; the collection before it is the idle background."""
    _, found = [collection for collection in panel.collections if isinstance(collection, PolyCollection)]
    return found


def spans(panel: Axes) -> list[tuple[float, float]]:
    corners = [np.asarray(path.vertices)[:, 0] for path in bars(panel).get_paths()]
    return [(float(x.min()), float(x.max())) for x in corners]


def lines_of(axes: Axes) -> list[LineCollection]:
    return [collection for collection in axes.collections if isinstance(collection, LineCollection)]


def writings(panel: Axes) -> list[str]:
    return [child.get_text() for child in panel.get_children() if isinstance(child, Annotation)]


def is_png(content: bytes) -> bool:
    return content.startswith(b"\x89PNG\r\n\x1a\n") and content.endswith(b"IEND\xaeB`\x82")


# ---------------------------------------------------------------------------------------------------- rendering


def test_png_and_svg() -> None:
    figure = draw_timelines([regular(4, 2, 3)], "AllGather")
    png = render(figure, "png")
    assert is_png(png)
    width, height = struct.unpack(">II", png[16:24])
    assert width == 1500
    assert height > 300
    assert ElementTree.fromstring(render(figure, ".SVG")).tag == "{http://www.w3.org/2000/svg}svg"


@pytest.mark.parametrize("suffix", ["pdf", "", ".jpg", "png "])
def test_other_formats_are_refused(suffix: str) -> None:
    with pytest.raises(OutputError, match=f"^cannot draw a picture as '{suffix}': expected png or svg$"):
        render(draw_timelines([], "nothing"), suffix)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_same_timelines_give_the_same_bytes(suffix: str) -> None:
    first, second = (render(draw_timelines([regular(4, 2, 3)], "AllGather"), suffix) for _ in range(2))
    assert first == second


def test_nothing_global_is_set() -> None:
    before = copy.deepcopy(dict(matplotlib.rcParams))
    render(draw_timelines([regular(2, 1, 2)], "AllGather"), "svg")
    render(draw_comparison([ComparisonBar("ring", 1.0)], "AllGather"), "png")
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize("title", ["", "$x^", "\\frac{", "<&>", "two\nlines", "long " * 60])
def test_any_title_is_taken_as_it_is(title: str) -> None:
    timeline = Timeline("measured", title, title, 2, regular(2, 1, 2).events)
    for figure in (draw_timelines([timeline], title), draw_comparison([ComparisonBar(title, 1.0)], title)):
        assert is_png(render(figure, "png"))
        ElementTree.fromstring(render(figure, "svg"))


# ---------------------------------------------------------------------------------------------------- timelines


def test_one_panel_per_timeline_over_one_time_axis() -> None:
    timelines = [regular(8, 1, 7), regular(8, 7, 7, Fraction(1, 7000)), regular(4, 1, 3)]
    found = panels(draw_timelines(timelines, "AllGather"))
    assert [panel.get_title(loc="left") for panel in found] == [
        "predicted ring on full-mesh:8",
        "predicted ring on full-mesh:8, 7 lanes per rank",
        "predicted ring on full-mesh:4",
    ]
    assert len({panel.get_xlim() for panel in found}) == 1
    assert [writings(panel) for panel in found] == [["6.9 ms"], ["985.7 us"], ["2.9 ms"]]
    assert found[-1].get_xlabel() == "time (ms)"


def test_one_bar_per_transfer_at_its_time_and_in_its_row() -> None:
    timeline = regular(3, 2, 4)
    (panel,) = panels(draw_timelines([timeline], "AllGather"))
    assert spans(panel) == [(float(event.start_s), float(event.end_s)) for event in timeline.events]
    for event, path in zip(timeline.events, bars(panel).get_paths(), strict=True):
        rows = np.asarray(path.vertices)[:, 1]
        middle_of_lane = event.rank + (-0.21, 0.21)[event.lane]
        assert (rows.min() + rows.max()) / 2 == pytest.approx(middle_of_lane)
    shades = bars(panel).get_array()
    assert shades is not None
    assert shades.tolist() == [event.step for event in timeline.events]


def test_timelines_without_events() -> None:
    empty = Timeline("predicted", "ring", "ring:1", 1, ())
    for timelines in ([], [empty], [empty, empty], [empty, regular(2, 1, 1)]):
        figure = draw_timelines(timelines, "AllGather")
        assert len(panels(figure)) == len(timelines)
        assert is_png(render(figure, "png"))
    assert writings(panels(draw_timelines([empty], "AllGather"))[0]) == ["0 s"]


def test_the_step_scale_is_shown_once_and_only_if_there_are_steps() -> None:
    for timelines, scales in (([regular(2, 1, 1)], 0), ([regular(2, 1, 2)], 1), ([regular(2, 1, 300)] * 2, 1)):
        figure = draw_timelines(timelines, "AllGather")
        assert [axes.get_ylabel() for axes in figure.axes].count("step") == scales


@pytest.mark.parametrize(("ranks", "lanes", "steps"), [(1, 1, 1), (2, 1, 1), (8, 7, 7), (64, 1, 63), (300, 1, 2)])
def test_sizes_stay_bounded(ranks: int, lanes: int, steps: int) -> None:
    figure = draw_timelines([regular(ranks, lanes, steps)], "AllGather")
    assert figure.get_figheight() < 9
    assert is_png(render(figure, "png"))


def test_many_bars_become_an_image_inside_the_svg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "_MOST_VECTORS", 100)
    few, many = (render(draw_timelines([regular(4, 5, steps)], ""), "svg") for steps in (5, 6))
    assert b"<image" not in few[: few.index(b"axes_2")]
    assert b"<image" in many[: many.index(b"axes_2")]


def test_too_many_transfers_are_merged_into_busy_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "MOST_BARS", 100)
    timeline = regular(4, 7, 5)
    (panel,) = panels(figure := draw_timelines([timeline], "AllGather"))
    assert panel.get_title(loc="left") == "predicted ring on full-mesh:4, 140 transfers merged"
    one_lane = [event for event in timeline.events if (event.rank, event.lane) == (0, 0)]
    assert spans(panel) == [(float(event.start_s), float(event.end_s)) for event in one_lane] * 4
    assert is_png(render(figure, "png"))


def computing(timeline: Timeline) -> Timeline:
    """The same with a kernel call of every rank in every step, as long as the step."""
    step_s = Fraction(1, 1000)
    calls = [
        Event(rank, COMPUTE_LANE, step, ATTEND, rank, rank, 0, step * step_s, (step + 1) * step_s, "compute", "", 1)
        for step in range(1 + max((event.step for event in timeline.events), default=0))
        for rank in range(timeline.world_size)
    ]
    return replace(timeline, events=(*timeline.events, *calls))


def extents(collection: PolyCollection) -> list[tuple[float, float, float, float]]:
    """Start, end, top and bottom of each rectangle."""
    corners = [np.asarray(path.vertices) for path in collection.get_paths()]
    return [(c[:, 0].min(), c[:, 0].max(), c[:, 1].min(), c[:, 1].max()) for c in corners]


@pytest.mark.parametrize(("lanes", "share"), [(1, 1 / 2), (2, 1 / 3), (7, 1 / 4)])
def test_kernel_calls_have_a_row_of_their_own_on_top(lanes: int, share: float) -> None:
    timeline = computing(regular(3, lanes, 4))
    (panel,) = panels(draw_timelines([timeline], "attention"))
    _, calls, transfers = [found for found in panel.collections if isinstance(found, PolyCollection)]
    for collection, is_call in ((calls, True), (transfers, False)):
        events = [event for event in timeline.events if (event.kind == ATTEND) == is_call]
        assert len(events) == len(collection.get_paths())
        for event, (start, end, top, bottom) in zip(events, extents(collection), strict=True):
            assert (start, end) == (float(event.start_s), float(event.end_s))
            first, height = (0.0, share) if is_call else (share + event.lane * (1 - share) / lanes, (1 - share) / lanes)
            assert top == pytest.approx(event.rank + 0.84 * (first - 0.5))
            assert bottom - top == pytest.approx(0.84 * height)
        steps = collection.get_array()
        assert steps is not None
        assert steps.tolist() == [event.step for event in events]
    assert not set(map(tuple, calls.get_cmap()(range(4)))) & set(map(tuple, transfers.get_cmap()(range(4))))


def test_headings_and_scales_name_what_is_shown() -> None:
    alone = computing(Timeline("predicted", "tasp", "full-mesh:1", 1, ()))
    figure = draw_timelines([computing(regular(2, 3, 2)), regular(2, 1, 2), alone], "attention")
    assert [panel.get_title(loc="left") for panel in panels(figure)] == [
        "predicted ring on full-mesh:2, 3 lanes per rank, kernel calls on top",
        "predicted ring on full-mesh:2",
        "predicted tasp on full-mesh:1, kernel calls",
    ]
    scales = [axes.get_ylabel() for axes in figure.axes if axes.get_ylabel() != "rank"]
    assert scales == ["step of a transfer", "step of a kernel call"]
    assert is_png(render(figure, "png"))


def test_too_many_calls_are_merged_apart_from_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "MOST_BARS", 100)
    timeline = computing(regular(2, 7, 8))
    (panel,) = panels(draw_timelines([timeline], "attention"))
    assert panel.get_title(loc="left").endswith(", 112 transfers and 16 kernel calls merged, kernel calls on top")
    _, calls, transfers = [found for found in panel.collections if isinstance(found, PolyCollection)]
    assert [extent[:2] for extent in extents(calls)] == [(0.0, 0.008)] * 2
    assert len(extents(transfers)) == 2 * 8


def test_calls_of_both_passes_share_a_row_in_colours_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = computing(regular(2, 3, 4))
    later = [
        event._replace(
            kind=DIFFERENTIATE if event.kind == ATTEND else event.kind,
            step=event.step + 4,
            start_s=event.start_s + forward.time_s,
            end_s=event.end_s + forward.time_s,
        )
        for event in forward.events
    ]
    both = replace(forward, events=(*forward.events, *later))
    (panel,) = panels(figure := draw_timelines([both], "attention"))
    _, attend, differentiate, transfers = [found for found in panel.collections if isinstance(found, PolyCollection)]
    assert [extent[2:] for extent in extents(attend)] == [extent[2:] for extent in extents(differentiate)]
    assert max(extent[1] for extent in extents(attend)) == min(extent[0] for extent in extents(differentiate))
    shown = [set(map(tuple, each.get_facecolor())) for each in _drawn(figure, attend, differentiate, transfers)]
    assert [len(colors) for colors in shown] == [4, 4, 8], "a shade for every step of each kind"
    assert not any(one & other for one, other in itertools.combinations(shown, 2))
    scales = [axes.get_ylabel() for axes in figure.axes if axes.get_ylabel() != "rank"]
    assert scales == ["step of a transfer", "step of a kernel call", "step of a backward kernel call"]
    monkeypatch.setattr(pictures, "MOST_BARS", 1)
    (panel,) = panels(draw_timelines([both], "attention"))
    merged = [tuple(found.get_facecolor()[0]) for found in panel.collections if isinstance(found, PolyCollection)]
    assert len(set(merged)) == len(merged) == 4


def _drawn(figure: Figure, *collections: PolyCollection) -> tuple[PolyCollection, ...]:
    """The same, with the colours that come of drawing them."""
    render(figure, "png")
    return collections


INTERVALS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 5)).map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=12
)


@given(INTERVALS, st.integers(0, 2))
def test_the_union_covers_what_is_busy_and_closes_narrow_gaps(intervals: list[tuple[int, int]], gap: int) -> None:
    union = pictures._union(np.array(intervals, dtype=np.float64).reshape(-1, 2), gap)
    assert all(after[0] - before[1] > gap for before, after in itertools.pairwise(union))
    for start, end in intervals:
        assert any(low <= start and end <= high for low, high in union)
    inside = [sorted(pair for pair in intervals if low <= pair[0] <= high) for low, high in union]
    for (low, high), covered in zip(union, inside, strict=True):
        assert (low, high) == (covered[0][0], max(end for _, end in covered))
        reached = itertools.accumulate((end for _, end in covered), max)
        assert all(start - end <= gap for (start, _), end in zip(covered[1:], reached, strict=False))


# --------------------------------------------------------------------------------------------------- comparison


def test_bars_whiskers_and_bounds() -> None:
    rows = [
        ComparisonBar("full-mesh:8, ring", Fraction(168, 100), 1.75, 0.05, 0.24),
        ComparisonBar("full-mesh:8, multi-ring", 0.24, 0.257, 0.02, 0.24),
    ]
    (axes,) = draw_comparison(rows, "AllGather").axes
    widths = [patch.get_width() for patch in axes.patches if isinstance(patch, Rectangle)]
    assert widths == [1.68, 0.24, 1.75, 0.257]
    whiskers, bounds = [
        [np.asarray(path.vertices)[:, 0].tolist() for lines in group for path in lines.get_paths()]
        for group in (lines_of(axes)[:2], lines_of(axes)[2:])
    ]
    assert whiskers == [pytest.approx([1.70, 1.80]), pytest.approx([0.237, 0.277])]
    assert bounds == [[0.24, 0.24], [0.24, 0.24]]
    assert sorted(writings(axes)) == ["1.68 s", "1.75 s", "240 ms", "257 ms"]
    assert [label.get_text() for label in axes.get_yticklabels()] == [row.label for row in rows]
    assert axes.get_xscale() == "linear"
    assert axes.get_xlabel() == "time (s)"


@pytest.mark.parametrize(("longest_s", "scale"), [(20.0, "linear"), (20.1, "log"), (1e6, "log")])
def test_a_wide_range_gets_a_logarithmic_axis(longest_s: float, scale: str) -> None:
    (axes,) = draw_comparison([ComparisonBar("a", 1.0), ComparisonBar("b", longest_s)], "").axes
    assert axes.get_xscale() == scale
    assert axes.get_xlim()[0] < 1.0
    assert axes.get_xlim()[1] > longest_s


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [ComparisonBar("nothing", None)],
        [ComparisonBar("zero", 0, 0, 0, 0)],
        [ComparisonBar("zero and more", 0, 1e-6, 1e-3, 1.0)],
        [ComparisonBar("only measured", None, 2.0, 5.0)],
        [ComparisonBar("only a bound", None, None, None, 1e-9), ComparisonBar("long " * 30, 5)],
        [ComparisonBar(f"row {index}", 10.0**index) for index in range(-9, 4)],
    ],
)
def test_whatever_is_unknown_or_zero_can_be_drawn(rows: list[ComparisonBar]) -> None:
    figure = draw_comparison(rows, "AllGather")
    assert is_png(render(figure, "png"))
    ElementTree.fromstring(render(figure, "svg"))
