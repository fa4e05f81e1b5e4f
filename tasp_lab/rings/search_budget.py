"""A work budget for searches, counted and not timed, so that results do not depend on the machine or its load.

The unit is an *operation*: about a microsecond on one core. The searches state the cost of what they count (swaps of
arcs, entries of matrices, units of CP-SAT's deterministic time). A search checks its budget between units of work whose
order does not depend on the budget, so a larger budget repeats the same work and then does more.
"""

from __future__ import annotations

from tasp_lab.core.errors import NoDecompositionError
from tasp_lab.core.progress import ProgressCallback, no_progress


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
            self.exhaust()
        return self.left > 0

    def exhaust(self) -> None:
        """Spend the remaining operations on work that they did not complete."""
        self.spend(self.left)
        budget: SearchBudget | None = self
        while budget is not None:
            budget.ran_out = True
            budget = None if budget._is_capped else budget._parent
