"""Exact search for rings with OR-tools' CP-SAT (the extra ``search``).

Each ring is a *circuit* constraint over the arcs of the digraph; the arcs that load a constraint of the topology are
limited by its capacity. The solver finds the rings, proves that there are none, or exhausts its budget, which is given
in CP-SAT's deterministic time, a count of the solver's work. A single worker keeps this work reproducible.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from enum import Enum
from importlib.util import find_spec
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from tasp_lab.core.arrays import FloatArray, IntArray
from tasp_lab.core.process import deferred_interrupts
from tasp_lab.rings.factors import rings_of
from tasp_lab.rings.problem import RingProblem
from tasp_lab.rings.search_budget import SearchBudget

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

_WORKERS = 1
_PRICE_UNIT = 1e-12

_OPERATIONS_PER_UNIT = 1_000_000
"""Operations in a unit of CP-SAT's deterministic time; a unit was measured to take 0.5 to 1.5 s on one core."""


class Answer(Enum):
    """Outcome of an exact search that returned no rings."""

    IMPOSSIBLE = "proved impossible"
    UNKNOWN = "not found within the search budget"


def is_installed() -> bool:
    """Whether OR-tools is installed."""
    return find_spec("ortools") is not None


def rings_within(
    problem: RingProblem, capacities: Sequence[int], count: int, budget: SearchBudget, fold: int | None = None
) -> IntArray | Answer:
    """`count` rings that use each constraint at most as often as its capacity, as an array (count, world_size).

    With `fold`, each pair of ranks is used at most `fold` times.

    >>> from tasp_lab.topology.builders import full_mesh
    >>> four = RingProblem.of(full_mesh(4))
    >>> rings_within(four, [1] * 12, 3, SearchBudget(10**7))
    <Answer.IMPOSSIBLE: 'proved impossible'>
    >>> rings_within(four, [1] * 12, 2, SearchBudget(10**7)).shape
    (2, 4)
    """
    cp_model = _import_cp_model()
    model = cp_model.CpModel()
    chosen = [_circuit(model, problem) for _ in range(count)]
    uses = problem.uses.tocsr()
    for row, capacity in enumerate(capacities):
        arcs = uses.indices[uses.indptr[row] : uses.indptr[row + 1]].tolist()
        model.add(sum(ring[arc] for ring in chosen for arc in arcs) <= capacity)
    for arc in range(len(problem.arcs) if fold is not None else 0):
        model.add(sum(ring[arc] for ring in chosen) <= fold)
    _order(model, problem, chosen)
    solver, status = _solve(model, budget)
    if status == cp_model.INFEASIBLE:
        return Answer.IMPOSSIBLE
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Answer.UNKNOWN
    return np.array([_ring(solver, problem, ring) for ring in chosen], dtype=np.int64)


def cheapest_ring(problem: RingProblem, costs: FloatArray, budget: SearchBudget) -> tuple[IntArray | None, float]:
    """The cheapest ring and a lower bound of the cost of any ring; None and infinity if no ring exists.

    The ring is None as well if the budget ends before a ring is proved cheapest: it would depend on the budget.

    >>> from tasp_lab.topology.builders import ring
    >>> cheapest_ring(RingProblem.of(ring(3)), np.array([0.5, 0.25, 0.25]), SearchBudget(10**7))
    (array([0, 1, 2]), 1.0)
    """
    cp_model = _import_cp_model()
    model = cp_model.CpModel()
    chosen = _circuit(model, problem)
    whole = np.floor(costs / _PRICE_UNIT).astype(np.int64).tolist()
    model.minimize(sum(cost * arc for cost, arc in zip(whole, chosen, strict=True)))
    solver, status = _solve(model, budget)
    if status == cp_model.INFEASIBLE:
        return None, float("inf")
    least = max(solver.best_objective_bound, 0.0) * _PRICE_UNIT
    if status != cp_model.OPTIMAL:
        return None, least
    return _ring(solver, problem, chosen), least


def _circuit(model: cp_model.CpModel, problem: RingProblem) -> list[Any]:
    chosen: list[Any] = [model.new_bool_var("") for _ in problem.arcs]
    model.add_circuit(
        [(source, destination, arc) for (source, destination), arc in zip(problem.arcs.tolist(), chosen, strict=True)]
    )
    return chosen


def _order(model: cp_model.CpModel, problem: RingProblem, chosen: Sequence[list[Any]]) -> None:
    """Break the symmetry between rings: order them by the successor of rank 0."""
    leaving = [(arc, destination) for arc, (source, destination) in enumerate(problem.arcs.tolist()) if source == 0]
    for one, other in pairwise(chosen):
        first = sum(destination * one[arc] for arc, destination in leaving)
        model.add(first <= sum(destination * other[arc] for arc, destination in leaving))


def _import_cp_model() -> Any:
    """CP-SAT. SIGINT is deferred to the end of the import, which would turn it into an `ImportError`."""
    with deferred_interrupts():
        from ortools.sat.python import cp_model
    return cp_model


def _solve(model: cp_model.CpModel, budget: SearchBudget) -> tuple[cp_model.CpSolver, Any]:
    """Solve in a thread, so that SIGINT is handled at once."""
    cp_model = _import_cp_model()
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = budget.left / _OPERATIONS_PER_UNIT
    solver.parameters.num_workers = _WORKERS
    solver.parameters.catch_sigint_signal = False
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(solver.solve, model)
        try:
            wait([answer])
        except BaseException:
            while not answer.done():  # a search cannot be stopped before it begins
                solver.stop_search()
                wait([answer], timeout=0.1)
            raise
    status = answer.result()
    budget.spend(math.ceil(solver.response_proto.deterministic_time * _OPERATIONS_PER_UNIT))
    if status not in (cp_model.OPTIMAL, cp_model.INFEASIBLE):
        budget.exhaust()
    return solver, status


def _ring(solver: cp_model.CpSolver, problem: RingProblem, chosen: list[Any]) -> IntArray:
    source, successors = problem.arcs[[solver.boolean_value(arc) for arc in chosen]].T
    ring: IntArray = rings_of(successors[source.argsort()][None])[0]
    return ring
