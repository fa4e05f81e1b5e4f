"""The input of a ring search: the pairs of ranks that a ring may use, and the constraints that these pairs load.

A pair of ranks is an *arc*. A hop along it loads every constraint of its route, and every constraint limits the rings
that load it. On a topology of direct links only, each arc has its own constraint.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array

from tasp_lab.core.arrays import BoolArray, FloatArray, IntArray
from tasp_lab.core.errors import NoDecompositionError
from tasp_lab.topology.graph import Topology

MAX_ARCS = 1024 * 1023
"""The arcs of 1024 ranks that all reach each other; a search over them takes minutes and gigabytes."""


def is_searchable(topology: Topology) -> bool:
    """Whether the number of pairs of ranks is small enough for a search.

    >>> from tasp_lab.topology.builders import ring, switch
    >>> is_searchable(ring(4096)), is_searchable(switch(4096))
    (True, False)
    """
    pairs = topology.world_size * (topology.world_size - 1)
    return pairs <= MAX_ARCS or (not topology.is_complete and int(topology.linked_pairs.sum()) <= MAX_ARCS)


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
        """The arcs and constraints of a topology. Constraints that no arc loads are left out.

        Raises `NoDecompositionError` if there are too many arcs for a search.
        """
        if not is_searchable(topology):
            raise NoDecompositionError(
                f"{topology.name}: no closed form is known, and a search is limited to {MAX_ARCS} pairs of ranks"
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
        arc_at = np.full((self.world_size, self.world_size), -1, dtype=np.int64)
        arc_at[self.arcs[:, 0], self.arcs[:, 1]] = np.arange(len(self.arcs))
        return arc_at

    @cached_property
    def is_uniform(self) -> bool:
        """Whether every arc has its own link and all have one bandwidth, so that only the digraph matters."""
        constraints, arcs = self.uses.shape
        return bool(constraints == arcs == self.uses.nnz) and len(set(self.bandwidths)) == 1

    @cached_property
    def relative_bandwidths(self) -> FloatArray:
        """The bandwidths divided by the largest one."""
        largest = max(self.bandwidths)
        return np.array([float(bandwidth / largest) for bandwidth in self.bandwidths])

    def loads(self, rings: npt.NDArray[np.integer]) -> csr_array:
        """Number of uses of each constraint by each ring, a sparse array (constraints, rings)."""
        return csr_array(self.uses @ self.hops(rings))

    def arcs_of(self, rings: npt.NDArray[np.integer]) -> IntArray:
        """The arc from each vertex of rings, an int array (..., world_size), to the next, in the same shape."""
        arcs: IntArray = self.arc_at[rings, np.roll(rings, -1, axis=-1)]
        return arcs

    def hops(self, rings: npt.NDArray[np.integer]) -> csr_array:
        """The arcs of each ring, a sparse array (arcs, rings)."""
        arcs, (count, n) = self.arcs_of(rings), rings.shape
        columns = np.repeat(np.arange(count), n)
        return csr_array((np.ones(arcs.size), (arcs.ravel(), columns)), shape=(len(self.arcs), count))

    def all_rings(self, max_rings: int) -> IntArray | None:
        """All rings, starting with vertex 0, an array (rings, world_size); None if there are more than `max_rings`.

        >>> from tasp_lab.topology.builders import hypercube
        >>> len(RingProblem.of(hypercube(3)).all_rings(100))
        12
        """
        rings: list[tuple[int, ...]] = []
        steps_left = 20 * max_rings
        for ring in self._rings_in_order():
            steps_left -= 1
            if ring is not None:
                rings.append(ring)
            if len(rings) > max_rings or steps_left < 0:
                return None
        return np.array(rings, dtype=np.int64).reshape(-1, self.world_size)

    def _rings_in_order(self) -> Iterator[tuple[int, ...] | None]:
        """All rings by backtracking; None for each step back."""
        successors = [np.flatnonzero(row).tolist() for row in self.linked]
        closes = self.linked[:, 0]
        path, visited = [0], [True] + [False] * (self.world_size - 1)
        choices = [iter(successors[0])]
        while choices:
            following = next((vertex for vertex in choices[-1] if not visited[vertex]), None)
            if following is None:
                choices.pop()
                visited[path.pop()] = False
                yield None
                continue
            path.append(following)
            visited[following] = True
            choices.append(iter(successors[following]))
            if len(path) == self.world_size and closes[following]:
                yield tuple(path)
