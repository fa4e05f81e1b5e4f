"""The costs of kernel calls: their times, by shape and by the speed of their rank."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sim.array.operations import Cost, CostTable
from tasp_lab.core.arrays import IntArray
from tasp_lab.core.units import Number
from tasp_lab.machines.machine import Machine
from tasp_lab.schedule.dependencies import CallTable
from tasp_lab.workload.kernel_shapes import KernelShape


def call_costs(
    machine: Machine, time_s: Callable[[KernelShape], Number], calls: CallTable, chosen: IntArray, table: CostTable
) -> IntArray:
    """The costs of some calls, by their numbers in `calls`; `time_s` is that of a shape at the speed of `compute`."""
    n = machine.topology.world_size if machine.rank_speeds else 1
    pairs, pair = np.unique(calls.shape[chosen] * n + calls.rank[chosen] % n, return_inverse=True)
    seconds = [float(machine.call_s(time_s(calls.shapes[each // n]), each % n)) for each in pairs.tolist()]
    costs = np.array([table.number(Cost(each, 0.0, 0.0, None, "")) for each in seconds], dtype=np.int64)
    found: IntArray = costs[pair]
    return found
