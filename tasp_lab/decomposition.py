"""A decomposition: rings over the ranks of a topology that share no pair of ranks.

A *ring* is a directed Hamiltonian cycle of the digraph whose arcs are the ordered pairs of ranks between which a
transfer is possible: by a link or through switches. A decomposition of fold *k* uses no pair more than *k* times. With
one block per ring, every pair then carries at most *k* blocks at every step of a multi-ring AllGather. Pairs that are
links of their own share nothing then; behind switches they share the ports.

A `Decomposition` that exists has been checked: every ring visits every rank once, over pairs between which a transfer
is possible, and no pair is used more often than the fold.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tasp_lab.errors import NoDecompositionError
from tasp_lab.hamiltonian import IntArray, hamiltonian_cycles, two_fold_hamiltonian_cycles, verify_cycles
from tasp_lab.topology import Topology


@dataclass(frozen=True, eq=False)
class Decomposition:
    """Rings of a topology: `rings` is an int array (rings, world_size), each row the ranks in the ring's order.

    `fold` is how often a pair of ranks may be used; `reason` says why these rings and no others.
    """

    topology: Topology
    rings: IntArray
    fold: int
    reason: str

    def __post_init__(self) -> None:
        verify_cycles(self.rings, self.topology.world_size, self.fold)
        for ring, source, destination in self._arcs_without_link():
            raise NoDecompositionError(
                f"ring {ring} goes from rank {source} to {destination}, but {self.topology.name} has no such link"
            )

    def _arcs_without_link(self) -> list[tuple[int, int, int]]:
        allowed = self.topology.linked_pairs
        onward = np.roll(self.rings, -1, axis=1)
        missing = np.argwhere(~allowed[self.rings, onward])
        return [(int(r), int(self.rings[r, p]), int(onward[r, p])) for r, p in missing[:1]]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.topology.world_size

    @cached_property
    def links_total(self) -> int:
        """Ordered pairs of ranks between which a transfer is possible."""
        return int(self.topology.linked_pairs.sum())

    @cached_property
    def links_used(self) -> int:
        """How many of those some ring uses."""
        used = np.zeros((self.world_size, self.world_size), dtype=bool)
        used[self.rings, np.roll(self.rings, -1, axis=1)] = True
        return int(used.sum())


def decompose(topology: Topology, fold: int | None = None) -> Decomposition:
    """The rings of a topology in which every rank can reach every other directly or through switches.

    Without `fold` the answer is the smallest fold for which the rings use every pair of ranks equally: one, and two for
    4 and 6 ranks, where Tillson (1980) shows that one-fold rings do not exist. With ``fold=1`` these two raise
    `NoDecompositionError`. A topology that is one directed ring gives that ring.

    >>> from tasp_lab.builders import full_mesh
    >>> decompose(full_mesh(5)).rings.shape
    (4, 5)
    >>> decompose(full_mesh(4)).fold
    2
    """
    if fold is not None and fold not in (1, 2):
        raise NoDecompositionError(f"fold {fold}: expected 1 or 2")
    links = topology.linked_pairs
    n = topology.world_size
    if links.sum() == n * (n - 1):
        return _decompose_complete(topology, fold)
    if fold != 2 and (links.sum(axis=1) == 1).all() and (links.sum(axis=0) == 1).all():
        ring = _follow(links)
        return Decomposition(topology, ring, 1, "the topology is one directed ring")
    raise NoDecompositionError(
        f"{topology.name}: {int(links.sum())} of {n * (n - 1)} pairs of ranks are linked; rings are known here for "
        "complete digraphs (one or two-fold) and for single directed rings"
    )


def _decompose_complete(topology: Topology, fold: int | None) -> Decomposition:
    n = topology.world_size
    if n in (4, 6) and fold != 1:
        reason = (
            f"K*_{n} has no {n - 1} rings that share no pair of ranks (Tillson 1980); "
            "these two-fold rings use each pair of ranks twice"
        )
        return Decomposition(topology, two_fold_hamiltonian_cycles(n), 2, reason)
    rings = hamiltonian_cycles(n)
    if fold == 2:
        return Decomposition(topology, np.repeat(rings, 2, axis=0), 2, f"each ring of K*_{n} twice")
    return Decomposition(topology, rings, 1, f"K*_{n} decomposes into {n - 1} rings that share no pair of ranks")


def _follow(links: np.ndarray) -> IntArray:
    """The one ring of a digraph in which every vertex has one way out, as an array (1, n)."""
    onward = links.argmax(axis=1)
    ring = [0]
    while len(ring) < len(links):
        ring.append(int(onward[ring[-1]]))
    return np.array([ring], dtype=np.int32)
