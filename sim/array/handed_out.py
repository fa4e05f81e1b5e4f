"""Calls whose thread blocks others wait for: an operation each, from the begin of the call until no block waits."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sim.array.call_costs import call_costs
from sim.array.operations import CostTable, Edges
from tasp_lab.core.arrays import IntArray
from tasp_lab.machines.machine import Machine
from tasp_lab.schedule.dependencies import ARRIVED, HANDED_OUT
from tasp_lab.schedule.messages import MessageDependencies


class HandedOut(NamedTuple):
    """The operations, int arrays: the `call` of each, its `rank`, and its `cost`; they are numbered from `first` on."""

    first: int
    call: IntArray
    rank: IntArray
    cost: IntArray

    @classmethod
    def of(cls, machine: Machine, derived: MessageDependencies, first: int, table: CostTable) -> HandedOut:
        """Those of the calls that an edge waits for."""
        operation = np.unique(derived.edges.before[derived.edges.event == HANDED_OUT])
        call, calls = operation - derived.first_call, derived.calls
        cost = call_costs(machine, machine.compute.handed_out_s, calls, call, table)
        return cls(first, operation, calls.rank[call], cost)

    def edges(self, edges: Edges) -> Edges:
        """The edges of a schedule: each operation waits for what its call waits for, and is waited for in its place."""
        number = np.full(self.first, -1)
        number[self.call] = self.first + np.arange(len(self.call))
        waits = edges.event == HANDED_OUT
        before, event = np.where(waits, number[edges.before], edges.before), np.where(waits, ARRIVED, edges.event)
        begins = Edges(*(column[number[edges.after] >= 0] for column in edges))
        return Edges.joined([edges._replace(before=before, event=event), begins._replace(after=number[begins.after])])
