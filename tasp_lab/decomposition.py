"""A decomposition: rings over the ranks of a topology, with the share of every shard that each of them carries.

A *ring* is a directed Hamiltonian cycle of the digraph whose arcs are the ordered pairs of ranks between which a
transfer is possible: by a link or through switches. A decomposition of fold *k* uses no pair more than *k* times.
Rings that share no pair share no link either where every pair has its own; behind switches they share the ports.

The *rate* of a decomposition is what all its rings carry together: the bytes that every rank receives per second when
the blocks of an AllGather travel around all rings at once. It is limited twice:

- by what any rings can carry: no more than what leaves any set of ranks (`tasp_lab.cuts.ring_cut`);
- by what any AllGather can reach (`tasp_lab.cuts.all_gather_cut`), which trees can and rings sometimes cannot: a ring
  that leaves a node carries all shards through its NICs, a tree only those that are missing there.

A `Decomposition` that exists has been checked: every ring visits every rank once, over pairs between which a transfer
is possible, no pair is used more often than the fold, and the shares sum to one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

import numpy as np

from tasp_lab.arrays import Int32Array
from tasp_lab.closed_forms import closed_forms
from tasp_lab.cuts import all_gather_cut, ring_cut
from tasp_lab.errors import NoDecompositionError
from tasp_lab.few_rings import best_few
from tasp_lab.hamiltonian import verify_cycles
from tasp_lab.quantities import format_bandwidth
from tasp_lab.ring_load import constraint_loads, ring_rate_bytes_per_s
from tasp_lab.ring_problem import is_searchable
from tasp_lab.ring_search import RingSearch
from tasp_lab.rings import ENOUGH, Patience, Rings, Say, say_nothing
from tasp_lab.topology import Topology

USUAL_TIME_LIMIT_S = 30.0
"""How long a search takes at most, unless said otherwise."""


@dataclass(frozen=True, eq=False)
class Decomposition:
    """Rings of a topology.

    Parameters
    ----------
    topology : what the rings run on.
    rings : int array (rings, world_size), each row the ranks in the ring's order.
    fold : how often a pair of ranks may be used.
    reason : why these rings and no others.
    shares : what each ring carries of every shard, summing to one; equal shares when not given.
    limit_bytes_per_s : what no rings of this kind (as many, of this fold) can exceed; that of the cuts when not given.

    Raises `NoDecompositionError` naming the first ring or pair that breaks a rule.
    """

    topology: Topology
    rings: Int32Array
    fold: int
    reason: str
    shares: tuple[Fraction, ...] = ()
    limit_bytes_per_s: Fraction | None = None

    def __post_init__(self) -> None:
        rings = np.ascontiguousarray(self.rings, dtype=np.int32)
        rings.flags.writeable = False
        object.__setattr__(self, "rings", rings)
        if not self.shares:
            object.__setattr__(self, "shares", (Fraction(1, max(len(rings), 1)),) * len(rings))
        verify_cycles(self.rings, self.topology.world_size, self.fold)
        self._check_shares()
        self._check_links()

    def _check_shares(self) -> None:
        if len(self.shares) != len(self.rings):
            raise NoDecompositionError(f"{len(self.shares)} shares for {len(self.rings)} rings")
        if self.shares and (min(self.shares) <= 0 or sum(self.shares) != 1):
            raise NoDecompositionError(f"shares must be more than 0 and sum to 1, they sum to {sum(self.shares)}")

    def _check_links(self) -> None:
        if self.topology.is_complete:
            return
        onward = np.roll(self.rings, -1, axis=1)
        missing = np.argwhere(~self.topology.have_routes(self.rings, onward))
        for ring, position in missing[:1].tolist():
            source, destination = self.rings[ring, position], onward[ring, position]
            raise NoDecompositionError(
                f"ring {ring} goes from rank {source} to {destination}, but {self.topology.name} has no such link"
            )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.topology.world_size

    @property
    def links_total(self) -> int:
        """The links of the topology."""
        return len(self.topology.links)

    @cached_property
    def links_used(self) -> int:
        """How many of them some ring passes."""
        loads = constraint_loads(self.topology, self.rings, [1] * len(self.rings))
        return int((loads[: self.links_total] > 0).sum())

    @cached_property
    def rate_bytes_per_s(self) -> Fraction:
        """Bytes/s that every rank receives over all rings together; 0 for one rank. Exact."""
        if not len(self.rings):
            return Fraction(0)
        return ring_rate_bytes_per_s(self.topology, self.rings, self.shares)

    @cached_property
    def bound_bytes_per_s(self) -> Fraction:
        """Bytes/s that every rank can receive in any AllGather: (n - 1) shards over the time of the bottleneck cut."""
        if self.world_size == 1:
            return Fraction(0)
        if self.rate_bytes_per_s == min(self.topology.bandwidths_into_ranks_bytes_per_s):
            return self.rate_bytes_per_s
        cut = all_gather_cut(self.topology)
        return (self.world_size - 1) * cut.bandwidth_bytes_per_s / cut.ranks_inside

    @property
    def share_of_bound(self) -> float:
        """The rate over the bound; 1 for one rank."""
        return float(self.rate_bytes_per_s / self.bound_bytes_per_s) if self.world_size > 1 else 1.0

    @cached_property
    def ring_limit_bytes_per_s(self) -> Fraction:
        """What no rings exceed: `limit_bytes_per_s`, or what the cuts allow."""
        if self.limit_bytes_per_s is not None:
            return self.limit_bytes_per_s
        return ring_limit_bytes_per_s(self.topology, self.rate_bytes_per_s)

    @property
    def proved_optimal(self) -> bool:
        """Whether no rings (no more of them, if a number of lanes was asked for) reach a higher rate."""
        return self.rate_bytes_per_s >= self.ring_limit_bytes_per_s * (1 - Fraction(ENOUGH))

    @property
    def beyond_rings(self) -> bool:
        """Whether no rings reach the bound, however many: trees can (Edmonds 1973; ForestColl, arXiv 2402.06787)."""
        return ring_limit_bytes_per_s(self.topology, self.rate_bytes_per_s) < self.bound_bytes_per_s


def ring_limit_bytes_per_s(topology: Topology, reached: Fraction | int = 0) -> Fraction:
    """What no rings exceed together: the bandwidth of the narrowest cut; 0 for one rank.

    No flow has to be computed where the rate `reached` is already what enters the narrowest rank.
    """
    if topology.world_size == 1:
        return Fraction(0)
    if reached and reached == min(topology.bandwidths_into_ranks_bytes_per_s):
        return Fraction(reached)
    return ring_cut(topology).bandwidth_bytes_per_s


def decompose(
    topology: Topology,
    fold: int | None = None,
    *,
    lanes: int | None = None,
    rail_aligned: bool | None = None,
    time_limit_s: float = USUAL_TIME_LIMIT_S,
    say: Say = say_nothing,
) -> Decomposition:
    """The rings of a topology that carry most together, as far as they are known or can be found.

    Parameters
    ----------
    fold : 1 or 2 demands equal rings that use no pair of ranks more often and carry as much as any rings can. Without
        it the smallest fold is taken with which that is possible, and shares where none is.
    lanes : at most so many rings, the best ones.
    rail_aligned : whether every hop between nodes must join equal local ranks; None: where that is possible.
    time_limit_s : for the search, where no closed form is known; `say` is told what is searched for how long.

    Raises `NoDecompositionError` with the reason where there are no rings, or none of the fold asked for, and for a
    time limit that is none.

    >>> from tasp_lab.builders import full_mesh, nodes
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
    patience = Patience(time_limit_s, say)
    if topology.world_size == 1:
        return Decomposition(topology, np.empty((0, 1), dtype=np.int32), 1, "one rank needs no ring")
    if lanes is not None:
        return _with_lanes(topology, fold, lanes, rail_aligned, patience)
    if fold is not None:
        return _of_fold(topology, fold, rail_aligned, patience)
    best: Decomposition | None = None
    for candidate in _candidates(topology, rail_aligned, patience):
        limit = candidate.limit_bytes_per_s
        if best is None or candidate.rate_bytes_per_s > best.rate_bytes_per_s:
            best = candidate
        elif limit is not None and limit < best.ring_limit_bytes_per_s:
            best = replace(best, limit_bytes_per_s=max(limit, best.rate_bytes_per_s))
        if best.proved_optimal:
            return best
    assert best is not None  # a search that finds nothing raises
    return replace(best, reason=f"{best.reason}; {_what_was_not_proved(best)}")


