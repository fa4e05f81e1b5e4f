"""Operations that are alike: a partition into classes whose members do the same at the same time.

**Theorem.** Let operations and constraints (and hosts) be divided into classes so that

- operations of a class have the same label, so the same costs; constraints of a class have the same capacity;
- each operation of a class has, for each kind of edge and each class, equally many edges from operations of that class;
- each operation of a class passes equally many constraints of each class, and each constraint of a class is passed by
  equally many operations of each class.

Then operations of a class begin, send and arrive at the same times.

*Proof.* By induction over the instants at which something happens. Let all operations of a class have the same past up
to an instant. Which of them begin now depends on the past of what leads to them, and this is the same, class by
class. So at each constraint of a class the flows under way now are equally many of each class. Max-min fair rates
are unique (Bertsekas & Gallager, Data Networks, 2nd ed., section 6.5.2), and progressive filling finds them: as long as
the flows of each class have the same rate, constraints of a class fill up at the same moment, which freezes all flows
of the classes that pass one of them. So flows of a class have the same rate until something happens next, and have as
much left then. A host launches by the time of asking, then by lane, and the lane is part of the label where hosts
launch one after the other. Two operations of one lane are never alike: each of a class would wait for another of it to
leave, without end. So hosts of a class launch operations of the same classes in the same order. QED.

Such a partition is called *equitable*. `coarse_classes` looks for a coarse one by colour refinement: classes are split
by what their members' neighbours are until nothing is split any more. Neighbourhoods are compared by sums of random
64-bit numbers, so that `is_equitable` then counts, exactly, whether the premises hold. One class per operation is
equitable without any proof; it is taken where little or nothing is alike.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sim.array_operations import Edges, Operations
from sim.numbering import numbered
from tasp_lab.arrays import IntArray

Hashes = npt.NDArray[np.uint64]


_MOST_LOOKED_AT = 2**26
"""So many operations are looked at, over all rounds of refinement: seconds. Where all links are alike a few rounds will
do; an odd one is noticed by one more hop of a ring in each round."""


class Classes(NamedTuple):
    """The class of each operation and of each *holder*: the constraints, then the hosts. Int arrays."""

    of_operation: IntArray
    of_holder: IntArray


def firsts_of(classes: IntArray) -> IntArray:
    """The first member of each class."""
    firsts = np.zeros(int(classes.max(initial=-1)) + 1, dtype=np.int64)
    firsts[classes[::-1]] = np.arange(len(classes))[::-1]
    return firsts


class Holding(NamedTuple):
    """Which operations pass or are launched by which holders, int arrays (passes,), and what holders are like."""

    operation: IntArray
    holder: IntArray
    label: IntArray


def classes_of(operations: Operations) -> Classes:
    """An equitable partition, coarse where one was found."""
    holding = holding_of(operations)
    found = coarse_classes(operations, holding)
    if found is not None and is_equitable(operations, holding, found):
        return found
    return Classes(np.arange(len(operations.label)), np.arange(len(holding.label)))


def holding_of(operations: Operations) -> Holding:
    """What operations pass, and who launches them."""
    launched = np.flatnonzero(operations.host >= 0)
    capacity = 1 + numbered(operations.capacity_bytes_per_s)[1]
    of_hosts = np.zeros(int(operations.host.max(initial=-1)) + 1, dtype=np.int64)
    operation = np.concatenate([operations.passing, launched])
    holder = np.concatenate([operations.passed, len(capacity) + operations.host[launched]])
    return Holding(operation, holder, np.concatenate([capacity, of_hosts]))


def coarse_classes(operations: Operations, holding: Holding) -> Classes | None:
    """A partition that colour refinement splits no more, the coarsest; None if that takes long or little is alike."""
    random = np.random.default_rng(0)
    found = Classes(numbered(operations.label)[1], numbered(holding.label)[1])
    for _ in range(max(8, _MOST_LOOKED_AT // max(len(operations.label), 1))):
        before, found = found, _split(operations.edges, holding, found, random)
        if _count(found) == _count(before):
            return found
        if 2 * int(found.of_operation.max(initial=0)) > len(operations.label):
            return None
    return None


def _count(classes: Classes) -> int:
    return sum(int(each.max(initial=-1)) + 1 for each in classes)


def _split(edges: Edges, holding: Holding, classes: Classes, random: np.random.Generator) -> Classes:
    """Tell apart what has other neighbours."""
    operations, holders = classes

    def drawn(classes: IntArray) -> Hashes:
        return random.integers(0, 2**64, size=int(classes.max(initial=0)) + 1, dtype=np.uint64)[classes]

    of_holders = drawn(holders)
    np.add.at(of_holders, holding.holder, drawn(operations)[holding.operation])
    split_holders = numbered(of_holders)[1]
    of_operations = drawn(operations)
    np.add.at(of_operations, holding.operation, drawn(split_holders)[holding.holder])
    kind = _edge_kind(edges)
    for each in np.unique(kind).tolist():
        chosen = np.flatnonzero(kind == each)
        np.add.at(of_operations, edges.after[chosen], drawn(operations)[edges.before[chosen]])
    return Classes(numbered(of_operations)[1], split_holders)


def _edge_kind(edges: Edges) -> IntArray:
    return (edges.delay * 2 + edges.event) * 3 + edges.cause


def is_equitable(operations: Operations, holding: Holding, classes: Classes) -> bool:
    """Whether classes are as the theorem wants them. Exact."""
    of_operation, of_holder = classes
    edges = operations.edges
    kinds = int(of_operation.max(initial=0)) + 1
    return (
        _is_constant(operations.label, of_operation)
        and _is_constant(holding.label, of_holder)
        and _is_regular(edges.after, _edge_kind(edges) * kinds + of_operation[edges.before], of_operation)
        and _is_regular(holding.operation, of_holder[holding.holder], of_operation)
        and _is_regular(holding.holder, of_operation[holding.operation], of_holder)
    )


def _is_constant(label: IntArray, classes: IntArray) -> bool:
    """Whether members of a class have one label."""
    return bool((label == label[firsts_of(classes)][classes]).all())


def _is_regular(member: IntArray, neighbour: IntArray, classes: IntArray) -> bool:
    """Whether all members of a class have equally many neighbours of each kind, given as pairs."""
    width = int(neighbour.max(initial=0)) + 1
    pairs, counts = np.unique(member * width + neighbour, return_counts=True)
    rows = np.stack([classes[pairs // width], pairs % width, counts])
    order = np.lexsort(rows)
    rows = rows[:, order]
    first = np.flatnonzero(np.concatenate([[True], (np.diff(rows) != 0).any(axis=0)])[: rows.shape[1]])
    members = np.diff(np.append(first, rows.shape[1]))
    sizes = np.bincount(classes)
    return bool((members == sizes[rows[0, first]]).all())
