"""The passes of attention layers that a step has, each in all groups of ranks at once."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray
from tasp_lab.prediction.training_step.plan import StepPlan
from tasp_lab.schedule.composition import replicated
from tasp_lab.schedule.composition.layers import LayerTask
from tasp_lab.schedule.model import LazySteps
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.attention.task import AttentionTask
from tasp_lab.schedules.build import attention_schedules, linear_schedules
from tasp_lab.schedules.hybrid.relayout import relayout
from tasp_lab.schedules.hybrid.stack import layouts_differ
from tasp_lab.schedules.linear.flops import least_flops
from tasp_lab.schedules.linear.task import LinearTask
from tasp_lab.schedules.registry import is_hybrid, names_of, options_for_layer
from tasp_lab.topology.derived import equal_parts
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.sequence_layout import SequenceLayout


@dataclass(frozen=True, eq=False)
class AttentionPass:
    """A pass of a layer, a re-layout, or an all-reduce of tensor groups, by all ranks.

    Parameters
    ----------
    schedule : of all groups together.
    made : bool array (world_size, blocks), what the call before it makes at each rank.
    flops : the FLOPs of the pass over all ranks that no schedule can do without; 0 of messages alone.
    layout : the positions of the ranks of a context group.
    """

    schedule: Schedule
    made: BoolArray
    flops: int
    layout: SequenceLayout


@dataclass(frozen=True, eq=False)
class LayerPasses:
    """The passes of a layer, forward and, if the step trains, backward."""

    forward: AttentionPass
    backward: AttentionPass | None


@dataclass(frozen=True, eq=False)
class AllPasses:
    """The passes of each letter of the model, and the re-layouts between letters, forward and backward."""

    layers: dict[str, LayerPasses]
    between: dict[tuple[str, str, bool], AttentionPass]
    groups: IntArray


def passes_of(plan: StepPlan, topology: Topology, groups: IntArray) -> AllPasses:
    """All passes of a step in context groups, an int array (groups, cp). Raises what builders raise."""
    part = part_of(topology, groups)
    layer, letters = plan.layer, sorted(set(plan.model.pattern))
    found: dict[str, LayerPasses] = {}
    for letter in letters:
        own = layer.of(letter) if layer.kind == "hybrid" else layer
        build = linear_schedules if letter == "L" else attention_schedules
        name, options = _of_letter(plan, letter)
        passes = [_in_groups(each, groups) for each in build(name, part, own, None, options)]
        found[letter] = LayerPasses(passes[0], passes[1] if plan.trains else None)
    between = {}
    for before, after in product(letters, letters):
        ends = found[before].forward.layout, found[after].forward.layout
        if before != after and layouts_differ(*ends):
            forward, backward = relayout(part, layer, *ends, "both")
            between[before, after, False] = _in_groups(forward, groups)
            between[before, after, True] = _in_groups(backward, groups)
    return AllPasses(found, between, groups)


def _of_letter(plan: StepPlan, letter: str) -> tuple[str, AttentionOptions]:
    """The schedule and the options of the layers of a letter."""
    if not is_hybrid(plan.schedule):
        return plan.schedule, plan.options
    return names_of(plan.schedule).of(letter), options_for_layer(plan.schedule, letter, plan.options)


def part_of(topology: Topology, groups: IntArray) -> Topology:
    """The topology of each of these groups of ranks. Raises `TopologyError` unless it is the same for all."""
    return topology if np.array_equal(groups, [range(topology.world_size)]) else equal_parts(topology, groups)


def in_groups(schedule: Schedule, groups: IntArray) -> Schedule:
    """The schedule of one group, in all groups at once."""
    if np.array_equal(groups, [range(groups.size)]):
        return schedule
    found = replicated(schedule, groups)
    if isinstance(found.steps, LazySteps):
        found.steps.keep()  # every layer of a phase goes through them
    return found


def _in_groups(one: Schedule, groups: IntArray) -> AttentionPass:
    """A pass of one group, in all of them."""
    task = one.task
    assert isinstance(task, LayerTask), "a pass of a layer has a task"
    schedule = in_groups(one, groups)
    assert schedule.task is not None, "a pass of a layer has a task"
    made = schedule.task.contract.inputs(schedule.world_size)
    return AttentionPass(schedule, made, len(groups) * _flops(task), task.layout)


def _flops(task: LayerTask) -> int:
    if isinstance(task, AttentionTask):
        return task.total_flops
    return least_flops(task) if isinstance(task, LinearTask) else 0
