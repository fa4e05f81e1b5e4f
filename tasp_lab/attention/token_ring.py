"""TokenRing (arXiv:2412.20501): queries circulate, keys are stationary, results return straight to their owners.

Queries move one hop per step from rank r to rank r - 1, on lane 0. A step after their calls, their results (backward:
the gradients of queries) are given to their owner on lane 1, so the last ones travel alone, at the end. This needs
links between all ranks. Shards are contiguous, with a causal mask zigzag: ranks below r do not see the front half of
its shard, which stops at rank 0, and results leave only where there are some, so 3/4 of the bytes are sent. Backward,
which the published code lacks, the gradients of keys add up at their owner.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np

from tasp_lab.arrays import IntArray
from tasp_lab.attention.backward import Passes
from tasp_lab.attention.circulation import Circulation, cut_blocks
from tasp_lab.attention.span_blocks import owner_schedule, wire_dtype
from tasp_lab.attention.task import QUERIES, QUERY_GRADIENTS, RESULTS
from tasp_lab.choices import DEFAULT_BUFFERS
from tasp_lab.schedule.blocks import Pool
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedule.step import LazySteps, Step
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.sequence_layout import contiguous, zigzag


def token_ring_passes(
    topology: Topology, workload: Workload, *, gradient_dtype: str = "fp32", buffers: int = DEFAULT_BUFFERS
) -> Passes:
    """Both passes; `gradient_dtype` on the wire is ``fp32``, or ``input`` for that of the layer."""
    forward = token_ring(topology, workload, buffers=buffers)
    return Passes(forward, _pass(topology, workload, gradient_dtype, buffers, True))


def token_ring(
    topology: Topology, workload: Workload, *, result_dtype: str = "fp32", buffers: int = DEFAULT_BUFFERS
) -> Schedule:
    """The forward pass; `result_dtype` on the wire is ``fp32``, or ``input`` for that of the layer."""
    return _pass(topology, workload, result_dtype, buffers, False)


def _pass(topology: Topology, workload: Workload, dtype: str, buffers: int, backward: bool) -> Schedule:
    n, wire = topology.world_size, wire_dtype(workload, dtype)
    layout = (contiguous if workload.mask == "full" else zigzag)(workload.sequence, n, workload.documents)
    task, ring_of = cut_blocks(workload, layout, [Fraction(1)], "queries", wire if backward else None)
    task = task if backward else replace(task, result_dtype=wire)
    steps = TokenRingSteps(Circulation(task, np.arange(n)[None, ::-1], ring_of, "queries"))
    pools = dict.fromkeys((QUERIES, RESULTS, QUERY_GRADIENTS), Pool("queries", buffers))
    return owner_schedule(f"token-ring{'-backward' * backward}", topology, task, steps, lanes=2, circulating=pools)


class TokenRingSteps(LazySteps):
    """At step s query blocks are s hops from their owners; each stops after the last rank whose keys it sees."""

    def __init__(self, circulation: Circulation) -> None:
        self.ring = circulation

    def __len__(self) -> int:
        last = int(self.ring.last.max())
        return last + 2 if last else 1

    def step(self, index: int) -> Step:
        ring, moving, done = self.ring, np.flatnonzero(self.ring.last > index), self._guests(index - 1)
        moving = moving[ring.order(moving, ring.at(index + 1, moving))]
        source = np.concatenate([ring.at(index, moving), ring.at(index - 1, done)])
        destination = np.concatenate([ring.at(index + 1, moving), ring.at(0, done)])
        gives = np.repeat([False, True], [len(moving), len(done)])
        block = np.concatenate([ring.blocks[moving], ring.task.output_of[ring.blocks[done]]])
        calls = ring.calls_at(index, np.flatnonzero(ring.last >= index))
        return Step(source, destination, gives.astype(np.int64), block, gives, calls)

    def _guests(self, hop: int) -> IntArray:
        """The query blocks, indexed from 0, that see keys of another rank at this hop."""
        calls = self.ring.calls_at(hop, np.flatnonzero(self.ring.last >= hop)) if hop > 0 else ()
        called = np.concatenate([self.ring.blocks[:0], *(each.operands[0].block for each in calls)])
        return np.searchsorted(self.ring.blocks, np.unique(called))
