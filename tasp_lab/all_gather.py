"""AllGather as schedules: every rank starts with one shard and ends with all of them.

`ring_all_gather` passes whole shards around one ring (as Ring Attention passes keys and values).
`multi_ring_all_gather` cuts every shard into one block per ring of a decomposition and passes them around all
rings at once (TASP, arXiv:2509.26541). `direct_all_gather` has every rank send its shard to all others at once. Along
trees see `tasp_lab.tree_all_gather`.

Block ``owner * pieces + piece`` is piece `piece` of the shard that rank `owner` starts with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from tasp_lab.arrays import IntArray
from tasp_lab.decomposition import Decomposition, decompose
from tasp_lab.errors import ScheduleError
from tasp_lab.pieces import over_lanes, split_bytes
from tasp_lab.rings import is_ring
from tasp_lab.schedule import MOST_HOLDINGS, LazySteps, Schedule, Step
from tasp_lab.topology import Topology
from tasp_lab.tree_all_gather import tree_all_gather


@dataclass(frozen=True, eq=False)
class RingSteps(LazySteps):
    """The steps of blocks that travel around rings: at step k position p of a ring passes on what came from p-k.

    `rings` is an int array (rings, world_size); the block of ring j that starts at rank r is ``r * rings + j``.
    """

    rings: IntArray

    def __len__(self) -> int:
        return self.rings.shape[1] - 1 if self.rings.size else 0

    def step(self, index: int) -> Step:
        count, world_size = self.rings.shape
        lane = np.repeat(np.arange(count, dtype=np.int64), world_size)
        origin = np.roll(self.rings, index, axis=1)
        block = origin.ravel() * count + lane
        return Step(self.rings.ravel(), np.roll(self.rings, -1, axis=1).ravel(), lane, block)


def ring_all_gather(topology: Topology, shard_bytes: int) -> Schedule:
    """AllGather of `shard_bytes` per rank around one ring: 0, 1, 2, ... where that is one, else the best one known."""
    in_order = range(topology.world_size)
    rings = np.array([in_order]) if is_ring(topology, in_order) else decompose(topology, lanes=1).rings
    return _around_rings("ring", topology, rings.astype(np.int64), [Fraction(1)], shard_bytes)


def multi_ring_all_gather(topology: Topology, shard_bytes: int, decomposition: Decomposition | None = None) -> Schedule:
    """AllGather of `shard_bytes` per rank around all rings of a decomposition at once (TASP).

    Each ring carries its share of every shard; rings for which not a byte is left are not used. Links are shared
    fairly between lanes, so a ring with a larger share takes several lanes, of about equal shares all of them. Without
    a decomposition it is the topology's own, `decompose(topology)`.
    """
    found = decomposition or decompose(topology)
    return _around_rings("multi-ring", topology, *over_lanes(found.rings, found.shares), shard_bytes)


def direct_all_gather(topology: Topology, shard_bytes: int) -> Schedule:
    """AllGather of `shard_bytes` per rank in one step: every rank sends its shard to all others."""
    n = topology.world_size
    offsets = range(1, n)
    step = Step.of((rank, (rank + offset) % n, offset - 1, rank) for offset in offsets for rank in range(n))
    return _all_gather("direct", topology, n - 1, [shard_bytes], [step] if n > 1 else [])


def _around_rings(
    name: str, topology: Topology, rings: IntArray, shares: Sequence[Fraction], shard_bytes: int
) -> Schedule:
    if topology.world_size == 1 or shard_bytes < 1:
        return _all_gather(name, topology, 1, [shard_bytes], [])
    pieces = split_bytes(shard_bytes, shares)
    used = [ring for ring, piece_bytes in enumerate(pieces) if piece_bytes > 0]
    return _all_gather(name, topology, len(used), [pieces[ring] for ring in used], RingSteps(rings[used]))


def _all_gather(
    name: str, topology: Topology, lanes: int, piece_bytes: Sequence[int], steps: Sequence[Step]
) -> Schedule:
    """A schedule in which every rank starts with so many pieces, of these sizes in bytes, and ends with all."""
    if sum(piece_bytes) < 1:
        raise ScheduleError(f"schedule {name!r}: shard size is {sum(piece_bytes)} bytes, expected 1 or more")
    n, pieces = topology.world_size, len(piece_bytes)
    if n * n * pieces > MOST_HOLDINGS:
        raise ScheduleError(
            f"schedule {name!r}: {n} ranks that hold {n * pieces} blocks in the end are too many to prove, "
            f"expected at most {MOST_HOLDINGS} blocks held in all"
        )
    schedule = Schedule(
        name=name,
        world_size=n,
        lanes=max(lanes, 1),
        block_bytes=np.array([*piece_bytes] * n, dtype=np.int64),
        initial=np.repeat(np.eye(n, dtype=bool), pieces, axis=1),
        final=np.ones((n, n * pieces), dtype=bool),
        steps=steps,
    )
    schedule.check_routes(topology)
    return schedule


ALL_GATHER: Mapping[str, Callable[[Topology, int], Schedule]] = {
    "ring": ring_all_gather,
    "multi-ring": multi_ring_all_gather,
    "direct": direct_all_gather,
    "trees": tree_all_gather,
}
"""Every AllGather schedule by its name on the command line."""


def all_gather(name: str, topology: Topology, shard_bytes: int, decomposition: Decomposition | None = None) -> Schedule:
    """The AllGather schedule of that name; `decomposition` is that of ``multi-ring``, if not the topology's own.

    Raises `ScheduleError` for a name there is none of.

    >>> from tasp_lab.builders import full_mesh
    >>> all_gather("multi-ring", full_mesh(8), 7).transfers
    392
    """
    if name not in ALL_GATHER:
        raise ScheduleError(f"unknown schedule {name!r}, expected one of {', '.join(ALL_GATHER)}")
    if name == "multi-ring":
        return multi_ring_all_gather(topology, shard_bytes, decomposition)
    return ALL_GATHER[name](topology, shard_bytes)
