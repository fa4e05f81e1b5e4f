"""Messages that do not run beside kernel calls: those of a runtime without priority of messages over kernels.

Where a rank sends on a block that it also computes with, both are ready at once. A kernel that fills all SMs goes
first, at either end, and the message waits until the calls of the step have ended.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tasp_lab.runtimes.runtime import Runtime
from tasp_lab.schedule.dependencies import ARRIVED, BLOCK, Dependencies, Edges
from tasp_lab.schedule.schedule import Schedule


def with_runtime(schedule: Schedule, derived: Dependencies, runtime: Runtime) -> Dependencies:
    """The dependencies of a schedule with those that a runtime adds."""
    if runtime.overlaps or not len(derived.calls.step):
        return derived
    moved, calls = derived.transfers, derived.calls
    steps, blocks = len(schedule.steps), len(schedule.blocks)
    reader = calls.reads.owner
    read = (calls.rank[reader] * steps + calls.step[reader]) * blocks + calls.reads.block
    sent = (moved.source * steps + moved.step) * blocks + moved.block
    held = np.flatnonzero(np.isin(sent, read))
    cell = calls.rank * steps + calls.step
    order = np.argsort(cell, kind="stable")
    edges = [derived.edges]
    for end in (moved.source, moved.destination):
        wanted = end[held] * steps + moved.step[held]
        first, last = (np.searchsorted(cell[order], wanted, side=side) for side in ("left", "right"))
        after = np.repeat(held, last - first)
        place = np.arange(len(after)) - np.repeat(np.cumsum(last - first) - (last - first), last - first)
        before = order[np.repeat(first, last - first) + place] + derived.first_call
        edges.append(Edges.of(before, after, ARRIVED, BLOCK))
    return replace(derived, edges=Edges.joined(edges))
