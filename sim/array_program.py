"""A program: what one operation of each class does, for all of them.

An operation of the program stands for all members of a class in one repeat. The number of class c in repeat r is
``r * classes + c``; what follows from it is found by adding an offset to that number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sim.array_classes import Classes, firsts_of
from sim.array_operations import SENT, Cost, Operations
from tasp_lab.arrays import FloatArray, IntArray

Way = tuple[tuple[int, int], ...]
"""The classes of constraints that an operation passes, each with how many of its class pass one such constraint."""


@dataclass(frozen=True, eq=False)
class Program:
    """The classes of operations, repeated.

    Attributes
    ----------
    kinds : the kind of each class.
    costs : of each class, its cost in each variant of a repeat (see `Operations.variant`).
    after_sent, after_arrived : of each class, what waits for it: offsets of its number, and why it waits.
    waits : int array (repeats until it stays the same, classes): how many edges lead to each in these repeats.
    ways : of each class, the constraints that it passes.
    hosts : of each class, the host that launches it, or -1.
    lanes : of each class, the lane of its members, which is one where a host launches them; else 0.
    """

    operations: Operations
    classes: Classes
    kinds: list[int]
    costs: list[list[Cost]]
    after_sent: list[list[tuple[int, int]]]
    after_arrived: list[list[tuple[int, int]]]
    waits: IntArray
    ways: list[Way]
    hosts: list[int]
    lanes: list[int]
    capacity_bytes_per_s: list[float]

    def cost(self, number: int) -> Cost:
        """What operation `number` takes."""
        repeat, index = divmod(number, len(self.costs))
        return self.costs[index][self.operations.variant(repeat)]


def program_of(operations: Operations, classes: Classes) -> Program:
    """The program of some operations, given an equitable partition of them."""
    first = firsts_of(classes.of_operation)
    edges = _class_edges(operations, classes, first)
    costs = [[operations.costs[each] for each in column] for column in operations.cost[:, first].T.tolist()]
    hosts = operations.host[first]
    launched_by = classes.of_holder[len(operations.capacity_bytes_per_s) + hosts] if (hosts >= 0).any() else hosts
    return Program(
        operations=operations,
        classes=classes,
        kinds=operations.kind[first].tolist(),
        costs=costs,
        after_sent=_offsets(edges[:, edges[2] == SENT], len(first)),
        after_arrived=_offsets(edges[:, edges[2] != SENT], len(first)),
        waits=_waits(edges, len(first), operations.repeats),
        ways=_ways(operations, classes, first),
        hosts=np.where(hosts >= 0, launched_by, -1).tolist(),
        lanes=operations.lane[first].tolist(),
        capacity_bytes_per_s=_capacities(operations, classes).tolist(),
    )


def _class_edges(operations: Operations, classes: Classes, first: IntArray) -> IntArray:
    """The different edges to classes, rows of an int array: class before, class after, event, cause, delay."""
    edges = operations.edges
    is_first = np.zeros(len(operations.label), dtype=bool)
    is_first[first] = True
    led = is_first[edges.after]
    rows = [classes.of_operation[edges.before[led]], classes.of_operation[edges.after[led]]]
    return np.unique(np.stack([*rows, *(each[led] for each in edges[2:])]), axis=1)


def _offsets(edges: IntArray, count: int) -> list[list[tuple[int, int]]]:
    found: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    for before, after, _, cause, delay in edges.T.tolist():
        found[before].append((after - before + delay * count, cause))
    return found


def _waits(edges: IntArray, count: int, repeats: int) -> IntArray:
    """How many edges lead to each class in the first repeats, the last of which stands for all later ones."""
    rows = min(int(edges[4].max(initial=0)) + 1, repeats)
    return np.stack([np.bincount(edges[1, edges[4] <= repeat], minlength=count) for repeat in range(rows)])


def _ways(operations: Operations, classes: Classes, first: IntArray) -> list[Way]:
    of_constraint = classes.of_holder[operations.passed]
    passing = classes.of_operation[operations.passing]
    size = np.bincount(classes.of_holder[: len(operations.capacity_bytes_per_s)])
    pairs, counts = np.unique(passing * len(size) + of_constraint, return_counts=True)
    found: list[list[tuple[int, int]]] = [[] for _ in range(len(first))]
    for pair, passes in zip(pairs.tolist(), counts.tolist(), strict=True):
        constraint = pair % len(size)
        found[pair // len(size)].append((constraint, passes // int(size[constraint])))
    return [tuple(way) for way in found]


def _capacities(operations: Operations, classes: Classes) -> FloatArray:
    """The capacity of each class of constraints; 0 of a class of hosts."""
    found = np.zeros(int(classes.of_holder.max(initial=-1)) + 1)
    constraints = len(operations.capacity_bytes_per_s)
    found[classes.of_holder[:constraints]] = operations.capacity_bytes_per_s
    return found
