"""What a collective is: where its blocks are at the start, and where they must be in the end.

A schedule chooses its blocks. Which collective it is does not depend on that choice: it follows from what the blocks of
each rank weigh together. Tables of copies are read row by row, since those of large worlds are views of few rows.
"""

from __future__ import annotations

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray
from tasp_lab.core.errors import ScheduleError
from tasp_lab.core.units import format_size
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.collectives.kinds import CollectiveKind, with_article


def check_collective(schedule: Schedule, kind: CollectiveKind, shard_bytes: int) -> None:
    """Raise `ScheduleError` unless a schedule starts and ends as a collective does, with this `shard_bytes`.

    The unit of `shard_bytes` is that of `tasp_lab.schedules.collectives.kinds`.

    >>> from tasp_lab.schedules.collectives.all_gather import ring_all_gather
    >>> from tasp_lab.topology.builders import full_mesh
    >>> check_collective(ring_all_gather(full_mesh(4), 64), "AllGather", 64)
    >>> check_collective(ring_all_gather(full_mesh(4), 64), "AllReduce", 64)
    Traceback (most recent call last):
    tasp_lab.core.errors.ScheduleError: schedule 'ring' is not an AllReduce of 64 B, but an AllGather of 64 B, by its \
start and end
    """
    found = collectives_of(schedule)
    if found.get(kind) != shard_bytes:
        others = [f"{with_article(each)} of {format_size(size)}" for each, size in found.items()]
        raise ScheduleError(
            f"schedule {schedule.name!r} is not {with_article(kind)} of {format_size(shard_bytes)}, "
            f"but {' and '.join(others) or 'no collective of equal shards'}, by its start and end"
        )


def collectives_of(schedule: Schedule) -> dict[CollectiveKind, int]:
    """The collectives whose start and end are those of a schedule, each with its `shard_bytes`.

    >>> from tasp_lab.schedules.collectives.point_to_point import all_to_all
    >>> from tasp_lab.topology.builders import full_mesh
    >>> collectives_of(all_to_all(full_mesh(4), 64)), collectives_of(all_to_all(full_mesh(2), 64))
    ({'AllToAll': 64}, {'AllToAll': 64, 'SendRecv': 64})
    """
    if schedule.task is not None:
        return {}
    joins = {kind.join for kind in schedule.blocks.kinds}
    if joins == {"add"}:
        return _of_sums(schedule)
    return _of_data(schedule) if joins == {""} else {}


def _of_sums(schedule: Schedule) -> dict[CollectiveKind, int]:
    """Every rank starts with one part of every block, each with another one."""
    n, found = schedule.world_size, dict[CollectiveKind, int]()
    if schedule.initial_part is None or (schedule.blocks.parts != n).any():
        return found
    columns = np.shape(schedule.initial_part)[-1:] or (1,)  # one stands for all blocks: the whole table may not fit
    parts = np.sort(np.broadcast_to(schedule.initial_part, (n, *columns)), axis=0)
    if not all(row.all() for row in schedule.initial) or (parts != np.arange(n)[:, None]).any():
        return found
    total = int(schedule.block_bytes.sum())
    if all(row.all() for row in schedule.final) and total % n == 0:
        found["AllReduce"] = total // n
    owned = _equal_bytes(schedule, schedule.final)
    if owned is not None:
        found["ReduceScatter"] = owned
    return found


def _of_data(schedule: Schedule) -> dict[CollectiveKind, int]:
    """Every block is at one rank at the start."""
    n, found = schedule.world_size, dict[CollectiveKind, int]()
    if (_places(schedule.initial) != 1).any():
        return found
    owned = _equal_bytes(schedule, schedule.initial)
    if owned is not None and all(row.all() for row in schedule.final):
        found["AllGather"] = owned
    if n == 1 and owned is not None:
        return found | {"AllToAll": owned, "SendRecv": owned}
    sent = _sent(schedule)
    if sent is not None and (size := int(sent.max(initial=0))):
        ranks = np.eye(n, dtype=np.int64)
        if (sent == size * (1 - ranks)).all():
            found["AllToAll"] = size
        if (sent == size * np.roll(ranks, 1, axis=1)).all():
            found["SendRecv"] = size
    return found


def _places(held: BoolArray) -> IntArray:
    """At how many ranks each block is."""
    found = np.zeros(held.shape[1], dtype=np.int64)
    for row in held:
        found[np.flatnonzero(row)] += 1
    return found


def _equal_bytes(schedule: Schedule, held: BoolArray) -> int | None:
    """The bytes of the blocks of each rank, if each block is at one rank and all ranks have equally many."""
    if (_places(held) != 1).any():
        return None
    owned = {int(schedule.block_bytes[np.flatnonzero(row)].sum()) for row in held}
    return owned.pop() if len(owned) == 1 else None


def _sent(schedule: Schedule) -> IntArray | None:
    """The bytes that go from each rank to each, int array (world_size, world_size); None for a block with two ends."""
    source, ends = np.zeros((2, len(schedule.blocks)), dtype=np.int64)
    for rank, (final, initial) in enumerate(zip(schedule.final, schedule.initial, strict=True)):
        source[np.flatnonzero(initial)] = rank
        ends[np.flatnonzero(final > initial)] += 1
        if (ends > 1).any():
            return None
    found = np.zeros((schedule.world_size,) * 2, dtype=np.int64)
    for rank, (final, initial) in enumerate(zip(schedule.final, schedule.initial, strict=True)):
        block = np.flatnonzero(final > initial)
        np.add.at(found[:, rank], source[block], schedule.block_bytes[block])
    return found