def _what_was_not_proved(found: Decomposition) -> str:
    return (
        f"not proved optimal: these carry {format_bandwidth(found.rate_bytes_per_s)}, "
        f"all that is proved is that none carry more than {format_bandwidth(found.ring_limit_bytes_per_s)}"
    )


def _candidates(topology: Topology, rail_aligned: bool | None, patience: Patience) -> Iterator[Decomposition]:
    known = []
    for rings in closed_forms(topology, None, rail_aligned):
        known.append(rings.rings)
        yield _as_decomposition(topology, rings)
    if known and not is_searchable(topology):
        return
    search = RingSearch(topology, ring_limit_bytes_per_s(topology), patience)
    for rings in search.best(known):
        yield _as_decomposition(topology, rings)


def _of_fold(topology: Topology, fold: int, rail_aligned: bool | None, patience: Patience) -> Decomposition:
    more = ""
    for rings in closed_forms(topology, fold, rail_aligned):
        known = _as_decomposition(topology, rings)
        if known.proved_optimal and known.fold <= fold:
            return known
        if known.fold > fold:
            more = f"; {known.reason}"
    search = RingSearch(topology, ring_limit_bytes_per_s(topology), patience)
    found, note = search.equal_rings(fold, strictly=True)
    if found is None and fold == 1 and search.problem.is_uniform:
        most, proved = search.most_disjoint()
        if most is not None:
            note += f"; {len(most)} rings do share no link" + (", and no more can" if proved else "")
    if found is None:
        raise NoDecompositionError(
            f"{topology.name}: no rings of fold {fold} carry as much as the cuts allow: {note}{more}"
        )
    return _as_decomposition(topology, found)


def _with_lanes(
    topology: Topology, fold: int | None, lanes: int, rail_aligned: bool | None, patience: Patience
) -> Decomposition:
    """The best few rings, those of the full decomposition among them."""
    if fold is not None:
        raise NoDecompositionError("either a fold or a number of lanes can be asked for, not both")
    half_s = max(patience.left_s / 2, 0.1)
    full = decompose(topology, rail_aligned=rail_aligned, time_limit_s=half_s, say=patience.say)
    if len(full.rings) <= lanes:
        return full
    known = Rings(full.rings.astype(np.int64), full.fold, full.reason, full.shares)
    limit = ring_limit_bytes_per_s(topology, full.rate_bytes_per_s)
    found = _as_decomposition(topology, best_few(topology, known, lanes, limit, patience))
    return found if found.proved_optimal else replace(found, reason=f"{found.reason}; {_what_was_not_proved(found)}")


def _as_decomposition(topology: Topology, found: Rings) -> Decomposition:
    rings = found.rings.astype(np.int32)
    return Decomposition(topology, rings, found.fold, found.reason, found.shares, found.limit_bytes_per_s)
