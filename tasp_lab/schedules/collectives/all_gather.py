"""AllGather as schedules: every rank starts with one shard and ends with all of them.

`ring_all_gather` circulates whole shards around one ring (as Ring Attention circulates keys and values).
`multi_ring_all_gather` cuts every shard into one block per ring of a decomposition and circulates them around all
rings concurrently (TASP, arXiv:2509.26541). In `direct_all_gather` every rank sends its shard to all others at once.
For trees see `tasp_lab.schedules.collectives.tree_all_gather`.

Block ``owner * chunks + chunk`` is chunk `chunk` of the shard that rank `owner` starts with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from tasp_lab.core.arrays import IntArray, frozen, whole
from tasp_lab.core.errors import ScheduleError
from tasp_lab.rings.rings import Decomposition, is_ring, over_lanes, split_bytes
from tasp_lab.schedule.blocks import Blocks
from tasp_lab.schedule.model import LazySteps, ScheduleModel, Step
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedule.theorems import all_blocks, own_blocks, rings_prove
from tasp_lab.schedules.registry import schedule
from tasp_lab.topology.graph import Topology

MAX_TRANSFERS_AT_ONCE = 2**27
"""A step with this many transfers takes 4 GB."""


@dataclass(frozen=True, eq=False)
class RingSteps(LazySteps, trusted=True):
    """Steps of blocks that circulate around rings, each ring's part of a shard cut into `chunks`, 1 or more.

    `rings` is an int array (rings, world_size). At step ``k * chunks + q`` position i of a ring forwards chunk q of the
    part that started at position i - k. Chunk q that starts at rank r on ring j is block ``(r * rings + j) * chunks +
    q``.

    >>> print(RingSteps(np.array([[0, 1, 2]]), chunks=2)[3])
    0->1 lane 0 block 5
    1->2 lane 0 block 1
    2->0 lane 0 block 3
    """

    rings: IntArray
    chunks: int = 1

    hops_repeat = True

    def __post_init__(self) -> None:
        rings = frozen("rings", self.rings, np.int64, 2, "an array of shape (rings, ranks)")
        object.__setattr__(self, "rings", rings)
        object.__setattr__(self, "chunks", whole("chunks", self.chunks))

    @property
    def lag(self) -> int:
        """The number of steps from the arrival of a block to its forwarding: a hop at step s needs the one at s - lag.

        The first `lag` steps send resident blocks.
        """
        return self.chunks

    def __len__(self) -> int:
        return (self.rings.shape[1] - 1) * self.chunks if self.rings.size else 0

    def step(self, index: int) -> Step:
        count, world_size = self.rings.shape
        travelled, chunk = divmod(index, self.chunks)
        lane = np.repeat(np.arange(count, dtype=np.int64), world_size)
        origin = np.roll(self.rings, travelled, axis=1)
        block = (origin.ravel() * count + lane) * self.chunks + chunk
        return Step(self.rings.ravel(), np.roll(self.rings, -1, axis=1).ravel(), lane, block)

    def prove(self, schedule: ScheduleModel) -> int | None:
        """By induction (`tasp_lab.schedule.theorems`)."""
        return len(self) * self.rings.size if rings_prove(self.rings, self.chunks, schedule) else None


@schedule("ring", "AllGather")
def ring_all_gather(
    topology: Topology,
    shard_bytes: int,
    rings: npt.NDArray[np.integer] | None = None,
    fused: bool = False,
    *,
    chunks: int = 1,
) -> Schedule:
    """AllGather of `shard_bytes` per rank around one ring, or around given ones in equal shares.

    `rings` is an int array (rings, world_size); by default 0, 1, 2, ... if that is a ring, else the best single ring of
    the decomposition. Each ring's part of a shard is cut into `chunks`, sent one after another. `fused` is whether the
    schedule is one call of the communication library.
    """
    in_order = range(topology.world_size)
    if rings is None:
        rings = np.array([in_order]) if is_ring(topology, in_order) else _searched(topology, lanes=1).rings
    rings = frozen("schedule 'ring': rings", rings, np.int64, 2, "an array of shape (rings, ranks)")
    shares = [Fraction(1, max(len(rings), 1))] * len(rings)
    return _around_rings("ring", topology, rings, shares, shard_bytes, chunks, fused)


@schedule("multi-ring", "AllGather", uses_rings=True)
def multi_ring_all_gather(
    topology: Topology, shard_bytes: int, decomposition: Decomposition | None = None, *, chunks: int = 1
) -> Schedule:
    """AllGather of `shard_bytes` per rank around all rings of a decomposition concurrently (TASP).

    Each ring carries its share of every shard; rings whose share is less than a byte are not used. Links are shared
    fairly between lanes, so a ring with a larger share is split over several lanes of about equal shares. The default
    decomposition is `decompose(topology)`. Each lane's part of a shard is cut into `chunks`, sent one after another.
    """
    found = rings_for("multi-ring", topology, decomposition)
    return _around_rings("multi-ring", topology, *over_lanes(found.rings, found.shares), shard_bytes, chunks)


def rings_for(name: str, topology: Topology, decomposition: Decomposition | None) -> Decomposition:
    """The rings of a schedule, by default those of `decompose`. Raises `ScheduleError` for another world size."""
    found = decomposition or _searched(topology)
    if found.world_size != topology.world_size:
        raise ScheduleError(
            f"schedule {name!r}: rings of {found.world_size} ranks, {topology.name} has {topology.world_size}"
        )
    return found


def _searched(topology: Topology, lanes: int | None = None) -> Decomposition:
    from tasp_lab.rings.decompose import decompose  # a ring in the order of ranks needs no search

    return decompose(topology, lanes=lanes)


@schedule("direct", "AllGather")
def direct_all_gather(topology: Topology, shard_bytes: int) -> Schedule:
    """AllGather of `shard_bytes` per rank in one step: every rank sends its shard to all others."""
    n = topology.world_size
    if n * (n - 1) > MAX_TRANSFERS_AT_ONCE:
        raise ScheduleError(
            f"schedule 'direct': {n * (n - 1)} transfers in one step, expected at most {MAX_TRANSFERS_AT_ONCE}"
        )
    lane, source = np.divmod(np.arange(n * (n - 1)), n)
    step = Step(source, (source + lane + 1) % n, lane, source.copy())
    return _all_gather("direct", topology, n - 1, [shard_bytes], [step] if n > 1 else [])


def _around_rings(
    name: str,
    topology: Topology,
    rings: IntArray,
    shares: Sequence[Fraction],
    shard_bytes: int,
    chunks: int,
    fused: bool = False,
) -> Schedule:
    if topology.world_size == 1 or shard_bytes < 1:
        return _all_gather(name, topology, 1, [shard_bytes], [])
    if rings.size > MAX_TRANSFERS_AT_ONCE:
        raise ScheduleError(
            f"schedule {name!r}: {rings.size} transfers in each step, expected at most {MAX_TRANSFERS_AT_ONCE}"
        )
    parts = split_bytes(shard_bytes, shares)
    used = [ring for ring, bytes_per_channel in enumerate(parts) if bytes_per_channel > 0]
    smallest = min(parts[ring] for ring in used)
    if not 1 <= chunks <= smallest:
        raise ScheduleError(f"schedule {name!r}: {chunks} chunks, expected 1 to {smallest}: a chunk has a byte or more")
    sizes = [size for ring in used for size in split_bytes(parts[ring], [Fraction(1, chunks)] * chunks)]
    return _all_gather(name, topology, len(used), sizes, RingSteps(rings[used], chunks), fused)


def _all_gather(
    name: str, topology: Topology, lanes: int, chunk_bytes: Sequence[int], steps: Sequence[Step], fused: bool = False
) -> Schedule:
    """A schedule in which every rank starts with chunks of these sizes in bytes and ends with all chunks."""
    if sum(chunk_bytes) < 1:
        raise ScheduleError(f"schedule {name!r}: shard size is {sum(chunk_bytes)} bytes, expected 1 or more")
    n, chunks = topology.world_size, len(chunk_bytes)
    return Schedule(
        name=name,
        world_size=n,
        lanes=max(lanes, 1),
        blocks=Blocks.of_data(np.tile(np.array(chunk_bytes), n)),
        initial=own_blocks(n, chunks),
        final=all_blocks(n, n * chunks),
        steps=steps,
        fused=fused,
    ).on(topology)
