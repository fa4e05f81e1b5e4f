"""The collectives that people measure, each by all of its schedules, whose names say which collective it is.

All are given the bytes that one rank owns of the whole, `shard_bytes`:

============== ============================================ ========================================
collective     what happens                                 `shard_bytes`
============== ============================================ ========================================
AllGather      everybody gets the shards of all             a rank's shard
ReduceScatter  sums of all messages are spread over ranks   the shard that a rank ends with
AllReduce      everybody gets the sum of all messages       a message over the number of ranks
AllToAll       every rank has a piece for every rank        a piece
SendRecv       rank i sends a message to rank i + 1         a message
============== ============================================ ========================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from tasp_lab.all_gather import ALL_GATHER, multi_ring_all_gather
from tasp_lab.decomposition import Decomposition
from tasp_lab.errors import ScheduleError
from tasp_lab.library_rings import named_library_ring
from tasp_lab.quantities import format_size
from tasp_lab.ring_reductions import (
    multi_ring_all_reduce,
    multi_ring_reduce_scatter,
    ring_all_reduce,
    ring_reduce_scatter,
)
from tasp_lab.schedule import MOST_HOLDINGS, Schedule, Step
from tasp_lab.topology import Topology

CollectiveKind = Literal["AllGather", "ReduceScatter", "AllReduce", "AllToAll", "SendRecv"]


def all_to_all(topology: Topology, piece_bytes: int, fused: bool = False) -> Schedule:
    """Every rank sends every other rank a piece of `piece_bytes` of its own, all at once in one step.

    Block ``source * world_size + destination`` is the piece that goes from rank `source` to rank `destination`.

    >>> from tasp_lab.builders import full_mesh
    >>> print(all_to_all(full_mesh(2), 64).steps[0])
    0->1 lane 0 block 1
    1->0 lane 0 block 2

    Raises `ScheduleError` for pieces without bytes, more than can be proved, and ranks that have no way to each other.
    """
    n = topology.world_size
    _check_bytes("all-to-all", "piece", piece_bytes)
    if n**3 > MOST_HOLDINGS:
        raise ScheduleError(
            f"schedule 'all-to-all': {n} ranks with {n * n} pieces are too many to prove, "
            f"expected at most {round(MOST_HOLDINGS ** (1 / 3))} ranks"
        )
    rank = np.arange(n, dtype=np.int64)
    source, piece = np.repeat(rank, n), np.tile(rank, n)
    offset = np.repeat(rank[1:], n)
    sender = np.tile(rank, n - 1)
    receiver = (sender + offset) % n
    starts_with, belongs_to = source == rank[:, None], piece == rank[:, None]
    schedule = Schedule(
        name="all-to-all",
        world_size=n,
        lanes=max(n - 1, 1),
        block_bytes=np.full(n * n, piece_bytes, dtype=np.int64),
        initial=starts_with,
        final=starts_with | belongs_to,
        steps=[Step(sender, receiver, offset - 1, sender * n + receiver)] if n > 1 else [],
        fused=fused,
    )
    schedule.check_routes(topology)
    return schedule


def send_recv(topology: Topology, message_bytes: int, fused: bool = False) -> Schedule:
    """Every rank i sends a message of `message_bytes` to rank i + 1, the last one to rank 0, as nccl-tests' sendrecv.

    >>> from tasp_lab.builders import ring
    >>> print(send_recv(ring(3), 64).steps[0])
    0->1 lane 0 block 0
    1->2 lane 0 block 1
    2->0 lane 0 block 2

    Raises `ScheduleError` for messages without bytes, and for ranks that have no way to the next one.
    """
    n = topology.world_size
    _check_bytes("send-recv", "message", message_bytes)
    rank, own = np.arange(n, dtype=np.int64), np.eye(n, dtype=bool)
    schedule = Schedule(
        name="send-recv",
        world_size=n,
        lanes=1,
        block_bytes=np.full(n, message_bytes, dtype=np.int64),
        initial=own,
        final=own | np.roll(own, 1, axis=0),
        steps=[Step(rank, np.roll(rank, -1), np.zeros_like(rank), rank)] if n > 1 else [],
        fused=fused,
    )
    schedule.check_routes(topology)
    return schedule


def _check_bytes(name: str, what: str, size_bytes: int) -> None:
    if size_bytes < 1:
        raise ScheduleError(f"schedule {name!r}: {what} size is {size_bytes} bytes, expected 1 or more")


class Collective(NamedTuple):
    """A schedule's collective, and what builds it from a topology and `shard_bytes`."""

    kind: CollectiveKind
    build: Callable[[Topology, int], Schedule]


