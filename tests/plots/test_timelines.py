"""Timelines show every event once at its place, on labelled axes, in pictures of bounded size."""

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
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from sim.simulate import simulate
from tasp_lab.core.errors import OutputError
from tasp_lab.core.files import PICTURE_SUFFIXES
from tasp_lab.machines.machine import ComputeRate, Machine
from tasp_lab.plots import timelines as pictures
from tasp_lab.plots.timelines import draw_timelines, render
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import linear_schedules
from tasp_lab.timeline.events import ATTEND, COMPUTE_LANE, DIFFERENTIATE, Event, Timeline
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload


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


def computing(timeline: Timeline, kind: str = ATTEND) -> Timeline:
    """The same with a kernel call of every rank in every step, as long as the step."""
    step_s = Fraction(1, 1000)
    calls = [
        Event(rank, COMPUTE_LANE, step, kind, rank, rank, 0, step * step_s, (step + 1) * step_s, "compute", "", 1)
        for step in range(1 + max((event.step for event in timeline.events), default=0))
        for rank in range(timeline.world_size)
    ]
    return replace(timeline, events=(*timeline.events, *calls))


def panels(figure: Figure) -> list[Axes]:
    return [axes for axes in figure.axes if axes.get_ylabel() == "rank"]


def bands(panel: Axes) -> list[PolyCollection]:
    """What stands for events; the collection before is the idle background."""
    return [collection for collection in panel.collections if isinstance(collection, PolyCollection)][1:]


def extents(collection: PolyCollection) -> list[tuple[float, float, float, float]]:
    """Start, end, top and bottom of each rectangle."""
    corners = [np.asarray(path.vertices) for path in collection.get_paths()]
    return [(c[:, 0].min(), c[:, 0].max(), c[:, 1].min(), c[:, 1].max()) for c in corners]


def pixels(figure: Figure) -> tuple[int, int]:
    width, height = struct.unpack(">II", render(figure, "png")[16:24])
    return int(width), int(height)


