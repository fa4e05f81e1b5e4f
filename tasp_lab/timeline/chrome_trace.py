"""Timelines as a Chrome trace, a JSON file for Perfetto (https://ui.perfetto.dev) and chrome://tracing.

The format is Google's "Trace Event Format". Each timeline is a *process*. Each lane of each rank is a *track* of it
(`rank 3 lane 2`), and so are the kernel calls of each rank (`rank 3 compute`). Each transfer and each call is a
*complete event* (``"ph": "X"``). Viewers drop overlapping events of a track, so a transfer that starts before the end
of the previous one on its lane goes to an additional track of that lane (`rank 3 lane 2 (b)`).

| field | meaning |
|---|---|
| `pid`, `tid` | timeline and track, both numbered from 1 in display order |
| `ts`, `dur` | start and duration in microseconds, rounded to whole nanoseconds, the resolution of viewers |
| `name`, `cat` | a description, and the kind of event: `send`, or the name of a kernel |
| `args` | as in `timeline.Event`: `step`, `block`, `peer` and `bytes` or `flops`, `bound_by`, `waited_for` |
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from tasp_lab.core.units import Number
from tasp_lab.timeline.events import ATTEND, COMPUTE_LANE, DIFFERENTIATE, SEND, Event, Timeline

Record = dict[str, Any]
"""One entry of `traceEvents`, a JSON object."""


def chrome_trace(timelines: Sequence[Timeline]) -> bytes:
    """The JSON text of a trace of `timelines`, shown one above the other, with one record per line.

    The result is deterministic.

    >>> print(chrome_trace([Timeline("predicted", "ring", "full-mesh:8", 8, ())]).decode())
    {"displayTimeUnit": "ms", "traceEvents": [
    {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "predicted ring on full-mesh:8"}},
    {"ph": "M", "name": "process_sort_index", "pid": 1, "args": {"sort_index": 1}}
    ]}
    <BLANKLINE>
    """
    records = (record for pid, timeline in enumerate(timelines, 1) for record in _process(pid, timeline))
    # JSON has no NaN, and viewers refuse a file that has one
    lines = ",\n".join(json.dumps(record, allow_nan=False) for record in records)
    return f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n'.encode()


def _process(pid: int, timeline: Timeline) -> Iterator[Record]:
    name = f"{timeline.origin} {timeline.schedule} on {timeline.topology}"
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    lanes: defaultdict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in timeline.events:
        lanes[event.rank, event.lane].append(event)
    tracks = (
        (f"rank {rank} {'compute' if lane == COMPUTE_LANE else f'lane {lane}'}{_track_suffix(index)}", track)
        for (rank, lane), events in sorted(lanes.items())
        for index, track in enumerate(_without_overlap(events))
    )
    for tid, (name, track) in enumerate(tracks, 1):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
        for event in track:
            yield _complete_event(event, pid, tid)


def _track_suffix(index: int) -> str:
    """The suffix that distinguishes the tracks of one lane.

    >>> [_track_suffix(index) for index in (0, 1, 25, 26)]
    ['', ' (b)', ' (z)', ' (27)']
    """
    if index == 0:
        return ""
    return f" ({chr(ord('a') + index)})" if index < 26 else f" ({index + 1})"


def _without_overlap(events: list[Event]) -> list[list[Event]]:
    """Partition the events into the fewest tracks: ordered by start, each goes to the first free track.

    This greedy interval partitioning is optimal: it needs as many tracks as events overlap at one time (Kleinberg and
    Tardos, Algorithm Design, 2005, section 4.1).
    """
    tracks: list[list[Event]] = []
    for event in sorted(events, key=lambda event: (_whole_ns(event.start_s), _whole_ns(event.end_s))):
        start_ns = _whole_ns(event.start_s)
        track = next((track for track in tracks if _whole_ns(track[-1].end_s) <= start_ns), None)
        if track is None:
            tracks.append(track := [])
        track.append(event)
    return tracks


_CALLS = {ATTEND: "attend to", DIFFERENTIATE: "gradients of"}
"""Descriptions of calls; those of other kernels begin with the name of the kernel."""


def _complete_event(event: Event, pid: int, tid: int) -> Record:
    start_ns, end_ns = _whole_ns(event.start_s), _whole_ns(event.end_s)
    blocks = ", ".join(map(str, event.blocks))
    if event.kind == SEND:
        what = f"block{'s' * bool(event.others)} {blocks} to rank {event.peer}"
        of_kind: Record = {"blocks": blocks, "peer": event.peer, "bytes": event.bytes}
    else:
        what = f"{_CALLS.get(event.kind, f'{event.kind} of')} block {event.block}"
        of_kind = {"flops": event.flops}
    waits = {"bound_by": event.bound_by, "waited_for": event.waited_for}
    return {
        "ph": "X",
        "name": f"step {event.step}: {what}",
        "cat": event.kind,
        "pid": pid,
        "tid": tid,
        "ts": start_ns / 1000,
        "dur": (end_ns - start_ns) / 1000,
        "args": {"step": event.step, "block": event.block, **of_kind, **waits},
    }


def _whole_ns(time_s: Number) -> int:
    """Rounding is monotonic, so events that do not overlap before it do not overlap after it."""
    return round(time_s * 10**9)
