"""Collectives in a file of their own; ``--schedule experiments/schedules/collectives.py:doubling``."""

from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.registry import schedule
from tasp_lab.schedules.writer import CollectiveWriter
from tasp_lab.topology.graph import Topology


@schedule("bruck", "AllGather")
def bruck(topology: Topology, shard_bytes: int) -> Schedule:
    """Bruck et al., 1997: at distance d a rank sends all shards that it has, at most d of them."""
    n, distance = topology.world_size, 1
    writer = CollectiveWriter("bruck", "AllGather", topology, shard_bytes)
    while distance < n:
        with writer.step():
            for rank in range(n):
                shards = [(rank + i) % n for i in range(min(distance, n - distance))]
                writer.send(shards, rank, to=(rank - distance) % n)
        distance *= 2
    return writer.schedule()


@schedule("doubling", "AllGather")
def doubling(topology: Topology, shard_bytes: int) -> Schedule:
    """Recursive doubling: ranks whose numbers differ in one bit exchange all that they have."""
    n, writer = topology.world_size, CollectiveWriter("doubling", "AllGather", topology, shard_bytes)
    for width in widths(n):
        with writer.step():
            for rank in range(n):
                first = rank // width * width
                writer.send(range(first, first + width), rank, to=rank ^ width)
    return writer.schedule()


@schedule("halving", "ReduceScatter")
def halving(topology: Topology, shard_bytes: int) -> Schedule:
    """Recursive halving: a rank gives away the half of its sums that the other one goes on with."""
    n, writer = topology.world_size, CollectiveWriter("halving", "ReduceScatter", topology, shard_bytes)
    for width in reversed(widths(n)):
        with writer.step():
            for rank in range(n):
                first = (rank ^ width) // width * width
                writer.give(range(first, first + width), rank, to=rank ^ width)
    return writer.schedule()


@schedule("two-phase", "AllGather")
def two_phase(topology: Topology, shard_bytes: int) -> Schedule:
    """Rings along the rows of a square, then along its columns."""
    n, writer = topology.world_size, CollectiveWriter("two-phase", "AllGather", topology, shard_bytes)
    side = round(n**0.5)
    if side * side != n:
        raise ScheduleError(f"{n} ranks, expected a square")
    rows = [divmod(rank, side) for rank in range(n)]
    for hop in range(side - 1):
        with writer.step():
            for rank, (row, column) in enumerate(rows):
                writer.send(row * side + (column - hop) % side, rank, to=row * side + (column + 1) % side)
    for hop in range(side - 1):
        with writer.step():
            for rank, (row, _) in enumerate(rows):
                shards = range((row - hop) % side * side, ((row - hop) % side + 1) * side)
                writer.send(shards, rank, to=(rank + side) % n, lane=1)
    return writer.schedule()


def widths(n: int) -> list[int]:
    """The powers of two below the number of ranks, which is one."""
    if n & (n - 1):
        raise ScheduleError(f"{n} ranks, expected a power of two")
    return [1 << power for power in range(n.bit_length() - 1)]
