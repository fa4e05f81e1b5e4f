"""The quotient of operations by their classes: a program with one operation per class and repeat.

An operation of the program represents all members of a class in one repeat. The number of class c in repeat r is
``r * classes + c``; adding an offset to that number gives a follower.

Example: AllGather around a ring of four equal links has three steps, so three repeats, and its four hops are one class.
The program has the operations 0, 1 and 2. Each one's follower is the next step, at offset 1, for two causes: the hop
itself must have sent its previous block (`if_sent`), and the hop before must have delivered (`if_arrived`). On links
that are slow and fast in turn there are two classes: operations 0 and 1 are step 0 of slow and of fast hops, 2 and 3
step 1. A slow hop is followed by itself at offset 2 and by the fast one after it at offset 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from sim.array.operations import COMPUTES, RECEIVES, SENDS, TRANSFER, Cost, Operations
from sim.array.symmetry import Classes, firsts_of
from tasp_lab.core.arrays import BoolArray, FloatArray, Int32Array, IntArray, Table
from tasp_lab.core.compiled import table
from tasp_lab.core.errors import ScheduleError
from tasp_lab.machines.contention import Contention
from tasp_lab.schedule.dependencies import LANE, SENT

MAX_PASSES = 62
"""Maximum constraints that a transfer passes: bottlenecks are bits of an integer."""


class Plan(NamedTuple):
    """A program as tables.

    Attributes
    ----------
    size, classes, variants : how many operations the program has, how many classes, and how many variants of a repeat.
    rows : a table of one row per class, and one more: where the followers of each class begin, those `if_sent`, then
        those `if_arrived`; its `first_pass`; the class of hosts that launches it, or -1, and its `lane` there; the
        class of GPUs that it `sends_at`, `receives_at` and `computes_on`, each or -1, and how many of its operations
        each of these `sends` and `receives`.
    after : a table of followers: the `offset` of the number, and the `cause` of waiting.
    passes : a table: the class of a `constraint` that a class passes, and the `count` of its operations that pass each.
    cost : int array (variants * classes,), the index of the cost of each class; see `Operations.variant`.
    costs : a table: `launch_s`, `wire_bytes`, `latency_s`, the `limit` in bytes/s or infinity, and the `channels`.
    """

    size: int
    classes: int
    variants: int
    rows: Table
    after: Table
    passes: Table
    cost: Int32Array
    costs: Table

    def path(self, index: int) -> list[int]:
        """The classes of constraints that a class passes."""
        first, end = self.rows["first_pass"][index : index + 2]
        path: list[int] = self.passes["constraint"][first:end].tolist()
        return path


@dataclass(frozen=True, eq=False)
class Program:
    """The classes of operations and their dependencies, over all repeats.

    Attributes
    ----------
    kinds : int array (classes,), the kind of each class.
    waits : int array (repeats, classes), the number of incoming edges; the last row holds for all later repeats.
    lanes : the maximum number of flows in progress: each lane has one.
    gpus : how many classes of GPUs there are; none without contention.
    capacity_bytes_per_s : float array, the capacity of each class of constraints; 0 for classes of hosts.
    """

    operations: Operations
    classes: Classes
    plan: Plan
    kinds: IntArray
    waits: IntArray
    lanes: int
    gpus: int
    capacity_bytes_per_s: FloatArray

    def cost(self, number: int) -> Cost:
        """The cost of operation `number`."""
        repeat, index = divmod(number, self.plan.classes)
        which = int(self.plan.cost[self.operations.variant(repeat) * self.plan.classes + index])
        return self.operations.costs[which]

    def with_numbers(self, costs: Sequence[Cost], capacity_bytes_per_s: FloatArray, contention: Contention) -> Program:
        """The program with other costs and capacities, in the order of those of its operations."""
        operations = replace(
            self.operations, costs=costs, capacity_bytes_per_s=capacity_bytes_per_s, contention=contention
        )
        plan, capacities = self.plan._replace(costs=_costs(costs)), _capacities(operations, self.classes)
        return replace(self, operations=operations, plan=plan, capacity_bytes_per_s=capacities)


def program_of(operations: Operations, classes: Classes) -> Program:
    """The program of operations with an equitable partition. Raises `ScheduleError` for more than `MAX_PASSES`."""
    first = firsts_of(classes.of_operation)
    on_gpus = dict.fromkeys(("sends_at", "receives_at", "computes_on", "sends", "receives"), "i4")
    rows = table(len(first) + 1, if_sent="i4", if_arrived="i4", first_pass="i4", host="i4", lane="i4", **on_gpus)
    rows["host"][:-1], rows["lane"][:-1] = _hosts(operations, classes, first), operations.lane[first]
    leaders = _Leaders.of(first, len(operations.label))
    waits, after = _edges(operations, classes, leaders, rows)
    gpus = _enter_gpus(operations, classes, leaders, rows)
    plan = Plan(
        size=len(first) * operations.repeats,
        classes=len(first),
        variants=len(operations.cost),
        rows=rows,
        after=after,
        passes=_passes(operations, classes, leaders, rows),
        cost=operations.cost[:, first].astype(np.int32).ravel(),
        costs=_costs(operations.costs),
    )
    capacities = _capacities(operations, classes)
    kinds, lanes = operations.kind[first], _lanes(operations)
    return Program(operations.without_edges(), classes, plan, kinds, waits, lanes, gpus, capacities)


@dataclass(frozen=True)
class _Leaders:
    """The first operation of each class, which has the edges and passes of its class; None: each is its own class."""

    is_first: BoolArray | None

    @classmethod
    def of(cls, first: IntArray, operations: int) -> _Leaders:
        if len(first) == operations:
            return cls(None)
        is_first = np.zeros(operations, dtype=bool)
        is_first[first] = True
        return cls(is_first)

    def among(self, operation: IntArray) -> IntArray | slice:
        """Where these operations are such."""
        return slice(None) if self.is_first is None else np.flatnonzero(self.is_first[operation])


def _hosts(operations: Operations, classes: Classes, first: IntArray) -> IntArray:
    """The class of hosts that launches each class, or -1."""
    hosts = operations.host[first]
    is_launched = hosts >= 0
    hosts[is_launched] = classes.of_resource[len(operations.capacity_bytes_per_s) + hosts[is_launched]]
    return hosts


def _edges(operations: Operations, classes: Classes, leaders: _Leaders, rows: Table) -> tuple[IntArray, Table]:
    """The waits of a `Program`, and the followers of each class, whose ranges are entered into its row.

    A class has the incoming edges of its first member. If several come from one class, that class has it as a follower
    as often.
    """
    edges, count = operations.edges, len(rows) - 1
    led, number = leaders.among(edges.after), classes.of_operation.astype(np.int32)
    before, after = number[edges.before[led]], number[edges.after[led]]
    delay, row = operations.delay[led], 2 * before + (edges.event[led] != SENT)
    order = np.argsort(row, kind="stable")
    followers = table(len(row), offset="i4", cause="i4")
    followers["offset"], followers["cause"] = (after - before)[order], edges.cause[led][order]
    begins = _begins(row, 2 * count)
    rows["if_sent"], rows["if_arrived"][:-1] = begins[::2], begins[1::2]
    if not delay.any():
        return np.bincount(after, minlength=count)[None], followers
    followers["offset"] += delay[order] * count
    repeats = range(min(int(delay.max(initial=0)) + 1, operations.repeats))
    return np.stack([np.bincount(after[delay <= repeat], minlength=count) for repeat in repeats]), followers


def _passes(operations: Operations, classes: Classes, leaders: _Leaders, rows: Table) -> Table:
    """What each class passes, whose beginning is entered into its row.

    Members times constraints passed by each is constraints times members that pass each.
    """
    size = np.bincount(classes.of_resource[: len(operations.capacity_bytes_per_s)])
    by_first = leaders.among(operations.passing)
    passing = classes.of_operation[operations.passing[by_first]]
    pairs = passing * len(size) + classes.of_resource[operations.passed[by_first]]
    pairs, passed = _counted(pairs)
    passing, constraint = pairs // max(len(size), 1), pairs % max(len(size), 1)
    passes: Table = table(len(pairs), constraint="i4", count="i4")
    passes["constraint"] = constraint
    passes["count"] = np.bincount(classes.of_operation)[passing] * passed // size[constraint]
    rows["first_pass"] = _begins(passing, len(rows) - 1)
    if (longest := int(np.diff(rows["first_pass"]).max(initial=0))) > MAX_PASSES:
        raise ScheduleError(f"a transfer passes {longest} links and shared capacities, expected at most {MAX_PASSES}")
    return passes


_COLUMNS = ((SENDS, "sends_at", "sends"), (RECEIVES, "receives_at", "receives"), (COMPUTES, "computes_on", ""))
"""The columns of a row for what an operation does on a GPU."""


def _enter_gpus(operations: Operations, classes: Classes, leaders: _Leaders, rows: Table) -> int:
    """Enter what each class does on GPUs into its row; returns the number of classes of GPUs.

    An operation has one GPU in each role. So a class has as many members as there are GPUs, times members on each.
    """
    uses = operations.gpu_uses
    for _, place, _ in _COLUMNS:
        rows[place] = -1
    if not len(uses.gpu):
        return 0
    of_gpu = np.unique(classes.of_resource[-int(uses.gpu.max()) - 1 :], return_inverse=True)[1]
    gpus, members = np.bincount(of_gpu), np.bincount(classes.of_operation)
    for role, place, count in _COLUMNS:
        used = uses.role == role
        operation, gpu = uses.operation[used], of_gpu[uses.gpu[used]]
        led = leaders.among(operation)
        index, gpu = classes.of_operation[operation[led]], gpu[led]
        rows[place][index] = gpu
        if count:
            rows[count][index] = members[index] // gpus[gpu]
    return len(gpus)


def _counted(values: IntArray) -> tuple[IntArray, IntArray]:
    """The distinct values, ascending, and how often each occurs. On long arrays faster than `numpy.unique`."""
    values = np.sort(values)
    first = np.flatnonzero(np.diff(values, prepend=-1))
    return values[first], np.diff(first, append=len(values))


def _begins(rows: IntArray, count: int) -> IntArray:
    """Where each of so many rows begins, once sorted; then where the last one ends."""
    return np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=count))])


def _costs(costs: Sequence[Cost]) -> Table:
    limits = [np.inf if each.max_bytes_per_s is None else each.max_bytes_per_s for each in costs]
    rows: Table = table(len(costs), launch_s="f8", wire_bytes="f8", latency_s="f8", limit="f8", channels="f8")
    rows[:] = [(*each[:3], limit, each.channels) for each, limit in zip(costs, limits, strict=True)]
    return rows


def _capacities(operations: Operations, classes: Classes) -> FloatArray:
    capacities = np.zeros(int(classes.of_resource.max(initial=-1)) + 1)
    constraints = len(operations.capacity_bytes_per_s)
    capacities[classes.of_resource[:constraints]] = operations.capacity_bytes_per_s
    return capacities


def _lanes(operations: Operations) -> int:
    """The number of transfers that follow no other one of the same repeat on their lane."""
    edges = operations.edges
    is_first = operations.kind == TRANSFER
    is_first[edges.after[(edges.cause == LANE) & (operations.delay == 0)]] = False
    return int(is_first.sum())
