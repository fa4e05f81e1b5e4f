"""Backward passes of attention as schedules, by one of three ways; every schedule of `tasp_lab.attention` has them all.

- ``onward``: keys and values start at home and travel again, as forward; their gradients follow.
- ``reversed``: they start where the forward pass has left them and travel back, which saves a hop and the time in
  which the last gradient would travel alone (as in Transformer Engine and MindSpeed). The forward pass must not be
  trimmed, and what it leaves is kept: as much again as a rank's own keys and values.
- ``queries``: keys and values stay; queries, the gradient of their result and two numbers per query and head travel,
  and the gradient of queries follows (BurstAttention, arXiv:2403.09347). Pays where there are about as many KV heads
  as heads.

``auto`` takes the way that sends fewest bytes, forward and backward together. With `tasp`, whose lanes have links of
their own, those of the busiest lane count; with a single ring those of all ranks. Where the links of a ring go one way
only, ``reversed`` is no choice.
"""

from __future__ import annotations

from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from tasp_lab.arrays import BoolArray
from tasp_lab.attention import USUAL_ROOMS, attention_schedule, forward_steps, journeys_of
from tasp_lab.attention_steps import AttentionSteps, JourneySteps
from tasp_lab.backward_steps import BackwardSteps, OnwardSteps, ReversedSteps
from tasp_lab.decomposition import Decomposition
from tasp_lab.errors import ScheduleError
from tasp_lab.journeys import Journeys
from tasp_lab.schedule import Schedule
from tasp_lab.topology import Topology
from tasp_lab.workload import Workload

Way = Literal["auto", "onward", "reversed", "queries"]

WAYS: tuple[Way, ...] = ("reversed", "onward", "queries")
"""In the order in which they are preferred where they send as much."""


class Passes(NamedTuple):
    """A forward and a backward pass that fit each other."""

    forward: Schedule
    backward: Schedule


def attention_passes(
    name: str,
    topology: Topology,
    workload: Workload,
    decomposition: Decomposition | None = None,
    *,
    way: Way = "auto",
    gradient_dtype: str = "fp32",
    trim: bool = True,
    rooms: int = USUAL_ROOMS,
) -> Passes:
    """Both passes of the attention schedule of that name.

    Parameters
    ----------
    name, topology, workload, decomposition, rooms : see `tasp_lab.attention.attention`.
    way : how the backward pass goes, see the module.
    gradient_dtype : of the gradients that travel: ``fp32``, or ``input`` for that of the layer.
    trim : whether blocks stop where nobody sees them any more; a ``reversed`` way needs a forward pass without.

    Raises `ScheduleError` for unknown names and for more blocks than can be proved.

    >>> from tasp_lab.builders import full_mesh
    >>> grouped = Workload(sequence=64, heads=8, kv_heads=2, head_dim=64)
    >>> forward, backward = attention_passes("tasp", full_mesh(8), grouped)
    >>> way_of(backward), len(forward.steps), len(backward.steps)
    ('reversed', 8, 8)
    >>> way_of(attention_passes("tasp", full_mesh(8), Workload(sequence=64, heads=8, head_dim=64)).backward)
    'queries'
    """
    if way != "auto" and way not in WAYS:
        raise ScheduleError(f"unknown way {way!r} of a backward pass, expected auto or one of {', '.join(WAYS)}")
    if gradient_dtype not in ("fp32", "input"):
        raise ScheduleError(f"unknown gradient dtype {gradient_dtype!r}, expected fp32 or input")
    dtype = workload.dtype if gradient_dtype == "input" else gradient_dtype
    journeys = partial(journeys_of, name, topology, workload, decomposition)
    forward = journeys()
    trimmed = forward_steps(forward, trim)
    keys = [] if way == "queries" else journeys("keys", dtype)
    plans: list[_Plan] = []
    if way in ("auto", "reversed"):
        plans += [_reversed(*each, trim) for each in zip(forward, keys, strict=True)]
    if way in ("auto", "onward"):
        plans += [_onward(trimmed, each, topology, trim) for each in keys]
    if way in ("auto", "queries"):
        plans += [_onward(trimmed, each, topology, trim) for each in journeys("queries", dtype)]
    if way == "auto":
        plans = [plan for plan in plans if _is_linked(plan.backward, topology)]
    plan = min(plans, key=lambda plan: _bytes_that_count(plan.forward) + _bytes_that_count(plan.backward))
    return Passes(
        attention_schedule(name, topology, plan.forward, rooms),
        attention_schedule(name, topology, plan.backward, rooms, plan.copies),
    )


