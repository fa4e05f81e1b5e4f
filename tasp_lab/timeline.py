"""A timeline: what happened when, predicted or measured. Both engines return this one kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tasp_lab.quantities import Number


class Event(NamedTuple):
    """One transfer as its sender sees it.

    Times in seconds from the start of the run. `start_s` is when the transfer was posted, `end_s` when its last
    byte was at `peer`. `bound_by` names what took most of that time: a constraint of the topology, ``latency`` or
    ``launch`` (empty where it is not known, as in measurements). `waited_for` names what the transfer waited for
    before it could start: ``lane`` (the transfer before it) or ``block`` (its block's arrival); empty for nothing.
    """

    rank: int
    lane: int
    step: int
    kind: str
    peer: int
    block: int
    bytes: int
    start_s: Number
    end_s: Number
    bound_by: str
    waited_for: str


@dataclass(frozen=True)
class Timeline:
    """The events of one run, ordered by (end, start, rank, lane). `origin` is ``predicted`` or ``measured``."""

    origin: str
    schedule: str
    topology: str
    world_size: int
    events: tuple[Event, ...]

    @property
    def time_s(self) -> Number:
        """When the last event ended; 0 for a run without events."""
        return max((event.end_s for event in self.events), default=0)
