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

from tasp_lab.core.arrays import BoolArray, IntArray
from tasp_lab.core.errors import NoDecompositionError, ScheduleError, TopologyError
from tasp_lab.rings.decompose import decompose
from tasp_lab.rings.rings import over_lanes
from tasp_lab.schedule.blocks import Pool
from tasp_lab.schedule.composition.sequence import joined
from tasp_lab.schedule.model import LazySteps, Step
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.circulation import Circulation, cut_blocks
from tasp_lab.schedules.attention.forward import check_size
from tasp_lab.schedules.attention.kv_and_q_rings import busiest_link_s
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.attention.span_blocks import owner_schedule
from tasp_lab.schedules.attention.task import KEY_GRADIENTS, KEYS, AttentionTask
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
        kind = DoubleRingBackwardSteps if backward else DoubleRingSteps
        found = []
        for each in candidates:
            task, part = cut_blocks(workload, layout, each.shares, "keys", dtype)
            found.append(kind(each, task, part, topology, options.trim))
        steps = min(found, key=lambda each: (each.busiest_link_s(topology) if variant else 0, each.bytes_sent))
        circulating = dict.fromkeys((KEYS, KEY_GRADIENTS), pool)
        return owner_schedule(name, topology, steps.task, steps, lanes=steps.lanes, circulating=circulating)

    return options.build(one_pass)


class DoubleRingSteps(LazySteps, trusted=True):
    """A forward pass. Hop ``a * window + b`` of a block is to place b of window a; it is there from this step on.

    `part` is the part of each block of keys in `routes`. `trim`: blocks go only to ranks whose mask needs them, and to
    those on the way there.
    """

    def __init__(self, routes: Routes, task: AttentionTask, part: IntArray, topology: Topology, trim: bool) -> None:
        path = part * topology.world_size + task.owner[task.blocks_of(KEYS)]
        self.circulation, self.task, self.routes = Circulation(task, routes.paths(), path), task, routes
        self.window, self._inner_lane, self._outer_lane = routes.window, routes.lane[part], routes.outer_lane[part]
        hops = range(topology.world_size)
        self._needed = np.stack([self.circulation.needed(hop) for hop in hops])
        self._moves: BoolArray = self._needed.copy() if trim else np.ones_like(self._needed)
        for hop in reversed(hops[1:]):
            self._moves[self._before(hop)] |= self._moves[hop]

    def _before(self, hop: int) -> int:
        """The hop from which a block comes to a hop."""
        return hop - 1 if hop % self.window else hop - self.window

    @property
    def lanes(self) -> int:
        return self.routes.lanes

    @property
    def bytes_sent(self) -> int:
        """The bytes that all ranks send."""
        return sum(int(self.task.block_bytes[self.sends(index).block].sum()) for index in range(len(self)))

    def busiest_link_s(self, topology: Topology) -> float:
        """The seconds that the busiest link needs for all transfers."""
        return busiest_link_s(topology, map(self.sends, range(len(self))), self.task.block_bytes)

    def __len__(self) -> int:
        return 1 + int(np.flatnonzero(self._moves.any(axis=1)).max(initial=0))

    def step(self, index: int) -> Step:
        if index >= len(self._moves):
            return self.sends(index)
        calls = self.circulation.calls_at(index, np.flatnonzero(self._moves[index]))
        return joined([Step.of((), calls), self.sends(index)])

    def sends(self, index: int) -> Step:
        return joined(self._sends(index))

    def _sends(self, index: int) -> list[Step]:
        """The transfers of a step: those of keys."""
        hop = index + 1
        if hop >= len(self._moves):
            return []
        return [self._sent(np.flatnonzero(self._moves[hop]), self._before(hop), hop)]

    def _sent(
        self, chosen: IntArray, here: int, there: int, gradients: bool = False, lane: IntArray | None = None
    ) -> Step:
        """Blocks, or their gradients, that go from hop to hop: around inner rings within a window by default."""
        if lane is None:
            lane = self._inner_lane if here // self.window == there // self.window else self._outer_lane
        circulation = self.circulation
        chosen = chosen[circulation.order(chosen, circulation.at(there, chosen))]
        source, destination = circulation.at(here, chosen), circulation.at(there, chosen)
        block = (circulation.gradients if gradients else circulation.blocks)[chosen]
        return Step(source, destination, lane[chosen], block, np.full(len(chosen), gradients))


class DoubleRingBackwardSteps(DoubleRingSteps, trusted=True):
    """A backward pass: gradients follow around the inner ring, and the sums of windows around the outer one.

    The sum of window a is where the window began at step ``(a + 1) * window``, as is what comes along the outer ring.
    """

    def __init__(self, routes: Routes, task: AttentionTask, part: IntArray, topology: Topology, trim: bool) -> None:
        super().__init__(routes, task, part, topology, trim)
        circulation, window, away = self.circulation, self.window, self._needed.copy()
        away[0] = False
        by_window = away.reshape(-1, window, away.shape[1])
        self._follows = np.logical_or.accumulate(by_window, axis=1).reshape(away.shape)
        windows: BoolArray = np.logical_or.reduce(by_window, axis=1)
        windows[0] = False
        self._first: IntArray = windows.argmax(axis=0)
        last = len(windows) - 1 - windows[::-1].argmax(axis=0)
        source = circulation.at(last * window)
        linked = topology.linked_pairs[source, circulation.at(0)]
        self._last = np.where(windows.any(axis=0), np.where(linked, last, len(windows) - 1), 0)
        self._in_first = bool(by_window[0].any())
        self._distances = np.unique(self._last[(self._last > 0) & (self._last < len(windows) - 1)])
        self._outer_lanes = np.unique(routes.outer_lane)

    @property
    def lanes(self) -> int:
        """Those of the rings, and one per outer lane and number of windows from which sums go straight home."""
        return super().lanes + len(self._distances) * len(self._outer_lanes)

    def _home_lane(self, windows: int) -> IntArray:
        """The lane of each block on which its sum goes home from there; from the last window it is the outer ring's."""
        if windows == len(self._needed) // self.window - 1:
            return self._outer_lane
        first = super().lanes + int(np.searchsorted(self._distances, windows)) * len(self._outer_lanes)
        return first + np.searchsorted(self._outer_lanes, self._outer_lane)

    def __len__(self) -> int:
        last = int(self._last.max(initial=0))
        home = (last + 1) * self.window + 2 if last else self.window + 1 if self._in_first else 1
        return max(super().__len__(), home)

    def _sends(self, index: int) -> list[Step]:
        return [*super()._sends(index), *self._gradients(index)]

    def _gradients(self, index: int) -> Sequence[Step]:
        window, found = self.window, []
        hop = index - 1
        if 0 <= hop < len(self._follows):
            following = np.flatnonzero(self._follows[hop])
            found.append(self._sent(following, hop, index if index % window else index - window, gradients=True))
        passed, ended = index // window - 2, (index - 1) // window - 1
        if index % window == 0 and passed > 0:
            sums = np.flatnonzero((self._first > 0) & (self._first <= passed) & (passed < self._last))
            found.append(self._sent(sums, passed * window, (passed + 1) * window, gradients=True))
        if index % window == 1 and ended > 0:
            sums = np.flatnonzero(self._last == ended)
            found.append(self._sent(sums, ended * window, 0, gradients=True, lane=self._home_lane(ended)))
        return found
