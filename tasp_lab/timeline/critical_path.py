"""The critical path of a timeline: the chain of events that ends last, and what its time was spent on."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from tasp_lab.core.units import Number
from tasp_lab.timeline.events import SEND, Event, Timeline
from tasp_lab.topology.graph import Topology

WAITING = "waiting for "

LIBRARY_KINDS = {"channel": "channel rule", "ring": "ring rate"}


def critical_path(timeline: Timeline) -> list[tuple[str, Number]]:
    """The time spent along the critical path, in seconds by cause; the sum is the total time.

    The predecessor of an event is the one that it waited for: the event that delivered its block, else the previous one
    on its lane. The latency of the latter does not count, since the next event starts when the last byte has left. Time
    spent waiting for a buffer is reported as such. A host never waits, so an event that waited for its host begins the
    path: all time before it is that of the host. Requires explained events.
    """
    on_lane: dict[tuple[int, int], list[Event]] = defaultdict(list)
    delivered: dict[tuple[int, int], list[Event]] = defaultdict(list)
    to: dict[int, list[Event]] = defaultdict(list)
    before: dict[int, Event | None] = {}
    number: dict[int, int] = {}  # what takes no time waits for nothing that comes later in this order
    for event in sorted(timeline.events, key=lambda event: (event.start_s, event.step)):
        number[id(event)] = len(number)
        lane = on_lane[event.rank, event.lane]
        before[id(event)] = lane[-1] if lane else None
        lane.append(event)
    for event in timeline.events:
        for block in event.blocks:
            delivered[event.peer, block].append(event)
        to[event.peer].append(event)

    def delivering(event: Event) -> Event | None:
        blocks = event.blocks if event.kind == SEND else ()
        last = [_last_until(delivered[event.rank, block], event, number) for block in blocks]
        latest = max(filter(None, last), key=lambda other: float(other.end_s), default=None)
        return latest or _last_until(to[event.rank], event, number)

    return follow(timeline.events[-1] if timeline.events else None, lambda event: before[id(event)], delivering)


def follow(
    last: Event | None, previous: Callable[[Event], Event | None], delivering: Callable[[Event], Event | None]
) -> list[tuple[str, Number]]:
    """The critical path to the event that ends last, see `critical_path`.

    `previous` gives the event before one on its lane; `delivering` the last event that delivered a block of it before
    it started, for a call the last delivery of any.
    """
    path: list[tuple[str, Number]] = []
    event = last
    with_latency = True
    while event is not None:
        spent = [part for part in event.spent if not part[0].startswith(WAITING)]
        path += [part for part in spent if with_latency or part[0] != "latency"][::-1]
        if event.waited_for == "host":
            path.append(("host", event.start_s))
            break
        buffer_s = [part for part in event.spent if part[0] == "waiting for buffer"]
        blocked = any(what == "waiting for block" for what, _ in event.spent) and not buffer_s
        path += buffer_s
        event, with_latency = (delivering(event), True) if blocked else (previous(event), False)
    return path[::-1]


def kind_of(what: str, topology: Topology) -> str:
    """The kind of a cause: ``port``, ``link``, ``NIC``, ``channel rule``, ``ring rate``, or the cause itself.

    >>> from tasp_lab.topology.builders import nodes
    >>> two = nodes(2, 2, "switch")
    >>> [kind_of(what, two) for what in ("0->node0", "network->3", "4 channels, Simple", "latency")]
    ['port', 'NIC', 'channel rule', 'latency']
    """
    source, arrow, destination = what.partition("->")
    if arrow:
        kinds = [topology.switch_kinds[end] for end in (source, destination) if end in topology.switch_kinds]
        if not kinds:
            return "link"
        return "NIC" if "network" in kinds else "port"
    if any(what == shared.name for shared in topology.shared):
        return "shared capacity"
    for word, kind in LIBRARY_KINDS.items():
        if word in what:
            return kind
    return what


def _last_until(events: Sequence[Event], event: Event, number: Mapping[int, int]) -> Event | None:
    """The last of the events, sorted by end time, that had ended when `event` started and has a lower number."""
    slack_s = 1e-9 * float(event.start_s)  # in floats it may start a rounding error before what it waited for ends
    at = bisect_right(events, float(event.start_s) + slack_s, key=lambda other: float(other.end_s))
    return next((events[n] for n in range(at - 1, -1, -1) if number[id(events[n])] < number[id(event)]), None)


def time_by_kind(timeline: Timeline, topology: Topology) -> list[tuple[str, float]]:
    """What the time of the critical path was spent on, by `kind_of`, in seconds, the longest first."""
    spent: dict[str, float] = {}
    for what, seconds in critical_path(timeline):
        kind = kind_of(what, topology)
        spent[kind] = spent.get(kind, 0.0) + float(seconds)
    return sorted(spent.items(), key=lambda item: -item[1])
