"""What a search for rings returns, when that is enough, and the patience it has."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from tasp_lab.errors import NoDecompositionError
from tasp_lab.topology import Topology

ENOUGH = 1e-9
"""Relative difference that rounding may make; below it a rate counts as the limit that was sought."""

Say = Callable[[str], None]
"""Told of progress, a line at a time."""


def say_nothing(_: str) -> None:
    """Progress that nobody wants to hear."""


def is_ring(topology: Topology, order: Sequence[int]) -> bool:
    """Whether ranks in this order can pass something on, each to the next and the last to the first."""
    ranks = np.array(order, dtype=np.int64)
    return len(order) == 1 or bool(topology.have_routes(ranks, np.roll(ranks, -1)).all())


@dataclass(frozen=True, eq=False)
class Rings:
    """Rings, an int array (rings, world_size), in which no pair of ranks occurs more than `fold` times.

    `shares` are what each carries of the whole, empty for equal shares. `limit_bytes_per_s` is what no rings of this
    kind exceed, where the search proved something tighter than the cuts do. `reason` says why these rings.
    """

    rings: npt.NDArray[np.int64]
    fold: int
    reason: str
    shares: tuple[Fraction, ...] = ()
    limit_bytes_per_s: Fraction | None = None


def fold_of(rings: npt.NDArray[np.integer]) -> int:
    """How often the ordered pair of ranks occurs that occurs most in rings, an int array (rings, world_size).

    >>> fold_of(np.array([[0, 1, 2], [1, 2, 0], [0, 2, 1]]))
    2
    """
    onward = np.roll(rings, -1, axis=1)
    return int(np.unique(rings.astype(np.int64) * rings.shape[1] + onward, return_counts=True)[1].max())


@dataclass(frozen=True)
class Patience:
    """How long a search may take in seconds, from now on, and whom it tells what it does.

    Raises `NoDecompositionError` for a time limit that is none.
    """

    limit_s: float
    say: Say = say_nothing
    started_s: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if not 0 < self.limit_s < float("inf"):
            raise NoDecompositionError(f"a time limit of {self.limit_s} s: expected more than 0")

    @property
    def left_s(self) -> float:
        """Seconds that are left; never less than 0."""
        return max(0.0, self.started_s + self.limit_s - time.monotonic())
