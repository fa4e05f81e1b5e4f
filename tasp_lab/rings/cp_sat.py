"""Exact search for rings with OR-tools' CP-SAT (the extra ``search``).

Each ring is a *circuit* constraint over the arcs of the digraph; the arcs that load a constraint of the topology are
limited by its capacity. The solver finds the rings, proves that there are none, or exhausts its budget, which is given
in CP-SAT's deterministic time, a count of the solver's work. A single worker keeps this work reproducible.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from importlib.util import find_spec
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from tasp_lab.core.arrays import IntArray
from tasp_lab.core.process import deferred_interrupts
from tasp_lab.rings.factors import rings_of
from tasp_lab.rings.problem import RingProblem
from tasp_lab.rings.search_budget import SearchBudget

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

_WORKERS = 1

_OPERATIONS_PER_UNIT = 1_000_000
"""Operations in a unit of CP-SAT's deterministic time; a unit was measured to take 0.5 to 1.5 s on one core."""


IMPOSSIBLE, NOT_FOUND = "proved impossible", "not found within the search budget"
"""How a search without a result ended."""


def is_installed() -> bool:
    """Whether OR-tools is installed."""
    return find_spec("ortools") is not None


def rings_within(
    problem: RingProblem, capacities: Sequence[int], count: int, budget: SearchBudget, fold: int | None = None
) -> tuple[IntArray | None, str]:
    """`count` rings that use each constraint at most as often as its capacity, as an array (count, world_size).

    With `fold`, each pair of ranks is used at most `fold` times. Without such rings, None and `IMPOSSIBLE` or
    `NOT_FOUND`.

    >>> from tasp_lab.topology.builders import full_mesh
    >>> four = RingProblem.of(full_mesh(4))
    >>> rings_within(four, [1] * 12, 3, SearchBudget(10**7))
    (None, 'proved impossible')
    >>> rings_within(four, [1] * 12, 2, SearchBudget(10**7))[0].shape
    (2, 4)
    """
    cp_model = _import_cp_model()
    model, arcs = cp_model.CpModel(), problem.arcs.tolist()
    chosen: list[list[Any]] = [[model.new_bool_var("") for _ in arcs] for _ in range(count)]
    for ring in chosen:
        model.add_circuit([(*ends, arc) for ends, arc in zip(arcs, ring, strict=True)])
    uses = problem.uses.tocsr()
    for row, capacity in enumerate(capacities):
        loading = uses.indices[uses.indptr[row] : uses.indptr[row + 1]].tolist()
        model.add(sum(ring[arc] for ring in chosen for arc in loading) <= capacity)
    for arc in range(len(arcs) if fold is not None else 0):
        model.add(sum(ring[arc] for ring in chosen) <= fold)
    # Rings may be exchanged for each other: an order by the successor of rank 0 leaves less to search.
    firsts = [sum(head * ring[arc] for arc, (tail, head) in enumerate(arcs) if tail == 0) for ring in chosen]
    for first, second in pairwise(firsts):
        model.add(first <= second)
    solver, status = _solve(model, budget)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None, IMPOSSIBLE if status == cp_model.INFEASIBLE else NOT_FOUND
    hops = [problem.arcs[[solver.boolean_value(arc) for arc in ring]] for ring in chosen]
    return rings_of(np.array([heads[tails.argsort()] for tails, heads in (each.T for each in hops)])), ""


def _import_cp_model() -> Any:
    """The module ``cp_model`` of OR-tools, of which SIGINT during the import would make an `ImportError`."""
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
