"""AllGather along trees: every rank's shard is cut by the shares of its trees, and each part flows down its tree.

Each part is cut into *chunks* of equal size. A hop of level d (d hops below the root) forwards chunk c at step d + c,
so all levels work concurrently: while a rank forwards one chunk, it receives the next (pipelining).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from tasp_lab.core.arrays import FloatArray, IntArray, freeze
from tasp_lab.core.errors import ScheduleError
from tasp_lab.rings.rings import split_bytes
from tasp_lab.rings.tree_packing import TreePacking, pack_trees
from tasp_lab.schedule.blocks import Blocks
from tasp_lab.schedule.model import LazySteps, Step
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.registry import schedule
from tasp_lab.topology.graph import Topology

MAX_CHUNKS, MAX_TRANSFERS = 64, 2**19
"""More chunks gain less than a 64th of the time per level and lengthen the schedule; on more than 90 ranks fewer do."""


@dataclass(frozen=True, eq=False)
class TreeSteps(LazySteps):
    """The steps of blocks that flow down trees: int arrays (hops of all trees,).

    A hop forwards `chunks` blocks, from block `first` on, one per step from step `level` on.
    """

    source: IntArray
    destination: IntArray
    lane: IntArray
    level: IntArray
    first: IntArray
    chunks: IntArray

    def __post_init__(self) -> None:
        columns = "source", "destination", "lane", "level", "first", "chunks"
        freeze(self, columns, "hops of trees: ", np.int64, 1, "an int array of shape (hops,)")

    def __len__(self) -> int:
        return int((self.level + self.chunks).max(initial=0))

    def step(self, index: int) -> Step:
        chunk = index - self.level
        now = (chunk >= 0) & (chunk < self.chunks)
        return Step(self.source[now], self.destination[now], self.lane[now], (self.first + chunk)[now])


@schedule("trees", "AllGather")
def tree_all_gather(
    topology: Topology, shard_bytes: int, packing: TreePacking | None = None, chunks: int | None = None
) -> Schedule:
    """AllGather of `shard_bytes` per rank along the trees of a packing, by default `pack_trees(topology)`.

    Parts are cut into `chunks`, by default `best_chunks`; into fewer if they have fewer bytes.

    >>> from tasp_lab.topology.builders import full_mesh, ring
    >>> tree_all_gather(full_mesh(8), 64).transfers          # every tree is a star: as `direct_all_gather`
    56
    >>> print(tree_all_gather(ring(3), 64, chunks=2).steps[0])
    0->1 lane 0 block 0
    1->2 lane 0 block 2
    2->0 lane 0 block 4

    Raises `ScheduleError` for an empty shard, for less than one chunk, and for trees of another world size.
    """
    if shard_bytes < 1:
        raise ScheduleError(f"schedule 'trees': shard size is {shard_bytes} bytes, expected 1 or more")
    trees = packing or pack_trees(topology)
    if trees.world_size != topology.world_size:
        raise ScheduleError(f"trees of {trees.world_size} ranks for {topology.name}, which has {topology.world_size}")
    most = best_chunks(trees, shard_bytes) if chunks is None else chunks
    if most < 1:
        raise ScheduleError(f"{most} chunks: expected 1 or more")
    parts = _parts(trees, shard_bytes)
    counts = [min(part, most) for part in parts]
    sizes = [split_bytes(part, [Fraction(1, max(count, 1))] * count) for part, count in zip(parts, counts, strict=True)]
    steps = _steps(trees, np.array(counts))
    schedule = Schedule(
        name="trees",
        world_size=topology.world_size,
        lanes=int(steps.lane.max(initial=0)) + 1,
        blocks=Blocks.of_data(np.array([size for each in sizes for size in each], dtype=np.int64)),
        initial=np.repeat(trees.roots, counts) == np.arange(topology.world_size)[:, None],
        final=np.ones((topology.world_size, sum(counts)), dtype=bool),
        steps=steps,
    )
    schedule.check_routes(topology)
    return schedule


def best_chunks(packing: TreePacking, shard_bytes: int) -> int:
    """The number of chunks per part that minimises the estimated time of all steps, up to `MAX_CHUNKS`.

    There are no more than make `MAX_TRANSFERS`, if each tree has that many.

    A step is estimated as the time of its busiest constraint plus the latency of the slowest hop. C chunks and
    D levels make D - 1 + C steps; in step s, the levels from s - C + 1 to s each pass on one of C chunks.

    >>> from tasp_lab.topology.builders import full_mesh, ring
    >>> best_chunks(pack_trees(full_mesh(4)), 2**24), best_chunks(pack_trees(ring(4)), 2**24)    # always busy as it is
    (1, 1)
    """
    busy_s, latency_s = _levels(packing, shard_bytes)
    levels = len(busy_s)
    above_s = np.concatenate([0 * busy_s[:1], np.cumsum(busy_s, axis=0)])

    def time_s(chunks: int) -> float:
        ends = np.arange(1, levels + chunks)
        active_s = above_s[np.minimum(ends, levels)] - above_s[np.maximum(ends - chunks, 0)]
        return float(active_s.max(axis=1).sum()) / chunks + len(ends) * latency_s

    hops = len(packing.parents) * (packing.world_size - 1)
    most = max(1, min(MAX_CHUNKS, MAX_TRANSFERS // max(hops, 1)))
    return min(range(1, most + 1), key=time_s) if levels else 1


def _levels(packing: TreePacking, shard_bytes: int) -> tuple[FloatArray, float]:
    """The busy time of each constraint per level of all trees (levels, constraints), and the slowest hop's latency.

    Both in seconds.
    """
    topology = packing.topology
    bandwidths = np.array([float(constraint.bandwidth_bytes_per_s) for constraint in topology.constraints])
    busy = np.zeros((int(packing.depths.max()), len(bandwidths)))
    latency_s = 0.0
    for parents, depths, share in zip(packing.parents.tolist(), packing.depths, packing.shares, strict=True):
        for rank in np.flatnonzero(depths).tolist():
            route = topology.route(parents[rank], rank)
            busy[depths[rank] - 1, list(route.constraints)] += float(share)
            latency_s = max(latency_s, float(route.latency_s))
    return busy * shard_bytes / bandwidths, latency_s


def _parts(packing: TreePacking, shard_bytes: int) -> list[int]:
    """The bytes that each tree carries of its root's shard."""
    parts = [0] * len(packing.shares)
    for root in range(packing.world_size):
        own = np.flatnonzero(packing.roots == root).tolist()
        for tree, size in zip(own, split_bytes(shard_bytes, [packing.shares[tree] for tree in own]), strict=True):
            parts[tree] = size
    return parts


