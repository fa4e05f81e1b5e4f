"""Keys circulate for some pairs of ranks, queries for the others: ``kv-and-q-rings``.

For the queries of rank a and the keys of rank b, either the keys travel to a, or the queries travel to b and what they
yield (backward: their gradients) is given straight to a; gradients of keys that travelled are given straight to b.
Three plans are compared, and the one whose busiest link carries least is taken: keys travel everywhere, queries travel
everywhere, or per pair of ranks and document the side with fewer bytes (keys if equal) does, where it is not the same
side everywhere. All rings carry whatever travels.

**The best split.** Let the mask between a and b leave rows of queries and columns of keys with something to see, and
let every such row see every such column (full masks, and zigzag shards under a causal mask, whose tiles between two
ranks are full or empty). Let K be the bytes of these keys and of their gradients, Q those of these queries and of what
they yield. A row whose queries do not travel needs all columns at a. So if less than all rows travel, all columns do:
no cut of the keys in a part that travels and a part that stays sends fewer bytes than min(K, Q), and the rule above
sends exactly that many if blocks go straight there. (A pair computed at a third rank moves both.)

- *Full mask*: K and Q are the same for all pairs, so one side travels everywhere. With x KV heads per head, e bytes
  per element of the layer, r of a result, g of a gradient, d elements per head: forward K = 2ex and
  Q = e + r + 4/d, in bytes per position, head and element, so always the keys; backward K = (2e + 2g) x and
  Q = 2e + g + 8/d, so queries with as many KV heads as heads.
- *Causal mask, zigzag*: if a < b, the back half of a's queries sees all keys of b, and all queries of b see the front
  half of a's keys. Both sides travelling upward in rank send (K + Q)/2 for the two, keys alone 3K/2, queries alone
  3Q/2. So a mix is best if K/2 < Q < 2K, and sends 2/3 of the bytes at K = Q. Rings of many orders
  lose part of that: a block passes ranks that do not need it on its way.

**Rings of both sides against rings of one.** If A of A + B rings that load all links equally carried keys only, K/A per
ring, and B queries only, Q/B, the busier ones would carry at least (K + Q)/(A + B), the mean. Rings that carry both
sides carry exactly that, whatever K and Q are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from tasp_lab.arrays import BoolArray, IntArray
from tasp_lab.attention.circulation import Circulation, Side, cut_blocks, cut_both_sides
from tasp_lab.attention.forward import check_size, rings_for
from tasp_lab.attention.options import DEFAULT_OPTIONS, AttentionOptions
from tasp_lab.attention.registry import attention_layout
from tasp_lab.attention.span_blocks import owner_schedule, span_task
from tasp_lab.attention.task import KEY_GRADIENTS, KEYS, QUERIES, QUERY_GRADIENTS, RESULTS, AttentionTask
from tasp_lab.attention.token_ring import StraightHomeSteps, query_rings
from tasp_lab.decomposition.decompose import Decomposition
from tasp_lab.decomposition.link_loads import loads_of_pairs
from tasp_lab.schedule.blocks import Pool
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedule.step import Step
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.sequence_layout import SequenceLayout

Sides = tuple[Side, ...]
"""The sides that travel, keys first."""

KEYS_ONLY: Sides = ("keys",)
"""Forward, nothing has to return to its owner then, so links of the rings are enough."""


def kv_and_q_rings(
    name: str,
    topology: Topology,
    workload: Workload,
    options: AttentionOptions = DEFAULT_OPTIONS,
    *,
    decomposition: Decomposition | None = None,
) -> tuple[Schedule, ...]:
    """The passes of ``kv-and-q-rings``.

    Raises `ScheduleError` for rings of another world size and for too many blocks to verify.
    """
    layout = attention_layout(name, workload, topology.world_size)

    def plan(sides: Sides, chosen: Travels, wire: str, backward: bool) -> StraightHomeSteps:
        rings, shares = _rings(name, topology, sides, decomposition)
        check_size(name, topology, layout, len(shares) * len(sides))
        task, ring_of, span_of = _cut(workload, layout, shares, sides, wire, backward)
        travels: Sequence[BoolArray | None] = chosen if len(sides) == 2 else (None,)
        return StraightHomeSteps(
            *(Circulation(task, rings, ring_of, side, span_of, each) for side, each in zip(sides, travels, strict=True))
        )

    def one_pass(backward: bool) -> Schedule:
        wire = options.wire_dtype(workload.dtype, backward=backward, sums=False)
        chosen = what_travels(span_task(workload, layout, wire, backward=backward))
        if topology.is_complete:
            plans = [plan(sides, chosen, wire, backward) for sides in _sides(chosen)]
            steps = min(plans, key=lambda each: busiest_link_s(topology, each, each.task.block_bytes))
        else:
            steps = plan(KEYS_ONLY, chosen, wire, backward)
        pools = _pools(tuple(each.side for each in steps.circulations), options.buffers)
        return owner_schedule(name, topology, steps.task, steps, lanes=steps.lanes, circulating=pools)

    return options.build(one_pass)


def _cut(
    workload: Workload, layout: SequenceLayout, shares: Sequence[Fraction], sides: Sides, wire: str, backward: bool
) -> tuple[AttentionTask, IntArray, IntArray | None]:
    """The task, the ring of each block of a side that travels, and the span of each block where both sides do."""
    gradients = wire if backward else None
    span_of = None
    if len(sides) == 2:
        task, ring_of, span_of = cut_both_sides(workload, layout, shares, gradients)
    else:
        task, ring_of = cut_blocks(workload, layout, shares, sides[0], gradients)
    task = replace(task, home_dtype="fp32", result_dtype=task.result_dtype if backward else wire)
    return task, ring_of, span_of


def busiest_link_s(topology: Topology, steps: Iterable[Step], block_bytes: IntArray) -> float:
    """The seconds that the busiest link, port or shared capacity needs for all that these steps send over it."""
    bytes_between = np.zeros((topology.world_size, topology.world_size), dtype=np.int64)
    for step in steps:
        np.add.at(bytes_between, (step.source, step.destination), block_bytes[step.block])
    bandwidths = np.array([float(each.bandwidth_bytes_per_s) for each in topology.constraints])
    seconds: float = (loads_of_pairs(topology, bytes_between) / bandwidths).max(initial=0.0)
    return seconds


class Travels(NamedTuple):
    """Whose blocks travel: bool arrays (owner, other rank, document), where each side is needed and comes itself."""

    keys: BoolArray
    queries: BoolArray


def what_travels(task: AttentionTask) -> Travels:
    """The side with fewer bytes for each pair of ranks and document; the blocks of the task are whole spans."""
    n, documents = task.layout.world_size, len(task.workload.document_starts)
    key_bytes, query_bytes = np.zeros((2, documents, n, n), dtype=np.int64)  # [document, owner, other rank]
    sizes = task.block_bytes + np.where(task.output_of >= 0, task.block_bytes[task.output_of], 0)
    keys_of, queries_of = (_by_document(task, tensor) for tensor in (KEYS, QUERIES))
    for document in range(documents):
        keys, queries = keys_of[document], queries_of[document]
        low, high = task.tile_bands(queries[:, None], keys)
        seen = low <= high
        key_bytes[document] = _needed_bytes(task, keys, queries, seen.T, sizes)
        query_bytes[document] = _needed_bytes(task, queries, keys, seen, sizes)
    by_keys = key_bytes <= query_bytes.transpose(0, 2, 1)
    keys_travel = by_keys & (key_bytes > 0)
    queries_travel = ~by_keys.transpose(0, 2, 1) & (query_bytes > 0)
    keys_travel[:, range(n), range(n)] = queries_travel[:, range(n), range(n)] = False
    return Travels(keys_travel.transpose(1, 2, 0), queries_travel.transpose(1, 2, 0))


def _by_document(task: AttentionTask, tensor: int) -> list[IntArray]:
    """The blocks of a tensor, document by document."""
    blocks = task.blocks_of(tensor)
    order = np.argsort(task.document[blocks], kind="stable")
    ends = np.cumsum(np.bincount(task.document[blocks], minlength=len(task.workload.document_starts)))
    return np.split(blocks[order], ends[:-1])


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


def _sides(chosen: Travels) -> list[Sides]:
    """What may travel: one side everywhere, or that of each pair if it is not the same everywhere."""
    both: list[Sides] = [("keys", "queries")] if chosen.keys.any() and chosen.queries.any() else []
    return [KEYS_ONLY, ("queries",), *both]


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
