"""A schedule as operations: what has to happen before what, and what is shared meanwhile. All as arrays.

An *operation* is a transfer, a kernel call, or the moment at which a room is free. It begins when all *edges* that lead
to it are done, each of which waits until another operation has SENT its last byte or until that has ARRIVED; a call
and a room have done both at once. Then it takes its launch, moves its bytes over the constraints that it passes, and
arrives one latency after the last of them. With serial launches it passes its rank's host, too.

These are the operations of one *repeat*; there may be many, and an edge then leads to an operation `delay` repeats
later. Schedules in general are one repeat of everything (`sim.array_steps`); blocks that travel around rings are one
repeat per step, of one operation per hop (`sim.array_rings`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from sim.messages import Messages
from sim.numbering import numbered
from tasp_lab.arrays import FloatArray, IntArray
from tasp_lab.machine import Machine
from tasp_lab.topology import Topology
from tasp_lab.transport import Message

SENT, ARRIVED = 0, 1
"""What an edge waits for."""

LANE, BLOCK, ROOM = 0, 1, 2
"""Why an edge waits: for the operation before it, for a block, for a room."""

TRANSFER, CALL, FREED = 0, 1, 2
"""Kinds of operations."""


class Cost(NamedTuple):
    """What an operation takes: `launch_s` first, then `wire_bytes`, then `latency_s`; a call or a room has no bytes."""

    launch_s: float
    wire_bytes: float
    latency_s: float
    most_bytes_per_s: float | None
    rule: str

    @classmethod
    def of(cls, message: Message, route_latency_s: float) -> Cost:
        most = message.most_bytes_per_s
        latency_s = route_latency_s + float(message.latency_s)
        wire_bytes, most_bytes_per_s = float(message.wire_bytes), None if most is None else float(most)
        return cls(float(message.launch_s), wire_bytes, latency_s, most_bytes_per_s, message.rule)


class Edges(NamedTuple):
    """Int arrays (edges,): operation `after` waits for `event` of operation `before`, `delay` repeats earlier."""

    before: IntArray
    after: IntArray
    event: IntArray
    cause: IntArray
    delay: IntArray

    @classmethod
    def of(cls, before: IntArray, after: IntArray, event: int, cause: int, delay: int = 0) -> Edges:
        shape = len(before)
        return cls(before, after, *(np.full(shape, value) for value in (event, cause, delay)))

    @classmethod
    def joined(cls, parts: Sequence[Edges]) -> Edges:
        return cls(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


@dataclass(frozen=True, eq=False)
class Operations:
    """The operations of one repeat.

    Attributes
    ----------
    repeats : how often they are repeated.
    costs : all different costs.
    cost : int array (variants, operations), the index in `costs` of each; see `variant`.
    label : int array (operations,); operations with different labels are never alike.
    constraints : int array (constraints,), the constraints of the topology that are passed at all, in order.
    capacity_bytes_per_s : float array (constraints,), their capacities.
    passing, passed : int arrays (passes,): operation `passing` passes constraint `passed` of these.
    host : int array (operations,), the host that launches each, or -1.
    lane : int array (operations,), the order in which a host launches what asks at one instant.
    """

    repeats: int
    kind: IntArray
    costs: Sequence[Cost]
    cost: IntArray
    label: IntArray
    edges: Edges
    constraints: IntArray
    capacity_bytes_per_s: FloatArray
    passing: IntArray
    passed: IntArray
    host: IntArray
    lane: IntArray

    def variant(self, repeat: int) -> int:
        """Which row of `cost` a repeat has: the first its own, the others in turn."""
        return repeat if repeat < len(self.cost) else (repeat - 1) % (len(self.cost) - 1) + 1


@dataclass(eq=False)
class CostTable:
    """Numbers costs in the order in which they are met."""

    topology: Topology
    messages: Messages
    costs: dict[Cost, int] = field(default_factory=dict)

    def number(self, cost: Cost) -> int:
        return self.costs.setdefault(cost, len(self.costs))

    def of_pairs(self, messages: Sequence[Message], kind: IntArray, latencies_s: FloatArray) -> IntArray:
        """The costs of transfers of these kinds over routes with these latencies."""
        firsts, number = numbered(kind, latencies_s)
        pairs = zip(kind[firsts].tolist(), latencies_s[firsts].tolist(), strict=True)
        costs = [self.number(Cost.of(messages[which], latency_s)) for which, latency_s in pairs]
        return np.array(costs, dtype=np.int64)[number]


class Passes(NamedTuple):
    """What `Operations` says of constraints."""

    constraints: IntArray
    capacity_bytes_per_s: FloatArray
    passing: IntArray
    passed: IntArray

    @classmethod
    def of(cls, topology: Topology, routes: IntArray) -> Passes:
        """The passes of operations with these routes, an int array (operations, constraints) padded with -1."""
        passing, column = np.nonzero(routes >= 0)
        passed = routes[passing, column].astype(np.int64)
        shared = np.array([float(each.bandwidth_bytes_per_s) for each in topology.shared])
        capacity = np.concatenate([topology.link_bandwidths_bytes_per_s, shared])
        constraints = np.flatnonzero(np.bincount(passed, minlength=len(capacity)))
        place = np.zeros(len(capacity), dtype=np.int64)
        place[constraints] = np.arange(len(constraints))
        return cls(constraints, capacity[constraints], passing, place[passed])

    def that_may_bind(self, most_bytes_per_s: FloatArray) -> Passes:
        """The passes of those constraints that can ever be full.

        `most_bytes_per_s`, a float array (operations,), has the own limit of each operation, infinite for none; no
        operation moves more than one message at a time. A constraint whose operations stay below its capacity with all
        their limits together is never full, so it is no bottleneck, and rates are the same without it.
        """
        load = np.bincount(self.passed, most_bytes_per_s[self.passing], minlength=len(self.constraints))
        kept = load >= self.capacity_bytes_per_s
        stays = kept[self.passed]
        place = np.cumsum(kept) - 1
        return Passes(
            self.constraints[kept], self.capacity_bytes_per_s[kept], self.passing[stays], place[self.passed[stays]]
        )


def hosts(machine: Machine, costs: Sequence[Cost], transfers: IntArray, rank: IntArray) -> IntArray:
    """The host of each operation with a rank: its rank where launches are serial and take time, else -1."""
    serial = machine.transport.serial_launch and any(costs[each].launch_s for each in set(transfers.ravel().tolist()))
    return rank if serial else np.full_like(rank, -1)