def _steps(packing: TreePacking, counts: IntArray) -> TreeSteps:
    """The steps of the trees, given the number of blocks of each; blocks are numbered tree by tree."""
    parents = packing.parents
    tree, destination = np.nonzero((parents != np.arange(packing.world_size)) & (counts > 0)[:, None])
    source = parents[tree, destination]
    first = np.cumsum(counts) - counts
    lane = _lanes(packing, source, destination, packing.roots[tree])
    return TreeSteps(source, destination, lane, packing.depths[tree, destination] - 1, first[tree], counts[tree])


def _lanes(packing: TreePacking, source: IntArray, destination: IntArray, root: IntArray) -> IntArray:
    """The lane of each hop: one per peer of a rank, or one per peer and root if hops share constraints.

    Over a direct link blocks are best sent in order of steps. Over a shared port, a block that has not arrived must not
    delay those of other roots, so that the port is never idle.
    """
    topology, n = packing.topology, packing.world_size
    own_links = not topology.shared and bool((topology.table.between(source, destination) >= 0).all())
    columns = np.stack([source, (destination - source) % n, np.zeros_like(root) if own_links else root])
    found, column = np.unique(columns, axis=1, return_inverse=True)
    lanes: IntArray = np.arange(found.shape[1]) - np.searchsorted(found[0], found[0])
    return lanes[column.ravel()]
