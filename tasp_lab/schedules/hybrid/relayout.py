"""Re-layout: the hidden states of all positions move from one sequence layout to another.

Linear attention works on consecutive positions, schedules of softmax attention may need them elsewhere, such as
``zigzag``. Between layers of both kinds each rank sends the hidden state of every position that gets another owner
straight to that rank, once; what stays is not sent. Backward, the gradients of hidden states go the opposite way.

All transfers are at one step, on a lane per distance of ranks, as in an AllToAll: a rank sends to all others at once,
and links or switches share their capacity among the transfers.

The block of a pair of ranks has all positions that go from the one to the other, in ascending order; that of a rank and
itself has those that stay. Its bytes are ``query_bytes_per_position`` of the workload per position.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import lcm

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray
from tasp_lab.core.choices import Pass
from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedule.blocks import Blocks, Field, Kind
from tasp_lab.schedule.calls import Contract, NoCalls, Passing, Task, check_blocks
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.proof import check_holdings
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.sequence_layout import SequenceLayout

RELAYOUT = "relayout"
"""The name of the schedule."""


def relayout(
    topology: Topology,
    workload: Workload,
    before: SequenceLayout,
    after: SequenceLayout,
    passes: Pass = "forward",
) -> tuple[Schedule, ...]:
    """The schedules that move hidden states from one layout to another, one per pass, in execution order.

    Parameters
    ----------
    topology : the ranks and links; transfers use its routes.
    workload : of any kind; it gives the bytes of the hidden state of a position.
    before, after : the layouts. If they are equal nothing is sent, and there are no steps.
    passes : forward, from `before` to `after`; backward, the gradients from `after` to `before`; or both.

    Raises `ScheduleError` for layouts of other sequences or ranks, for more ranks than can be proven, and for a
    transfer without a route.

    >>> from tasp_lab.topology.builders import full_mesh
    >>> from tasp_lab.workload.sequence_layout import contiguous, zigzag
    >>> layer = Workload(16, heads=2, head_dim=4, dtype="fp32")
    >>> (schedule,) = relayout(full_mesh(2), layer, contiguous(16, 2), zigzag(16, 2))
    >>> print(schedule.steps[0])
    0->1 lane 0 block 1
    1->0 lane 0 block 2
    >>> schedule.block_bytes            # of four positions each
    array([128, 128, 128, 128])
    """
    forward = RelayoutTask(workload, before, after)
    found = {"forward": (forward,), "backward": (forward.reverse,), "both": (forward, forward.reverse)}
    return tuple(_schedule(topology, task) for task in found[passes])


@dataclass(frozen=True)
class RelayoutTask(NoCalls):
    """What moves in a pass; there is nothing to compute.

    Parameters
    ----------
    workload : the layer whose hidden states they are.
    layout, result_layout : where the pass begins and where it ends; those of the backward pass are those of the forward
        pass swapped.
    is_backward : whether gradients of hidden states move.

    Raises `ScheduleError` unless both layouts are of the sequence of the workload and of as many ranks.
    """

    workload: Workload
    layout: SequenceLayout
    result_layout: SequenceLayout
    is_backward: bool = False

    def __post_init__(self) -> None:
        for each in (self.layout, self.result_layout):
            if each.sequence != self.workload.sequence:
                raise ScheduleError(
                    f"{RELAYOUT}: the {each.name} layout has {each.sequence} positions, expected the "
                    f"{self.workload.sequence} of the workload"
                )
        if self.layout.world_size != self.result_layout.world_size:
            raise ScheduleError(
                f"{RELAYOUT} from {self.layout.world_size} ranks ({self.layout.name}) to "
                f"{self.result_layout.world_size} ({self.result_layout.name}), expected equally many"
            )

    @property
    def reverse(self) -> RelayoutTask:
        """The other pass: the opposite way."""
        return RelayoutTask(self.workload, self.result_layout, self.layout, not self.is_backward)

    # -- blocks -------------------------------------------------------------------------------------------------------
    @cached_property
    def _columns(self) -> tuple[IntArray, IntArray, IntArray]:
        """Source, destination and number of positions of each block, in the order of sources and destinations."""
        counts = moved(self.layout, self.result_layout)
        source, destination = np.nonzero(counts)
        return source, destination, counts[source, destination]

    @property
    def source(self) -> IntArray:
        """The rank that has each block at the start."""
        return self._columns[0]

    @property
    def destination(self) -> IntArray:
        """The rank that has each block in the end."""
        return self._columns[1]

    @property
    def count(self) -> IntArray:
        """The number of positions of each block."""
        return self._columns[2]

    def positions(self, block: int) -> IntArray:
        """The positions of a block, ascending."""
        first = self.layout.positions(int(self.source[block]))
        last = self.result_layout.positions(int(self.destination[block]))
        return np.intersect1d(first, last, assume_unique=True)

    @property
    def _field(self) -> Field:
        layer = self.workload
        return Field("x", layer.dtype, (layer.batch, layer.heads, layer.head_dim))

    @property
    def blocks(self) -> Blocks:
        """The blocks of the schedule."""
        kind = Kind("gradients of hidden states" if self.is_backward else "hidden states", fields=(self._field,))
        none = np.zeros_like(self.count)
        return Blocks((kind,), none, self.count * self._field.size_bytes, none + 1)

    def held(self, rank: IntArray) -> BoolArray:
        """Bool array (world_size, blocks): the one rank that has each block."""
        found: BoolArray = rank == np.arange(self.layout.world_size)[:, None]
        return found

    # -- the task -----------------------------------------------------------------------------------------------------
    @property
    def dtype(self) -> str:
        return self.workload.dtype

    @property
    def passing(self) -> Passing:
        return "backward" if self.is_backward else "forward"

    @property
    def content(self) -> tuple[object, ...]:
        return RELAYOUT, self.workload, self.layout, self.result_layout, self.is_backward

    @property
    def contract(self) -> Contract:
        """Every block starts at its source and ends at its destination."""
        none = np.full_like(self.source, -1)
        return Contract(none, self.source, self.destination, np.zeros(len(none), dtype=np.bool_))

    def saved(self, forward: Task) -> tuple[IntArray, IntArray]:
        """Nothing: a backward pass needs nothing of its forward pass."""
        none = np.zeros(0, dtype=np.int64)
        return none, none

    def check(self, blocks: Blocks) -> None:
        """Raise `ScheduleError` unless these are the blocks of the task, up to their pools."""
        check_blocks(blocks, self.blocks)

    def existing_parts(self, blocks: IntArray) -> BoolArray:
        """The one part of each block."""
        return np.ones((len(blocks), 1), dtype=np.bool_)


def moved(before: SequenceLayout, after: SequenceLayout) -> IntArray:
    """How many positions go from each rank to each: an int array (world_size, world_size) from rank to rank.

    Positions of one residue modulo both strides lie in runs of one owner before and one after.

    >>> from tasp_lab.workload.sequence_layout import contiguous, striped
    >>> moved(contiguous(7, 2), striped(7, 2))
    array([[2, 2],
           [2, 1]])
    """
    counts = np.zeros((before.world_size, after.world_size), dtype=np.int64)
    period = lcm(before.stride, after.stride)
    for residue in range(min(period, before.sequence)):
        (first, source), (other, destination) = (_owners(each, residue) for each in (before, after))
        edge = np.union1d(first, other)
        before_edge = np.maximum(0, -((residue - np.append(edge, before.sequence)) // period))
        rank = (of[np.searchsorted(at, edge, side="right") - 1] for of, at in ((source, first), (destination, other)))
        np.add.at(counts, tuple(rank), np.diff(before_edge))
    return counts


def _owners(layout: SequenceLayout, residue: int) -> tuple[IntArray, IntArray]:
    """The spans with positions of a residue modulo a multiple of the stride: their starts, ascending, and ranks."""
    spans = sorted(
        (span.start, rank)
        for rank, each in enumerate(layout.position_spans)
        for span in each
        if (span.start - residue) % layout.stride == 0
    )
    found = np.array(spans, dtype=np.int64).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def _schedule(topology: Topology, task: RelayoutTask) -> Schedule:
    n = task.layout.world_size
    check_holdings(n, len(task.count))
    block = np.flatnonzero(task.source != task.destination)
    source, destination = task.source[block], task.destination[block]
    distances, lane = np.unique((destination - source) % n, return_inverse=True)
    return Schedule(
        name=RELAYOUT,
        world_size=n,
        lanes=max(len(distances), 1),
        blocks=task.blocks,
        initial=task.held(task.source),
        final=task.held(task.destination),
        steps=[Step(source, destination, lane, block)] if len(block) else [],
        task=task,
    ).on(topology)
