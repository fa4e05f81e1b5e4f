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
link. The published code also carries the owner's part around; here it stays at home.

Shards are contiguous, under a causal mask zigzag. Of the directions of both rings those that send fewest bytes are
selected. With one rank in each inner ring, or with one inner ring, it is a single ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import product

import numpy as np

from tasp_lab.arrays import BoolArray, IntArray
from tasp_lab.attention.circulation import Circulation, cut_blocks
from tasp_lab.attention.options import DEFAULT_OPTIONS, AttentionOptions
from tasp_lab.attention.registry import attention_layout, attention_schedules, balanced_ring
from tasp_lab.attention.span_blocks import owner_schedule
from tasp_lab.attention.task import KEY_GRADIENTS, KEYS
from tasp_lab.schedule.blocks import Pool
from tasp_lab.schedule.composition.merged_steps import joined
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedule.step import LazySteps, Step
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload

INNER, OUTER = range(2)
"""Lanes."""


def double_ring(
    name: str,
    topology: Topology,
    workload: Workload,
    options: AttentionOptions = DEFAULT_OPTIONS,
    *,
    split: tuple[int, int],
) -> tuple[Schedule, ...]:
    """The passes of ``double-ring:WxR``, `split` being W and R."""
    window, rings = split
    if 1 in split:
        ring = balanced_ring(workload)
        plain = options if options.passes == "forward" else replace(options, dataflow="rotate-kv")
        return tuple(replace(each, name=name) for each in attention_schedules(ring, topology, workload, None, plain))
    layout = attention_layout(name, workload, topology.world_size)
    pool = Pool("keys", options.buffers + window - 1)

    def one_pass(backward: bool) -> Schedule:
        dtype = options.wire_dtype(workload.dtype, backward=True, sums=True) if backward else None
        task, _ = cut_blocks(workload, layout, [Fraction(1)], "keys", dtype)
        found = []
        for paths in _paths(topology, window, rings):
            circulation = Circulation(task, paths, task.owner[task.blocks_of(KEYS)])
            kind = DoubleRingBackwardSteps if backward else DoubleRingSteps
            found.append(kind(circulation, topology, window, options.trim))
        steps = min(found, key=lambda each: each.bytes_sent)
        circulating = dict.fromkeys((KEYS, KEY_GRADIENTS), pool)
        return owner_schedule(name, topology, task, steps, lanes=2, circulating=circulating)

    return options.build(one_pass)


def _paths(topology: Topology, window: int, rings: int) -> list[IntArray]:
    """The ranks at which the block of each rank is hop by hop, int arrays (world_size, world_size).

    One per pair of directions that the topology has links for; if it has for none, the first one.
    """
    ring, place = np.divmod(np.arange(topology.world_size), window)
    found = [
        (ring[:, None] + outer * ring) % rings * window + (place[:, None] + inner * place) % window
        for outer, inner in product((1, -1)[: rings - 1], (1, -1)[: window - 1])
    ]
    linked = [each for each in found if topology.linked_pairs[each[:, [0]], each[:, [1, window]]].all()]
    return linked or found[:1]


class DoubleRingSteps(LazySteps):
    """A forward pass. Hop ``a * window + b`` of a block is to place b of window a; it is there from this step on.

    `circulation` has a path per rank, see `_paths`. `trim`: blocks go only to ranks whose mask needs them, and to those
    on the way there.
    """

    def __init__(self, circulation: Circulation, topology: Topology, window: int, trim: bool) -> None:
        self.circulation, self.window = circulation, window
        hops = range(circulation.world_size)
        self._needed = np.stack([circulation.needed(hop) for hop in hops])
        self._moves: BoolArray = self._needed.copy() if trim else np.ones_like(self._needed)
        for hop in reversed(hops[1:]):
            self._moves[self._before(hop)] |= self._moves[hop]

    def _before(self, hop: int) -> int:
        """The hop from which a block comes to a hop."""
        return hop - 1 if hop % self.window else hop - self.window

    @property
    def bytes_sent(self) -> int:
        """The bytes that all ranks send."""
        sizes = self.circulation.task.block_bytes
        return sum(int(sizes[step.block].sum()) for step in self)

    def __len__(self) -> int:
        return 1 + int(np.flatnonzero(self._moves.any(axis=1)).max(initial=0))

    def step(self, index: int) -> Step:
        return joined(self._parts(index))

    def _parts(self, index: int) -> list[Step]:
        """The transfers of keys, and the calls."""
        if index >= len(self._moves):
            return []
        calls = self.circulation.calls_at(index, np.flatnonzero(self._moves[index]))
        found, hop = [Step.of((), calls)], index + 1
        if hop < len(self._moves):
            lane = INNER if hop % self.window else OUTER
            found.append(self._sent(np.flatnonzero(self._moves[hop]), self._before(hop), hop, lane))
        return found

    def _sent(self, chosen: IntArray, here: int, there: int, lane: int, gradients: bool = False) -> Step:
        """Blocks, or their gradients, that go from one hop to another."""
        circulation = self.circulation
        chosen = chosen[circulation.order(chosen, circulation.at(there, chosen))]
        source, destination = circulation.at(here, chosen), circulation.at(there, chosen)
        block = (circulation.gradients if gradients else circulation.blocks)[chosen]
        return Step(source, destination, np.full(len(chosen), lane), block, np.full(len(chosen), gradients))


class DoubleRingBackwardSteps(DoubleRingSteps):
    """A backward pass: gradients follow around the inner ring, and the sums of windows around the outer one.

    The sum of window a is where the window began at step ``(a + 1) * window``, as is what comes along the outer ring.
    """

    def __init__(self, circulation: Circulation, topology: Topology, window: int, trim: bool) -> None:
        super().__init__(circulation, topology, window, trim)
        away = self._needed.copy()
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

    def __len__(self) -> int:
        last = int(self._last.max(initial=0))
        home = (last + 1) * self.window + 2 if last else self.window + 1 if self._in_first else 1
        return max(super().__len__(), home)

    def _parts(self, index: int) -> list[Step]:
        return [*super()._parts(index), *self._gradients(index)]

    def _gradients(self, index: int) -> Sequence[Step]:
        window, found = self.window, []
        hop = index - 1
        if 0 <= hop < len(self._follows):
            place = hop % window
            following = np.flatnonzero(self._follows[hop])
            found.append(self._sent(following, hop, hop - place + (place + 1) % window, INNER, gradients=True))
        passed, ended = index // window - 2, (index - 1) // window - 1
        if index % window == 0 and passed > 0:
            sums = np.flatnonzero((self._first > 0) & (self._first <= passed) & (passed < self._last))
            found.append(self._sent(sums, passed * window, (passed + 1) * window, OUTER, gradients=True))
        if index % window == 1 and ended > 0:
            sums = np.flatnonzero(self._last == ended)
            found.append(self._sent(sums, ended * window, 0, OUTER, gradients=True))
        return found