def check_fit(forward: Schedule, backward: Schedule) -> None:
    """Raise `ScheduleError` unless these are a forward pass and a backward pass that may follow it."""
    before, after = forward.task, backward.task
    if before is None or after is None or before.is_backward or not after.is_backward:
        raise ScheduleError("expected a forward and a backward pass of attention, in this order")
    if before.placement != after.placement:
        raise ScheduleError(
            f"the forward pass has the placement {before.placement.name}, the backward pass {after.placement.name}"
        )
    if way_of(backward) != "reversed":
        return
    keys = slice(before.first_query)
    alike = before.first_query == after.first_query and np.array_equal(before.start[keys], after.start[keys])
    if not alike or (backward.initial[:, keys] & ~_left_behind(forward)[:, keys]).any():
        raise ScheduleError("the backward pass does not start where the forward pass leaves the keys")


def _left_behind(forward: Schedule) -> BoolArray:
    """What lies at each rank when a forward pass has ended: what it started with, and what is in its rooms."""
    held, count = forward.initial.copy(), len(forward.steps)
    for index in range(max(0, count - (forward.rooms or count)), count):
        step = forward.steps[index]
        held[step.destination, step.block] = True
    return held


def way_of(schedule: Schedule) -> Way:
    """The way that a backward pass goes."""
    task = schedule.task
    assert task is not None, "a schedule of attention has a task"
    if task.travellers == "queries":
        return "queries"
    return "onward" if np.array_equal(schedule.initial, task.owned) else "reversed"


class _Plan(NamedTuple):
    """One way to go backward, and forward before it; `copies` is what each rank then starts with beside its own."""

    forward: AttentionSteps
    backward: BackwardSteps
    copies: BoolArray | None = None


def _reversed(forward: Journeys, backward: Journeys, trim: bool) -> _Plan:
    """Back from where an untrimmed forward pass around the same rings has left the keys."""
    steps = ReversedSteps(backward, trim)
    return _Plan(AttentionSteps(forward, trim=False), steps, _copies(backward, steps))


def _onward(forward: AttentionSteps, journeys: Journeys, topology: Topology, trim: bool) -> _Plan:
    direct = len(journeys.rings) == 1 and _is_linked_home(journeys, topology)
    return _Plan(forward, OnwardSteps(journeys, trim, direct))


def _copies(journeys: Journeys, steps: ReversedSteps) -> BoolArray:
    """What each rank starts with beside its own."""
    copies = np.zeros_like(journeys.task.owned)
    copies[steps.start, journeys.blocks] = True
    return copies


def _is_linked(steps: BackwardSteps, topology: Topology) -> bool:
    """Whether there are links the way that blocks go along their rings."""
    if not isinstance(steps, ReversedSteps):
        return True
    rings = steps.journeys.rings
    before = np.roll(rings, 1, axis=1)
    return bool((topology.linked_pairs[rings, before] | (rings == before)).all())


def _is_linked_home(journeys: Journeys, topology: Topology) -> bool:
    """Whether there is a link from where each gradient is complete to its owner."""
    last, owner = journeys.at(journeys.last), journeys.at(0)
    return bool((topology.linked_pairs[last, owner] | (last == owner)).all())


def _bytes_that_count(steps: JourneySteps) -> int:
    """What all ranks send where there is one ring, else what one rank sends on the busiest of their lanes."""
    journeys = steps.journeys
    sizes = journeys.task.block_bytes
    ledger = np.zeros((journeys.world_size, steps.lanes), dtype=np.int64)
    for index in range(len(steps)):
        source, _, lane, block = steps.transfers(index)
        np.add.at(ledger, (source, lane), sizes[block])
    return int(ledger.max(initial=0) if len(journeys.rings) > 1 else ledger.sum())
