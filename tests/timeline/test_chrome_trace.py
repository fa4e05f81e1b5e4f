"""A trace holds every event of its timelines once, at its time, on tracks where nothing overlaps."""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from fractions import Fraction
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tasp_lab.core.units import Number
from tasp_lab.timeline.chrome_trace import chrome_trace
from tasp_lab.timeline.events import ATTEND, COMPUTE_LANE, DIFFERENTIATE, SEND, Event, Timeline

Record = dict[str, Any]

TIMES: st.SearchStrategy[Number] = st.one_of(
    st.fractions(0, 10, max_denominator=10**10), st.floats(0, 10), st.integers(0, 20).map(lambda n: Fraction(n, 10**9))
)


@st.composite
def drawn_events(draw: st.DrawFn) -> Event:
    start_s, end_s = sorted([draw(TIMES), draw(TIMES)])
    small = st.integers(0, 2)
    names = st.sampled_from(["", "link 0->1", "latency", 'ü "quoted"\n'])
    return Event(
        draw(small), draw(small), draw(small), "send", draw(small), draw(small), draw(st.integers(0, 2**60)),
        start_s, end_s, draw(names), draw(names),
    )  # fmt: skip


@st.composite
def drawn_calls(draw: st.DrawFn) -> Event:
    start_s, end_s = sorted([draw(TIMES), draw(TIMES)])
    rank, small = draw(st.integers(0, 2)), st.integers(0, 2)
    waited_for = draw(st.sampled_from(["", "block", "buffer", "compute"]))
    kind = draw(st.sampled_from([ATTEND, DIFFERENTIATE]))
    return Event(
        rank, COMPUTE_LANE, draw(small), kind, rank, draw(small), 0, start_s, end_s, "compute", waited_for,
        draw(st.integers(0, 2**60)),
    )  # fmt: skip


TIMELINES = st.builds(
    Timeline,
    st.sampled_from(["predicted", "measured"]),
    st.sampled_from(["ring", "multi-ring"]),
    st.just("full-mesh:3"),
    st.just(3),
    st.lists(drawn_events() | drawn_calls(), max_size=12).map(tuple),
)


def records(*timelines: Timeline) -> list[Record]:
    trace = json.loads(chrome_trace(timelines))
    assert trace["displayTimeUnit"] == "ms"
    found: list[Record] = trace["traceEvents"]
    return found


def complete(found: list[Record]) -> list[Record]:
    return [record for record in found if record["ph"] == "X"]


def names(found: list[Record], what: str) -> dict[tuple[int, int], str]:
    return {(r["pid"], r.get("tid", 0)): r["args"]["name"] for r in found if r["name"] == what}


def start_ns(record: Record) -> int:
    return round(float(record["ts"]) * 1000)


def end_ns(record: Record) -> int:
    return start_ns(record) + round(float(record["dur"]) * 1000)


def track_name(event: Event) -> str:
    return f"rank {event.rank} " + (f"lane {event.lane}" if event.kind == SEND else "compute")
    return f"rank {event.rank} " + ("compute" if event.kind == ATTEND else f"lane {event.lane}")


def event(start_s: Number, end_s: Number, rank: int = 0, lane: int = 0) -> Event:
    return Event(rank, lane, 4, "send", 1, 7, 1024, start_s, end_s, "link 0->1", "lane")


def timeline(*events: Event) -> Timeline:
    return Timeline("predicted", "ring", "full-mesh:8", 8, events)


@given(st.lists(TIMELINES, max_size=3))
def test_events_are_preserved_one_to_one(timelines: list[Timeline]) -> None:
    found = records(*timelines)
    tracks = names(found, "thread_name")
    seen = Counter(
        (r["pid"], tracks[r["pid"], r["tid"]].split(" (")[0], start_ns(r), end_ns(r), r["cat"], *r["args"].values())
        for r in complete(found)
    )
    expected = Counter(
        (
            pid, track_name(e), round(e.start_s * 10**9), round(e.end_s * 10**9), e.kind,
            e.step, e.block,
            *((", ".join(map(str, e.blocks)), e.peer, e.bytes) if e.kind == SEND else (e.flops,)),
            e.bound_by, e.waited_for,
        )
        for pid, timeline in enumerate(timelines, 1)
        for e in timeline.events
    )  # fmt: skip
    assert seen == expected


@given(st.lists(TIMELINES, max_size=3))
def test_nothing_overlaps_on_a_track(timelines: list[Timeline]) -> None:
    tracks: defaultdict[tuple[int, int], list[Record]] = defaultdict(list)
    for record in complete(records(*timelines)):
        tracks[record["pid"], record["tid"]].append(record)
    for track in tracks.values():
        assert all(end_ns(before) <= start_ns(after) for before, after in itertools.pairwise(track))


