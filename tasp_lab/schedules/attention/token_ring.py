"""TokenRing (arXiv:2412.20501): queries circulate, keys are stationary, results return straight to their owners.

Queries move one hop per step. A step after their calls, their results (backward: the gradients of queries) are given to
their owner, so the last ones travel after all calls. This needs links between all ranks. A query block stops at the
last rank whose keys it sees, and results leave only where there are some. Backward, which the published code lacks, the
gradients of keys add up at their owner. Results and gradients are sent once and joined in float32.

- ``token-ring``, ``zigzag-token-ring``: one ring, from rank r to r - 1, on lane 0. Under a causal mask that is 3/4 of
  the bytes with zigzag shards, because ranks below r do not see the front half of its shard, and 1/2 with contiguous
  ones, which do not balance the work.
- ``token-multi-ring``: queries are cut over the rings of a decomposition.

**The tail.** On a full mesh, one ring and equal links, the links from r to r - 1 carry n - 1 query blocks and at last
the results of the last hop, n - 1 away from their owner: n blocks if both are equally large, and cutting the last
block in chunks alone does not change that. With `tail_chunks` of 2 or more, queries therefore reach the rank of the
last hop straight from their owner, over a link that otherwise carries only the results of the first hop. The busiest
links then carry n - 1 blocks, and the time is that, if there are more buffers than chunks. Where calls take longer than
transfers, only the last of the chunks is exposed after n calls: 1/c of a block. Nothing is cut unless asked for, as
published: every chunk is a message of its own at each hop. Rings that load all links at all times have no such tail.

A lane per distance from r to r + d (modulo n) carries queries, and another one results: the transfers of a lane of a
rank have one destination.

**Links of ``token-multi-ring``.** Let n - 1 rings use every link of a full mesh once. A query block makes n - 1 hops
on its ring, and results go from each rank of a ring to each other one, at the hop that is their distance. So over all
hops a link carries n - 1 query blocks and n - 1 result blocks, for any such rings: the queries and the results of one
rank, where one ring of ``ring-attention`` carries n - 1 times its keys and values. With queries as large as results and
as keys and values each, that is n - 1 times as fast if links are always busy: while queries move alone, at the start,
they have whole links, and so have results at the end, so no tail is exposed. Links are always busy if each hop loads
all of them equally. So on a full mesh of equal links, rings that load all links equally over all hops are replaced by
those of `tasp_lab.rings.closed_forms`, which do so at each hop.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np

from tasp_lab.core.arrays import IntArray
from tasp_lab.rings.closed_forms import balanced_rings
from tasp_lab.rings.rings import Decomposition
from tasp_lab.schedule.blocks import Pool
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.circulation import Circulation, cut_blocks
from tasp_lab.schedules.attention.forward import check_size
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.attention.task import QUERIES, QUERY_GRADIENTS, RESULTS
from tasp_lab.schedules.attention.travel import (
    NO_GIFTS,
    PeerLanes,
    Route,
    Travel,
    TravelSteps,
    around,
    straight_home,
    travel_schedule,
)
from tasp_lab.schedules.build import attention_layout
from tasp_lab.schedules.collectives.all_gather import rings_for
from tasp_lab.schedules.registry import schedule
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload

STRAIGHT_HOME = ("buffers", "gradient_dtype", "result_dtype")
"""The options of schedules whose results return straight to their owners."""

MAX_BALANCED_RINGS = 128
"""More rings cut queries into too many small messages: on 32 ranks it would be 496 instead of 31."""


@schedule(
    "token-ring",
    "softmax",
    follows="ranks",
    moves="queries around one ring, results straight to their owners (TokenRing)",
    layout="contiguous",
    options=(*STRAIGHT_HOME, "tail_chunks"),
)
@schedule(
    "zigzag-token-ring",
    "softmax",
    follows="ranks",
    moves="the same",
    layout="zigzag",
    options=(*STRAIGHT_HOME, "tail_chunks"),
)
def token_ring(name: str, topology: Topology, workload: Workload, options: AttentionOptions) -> tuple[Schedule, ...]:
    """The passes of ``token-ring`` or ``zigzag-token-ring``.

    Raises `ScheduleError` if there are too many blocks to verify.
    """
    chunks = options.tail_chunks
    downward = np.arange(topology.world_size)[::-1]
    return _passes(name, topology, workload, options, np.tile(downward, (chunks, 1)), (Fraction(1, chunks),) * chunks)


@schedule(
    "token-multi-ring",
    "softmax",
    follows="structure",
    moves="queries around all rings at once, results straight to their owners",
    options=STRAIGHT_HOME,
    uses_rings=True,
)
def token_multi_ring(
    name: str,
    topology: Topology,
    workload: Workload,
    options: AttentionOptions,
    *,
    decomposition: Decomposition | None = None,
) -> tuple[Schedule, ...]:
    """The passes of ``token-multi-ring``.

    Raises `ScheduleError` for rings of another world size and for too many blocks to verify.
    """
    return _passes(name, topology, workload, options, *query_rings(name, topology, decomposition))


def query_rings(
    name: str, topology: Topology, decomposition: Decomposition | None
) -> tuple[IntArray, tuple[Fraction, ...]]:
    """The rings of ``token-multi-ring``, an int array (rings, world_size), and the share of queries on each.

    Raises `ScheduleError` for rings of another world size.
    """
    n = topology.world_size
    if n == 1:
        return np.zeros((1, 1), dtype=np.int64), (Fraction(1),)
    found = rings_for(name, topology, decomposition)
    if _is_mesh_of_equal_links(topology) and found.rate_bytes_per_s == found.bound_bytes_per_s:
        balanced = balanced_rings(n)
        if balanced is not None and len(balanced) <= MAX_BALANCED_RINGS:
            return balanced, (Fraction(1, len(balanced)),) * len(balanced)
    return found.rings.astype(np.int64), found.shares


def _is_mesh_of_equal_links(topology: Topology) -> bool:
    """Whether each pair of ranks has a link of its own, and all links have the same bandwidth."""
    n = topology.world_size
    own = len(topology.vertices) == n and len(topology.links) == n * (n - 1) and not topology.shared
    return own and len(set(topology.link_bandwidths_bytes_per_s.tolist())) == 1


def _passes(
    name: str,
    topology: Topology,
    workload: Workload,
    options: AttentionOptions,
    rings: IntArray,
    shares: tuple[Fraction, ...],
) -> tuple[Schedule, ...]:
    """The passes in which these shares of queries circulate around these rings."""
    layout = attention_layout(name, workload, topology.world_size)
    check_size(name, topology, layout, len(shares))
    results = dict.fromkeys((RESULTS, QUERY_GRADIENTS), Pool("results", options.buffers))
    pools = {QUERIES: Pool("queries", options.buffers), **results}

    def one_pass(backward: bool) -> Schedule:
        wire = options.wire_dtype(workload.dtype, backward=backward, sums=False)
        task, ring_of = cut_blocks(workload, layout, shares, "queries", wire if backward else None)
        task = replace(task, home_dtype="fp32", result_dtype=task.result_dtype if backward else wire)
        circulation = Circulation(task, rings, ring_of, "queries")
        travels = [straight_home_travel(circulation)] if options.tail_chunks == 1 else _in_chunks(circulation)
        return travel_schedule(name, topology, TravelSteps(*travels), pools)

    return options.build(one_pass)


def straight_home_travel(circulation: Circulation) -> Travel:
    """Around rings, up to the last rank that needs a block; what it yields goes straight home a step after its calls.

    A lane per distance to a next rank, and one per distance to an owner.
    """
    route = around(circulation.world_size)
    return _straight_home(circulation, route.via, route.arrival)


def _in_chunks(circulation: Circulation) -> list[Travel]:
    """Around the same ring for each chunk, but for its last rank; there chunks come one by one from their owners."""
    n, chunks = circulation.world_size, len(circulation.rings)
    hop, before = np.arange(n), np.maximum(np.arange(n) - 1, 0)
    last = np.where(hop == n - 1, 0, -1 * (hop > 0))
    arrival = max(n - 3, 0) + np.arange(chunks)
    return [
        _straight_home(circulation, np.where(last, before, -1 * (hop > 0))[None], before[None]),
        _straight_home(circulation, np.tile(last, (chunks, 1)), np.tile(arrival, (n, 1)).T, own_lane=True),
    ]


def _straight_home(circulation: Circulation, via: IntArray, arrival: IntArray, *, own_lane: bool = False) -> Travel:
    rings, n = circulation.rings, circulation.world_size
    distances, distance = np.unique((np.roll(rings, -1, axis=1) - rings) % n), np.arange(n)
    lanes, sends = len(distances) + n - 1, np.searchsorted(distances, distance)
    if own_lane:
        lanes, sends = lanes + 1, np.full(n, lanes)
    has_sums = bool((circulation.gradients >= 0).all())
    peers = PeerLanes.by_distance(lanes, sends, len(distances) - 1 + distance)
    route = Route(via, arrival, straight_home(arrival) if has_sums else NO_GIFTS)
    return Travel(circulation, route, peers, circulation.ring_of if len(via) > 1 else None)
