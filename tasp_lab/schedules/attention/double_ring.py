"""LoongTrain's double ring (arXiv:2406.18485): keys circulate in rings of W ranks, and these rings pass them on.

``double-ring:WxR`` has R inner rings of W consecutive ranks, such as the GPUs of a node, and W outer rings, each of the
ranks at one place of their inner rings. Time is cut into R *windows* of W steps. In a window keys and values circulate
once around each inner ring. Meanwhile each rank sends those with which it began the window along its outer ring, and
the next window begins with them. So of the n - 1 hops of a block only R - 1 are between inner rings, each has a whole
window of time, and it uses other links than the W - 1 hops beside it. A block stays at a rank for a window, so there
are W - 1 more receive buffers than with a single ring.

Backward, keys move in the same way. The gradients of a window follow around the inner ring, one step behind, back to
the rank at which the window began. There they join the sum of all windows before, which has come along the outer ring,
and move on with it. A sum goes straight home from the last inner ring whose mask needs the block, where there is a
link, on a lane per distance. The published code also carries the owner's part around; here it stays at home.

``double-ring:WxR:tasp`` is TASP inside the groups: keys are cut over all rings of a decomposition of a group, and
circulate around all of them at once. All groups must have the same links. Each part makes the hops of the double ring,
so bytes and buffers are the same. All parts move along one outer ring, or half of them in each direction if the busiest
link then has less to carry: if each direction has a link of its own that is the bottleneck. Behind a port, such as a
NIC, as many bytes pass in any case.

Shards are contiguous, under a causal mask zigzag. Of the directions of both rings those that send fewest bytes are
selected; with TASP inside those whose busiest link is busy for the shortest time, of equal ones those that send fewest
bytes. With one rank in each inner ring, or with one inner ring, it is a single ring, or TASP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from tasp_lab.core.arrays import IntArray
from tasp_lab.core.errors import NoDecompositionError, ScheduleError, TopologyError
from tasp_lab.rings.decompose import decompose
from tasp_lab.rings.rings import over_lanes
from tasp_lab.schedule.blocks import Pool
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.circulation import Circulation, cut_blocks
from tasp_lab.schedules.attention.forward import check_size
from tasp_lab.schedules.attention.kv_and_q_rings import busiest_link_s
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.attention.task import KEY_GRADIENTS, KEYS, AttentionTask
from tasp_lab.schedules.attention.travel import (
    NO_GIFTS,
    Gifts,
    RingLanes,
    Route,
    Travel,
    TravelSteps,
    travel_schedule,
)
from tasp_lab.schedules.build import attention_layout, attention_schedules
from tasp_lab.schedules.registry import balanced_ring, schedule
from tasp_lab.topology.derived import equal_parts
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload


@dataclass(frozen=True, eq=False)
class Routes:
    """The inner ring and the direction of the outer ring of each part of a rank's keys.

    Parameters
    ----------
    inner : int array (lanes, window): inner rings of the first group.
    groups : the number of groups.
    shares : the share of each part.
    lane : int array (parts,), the inner ring of each part.
    direction : int array (parts,), 1 or -1.
    """

    inner: IntArray
    groups: int
    shares: tuple[Fraction, ...]
    lane: IntArray
    direction: IntArray

    @property
    def window(self) -> int:
        """The ranks of an inner ring."""
        return int(self.inner.shape[1])

    @property
    def outer_lane(self) -> IntArray:
        """The lane of each part between inner rings: one per direction."""
        lane: IntArray = len(self.inner) + np.searchsorted(np.unique(self.direction), self.direction)
        return lane

    @property
    def lanes(self) -> int:
        """The inner rings, then the directions of the outer ring."""
        return 1 + int(self.outer_lane.max())

    def paths(self, hops: IntArray | None = None) -> IntArray:
        """The ranks at which the parts of all ranks are at these hops, int array (hops,), by default hop by hop at all.

        An int array (parts * world_size, hops); row ``part * world_size + rank`` is that of a rank's part.
        """
        ranks = np.arange(self.groups * self.window)
        group, place = np.divmod(ranks, self.window)
        windows, places = np.divmod(ranks if hops is None else hops, self.window)
        first = np.argsort(self.inner, axis=1)[:, place]
        around = np.take_along_axis(self.inner[:, None], (first[:, :, None] + places) % self.window, axis=2)
        between = (group[:, None] + self.direction[:, None, None] * windows) % self.groups
        paths: IntArray = (between * self.window + around[self.lane]).reshape(-1, len(places))
        return paths

    def has_links(self, topology: Topology) -> bool:
        """Whether the topology has links for all hops: each follows the ring of the first hop, or that of a window."""
        paths = self.paths(np.array([0, 1, self.window]))
        return bool(topology.have_routes(paths[:, [0, 0]], paths[:, 1:]).all())


def routes_of(name: str, topology: Topology, split: tuple[int, int], variant: str) -> list[Routes]:
    """The routes to choose from: those that the topology has links for; if it has for none, the first ones."""
    window, groups = split
    upward = np.arange(window)
    inner = [(ring[None], [Fraction(1)]) for ring in (upward, upward[::-1])[: window - 1]]
    outer: list[tuple[int, ...]] = [(1,), (-1,)]
    if variant:
        inner, outer = [_tasp_rings(name, topology, groups)], [*outer, (1, -1)]
    found = [_around(*rings, groups, each) for rings in inner for each in outer[: None if groups > 2 else 1]]
    return [each for each in found if each.has_links(topology)] or found[:1]


def _tasp_rings(name: str, topology: Topology, groups: int) -> tuple[IntArray, list[Fraction]]:
    """The rings of a group and their shares."""
    try:
        found = decompose(equal_parts(topology, np.arange(topology.world_size).reshape(groups, -1)))
    except (NoDecompositionError, TopologyError) as error:
        raise ScheduleError(f"schedule {name!r}: {error}") from None
    return over_lanes(found.rings, found.shares)


def _around(rings: IntArray, shares: Sequence[Fraction], groups: int, directions: tuple[int, ...]) -> Routes:
    """Around inner rings with these shares, and between them an equal part in each of these directions."""
    count = len(directions)
    lane, direction = np.tile(np.arange(len(rings)), count), np.repeat(directions, len(rings))
    return Routes(rings, groups, tuple(share / count for share in shares) * count, lane, direction)


@schedule(
    "double-ring:WxR",
    "softmax",
    follows="ranks",
    moves="keys and values around R inner rings of W ranks, and from ring to ring meanwhile (LoongTrain)",
    options=("trim", "buffers", "gradient_dtype", "groups"),
    variants=("tasp",),
)
def double_ring(
    name: str,
    topology: Topology,
    workload: Workload,
    options: AttentionOptions,
    *,
    split: tuple[int, int],
    variant: str,
) -> tuple[Schedule, ...]:
    """The passes of ``double-ring:WxR``, `split` being W and R, or of its `variant`.

    Raises `ScheduleError` for the variant if groups have different links or no rings.
    """
    window, rings = split
    if 1 in split:
        single = "tasp" if variant and rings == 1 else balanced_ring(workload)
        plain = options if options.passes == "forward" else replace(options, dataflow="rotate-kv")
        return tuple(
            schedule.renamed(name) for schedule in attention_schedules(single, topology, workload, None, plain)
        )
    layout = attention_layout(name, workload, topology.world_size)
    candidates = routes_of(name, topology, split, variant)
    check_size(name, topology, layout, max(len(each.lane) for each in candidates))
    pool = Pool("keys", options.buffers + window - 1)

    def one_pass(backward: bool) -> Schedule:
        dtype = options.wire_dtype(workload.dtype, backward=True, sums=True) if backward else None
        found = []
        for each in candidates:
            task, part = cut_blocks(workload, layout, each.shares, "keys", dtype)
            found.append(TravelSteps(_travel(each, task, part, topology, options.trim)))
        steps = min(found, key=lambda each: (_busiest_link_s(each, topology) if variant else 0, each.bytes_sent))
        return travel_schedule(name, topology, steps, dict.fromkeys((KEYS, KEY_GRADIENTS), pool))

    return options.build(one_pass)


def _busiest_link_s(steps: TravelSteps, topology: Topology) -> float:
    return busiest_link_s(topology, map(steps.sends, range(len(steps))), steps.task.block_bytes)


def _travel(routes: Routes, task: AttentionTask, part: IntArray, topology: Topology, trim: bool) -> Travel:
    """Hop ``a * window + b`` of a block is to place b of window a; it is there from this step on.

    `part` is the part of each block of keys in `routes`. The sum of window a is where the window began at step
    ``(a + 1) * window``, as is what comes along the outer ring.
    """
    n, window = topology.world_size, routes.window
    circulation = Circulation(task, routes.paths(), part * n + task.owner[task.blocks_of(KEYS)])
    hop, first = np.arange(n), np.arange(window, n, window)  # each hop, and the first one of each window but one
    via = np.where(hop % window, hop - 1, np.maximum(hop - window, 0))[None]
    gifts = NO_GIFTS
    if task.is_backward:
        gifts = Gifts.joined(
            Gifts.of(hop, np.where((hop + 1) % window, hop + 1, hop + 1 - window), hop + 1, 0, n),  # within windows
            Gifts.of(first[:-1], first[1:], first[:-1] + 2 * window, first[1:], n),
            Gifts.of(first[:-1], 0, first[:-1] + window + 1, first[:-1], first[1:] - 1),  # complete by then
            Gifts.of(first[-1:], 0, n + 1, 0, n),
        )
    last_window = circulation.at(circulation.last // window * window)
    complete = np.where(topology.linked_pairs[last_window, circulation.at(0)], circulation.last, n - 1)
    lanes = RingLanes(routes.lanes, routes.lane[part], routes.outer_lane[part], window)
    return Travel(circulation, Route(via, np.maximum(hop - 1, 0)[None], gifts), lanes, trim=trim, complete=complete)
