"""What a collective is: where its blocks are at the start, and where they must be in the end.

A schedule chooses its blocks. Whether it is a schedule of the collective does not depend on that choice: it is checked
by what the blocks weigh together.
"""

from __future__ import annotations

import numpy as np

from tasp_lab.arrays import BoolArray, IntArray
from tasp_lab.collectives.kinds import CollectiveKind, with_article
from tasp_lab.errors import ScheduleError
from tasp_lab.schedule.blocks import Join
from tasp_lab.schedule.schedule import Schedule


def check_collective(schedule: Schedule, kind: CollectiveKind, shard_bytes: int) -> None:
    """Raise `ScheduleError` unless a schedule starts and ends as a collective does, with this `shard_bytes`.

    The unit of `shard_bytes` is that of `tasp_lab.collectives.kinds`.

    >>> from tasp_lab.collectives.all_gather import ring_all_gather
    >>> from tasp_lab.topology.builders import full_mesh
    >>> check_collective(ring_all_gather(full_mesh(4), 64), "AllGather", 64)
    >>> check_collective(ring_all_gather(full_mesh(4), 64), "AllReduce", 64)
    Traceback (most recent call last):
    tasp_lab.errors.ScheduleError: schedule 'ring' is not an AllReduce of 64 bytes: block 0 is data, expected a sum
    """
    try:
        if kind in ("ReduceScatter", "AllReduce"):
            _check_sums(schedule)
        else:
            _check_data(schedule)
        _ENDS[kind](schedule, shard_bytes)
    except ScheduleError as error:
        raise ScheduleError(
            f"schedule {schedule.name!r} is not {with_article(kind)} of {shard_bytes} bytes: {error}"
        ) from None


def _check_data(schedule: Schedule) -> None:
    """Every block is data that one rank has at the start."""
    _joined_by(schedule, "")
    _one_rank(_places(schedule.initial), "starts at")


def _check_sums(schedule: Schedule) -> None:
    """Every rank starts with its own part of every block."""
    _joined_by(schedule, "add")
    n, parts = schedule.world_size, schedule.blocks.parts
    if (parts != n).any():
        block = int((parts != n).argmax())
        raise ScheduleError(f"block {block} has {parts[block]} parts, expected {n}, one of each rank")
    part = np.broadcast_to(-1 if schedule.initial_part is None else schedule.initial_part, schedule.initial.shape)
    for rank in range(n):
        wrong = ~schedule.initial[rank] | (part[rank] != rank)
        if wrong.any():
            raise ScheduleError(f"rank {rank} does not start with part {rank} of block {int(wrong.argmax())}, its own")


def _joined_by(schedule: Schedule, join: Join) -> None:
    wrong = np.array([kind.join != join for kind in schedule.blocks.kinds], dtype=np.bool_)[schedule.blocks.kind]
    if wrong.any():
        block = int(wrong.argmax())
        words = {"": "data", "add": "a sum", "merge": "a merge of attention results"}
        found = words[schedule.blocks.kind_of(block).join]
        raise ScheduleError(f"block {block} is {found}, expected {words[join]}")


def _places(held: BoolArray) -> IntArray:
    """At how many ranks each block is, row by row, since a table of all ranks may be a view of very few rows."""
    found = np.zeros(held.shape[1], dtype=np.int64)
    for row in held:
        found[np.flatnonzero(row)] += 1
    return found


def _one_rank(count: IntArray, what: str) -> None:
    wrong = count != 1
    if wrong.any():
        block = int(wrong.argmax())
        raise ScheduleError(f"block {block} {what} {count[block]} ranks, expected one")


def _weighs(found: int, expected: int, what: str) -> None:
    if found != expected:
        raise ScheduleError(f"{what} {found} bytes, expected {expected}")


def _everywhere(schedule: Schedule) -> None:
    for rank, row in enumerate(schedule.final):
        if not row.all():
            raise ScheduleError(f"rank {rank} does not promise block {int(row.argmin())}")


def _check_all_gather(schedule: Schedule, shard_bytes: int) -> None:
    for rank, row in enumerate(schedule.initial):
        _weighs(int(schedule.block_bytes[np.flatnonzero(row)].sum()), shard_bytes, f"rank {rank} starts with")
    _everywhere(schedule)


def _check_reduce_scatter(schedule: Schedule, shard_bytes: int) -> None:
    _one_rank(_places(schedule.final), "is promised to")
    for rank, row in enumerate(schedule.final):
        _weighs(int(schedule.block_bytes[np.flatnonzero(row)].sum()), shard_bytes, f"rank {rank} ends with")


def _check_all_reduce(schedule: Schedule, shard_bytes: int) -> None:
    _weighs(int(schedule.block_bytes.sum()), shard_bytes * schedule.world_size, "blocks weigh")
    _everywhere(schedule)


def _sent(schedule: Schedule) -> IntArray:
    """The bytes that start at one rank and are promised to another one: int array (world_size, world_size)."""
    comes = schedule.final & ~schedule.initial
    if (several := comes.sum(axis=0) > 1).any():
        raise ScheduleError(f"block {int(several.argmax())} is promised to several ranks, expected one")
    source, (destination, block) = schedule.initial.argmax(axis=0), np.nonzero(comes)
    found = np.zeros((schedule.world_size,) * 2, dtype=np.int64)
    np.add.at(found, (source[block], destination), schedule.block_bytes[block])
    return found


def _check_pairs(schedule: Schedule, expected: IntArray) -> None:
    found = _sent(schedule)
    if (found != expected).any():
        source, destination = np.argwhere(found != expected)[0].tolist()
        _weighs(int(found[source, destination]), int(expected[source, destination]),
                f"from rank {source} to rank {destination} go")  # fmt: skip


def _check_all_to_all(schedule: Schedule, shard_bytes: int) -> None:
    _check_pairs(schedule, shard_bytes * (1 - np.eye(schedule.world_size, dtype=np.int64)))


def _check_send_recv(schedule: Schedule, shard_bytes: int) -> None:
    to_next = np.roll(np.eye(schedule.world_size, dtype=np.int64), 1, axis=1)
    np.fill_diagonal(to_next, 0)
    _check_pairs(schedule, shard_bytes * to_next)


_ENDS = {
    "AllGather": _check_all_gather,
    "ReduceScatter": _check_reduce_scatter,
    "AllReduce": _check_all_reduce,
    "AllToAll": _check_all_to_all,
    "SendRecv": _check_send_recv,
}
