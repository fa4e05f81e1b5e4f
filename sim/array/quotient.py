"""The quotient of operations by their classes: a program with one operation per class and repeat.

An operation of the program represents all members of a class in one repeat. The number of class c in repeat r is
``r * classes + c``; adding an offset to that number gives a follower.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sim.array.operations import SENT, Cost, Operations
from sim.array.symmetry import Classes, firsts_of
from tasp_lab.arrays import FloatArray, IntArray

Path = tuple[tuple[int, int], ...]
"""Pairs: a class of constraints that an operation passes, and how many of its class pass each of these."""


@dataclass(frozen=True, eq=False)
class Program:
    """The classes of operations and their dependencies, over all repeats.

    Attributes
    ----------
    kinds : the kind of each class.
    costs : the costs of each class, by variant of a repeat (see `Operations.variant`).
    after_sent, after_arrived : the followers of each class, as pairs (offset of the number, cause).
    waits : int array (repeats, classes), the number of incoming edges; the last row holds for all later repeats.
    paths : the classes of constraints that each class passes.
    hosts : the class of hosts that launches each class, or -1.
    lanes : the lane of each class if a host launches it; else 0.
    """

    operations: Operations
    classes: Classes
    kinds: list[int]
    costs: list[list[Cost]]
    after_sent: list[list[tuple[int, int]]]
    after_arrived: list[list[tuple[int, int]]]
    waits: IntArray
    paths: list[Path]
    hosts: list[int]
    lanes: list[int]
    capacity_bytes_per_s: list[float]

    def cost(self, number: int) -> Cost:
        """The cost of operation `number`."""
        repeat, index = divmod(number, len(self.costs))
        return self.costs[index][self.operations.variant(repeat)]


def program_of(operations: Operations, classes: Classes) -> Program:
    """The program of operations with an equitable partition."""
    first = firsts_of(classes.of_operation)
    edges = _class_edges(operations, classes, first)
    costs = [[operations.costs[each] for each in column] for column in operations.cost[:, first].T.tolist()]
    hosts = operations.host[first]
    launched_by = classes.of_resource[len(operations.capacity_bytes_per_s) + hosts] if (hosts >= 0).any() else hosts
    return Program(
        operations=operations,
        classes=classes,
        kinds=operations.kind[first].tolist(),
        costs=costs,
        after_sent=_offsets(edges[:, edges[2] == SENT], len(first)),
        after_arrived=_offsets(edges[:, edges[2] != SENT], len(first)),
        waits=_waits(edges, len(first), operations.repeats),
        paths=_paths(operations, classes, first),
        hosts=np.where(hosts >= 0, launched_by, -1).tolist(),
        lanes=operations.lane[first].tolist(),
        capacity_bytes_per_s=_capacities(operations, classes).tolist(),
    )


def _class_edges(operations: Operations, classes: Classes, first: IntArray) -> IntArray:
    """The distinct edges between classes, rows of an int array: before, after, event, cause, delay."""
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
    """The number of incoming edges of each class in the first repeats; the last row holds for all later ones."""
    rows = min(int(edges[4].max(initial=0)) + 1, repeats)
    return np.stack([np.bincount(edges[1, edges[4] <= repeat], minlength=count) for repeat in range(rows)])


def _paths(operations: Operations, classes: Classes, first: IntArray) -> list[Path]:
    of_constraint = classes.of_resource[operations.passed]
    passing = classes.of_operation[operations.passing]
    size = np.bincount(classes.of_resource[: len(operations.capacity_bytes_per_s)])
    pairs, counts = np.unique(passing * len(size) + of_constraint, return_counts=True)
    found: list[list[tuple[int, int]]] = [[] for _ in range(len(first))]
    for pair, passes in zip(pairs.tolist(), counts.tolist(), strict=True):
        constraint = pair % len(size)
        found[pair // len(size)].append((constraint, passes // int(size[constraint])))
    return [tuple(path) for path in found]


def _capacities(operations: Operations, classes: Classes) -> FloatArray:
    """The capacity of each class of constraints; 0 for classes of hosts."""
    found = np.zeros(int(classes.of_resource.max(initial=-1)) + 1)
    constraints = len(operations.capacity_bytes_per_s)
    found[classes.of_resource[:constraints]] = operations.capacity_bytes_per_s
    return found
