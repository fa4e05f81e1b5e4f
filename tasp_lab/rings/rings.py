"""Rings of a topology: decompositions, the loads of rings on links and the rate that follows, and shares of bytes.

A *ring* is a directed Hamiltonian cycle of the digraph whose arcs are the ordered pairs of ranks that can exchange
data, by a link or through switches. A decomposition of fold *k* uses no pair more than *k* times. Rings that share no
pair share no link either if every pair has its own link; behind switches they share the ports.

The *rate* of a decomposition is the number of bytes that every rank receives per second when the blocks of an
AllGather circulate on all rings at once. It has two upper bounds:

- for rings, the bandwidth out of any set of ranks (`tasp_lab.topology.cuts.ring_cut`);
- for any AllGather, the bottleneck cut (`tasp_lab.topology.cuts.all_gather_cut`). Trees can reach it, rings not always:
  a ring that enters a node carries all shards through its NICs, a tree only the shards that the node lacks.

A `Decomposition` is verified when it is created: every ring visits every rank once, over pairs with a route; no pair is
used more often than the fold; and the shares sum to one. `tasp_lab.rings.decompose` finds the best one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import floor
from typing import Any

import numpy as np
import numpy.typing as npt

from tasp_lab.core.arrays import IntArray, frozen, whole
from tasp_lab.core.errors import NoDecompositionError
from tasp_lab.core.tables import brief
from tasp_lab.topology.cuts import all_gather_cut, ring_cut
from tasp_lab.topology.graph import Topology

RELATIVE_TOLERANCE = 1e-9
"""Relative difference attributed to rounding; a rate this close to its limit counts as equal."""


def is_ring(topology: Topology, order: Sequence[int]) -> bool:
    """Whether each rank is linked to the next one in this order, and the last to the first."""
    ranks = np.array(order, dtype=np.int64)
    return len(order) == 1 or bool(topology.are_linked(ranks, np.roll(ranks, -1)).all())


def fold_of(rings: npt.NDArray[np.integer]) -> int:
    """The maximum number of uses of an ordered pair of ranks by rings, an int array (rings, world_size).

    >>> fold_of(np.array([[0, 1, 2], [1, 2, 0], [0, 2, 1]]))
    2
    """
    successors = np.roll(rings, -1, axis=1)
    return int(np.unique(rings.astype(np.int64) * rings.shape[1] + successors, return_counts=True)[1].max())


@dataclass(frozen=True, eq=False, repr=False)
class Decomposition:
    """Rings of a topology.

    Parameters
    ----------
    topology : the topology of the rings.
    rings : int array (rings, world_size), each row the ranks in the ring's order; kept as int32.
    fold : maximum number of uses of a pair of ranks.
    reason : why these rings were chosen.
    shares : the share of every shard that each ring carries, summing to one; equal if not given.
    limit_bytes_per_s : upper bound of the rate of such rings (as many, of this fold); that of the cuts if not given.
    search_complete : whether a larger search budget would give the same rings.

    Raises `NoDecompositionError` naming the first invalid ring or pair.
    """

    topology: Topology
    rings: npt.NDArray[Any]
    fold: int
    reason: str
    shares: tuple[Fraction, ...] = ()
    limit_bytes_per_s: Fraction | None = None
    search_complete: bool = True

    def __post_init__(self) -> None:
        array = "an int array of shape (rings, ranks)"
        rings = frozen("rings", self.rings, np.int32, 2, array, NoDecompositionError)
        object.__setattr__(self, "rings", rings)
        if not self.shares:
            object.__setattr__(self, "shares", (Fraction(1, max(len(rings), 1)),) * len(rings))
        from tasp_lab.rings.complete_digraph import verify_cycles  # a ring in the order of ranks needs none of it

        verify_cycles(rings, self.topology.world_size, self.fold)
        if len(self.shares) != len(rings):
            raise NoDecompositionError(f"{len(self.shares)} shares for {len(rings)} rings, expected one per ring")
        if self.shares and (min(self.shares) <= 0 or sum(self.shares) != 1):
            raise NoDecompositionError(f"shares must be more than 0 and sum to 1, they sum to {sum(self.shares)}")
        successors = np.roll(rings, -1, axis=1)
        if self.topology.reaches_all or (linked := self.topology.have_routes(rings, successors)).all():
            return
        ring, position = np.argwhere(~linked)[0]
        raise NoDecompositionError(
            f"ring {ring} goes from rank {rings[ring, position]} to {successors[ring, position]}, but "
            f"{self.topology.name} has no such link, and {self.topology.forwarding.limit}"
        )

    def __repr__(self) -> str:
        return brief(self, self.topology.name, f"{len(self.rings)} rings of fold {self.fold}")

    def to_dict(self) -> dict[str, object]:
        """The object of `--json`."""
        return {
            "topology": self.topology.name,
            "world_size": self.world_size,
            "fold": self.fold,
            "reason": self.reason,
            "rings": self.rings.tolist(),
            "shares": [float(share) for share in self.shares],
            "links_used": self.links_used,
            "links_total": self.links_total,
            "rate_bytes_per_s": float(self.rate_bytes_per_s),
            "ring_limit_bytes_per_s": float(self.ring_limit_bytes_per_s),
            "bound_bytes_per_s": float(self.bound_bytes_per_s),
            "share_of_bound": self.share_of_bound,
            "proved_optimal": self.proved_optimal,
            "search_complete": self.search_complete,
            "beyond_rings": self.beyond_rings,
        }

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.topology.world_size

    @property
    def links_total(self) -> int:
        """Number of links of the topology."""
        return len(self.topology.links)

    @cached_property
    def links_used(self) -> int:
        """Number of links that at least one ring uses."""
        loads = constraint_loads(self.topology, self.rings, [1] * len(self.rings))
        return int((loads[: self.links_total] > 0).sum())

    @cached_property
    def rate_bytes_per_s(self) -> Fraction:
        """Bytes/s that every rank receives over all rings together; 0 for one rank. Exact."""
        if not len(self.rings):
            return Fraction(0)
        return ring_rate_bytes_per_s(self.topology, self.rings, self.shares)

    @cached_property
    def bound_bytes_per_s(self) -> Fraction:
        """Bytes/s that every rank can receive in any AllGather: (n - 1) shards over the time of the bottleneck cut."""
        if self.world_size == 1:
            return Fraction(0)
        if self.rate_bytes_per_s == min(self.topology.bandwidths_into_ranks_bytes_per_s):
            return self.rate_bytes_per_s
        cut = all_gather_cut(self.topology)
        return (self.world_size - 1) * cut.bandwidth_bytes_per_s / cut.ranks_inside

    @property
    def share_of_bound(self) -> float:
        """The rate over the bound; 1 for one rank."""
        return float(self.rate_bytes_per_s / self.bound_bytes_per_s) if self.world_size > 1 else 1.0

    @cached_property
    def ring_limit_bytes_per_s(self) -> Fraction:
        """Upper bound of the rate of rings: `limit_bytes_per_s`, or that of the cuts."""
        if self.limit_bytes_per_s is not None:
            return self.limit_bytes_per_s
        return ring_limit_bytes_per_s(self.topology, self.rate_bytes_per_s)

    @property
    def proved_optimal(self) -> bool:
        """Whether no rings (no more of them than a given number of lanes) reach a higher rate."""
        return self.rate_bytes_per_s >= self.ring_limit_bytes_per_s * (1 - Fraction(RELATIVE_TOLERANCE))

    @property
    def beyond_rings(self) -> bool:
        """Whether no rings reach the bound, however many: trees can (Edmonds 1973; ForestColl, arXiv 2402.06787)."""
        return ring_limit_bytes_per_s(self.topology, self.rate_bytes_per_s) < self.bound_bytes_per_s


def ring_limit_bytes_per_s(topology: Topology, reached: Fraction | int = 0) -> Fraction:
    """Upper bound of the rate of any rings: the bandwidth of the narrowest cut; 0 for one rank.

    No flow is computed if the rate `reached` already equals the smallest bandwidth into a rank.
    """
    if topology.world_size == 1:
        return Fraction(0)
    if reached and reached == min(topology.bandwidths_into_ranks_bytes_per_s):
        return Fraction(reached)
    return ring_cut(topology).bandwidth_bytes_per_s


# Blocks circulate on all rings at once; each ring carries its share of every shard. The load of a link, port or shared
# capacity is the sum of the shares of the rings that use it, counted once per hop. With shares that sum to one, the
# rate of all rings together is the minimum of bandwidth over load: the bytes per second that each rank receives.

ExactArray = npt.NDArray[Any]
"""Exact numbers: 64-bit integers, or Python objects (int, Fraction)."""

_HOPS_PER_BATCH = 2**20


def constraint_loads(topology: Topology, rings: npt.NDArray[np.integer], weights: Sequence[int]) -> ExactArray:
    """The load of each of `Topology.constraints` when ring j carries `weights[j]`, as an int array.

    `rings` is an int array (rings, world_size).

    >>> from tasp_lab.topology.builders import switch
    >>> constraint_loads(switch(3), np.array([[0, 1, 2], [0, 2, 1]]), [1, 1])
    array([2, 2, 2, 2, 2, 2])
    """
    n = topology.world_size
    dtype = np.int64 if sum(weights) * n < 2**63 else np.object_
    loads: ExactArray = np.zeros(len(topology.constraints) + 1, dtype=dtype)  # the last is of none, -1
    batch = max(1, _HOPS_PER_BATCH // n)
    for first in range(0, len(rings), batch):
        sources = rings[first : first + batch]
        constraints, _ = topology.routes(sources.ravel(), np.roll(sources, -1, axis=1).ravel())
        passing = np.repeat(np.asarray(weights[first : first + batch], dtype=dtype), n)
        np.add.at(loads, constraints, passing[:, None])
    return loads[:-1]


def loads_of_pairs(topology: Topology, of_pair: ExactArray) -> ExactArray:
    """The load of each of `Topology.constraints` when rank a sends `of_pair[a, b]` to rank b.

    `of_pair` is an array (world_size, world_size), 0 where there is no route; the loads have its dtype.

    >>> from tasp_lab.topology.builders import switch
    >>> loads_of_pairs(switch(2), np.array([[0, 3], [5, 0]]))
    array([3, 5, 5, 3])
    """
    hops = np.nonzero(of_pair)
    loads: ExactArray = np.zeros(len(topology.constraints) + 1, dtype=of_pair.dtype)
    np.add.at(loads, topology.routes(*hops)[0], of_pair[hops][:, None])
    return loads[:-1]


def ring_rate_bytes_per_s(topology: Topology, rings: npt.NDArray[np.integer], shares: Sequence[Fraction]) -> Fraction:
    """Bytes/s of all rings together with these shares, which sum to one; exact.

    >>> from tasp_lab.topology.builders import full_mesh
    >>> ring_rate_bytes_per_s(full_mesh(3, 50), np.array([[0, 1, 2], [0, 2, 1]]), [Fraction(1, 2)] * 2)
    Fraction(100, 1)
    """
    whole, weights = whole_weights(shares)
    loads = constraint_loads(topology, rings, weights)
    loaded = np.flatnonzero(loads)
    of_shared = [float(shared.bandwidth_bytes_per_s) for shared in topology.shared]
    estimates = np.concatenate([topology.link_bandwidths_bytes_per_s, of_shared])[loaded] / loads[loaded].astype(float)
    slowest = loaded[estimates <= estimates.min() * (1 + RELATIVE_TOLERANCE)]
    if topology.table.is_uniform and not topology.shared:
        slowest = slowest[[loads[slowest].argmax()]]  # all links have one bandwidth
    at_most = zip(slowest.tolist(), loads[slowest].tolist(), strict=True)
    rate: Fraction = min(Fraction(topology.constraints[at].bandwidth_bytes_per_s) / load for at, load in at_most)
    return whole * rate


def whole_weights(shares: Sequence[Fraction]) -> tuple[int, list[int]]:
    """The sum of the shares scaled to integers, and these integers.

    >>> whole_weights([Fraction(1, 2), Fraction(1, 3), Fraction(1, 6)])
    (6, [3, 2, 1])
    """
    denominator = np.lcm.reduce([share.denominator for share in shares], dtype=object)
    weights = [int(share * int(denominator)) for share in shares]
    return sum(weights), weights


MAX_LANES_OF_SHARES = 128
"""Approximate maximum number of lanes for unequal shares. More lanes match the shares better but need more messages."""

PAGE_BYTES, LOAD_BYTES = 4096, 16

MIN_UNITS = {PAGE_BYTES: 128, LOAD_BYTES: 1}
"""The units in which sizes are cut, and how many of them a chunk must have: with 128 pages, rounding is below 1 %."""


def split_count(count: int, shares: Sequence[Fraction]) -> list[int]:
    """Split a number of things in proportion to shares that sum to one, each part rounded down or up.

    The remainder after rounding down goes to the parts with the largest fractions, the first ones if equal.

    >>> split_count(10, [Fraction(1, 4)] * 4), split_count(10, [Fraction(2, 3), Fraction(1, 3)])
    ([3, 3, 2, 2], [7, 3])
    """
    exact = [count * share for share in shares]
    parts = [floor(each) for each in exact]
    by_loss = sorted(range(len(exact)), key=lambda part: parts[part] - exact[part])
    for part in by_loss[: count - sum(parts)]:
        parts[part] += 1
    return parts


def split_bytes(size_bytes: int, shares: Sequence[Fraction]) -> list[int]:
    """Split a size into chunks in proportion to shares that sum to one, in units of `unit_bytes`.

    >>> split_bytes(2**20, [Fraction(1, 3)] * 3), split_bytes(10, [Fraction(1, 4)] * 4)
    ([349536, 349520, 349520], [3, 3, 2, 2])
    """
    size_bytes = whole("size in bytes", size_bytes)
    unit = unit_bytes(size_bytes, min(shares, default=Fraction(1)))
    return [unit * count for count in split_count(size_bytes // unit, shares)]


def unit_bytes(size_bytes: int, smallest_share: Fraction) -> int:
    """The unit in which a size is cut: a page, the 16 bytes that a thread of a GPU loads at once, or a byte.

    NCCL copies a message 16 bytes at a time only if both of its ends begin at a multiple of that (`reduceCopy` in
    `common_kernel.h`). So the unit divides the size, and no chunk is less than `MIN_UNITS` of it, which limits how
    much chunks differ by rounding.

    >>> [unit_bytes(size, Fraction(1, 7)) for size in (64 * 2**20, 2**20, 112, 96, 10**6 + 1)]
    [4096, 16, 16, 1, 1]
    """
    for unit, least in MIN_UNITS.items():
        if not size_bytes % unit and size_bytes * smallest_share >= unit * least:
            return unit
    return 1


def lanes_of(shares: Sequence[Fraction]) -> list[int]:
    """Number of lanes of each ring: its share over the smallest share, limited by `MAX_LANES_OF_SHARES`.

    >>> lanes_of([Fraction(1, 2), Fraction(1, 4), Fraction(1, 4)])
    [2, 1, 1]
    """
    if not shares:
        return []
    finest = max(min(shares), Fraction(1, max(MAX_LANES_OF_SHARES, len(shares))))
    return [max(1, round(share / finest)) for share in shares]


def over_lanes(rings: npt.NDArray[np.integer], shares: Sequence[Fraction]) -> tuple[IntArray, list[Fraction]]:
    """Each ring repeated once per lane, and the share of each lane; these shares are about equal.

    `rings` is an int array (rings, world_size) with a share per ring. Lanes share links fairly, so a ring with a larger
    share needs more lanes.
    """
    lanes = lanes_of(shares)
    repeated = np.repeat(rings.astype(np.int64), lanes, axis=0)
    return repeated, [share / count for share, count in zip(shares, lanes, strict=True) for _ in range(count)]
