"""ReduceScatter and AllReduce around rings.

Every rank starts with a message, cut into one shard per rank, and each shard into one part per ring. The sum of a part
starts at the rank after its owner and circulates once around the ring. Every rank adds its contribution, and the sum is
complete at the owner: that is ReduceScatter, n - 1 hops. AllReduce continues without a barrier: in n - 1 more hops each
complete sum circulates once more and is copied (P. Patarasuk and X. Yuan, Bandwidth optimal all-reduce algorithms for
clusters of workstations, J. Parallel Distrib. Comput. 69, 2009). Parts may be cut into chunks, as in
`tasp_lab.schedules.collectives.all_gather`.

Theorem. Let every ring be a permutation of the n ranks, let every block have n parts, let rank r have part r of every
block at the start, and let all copies stay where they are. Then the steps of ReduceScatter leave each rank the complete
sums of its own blocks and no others, those of AllReduce leave every rank all complete sums, and both follow the rules
of `tasp_lab.schedule.proof`.

Proof. Take a block whose owner is at position i of its ring; positions are modulo n. At hop k < n - 1 it is given by
position i + 1 + k to i + 2 + k. By induction on k the source has the parts of positions i + 1 to i + 1 + k, its own
among them, and gives them away for the first time; the destination, which is not the source, still has its own part,
which is none of these. After hop n - 2 position i has all parts, and no other rank has any. From there on the block is
copied from the owner once around the ring as in AllGather, to ranks that have nothing of it
(`tasp_lab.schedule.theorems`). []

So there are n (n - 1) transfers per ring and chunk, or twice as many, and no rank ever holds more than all blocks,
which it starts with.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tasp_lab.rings.rings import Decomposition
from tasp_lab.schedule.blocks import Blocks
from tasp_lab.schedule.model import ScheduleModel, Step
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedule.theorems import all_blocks, are_permutations, own_blocks
from tasp_lab.schedules.collectives.all_gather import RingSteps, multi_ring_all_gather, ring_all_gather
from tasp_lab.schedules.registry import schedule
from tasp_lab.topology.graph import Topology


@dataclass(frozen=True, eq=False)
class RingSumSteps(RingSteps, trusted=True):
    """Steps of sums that circulate around rings, each ring's part of a shard cut into `chunks`, 1 or more.

    `rings` is an int array (rings, world_size). At step ``k * chunks + q`` position i of a ring forwards chunk q of the
    part owned by position i - 1 - k: a hop further than in AllGather, whose blocks have the same numbers. In the first
    n - 1 hops it gives what it has of the block. With `copies` sums are then copied to all, as in AllReduce.
    """

    copies: bool = False

    def __len__(self) -> int:
        return super().__len__() * (2 if self.copies else 1)

    def step(self, index: int) -> Step:
        hops = super().step(index + self.chunks)
        gives = np.full(len(hops), index < super().__len__())
        return Step(hops.source, hops.destination, hops.lane, hops.block, gives)

    def prove(self, schedule: ScheduleModel) -> int | None:
        """By the theorem of this module."""
        return len(self) * self.rings.size if _proves(self, schedule) else None


def _proves(steps: RingSumSteps, schedule: ScheduleModel) -> bool:
    """Whether all premises of the theorem hold for a schedule of these steps."""
    (count, n), own_part = steps.rings.shape, schedule.initial_part
    blocks = n * count * steps.chunks
    promised = all_blocks(n, blocks) if steps.copies else own_blocks(n, count * steps.chunks)
    return (
        schedule.task is None
        and (schedule.world_size == n and schedule.lanes >= count and steps.chunks >= 1 and blocks > 0)
        and len(schedule.blocks) == blocks
        and not schedule.blocks.pools
        and bool((schedule.blocks.parts == n).all())
        and own_part is not None
        and np.array_equal(own_part, np.arange(n)[:, None])
        and are_permutations(steps.rings)
        and all(row.all() for row in schedule.initial)
        and all(np.array_equal(row, wanted) for row, wanted in zip(schedule.final, promised, strict=True))
    )


@schedule("ring-reduce-scatter", "ReduceScatter")
def ring_reduce_scatter(
    topology: Topology,
    shard_bytes: int,
    rings: npt.NDArray[np.integer] | None = None,
    fused: bool = False,
    *,
    chunks: int = 1,
) -> Schedule:
    """ReduceScatter that leaves `shard_bytes` with each rank, around one ring or around given ones, in equal shares.

    Parameters
    ----------
    rings : int array (rings, world_size); the one of `tasp_lab.schedules.collectives.all_gather.ring_all_gather` if not
        given.
    fused : whether it is one call of the communication library.
    chunks : the number of chunks per ring and shard, sent one after another.

    >>> from tasp_lab.topology.builders import full_mesh
    >>> print(ring_reduce_scatter(full_mesh(3), 64).steps[0])
    0->1 lane 0 block 2 given
    1->2 lane 0 block 0 given
    2->0 lane 0 block 1 given

    Raises `ScheduleError` as `ring_all_gather` does.
    """
    gathering = ring_all_gather(topology, shard_bytes, rings, chunks=chunks)
    return _sums("ring-reduce-scatter", gathering, fused, copies=False)


@schedule("ring-all-reduce", "AllReduce")
def ring_all_reduce(
    topology: Topology,
    shard_bytes: int,
    rings: npt.NDArray[np.integer] | None = None,
    fused: bool = False,
    *,
    chunks: int = 1,
) -> Schedule:
    """AllReduce of a message of one shard of `shard_bytes` per rank, around one ring or given ones, in equal shares.

    Parameters and errors are those of `ring_reduce_scatter`.

    >>> from tasp_lab.topology.builders import full_mesh
    >>> len(ring_all_reduce(full_mesh(4), 64).steps)
    6
    """
    gathering = ring_all_gather(topology, shard_bytes, rings, chunks=chunks)
    return _sums("ring-all-reduce", gathering, fused, copies=True)


@schedule("multi-ring-reduce-scatter", "ReduceScatter", uses_rings=True)
def multi_ring_reduce_scatter(
    topology: Topology, shard_bytes: int, decomposition: Decomposition | None = None, *, chunks: int = 1
) -> Schedule:
    """ReduceScatter around all rings of a decomposition concurrently.

    See `tasp_lab.schedules.collectives.all_gather.multi_ring_all_gather`.
    """
    gathering = multi_ring_all_gather(topology, shard_bytes, decomposition, chunks=chunks)
    return _sums("multi-ring-reduce-scatter", gathering, copies=False)


@schedule("multi-ring-all-reduce", "AllReduce", uses_rings=True)
def multi_ring_all_reduce(
    topology: Topology, shard_bytes: int, decomposition: Decomposition | None = None, *, chunks: int = 1
) -> Schedule:
    """AllReduce around all rings of a decomposition concurrently.

    See `tasp_lab.schedules.collectives.all_gather.multi_ring_all_gather`.
    """
    gathering = multi_ring_all_gather(topology, shard_bytes, decomposition, chunks=chunks)
    return _sums("multi-ring-all-reduce", gathering, copies=True)


def _sums(name: str, gathering: Schedule, fused: bool = False, *, copies: bool) -> Schedule:
    """The reduction around the rings of an AllGather, with the same blocks; it starts where the AllGather ends.

    With `copies`, complete sums are copied to all ranks.
    """
    steps = gathering.steps if isinstance(gathering.steps, RingSteps) else RingSteps(np.zeros((1, 1), dtype=np.int64))
    n = gathering.world_size
    return Schedule(
        name=name,
        world_size=n,
        lanes=gathering.lanes,
        blocks=Blocks.of_sums(gathering.block_bytes, n),
        initial=gathering.final,
        final=gathering.final if copies else gathering.initial,
        steps=RingSumSteps(steps.rings, steps.chunks, copies),
        fused=fused,
        initial_part=np.arange(n)[:, None],
    )
