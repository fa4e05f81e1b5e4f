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
import numpy.typing as npt

from tasp_lab.arrays import IntArray
from tasp_lab.decomposition import Decomposition, decompose
from tasp_lab.errors import ScheduleError
from tasp_lab.pieces import over_lanes, split_bytes
from tasp_lab.ring_proof import all_blocks, own_blocks, proves
from tasp_lab.rings import is_ring
from tasp_lab.schedule import LazySteps, Proof, Schedule, Step
from tasp_lab.topology import Topology
from tasp_lab.tree_all_gather import tree_all_gather

MOST_TRANSFERS_AT_ONCE = 2**27
"""A step of as many takes 4 GB."""


@dataclass(frozen=True, eq=False)
class RingSteps(LazySteps):
    """The steps of blocks that travel around rings, each ring's part of a shard cut in `pieces`, 1 or more.

    `rings` is an int array (rings, world_size). At step ``k * pieces + q`` position i of a ring passes on piece q of
    what started at position i - k. Piece q that starts at rank r on ring j is block ``(r * rings + j) * pieces + q``.

    >>> print(RingSteps(np.array([[0, 1, 2]]), pieces=2)[3])
    0->1 lane 0 block 5
    1->2 lane 0 block 1
    2->0 lane 0 block 3
    """

    rings: IntArray
    pieces: int = 1

    hops_repeat = True

    def __post_init__(self) -> None:
        self.rings.flags.writeable = False

    @property
    def lag(self) -> int:
        """How many steps before it is sent on a block arrives: a hop at step s needs the hop before it at s - lag.

        The first `lag` steps send what is there from the start.
        """
        return self.pieces

    def __len__(self) -> int:
        return (self.rings.shape[1] - 1) * self.pieces if self.rings.size else 0

    def step(self, index: int) -> Step:
        count, world_size = self.rings.shape
        travelled, piece = divmod(index, self.pieces)
        lane = np.repeat(np.arange(count, dtype=np.int64), world_size)
        origin = np.roll(self.rings, travelled, axis=1)
        block = (origin.ravel() * count + lane) * self.pieces + piece
        return Step(self.rings.ravel(), np.roll(self.rings, -1, axis=1).ravel(), lane, block)

    def prove(self, schedule: Schedule) -> Proof | None:
        """By induction (`tasp_lab.ring_proof`)."""
        if not proves(self.rings, self.pieces, schedule):
            return None
        return Proof(transfers=len(self) * self.rings.size, peak_blocks=len(schedule.block_bytes))


def ring_all_gather(
    topology: Topology,
    shard_bytes: int,
    rings: npt.NDArray[np.integer] | None = None,
    fused: bool = False,
    *,
    pieces: int = 1,
) -> Schedule:
    """AllGather of `shard_bytes` per rank around one ring, or around given ones in equal shares.

    `rings` is an int array (rings, world_size). Without any it is 0, 1, 2, ... where that is a ring, else the best one
    known. What a ring carries of a shard travels in so many pieces, one after the other. `fused` is whether it is one
    call of the communication library.
    """
    in_order = range(topology.world_size)
    if rings is None:
        rings = np.array([in_order]) if is_ring(topology, in_order) else decompose(topology, lanes=1).rings
    shares = [Fraction(1, max(len(rings), 1))] * len(rings)
    return _around_rings("ring", topology, rings.astype(np.int64), shares, shard_bytes, pieces, fused)


def multi_ring_all_gather(
    topology: Topology, shard_bytes: int, decomposition: Decomposition | None = None, *, pieces: int = 1
) -> Schedule:
    """AllGather of `shard_bytes` per rank around all rings of a decomposition at once (TASP).

    Each ring carries its share of every shard; rings for which not a byte is left are not used. Links are shared
    fairly between lanes, so a ring with a larger share takes several lanes, of about equal shares all of them. Without
    a decomposition it is the topology's own, `decompose(topology)`. What a lane carries of a shard travels in so many
    pieces, one after the other.
    """
    found = decomposition or decompose(topology)
    return _around_rings("multi-ring", topology, *over_lanes(found.rings, found.shares), shard_bytes, pieces)


def direct_all_gather(topology: Topology, shard_bytes: int) -> Schedule:
    """AllGather of `shard_bytes` per rank in one step: every rank sends its shard to all others."""
    n = topology.world_size
    if n * (n - 1) > MOST_TRANSFERS_AT_ONCE:
        raise ScheduleError(
            f"schedule 'direct': {n * (n - 1)} transfers in one step, expected at most {MOST_TRANSFERS_AT_ONCE}"
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
    pieces: int,
    fused: bool = False,
) -> Schedule:
    if topology.world_size == 1 or shard_bytes < 1:
        return _all_gather(name, topology, 1, [shard_bytes], [])
    if rings.size > MOST_TRANSFERS_AT_ONCE:
        raise ScheduleError(
            f"schedule {name!r}: {rings.size} transfers in each step, expected at most {MOST_TRANSFERS_AT_ONCE}"
        )
    parts = split_bytes(shard_bytes, shares)
    used = [ring for ring, part_bytes in enumerate(parts) if part_bytes > 0]
    smallest = min(parts[ring] for ring in used)
    if not 1 <= pieces <= smallest:
        raise ScheduleError(f"schedule {name!r}: {pieces} pieces, expected 1 to {smallest}: a piece has a byte or more")
    sizes = [size for ring in used for size in split_bytes(parts[ring], [Fraction(1, pieces)] * pieces)]
    return _all_gather(name, topology, len(used), sizes, RingSteps(rings[used], pieces), fused)


def _all_gather(
    name: str, topology: Topology, lanes: int, piece_bytes: Sequence[int], steps: Sequence[Step], fused: bool = False
) -> Schedule:
    """A schedule in which every rank starts with so many pieces, of these sizes in bytes, and ends with all."""
    if sum(piece_bytes) < 1:
        raise ScheduleError(f"schedule {name!r}: shard size is {sum(piece_bytes)} bytes, expected 1 or more")
    n, pieces = topology.world_size, len(piece_bytes)
    schedule = Schedule(
        name=name,
        world_size=n,
        lanes=max(lanes, 1),
        block_bytes=np.tile(np.array(piece_bytes, dtype=np.int64), n),
        initial=own_blocks(n, pieces),
        final=all_blocks(n, n * pieces),
        steps=steps,
        fused=fused,
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