@given(TIMELINES)
def test_no_more_tracks_than_events_at_one_time(drawn: Timeline) -> None:
    found = records(drawn)
    tracks = Counter(name.split(" (")[0] for name in names(found, "thread_name").values())
    lanes: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for e in drawn.events:
        lanes[track_name(e)].append((round(e.start_s * 10**9), round(e.end_s * 10**9)))
    for lane, spans in lanes.items():
        # Events without duration fit one after the other on one track, at the same time too.
        most = max(sum(a <= t < b for a, b in spans) + any(a == t == b for a, b in spans) for t, _ in spans)
        assert tracks[lane] <= most
    assert tracks.keys() == lanes.keys()


@given(st.lists(TIMELINES, max_size=2))
def test_the_same_timelines_give_the_same_bytes(timelines: list[Timeline]) -> None:
    assert chrome_trace(timelines) == chrome_trace(timelines)


@given(st.lists(TIMELINES, max_size=3))
def test_every_process_and_track_has_one_name_and_place(timelines: list[Timeline]) -> None:
    found = records(*timelines)
    expected = {(pid, 0): f"{t.origin} {t.schedule} on {t.topology}" for pid, t in enumerate(timelines, 1)}
    assert names(found, "process_name") == expected
    used = {(r["pid"], r["tid"]) for r in complete(found)}
    assert names(found, "thread_name").keys() == used
    assert {(r["pid"], r["args"]["sort_index"]) for r in found if r["name"] == "process_sort_index"} == {
        (pid, pid) for pid in range(1, len(timelines) + 1)
    }
    assert [(r["pid"], r["args"]["sort_index"]) for r in found if r["name"] == "thread_sort_index"] == sorted(used)


def test_times_are_in_microseconds() -> None:
    (record,) = complete(records(timeline(event(Fraction(1, 3), 0.5))))
    assert (record["ts"], record["dur"]) == (333333.333, 166666.667)
    assert record["name"] == "step 4: block 7 to rank 1"
    assert record["args"] == {
        "step": 4, "block": 7, "blocks": "7", "peer": 1, "bytes": 1024, "bound_by": "link 0->1", "waited_for": "lane",
    }  # fmt: skip


def test_kernel_calls_have_a_track_of_their_own_above_the_lanes() -> None:
    call = Event(0, COMPUTE_LANE, 4, ATTEND, 0, 7, 0, 1, 3, "compute", "block", 4096)
    found = records(timeline(event(0, 2), call))
    assert list(names(found, "thread_name").values()) == ["rank 0 compute", "rank 0 lane 0"]
    record = complete(found)[0]
    assert (record["name"], record["cat"]) == ("step 4: attend to block 7", "attend")
    assert record["args"] == {"step": 4, "block": 7, "flops": 4096, "bound_by": "compute", "waited_for": "block"}


def test_calls_of_backward_passes_say_so() -> None:
    call = Event(0, COMPUTE_LANE, 4, DIFFERENTIATE, 0, 7, 0, 1, 3, "compute", "buffer", 4096)
    (record,) = complete(records(timeline(call)))
    assert (record["name"], record["cat"]) == ("step 4: gradients of block 7", "differentiate")


def test_calls_of_other_kernels_have_its_name() -> None:
    (record,) = complete(records(timeline(Event(0, COMPUTE_LANE, 4, "fold", 0, 7, 0, 1, 3, "compute", "block", 4096))))
    assert (record["name"], record["cat"]) == ("step 4: fold of block 7", "fold")


def test_tracks_are_named_by_rank_and_lane_in_numeric_order() -> None:
    found = records(timeline(event(0, 1, 10, 0), event(0, 1, 2, 10), event(0, 1, 2, 9)))
    assert list(names(found, "thread_name").values()) == ["rank 2 lane 9", "rank 2 lane 10", "rank 10 lane 0"]


def test_an_early_launch_goes_to_a_further_track() -> None:
    found = records(timeline(event(0, 2), event(1, 3), event(2, 4)))
    tracks = names(found, "thread_name")
    assert [(tracks[r["pid"], r["tid"]], r["ts"]) for r in complete(found)] == [
        ("rank 0 lane 0", 0.0),
        ("rank 0 lane 0", 2e6),
        ("rank 0 lane 0 (b)", 1e6),
    ]


def test_one_nanosecond_is_an_overlap() -> None:
    found = records(timeline(event(0, Fraction(2, 10**9)), event(Fraction(1, 10**9), 1)))
    assert [(r["tid"], r["ts"], r["dur"]) for r in complete(found)] == [(1, 0.0, 0.002), (2, 0.001, 999999.999)]


def test_adjacent_thirds_share_a_track_after_rounding() -> None:
    thirds = [event(Fraction(n, 3 * 10**6), Fraction(n + 1, 3 * 10**6)) for n in range(300)]
    assert len(names(records(timeline(*thirds)), "thread_name")) == 1


def test_no_timelines_and_no_events() -> None:
    assert records() == []
    assert complete(records(timeline())) == []
