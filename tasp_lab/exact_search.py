"""Exact search for rings with OR-tools' CP-SAT, which comes with the extra ``search``.

Each ring is a *circuit* constraint over the arcs of the digraph; arcs that load a constraint are counted against
what it allows. The solver either finds the rings, proves that there are none, or runs out of time.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from enum import Enum
from importlib.util import find_spec
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from tasp_lab.arrays import FloatArray, IntArray
from tasp_lab.factors import rings_of
from tasp_lab.ring_problem import RingProblem

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

_WORKERS = 1
_PRICE_UNIT = 1e-12


class Answer(Enum):
    """What a search can say besides the rings it found."""

    IMPOSSIBLE = "proved impossible"
    UNKNOWN = "not found in time"


def is_installed() -> bool:
    """Whether OR-tools is there."""
    return find_spec("ortools") is not None


def rings_within(
    problem: RingProblem, capacities: Sequence[int], count: int, time_limit_s: float, fold: int | None = None
) -> IntArray | Answer:
    """So many rings that use each constraint no more often than its capacity, as an array (count, world_size).

    With `fold`, no pair of ranks is used more often than that.

    >>> from tasp_lab.builders import full_mesh
    >>> four = RingProblem.of(full_mesh(4))
    >>> rings_within(four, [1] * 12, 3, 10.0)
    <Answer.IMPOSSIBLE: 'proved impossible'>
    >>> rings_within(four, [1] * 12, 2, 10.0).shape
    (2, 4)
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    chosen = [_circuit(model, problem) for _ in range(count)]
    uses = problem.uses.tocsr()
    for row, capacity in enumerate(capacities):
        arcs = uses.indices[uses.indptr[row] : uses.indptr[row + 1]].tolist()
        model.add(sum(ring[arc] for ring in chosen for arc in arcs) <= capacity)
    for arc in range(len(problem.arcs) if fold is not None else 0):
        model.add(sum(ring[arc] for ring in chosen) <= fold)
    _order(model, problem, chosen)
    solver, status = _solve(model, time_limit_s)
    if status == cp_model.INFEASIBLE:
        return Answer.IMPOSSIBLE
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Answer.UNKNOWN
    return np.array([_ring(solver, problem, ring) for ring in chosen], dtype=np.int64)


def cheapest_ring(problem: RingProblem, costs: FloatArray, time_limit_s: float) -> tuple[IntArray | None, float]:
    """The ring whose arcs cost least, and what no ring costs less than; no ring and infinity if there is none.

    >>> from tasp_lab.builders import ring
    >>> cheapest_ring(RingProblem.of(ring(3)), np.array([0.5, 0.25, 0.25]), 10.0)
    (array([0, 1, 2]), 1.0)
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    chosen = _circuit(model, problem)
    whole = np.floor(costs / _PRICE_UNIT).astype(np.int64).tolist()
    model.minimize(sum(cost * arc for cost, arc in zip(whole, chosen, strict=True)))
    solver, status = _solve(model, time_limit_s)
    if status == cp_model.INFEASIBLE:
        return None, float("inf")
    least = max(solver.best_objective_bound, 0.0) * _PRICE_UNIT
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None, least
    return _ring(solver, problem, chosen), least


def _circuit(model: cp_model.CpModel, problem: RingProblem) -> list[Any]:
    chosen: list[Any] = [model.new_bool_var("") for _ in problem.arcs]
    model.add_circuit(
        [(source, destination, arc) for (source, destination), arc in zip(problem.arcs.tolist(), chosen, strict=True)]
    )
    return chosen


def _order(model: cp_model.CpModel, problem: RingProblem, chosen: Sequence[list[Any]]) -> None:
    """Rings are alike: let them leave rank 0 in the order of where they go."""
    leaving = [(arc, destination) for arc, (source, destination) in enumerate(problem.arcs.tolist()) if source == 0]
    for one, other in pairwise(chosen):
        first = sum(destination * one[arc] for arc, destination in leaving)
        model.add(first <= sum(destination * other[arc] for arc, destination in leaving))


def _solve(model: cp_model.CpModel, time_limit_s: float) -> tuple[cp_model.CpSolver, Any]:
    """Solve in a thread, so that Ctrl-C is heard at once."""
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(time_limit_s, 0.01)
    solver.parameters.num_workers = _WORKERS
    solver.parameters.catch_sigint_signal = False
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(solver.solve, model)
        try:
            wait([answer])
        except BaseException:
            while not answer.done():  # a search that has not begun yet cannot be stopped
                solver.stop_search()
                wait([answer], timeout=0.1)
            raise
    return solver, answer.result()


def _ring(solver: cp_model.CpSolver, problem: RingProblem, chosen: list[Any]) -> IntArray:
    source, onward = problem.arcs[[solver.boolean_value(arc) for arc in chosen]].T
    ring: IntArray = rings_of(onward[source.argsort()][None])[0]
    return ring
