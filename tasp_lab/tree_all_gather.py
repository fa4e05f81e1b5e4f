"""AllGather along trees: every rank's shard is cut by the shares of its trees, and each part flows down its tree.

A part is cut once more, into *chunks* of equal size. A hop of level d (d hops below the root) passes chunk c on at step
d + c, so every level works at once: while a rank passes on one chunk, the next arrives (pipelining).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from tasp_lab.arrays import FloatArray, IntArray
from tasp_lab.errors import ScheduleError
from tasp_lab.pieces import split_bytes
from tasp_lab.schedule import LazySteps, Schedule, Step
from tasp_lab.topology import Topology
from tasp_lab.tree_packing import TreePacking, pack_trees

MOST_CHUNKS = 64
"""More make the deepest level lag by less than a 64th of the time, and the schedule longer."""


@dataclass(frozen=True, eq=False)
class TreeSteps(LazySteps):
    """The steps of blocks that flow down trees: int arrays with an entry for every hop of every tree.

    A hop passes on `chunks` blocks, from block `first` on, one per step from step `level` on.
    """

    source: IntArray
    destination: IntArray
    lane: IntArray
    level: IntArray
    first: IntArray
    chunks: IntArray

    def __len__(self) -> int:
        return int((self.level + self.chunks).max(initial=0))

    def step(self, index: int) -> Step:
        chunk = index - self.level
        now = (chunk >= 0) & (chunk < self.chunks)
        return Step(self.source[now], self.destination[now], self.lane[now], (self.first + chunk)[now])


def tree_all_gather(
    topology: Topology, shard_bytes: int, packing: TreePacking | None = None, chunks: int | None = None
) -> Schedule:
    """AllGather of `shard_bytes` per rank along the trees of a packing, the topology's own if none is given.

    Parts are cut into `chunks`, by default `best_chunks`, and into fewer if they have fewer bytes.

    >>> from tasp_lab.builders import full_mesh, ring
    >>> tree_all_gather(full_mesh(8), 64).transfers          # every tree is a star: as `direct_all_gather`
    56
    >>> print(tree_all_gather(ring(3), 64, chunks=2).steps[0])
    0->1 lane 0 block 0
    1->2 lane 0 block 2
    2->0 lane 0 block 4

    Raises `ScheduleError` for a shard without bytes, for less than one chunk, and for the trees of another topology.
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
        block_bytes=np.array([size for blocks in sizes for size in blocks], dtype=np.int64),
        initial=np.repeat(trees.roots, counts) == np.arange(topology.world_size)[:, None],
        final=np.ones((topology.world_size, sum(counts)), dtype=bool),
        steps=steps,
    )
    schedule.check_routes(topology)
    return schedule


def best_chunks(packing: TreePacking, shard_bytes: int) -> int:
    """How many chunks to cut the parts into, `MOST_CHUNKS` at most: those with which all steps take least.

    A step is taken to last as long as its busiest constraint needs, and the latency of the slowest hop. C chunks and
    D levels make D - 1 + C steps; in step s, the levels from s - C + 1 to s each pass on one of C chunks.

    >>> from tasp_lab.builders import full_mesh, ring
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

    return min(range(1, MOST_CHUNKS + 1), key=time_s) if levels else 1


def _levels(packing: TreePacking, shard_bytes: int) -> tuple[FloatArray, float]:
    """How long each level of all trees keeps each constraint busy (levels, constraints), and the slowest hop's latency.

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
    """The steps of the trees when each tree passes on so many blocks, which are numbered tree by tree."""
    parents = packing.parents
    tree, destination = np.nonzero((parents != np.arange(packing.world_size)) & (counts > 0)[:, None])
    source = parents[tree, destination]
    first = np.cumsum(counts) - counts
    lane = _lanes(packing, source, destination, packing.roots[tree])
    return TreeSteps(source, destination, lane, packing.depths[tree, destination] - 1, first[tree], counts[tree])


def _lanes(packing: TreePacking, source: IntArray, destination: IntArray, root: IntArray) -> IntArray:
    """The lane of each hop: a rank numbers its peers, and where hops share what they pass, peers and roots.

    What goes to one peer over a link of its own best goes in order of steps: none of it could be faster. Behind ports,
    a block that is awaited must not hold up those of other roots, so that the port is never idle.
    """
    topology, n = packing.topology, packing.world_size
    own_links = not topology.shared and bool((topology.link_between[source, destination] >= 0).all())
    ways = np.stack([source, (destination - source) % n, np.zeros_like(root) if own_links else root])
    found, way = np.unique(ways, axis=1, return_inverse=True)
    lanes: IntArray = np.arange(found.shape[1]) - np.searchsorted(found[0], found[0])
    return lanes[way.ravel()]
