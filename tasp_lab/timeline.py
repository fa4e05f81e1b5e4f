"""A timeline: what happened when, predicted or measured. Both engines return this one kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tasp_lab.quantities import Number

SEND, ATTEND, DIFFERENTIATE = "send", "attend", "differentiate"
"""Kinds of events: a transfer, and kernel calls of attention and of its gradients."""

COMPUTE_LANE = -1
"""The lane of kernel calls."""


class Event(NamedTuple):
    """One transfer as its sender sees it, or one kernel call. Times in seconds from the start of the run.

    Of a transfer (kind `SEND`), `start_s` is when it was posted, `end_s` when its last byte was at `peer`. `bound_by`
    names what took most of that time: a constraint of the topology, ``latency`` or ``launch`` (empty where it is not
    known, as in measurements). `waited_for` names what the transfer waited for before it could start: ``lane`` (the
    transfer before it), ``block`` (its block's arrival) or ``room`` (its receiver's use of what lay there before);
    empty for nothing.

    A kernel call (kind `ATTEND` or `DIFFERENTIATE`) is on lane `COMPUTE_LANE`, its `peer` is its own rank, its `block`
    the first of its blocks that travel, and its `bytes` are 0; it is bound by ``compute``, and waits for a ``block``,
    for a ``room`` or for ``compute``, the call before it. `flops` are 0 for transfers.

    `spent` is there if it was asked for: what the time went to, and for how long, in seconds. It begins when the
    transfer before it on the lane had left (the call before it had ended), so it is ``waiting for block`` and ``waiting
    for room``, then ``launch``, each constraint while it was the bottleneck, ``latency``; for a call ``compute``.
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


@dataclass(frozen=True)
class Timeline:
    """The events of one run, ordered by (end, start, rank, lane). `origin` is ``predicted`` or ``measured``.

    A run of too many events to keep has none, and `total_s` instead.
    """

    origin: str
    schedule: str
    topology: str
    world_size: int
    events: tuple[Event, ...]
    total_s: Number | None = None

    @property
    def time_s(self) -> Number:
        """When the last event ended; 0 for a run without events."""
        if self.total_s is not None:
            return self.total_s
        return max((event.end_s for event in self.events), default=0)
