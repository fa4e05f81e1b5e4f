"""Equivalence classes of operations: an equitable partition, whose members act at the same times.

**Theorem.** Let operations and constraints (and hosts) be partitioned into classes such that

- operations of a class have the same label, so the same costs; constraints of a class have the same capacity;
- each operation of a class has, for each kind of edge and each class, equally many edges from operations of that class;
- each operation of a class passes equally many constraints of each class, and each constraint of a class is passed by
  equally many operations of each class;
- with contention, the same holds for GPUs: those that an operation sends from, receives at and computes on.

Then operations of a class start, send and arrive at the same times.

*Proof.* By induction over the instants of events. Let all operations of a class have the same past up to an instant.
Which of them start now depends on the past of their predecessors, which is the same, class by class. So each constraint
of a class now carries equally many flows of each class. Max-min fair rates are unique (Bertsekas & Gallager, Data
Networks, 2nd ed., section 6.5.2), and progressive filling finds them: as long as the flows of each class have the same
rate, constraints of a class saturate simultaneously, which freezes all flows of the classes that pass one of them. So
flows of a class have the same rate until the next event, and the same number of bytes left then. Each GPU of a class
has equally many messages of each class in flight, so the calls of a class have the same speed. A host launches by
time of request, then by lane, and the lane is part of the label if launches are serial. Two operations of one lane are
never in the same class: each of a class would wait for another of it to leave, without end. So hosts of a class launch
operations of the same classes in the same order. QED.

**Example.** Four ranks around a ring of equal links, one block per hop: hop i waits for hop i - 1 and passes link i.
All four hops are one class and all four links another, so one operation is simulated for four. If link 2 is slower, it
is a class of its own by its capacity; so hop 2 is one, since it passes it; so hop 3 is one, since it waits for hop 2;
and so on around the ring: no two operations are alike.

Such a partition is called *equitable*. `coarse_classes` searches for a coarse one by colour refinement: classes are
split by their members' neighbours until they are stable. Neighbourhoods are compared by sums of random 64-bit numbers;
`is_equitable` then verifies the premises exactly. The partition with one class per operation is always equitable; it
is the fallback if there is little or no symmetry.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sim.array.operations import Operations
from tasp_lab.core.arrays import BoolArray, IntArray, distinct, numbered
from tasp_lab.schedule.dependencies import HOST

Hashes = npt.NDArray[np.uint64]


_MAX_VISITS = 2**26
"""Maximum operations visited over all rounds of refinement: seconds. With equal links a few rounds suffice; a
different link takes one round per hop of a ring to propagate."""


class Classes(NamedTuple):
    """The class of each operation and of each *resource*: constraints, then hosts, then GPUs. Int arrays."""

    of_operation: IntArray
    of_resource: IntArray


def firsts_of(classes: IntArray) -> IntArray:
    """The first member of each class."""
    firsts = np.zeros(int(classes.max(initial=-1)) + 1, dtype=np.int64)
    firsts[classes[::-1]] = np.arange(len(classes))[::-1]
    return firsts


class ResourceUse(NamedTuple):
    """Which operation uses which resource, int arrays (uses,), and the label of each resource.

    `role` is what an operation does on a GPU, see `GpuUses`; 0 for constraints and hosts.
    """

    operation: IntArray
    resource: IntArray
    role: IntArray
    label: IntArray

    @property
    def roles(self) -> int:
        """One more than the largest role."""
        return int(self.role.max(initial=0)) + 1


def classes_of(operations: Operations) -> Classes:
    """An equitable partition; coarse if one was found, else one class per operation."""
    resource_use = resource_use_of(operations)
    coarse = coarse_classes(operations, resource_use)
    if coarse is not None and is_equitable(operations, resource_use, coarse):
        return coarse
    return Classes(np.arange(len(operations.label)), np.arange(len(resource_use.label)))


def resource_use_of(operations: Operations) -> ResourceUse:
    """The constraints that operations pass, the hosts that launch them, and the GPUs they use."""
    launched = np.flatnonzero(operations.host >= 0)
    capacity = 1 + numbered(operations.capacity_bytes_per_s)[1]
    of_hosts = np.zeros(int(operations.host.max(initial=-1)) + 1, dtype=np.int64)
    on_gpus, others = operations.gpu_uses, len(capacity) + len(of_hosts)
    operation = np.concatenate([operations.passing, launched, on_gpus.operation])
    resource = np.concatenate([operations.passed, len(capacity) + operations.host[launched], others + on_gpus.gpu])
    role = np.concatenate([np.zeros(len(operations.passing) + len(launched), dtype=np.int64), on_gpus.role])
    of_gpus = np.full(int(on_gpus.gpu.max(initial=-1)) + 1, -1)
    return ResourceUse(operation, resource, role, np.concatenate([capacity, of_hosts, of_gpus]))


def coarse_classes(operations: Operations, resource_use: ResourceUse) -> Classes | None:
    """The coarsest stable partition of colour refinement; None if it takes too long or there is little symmetry."""
    refinement = _Refinement(operations, resource_use)
    classes = Classes(numbered(operations.label)[1], numbered(resource_use.label)[1])
    for _ in range(max(8, _MAX_VISITS // max(len(operations.label), 1))):
        before = classes
        # What operations use shows most asymmetry, such as GPUs with unequal calls, and there are more edges to visit.
        for split in (refinement.by_resources, refinement.by_edges):
            of_operation, of_resource = split(classes)
            if 2 * len(distinct(of_operation.view(np.int64))) > len(
                operations.label
            ):  # too little symmetry to be of use
                return None
            classes = Classes(numbered(of_operation)[1], of_resource)
        if _count(classes) == _count(before):
            return classes
    return None


def _count(classes: Classes) -> int:
    return sum(int(numbers.max(initial=-1)) + 1 for numbers in classes)


class _Refinement:
    """Splits classes whose members have different neighbours.

    A neighbourhood is hashed as the sum of random numbers, one per class of neighbours (and role): sums do not depend
    on the order of neighbours, and different neighbourhoods have different sums but for a chance of 2**-64.
    """

    def __init__(self, operations: Operations, resource_use: ResourceUse) -> None:
        self._edges, self._edge_kind, self._use = operations.edges, _edge_kind(operations), resource_use
        self._random = np.random.default_rng(0)

    def by_resources(self, classes: Classes) -> tuple[Hashes, IntArray]:
        """Split resources by their users, then operations by the resources that they use; hashes, and classes."""
        use, (operations, resources) = self._use, classes
        of_resources = self._drawn(resources)
        np.add.at(of_resources, use.resource, self._in_roles(operations)[operations[use.operation], use.role])
        split = numbered(of_resources)[1]
        of_operations = self._drawn(operations)
        np.add.at(of_operations, use.operation, self._in_roles(split)[split[use.resource], use.role])
        return of_operations, split

    def by_edges(self, classes: Classes) -> tuple[Hashes, IntArray]:
        """Split operations by those that they wait for; hashes, and the classes of resources as they were."""
        edges, kind = self._edges, self._edge_kind
        of_operations = self._drawn(classes.of_operation)
        for number in np.flatnonzero(np.bincount(kind)).tolist():
            chosen = np.flatnonzero(kind == number)
            np.add.at(of_operations, edges.after[chosen], self._drawn(classes.of_operation)[edges.before[chosen]])
        return of_operations, classes.of_resource

    def _drawn(self, classes: IntArray) -> Hashes:
        """A random number for each class, by member."""
        numbers: Hashes = self._random.integers(0, 2**64, size=int(classes.max(initial=0)) + 1, dtype=np.uint64)
        return numbers[classes]

    def _in_roles(self, classes: IntArray) -> Hashes:
        """Random numbers (classes, roles)."""
        size = int(classes.max(initial=0)) + 1, self._use.roles
        return self._random.integers(0, 2**64, size=size, dtype=np.uint64)


def _edge_kind(operations: Operations) -> IntArray:
    return (operations.delay * 2 + operations.edges.event) * (HOST + 1) + operations.edges.cause


def is_equitable(operations: Operations, resource_use: ResourceUse, classes: Classes) -> bool:
    """Whether the partition satisfies the premises of the theorem. Exact."""
    of_operation, of_resource = classes
    edges = operations.edges
    kinds, roles = int(of_operation.max(initial=0)) + 1, resource_use.roles
    used = of_resource[resource_use.resource] * roles + resource_use.role
    users = of_operation[resource_use.operation] * roles + resource_use.role
    return (
        _is_constant(operations.label, of_operation)
        and _is_constant(resource_use.label, of_resource)
        and _is_regular(edges.after, _edge_kind(operations) * kinds + of_operation[edges.before], of_operation)
        and _is_regular(resource_use.operation, used, of_operation)
        and _is_regular(resource_use.resource, users, of_resource)
    )


def _is_constant(label: IntArray, classes: IntArray) -> bool:
    """Whether all members of each class have the same label."""
    return bool((label == label[firsts_of(classes)][classes]).all())


def _is_regular(member: IntArray, neighbour: IntArray, classes: IntArray) -> bool:
    """Whether all members of each class have equally many neighbours of each kind; pairs (member, neighbour)."""
    width = int(neighbour.max(initial=0)) + 1
    pairs, counts = np.unique(member.astype(np.int64) * width + neighbour, return_counts=True)
    of_member = np.bincount(pairs // width, minlength=len(classes))
    alike = firsts_of(classes)[classes]
    if (of_member != of_member[alike]).any():
        return False
    # Pairs are in the order of members, then of neighbours: each is compared with that of the first of its class.
    begin, of_pair = np.cumsum(of_member) - of_member, pairs // width
    other = np.arange(len(pairs)) + (begin[alike] - begin)[of_pair]
    same: BoolArray = (pairs % width == pairs[other] % width) & (counts == counts[other])
    return bool(same.all())
