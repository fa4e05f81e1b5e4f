"""The fastest broadcast trees by linear programming: for every rank some trees that share its shard.

An *out-tree* spans all ranks and leads from its root to each of them; a hop goes from a rank to one to which a transfer
is possible, and loads all that it passes. In AllGather every rank broadcasts: it is the root of some trees, each with a
share of its shard. If the trees of every rank carry x bytes/s together, every rank receives (n - 1) x. That is sought
as large as can be. Where data passes nothing but ranks and links, trees reach the bottleneck cut of AllGather
(J. Edmonds, "Edge-disjoint branchings", in Combinatorial Algorithms, 1973); rings sometimes do not: a ring that leaves
a node carries all shards through its NICs, a tree only those that are missing there. Switches forward and do not copy,
and a pair of ranks has one route; that may keep trees below the cut.

There are far too many trees to list, so they are added as they are needed: the dual solution puts a price on every
constraint, and only a tree that is cheaper than those its root has can improve the packing (column generation). When
the cheapest tree of each root is not, the packing is optimal, and the prices prove it: x is at most the sum of price
times bandwidth over what the cheapest trees cost together.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np
from scipy.optimize import OptimizeResult, linprog
from scipy.sparse import csr_array, diags_array

from tasp_lab.arrays import FloatArray, IntArray
from tasp_lab.cuts import all_gather_cut
from tasp_lab.errors import NoDecompositionError
from tasp_lab.ring_load import ExactArray, loads_of_pairs
from tasp_lab.ring_problem import RingProblem
from tasp_lab.rings import ENOUGH, Patience, Say, say_nothing
from tasp_lab.topology import Topology
from tasp_lab.trees import cheapest_tree, far_above, made_shallow, tree_depths

_ROUNDS, _STEEPNESS, _DETOUR = 8, 15.0, 0.3
"""How the first trees are found: so many per root, prices that rise by exp(15) from idle to busiest, and what a rank
may pay more to be nearer to the root, as part of the mean price of a hop. Tried on meshes, tori, nodes and switches of
up to 64 ranks, equal and unequal: the packing of these trees is nearly always optimal, and few levels deep."""

_LEAST_COST = 1e-6
"""Where the cheapest trees of all roots cost less together (1 is usual), rounding made the prices."""

_LEAST_SHARE = 1e-11
"""Shares below it are none, and fractions with a small denominator that are as near are meant."""


@dataclass(frozen=True, eq=False)
class TreePacking:
    """Trees with their shares.

    Parameters
    ----------
    topology : what the trees run on.
    parents : int array (trees, world_size): from which rank each rank receives; a root from itself.
    shares : what each tree carries of its root's shard; those of one root sum to one.
    limit_bytes_per_s : what no trees exceed, as far as that is known, up to rounding.

    Raises `NoDecompositionError` naming the first tree or root that breaks a rule.
    """

    topology: Topology
    parents: IntArray
    shares: tuple[Fraction, ...]
    limit_bytes_per_s: Fraction

    def __post_init__(self) -> None:
        parents, n = np.array(self.parents, dtype=np.int64), self.topology.world_size
        parents.flags.writeable = False
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
            raise NoDecompositionError(f"{name} has a parent that is no rank, expected 0 to {len(parents) - 1}")
        roots = np.flatnonzero(parents == ranks)
        if len(roots) != 1:
            raise NoDecompositionError(f"{name} has {len(roots)} roots, expected 1")
        for rank in np.flatnonzero(far_above(parents) != roots)[:1]:
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
        """Int array (trees, world_size): how many hops each rank is from the root."""
        return np.array([tree_depths(row) for row in self.parents])

    @cached_property
    def loads(self) -> dict[int, Fraction]:
        """How many shards pass each of `Topology.constraints`, by its number; those that none passes are left out."""
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
        return self.rate_bytes_per_s >= self.limit_bytes_per_s * (1 - Fraction(ENOUGH))


def pack_trees(topology: Topology, *, time_limit_s: float = 30.0, say: Say = say_nothing) -> TreePacking:
    """The trees of a topology that carry most together, as far as they can be found in the time.

    Among trees that carry as much, those with few levels are preferred: every level costs a latency.

    >>> from tasp_lab.builders import nodes
    >>> packing = pack_trees(nodes(2, 8, "switch", link_bandwidth_bytes_per_s=450, nic_bandwidth_bytes_per_s=50))
    >>> round(float(packing.rate_bytes_per_s), 6)        # rings carry 400
    500.0

    Raises `NoDecompositionError` for a time limit that is none.
    """
    patience = Patience(time_limit_s, say)
    n = topology.world_size
    if n == 1:
        return TreePacking(topology, np.zeros((1, 1), dtype=np.int64), (Fraction(1),), Fraction(0))
    cut = all_gather_cut(topology)
    of_one_root = cut.bandwidth_bytes_per_s / cut.ranks_inside
    search = _Search(RingProblem.of(topology), of_one_root, patience)
    search.run()
    limit = (n - 1) * of_one_root * Fraction(search.limit)
    shallow, fast = (_as_packing(topology, search.trees, w, limit) for w in (search.shallowest(), search.carried))
    return shallow if shallow.rate_bytes_per_s >= fast.rate_bytes_per_s * (1 - Fraction(ENOUGH)) else fast


class _Search:
    """Column generation. All rates are those of one root, relative to what the cut allows.

    `trees` are those there are to choose from, `carried` what each carries at best, `rate` what those of one root carry
    then together, and `limit` what that cannot exceed.
    """

    def __init__(self, problem: RingProblem, unit_bytes_per_s: Fraction, patience: Patience) -> None:
        n = problem.world_size
        # Nothing needs more than n * n of the unit, and solvers do not take coefficients of any size.
        bandwidths = np.clip([float(each / unit_bytes_per_s) for each in problem.bandwidths], 1e-9, n * n)
        self._loads_of_arc = csr_array(problem.uses.T @ diags_array(1 / bandwidths))
        self._problem, self._patience = problem, patience
        self._loads: dict[bytes, FloatArray] = {}
        self.trees: list[IntArray] = []
        self.rate, self.limit = 0.0, 1.0

    def run(self) -> None:
        """Find trees until nothing better can exist, none is found, or time is out."""
        self._patience.say(f"packing trees for at most {self._patience.limit_s:.0f} s")
        hops = np.ones(len(self._problem.arcs))
        nearest = [self._add(self._cheapest(root, hops)) for root in range(self._problem.world_size)]
        self._solve()
        if not self._is_done():
            self._spread(np.sum(nearest, axis=0))
            self._solve()
        while not self._is_done() and self._improve():
            self._solve()

    def shallowest(self) -> FloatArray:
        """What each tree carries if all carry as much as they can together, and those with few levels most of it."""
        result = self._program([float(tree_depths(tree).max()) for tree in self.trees], 0.0, self.rate)
        return self.carried if result.x is None else np.asarray(result.x[:-1])

    def _solve(self) -> None:
        """What the trees there are carry at best, and the price of each constraint."""
        result = self._program([0.0] * len(self.trees), -1.0, 0.0)
        self.rate, self.carried = float(result.x[-1]), np.asarray(result.x[:-1])
        self._prices = np.maximum(-result.ineqlin.marginals, 0.0)

    def _program(self, cost_of_trees: list[float], cost_of_rate: float, least_rate: float) -> OptimizeResult:
        """The cheapest packing of the trees there are, of at least some rate: what each carries, then the rate."""
        loads, of_root = self._all_loads(), self._of_root()
        return linprog(
            np.array([*cost_of_trees, cost_of_rate]),
            A_ub=np.append(loads, np.zeros((len(loads), 1)), axis=1),
            b_ub=np.ones(len(loads)),
            A_eq=np.append(of_root, -np.ones((len(of_root), 1)), axis=1),
            b_eq=np.zeros(len(of_root)),
            bounds=[(0, None)] * len(self.trees) + [(least_rate, None)],
            method="highs",
        )

    def _all_loads(self) -> FloatArray:
        """What each tree takes of each constraint, as an array (constraints, trees)."""
        return np.array(list(self._loads.values())).T

    def _of_root(self) -> FloatArray:
        """1 where a rank is the root of a tree, as an array (ranks, trees)."""
        return np.equal(self.trees, np.arange(self._problem.world_size)).T.astype(np.float64)

    def _is_done(self) -> bool:
        return self.rate >= self.limit * (1 - ENOUGH) or not self._patience.left_s

    def _spread(self, total: FloatArray) -> None:
        """Add trees one by one, at prices that rise with what those before take, which is `total` at the start.

        Multiplicative weights (N. Garg, J. Koenemann, SIAM J. Comput. 37, 2007): a start that is near the optimum.
        """
        for root in [*range(self._problem.world_size)] * _ROUNDS:
            if not self._patience.left_s:
                return
            costs = self._loads_of_arc @ np.exp(_STEEPNESS * (total / total.max() - 1))
            total = total + self._add(self._cheapest(root, costs, _DETOUR * float(costs.mean())))

    def _improve(self) -> bool:
        """Lower the limit, and add the trees that are cheaper than all of their root; whether there are any."""
        costs = self._loads_of_arc @ self._prices
        paid = np.where(self._of_root() > 0, self._prices @ self._all_loads(), np.inf).min(axis=1)
        cheapest = [self._cheapest(root, costs) for root in range(len(paid))]
        needed = np.array([costs[self._arcs_of(tree)].sum() for tree in cheapest])
        if needed.sum() > _LEAST_COST:
            self.limit = min(self.limit, float(self._prices.sum() / needed.sum()))
        count = len(self.trees)
        for root in np.flatnonzero(needed < paid * (1 - ENOUGH)).tolist():
            self._add(cheapest[root])
        return len(self.trees) > count

    def _cheapest(self, root: int, costs: FloatArray, detour: float = 0.0) -> IntArray:
        """The cheapest tree for what each arc costs, made shallow: each rank may pay so much more for that."""
        matrix = np.full((self._problem.world_size,) * 2, np.inf)
        matrix[tuple(self._problem.arcs.T)] = costs
        return made_shallow(cheapest_tree(matrix, root), matrix, detour + 1e-12)

    def _add(self, tree: IntArray) -> FloatArray:
        """Make a tree one of those to choose from; returns what it takes of each constraint."""
        if (key := tree.tobytes()) not in self._loads:
            self._loads[key] = np.asarray(self._loads_of_arc[self._arcs_of(tree)].sum(axis=0))
            self.trees.append(tree)
        return self._loads[key]

    def _arcs_of(self, tree: IntArray) -> IntArray:
        ranks = np.flatnonzero(tree != np.arange(len(tree)))
        return self._problem.arc_at[tree[ranks], ranks]


def _as_packing(topology: Topology, trees: list[IntArray], carried: FloatArray, limit: Fraction) -> TreePacking:
    """The trees that carry something, root by root."""
    parents = np.array(trees)
    kept: list[int] = []
    shares: list[Fraction] = []
    for root in range(topology.world_size):
        own = np.flatnonzero((parents[:, root] == root) & (carried > _LEAST_SHARE * carried.max()))
        kept += own.tolist()
        shares += _exact_shares(carried[own])
    return TreePacking(topology, parents[kept], tuple(shares), limit)


def _exact_shares(carried: FloatArray) -> list[Fraction]:
    """What each tree carries of the whole, as simple fractions where rounding hides them."""
    shares = [Fraction(share) for share in (carried / carried.sum()).tolist()]
    simple = [share.limit_denominator(1000) for share in shares]
    if sum(simple) == 1 and max(abs(a - b) for a, b in zip(simple, shares, strict=True)) < _LEAST_SHARE:
        return simple
    shares[shares.index(max(shares))] += 1 - sum(shares)
    return shares
