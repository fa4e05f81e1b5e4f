"""The result of a ring search, and the tolerance for comparing its rate with a bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

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
