"""Which rings of a topology are sought. This module imports nothing heavy: the command line lists the options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from tasp_lab.core.arguments import Option
from tasp_lab.core.choices import DEFAULT_SEARCH_BUDGET
from tasp_lab.core.progress import ProgressCallback, no_progress

if TYPE_CHECKING:
    from tasp_lab.rings.rings import Decomposition
    from tasp_lab.topology.graph import Topology


@dataclass(frozen=True)
class RingOptions:
    """Which rings are sought, and how much work the search may do; see `tasp_lab.rings.decompose.decompose`."""

    fold: Annotated[int | None, Option("Most rings per pair of ranks, 1 or 2. Default: the smallest possible.")] = None
    lanes: Annotated[int | None, Option("Maximum number of rings; the best are used.")] = None
    rail_aligned: Annotated[
        bool | None, Option("Hops between nodes connect ranks of equal local number. Default: where possible.")
    ] = None
    search_budget: Annotated[
        int, Option("Operations of the search if no closed form is known, about a million a second.")
    ] = DEFAULT_SEARCH_BUDGET

    def find(self, topology: Topology, progress: ProgressCallback = no_progress) -> Decomposition:
        """The rings of a topology. Raises `NoDecompositionError`."""
        from tasp_lab.rings.decompose import decompose

        return decompose(topology, **vars(self), progress=progress)

    @property
    def is_free(self) -> bool:
        """Whether rings of any kind are accepted."""
        return (self.fold, self.lanes, self.rail_aligned) == (None, None, None)


ANY_RINGS = RingOptions()
"""Rings of any kind, sought with the default budget."""
