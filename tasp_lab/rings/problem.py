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
from tasp_lab.core.progress import ProgressCallback, no_progress
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
        found = np.full((self.world_size, self.world_size), -1, dtype=np.int64)
        found[self.arcs[:, 0], self.arcs[:, 1]] = np.arange(len(self.arcs))
        return found

    @cached_property
    def is_uniform(self) -> bool:
        """Whether every arc has its own link and all have one bandwidth, so that only the digraph matters."""
        return self.has_own_links and len(set(self.bandwidths)) == 1

    @cached_property
    def has_own_links(self) -> bool:
        """Whether every arc has a link that no other arc uses."""
        constraints, arcs = self.uses.shape
        return bool(constraints == arcs == self.uses.nnz)

    @cached_property
    def relative_bandwidths(self) -> FloatArray:
        """The bandwidths divided by the largest one."""
        largest = max(self.bandwidths)
        return np.array([float(bandwidth / largest) for bandwidth in self.bandwidths])

    def loads(self, rings: npt.NDArray[np.integer]) -> csr_array:
        """Number of uses of each constraint by each ring, a sparse array (constraints, rings)."""
        return csr_array(self.uses @ self.hops(rings))

    def hops(self, rings: npt.NDArray[np.integer]) -> csr_array:
        """The arcs of each ring, a sparse array (arcs, rings)."""
        arcs = self.arc_at[rings, np.roll(rings, -1, axis=1)]
        count, n = rings.shape
        columns = np.repeat(np.arange(count), n)
        return csr_array((np.ones(arcs.size), (arcs.ravel(), columns)), shape=(len(self.arcs), count))

    def all_rings(self, max_rings: int) -> IntArray | None:
        """All rings, starting with vertex 0, an array (rings, world_size); None if there are more than `max_rings`.

        >>> from tasp_lab.topology.builders import hypercube
        >>> len(RingProblem.of(hypercube(3)).all_rings(100))
        12
        """
        found: list[tuple[int, ...]] = []
        steps_left = 20 * max_rings
        for ring in self._rings_in_order():
            steps_left -= 1
            if ring is not None:
                found.append(ring)
            if len(found) > max_rings or steps_left < 0:
                return None
        return np.array(found, dtype=np.int64).reshape(-1, self.world_size)

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


# A work budget for searches, counted and not timed, so that results do not depend on the machine or its load.
#
# The unit is an *operation*: about a microsecond on one core. The searches state the cost of what they count (swaps of
# arcs, entries of matrices, units of CP-SAT's deterministic time). A search checks its budget between units of work
# whose order does not depend on the budget, so a larger budget repeats the same work and then does more.


DEFAULT_SEARCH_BUDGET = 30_000_000
"""Default number of operations of a search: about half a minute."""


class SearchBudget:
    """The remaining operations of a search.

    `progress` is called with each stage of the search. `ran_out` is whether a larger budget could have changed the
    result, because this budget ended some part of the search.

    Raises `NoDecompositionError` for a budget below 1.

    >>> budget = SearchBudget(100)
    >>> first = budget.half()
    >>> first.spend(30)
    >>> budget.left, first.left
    (70, 20)
    """

    def __init__(
        self, operations: int, progress: ProgressCallback = no_progress, *, parent: SearchBudget | None = None
    ) -> None:
        if operations < 1 and parent is None:
            raise NoDecompositionError(f"a search budget of {operations} operations: expected 1 or more")
        self.left = operations
        self.progress = progress
        self.ran_out = False
        self._parent = parent

    def half(self) -> SearchBudget:
        """A budget for a part of the search: half of the remaining operations."""
        return SearchBudget(self.left // 2, self.progress, parent=self)

    def at_most(self, operations: int) -> SearchBudget:
        """A budget for a part of the search: `operations`, or the remaining ones if fewer."""
        part = SearchBudget(min(operations, self.left), self.progress, parent=self)
        part._is_capped = operations <= self.left
        return part

    _is_capped = False
    """Whether this budget does not depend on the size of its parent."""

    def spend(self, operations: int) -> None:
        """Subtract completed work, at most what remains, here and in the parent budget."""
        counted = min(operations, self.left)
        self.left -= counted
        if self._parent is not None:
            self._parent.spend(counted)

    def allows_more(self) -> bool:
        """Whether operations remain; if not, the budget counts as having ended the search."""
        if not self.left:
            self._run_out()
        return self.left > 0

    def exhaust(self) -> None:
        """Spend the remaining operations on work that they did not complete."""
        self.spend(self.left)
        self._run_out()

    def _run_out(self) -> None:
        self.ran_out = True
        if self._parent is not None and not self._is_capped:
            self._parent._run_out()
