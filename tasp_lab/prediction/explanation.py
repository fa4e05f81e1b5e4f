"""Tables that explain the time of a schedule."""

from __future__ import annotations

from tasp_lab.core.tables import Part, Table
from tasp_lab.core.units import format_time
from tasp_lab.timeline.critical_path import time_by_kind
from tasp_lab.timeline.events import CONTENTION, SEND, Timeline
from tasp_lab.topology.graph import Topology

MIN_SHARE = 0.0005
"""Parts with a smaller share of the time are left out of the table."""


def explanation_parts(timeline: Timeline, topology: Topology) -> list[Part]:
    """The critical path of a schedule, whose shares add up to its time, and the constraints that bound its events.

    Events of several ranks and lanes overlap, so their shares are of the *busy time*, the sum of all durations.
    """
    whole_s = float(timeline.time_s) or 1.0
    parts = [(what, s) for what, s in time_by_kind(timeline, topology) if s / whole_s >= MIN_SHARE]
    path = [(what, format_time(s), f"{s / whole_s:.1%}") for what, s in parts]
    went = Table(f"where the time of {timeline.schedule} went", ("critical path", "time", "share of time"), path)
    total = sum(float(event.end_s - event.start_s) for event in timeline.events) or 1.0
    by_bound: dict[str, tuple[int, float]] = {}
    for event in timeline.events:
        count, seconds = by_bound.get(event.bound_by, (0, 0.0))
        by_bound[event.bound_by] = (count + 1, seconds + float(event.end_s - event.start_s))
    ranked = sorted(by_bound.items(), key=lambda item: -item[1][1])
    rows = [(name, str(count), format_time(s / count), f"{s / total:.1%}") for name, (count, s) in ranked[:20]]
    if len(ranked) > 20:
        rest = [values for _, values in ranked[20:]]
        count, seconds = sum(c for c, _ in rest), sum(s for _, s in rest)
        rows.append((f"{len(rest)} others", str(count), format_time(seconds / count), f"{seconds / total:.1%}"))
    counted = "transfers" if all(event.kind == SEND for event in timeline.events) else "events"
    columns = ("bound by", counted, "mean time", "share of busy time")
    return [
        went,
        Table(f"what bound {timeline.schedule}", columns, rows),
        f"busy time adds up all {counted} of all ranks, which overlap; the critical path alone sets the time",
        *_contention(timeline),
    ]


def _contention(timeline: Timeline) -> list[Part]:
    """What kernel calls lose to messages in flight; nothing without contention."""
    calls = [event for event in timeline.events if event.kind != SEND]
    lost = [float(seconds) for event in calls for what, seconds in event.spent if what == CONTENTION]
    if not lost:
        return []
    took_s = sum(float(event.end_s - event.start_s) for event in calls)
    return [
        f"contention: {len(lost)} of {len(calls)} kernel calls lose {format_time(sum(lost) / len(lost))} on average to "
        f"messages in flight, {sum(lost) / took_s:.1%} of the time of all calls"
    ]
