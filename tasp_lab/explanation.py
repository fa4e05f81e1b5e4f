"""What a predicted time is made of: the chain of transfers that ends last, and what each of its seconds went to."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence

from tasp_lab.quantities import Number
from tasp_lab.timeline import SEND, Event, Timeline
from tasp_lab.topology import Topology

WAITING = "waiting for "

LIBRARY_KINDS = {"channel": "channel rule", "ring": "ring rate"}


def critical_path(timeline: Timeline) -> list[tuple[str, Number]]:
    """What the time of a run went to, in seconds, along the chain of events that ends last; it adds up to the whole.

    An event's predecessor is the one that it waited for: the one that brought its block, else the one before it on its
    lane, of which the latency does not count, since the next begins when the last byte has left. Time that a room was
    waited for counts as that. Needs events that are explained.
    """
    path: list[tuple[str, Number]] = []
    index = _Index(timeline.events)
    event = timeline.events[-1] if timeline.events else None
    whole = True
    while event is not None:
        spent = [part for part in event.spent if not part[0].startswith(WAITING)]
        path += [part for part in spent if whole or part[0] != "latency"][::-1]
        room_s = [part for part in event.spent if part[0] == "waiting for room"]
        blocked = any(what == "waiting for block" for what, _ in event.spent) and not room_s
        path += room_s
        event, whole = (index.bringer(event), True) if blocked else (index.before(event), False)
    return path[::-1]


def kind_of(what: str, topology: Topology) -> str:
    """The kind of what time was spent on: ``port``, ``link``, ``NIC``, ``channel rule``, ``ring rate``, or itself.

    >>> from tasp_lab.builders import nodes
    >>> two = nodes(2, 2, "switch")
    >>> [kind_of(what, two) for what in ("0->node0", "network->3", "4 channels, Simple", "latency")]
    ['port', 'NIC', 'channel rule', 'latency']
    """
    source, arrow, destination = what.partition("->")
    if arrow:
        switches = {str(vertex) for vertex in topology.vertices[topology.world_size :]}
        ends = switches & {source, destination}
        if not ends:
            return "link"
        return "NIC" if any(end.startswith(("network", "rail", "spine")) for end in ends) else "port"
    if any(what == shared.name for shared in topology.shared):
        return "shared capacity"
    for word, kind in LIBRARY_KINDS.items():
        if word in what:
            return kind
    return what


class _Index:
    """Finds the events before an event."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._on_lane: dict[tuple[int, int], list[Event]] = defaultdict(list)
        self._brought: dict[tuple[int, int], list[Event]] = defaultdict(list)
        self._to: dict[int, list[Event]] = defaultdict(list)
        for event in sorted(events, key=lambda event: (event.start_s, event.step)):
            self._on_lane[event.rank, event.lane].append(event)
        for event in events:
            self._brought[event.peer, event.block].append(event)
            self._to[event.peer].append(event)

    def before(self, event: Event) -> Event | None:
        """The one before it on its lane."""
        lane = self._on_lane[event.rank, event.lane]
        at = next(place for place, other in enumerate(lane) if other is event)
        return lane[at - 1] if at else None

    def bringer(self, event: Event) -> Event | None:
        """The last one that brought its block until it began; for a call, which reads several, anything."""
        brought = self._brought[event.rank, event.block] if event.kind == SEND else []
        return _last_until(brought, event) or _last_until(self._to[event.rank], event)


def _last_until(events: Sequence[Event], event: Event) -> Event | None:
    """The last of events, which are in order of their ends, that had ended when another began."""
    slack_s = 1e-9 * float(event.start_s)
    at = bisect_right(events, float(event.start_s) + slack_s, key=lambda other: float(other.end_s))
    found = events[at - 1] if at else None
    return None if found is event else found
