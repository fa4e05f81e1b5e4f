"""Keys circulate for some pairs of ranks, queries for the others: ``kv-and-q-rings``.

For the queries of rank a and the keys of rank b, either the keys travel to a, or the queries travel to b and what they
yield (backward: their gradients) goes to a; gradients of keys that travelled go to b. There are three splits: keys
travel everywhere, queries travel everywhere, or per pair of ranks the side with fewer bytes (keys if equal) does. The
option `travels` names one of them: ``keys``, ``queries`` or ``both``; with ``auto`` all are compared. All rings carry
whatever travels.

What goes home is given straight to its owner, a message per rank that used a block. Backward, one side everywhere may
also have its gradients follow along its rings and add up on the way: these are the dataflows of ``tasp``. The plan
whose busiest link carries least is taken, over both passes: ``rotate-kv-back`` begins where a forward pass that is not
trimmed has left the keys. So with the same options

- a forward pass alone has no busier link than those of ``tasp`` and ``token-multi-ring``,
- the busiest links of both passes together carry no more than those of either,
- a backward pass has no busier link than that of ``token-multi-ring`` or of ``tasp`` with ``rotate-kv`` or
  ``rotate-q``: ``rotate-kv-back`` takes more bytes forward, so it is taken only for less than these backward.

Without links between all ranks, ``auto`` and ``keys`` leave only the plans of ``tasp``: others would forward what goes
home, which takes longer than its bytes tell.

**The best split.** Let the mask between a and b leave rows of queries and columns of keys with something to see, and
let every such row see every such column (full masks, and zigzag shards under a causal mask, whose tiles between two
ranks are full or empty). Let K be the bytes of these keys and of their gradients, Q those of these queries and of what
they yield. A row whose queries do not travel needs all columns at a. So if less than all rows travel, all columns do:
no cut of the keys in a part that travels and a part that stays sends fewer bytes than min(K, Q), and the rule above
sends exactly that many if blocks go straight there. (A pair computed at a third rank moves both.) That gradients add up
on their way does not send fewer bytes: each rank that has used a block of another one gives its part, alone or in a
sum, at least once.

- *Full mask*: K and Q are the same for all pairs, so one side travels everywhere. With x KV heads per head, e bytes
  per element of the layer, r of a result, g of a gradient that is sent once, s of a sum on its way, d elements per
  head, in bytes per position, head and element: forward K = 2ex and Q = e + r + 4/d, so always the keys. Backward each
  rank sends (n - 1) (2e + 2g) x for keys or (n - 1) (2e + g + 8/d) for queries, with s for g if the gradients follow,
  as these make n - 1 hops; or (n - 2) 2ex + (n - 1) 2sx for keys on their way back, which save a hop. Where the busiest
  link is a rank's port, or rings load all links equally, the least of these is sent. If g = s, that is keys on their
  way back, or queries with about as many KV heads as heads; if s = 2g = 2e and n > 2, gradients go straight home.
- *Nodes*: a ring that leaves each node once carries n - 1 sums out of it. Out of m ranks, m (n - m) gradients go
  straight home, about m times as many on many nodes.
- *Causal mask, zigzag*: if a < b, the back half of a's queries sees all keys of b, and all queries of b see the front
  half of a's keys. Both sides travelling upward in rank send (K + Q)/2 for the two, keys alone 3K/2, queries alone
  3Q/2. So a mix is best if K/2 < Q < 2K, and sends 2/3 of the bytes at K = Q. Rings of many orders
  lose part of that: a block passes ranks that do not need it on its way.

**Rings of both sides against rings of one.** If A of A + B rings that load all links equally carried keys only, K/A per
ring, and B queries only, Q/B, the busier ones would carry at least (K + Q)/(A + B), the mean. Rings that carry both
sides carry exactly that, whatever K and Q are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray
from tasp_lab.core.choices import Travelling
from tasp_lab.core.errors import ScheduleError
from tasp_lab.rings.rings import Decomposition, loads_of_pairs
from tasp_lab.schedule.blocks import Pool
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.backward import Plan, circulation_plans
from tasp_lab.schedules.attention.circulation import Circulation, Side, cut_blocks, cut_spans
from tasp_lab.schedules.attention.forward import attention_schedule, check_size, circulation_of, forward_steps
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.attention.span_blocks import span_task
from tasp_lab.schedules.attention.task import KEY_GRADIENTS, KEYS, QUERIES, QUERY_GRADIENTS, RESULTS, AttentionTask
from tasp_lab.schedules.attention.token_ring import STRAIGHT_HOME, query_rings, straight_home_travel
from tasp_lab.schedules.attention.travel import RingLanes, TravelSteps, travel_schedule
from tasp_lab.schedules.build import attention_layout
from tasp_lab.schedules.collectives.all_gather import rings_for
from tasp_lab.schedules.registry import schedule
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload

Sides = tuple[Side, ...]
"""The sides that travel, keys first."""

KEYS_ONLY: Sides = ("keys",)
BOTH_SIDES: Sides = ("keys", "queries")


@schedule(
    "kv-and-q-rings",
    "softmax",
    moves="keys or queries around all rings at once, for each pair of ranks whichever is fewer bytes",
    options=(*STRAIGHT_HOME, "travels"),
    uses_rings=True,
)
def kv_and_q_rings(
    name: str,
    topology: Topology,
    workload: Workload,
    options: AttentionOptions,
    *,
    decomposition: Decomposition | None = None,
) -> tuple[Schedule, ...]:
    """The passes of ``kv-and-q-rings``.

    Raises `ScheduleError` for rings of another world size, for too many blocks to verify, and if queries are to travel
    without links between all ranks.
    """
    if options.travels in ("queries", "both") and not topology.reaches_all:
        raise ScheduleError(
            f"schedule {name!r}: travels {options.travels!r} without routes between all ranks of {topology.name}, on "
            "which what queries yield goes straight home; expected auto or keys"
        )
    rings = rings_for(name, topology, decomposition) if topology.world_size > 1 else None
    straight_home = partial(_straight_home, name, topology, workload, options, rings)

    @cache
    def busiest_s(steps: TravelSteps) -> float:
        return busiest_link_s(topology, map(steps.sends, range(len(steps))), steps.task.block_bytes)

    keys = forward_steps(circulation_of("tasp", topology, workload, rings), trim=True)
    forwards = straight_home(backward=False)
    if options.travels in ("auto", "keys") or not forwards:
        forwards.insert(0, keys)
    forward = min(forwards, key=busiest_s)
    if options.passes == "forward":
        return (_schedule(name, topology, forward, options.buffers),)
    plans = [Plan(forward, each) for each in straight_home(backward=True)]
    for along in circulation_plans("tasp", topology, workload, options, rings):
        if options.travels in ("auto", along.backward.travels[0].circulation.side):
            plans.append(along if along.starts_with_keys else Plan(forward, along.backward))
    plan = min(plans, key=lambda each: busiest_s(each.forward) + busiest_s(each.backward))
    return options.build(lambda backward: _schedule(name, topology, plan[backward], options.buffers))


def _schedule(name: str, topology: Topology, steps: TravelSteps, buffers: int) -> Schedule:
    if isinstance(steps.travels[0].lanes, RingLanes):
        return attention_schedule(name, topology, steps, buffers)
    pools = _pools(tuple(each.circulation.side for each in steps.travels), buffers)
    return travel_schedule(name, topology, steps, pools)


def _straight_home(
    name: str,
    topology: Topology,
    workload: Workload,
    options: AttentionOptions,
    rings: Decomposition | None,
    *,
    backward: bool,
) -> list[TravelSteps]:
    """The passes in which something goes straight home; none without links between all ranks."""
    layout = attention_layout(name, workload, topology.world_size)
    wire = options.wire_dtype(workload.dtype, backward=backward, sums=False)
    chosen = what_travels(span_task(workload, layout, wire, backward=backward))
    found = []
    straight = topology.is_complete or options.travels in ("queries", "both")
    for sides in _sides(chosen, options.travels, backward) if straight else ():
        paths, shares = _rings(name, topology, sides, rings)
        check_size(name, topology, layout, len(shares) * len(sides))
        gradients = wire if backward else None
        if len(sides) == 2:
            by_rank = [shares] * topology.world_size
            task, keys, queries = cut_spans(workload, layout, by_rank, by_rank, gradients)
            task = _on_the_wire(task, wire)
            circulations = [
                Circulation(task, paths, keys.ring, "keys", queries.span, chosen.keys),
                Circulation(task, paths, queries.ring, "queries", keys.span, chosen.queries),
            ]
        else:
            task, ring_of = cut_blocks(workload, layout, shares, sides[0], gradients)
            circulations = [Circulation(_on_the_wire(task, wire), paths, ring_of, sides[0])]
        found.append(TravelSteps(*map(straight_home_travel, circulations)))
    return found


def _on_the_wire(task: AttentionTask, dtype: str) -> AttentionTask:
    """The task with results in a dtype on the wire; sums are float32 at home."""
    return replace(task, home_dtype="fp32", result_dtype=task.result_dtype if task.is_backward else dtype)


def busiest_link_s(topology: Topology, steps: Iterable[Step], block_bytes: IntArray) -> float:
    """The seconds that the busiest link, port or shared capacity needs for all that these steps send over it.

    Their calls are not looked at.
    """
    bytes_between = np.zeros((topology.world_size, topology.world_size), dtype=np.int64)
    for step in steps:
        np.add.at(bytes_between, (step.source, step.destination), block_bytes[step.block])
    bandwidths = np.array([float(each.bandwidth_bytes_per_s) for each in topology.constraints])
    seconds: float = (loads_of_pairs(topology, bytes_between) / bandwidths).max(initial=0.0)
    return seconds


class Travels(NamedTuple):
    """Whose blocks travel: bool arrays (owner, other rank), where each side is needed and comes itself."""

    keys: BoolArray
    queries: BoolArray


def what_travels(task: AttentionTask) -> Travels:
    """The side with fewer bytes for each pair of ranks; the blocks of the task are whole spans."""
    sizes = task.block_bytes + np.where(task.output_of >= 0, task.block_bytes[task.output_of], 0)
    keys, queries = task.blocks_of(KEYS), task.blocks_of(QUERIES)
    low, high = task.tile_bands(queries[:, None], keys)
    seen = low <= high
    key_bytes = _needed_bytes(task, keys, queries, seen.T, sizes)  # [owner, other rank]
    query_bytes = _needed_bytes(task, queries, keys, seen, sizes)
    by_keys = key_bytes <= query_bytes.T
    keys_travel, queries_travel = by_keys & (key_bytes > 0), ~by_keys.T & (query_bytes > 0)
    np.fill_diagonal(keys_travel, False)
    np.fill_diagonal(queries_travel, False)
    return Travels(keys_travel, queries_travel)


def _needed_bytes(
    task: AttentionTask, blocks: IntArray, others: IntArray, seen: BoolArray, sizes: IntArray
) -> IntArray:
    """The bytes of the blocks of each rank that tiles with others of each rank need, an array (owner, other rank)."""
    n = task.layout.world_size
    needed = np.zeros((n, len(blocks)), dtype=bool)
    np.logical_or.at(needed, task.owner[others], seen.T)
    found = np.zeros((n, n), dtype=np.int64)
    np.add.at(found, task.owner[blocks], needed.T * sizes[blocks, None])
    return found


def _sides(chosen: Travels, travels: Travelling, backward: bool) -> list[Sides]:
    """What may travel in passes in which something goes straight home; of keys alone nothing does forward."""
    both: Sides = tuple(side for side, pairs in zip(BOTH_SIDES, chosen, strict=True) if pairs.any()) or KEYS_ONLY
    splits: dict[str, Sides] = {"keys": KEYS_ONLY, "queries": ("queries",), "both": both}
    found = dict.fromkeys(splits.values() if travels == "auto" else [splits[travels]])
    return [sides for sides in found if backward or sides != KEYS_ONLY]


def _rings(
    name: str, topology: Topology, sides: Sides, decomposition: Decomposition | None
) -> tuple[IntArray, tuple[Fraction, ...]]:
    """The rings, an int array (rings, world_size), and their shares; for queries alone as ``token-multi-ring``."""
    if sides == ("queries",) or topology.world_size == 1:
        return query_rings(name, topology, decomposition)
    found = rings_for(name, topology, decomposition)
    return found.rings.astype(np.int64), found.shares


def _pools(sides: Sides, buffers: int) -> dict[int, Pool]:
    """The pools of what travels and of what goes straight home."""
    results = Pool("results", buffers)
    keys = {KEYS: Pool("keys", buffers), KEY_GRADIENTS: results}
    queries = {QUERIES: Pool("queries", buffers), RESULTS: results, QUERY_GRADIENTS: results}
    return (keys if "keys" in sides else {}) | (queries if "queries" in sides else {})
