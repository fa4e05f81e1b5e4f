"""Max-min fair rates of classes of flows, the counterpart of `sim.max_min` for single flows.

Classes are those of `sim.array.symmetry`: each constraint of a class is passed by equally many flows of each class.
Progressive filling raises all rates together, so the constraints of a class saturate together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sim.array.compiled import call, compilable, table
from tasp_lab.arrays import FloatArray, Int32Array, Table

SAME = 1e-12
"""Relative tolerance within which rates, and times, are considered equal up to rounding."""

Path = tuple[tuple[int, int], ...]
"""Pairs: a class of constraints that an operation passes, and how many of its class pass each of these."""


class FlowDemand(NamedTuple):
    """The demand of a class of flows: the constraints passed, and the maximum bytes/s of each flow."""

    path: Path
    max_bytes_per_s: float | None


class Share(NamedTuple):
    """The rate of a class of flows, and its bottleneck classes of constraints; empty: its own limit."""

    bytes_per_s: float
    bottlenecks: tuple[int, ...]


class Sharing(NamedTuple):
    """Flows, the constraints that they share, and who passes which.

    Attributes
    ----------
    flows : a table. Flow f has the passes `first_pass` to `end_pass` and a `limit` of its own, in bytes/s, or infinity;
        `share` finds its `rate` in bytes/s and its `bottlenecks`: bit k for pass k, none for its own limit.
    passes : a table: the `constraint`, and the `count` of flows of a class that pass it.
    constraints : a table: the `capacity` in bytes/s; during `share` also what is `left` of it, the number of flows
        whose rate is still `growing` and of those just `frozen`, and whether it `is_full`. `fastest` is for other uses.
    """

    flows: Table
    passes: Table
    constraints: Table

    @classmethod
    def of(cls, flows: int, passes: Table, capacity_bytes_per_s: FloatArray) -> Sharing:
        """Room for so many flows, which have no passes yet."""
        constraints = table(
            len(capacity_bytes_per_s), capacity="f8", left="f8", fastest="f8", growing="i8", frozen="i8", is_full="i8"
        )
        constraints["capacity"] = capacity_bytes_per_s
        of_flows = table(flows, first_pass="i4", end_pass="i4", limit="f8", rate="f8", bottlenecks="i8")
        return cls(of_flows, passes, constraints)


@compilable
def share(sharing: Sharing, flows: Int32Array, flow_count: int, constraints: Int32Array, constraint_count: int) -> None:
    """Find the shares of the first `flow_count` of `flows`, which pass the first `constraint_count` of `constraints`.

    Changes the order of both. Results do not depend on that order, not even in rounding.
    """
    for at in range(constraint_count):
        constraint = sharing.constraints[constraints[at]]
        constraint.left, constraint.growing = constraint.capacity, 0
    for at in range(flow_count):
        flow = sharing.flows[flows[at]]
        for one in range(flow.first_pass, flow.end_pass):
            passed = sharing.passes[one]
            sharing.constraints[passed.constraint].growing += passed.count
    while flow_count:
        level = math.inf
        for at in range(constraint_count):
            constraint = sharing.constraints[constraints[at]]
            level = min(level, constraint.left / constraint.growing)
        for at in range(flow_count):
            level = min(level, sharing.flows[flows[at]].limit)
        for at in range(constraint_count):
            constraint = sharing.constraints[constraints[at]]
            constraint.is_full = constraint.left / constraint.growing <= level * (1 + SAME)
            constraint.frozen = 0
        flow_count = _freeze(sharing, flows, flow_count, level)
        kept = 0
        for at in range(constraint_count):
            constraint = sharing.constraints[constraints[at]]
            constraint.left -= level * constraint.frozen
            constraint.growing -= constraint.frozen
            if constraint.growing:
                constraints[at], constraints[kept] = constraints[kept], constraints[at]
                kept += 1
        constraint_count = kept


@compilable
def _freeze(sharing: Sharing, flows: Int32Array, flow_count: int, level: float) -> int:
    """Freeze the flows at a full constraint or at their limit; returns the number of the others, which go first."""
    growing = 0
    for at in range(flow_count):
        flow = sharing.flows[flows[at]]
        bottlenecks = 0
        for one in range(flow.first_pass, flow.end_pass):
            if sharing.constraints[sharing.passes[one].constraint].is_full:
                bottlenecks |= 1 << (one - flow.first_pass)
        if bottlenecks or flow.limit <= level * (1 + SAME):
            flow.rate, flow.bottlenecks = level, bottlenecks
            for one in range(flow.first_pass, flow.end_pass):
                passed = sharing.passes[one]
                sharing.constraints[passed.constraint].frozen += passed.count
        else:
            flows[at], flows[growing] = flows[growing], flows[at]
            growing += 1
    return growing


def fair_shares(flows: Sequence[FlowDemand], capacity_bytes_per_s: Sequence[float]) -> list[Share]:
    """The max-min fair share of each class of flows.

    Each constraint of class 0 is passed by 3 flows of the first class and 1 of the second:

    >>> first, second = FlowDemand(((0, 3),), None), FlowDemand(((0, 1), (1, 1)), None)
    >>> [share.bytes_per_s for share in fair_shares([first, second], [10.0, 1.0])]
    [3.0, 1.0]
    """
    passes = table(sum(len(flow.path) for flow in flows), constraint="i4", count="i4")
    passes[:] = [each for flow in flows for each in flow.path]
    sharing = Sharing.of(len(flows), passes, np.array(capacity_bytes_per_s))
    sharing.flows["end_pass"] = np.cumsum([len(flow.path) for flow in flows])
    sharing.flows["first_pass"][1:] = sharing.flows["end_pass"][:-1]
    sharing.flows["limit"] = [math.inf if each is None else each for _, each in flows]
    numbers, constraints = np.arange(len(flows), dtype=np.int32), np.unique(passes["constraint"])
    call(share, sharing, numbers, len(numbers), constraints, len(constraints), fast=False)
    found = zip(flows, sharing.flows["rate"].tolist(), sharing.flows["bottlenecks"].tolist(), strict=True)
    return [
        Share(rate, tuple(each for at, (each, _) in enumerate(flow.path) if bits >> at & 1))
        for flow, rate, bits in found
    ]