class TestFiles:
    def test_each_format_is_what_its_suffix_says(self) -> None:
        figure = draw_timelines([regular(4, 2, 3)], "AllGather")
        png, svg, pdf = (render(figure, suffix) for suffix in PICTURE_SUFFIXES)
        assert png.startswith(b"\x89PNG\r\n\x1a\n")
        assert png.endswith(b"IEND\xaeB`\x82")
        assert ElementTree.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
        assert pdf.startswith(b"%PDF-")
        assert pdf.rstrip().endswith(b"%%EOF")
        assert render(figure, "PNG")

    @pytest.mark.parametrize("suffix", ["", ".jpg", "png "])
    def test_other_formats_are_refused(self, suffix: str) -> None:
        with pytest.raises(OutputError, match=f"^cannot draw a picture as '{suffix}': expected .png, .svg, .pdf$"):
            render(draw_timelines([], "nothing"), suffix)

    @pytest.mark.parametrize("suffix", PICTURE_SUFFIXES)
    def test_the_same_timelines_give_the_same_bytes(self, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
        first = render(draw_timelines([regular(4, 2, 3)], "AllGather"), suffix)
        monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")  # a day long ago, for whatever writes the date
        assert render(draw_timelines([regular(4, 2, 3)], "AllGather"), suffix) == first

    def test_nothing_global_is_set(self) -> None:
        before = copy.deepcopy(dict(matplotlib.rcParams))
        render(draw_timelines([regular(2, 1, 2)], "AllGather"), "svg")
        assert dict(matplotlib.rcParams) == before

    @pytest.mark.parametrize("title", ["", "$x^", "\\frac{", "<&>", "two\nlines", "long " * 60])
    def test_any_title_is_taken_as_it_is(self, title: str) -> None:
        timeline = Timeline("measured", title, title, 2, regular(2, 1, 2).events)
        ElementTree.fromstring(render(draw_timelines([timeline], title), "svg"))

    def test_the_heading_has_the_interval(self) -> None:
        timelines = [regular(2, 1, 2), regular(2, 1, 2)]
        headings = [
            panel.get_title(loc="left") for panel in panels(draw_timelines(timelines, "AllGather", ["1 to 2 ms", ""]))
        ]
        assert ["interval: 1 to 2 ms" in heading for heading in headings] == [True, False]

    def test_many_bars_become_an_image_inside_the_svg(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pictures, "_MAX_VECTOR_BARS", 100)
        few, many = (render(draw_timelines([regular(4, 5, steps)], ""), "svg") for steps in (5, 6))
        assert b"<image" not in few[: few.index(b"axes_2")]
        assert b"<image" in many[: many.index(b"axes_2")]


class TestEvents:
    @settings(max_examples=15, deadline=None)
    @given(st.integers(1, 5), st.integers(0, 7), st.integers(1, 4), st.booleans())
    def test_every_event_is_drawn_once_at_its_time_in_its_lane(
        self, ranks: int, lanes: int, steps: int, calls: bool
    ) -> None:
        timeline = regular(ranks, lanes, steps)
        timeline = computing(timeline) if calls else timeline
        (panel,) = panels(draw_timelines([timeline], "AllGather"))
        drawn: list[tuple[int, float, float, int]] = []
        for band in bands(panel) if timeline.events else []:
            rectangles = extents(band)
            steps = np.asarray(band.get_array()).tolist()
            drawn += [(round((r[2] + r[3]) / 2), *r[:2], step) for r, step in zip(rectangles, steps, strict=True)]
        expected = [(each.rank, float(each.start_s), float(each.end_s), each.step) for each in timeline.events]
        assert sorted(drawn) == sorted(expected)
        boxes = sorted(extent for band in bands(panel) for extent in extents(band))
        assert all(0 <= start_s <= end_s <= panel.get_xlim()[1] for start_s, end_s, _, _ in boxes)
        assert all(-0.5 < top < bottom < ranks - 0.5 for _, _, top, bottom in boxes)
        for one, other in itertools.combinations(boxes, 2):
            apart_in_time = one[1] <= other[0] + 1e-9 or other[1] <= one[0] + 1e-9
            assert apart_in_time or one[3] <= other[2] + 1e-9 or other[3] <= one[2] + 1e-9

    def test_passes_have_colours_apart(self) -> None:
        both = computing(computing(regular(2, 3, 4)), DIFFERENTIATE)
        (panel,) = panels(figure := draw_timelines([both], "attention"))
        render(figure, "png")
        shown = [set(map(tuple, band.get_facecolor())) for band in bands(panel)]
        assert [len(colors) for colors in shown] == [4, 4, 4], "a shade for every step of each kind"
        assert not any(one & other for one, other in itertools.combinations(shown, 2))
        scales = [axes.get_xlabel() for axes in figure.axes if axes not in panels(figure)]
        assert scales == ["step of a transfer", "step of a kernel call", "step of a backward kernel call"]

    def test_kernels_of_any_name_have_the_colours_of_their_pass(self) -> None:
        """Those of linear attention, and forward those that are not known."""
        layer = Workload(sequence=64, mask="causal", kind="linear")
        passes = linear_schedules("all-scan", full_mesh(4), layer, None, AttentionOptions("both"))
        timelines = [simulate(schedule, Machine(full_mesh(4), compute=ComputeRate(1e9))) for schedule in passes]
        own = computing(regular(2, 3, 4), "a kernel of one's own")
        (panel, behind, last) = panels(figure := draw_timelines([*timelines, own], "attention"))
        calls = [bands(each)[0].get_array() for each in (panel, behind, last)]
        assert [len(each) for each in calls] == [sum(e.kind != "send" for e in t.events) for t in (*timelines, own)]
        scales = [axes.get_xlabel() for axes in figure.axes if axes not in panels(figure)]
        assert scales == ["step of a transfer", "step of a kernel call", "step of a backward kernel call"]

    def test_too_many_events_are_merged_into_busy_intervals(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pictures, "MAX_BARS", 100)
        timeline = computing(regular(4, 7, 5))
        (panel,) = panels(draw_timelines([timeline], "AllGather"))
        assert panel.get_title(loc="left") == (
            "predicted ring on full-mesh:4, 140 transfers and 20 kernel calls merged, kernel calls on top"
        )
        calls, transfers = bands(panel)
        one_lane = [event for event in timeline.events if (event.rank, event.lane) == (0, 0)]
        assert [extent[:2] for extent in extents(transfers)] == [
            (float(event.start_s), float(event.end_s)) for event in one_lane
        ] * 4
        assert [extent[:2] for extent in extents(calls)] == [(0.0, 0.005)] * 4

    INTERVALS = st.lists(
        st.tuples(st.integers(0, 30), st.integers(0, 5)).map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=12
    )

    @given(INTERVALS, st.integers(0, 2))
    def test_the_union_covers_what_is_busy_and_closes_narrow_gaps(
        self, intervals: list[tuple[int, int]], gap: int
    ) -> None:
        union = pictures.union(np.array(intervals, dtype=np.float64).reshape(-1, 2), gap)
        assert all(after[0] - before[1] > gap for before, after in itertools.pairwise(union))
        for start, end in intervals:
            assert any(low <= start and end <= high for low, high in union)
        inside = [sorted(pair for pair in intervals if low <= pair[0] <= high) for low, high in union]
        for (low, high), covered in zip(union, inside, strict=True):
            assert (low, high) == (covered[0][0], max(end for _, end in covered))
            reached = itertools.accumulate((end for _, end in covered), max)
            assert all(start - end <= gap for (start, _), end in zip(covered[1:], reached, strict=False))


class TestAxes:
    def test_panels_of_similar_times_share_their_axis(self) -> None:
        figure = draw_timelines([regular(8, 1, 7), regular(4, 1, 4)], "AllGather")
        assert len({panel.get_xlim() for panel in panels(figure)}) == 1
        assert "Time axes differ" not in figure.get_suptitle()

    def test_panels_of_other_times_have_axes_of_their_own_and_say_so(self) -> None:
        timelines = [regular(8, 1, 7), regular(8, 7, 7, Fraction(1, 7000)), regular(4, 1, 3)]
        figure = draw_timelines(timelines, "AllGather")
        assert figure.get_suptitle() == "AllGather\nTime axes differ: each panel has its own."
        for panel, timeline in zip(panels(figure), timelines, strict=True):
            assert float(timeline.time_s) <= panel.get_xlim()[1] < 1.02 * float(timeline.time_s)
        assert [panel.get_xlabel() for panel in panels(figure)] == ["time (ms)", "time (us)", "time (ms)"]

    def test_headings_name_what_is_shown_and_how_long_it_took(self) -> None:
        alone = computing(Timeline("predicted", "tasp", "full-mesh:1", 1, ()))
        figure = draw_timelines([computing(regular(2, 3, 2)), regular(2, 1, 2), alone], "attention")
        assert [panel.get_title(loc="left") for panel in panels(figure)] == [
            "predicted ring on full-mesh:2, 3 lanes per rank, kernel calls on top",
            "predicted ring on full-mesh:2",
            "predicted tasp on full-mesh:1, kernel calls",
        ]
        assert [panel.get_title(loc="right") for panel in panels(figure)] == ["2 ms", "1.9 ms", "1 ms"]

    def test_timelines_without_events(self) -> None:
        empty = Timeline("predicted", "ring", "ring:1", 1, ())
        for timelines in ([], [empty], [empty, empty], [empty, regular(2, 1, 1)]):
            figure = draw_timelines(timelines, "AllGather")
            assert len(panels(figure)) == len(timelines)
            assert render(figure, "png")

    @pytest.mark.parametrize(
        ("shapes", "most"),
        [
            ([(2, 1, 1)], 250),
            ([(8, 1, 7)], 400),
            ([(8, 1, 7), (8, 7, 7)], 850),
            ([(8, 1, 7), (8, 7, 7)] * 2, 1600),
            ([(64, 1, 63)], 1000),
            ([(300, 2, 2)] * 4, 2100),
        ],
    )
    def test_few_lanes_are_few_pixels_and_many_are_not_too_many(
        self, shapes: list[tuple[int, int, int]], most: int
    ) -> None:
        width, height = pixels(draw_timelines([regular(*shape) for shape in shapes], "AllGather"))
        assert width == 1500
        assert height <= most

    def test_nothing_is_written_outside_the_picture(self) -> None:
        figure = draw_timelines([computing(regular(8, 7, 7)), regular(8, 1, 70)], "AllGather " * 20)
        render(figure, "png")
        inside = figure.bbox
        for text in (each for panel in panels(figure) for each in (panel.title, panel.xaxis.label, panel.yaxis.label)):
            box = text.get_window_extent()
            assert inside.x0 <= box.x0 <= box.x1 <= inside.x1
            assert inside.y0 <= box.y0 <= box.y1 <= inside.y1
