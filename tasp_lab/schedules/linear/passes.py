"""What the schedules of linear attention share: a pass seen from either end, and how its states end at their owners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray
from tasp_lab.schedule.blocks import Pool
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.linear.task import (
    ADVANCE,
    APPLY_GRADIENT_STATE,
    APPLY_STATE,
    ATTEND,
    CHUNK_GRADIENTS,
    CHUNK_STATES,
    COMBINE,
    COMBINE_BACK,
    DIFFERENTIATE,
    FOLD,
    FOLD_BACK,
    GATE_GRADIENTS,
    GATES,
    KEY_GRADIENTS,
    KEYS,
    MAKE_GRADIENT_STATE,
    MAKE_STATE,
    PREFIX_STATES,
    QUERIES,
    QUERY_GRADIENTS,
    RESULTS,
    RETREAT,
    SUFFIX_GRADIENTS,
    LinearTask,
)
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.sequence_layout import SequenceLayout, contiguous


def chunk_layout(workload: Workload, world_size: int) -> SequenceLayout:
    """One chunk per rank, also of packed documents: those are told apart by the kernels."""
    return contiguous(workload.sequence, world_size)


@dataclass(frozen=True)
class StateTensors:
    """The tensors and kernels of the states of a pass: forward from the first chunk on, backward from the last one."""

    chunk: int
    summed: int
    make: str
    within: str
    fold: str
    chain: str
    combine: str
    apply: str
    ahead: int


FORWARD = StateTensors(CHUNK_STATES, PREFIX_STATES, MAKE_STATE, ATTEND, FOLD, ADVANCE, COMBINE, APPLY_STATE, 1)
BACKWARD = StateTensors(
    CHUNK_GRADIENTS,
    SUFFIX_GRADIENTS,
    MAKE_GRADIENT_STATE,
    DIFFERENTIATE,
    FOLD_BACK,
    RETREAT,
    COMBINE_BACK,
    APPLY_GRADIENT_STATE,
    -1,
)


def states_of(task: LinearTask) -> StateTensors:
    """The tensors and kernels of the pass of a task."""
    return BACKWARD if task.is_backward else FORWARD


def receivers(task: LinearTask) -> IntArray:
    """The chunks to which a sum of states of others is applied, ascending."""
    return np.flatnonzero(task.has_suffix if task.is_backward else task.has_prefix)


def makers(task: LinearTask) -> IntArray:
    """The chunks whose states others need, ascending."""
    return np.flatnonzero(task.has_prefix if task.is_backward else task.has_suffix)


def layer_schedule(
    name: str,
    topology: Topology,
    task: LinearTask,
    steps: Sequence[Step],
    *,
    lanes: int = 1,
    pools: Mapping[int, Pool] | None = None,
    kept: BoolArray | None = None,
    has_states: bool = True,
) -> Schedule:
    """The schedule in which each rank starts with its queries, keys and gates and ends with what they yield.

    Parameters
    ----------
    pools : by tensor, what circulates.
    kept : bool array (world_size, blocks), copies that are left in the end.
    has_states : whether sums of states are left at their owners, and backward prefix states are there from the start.

    Raises `ScheduleError` if a transfer has no route.
    """
    initial = task.owned(KEYS, QUERIES, GATES)
    left = np.zeros_like(initial) if kept is None else kept
    if has_states:
        left = left | task.owned(states_of(task).summed)
        initial |= task.owned(PREFIX_STATES) & task.is_backward
    return Schedule(
        name=name,
        world_size=topology.world_size,
        lanes=lanes,
        blocks=task.blocks(pools),
        initial=initial,
        final=task.owned(RESULTS, KEY_GRADIENTS, QUERY_GRADIENTS, GATE_GRADIENTS),
        steps=steps,
        task=task,
        kept=left,
    ).on(topology)
