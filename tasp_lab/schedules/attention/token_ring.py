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

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import chain

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray
from tasp_lab.rings.closed_forms import balanced_rings
from tasp_lab.rings.rings import Decomposition
from tasp_lab.schedule.blocks import Pool
from tasp_lab.schedule.model import LazySteps, Step
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.circulation import Circulation, cut_blocks
from tasp_lab.schedules.attention.forward import check_size
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.attention.span_blocks import owner_schedule
from tasp_lab.schedules.attention.task import QUERIES, QUERY_GRADIENTS, RESULTS, AttentionTask
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
    steps_of = StraightHomeSteps if chunks == 1 else ChunkedTailSteps
    shares = (Fraction(1, chunks),) * chunks
    return _passes(name, topology, workload, options, np.tile(downward, (chunks, 1)), shares, steps_of)


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
    steps_of: Callable[[Circulation], StraightHomeSteps] | None = None,
) -> tuple[Schedule, ...]:
    """The passes in which these shares of queries circulate around these rings."""
    steps_of = steps_of or StraightHomeSteps
    layout = attention_layout(name, workload, topology.world_size)
    check_size(name, topology, layout, len(shares))
    results = dict.fromkeys((RESULTS, QUERY_GRADIENTS), Pool("results", options.buffers))
    pools = {QUERIES: Pool("queries", options.buffers), **results}

    def one_pass(backward: bool) -> Schedule:
        wire = options.wire_dtype(workload.dtype, backward=backward, sums=False)
        task, ring_of = cut_blocks(workload, layout, shares, "queries", wire if backward else None)
        task = replace(task, home_dtype="fp32", result_dtype=task.result_dtype if backward else wire)
        steps = steps_of(Circulation(task, rings, ring_of, "queries"))
        return owner_schedule(name, topology, task, steps, lanes=steps.lanes, circulating=pools)

    return options.build(one_pass)


class StraightHomeSteps(LazySteps, trusted=True):
    """At step s blocks are s hops from their owners; each stops after the last rank that needs it.

    What is computed of them at other ranks is given to their owners a step later. Of several circulations around the
    same rings, the first one makes the calls at the owners.
    """

    def __init__(self, *circulations: Circulation) -> None:
        self.circulations = circulations
        rings = circulations[0].rings
        self._world_size: int = rings.shape[1]
        self._distances = np.unique((np.roll(rings, -1, axis=1) - rings) % self._world_size)

    @property
    def task(self) -> AttentionTask:
        return self.circulations[0].task

    @property
    def lanes(self) -> int:
        """One per distance to a next rank, and one per distance to an owner."""
        return len(self._distances) + self._world_size - 1

    def __len__(self) -> int:
        return 1 + max([_last_step(each) for each in self.circulations])

    def step(self, index: int) -> Step:
        making = self.circulations if index else self.circulations[:1]
        calls = [each.calls_at(index, np.flatnonzero(each.last >= index)) for each in making]
        return Step(*self._transfers(index), tuple(chain.from_iterable(calls)))

    def sends(self, index: int) -> Step:
        return Step(*self._transfers(index))

    def _transfers(self, index: int) -> tuple[IntArray, IntArray, IntArray, IntArray, BoolArray]:
        """The columns of `Step`."""
        onward = [_onward(each, index, each.last) for each in self.circulations]
        home = [_home(each, index - 1, each.last) for each in self.circulations]
        source, destination, block = np.concatenate([*onward, *home], axis=1)
        returns = np.arange(len(source)) >= sum(each.shape[1] for each in onward)
        distance = (destination - source) % self._world_size
        lane = np.where(returns, len(self._distances) - 1 + distance, np.searchsorted(self._distances, distance))
        return source, destination, lane, block, returns


def _last_step(circulation: Circulation) -> int:
    """The step of the last calls, or a step later if something returns."""
    hop = int(circulation.last.max(initial=0))
    return hop + 1 if hop and (circulation.gradients >= 0).any() else hop


def _onward(circulation: Circulation, hop: int, last: IntArray) -> IntArray:
    """Source, destination and block of the transfers after this hop, an array (3, transfers), up to the last hops."""
    moving = np.flatnonzero(last > hop)
    moving = moving[circulation.order(moving, circulation.at(hop + 1, moving))]
    return np.stack([circulation.at(hop, moving), circulation.at(hop + 1, moving), circulation.blocks[moving]])


def _home(circulation: Circulation, hop: int, last: IntArray) -> IntArray:
    """The same of what blocks yield at this hop."""
    used = circulation.used_at(hop) if hop > 0 else np.zeros(0, dtype=np.int64)
    used = used[(circulation.gradients[used] >= 0) & (last[used] >= hop)]
    return np.stack([circulation.at(hop, used), circulation.at(0, used), circulation.gradients[used]])


class ChunkedTailSteps(StraightHomeSteps, trusted=True):
    """Queries of one ring reach the last rank straight from their owners, and leave it in pieces.

    The circulation goes around a ring that is repeated once per piece.
    """

    def __init__(self, circulation: Circulation) -> None:
        super().__init__(circulation)
        self._circulation, n = circulation, self._world_size
        self._tail = np.flatnonzero((circulation.last == n - 1) & (n > 1))
        self._hops = circulation.last.copy()
        self._hops[self._tail] = 0
        for hop in range(1, n - 1):
            used = np.intersect1d(circulation.used_at(hop), self._tail)
            self._hops[used] = hop
        self._first_call = max(n - 2, 1)
        self._call_step = self._first_call + circulation.ring_of[self._tail]

    @property
    def lanes(self) -> int:
        """One of queries to the next rank, one of results per distance, one of queries to the last rank."""
        return super().lanes + 1

    def __len__(self) -> int:
        hop, pieces = int(self._hops.max(initial=0)), len(self._circulation.rings)
        around = hop + 2 if hop else 1
        return max(around, self._first_call + pieces + 1) if len(self._tail) else around

    def step(self, index: int) -> Step:
        ring, called = self._circulation, self._tail[self._call_step == index]
        calls = ring.calls_at(index, np.flatnonzero(self._hops >= index)) + (
            ring.calls_at(self._world_size - 1, called) if len(called) else ()
        )
        return Step(*self._transfers(index), calls)

    def _transfers(self, index: int) -> tuple[IntArray, IntArray, IntArray, IntArray, BoolArray]:
        ring, n = self._circulation, self._world_size
        onward, home = _onward(ring, index, self._hops), _home(ring, index - 1, self._hops)
        leaving, straight = self._tail[self._call_step == index - 1], self._tail[self._call_step == index + 1]
        to_last = np.stack([ring.at(0, straight), ring.at(n - 1, straight), ring.blocks[straight]])
        last_home = np.stack([ring.at(n - 1, leaving), ring.at(0, leaving), ring.gradients[leaving]])
        source, destination, block = np.concatenate([onward, to_last, home, last_home], axis=1)
        lane = np.concatenate(
            [
                np.zeros(onward.shape[1], dtype=np.int64),
                np.full(to_last.shape[1], n),
                (home[1] - home[0]) % n,
                (last_home[1] - last_home[0]) % n,
            ]
        )
        returns = np.arange(len(source)) >= onward.shape[1] + to_last.shape[1]
        return source, destination, lane, block, returns
