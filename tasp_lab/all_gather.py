"""AllGather as schedules: every rank starts with one shard and ends with all of them.

`ring_all_gather` passes whole shards around one ring (as Ring Attention passes keys and values).
`multi_ring_all_gather` cuts every shard into one block per ring of a decomposition and passes them around all
rings at once (TASP, arXiv:2509.26541). `direct_all_gather` has every rank send its shard to all others at once.

Block ``owner * pieces + piece`` is piece `piece` of the shard that rank `owner` starts with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from tasp_lab.decomposition import decompose
from tasp_lab.errors import ScheduleError
from tasp_lab.schedule import IntArray, Schedule, Step
from tasp_lab.topology import Topology


def split_bytes(size_bytes: int, pieces: int) -> list[int]:
    """Cut a size into pieces that differ by at most one byte, the larger ones first.

    >>> split_bytes(10, 4)
    [3, 3, 2, 2]
    """
    quotient, rest = divmod(size_bytes, pieces)
    return [quotient + (piece < rest) for piece in range(pieces)]


@dataclass(frozen=True, eq=False)
class RingSteps(Sequence[Step]):
    """The steps of blocks that travel around rings: at step k position p of a ring passes on what came from p-k.

    `rings` is an int array (rings, world_size); the block of ring j that starts at rank r is ``r * rings + j``.
    """

    rings: IntArray

    def __len__(self) -> int:
        return self.rings.shape[1] - 1 if self.rings.size else 0

    @overload
    def __getitem__(self, index: int) -> Step: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Step]: ...
    def __getitem__(self, index: int | slice) -> Step | Sequence[Step]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(f"step {index} of {len(self)}")
        count, world_size = self.rings.shape
        lane = np.repeat(np.arange(count, dtype=np.int64), world_size)
        origin = np.roll(self.rings, index, axis=1)
        block = origin.ravel() * count + lane
        return Step(self.rings.ravel(), np.roll(self.rings, -1, axis=1).ravel(), lane, block)


def ring_all_gather(topology: Topology, shard_bytes: int) -> Schedule:
    """AllGather of `shard_bytes` per rank around one ring: 0, 1, 2, ... where that is one, else the first known."""
    n = topology.world_size
    ranks = np.arange(n, dtype=np.int64)
    in_order = all(topology.has_route(rank, (rank + 1) % n) for rank in range(n)) if n > 1 else True
    ring = ranks if in_order else decompose(topology).rings[0]
    return _around_rings("ring", topology, np.asarray([ring], dtype=np.int64), shard_bytes)


def multi_ring_all_gather(topology: Topology, shard_bytes: int) -> Schedule:
    """AllGather of `shard_bytes` per rank around all rings of the topology's decomposition at once (TASP).

    A shard with fewer bytes than there are rings uses as many rings as it has bytes.
    """
    rings = decompose(topology).rings[: max(shard_bytes, 0)]
    return _around_rings("multi-ring", topology, rings.astype(np.int64), shard_bytes)


def direct_all_gather(topology: Topology, shard_bytes: int) -> Schedule:
    """AllGather of `shard_bytes` per rank in one step: every rank sends its shard to all others."""
    n = topology.world_size
    offsets = range(1, n)
    step = Step.of((rank, (rank + offset) % n, offset - 1, rank) for offset in offsets for rank in range(n))
    return _all_gather("direct", topology, n - 1, 1, [step] if n > 1 else [], shard_bytes)


def _around_rings(name: str, topology: Topology, rings: IntArray, shard_bytes: int) -> Schedule:
    lanes = max(len(rings), 1)
    return _all_gather(name, topology, lanes, lanes, RingSteps(rings), shard_bytes)


def _all_gather(
    name: str, topology: Topology, lanes: int, pieces: int, steps: Sequence[Step], shard_bytes: int
) -> Schedule:
    if shard_bytes < 1:
        raise ScheduleError(f"schedule {name!r}: shard size is {shard_bytes} bytes, expected 1 or more")
    n = topology.world_size
    schedule = Schedule(
        name=name,
        world_size=n,
        lanes=max(lanes, 1),
        block_bytes=np.array(split_bytes(shard_bytes, pieces) * n, dtype=np.int64),
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
}
"""Every AllGather schedule by its name on the command line."""


def all_gather(name: str, topology: Topology, shard_bytes: int) -> Schedule:
    """The AllGather schedule of that name. Raises `ScheduleError` for a name there is none of.

    >>> from tasp_lab.builders import full_mesh
    >>> all_gather("multi-ring", full_mesh(8), 7).transfers
    392
    """
    if name not in ALL_GATHER:
        raise ScheduleError(f"unknown schedule {name!r}, expected one of {', '.join(ALL_GATHER)}")
    return ALL_GATHER[name](topology, shard_bytes)
