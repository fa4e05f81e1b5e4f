"""BurstAttention (arXiv:2403.09347): keys circulate forward; backward the queries do, with all that gradients need.

The forward pass is a ring of keys and values. In the backward pass keys, values and their gradients are stationary;
queries, the gradient of their output, its log-sum-exp and the row sums of both circulate, and the gradients of queries
follow a step behind. That is the dataflow ``rotate-q`` of `tasp_lab.schedules.attention.backward`. With as many KV
heads as heads it sends fewer bytes than circulating keys and their gradients do, with fewer KV heads more.

The published code adds up the gradients of queries from their owner on, so they make a hop more; here the owner's part
stays. Shards are contiguous, under a causal mask zigzag.
"""

from __future__ import annotations

from dataclasses import replace

from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.backward import circulation_schedules
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.registry import balanced_ring, schedule
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload


@schedule(
    "burst",
    "softmax",
    follows="ranks",
    moves="keys and values around one ring; backward `rotate-q` (BurstAttention)",
    options=("trim", "buffers", "gradient_dtype"),
)
def burst(name: str, topology: Topology, workload: Workload, options: AttentionOptions) -> tuple[Schedule, ...]:
    """The passes of ``burst``."""
    ring = balanced_ring(workload)
    flow = options if options.passes == "forward" else replace(options, dataflow="rotate-q")
    return tuple(schedule.renamed(name) for schedule in circulation_schedules(ring, topology, workload, flow))
