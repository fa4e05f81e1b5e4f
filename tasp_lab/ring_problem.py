"""The question for which rings are sought: which pairs of ranks a ring may use, and what these pairs share.

A pair of ranks is an *arc*. A hop along it loads every constraint of its route, so rings may carry together what every
constraint allows. On a topology of direct links alone each arc has a constraint of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array

from tasp_lab.arrays import BoolArray, FloatArray, IntArray
from tasp_lab.errors import NoDecompositionError
from tasp_lab.topology import Topology

MOST_ARCS = 1024 * 1023
"""Those of 1024 ranks that all reach each other: a search among them takes minutes and gigabytes."""


def is_searchable(topology: Topology) -> bool:
    """Whether there are not too many pairs of ranks to search among.

    >>> from tasp_lab.builders import ring, switch
    >>> is_searchable(ring(4096)), is_searchable(switch(4096))
    (True, False)
    """
    pairs = topology.world_size * (topology.world_size - 1)
    return pairs <= MOST_ARCS or (not topology.is_complete and int(topology.linked_pairs.sum()) <= MOST_ARCS)


@dataclass(frozen=True, eq=False)
class RingProblem:
    """Arcs and constraints of a topology.

    `arcs` is an int array (arcs, 2); `uses` a sparse array (constraints, arcs): 1 where the arc loads the constraint;
    `bandwidths` the bandwidth of each constraint in bytes/s, exact.
    """

    world_size: int
    arcs: IntArray
    uses: csr_array
    bandwidths: tuple[Fraction, ...]

    @classmethod
    def of(cls, topology: Topology) -> RingProblem:
        """The question that a topology asks. Constraints that no arc loads are left out.

        Raises `NoDecompositionError` where there are too many arcs to search among.
        """
        if not is_searchable(topology):
            raise NoDecompositionError(
                f"{topology.name}: rings are known here by no closed form, and more than {MOST_ARCS} pairs of ranks "
                "are too many to search among"
            )
        arcs = np.argwhere(topology.linked_pairs)
        routes = [topology.route(source, destination).constraints for source, destination in arcs.tolist()]
        used = sorted({constraint for route in routes for constraint in route})
        row = {constraint: position for position, constraint in enumerate(used)}
        rows = [row[constraint] for route in routes for constraint in route]
        columns = [arc for arc, route in enumerate(routes) for _ in route]
        uses = csr_array((np.ones(len(rows)), (rows, columns)), shape=(len(used), len(arcs)))
        constraints = topology.constraints
        bandwidths = tuple(Fraction(constraints[constraint].bandwidth_bytes_per_s) for constraint in used)
        return cls(topology.world_size, arcs, uses, bandwidths)

    @cached_property
    def linked(self) -> BoolArray:
        """Bool array (world_size, world_size): the arcs."""
        return self.arc_at >= 0

    @cached_property
    def arc_at(self) -> IntArray:
        """Int array (world_size, world_size): the number of the arc; -1 where there is none."""
        found = np.full((self.world_size, self.world_size), -1, dtype=np.int64)
        found[self.arcs[:, 0], self.arcs[:, 1]] = np.arange(len(self.arcs))
        return found

    @cached_property
    def is_uniform(self) -> bool:
        """Whether every arc is a link of its own and all have the same bandwidth: then only its digraph matters."""
        return self.has_own_links and len(set(self.bandwidths)) == 1

    @cached_property
    def has_own_links(self) -> bool:
        """Whether every arc is a link of its own, which it shares with no other."""
        constraints, arcs = self.uses.shape
        return bool(constraints == arcs == self.uses.nnz)

    @cached_property
    def relative_bandwidths(self) -> FloatArray:
        """The bandwidths over the largest of them."""
        largest = max(self.bandwidths)
        return np.array([float(bandwidth / largest) for bandwidth in self.bandwidths])

    def loads(self, rings: npt.NDArray[np.integer]) -> csr_array:
        """How often each ring uses each constraint, as a sparse array (constraints, rings)."""
        return csr_array(self.uses @ self.hops(rings))

    def hops(self, rings: npt.NDArray[np.integer]) -> csr_array:
        """Which arcs each ring uses, as a sparse array (arcs, rings)."""
        arcs = self.arc_at[rings, np.roll(rings, -1, axis=1)]
        count, n = rings.shape
        columns = np.repeat(np.arange(count), n)
        return csr_array((np.ones(arcs.size), (arcs.ravel(), columns)), shape=(len(self.arcs), count))

    def every_ring(self, most: int) -> IntArray | None:
        """All rings from vertex 0 on, as an array (rings, world_size); None if there are more than `most`.

        >>> from tasp_lab.builders import hypercube
        >>> len(RingProblem.of(hypercube(3)).every_ring(100))
        12
        """
        found: list[tuple[int, ...]] = []
        patience = 20 * most
        for ring in self._rings_in_order():
            patience -= 1
            if ring is not None:
                found.append(ring)
            if len(found) > most or patience < 0:
                return None
        return np.array(found, dtype=np.int64).reshape(-1, self.world_size)

    def _rings_in_order(self) -> Iterator[tuple[int, ...] | None]:
        """All rings, and None for each step of the search that ends in none."""
        onward = [np.flatnonzero(row).tolist() for row in self.linked]
        closes = self.linked[:, 0]
        path, seen = [0], [True] + [False] * (self.world_size - 1)
        choices = [iter(onward[0])]
        while choices:
            following = next((vertex for vertex in choices[-1] if not seen[vertex]), None)
            if following is None:
                choices.pop()
                seen[path.pop()] = False
                yield None
                continue
            path.append(following)
            seen[following] = True
            choices.append(iter(onward[following]))
            if len(path) == self.world_size and closes[following]:
                yield tuple(path)
