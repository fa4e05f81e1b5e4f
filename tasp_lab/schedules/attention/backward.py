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

**Steps.** Around a ring blocks are computed with at hop h in step h. The gradient leaves that rank at step h + 1 for
the next rank of the ring, which has computed its own part meanwhile. From the last contributing rank it returns to its
owner: directly, on a lane per distance, or along the rest of the ring. Back around it blocks need not reach their
owners, which hold them; their gradients do. n steps, with compute in each.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from tasp_lab.core.arrays import BoolArray
from tasp_lab.core.choices import Dataflow as Dataflow
from tasp_lab.core.errors import ScheduleError
from tasp_lab.rings.rings import Decomposition
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.circulation import Circulation
from tasp_lab.schedules.attention.forward import attention, attention_schedule, circulation_of, forward_steps
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.attention.task import KEYS, QUERIES, AttentionTask
from tasp_lab.schedules.attention.travel import RingLanes, Travel, TravelSteps, around, back, onward
from tasp_lab.schedules.registry import schedule
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload

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
    plan = min(plans, key=lambda plan: plan.forward.busiest_bytes + plan.backward.busiest_bytes)
    return options.build(lambda backward: attention_schedule(name, topology, plan[backward], options.buffers))


class Plan(NamedTuple):
    """A dataflow with its forward pass."""

    forward: TravelSteps
    backward: TravelSteps

    @property
    def starts_with_keys(self) -> bool:
        """Whether the backward pass starts where the forward pass leaves the keys."""
        return self.backward.travels[0].route.direction < 0


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
    return [plan for plan in plans if dataflow != "auto" or _has_links(plan, topology)]


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
    n = backward.world_size
    travel = Travel(backward, back(n), RingLanes.of(backward), trim=trim)
    return Plan(forward_steps([forward], trim=False), TravelSteps(travel, own=n - 1))


def _rotation(forward: TravelSteps, circulation: Circulation, topology: Topology, options: AttentionOptions) -> Plan:
    """Keys or queries go from their owners; with a direction that was asked for, gradients take no shortcut home."""
    single = len(circulation.rings) == 1 and options.direction == "auto"
    last, owner, n = circulation.at(circulation.last), circulation.at(0), circulation.world_size
    shortcuts = single and bool((topology.linked_pairs[last, owner] | (last == owner)).all())
    route = around(n, onward(n, shortcuts=shortcuts))
    return Plan(forward, TravelSteps(Travel(circulation, route, RingLanes.of(circulation), trim=options.trim)))


def _has_links(plan: Plan, topology: Topology) -> bool:
    """Whether the topology has every link that the blocks use; rings in reverse may lack some."""
    rings = plan.backward.travels[0].circulation.rings
    before = np.roll(rings, 1, axis=1)
    return not plan.starts_with_keys or bool((topology.linked_pairs[rings, before] | (rings == before)).all())
