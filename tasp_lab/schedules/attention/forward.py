"""Forward passes of sequence-parallel attention: keys and values circulate, queries are stationary.

Every rank starts with the queries, keys and values of its shard. The keys and values of each shard are cut into one
block per span and ring, which circulate around the rings; at each step a rank's queries attend to the blocks that
arrived at the step before. The result of each query is completed at its own rank, so only keys and values are sent.

- ``ring-attention``: one ring, contiguous shards (arXiv:2310.01889).
- ``zigzag-ring-attention``: one ring, zigzag shards: balanced under a causal mask.
- ``striped-ring-attention``: one ring, striped shards (arXiv:2311.09431).
- ``half-each-way``: one ring in both directions at once, half of each block in either.
- ``tasp``: all rings of a decomposition at once (arXiv:2509.26541); contiguous shards, zigzag ones under a causal mask.

**Trimming.** A block is dropped after the last rank of its route whose mask needs it. With zigzag shards and a causal
mask, only lower ranks need the back half of a shard, so a ring that runs from rank r to r - 1 sends 3/4 of all bytes.
Lower ranks do not need contiguous shards at all: 1/2. The rings of ``tasp`` visit the ranks in many orders and save
less: about 1/8 on eight ranks. Of the two directions of a single ring the one that sends fewer bytes is selected.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np

from tasp_lab.core.arrays import IntArray
from tasp_lab.core.choices import DEFAULT_BUFFERS as DEFAULT_BUFFERS
from tasp_lab.core.choices import Direction
from tasp_lab.core.errors import ScheduleError, unknown
from tasp_lab.rings.decompose import decompose
from tasp_lab.rings.rings import Decomposition, is_ring, over_lanes
from tasp_lab.schedule.blocks import Pool
from tasp_lab.schedule.proof import MAX_HOLDINGS
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.circulation import Circulation, Side, cut_blocks
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.attention.task import KEY_GRADIENTS, KEYS, QUERIES, QUERY_GRADIENTS, RESULTS
from tasp_lab.schedules.attention.travel import RingLanes, Travel, TravelSteps, around, travel_schedule
from tasp_lab.schedules.build import attention_layout
from tasp_lab.schedules.collectives.all_gather import rings_for
from tasp_lab.schedules.registry import uses_rings
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.sequence_layout import SequenceLayout

CIRCULATIONS = ("ring-attention", "zigzag-ring-attention", "striped-ring-attention", "half-each-way", "tasp")
"""The schedules whose passes are circulations; `tasp_lab.schedules.attention.backward` registers them."""


def attention(
    name: str, topology: Topology, workload: Workload, decomposition: Decomposition | None = None, **options: Any
) -> Schedule:
    """The forward pass of a schedule of `CIRCULATIONS`; `options` are fields of `AttentionOptions`.

    `decomposition` has the rings of ``tasp``, by default `decompose(topology)`. Raises `ScheduleError` for an unknown
    name and if there are too many blocks to verify.

    >>> from tasp_lab.topology.builders import full_mesh
    >>> layer = Workload(sequence=64, heads=4, head_dim=64, mask="causal")
    >>> ring, tasp = (attention(name, full_mesh(8), layer) for name in ("zigzag-ring-attention", "tasp"))
    >>> ring.lanes, tasp.lanes
    (1, 7)
    >>> bool((ring.flops().sum(axis=0) == tasp.flops().sum(axis=0)).all())
    True
    """
    asked = AttentionOptions(**options)
    circulations = circulation_of(name, topology, workload, decomposition, direction=asked.direction)
    return attention_schedule(name, topology, forward_steps(circulations, asked.trim), asked.buffers)


def forward_steps(circulations: Iterable[Circulation], trim: bool) -> TravelSteps:
    """The forward pass with the circulation that sends the fewest bytes."""
    travels = (Travel(each, around(each.world_size), RingLanes.of(each), trim=trim) for each in circulations)
    return min(map(TravelSteps, travels), key=lambda steps: steps.bytes_sent)


def circulation_of(
    name: str,
    topology: Topology,
    workload: Workload,
    decomposition: Decomposition | None = None,
    circulating_side: Side = "keys",
    gradient_dtype: str | None = None,
    direction: Direction = "auto",
) -> list[Circulation]:
    """The possible circulations of a schedule, by name; two if a single ring can run in both directions.

    Raises `ScheduleError` for an unknown name, for rings of another world size, for a direction that no ring has, and
    for too many blocks to verify.
    """
    if name not in CIRCULATIONS:
        raise ScheduleError(unknown("schedule", name, CIRCULATIONS))
    layout = attention_layout(name, workload, topology.world_size)
    rings, shares = [ring[None] for ring in single_rings(topology, direction)], [Fraction(1)]
    if name == "half-each-way":
        rings, shares = [_both_ways(name, topology, rings[0])], [Fraction(1, 2)] * 2
    elif uses_rings(name) and topology.world_size > 1:
        found = rings_for(name, topology, decomposition)
        together, shares = over_lanes(found.rings, found.shares)
        rings = [together]
    check_size(name, topology, layout, len(shares))
    content = tuple((ring.tobytes(), len(ring)) for ring in rings)
    return list(_circulations(workload, layout, content, tuple(shares), circulating_side, gradient_dtype))


# A layer has up to three of them (keys forward, keys and queries backward), and seven plans of passes that use them.
@lru_cache(maxsize=3)
def _circulations(
    workload: Workload,
    layout: SequenceLayout,
    rings: tuple[tuple[bytes, int], ...],
    shares: tuple[Fraction, ...],
    side: Side,
    gradient_dtype: str | None,
) -> tuple[Circulation, ...]:
    """The circulations around rings, each given by its content and the number of its rows."""
    task, ring_of = cut_blocks(workload, layout, shares, side, gradient_dtype)
    arrays = (np.frombuffer(content, dtype=np.int64).reshape(rows, -1) for content, rows in rings)
    return tuple(Circulation(task, ring, ring_of, side) for ring in arrays)


def single_rings(topology: Topology, direction: Direction = "auto") -> list[IntArray]:
    """Single rings to compare: ascending ranks, descending ranks, else the best ring known.

    Raises `ScheduleError` for a direction in which the ranks are not linked.
    """
    upward = np.arange(topology.world_size, dtype=np.int64)
    ways = {"ascending": upward, "descending": upward[::-1]}
    chosen = ways if direction == "auto" else {direction: ways[direction]}
    rings = [ring for ring in chosen.values() if is_ring(topology, ring.tolist())]
    if direction != "auto" and topology.reaches_all:
        return [*chosen.values()]
    if direction != "auto" and not rings:
        raise ScheduleError(f"direction {direction!r}: no ring of {direction} ranks on {topology.name}, expected auto")
    return rings or [decompose(topology, lanes=1).rings[0].astype(np.int64)]


def _both_ways(name: str, topology: Topology, ring: IntArray) -> IntArray:
    """A ring, int array (1, world_size), and the same in reverse. Raises `ScheduleError` if that has no links."""
    back = ring[:, ::-1]
    if not topology.reaches_all and not is_ring(topology, back[0].tolist()):
        raise ScheduleError(f"schedule {name!r}: {topology.name} has a ring in one direction only")
    return np.concatenate([ring, back])


def check_size(name: str, topology: Topology, layout: SequenceLayout, rings: int) -> None:
    """Raise `ScheduleError` if there are too many blocks to verify."""
    n = topology.world_size
    blocks = sum(1 + min(span.count, rings) for each in layout.spans for span in each)
    if n * blocks > MAX_HOLDINGS:
        raise ScheduleError(
            f"schedule {name!r}: {n} ranks and {blocks} blocks are too many to prove, "
            f"expected at most {MAX_HOLDINGS} pairs of them"
        )


def attention_schedule(name: str, topology: Topology, steps: TravelSteps, buffers: int) -> Schedule:
    """The schedule of steps in which one side circulates."""
    side = steps.travels[0].circulation.side
    moving = (KEYS, KEY_GRADIENTS) if side == "keys" else (QUERIES, RESULTS, QUERY_GRADIENTS)
    return travel_schedule(name, topology, steps, dict.fromkeys(moving, Pool(side, buffers)))