LIBRARY_RINGS: tuple[tuple[str, CollectiveKind, str], ...] = (
    ("library-ring", "AllGather", "all_gather"),
    ("library-ring-reduce-scatter", "ReduceScatter", "reduce_scatter"),
    ("library-ring-all-reduce", "AllReduce", "all_reduce"),
)
"""Collectives as one call of the communication library: their names here, what they are, and nccl-tests' names."""

COLLECTIVES: Mapping[str, Collective] = {
    **{name: Collective("AllGather", build) for name, build in ALL_GATHER.items()},
    "ring-reduce-scatter": Collective("ReduceScatter", ring_reduce_scatter),
    "multi-ring-reduce-scatter": Collective("ReduceScatter", multi_ring_reduce_scatter),
    "ring-all-reduce": Collective("AllReduce", ring_all_reduce),
    "multi-ring-all-reduce": Collective("AllReduce", multi_ring_all_reduce),
    **{
        name: Collective(kind, partial(named_library_ring, name, collective))
        for name, kind, collective in LIBRARY_RINGS
    },
    "all-to-all": Collective("AllToAll", all_to_all),
    "send-recv": Collective("SendRecv", send_recv),
}
"""Every schedule of a collective by its name on the command line."""

OVER_DECOMPOSITIONS: Mapping[str, Callable[[Topology, int, Decomposition | None], Schedule]] = {
    "multi-ring": multi_ring_all_gather,
    "multi-ring-reduce-scatter": multi_ring_reduce_scatter,
    "multi-ring-all-reduce": multi_ring_all_reduce,
}
"""Those of them that a decomposition can be given to."""


def collective(name: str, topology: Topology, shard_bytes: int, decomposition: Decomposition | None = None) -> Schedule:
    """The schedule of that name; `decomposition` is used by those in `OVER_DECOMPOSITIONS`.

    Raises `ScheduleError` for a name there is none of.

    >>> from tasp_lab.builders import full_mesh
    >>> collective("ring-all-reduce", full_mesh(8), 64).transfers
    112
    """
    if name in OVER_DECOMPOSITIONS:
        return OVER_DECOMPOSITIONS[name](topology, shard_bytes, decomposition)
    return _known(name).build(topology, shard_bytes)


def kind_of(names: Iterable[str]) -> CollectiveKind:
    """The collective of all these schedules, one or more. Raises `ScheduleError` when they are not all of one.

    >>> kind_of(["ring", "ring-all-reduce"])
    Traceback (most recent call last):
    tasp_lab.errors.ScheduleError: schedule 'ring-all-reduce' is an AllReduce, 'ring' an AllGather: expected schedules \
of one collective
    """
    first, *others = names
    kind = _known(first).kind
    for name in others:
        if _known(name).kind != kind:
            raise ScheduleError(
                f"schedule {name!r} is {with_article(_known(name).kind)}, {first!r} {with_article(kind)}: "
                "expected schedules of one collective"
            )
    return kind


def _known(name: str) -> Collective:
    if name not in COLLECTIVES:
        raise ScheduleError(f"unknown schedule {name!r}, expected one of {', '.join(COLLECTIVES)}")
    return COLLECTIVES[name]


def with_article(kind: CollectiveKind) -> str:
    """The collective as it is put into a sentence.

    >>> with_article("AllReduce"), with_article("SendRecv")
    ('an AllReduce', 'a SendRecv')
    """
    return f"{'an' if kind.startswith('A') else 'a'} {kind}"


def describe(kind: CollectiveKind, world_size: int, shard_bytes: int) -> str:
    """What is done, for people.

    >>> describe("AllGather", 8, 2**20), describe("AllReduce", 8, 2**20)
    ('AllGather of 1 MiB per rank', 'AllReduce of 8 MiB, 1 MiB per rank')
    >>> describe("AllToAll", 8, 2**20), describe("SendRecv", 8, 2**20)
    ('AllToAll of 1 MiB from each rank to each', 'SendRecv of 1 MiB from each rank to the next')
    """
    size = format_size(shard_bytes)
    return {
        "AllReduce": f"AllReduce of {format_size(world_size * shard_bytes)}, {size} per rank",
        "AllToAll": f"AllToAll of {size} from each rank to each",
        "SendRecv": f"SendRecv of {size} from each rank to the next",
    }.get(kind, f"{kind} of {size} per rank")
