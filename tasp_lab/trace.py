"""Timelines as a Chrome trace: a JSON file that Perfetto (https://ui.perfetto.dev) and chrome://tracing open.

The format is Google's "Trace Event Format". Each timeline is a *process*, each lane of each rank a *track* in it
(`rank 3 lane 2`), and so are the kernel calls of each rank (`rank 3 compute`); each transfer and each call is a
*complete event* (``"ph": "X"``). Viewers want the events of a track not to overlap and drop those that do, so a
transfer that starts before the one before it on its lane has ended goes to a further track of that lane
(`rank 3 lane 2 (b)`).

| field | meaning |
|---|---|
| `pid`, `tid` | timeline and track, both numbered from 1 in the order they are shown |
| `ts`, `dur` | start and duration in microseconds, rounded to the whole nanoseconds in which viewers count |
| `name`, `cat` | what is sent or computed, and the kind of event: `send`, `attend` or, backward, `differentiate` |
| `args` | as in `timeline.Event`: `step`, `block`, `peer` and `bytes` or `flops`, `bound_by`, `waited_for` |
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from tasp_lab.quantities import Number
from tasp_lab.timeline import ATTEND, COMPUTE_LANE, DIFFERENTIATE, SEND, Event, Timeline

Record = dict[str, Any]
"""One entry of `traceEvents`: whatever JSON can say."""


def chrome_trace(timelines: Sequence[Timeline]) -> bytes:
    """The JSON text of a trace that shows `timelines` one above the other, one record per line.

    The same timelines give the same bytes.

    >>> print(chrome_trace([Timeline("predicted", "ring", "full-mesh:8", 8, ())]).decode())
    {"displayTimeUnit": "ms", "traceEvents": [
    {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "predicted ring on full-mesh:8"}},
    {"ph": "M", "name": "process_sort_index", "pid": 1, "args": {"sort_index": 1}}
    ]}
    <BLANKLINE>
    """
    records = (record for pid, timeline in enumerate(timelines, 1) for record in _process(pid, timeline))
    lines = ",\n".join(json.dumps(record, allow_nan=False) for record in records)
    return f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n'.encode()


def _process(pid: int, timeline: Timeline) -> Iterator[Record]:
    name = f"{timeline.origin} {timeline.schedule} on {timeline.topology}"
    yield _metadata("process_name", {"name": name}, pid)
    yield _metadata("process_sort_index", {"sort_index": pid}, pid)
    for tid, (name, events) in enumerate(_tracks(timeline), 1):
        yield _metadata("thread_name", {"name": name}, pid, tid)
        yield _metadata("thread_sort_index", {"sort_index": tid}, pid, tid)
        for event in events:
            yield _complete_event(event, pid, tid)


def _tracks(timeline: Timeline) -> Iterator[tuple[str, list[Event]]]:
    """The tracks of a timeline by rank and lane, each with its name and its events in the order of their start."""
    lanes: defaultdict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in timeline.events:
        lanes[event.rank, event.lane].append(event)
    for (rank, lane), events in sorted(lanes.items()):
        for index, track in enumerate(_without_overlap(events)):
            yield f"rank {rank} {_lane_name(lane)}{_track_suffix(index)}", track


def _lane_name(lane: int) -> str:
    return "compute" if lane == COMPUTE_LANE else f"lane {lane}"


def _track_suffix(index: int) -> str:
    """What tells the tracks of one lane apart.

    >>> [_track_suffix(index) for index in (0, 1, 25, 26)]
    ['', ' (b)', ' (z)', ' (27)']
    """
    if index == 0:
        return ""
    return f" ({chr(ord('a') + index)})" if index < 26 else f" ({index + 1})"


def _without_overlap(events: list[Event]) -> list[list[Event]]:
    """Deal the events to as few tracks as possible: in the order of their start, each to the first that is free.

    That this greedy colouring of intervals needs no more tracks than events overlap at one time is a classic
    (Kleinberg and Tardos, Algorithm Design, 2005, section 4.1).
    """
    tracks: list[list[Event]] = []
    for event in sorted(events, key=lambda event: (_whole_ns(event.start_s), _whole_ns(event.end_s))):
        start_ns = _whole_ns(event.start_s)
        free = (track for track in tracks if _whole_ns(track[-1].end_s) <= start_ns)
        track = next(free, None)
        if track is None:
            tracks.append([event])
        else:
            track.append(event)
    return tracks


def _complete_event(event: Event, pid: int, tid: int) -> Record:
    start_ns, end_ns = _whole_ns(event.start_s), _whole_ns(event.end_s)
    what, args = _describe(event)
    return {
        "ph": "X",
        "name": f"step {event.step}: {what}",
        "cat": event.kind,
        "pid": pid,
        "tid": tid,
        "ts": start_ns / 1000,
        "dur": (end_ns - start_ns) / 1000,
        "args": {
            "step": event.step,
            "block": event.block,
            **args,
            "bound_by": event.bound_by,
            "waited_for": event.waited_for,
        },
    }


_CALLS = {ATTEND: "attend to", DIFFERENTIATE: "gradients of"}


def _describe(event: Event) -> tuple[str, Record]:
    """What happens in words, and the arguments that only this kind of event has."""
    if event.kind != SEND:
        return f"{_CALLS[event.kind]} block {event.block}", {"flops": event.flops}
    return f"block {event.block} to rank {event.peer}", {"peer": event.peer, "bytes": event.bytes}


def _metadata(name: str, args: Record, pid: int, tid: int | None = None) -> Record:
    place = {"pid": pid} if tid is None else {"pid": pid, "tid": tid}
    return {"ph": "M", "name": name, **place, "args": args}


def _whole_ns(time_s: Number) -> int:
    """Rounding keeps the order of times, so events that do not overlap before it do not overlap after it."""
    return round(time_s * 10**9)
