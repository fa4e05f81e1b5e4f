"""Loads of rings on links, ports and shared capacities, and the rate that follows from them.

Blocks circulate on all rings at once; each ring carries its share of every shard. The load of a link, port or shared
capacity is the sum of the shares of the rings that use it, counted once per hop. With shares that sum to one, the rate
of all rings together is the minimum of bandwidth over load: the bytes per second that each rank receives.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from tasp_lab.topology.graph import Topology

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
