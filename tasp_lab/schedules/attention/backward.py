"""Backward passes of attention. Three dataflows are provided for every schedule of
`tasp_lab.schedules.attention.forward`.

- ``rotate-kv``: keys and values start at their owners and circulate again, as in the forward pass; their gradients
  follow one step behind.
- ``rotate-kv-back``: keys and values start where the forward pass left them and circulate back. This saves one hop and
  the step in which only the last gradient moves (as in Transformer Engine and MindSpeed). The forward pass must not be
  trimmed, and its last keys and values are kept, which takes as much memory again as a rank's own.
- ``rotate-q``: keys and values are stationary; queries, the gradient of their result and two numbers per query and head
  circulate, and the gradient of queries follows (BurstAttention, arXiv:2403.09347). Sends less if there are about as
  many KV heads as heads.

``auto`` selects the dataflow that sends the fewest bytes, forward and backward together. For `tasp`, whose lanes use
separate links, it compares the busiest lane; for a single ring, the total. ``rotate-kv-back`` is not considered if the
links of a ring are one-way.

**Steps.** Blocks circulate, their gradients follow one step behind. `RotationSteps`: blocks start at their owners, as
in the forward pass, and are computed with at hop h in step h. The gradient leaves that rank at step h + 1 for the next
rank of the ring, which has computed its own part meanwhile. From the last contributing rank it returns to its owner:
directly, on a lane per distance, or along the rest of the ring. `RotationBackSteps`: blocks start at the last rank of
their ring, where an untrimmed forward pass left them, and circulate back. They need not reach their owners, which hold
them; their gradients do. n steps, with compute in each.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray
from tasp_lab.core.choices import Dataflow as Dataflow
from tasp_lab.core.errors import ScheduleError
from tasp_lab.rings.rings import Decomposition
from tasp_lab.schedule.calls import Calls
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedule.theorems import Paths
from tasp_lab.schedules.attention.circulation import Circulation
from tasp_lab.schedules.attention.forward import (
    AttentionSteps,
    CirculationSteps,
    Transfers,
    attention,
    attention_schedule,
    circulation_of,
    forward_steps,
)
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.attention.task import KEYS, QUERIES, AttentionTask
from tasp_lab.schedules.registry import schedule
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload


class BackwardSteps(CirculationSteps):
    """Base of both kinds of steps. All hops are those of `circulation`."""

    @abstractmethod
    def _moving(self, index: int) -> tuple[IntArray, int, int]:
        """The blocks that move at a step, their hop before and their hop after it."""

    @abstractmethod
    def _following(self, index: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """The blocks whose gradients move at a step; sources, destinations and lanes."""

    def transfers(self, index: int) -> Transfers:
        circulation = self.circulation
        moving, here, there = self._moving(index)
        moving = moving[circulation.order(moving, circulation.at(there, moving))]
        following, source, destination, lane = self._following(index)
        order = circulation.order(following, destination)
        return Transfers(
            np.concatenate([circulation.at(here, moving), source[order]]),
            np.concatenate([circulation.at(there, moving), destination[order]]),
            np.concatenate([circulation.ring_of[moving], lane[order]]),
            np.concatenate([circulation.blocks[moving], circulation.gradients[following[order]]]),
            np.repeat([False, True], [len(moving), len(following)]),
        )


class RotationSteps(BackwardSteps, trusted=True):
    """Blocks start at their owners.

    `direct`: gradients return to their owners in one hop, on a lane per distance on the ring, so that what a rank sends
    on a lane has one destination. `trim`: a block is dropped after the last rank whose mask needs it.
    """

    def __init__(self, circulation: Circulation, trim: bool, direct: bool) -> None:
        super().__init__(circulation)
        last = circulation.world_size - 1
        self._hops = circulation.hops(trim)
        self._return_hop = np.where(direct & (circulation.last < last), circulation.last, last)
        self._distances = np.unique(self._return_hop[(self._return_hop < last) & (circulation.last > 0)])

    @property
    def lanes(self) -> int:
        return super().lanes + len(self._distances)

    def __len__(self) -> int:
        needed = self.circulation.last > 0
        return max(1 + int(self._hops.max(initial=0)), 2 + int(self._return_hop[needed].max(initial=-1)))

    def paths(self) -> Paths:
        return self.circulation.paths(self.lanes, self._hops, self._return_hop)

    def _moving(self, index: int) -> tuple[IntArray, int, int]:
        return np.flatnonzero(self._hops > index), index, index + 1

    def _following(self, index: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        circulation, hop = self.circulation, index - 1
        following = np.flatnonzero((circulation.first > 0) & (circulation.first <= hop) & (hop <= self._return_hop))
        returns = self._return_hop[following] == hop
        source = circulation.at(hop, following)
        destination = circulation.at(np.where(returns, 0, hop + 1), following)
        direct = returns & (hop < circulation.world_size - 1)
        return_lane = len(circulation.rings) + np.searchsorted(self._distances, hop)
        return following, source, destination, np.where(direct, return_lane, circulation.ring_of[following])

    def _calls(self, index: int) -> tuple[Calls, ...]:
        return self.circulation.calls_at(index, np.flatnonzero(self._hops >= index))


class RotationBackSteps(BackwardSteps, trusted=True):
    """Blocks start at the last rank of their ring. `trim`: they stop at the first hop whose mask needs them."""

    def __init__(self, circulation: Circulation, trim: bool) -> None:
        super().__init__(circulation)
        first_needed = np.where(circulation.first > 0, circulation.first, circulation.world_size)
        self._until = first_needed if trim else np.ones(len(circulation.blocks), dtype=np.int64)

    @property
    def start(self) -> IntArray:
        """The rank at which each circulating block starts."""
        return self.circulation.at(self.circulation.world_size - 1)

    def __len__(self) -> int:
        return self.circulation.world_size

    def _hop(self, index: int) -> int:
        """The hop of all blocks at the beginning of a step."""
        return self.circulation.world_size - 1 - index

    def paths(self) -> Paths:
        return self.circulation.paths_back(self.lanes, self._until)

    def _moving(self, index: int) -> tuple[IntArray, int, int]:
        hop = self._hop(index)
        return np.flatnonzero(hop - 1 >= self._until), hop, hop - 1

    def _following(self, index: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        circulation, hop = self.circulation, self._hop(index) + 1
        following = np.flatnonzero(hop <= circulation.last)
        there = circulation.at(hop - 1, following)
        return following, circulation.at(hop, following), there, circulation.ring_of[following]

    def _calls(self, index: int) -> tuple[Calls, ...]:
        hop = self._hop(index)
        return self.circulation.calls_at(hop, np.flatnonzero(hop >= self._until))


DATAFLOWS: tuple[Dataflow, ...] = ("rotate-kv-back", "rotate-kv", "rotate-q")
"""All dataflows; of those that send equally many bytes, ``auto`` selects the first."""


CIRCULATION_OPTIONS = ("trim", "buffers", "dataflow", "gradient_dtype")
OVER_ONE_RING = (*CIRCULATION_OPTIONS, "direction")
"""The options of circulations, and of those around one ring."""


class Passes(NamedTuple):
    """A forward pass and a matching backward pass."""

    forward: Schedule
    backward: Schedule


def attention_passes(
    name: str, topology: Topology, workload: Workload, decomposition: Decomposition | None = None, **options: Any
) -> Passes:
    """Both passes of a schedule, see `tasp_lab.schedules.attention.forward.attention`.

    With ``rotate-kv-back`` the forward pass is not trimmed.

    >>> from tasp_lab.topology.builders import full_mesh
    >>> grouped = Workload(sequence=64, heads=8, kv_heads=2, head_dim=64)
    >>> forward, backward = attention_passes("tasp", full_mesh(8), grouped)
    >>> dataflow_of(backward), len(forward.steps), len(backward.steps)
    ('rotate-kv-back', 8, 8)
    >>> dataflow_of(attention_passes("tasp", full_mesh(8), Workload(sequence=64, heads=8, head_dim=64)).backward)
    'rotate-q'
    """
    forward, backward = _circulation(name, topology, workload, decomposition, AttentionOptions("both", **options))
    return Passes(forward, backward)


def _circulation(
    name: str, topology: Topology, workload: Workload, decomposition: Decomposition | None, options: AttentionOptions
) -> tuple[Schedule, ...]:
    """The requested passes, of which one is the backward pass."""
    plans = circulation_plans(name, topology, workload, options, decomposition)
    plan = min(plans, key=lambda plan: _compared_bytes(plan.forward) + _compared_bytes(plan.backward))

    def one_pass(backward: bool) -> Schedule:
        steps, copies = (plan.backward, plan.copies) if backward else (plan.forward, None)
        return attention_schedule(name, topology, steps, options.buffers, copies)

    return options.build(one_pass)


class Plan(NamedTuple):
    """A dataflow with its forward pass; `copies` are the blocks of others with which each rank starts backward."""

    forward: AttentionSteps
    backward: BackwardSteps
    copies: BoolArray | None = None


def circulation_plans(
    name: str,
    topology: Topology,
    workload: Workload,
    options: AttentionOptions,
    decomposition: Decomposition | None = None,
) -> list[Plan]:
    """The possible passes of a circulation with the dataflow of `options`, or with each one that has links for it.

    Raises `ScheduleError` as `attention_passes` does.
    """
    dataflow, trim = options.dataflow, options.trim
    dtype = options.wire_dtype(workload.dtype, backward=True, sums=True)
    circulation = partial(circulation_of, name, topology, workload, decomposition, direction=options.direction)
    forward = circulation()
    trimmed = forward_steps(forward, trim)
    keys = [] if dataflow == "rotate-q" else circulation("keys", dtype)
    plans: list[Plan] = []
    if dataflow in ("auto", "rotate-kv-back"):
        plans += [_rotation_back(*each, trim) for each in zip(forward, keys, strict=True)]
    if dataflow in ("auto", "rotate-kv"):
        plans += [_rotation(trimmed, each, topology, options) for each in keys]
    if dataflow in ("auto", "rotate-q"):
        plans += [_rotation(trimmed, each, topology, options) for each in circulation("queries", dtype)]
    return [plan for plan in plans if dataflow != "auto" or _is_linked(plan.backward, topology)]


@schedule(
    "ring-attention",
    "softmax",
    follows="ranks",
    moves="keys and values around one ring",
    layout="contiguous",
    options=OVER_ONE_RING,
    is_baseline=True,
)
@schedule(
    "zigzag-ring-attention",
    "softmax",
    follows="ranks",
    moves="the same",
    layout="zigzag",
    options=OVER_ONE_RING,
    is_baseline=True,
)
@schedule(
    "striped-ring-attention",
    "softmax",
    follows="ranks",
    moves="the same",
    layout="striped",
    options=OVER_ONE_RING,
    is_baseline=True,
)
@schedule(
    "half-each-way",
    "softmax",
    follows="ranks",
    moves="half of keys and values around one ring, the other half in reverse",
    options=CIRCULATION_OPTIONS,
)
@schedule(
    "tasp",
    "softmax",
    follows="ranks",
    moves="keys and values around all rings of the topology at once",
    options=CIRCULATION_OPTIONS,
    uses_rings=True,
)
def circulation_schedules(
    name: str,
    topology: Topology,
    workload: Workload,
    options: AttentionOptions,
    *,
    decomposition: Decomposition | None = None,
) -> tuple[Schedule, ...]:
    """The passes of a circulation, by name."""
    if options.passes == "forward":
        given = {each: value for each, value in vars(options).items() if each != "passes"}
        return (attention(name, topology, workload, decomposition, **given),)
    return _circulation(name, topology, workload, decomposition, options)


def check_fit(forward: Schedule, backward: Schedule) -> None:
    """Raise `ScheduleError` unless the backward pass can follow the forward pass."""
    before, after = forward.task, backward.task
    if not isinstance(before, AttentionTask) or not isinstance(after, AttentionTask):
        raise ScheduleError("expected a forward and a backward pass of attention, in this order")
    if before.is_backward or not after.is_backward:
        raise ScheduleError("expected a forward and a backward pass of attention, in this order")
    if before.layout != after.layout:
        raise ScheduleError(
            f"the forward pass has the layout {before.layout.name}, the backward pass {after.layout.name}"
        )
    own, same = after.saved(before)
    missing = backward.initial & ~after.owned(KEYS, QUERIES)
    missing[:, own] &= ~_left_behind(forward)[:, same]
    if missing.any():
        raise ScheduleError("the backward pass does not start where the forward pass leaves the keys")


def _left_behind(forward: Schedule) -> BoolArray:
    """The blocks at each rank after a forward pass, resident or in buffers: bool array (world_size, blocks)."""
    held, count = forward.initial | forward.left, len(forward.steps)
    buffers = forward.blocks.buffers
    for index in range(max(0, count - int(buffers.max(initial=0))), count):
        step = forward.steps[index]
        lies = index >= count - buffers[step.block]
        held[step.destination[lies], step.block[lies]] = True
    return held


def dataflow_of(schedule: Schedule) -> Dataflow | None:
    """The dataflow of a backward pass; None if neither side circulates."""
    task = schedule.task
    assert isinstance(task, AttentionTask), "a schedule of attention has a task"
    if schedule.blocks.buffers[task.blocks_of(QUERIES)[0]]:
        return "rotate-q"
    if not schedule.blocks.buffers[task.blocks_of(KEYS)[0]]:
        return None
    return "rotate-kv" if np.array_equal(schedule.initial, task.owned(KEYS, QUERIES)) else "rotate-kv-back"


def _rotation_back(forward: Circulation, backward: Circulation, trim: bool) -> Plan:
    """Keys return from where an untrimmed forward pass around the same rings left them."""
    steps = RotationBackSteps(backward, trim)
    return Plan(AttentionSteps(forward, trim=False), steps, _copies(backward, steps))


def _rotation(forward: AttentionSteps, circulation: Circulation, topology: Topology, options: AttentionOptions) -> Plan:
    """Keys or queries go from their owners; with a direction that was asked for, gradients take no shortcut home."""
    single = len(circulation.rings) == 1 and options.direction == "auto"
    direct = single and _owners_are_linked(circulation, topology)
    return Plan(forward, RotationSteps(circulation, options.trim, direct))


def _copies(circulation: Circulation, steps: RotationBackSteps) -> BoolArray:
    """The blocks of other ranks with which each rank starts: bool array (world_size, blocks)."""
    copies = np.zeros((circulation.world_size, len(circulation.task.tensor)), dtype=bool)
    copies[steps.start, circulation.blocks] = True
    return copies


def _is_linked(steps: BackwardSteps, topology: Topology) -> bool:
    """Whether the topology has every link that the blocks use; rings in reverse may lack some."""
    if not isinstance(steps, RotationBackSteps):
        return True
    rings = steps.circulation.rings
    before = np.roll(rings, 1, axis=1)
    return bool((topology.linked_pairs[rings, before] | (rings == before)).all())


def _owners_are_linked(circulation: Circulation, topology: Topology) -> bool:
    """Whether each gradient has a link to its owner from the rank at which it is complete."""
    last, owner = circulation.at(circulation.last), circulation.at(0)
    return bool((topology.linked_pairs[last, owner] | (last == owner)).all())


def _compared_bytes(steps: CirculationSteps) -> int:
    """The bytes by which plans are compared: all for a single ring, else those of the busiest lane of a rank."""
    by_place = steps.paths().bytes_by_place(steps.task.block_bytes)
    return int(by_place.sum() if len(by_place) == 1 else by_place.max(initial=0))
