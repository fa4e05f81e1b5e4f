"""Records of a run by each rank, and their merging into one timeline. Without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tasp_lab.schedule.schedule import Schedule
from tasp_lab.timeline.events import COMPUTE_LANE, SEND, Event, Timeline


class Moved(NamedTuple):
    """One end of a message: sent at `at_s`, or received; its blocks in the order in which they lie."""

    step: int
    lane: int
    peer: int
    blocks: tuple[int, ...]
    at_s: float


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

    It started at `began_s` of the monotonic clock of this name, which all ranks of a host share. `busy_share` is the
    busy share of all cores of its host, by any process, from before the barrier on.
    """

    rank: int
    clock: str
    began_s: float
    time_s: float
    busy_share: float
    sent: tuple[Moved, ...]
    received: tuple[Moved, ...]
    computed: tuple[Computed, ...] = ()


def duration_s(records: Sequence[RankRecord]) -> float:
    """The time of a run: from the start of the last rank to the end of the last one.

    Ranks leave a barrier one after another; what an early rank waits for a late one is no part of the run. Starts on
    different hosts cannot be compared; their last ranks count as starting together.
    """
    return max(begin_s + record.time_s for begin_s, record in zip(_begins_s(records), records, strict=True))


def _begins_s(records: Sequence[RankRecord]) -> list[float]:
    """When each rank started, before the last rank with its clock: 0 or less."""
    last_s: dict[str, float] = {}
    for record in records:
        last_s[record.clock] = max(record.began_s, last_s.get(record.clock, record.began_s))
    return [record.began_s - last_s[record.clock] for record in records]


def merge_records(records: Sequence[RankRecord], schedule: Schedule, topology_name: str) -> Timeline:
    """Merge the records of all ranks: a message starts when its send is posted and ends when its receive completes.

    Times are since the first rank started, so the timeline may end later than `duration_s`, by the skew of starts.
    """
    begins_s = _begins_s(records)
    since_s = {record.rank: begin_s - min(begins_s) for begin_s, record in zip(begins_s, records, strict=True)}
    ends = {
        (r.rank, row.step, row.lane, row.blocks, row.peer): row.at_s + since_s[r.rank]
        for r in records
        for row in r.received
    }
    sizes = schedule.block_bytes.tolist()
    events = [
        Event(
            rank=record.rank,
            lane=sent.lane,
            step=sent.step,
            kind=SEND,
            peer=sent.peer,
            block=sent.blocks[0],
            others=sent.blocks[1:],
            bytes=sum(sizes[block] for block in sent.blocks),
            start_s=start_s,
            end_s=max(start_s, ends[sent.peer, sent.step, sent.lane, sent.blocks, record.rank]),
            bound_by="",
            waited_for="",
        )
        for record in records
        for sent in record.sent
        for start_s in [sent.at_s + since_s[record.rank]]
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
            start_s=call.start_s + since_s[record.rank],
            end_s=call.end_s + since_s[record.rank],
            bound_by="",
            waited_for="",
            flops=call.flops,
        )
        for record in records
        for call in record.computed
    ]
    events.sort(key=lambda event: (event.end_s, event.start_s, event.rank, event.lane))
    return Timeline("measured", schedule.name, topology_name, schedule.world_size, tuple(events))
