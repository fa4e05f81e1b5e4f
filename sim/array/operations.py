"""A schedule as operations: their dependencies and shared constraints, as arrays.

An *operation* is a message (a transfer of one or several blocks), a kernel call, or the freeing of a buffer. It starts
when all its incoming *edges* are satisfied. An edge waits until another operation has SENT its last byte, or until that
byte has ARRIVED; for calls and buffers both coincide. The operation then launches, moves its bytes over the constraints
that it passes, and arrives one latency after the last byte was sent. With serial launches it also passes its rank's
host.

The operations form one *repeat*; there may be many repeats, and an edge then leads to an operation `delay` repeats
later. A general schedule is a single repeat; a ring schedule has one repeat per step, with one operation per hop
(`sim.array.from_schedule`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from sim.messages import LibraryMessages
from tasp_lab.core.arrays import FloatArray, IntArray, numbered
from tasp_lab.machines.contention import NONE, Contention
from tasp_lab.machines.libraries.library import Message
from tasp_lab.machines.machine import Machine
from tasp_lab.schedule.dependencies import Edges
from tasp_lab.topology.graph import Topology

TRANSFER, CALL, FREED = 0, 1, 2
"""Kinds of operations."""


class Cost(NamedTuple):
    """The cost of an operation: `launch_s`, then `wire_bytes`, then `latency_s`; calls and buffers have no bytes.

    A message has `channels` at both ends from its launch until it has arrived.
    """

    launch_s: float
    wire_bytes: float
    latency_s: float
    max_bytes_per_s: float | None
    rule: str
    channels: float = 0.0

    @classmethod
    def of(cls, message: Message, route_latency_s: float) -> Cost:
        most = message.max_bytes_per_s
        latency_s = route_latency_s + float(message.latency_s)
        wire_bytes, max_bytes_per_s = float(message.wire_bytes), None if most is None else float(most)
        channels = float(message.channels)
        return cls(float(message.launch_s), wire_bytes, latency_s, max_bytes_per_s, message.rule, channels)


SENDS, RECEIVES, COMPUTES = 1, 2, 3
"""What an operation does on a GPU."""


class GpuUses(NamedTuple):
    """Int arrays (uses,): what an operation does (`role`) on which GPU. Only what affects a time is listed."""

    operation: IntArray
    gpu: IntArray
    role: IntArray

    @classmethod
    def none(cls) -> GpuUses:
        return cls(*(np.zeros(0, dtype=np.int64) for _ in range(3)))


@dataclass(frozen=True, eq=False)
class Operations:
    """The operations of one repeat.

    Attributes
    ----------
    repeats : the number of repeats.
    costs : the distinct costs.
    cost : int array (variants, operations), the index in `costs` of each; see `variant`.
    label : int array (operations,); operations with different labels are in different classes.
    edges : what waits for what, and `delay`, an int array (edges,): for an operation so many repeats earlier.
    constraints : int array (constraints,), the constraints of the topology that any operation passes, in order.
    capacity_bytes_per_s : float array (constraints,), their capacities.
    passing, passed : int arrays (passes,): operation `passing` passes constraint `passed` of these.
    host : int array (operations,), the host that launches each, or -1.
    lane : int array (operations,), the order in which a host launches simultaneous requests.
    gpu_uses : the GPUs on which calls compete with messages, and `contention` by how much; none without contention.
    """

    repeats: int
    kind: IntArray
    costs: Sequence[Cost]
    cost: IntArray
    label: IntArray
    edges: Edges
    delay: IntArray
    constraints: IntArray
    capacity_bytes_per_s: FloatArray
    passing: IntArray
    passed: IntArray
    host: IntArray
    lane: IntArray
    gpu_uses: GpuUses = field(default_factory=GpuUses.none)
    contention: Contention = NONE

    def without_edges(self) -> Operations:
        """The operations alone, in less memory."""
        none = np.zeros(0, dtype=np.int64)
        return replace(self, edges=Edges(none, none, none, none), delay=none)

    def variant(self, repeat: int) -> int:
        """The row of `cost` of a repeat: row 0 for the first, the other rows in turn for the rest."""
        return repeat if repeat < len(self.cost) else (repeat - 1) % (len(self.cost) - 1) + 1


@dataclass(eq=False)
class CostTable:
    """Numbers costs in the order of first use."""

    topology: Topology
    messages: LibraryMessages
    costs: dict[Cost, int] = field(default_factory=dict)

    def number(self, cost: Cost) -> int:
        return self.costs.setdefault(cost, len(self.costs))

    def of_pairs(self, messages: Sequence[Message], kind: IntArray, latencies_s: FloatArray) -> IntArray:
        """The costs of messages of these kinds over routes with these latencies."""
        firsts, number = numbered(kind, latencies_s)
        pairs = zip(kind[firsts].tolist(), latencies_s[firsts].tolist(), strict=True)
        costs = [self.number(Cost.of(messages[which], latency_s)) for which, latency_s in pairs]
        return np.array(costs, dtype=np.int64)[number]


class Incidence(NamedTuple):
    """The constraints of `Operations`, and which operation passes which."""

    constraints: IntArray
    capacity_bytes_per_s: FloatArray
    passing: IntArray
    passed: IntArray

    @classmethod
    def of(cls, topology: Topology, routes: IntArray) -> Incidence:
        """The passes of operations with these routes, an int array (operations, constraints) padded with -1."""
        passing, column = np.nonzero(routes >= 0)
        passed = routes[passing, column].astype(np.int64)
        constraints, place = np.unique(passed, return_inverse=True)
        return cls(constraints, capacities_of(topology, constraints), passing, place)

    def that_can_saturate(self, max_bytes_per_s: FloatArray) -> Incidence:
        """The passes of those constraints that can saturate.

        `max_bytes_per_s`, a float array (operations,), is the rate limit of each operation, infinite for none; an
        operation moves one message at a time. A constraint whose capacity exceeds the sum of the limits of its
        operations never saturates, so it is never a bottleneck, and rates are the same without it.
        """
        load = np.bincount(self.passed, max_bytes_per_s[self.passing], minlength=len(self.constraints))
        kept = load >= self.capacity_bytes_per_s
        used = kept[self.passed]
        place = np.cumsum(kept) - 1
        return Incidence(
            self.constraints[kept],
            self.capacity_bytes_per_s[kept],
            self.passing[used],
            place[self.passed[used]],
        )


def capacities_of(topology: Topology, constraints: IntArray) -> FloatArray:
    """The capacities of constraints, by their numbers in ascending order, in bytes/s."""
    links = np.searchsorted(constraints, len(topology.links))
    shared = np.array([float(each.bandwidth_bytes_per_s) for each in topology.shared])
    of_links = topology.link_bandwidths_bytes_per_s[constraints[:links]]
    return np.concatenate([of_links, shared[constraints[links:] - len(topology.links)]])


def hosts(machine: Machine, costs: Sequence[Cost], transfers: IntArray, rank: IntArray) -> IntArray:
    """The host of each operation: its rank if launches are serial and take time, else -1."""
    serial = machine.comm_library.serial_launch and any(
        costs[each].launch_s for each in set(transfers.ravel().tolist())
    )
    return rank if serial else np.full_like(rank, -1)
