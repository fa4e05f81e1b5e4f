"""The search for a decomposition: rings over the ranks of a topology, each with its share of every shard.

>>> from tasp_lab.topology.builders import full_mesh
>>> four = decompose(full_mesh(5))
>>> four, four.rings[:2].tolist(), four.shares[:2]
(<Decomposition: full-mesh:5, 4 rings of fold 1>, [[0, 1, 2, 3, 4], [0, 2, 4, 1, 3]], (Fraction(1, 4), Fraction(1, 4)))

Closed forms come first, then a search with a counted budget; an exact bound shows what is left. What a decomposition
is, and its rate, is in `tasp_lab.rings.rings`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from tasp_lab.core.choices import DEFAULT_SEARCH_BUDGET
from tasp_lab.core.errors import NoDecompositionError, NoRingError
from tasp_lab.core.progress import ProgressCallback, no_progress
from tasp_lab.core.units import format_bandwidth
from tasp_lab.rings.closed_forms import closed_forms, gray_ring, mesh_ring
from tasp_lab.rings.rings import Decomposition, ring_limit_bytes_per_s
from tasp_lab.rings.search_budget import SearchBudget
from tasp_lab.topology.graph import Topology

MANY_RANKS = 256
"""The flows that bound the rate of rings may take more than a few seconds for so many ranks or more."""


def decompose(
    topology: Topology,
    fold: int | None = None,
    *,
    lanes: int | None = None,
    rail_aligned: bool | None = None,
    search_budget: int = DEFAULT_SEARCH_BUDGET,
    progress: ProgressCallback = no_progress,
) -> Decomposition:
    """The rings of a topology with the highest rate that is known or can be found within the budget.

    Parameters
    ----------
    fold : 1 or 2 requires optimal rings with equal shares that use no pair of ranks more often. None chooses the
        smallest such fold, or unequal shares if neither fold has optimal rings.
    lanes : maximum number of rings.
    rail_aligned : whether every hop between nodes must join equal local ranks; None: where possible.
    search_budget : operations of the search (see `tasp_lab.rings.problem`), used if no closed form is
        known. A larger budget never gives a lower rate.
    progress : called with each stage of the search.

    Where no ring over links exists, or none is found, one ring whose hops other ranks forward. Raises
    `NoDecompositionError` with the reason if these do not forward, for none of the requested fold, and for a budget
    below 1.

    >>> from tasp_lab.topology.builders import full_mesh, nodes
    >>> decompose(full_mesh(5)).rings.shape
    (4, 5)
    >>> decompose(full_mesh(4)).fold
    2
    >>> decompose(nodes(2, 4)).share_of_bound
    1.0
    """
    if fold not in (None, 1, 2):
        raise NoDecompositionError(f"fold {fold}: expected 1 or 2")
    if lanes is not None and lanes < 1:
        raise NoDecompositionError(f"{lanes} lanes: expected 1 or more")
    if lanes is not None and fold is not None:
        raise NoDecompositionError("a fold and a number of lanes cannot be combined")
    budget = SearchBudget(search_budget, progress)
    if topology.world_size == 1:
        return Decomposition(topology, np.empty((0, 1), dtype=np.int32), 1, "one rank needs no ring")
    if fold is not None:
        return _of_fold(topology, fold, rail_aligned, budget)
    try:
        if lanes is not None:
            return _with_lanes(topology, lanes, rail_aligned, budget)
        return _best(topology, rail_aligned, budget)
    except NoRingError as error:
        if not topology.reaches_all:
            raise
        return _through_ranks(topology, error, budget)


def _through_ranks(topology: Topology, error: NoRingError, budget: SearchBudget) -> Decomposition:
    """One ring whose neighbours need not be linked: depth first from rank 0, so that most of them are.

    In a tree of links it passes each link once each way, as every ring must.
    """
    import networkx  # takes longer to import than most rings take

    links = networkx.from_numpy_array(topology.linked_pairs, create_using=networkx.DiGraph)
    ring = np.array([list(networkx.dfs_preorder_nodes(links, 0))])
    found = Decomposition(topology, ring, 1, f"one ring, in which ranks forward: {error}")
    return replace(_concluded(found, budget), search_complete=error.proved)


def _best(topology: Topology, rail_aligned: bool | None, budget: SearchBudget) -> Decomposition:
    """The rings with the highest rate, of the smallest fold with which equal shares reach it."""
    best: Decomposition | None = None
    for candidate in _candidates(topology, rail_aligned, budget):
        limit = candidate.limit_bytes_per_s
        if best is None or candidate.rate_bytes_per_s > best.rate_bytes_per_s:
            best = candidate
        elif limit is not None and limit < best.ring_limit_bytes_per_s:
            best = replace(best, limit_bytes_per_s=max(limit, best.rate_bytes_per_s))
        if best.proved_optimal:
            break
    assert best is not None  # a search that finds nothing raises
    return _concluded(best, budget)


def _concluded(decomposition: Decomposition, budget: SearchBudget) -> Decomposition:
    """The result, its reason extended by what was not proved, and whether the budget ended the search."""
    reason = decomposition.reason
    if not decomposition.proved_optimal:
        reason += (
            f"; not proved optimal: these carry {format_bandwidth(decomposition.rate_bytes_per_s)}, "
            f"the proved upper bound is {format_bandwidth(decomposition.ring_limit_bytes_per_s)}"
        )
        reason += "; a larger search budget may find better ones" if budget.ran_out else ""
    return replace(decomposition, reason=reason, search_complete=not budget.ran_out)


def _candidates(topology: Topology, rail_aligned: bool | None, budget: SearchBudget) -> Iterator[Decomposition]:
    known = []
    for rings in closed_forms(topology, None, rail_aligned):
        known.append(rings.rings)
        yield rings
    from tasp_lab.rings.problem import is_searchable  # scipy is loaded where a closed form is not enough
    from tasp_lab.rings.search import RingSearch

    if known and not is_searchable(topology):
        return
    if topology.world_size >= MANY_RANKS:
        budget.progress(f"bounding the rate of rings of {topology.world_size:,} ranks; this may take a while")
    search = RingSearch(topology, ring_limit_bytes_per_s(topology), budget)
    yield from search.best(known)


def _of_fold(topology: Topology, fold: int, rail_aligned: bool | None, budget: SearchBudget) -> Decomposition:
    from tasp_lab.rings.search import RingSearch

    more = ""
    for known in closed_forms(topology, fold, rail_aligned):
        if known.proved_optimal and known.fold <= fold:
            return known
        if known.fold > fold:
            more = f"; {known.reason}"
    search = RingSearch(topology, ring_limit_bytes_per_s(topology), budget)
    equal, note = search.equal_rings(fold, strictly=True)
    if equal is None and fold == 1 and search.problem.is_uniform:
        most, proved = search.max_disjoint()
        if most is not None:
            note += f"; {len(most)} link-disjoint rings exist" + (", and no more" if proved else "")
    if equal is None:
        raise NoDecompositionError(
            f"{topology.name}: no rings of fold {fold} reach the rate that the cuts allow: {note}{more}"
        )
    return _concluded(equal, budget)


def _with_lanes(topology: Topology, lanes: int, rail_aligned: bool | None, budget: SearchBudget) -> Decomposition:
    """The best few rings of several searches; candidates include those of the full decomposition."""
    from tasp_lab.rings.fractional_packing import best_few, max_of_one_ring

    known = gray_ring(topology) or mesh_ring(topology) if lanes == 1 and not rail_aligned else None
    if known is not None:
        one = replace(known, limit_bytes_per_s=max_of_one_ring(topology))
        if one.proved_optimal:
            return one
    # The best few of better rings can be worse, so a larger budget repeats every round of a smaller one: independent
    # searches, the largest first, which take no more than the whole together.
    sizes = [1]
    while sum(sizes) + 16 * sizes[-1] <= budget.left:
        sizes.append(16 * sizes[-1])
    candidates: list[Decomposition] = []
    for part in [budget.at_most(size) for size in reversed(sizes)]:
        try:
            found = _best(topology, rail_aligned, part.half())
        except NoDecompositionError:
            if not candidates:
                raise
            continue
        if len(found.rings) > lanes:
            limit = ring_limit_bytes_per_s(topology, found.rate_bytes_per_s)
            found = _concluded(best_few(found, lanes, limit, part), part)
        candidates.append(found)
        if found.proved_optimal:
            break
    best = max(candidates, key=lambda each: each.rate_bytes_per_s)
    return replace(best, search_complete=candidates[0].search_complete)
