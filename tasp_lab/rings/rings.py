"""The result of a ring search, and the tolerance for comparing its rate with a bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor
from typing import Any

import numpy as np
import numpy.typing as npt

from tasp_lab.core.arrays import IntArray
from tasp_lab.topology.graph import Topology

RELATIVE_TOLERANCE = 1e-9
"""Relative difference attributed to rounding; a rate this close to its limit counts as equal."""


def is_ring(topology: Topology, order: Sequence[int]) -> bool:
    """Whether each rank can send to the next one in this order, and the last to the first."""
    ranks = np.array(order, dtype=np.int64)
    return len(order) == 1 or bool(topology.have_routes(ranks, np.roll(ranks, -1)).all())


@dataclass(frozen=True, eq=False)
class Rings:
    """Rings, an int array (rings, world_size), in which no pair of ranks occurs more than `fold` times.

    `shares` are the shares of the rings, empty if equal. `limit_bytes_per_s` is an upper bound of the rate of such
    rings if the search proved a tighter one than the cuts. `reason` explains the choice of the rings.
    """

    rings: npt.NDArray[np.int64]
    fold: int
    reason: str
    shares: tuple[Fraction, ...] = ()
    limit_bytes_per_s: Fraction | None = None


def fold_of(rings: npt.NDArray[np.integer]) -> int:
    """The maximum number of uses of an ordered pair of ranks by rings, an int array (rings, world_size).

    >>> fold_of(np.array([[0, 1, 2], [1, 2, 0], [0, 2, 1]]))
    2
    """
    successors = np.roll(rings, -1, axis=1)
    return int(np.unique(rings.astype(np.int64) * rings.shape[1] + successors, return_counts=True)[1].max())


# Loads of rings on links, ports and shared capacities, and the rate that follows from them.
#
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
    loads: ExactArray = np.zeros(
        len(topology.links) + len(topology.shared) + 1, dtype=dtype
    )  # the last entry takes index -1, no constraint
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
    direct = topology.link_between
    simple = (of_pair > 0) & (direct >= 0) & (not topology.shared)
    loads: ExactArray = np.zeros(len(topology.links) + len(topology.shared), dtype=of_pair.dtype)
    loads[direct[simple]] = of_pair[simple]
    for source, destination in np.argwhere((of_pair > 0) & ~simple).tolist():
        loads[list(topology.route(source, destination).constraints)] += of_pair[source, destination]
    return loads


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
    slowest = loaded[estimates <= estimates.min() * (1 + 1e-9)]
    if topology.table.is_uniform and not topology.shared:
        slowest = slowest[[loads[slowest].argmax()]]  # all links have one bandwidth
    count = len(topology.links)
    exact = {
        Fraction((topology.links[at] if at < count else topology.shared[at - count]).bandwidth_bytes_per_s) / load
        for at, load in zip(slowest.tolist(), loads[slowest].tolist(), strict=True)
    }
    rate: Fraction = min(exact) * whole
    return rate


def whole_weights(shares: Sequence[Fraction]) -> tuple[int, list[int]]:
    """The sum of the shares scaled to integers, and these integers.

    >>> whole_weights([Fraction(1, 2), Fraction(1, 3), Fraction(1, 6)])
    (6, [3, 2, 1])
    """
    denominator = np.lcm.reduce([share.denominator for share in shares], dtype=object)
    weights = [int(share * int(denominator)) for share in shares]
    return sum(weights), weights


# Splitting shards into chunks and lanes in proportion to the shares of rings.


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
    fits = (
        unit
        for unit, least in MIN_UNITS.items()
        if not size_bytes % unit and size_bytes * smallest_share >= unit * least
    )
    return next(fits, 1)


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
