"""Attention over a sequence that is spread over ranks, as schedules: keys and values travel, queries stay.

Every rank starts with the queries, keys and values of its shard. The keys and values of each shard are cut into one
block per span and ring, and pass around the rings; at each step a rank's queries attend to what arrived the step
before. The result of each query is complete at its own rank, so nothing but keys and values is sent.

- ``ring-attention``: one ring, contiguous shards (arXiv:2310.01889).
- ``zigzag-ring-attention``: one ring, zigzag shards: balanced under a causal mask.
- ``striped-ring-attention``: one ring, striped shards (arXiv:2311.09431).
- ``tasp``: all rings of a decomposition at once (arXiv:2509.26541); contiguous shards, zigzag ones under a causal mask.

**Trimming.** A block stops at the last rank of its way that sees any of it. With zigzag shards and a causal mask the
back half of a shard is seen by lower ranks only, so a ring that runs from rank r to r - 1 carries it ever less: 3/4 of
the bytes in all. Contiguous shards are not needed by lower ranks at all: 1/2. The rings of ``tasp`` visit the ranks in
many orders and save less: about 1/8 on eight ranks. Of two ways around a single ring the one with fewer bytes is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction

import numpy as np

from tasp_lab.arrays import BoolArray, IntArray
from tasp_lab.attention_steps import AttentionSteps, JourneySteps
from tasp_lab.attention_task import Side
from tasp_lab.decomposition import Decomposition, decompose
from tasp_lab.errors import ScheduleError
from tasp_lab.journeys import Journeys, cut_blocks
from tasp_lab.pieces import over_lanes
from tasp_lab.placement import Placement, PlacementFunction, contiguous, striped, zigzag
from tasp_lab.rings import is_ring
from tasp_lab.schedule import MOST_HOLDINGS, Schedule
from tasp_lab.topology import Topology
from tasp_lab.workload import Mask, Workload

USUAL_ROOMS = 3
"""One to compute with, one that fills, one whose receive is posted before its block is sent, as gloo needs it."""


def attention_placement(name: str, workload: Workload, world_size: int) -> Placement:
    """Where the schedule of that name wants the positions. Raises `ScheduleError` for a name there is none of."""
    if name not in ATTENTION:
        raise ScheduleError(f"unknown schedule {name!r}, expected one of {', '.join(ATTENTION)}")
    return ATTENTION[name][workload.mask](workload.sequence, world_size, workload.documents)


def attention(
    name: str,
    topology: Topology,
    workload: Workload,
    decomposition: Decomposition | None = None,
    *,
    trim: bool = True,
    rooms: int = USUAL_ROOMS,
) -> Schedule:
    """The attention schedule of that name.

    Parameters
    ----------
    name : a name in `ATTENTION`.
    topology : its ranks; transfers run between ranks that it joins.
    workload : the layer.
    decomposition : the rings of ``tasp``, if not the topology's own.
    trim : whether blocks stop where nobody sees them any more.
    rooms : how many steps' arrivals a rank has room for (see `tasp_lab.schedule`).

    Raises `ScheduleError` for an unknown name and for more blocks than can be proved.

    >>> from tasp_lab.builders import full_mesh
    >>> layer = Workload(sequence=64, heads=4, head_dim=64, mask="causal")
    >>> ring, tasp = (attention(name, full_mesh(8), layer) for name in ("zigzag-ring-attention", "tasp"))
    >>> ring.lanes, tasp.lanes
    (1, 7)
    >>> bool((ring.flops().sum(axis=0) == tasp.flops().sum(axis=0)).all())
    True
    """
    steps = forward_steps(journeys_of(name, topology, workload, decomposition), trim)
    return attention_schedule(name, topology, steps, rooms)


def forward_steps(ways: Iterable[Journeys], trim: bool) -> AttentionSteps:
    """The forward pass along the way that sends fewest bytes."""
    return min((AttentionSteps(each, trim) for each in ways), key=lambda steps: steps.bytes_sent)


def journeys_of(
    name: str,
    topology: Topology,
    workload: Workload,
    decomposition: Decomposition | None = None,
    travellers: Side = "keys",
    gradient_dtype: str | None = None,
) -> list[Journeys]:
    """The ways around rings that a schedule of that name may take; several where one ring may be walked both ways.

    Raises `ScheduleError` for an unknown name, rings of other ranks, and more blocks than can be proved.
    """
    placement = attention_placement(name, workload, topology.world_size)
    rings, shares = [ring[None] for ring in _single_rings(topology)], [Fraction(1)]
    if name == "tasp" and topology.world_size > 1:
        found = decomposition or decompose(topology)
        if found.world_size != topology.world_size:
            raise ScheduleError(
                f"schedule {name!r}: rings of {found.world_size} ranks, {topology.name} has {topology.world_size}"
            )
        together, shares = over_lanes(found.rings, found.shares)
        rings = [together]
    _check_size(name, topology, placement, len(shares))
    task, ring_of = cut_blocks(workload, placement, shares, travellers, gradient_dtype)
    return [Journeys(task, each, ring_of) for each in rings]


def _single_rings(topology: Topology) -> list[IntArray]:
    """The ways around one ring that are worth comparing: up the ranks, down the ranks, else the best ring known."""
    upward = np.arange(topology.world_size, dtype=np.int64)
    ways = [way for way in (upward, upward[::-1]) if is_ring(topology, way.tolist())]
    return ways or [decompose(topology, lanes=1).rings[0].astype(np.int64)]


def _check_size(name: str, topology: Topology, placement: Placement, rings: int) -> None:
    """Raise `ScheduleError` for more blocks than can be proved."""
    n = topology.world_size
    blocks = sum(1 + min(span.count, rings) for each in placement.spans for span in each)
    if n * blocks > MOST_HOLDINGS:
        raise ScheduleError(
            f"schedule {name!r}: {n} ranks and {blocks} blocks are too many to prove, "
            f"expected at most {MOST_HOLDINGS} pairs of them"
        )


def attention_schedule(
    name: str,
    topology: Topology,
    steps: JourneySteps,
    rooms: int,
    copies: BoolArray | None = None,
) -> Schedule:
    """These steps as a proven schedule; `copies` (world_size, blocks) are held at the start beside what is owned."""
    task = steps.journeys.task
    initial = task.owned if copies is None else task.owned | copies
    schedule = Schedule(
        name=name,
        world_size=topology.world_size,
        lanes=steps.lanes,
        block_bytes=task.block_bytes,
        initial=initial,
        final=initial.copy(),
        steps=steps,
        rooms=rooms,
        task=task,
    )
    schedule.check_routes(topology)
    return schedule


ATTENTION: Mapping[str, Mapping[Mask, PlacementFunction]] = {
    "ring-attention": {"full": contiguous, "causal": contiguous},
    "zigzag-ring-attention": {"full": zigzag, "causal": zigzag},
    "striped-ring-attention": {"full": striped, "causal": striped},
    "tasp": {"full": contiguous, "causal": zigzag},
}
"""Every attention schedule by its name on the command line, with the placement that it wants for each mask."""
