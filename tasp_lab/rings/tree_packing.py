"""The fastest broadcast trees by linear programming: each rank divides its shard among several trees.

An *out-tree* spans all ranks and leads from its root to each of them; every hop follows the route of a pair of ranks
and loads its constraints. In AllGather every rank broadcasts: it is the root of some trees, each with a share of its
shard. If the trees of every rank carry x bytes/s together, every rank receives (n - 1) x, which is maximised. On
topologies without switches, trees reach the bottleneck cut of AllGather (J. Edmonds, "Edge-disjoint branchings", in
Combinatorial Algorithms, 1973). Rings may not: a ring that enters a node carries all shards through its NICs, a tree
only the shards that the node lacks. Switches forward but do not copy, and a pair of ranks has a single route; both
may keep trees below the cut.

There are too many trees to list, so they are added on demand (column generation). The dual solution assigns a price
to every constraint, and only a tree that is cheaper than the present trees of its root can improve the packing. If
there is none, the packing is optimal, and the prices are the certificate: x is at most the sum of price times
bandwidth over the total cost of the cheapest tree of each root.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tasp_lab.core.arrays import FloatArray, IntArray, Table, frozen
from tasp_lab.core.choices import DEFAULT_SEARCH_BUDGET
from tasp_lab.core.compiled import call, table
from tasp_lab.core.errors import NoDecompositionError
from tasp_lab.core.progress import ProgressCallback, no_progress
from tasp_lab.rings.rings import RELATIVE_TOLERANCE, ExactArray, loads_of_pairs
from tasp_lab.rings.search_budget import SearchBudget
from tasp_lab.topology.cuts import all_gather_cut
from tasp_lab.topology.graph import Topology

if TYPE_CHECKING:
    from scipy.optimize import OptimizeResult

    from tasp_lab.rings.problem import RingProblem


# Minimum-cost arborescences (spanning out-trees).
#
# A tree is an int array (ranks,) of parents: the rank from which each rank receives; the root is its own parent.


def cheapest_tree(costs: FloatArray, root: int) -> IntArray:
    """The minimum-cost arborescence rooted at `root`, as an array of parents.

    `costs` is a float array (ranks, ranks), from row to column, infinite where no hop is possible. From any rank a path
    grows against its cheapest incoming hops, until it comes from the tree of the root, which it then joins, or from
    itself: the cycle becomes one *part*, entered where that adds the least cost (J. Edmonds, "Optimum branchings",
    J. Res. NBS 71B, 1967; R. Tarjan, "Finding optimum branchings", Networks 7, 1977). O(n^2) numbers are touched.

    >>> cheapest_tree(np.array([[9.0, 9, 5], [9, 9, 1], [9, 1, 9]]), 0)
    array([0, 2, 0])
    """
    growth = _Growth.of(costs, root)
    call(grow, growth, len(costs), root, fast=len(costs) > _FEW)
    return _parents_of(growth, len(costs), root)


_FEW = 24
"""So many ranks take Python no longer than loading machine code."""


class _Growth(NamedTuple):
    """Ranks and contracted cycles of them, of a tree that grows; part k below the number of ranks is rank k.

    Attributes
    ----------
    cost, hop : arrays (parts * parts,), row by row: what the cheapest hop into a part from another one adds, and which
        it is, as source * ranks + destination. Only parts `is_outside` the tree have such hops; the tree is the part of
        its root.
    parts : a table: whether each part `is_outside`; the hop by which it was `entered`, and the cost that this `added`;
        the cycle that it became part of (`whole`, or -1), and its own, the parts from `first` on in `members`.
    path : int array (1 + parts,), the root, and the parts that lead to the rank that is to be joined.
    members : int array (parts,), the parts of contracted cycles.
    counts : int array (2,), how many parts there are, and how many of them are members of others.
    """

    cost: FloatArray
    hop: IntArray
    parts: Table
    path: IntArray
    members: IntArray
    counts: IntArray

    @classmethod
    def of(cls, costs: FloatArray, root: int) -> _Growth:
        """The root alone."""
        n = len(costs)
        cost, hop = np.full((2 * n, 2 * n), np.inf), np.zeros((2 * n, 2 * n), dtype=np.int64)
        cost[:n, :n] = costs.T
        np.fill_diagonal(cost, np.inf)
        hop[:n, :n] = np.arange(n) * n + np.arange(n)[:, None]
        parts = table(2 * n, added="f8", entered="i8", is_outside="i4", whole="i4", first="i4", end="i4")
        parts["is_outside"][:n], parts["whole"] = np.arange(n) != root, -1
        path, members = np.zeros((2, 2 * n + 1), dtype=np.int64)
        return cls(cost.ravel(), hop.ravel(), parts, path, members, np.array([n, 0]))


def grow(growth: _Growth, ranks: int, root: int) -> None:
    """Join all ranks to the tree of the root."""
    path, parts = growth.path, growth.parts
    path[0] = root
    for rank in range(ranks):
        path[1], end = rank, 2
        while parts[path[end - 1]].is_outside:
            before = _enter(growth, path[end - 1], 2 * ranks)
            at = end - 1
            while at > 0 and path[at] != before:
                at -= 1
            if at > 0:
                path[at], end = _contract(growth, at, end, 2 * ranks), at + 1
            elif parts[before].is_outside:
                path[end] = before
                end += 1
            else:
                _leave(growth, 0, end, root, 2 * ranks)
                for place in range(1, end):
                    parts[path[place]].is_outside = False


def _enter(growth: _Growth, part: int, width: int) -> int:
    """Enter a part by its cheapest hop; returns the part from which it comes."""
    before = 0
    for other in range(growth.counts[0]):
        if growth.cost[part * width + other] < growth.cost[part * width + before]:
            before = other
    growth.parts[part].entered = growth.hop[part * width + before]
    growth.parts[part].added = growth.cost[part * width + before]
    return before


def _contract(growth: _Growth, first: int, end: int, width: int) -> int:
    """Make the cycle from `first` to `end` of the path one part; returns it."""
    part, parts, path, cost = growth.counts[0], growth.parts, growth.path, growth.cost
    growth.counts[0] += 1
    for other in range(part):
        cheapest, least = path[first], math.inf
        for place in range(first, end):
            entered = cost[path[place] * width + other] - parts[path[place]].added
            if entered < least:
                cheapest, least = path[place], entered
        cost[part * width + other] = least
        growth.hop[part * width + other] = growth.hop[cheapest * width + other]
    parts[part].first, parts[part].is_outside = growth.counts[1], True
    for place in range(first, end):
        member = path[place]
        cost[part * width + member] = math.inf
        parts[member].whole, parts[member].is_outside = part, False
        growth.members[growth.counts[1]] = member
        growth.counts[1] += 1
    parts[part].end = growth.counts[1]
    _leave(growth, first, end, part, width)
    return int(part)


def _leave(growth: _Growth, first: int, end: int, whole: int, width: int) -> None:
    """Hops out of the parts from `first` to `end` of the path now come from one."""
    path, cost = growth.path, growth.cost
    for part in range(growth.counts[0]):
        if not growth.parts[part].is_outside:
            continue
        cheapest, least = whole, math.inf
        for place in range(first, end):
            if cost[part * width + path[place]] < least:
                cheapest, least = path[place], cost[part * width + path[place]]
            cost[part * width + path[place]] = math.inf
        growth.hop[part * width + whole] = growth.hop[part * width + cheapest]
        cost[part * width + whole] = least


def _parents_of(growth: _Growth, ranks: int, root: int) -> IntArray:
    """The tree: where a hop enters a contracted cycle, the hop of the cycle to that place is dropped."""
    parents, (entered, whole, first, end) = (
        np.arange(ranks),
        (growth.parts[name].tolist() for name in ("entered", "whole", "first", "end")),
    )
    found = [(part, entered[part]) for part in range(growth.counts[0]) if whole[part] < 0 and part != root]
    while found:
        part, hop = found.pop()
        if part < ranks:
            parents[part] = hop // ranks
            continue
        inside = hop % ranks
        while whole[inside] != part:
            inside = whole[inside]
        members = growth.members[first[part] : end[part]].tolist()
        found += [(each, hop if each == inside else entered[each]) for each in members]
    return parents


def distant_ancestors(parents: IntArray) -> IntArray:
    """The ancestor of each rank after at least as many hops as there are ranks: a root, or a rank on a cycle.

    >>> distant_ancestors(np.array([0, 0, 1]))
    array([0, 0, 0])
    """
    for _ in range(len(parents).bit_length()):
        parents = parents[parents]
    return parents


def tree_depths(parents: IntArray) -> IntArray:
    """The depth of each rank: its number of hops from the root.

    >>> tree_depths(np.array([0, 0, 1]))
    array([0, 1, 2])
    """
    depths, above = np.zeros(len(parents), dtype=np.int64), np.arange(len(parents))
    while (climbs := parents[above] != above).any():
        depths += climbs
        above = parents[above]
    return depths


def reduce_depth(parents: IntArray, costs: FloatArray, detour: float) -> IntArray:
    """The tree with each rank as close to the root as possible, if its new hop costs at most `detour` more.

    `costs` is a float array (ranks, ranks), from row to column. A rank moves only below ranks that were closer to the
    root than itself, so no cycle arises.

    >>> reduce_depth(np.array([0, 0, 1]), np.ones((3, 3)), 0.0)
    array([0, 0, 0])
    """
    most = costs[parents, np.arange(len(parents))] + detour
    while True:
        depths = tree_depths(parents)
        reached = np.where(costs <= most, depths[:, None] + 1, len(parents))
        nearer = reached.min(axis=0) < depths
        if not nearer.any():
            return parents
        parents = np.where(nearer, reached.argmin(axis=0), parents)


_ROUNDS, _TREES, _STEEPNESS, _DETOUR = 8, 128, 15.0, 0.3
"""Parameters of the initial trees: the most per root, how many in all before optimal ones suffice, prices that rise by
exp(15) from idle to busiest, and the extra cost that a rank may pay for a smaller depth, as a fraction of the mean
price of a hop. On meshes, tori, nodes and switches of up to 64 ranks, uniform or not, the packing of these trees is
nearly always optimal, and few levels deep."""

_MIN_COST = 1e-6
"""If the cheapest trees of all roots cost less than this in total (1 is typical), the prices are rounding errors."""

_MIN_SHARE = 1e-11
"""Smaller shares are dropped, and shares this close to a simple fraction are rounded to it."""


@dataclass(frozen=True, eq=False)
class TreePacking:
    """Trees with their shares.

    Parameters
    ----------
    topology : the topology of the trees.
    parents : int array (trees, world_size): the rank from which each rank receives; a root is its own parent.
    shares : the share of its root's shard that each tree carries; those of one root sum to one.
    limit_bytes_per_s : known upper bound of the rate of any trees, up to rounding.

    Raises `NoDecompositionError` naming the first invalid tree or root.
    """

    topology: Topology
    parents: IntArray
    shares: tuple[Fraction, ...]
    limit_bytes_per_s: Fraction

    def __post_init__(self) -> None:
        array, n = "an int array of shape (trees, ranks)", self.topology.world_size
        parents = frozen("parents", self.parents, np.int64, 2, array, NoDecompositionError)
        object.__setattr__(self, "parents", parents)
        if parents.shape != (len(self.shares), n):
            raise NoDecompositionError(f"parents have the shape {parents.shape}, expected {(len(self.shares), n)}")
        for tree, row in enumerate(parents):
            self._check_tree(f"tree {tree}", row)
        totals = dict.fromkeys(range(n), Fraction(0))
        for tree, (root, share) in enumerate(zip(self.roots.tolist(), self.shares, strict=True)):
            if share <= 0:
                raise NoDecompositionError(f"tree {tree} has the share {share}, expected more than 0")
            totals[root] += share
        for root, total in totals.items():
            if total != 1:
                raise NoDecompositionError(f"the shares of the trees from rank {root} sum to {total}, expected 1")

    def _check_tree(self, name: str, parents: IntArray) -> None:
        ranks = np.arange(len(parents))
        if not 0 <= parents.min() <= parents.max() < len(parents):
            raise NoDecompositionError(f"{name} has a parent that is not a rank, expected 0 to {len(parents) - 1}")
        roots = np.flatnonzero(parents == ranks)
        if len(roots) != 1:
            raise NoDecompositionError(f"{name} has {len(roots)} roots, expected 1")
        for rank in np.flatnonzero(distant_ancestors(parents) != roots)[:1]:
            raise NoDecompositionError(f"{name} does not lead from its root {roots[0]} to rank {rank}")
        for rank in np.flatnonzero((parents != ranks) & ~self.topology.linked_pairs[parents, ranks])[:1]:
            where = f"from rank {parents[rank]} to {rank}"
            raise NoDecompositionError(f"{name} goes {where}, but {self.topology.name} has no such link")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.topology.world_size

    @cached_property
    def roots(self) -> IntArray:
        """Int array (trees,): the root of each tree."""
        return np.nonzero(self.parents == np.arange(self.world_size))[1]

    @cached_property
    def depths(self) -> IntArray:
        """Int array (trees, world_size): number of hops from the root to each rank."""
        return np.array([tree_depths(row) for row in self.parents])

    @cached_property
    def loads(self) -> dict[int, Fraction]:
        """The load of each of `Topology.constraints` in shards, by its number; idle constraints are left out."""
        of_pair: ExactArray = np.zeros((self.world_size,) * 2, dtype=np.object_)
        np.add.at(of_pair, (self.parents, np.arange(self.world_size)), np.array(self.shares, dtype=np.object_)[:, None])
        np.fill_diagonal(of_pair, 0)
        loads = loads_of_pairs(self.topology, of_pair)
        return {constraint: loads[constraint] for constraint in np.flatnonzero(loads).tolist()}

    @cached_property
    def rate_bytes_per_s(self) -> Fraction:
        """Bytes/s that every rank receives over all trees together; 0 for one rank. Exact."""
        constraints = self.topology.constraints
        rates = (Fraction(constraints[at].bandwidth_bytes_per_s) / load for at, load in self.loads.items())
        return (self.world_size - 1) * min(rates, default=Fraction(0))

    @property
    def proved_optimal(self) -> bool:
        """Whether no trees reach a higher rate."""
        return self.rate_bytes_per_s >= self.limit_bytes_per_s * (1 - Fraction(RELATIVE_TOLERANCE))


def pack_trees(
    topology: Topology, *, search_budget: int = DEFAULT_SEARCH_BUDGET, progress: ProgressCallback = no_progress
) -> TreePacking:
    """The trees of a topology with the highest rate that is found within the budget.

    Of equally fast trees, shallow ones are preferred, because every level adds a latency.

    >>> from tasp_lab.topology.builders import nodes
    >>> packing = pack_trees(nodes(2, 8, "switch", link_bandwidth_bytes_per_s=450, nic_bandwidth_bytes_per_s=50))
    >>> round(float(packing.rate_bytes_per_s), 6)        # rings carry 400
    500.0

    Raises `NoDecompositionError` for a search budget below 1.
    """
    budget = SearchBudget(search_budget, progress)
    n = topology.world_size
    if n == 1:
        return TreePacking(topology, np.zeros((1, 1), dtype=np.int64), (Fraction(1),), Fraction(0))
    cut = all_gather_cut(topology)
    of_one_root = cut.bandwidth_bytes_per_s / cut.ranks_inside
    if topology.is_complete and len(set(topology.node_of_rank)) == 1:
        # The shallowest trees, with which the search would begin, and end where they reach the cut.
        to_all = np.repeat(np.arange(n)[:, None], n, axis=1)
        stars = TreePacking(topology, to_all, (Fraction(1),) * n, (n - 1) * of_one_root)
        if stars.proved_optimal:
            return stars
    from tasp_lab.rings.problem import RingProblem  # scipy is loaded where stars are not enough

    search = _Search(RingProblem.of(topology), of_one_root, budget)
    search.run()
    limit = (n - 1) * of_one_root * Fraction(search.limit)
    shallow, fast = (_as_packing(topology, search.trees, w, limit) for w in (search.shallowest(), search.carried))
    return shallow if shallow.rate_bytes_per_s >= fast.rate_bytes_per_s * (1 - Fraction(RELATIVE_TOLERANCE)) else fast


class _Search:
    """Column generation. All rates are per root, relative to the bound of the cut.

    `trees` are the candidates, `carried` the rate of each in the best packing, `rate` the sum over the trees of one
    root, and `limit` an upper bound of it.
    """

    def __init__(self, problem: RingProblem, unit_bytes_per_s: Fraction, budget: SearchBudget) -> None:
        from scipy.sparse import csr_array, diags_array

        n = problem.world_size
        # No load exceeds n * n units, and solvers accept only a limited range of coefficients.
        bandwidths = np.clip([float(each / unit_bytes_per_s) for each in problem.bandwidths], 1e-9, n * n)
        self._loads_of_arc = csr_array(problem.uses.T @ diags_array(1 / bandwidths))
        self._problem, self._budget = problem, budget
        self._loads: dict[bytes, FloatArray] = {}
        self.trees: list[IntArray] = []
        self.rate, self.limit = 0.0, 1.0

    def run(self) -> None:
        """Add trees until the packing is optimal, no better tree is found, or the budget is exhausted."""
        self._budget.progress(f"packing trees within {self._budget.left:,} operations")
        hops = np.ones(len(self._problem.arcs))
        n = self._problem.world_size
        load = np.sum([self._add(self._cheapest(root, hops)) for root in range(n)], axis=0)
        self._solve()
        for trees in range(0, _ROUNDS * n, n):
            is_enough = self._is_done() and (not trees or trees >= _TREES)
            if is_enough or self._budget.left < n**3:
                break
            load = self._spread(load)
            self._solve()
        while not self._is_done() and self._improve():
            self._solve()

    def shallowest(self) -> FloatArray:
        """The rate of each tree in the packing of highest rate that prefers shallow trees."""
        result = self._program([float(tree_depths(tree).max()) for tree in self.trees], 0.0, self.rate)
        return self.carried if result.x is None else np.asarray(result.x[:-1])

    def _solve(self) -> None:
        """The best packing of the present trees, and the price of each constraint."""
        result = self._program([0.0] * len(self.trees), -1.0, 0.0)
        self.rate, self.carried = float(result.x[-1]), np.asarray(result.x[:-1])
        self._prices = np.maximum(-result.ineqlin.marginals, 0.0)

    def _program(self, cost_of_trees: list[float], cost_of_rate: float, min_rate: float) -> OptimizeResult:
        """The cheapest packing of at least `min_rate`: the rate of each tree, then that per root."""
        loads, of_root = self._all_loads(), self._of_root()
        self._budget.spend(loads.size)
        from scipy.optimize import linprog

        return linprog(
            np.array([*cost_of_trees, cost_of_rate]),
            A_ub=np.append(loads, np.zeros((len(loads), 1)), axis=1),
            b_ub=np.ones(len(loads)),
            A_eq=np.append(of_root, -np.ones((len(of_root), 1)), axis=1),
            b_eq=np.zeros(len(of_root)),
            bounds=[(0, None)] * len(self.trees) + [(min_rate, None)],
            method="highs",
        )

    def _all_loads(self) -> FloatArray:
        """The load of each tree on each constraint, an array (constraints, trees)."""
        return np.array(list(self._loads.values())).T

    def _of_root(self) -> FloatArray:
        """1 where a rank is the root of a tree, an array (ranks, trees)."""
        return np.equal(self.trees, np.arange(self._problem.world_size)).T.astype(np.float64)

    def _is_done(self) -> bool:
        return self.rate >= self.limit * (1 - RELATIVE_TOLERANCE) or not self._budget.allows_more()

    def _spread(self, load: FloatArray) -> FloatArray:
        """Add a tree of each root, at prices that rise with the load of the earlier ones; returns the load of all.

        Multiplicative weights (N. Garg, J. Koenemann, SIAM J. Comput. 37, 2007), which start close to the optimum.
        """
        for root in range(self._problem.world_size):
            costs = self._loads_of_arc @ np.exp(_STEEPNESS * (load / load.max() - 1))
            load = load + self._add(self._cheapest(root, costs, _DETOUR * float(costs.mean())))
            self._budget.spend(self._problem.world_size**2)
        return load

    def _improve(self) -> bool:
        """Lower the limit and add the trees that are cheaper than all others of their root; returns whether any are."""
        costs = self._loads_of_arc @ self._prices
        paid = np.where(self._of_root() > 0, self._prices @ self._all_loads(), np.inf).min(axis=1)
        cheapest = [self._cheapest(root, costs) for root in range(len(paid))]
        self._budget.spend(len(paid) ** 3)
        needed = np.array([costs[self._arcs_of(tree)].sum() for tree in cheapest])
        if needed.sum() > _MIN_COST:
            self.limit = min(self.limit, float(self._prices.sum() / needed.sum()))
        count = len(self.trees)
        for root in np.flatnonzero(needed < paid * (1 - RELATIVE_TOLERANCE)).tolist():
            self._add(cheapest[root])
        return len(self.trees) > count

    def _cheapest(self, root: int, costs: FloatArray, detour: float = 0.0) -> IntArray:
        """The cheapest tree for the cost of each arc, of reduced depth: each rank may pay up to `detour` more."""
        matrix = np.full((self._problem.world_size,) * 2, np.inf)
        matrix[tuple(self._problem.arcs.T)] = costs
        return reduce_depth(cheapest_tree(matrix, root), matrix, detour + 1e-12)

    def _add(self, tree: IntArray) -> FloatArray:
        """Add a tree to the candidates; returns its load on each constraint."""
        if (key := tree.tobytes()) not in self._loads:
            self._loads[key] = np.asarray(self._loads_of_arc[self._arcs_of(tree)].sum(axis=0))
            self.trees.append(tree)
        return self._loads[key]

    def _arcs_of(self, tree: IntArray) -> IntArray:
        ranks = np.flatnonzero(tree != np.arange(len(tree)))
        return self._problem.arc_at[tree[ranks], ranks]


def _as_packing(topology: Topology, trees: list[IntArray], carried: FloatArray, limit: Fraction) -> TreePacking:
    """The trees with a nonzero share, root by root."""
    parents = np.array(trees)
    kept: list[int] = []
    shares: list[Fraction] = []
    for root in range(topology.world_size):
        of_root = np.flatnonzero((parents[:, root] == root) & (carried > _MIN_SHARE * carried.max()))
        kept += of_root.tolist()
        shares += _exact_shares(carried[of_root])
    return TreePacking(topology, parents[kept], tuple(shares), limit)


def _exact_shares(carried: FloatArray) -> list[Fraction]:
    """The share of each tree, as simple fractions if they equal these up to rounding."""
    shares = [Fraction(share) for share in (carried / carried.sum()).tolist()]
    simple = [share.limit_denominator(1000) for share in shares]
    if sum(simple) == 1 and max(abs(a - b) for a, b in zip(simple, shares, strict=True)) < _MIN_SHARE:
        return simple
    shares[shares.index(max(shares))] += 1 - sum(shares)
    return shares
