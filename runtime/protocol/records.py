"""Records of a run by each rank, and their merging into one timeline. Without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tasp_lab.schedule.schedule import Schedule
from tasp_lab.timeline.events import COMPUTE_LANE, SEND, Event, Timeline


class Sent(NamedTuple):
    """A send as recorded by its sender: posted at `start_s`."""

    step: int
    lane: int
    peer: int
    block: int
    start_s: float


class Received(NamedTuple):
    """A receive as recorded by its receiver: completed at `end_s`."""

    step: int
    lane: int
    peer: int
    block: int
    end_s: float


class Computed(NamedTuple):
    """A call of a kernel; `block` is the one that names it, see `tasp_lab.schedule.dependencies`."""

    step: int
    kernel: str
    block: int
    flops: int
    start_s: float
    end_s: float


class RankRecord(NamedTuple):
    """The record of one rank: times in seconds from its own start, right after a barrier.

    `busy_share` is the busy share of all cores of its host during the run, by any process.
    """

    rank: int
    time_s: float
    busy_share: float
    sent: tuple[Sent, ...]
    received: tuple[Received, ...]
    computed: tuple[Computed, ...] = ()


def merge_records(records: Sequence[RankRecord], schedule: Schedule, topology_name: str) -> Timeline:
    """Merge the records of all ranks: a transfer starts when its send is posted and ends when its receive completes.

    Each rank's times start at zero right after a common barrier, so clocks differ by the skew of the barrier.
    """
    ends = {(r.rank, row.step, row.lane, row.block, row.peer): row.end_s for r in records for row in r.received}
    sizes = schedule.block_bytes.tolist()
    events = [
        Event(
            rank=record.rank,
            lane=sent.lane,
            step=sent.step,
            kind=SEND,
            peer=sent.peer,
            block=sent.block,
            bytes=sizes[sent.block],
            start_s=sent.start_s,
            end_s=max(sent.start_s, ends[sent.peer, sent.step, sent.lane, sent.block, record.rank]),
            bound_by="",
            waited_for="",
        )
        for record in records
        for sent in record.sent
    ]
    events += [
        Event(
            rank=record.rank,
            lane=COMPUTE_LANE,
            step=call.step,
            kind=call.kernel,
            peer=record.rank,
            block=call.block,
            bytes=0,
            start_s=call.start_s,
            end_s=call.end_s,
            bound_by="",
            waited_for="",
            flops=call.flops,
        )
        for record in records
        for call in record.computed
    ]
    events.sort(key=lambda event: (event.end_s, event.start_s, event.rank, event.lane))
    return Timeline("measured", schedule.name, topology_name, schedule.world_size, tuple(events))
