"""Timelines: the events of a run, predicted or measured, in one format for both engines and the executor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tasp_lab.core.errors import OutputError
from tasp_lab.core.lazy import from_above
from tasp_lab.core.tables import brief
from tasp_lab.core.units import Number, format_time

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEND, ATTEND, DIFFERENTIATE = "send", "attend", "differentiate"
"""Kinds of events: transfers, and kernel calls of attention and of its gradients."""

CONTENTION = "contention"
"""What kernel calls spend time on beside messages that take part of their GPU."""

COMPUTE_LANE = -1
"""The lane of kernel calls."""

MAX_TRANSFERS = 10_000_000
"""Maximum events of a timeline: about 4 GB of memory and minutes of simulation."""


class Event(NamedTuple):
    """One message as its sender sees it, or one kernel call. Times in seconds from the start of the run.

    A message is a transfer of one block or of several (`tasp_lab.schedule.messages`): `block` is the first of them,
    `others` are the rest, and `bytes` is the size of all.
    For a message (kind `SEND`), `start_s` is the time of posting and `end_s` the arrival of its last byte at `peer`.
    `bound_by` names what took most of that time: a constraint of the topology, ``latency`` or ``launch`` (empty if
    unknown, as in measurements). `waited_for` names the last condition for its start: ``lane`` (the previous message),
    ``block`` (the arrival of its last block), ``buffer`` (the release of the buffer at its receiver) or ``host`` (a
    host that had not issued it, see `tasp_lab.machines.host`); empty if it did not wait.

    A kernel call (kind `ATTEND` or `DIFFERENTIATE`) is on lane `COMPUTE_LANE`, its `peer` is its own rank, its `block`
    the first of its circulating blocks, and its `bytes` are 0; it is bound by ``compute``, and waits for a ``block``,
    a ``buffer`` or ``compute``, the previous call. `flops` are 0 for messages.

    `spent` is filled on request: what the time was spent on, and for how long, in seconds. It starts when the previous
    message of the lane had left (the previous call had ended) and lists ``waiting for block`` and ``waiting for
    buffer`` or ``host``, then ``launch``, each constraint while it was the bottleneck, and ``latency``; for a call
    ``compute`` or the parts of its kernel, its time alone, and `CONTENTION`, what it lost to messages in flight. What
    took no time is not listed.
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
    flops: int = 0
    spent: tuple[tuple[str, Number], ...] = ()
    others: tuple[int, ...] = ()

    @property
    def blocks(self) -> tuple[int, ...]:
        """All blocks of a message, in the order in which they lie in memory; of a call the one that names it."""
        return self.block, *self.others


def lasting(spent: Iterable[tuple[str, Number]]) -> tuple[tuple[str, Number], ...]:
    """What took any time.

    >>> lasting([("launch", 0), ("latency", 2)])
    (('latency', 2),)
    """
    return tuple((what, seconds) for what, seconds in spent if seconds)


@dataclass(frozen=True, repr=False)
class Timeline:
    """The events of one run, ordered by (end, start, rank, lane). `origin` is ``predicted`` or ``measured``.

    A run with too many events to store has none, and `total_s` instead.
    """

    origin: str
    schedule: str
    topology: str
    world_size: int
    events: tuple[Event, ...]
    total_s: Number | None = None

    def plot(self, title: str = "") -> Figure:
        """A picture of the messages and kernel calls of each rank, see `tasp_lab.plots.timelines.draw_timelines`.

        Raises `OutputError` for a timeline without events.
        """
        if not self.events and self.time_s:
            raise OutputError(f"the timeline of {self.schedule} has a time only, expected one with events, such as "
                              "predict(..., events=True) keeps")  # fmt: skip
        title = title or f"{self.schedule} on {self.topology}, {self.origin}"
        figure: Figure = from_above("draw timelines")([self], title)
        return figure

    def __repr__(self) -> str:
        what = f"{self.schedule} on {self.topology}, {self.origin}"
        return brief(self, what, f"{len(self.events)} events", format_time(self.time_s))

    @property
    def time_s(self) -> Number:
        """When the last event ended; 0 for a run without events."""
        if self.total_s is not None:
            return self.total_s
        return max((event.end_s for event in self.events), default=0)
