"""A pass of a hybrid: its layers one after another, with a re-layout between those whose sequence layouts differ.

Hidden states enter the stack in the layout of its first layer and leave it in that of its last layer. If these differ,
nothing is added: what comes before the stack and behind it, embeddings and losses, works on any positions.

Between layers each rank makes the inputs of the next one from the results of the one before, or what moves to another
layout from results, in a ``dense`` call without FLOPs (`tasp_lab.schedule.composition.layers`).
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from tasp_lab.core.arrays import BoolArray
from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedule.composition import stacked
from tasp_lab.schedule.composition.layers import LayerTask
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedule.stacked_task import StackedTask
from tasp_lab.schedules.attention.task import AttentionTask
from tasp_lab.schedules.hybrid.relayout import RelayoutTask, moved, relayout
from tasp_lab.schedules.linear.task import LinearTask
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.sequence_layout import SequenceLayout


def stacked_layers(name: str, topology: Topology, workload: Workload, layers: list[Schedule]) -> Schedule:
    """Passes of layers as one schedule, in the order in which they are computed, with re-layouts between them.

    Raises `ScheduleError` where a re-layout has too many blocks to verify.
    """
    found = layers[:1]
    moves: dict[tuple[int, int], Schedule | None] = {}
    for before, after in pairwise(layers):
        key = id(before), id(after)
        if key not in moves:
            try:
                moves[key] = _between(topology, workload, before, after)
            except ScheduleError as error:
                raise ScheduleError(f"schedule {name!r}: {error}") from None
        between = moves[key]
        found += [after] if between is None else [between, after]
    return stacked(found, name=name)


def _between(topology: Topology, workload: Workload, before: Schedule, after: Schedule) -> Schedule | None:
    """The re-layout between two passes, None if each rank has the same positions in both."""
    first, second = _task(before), _task(after)
    if not layouts_differ(first.result_layout, second.layout):
        return None
    passing = first.passing
    ends = (first.result_layout, second.layout) if passing == "forward" else (second.layout, first.result_layout)
    return relayout(topology, workload, *ends, passing)[0]


def _task(schedule: Schedule) -> LayerTask:
    assert isinstance(schedule.task, LayerTask), "a pass of a layer has a task"
    return schedule.task


def layouts_differ(before: SequenceLayout, after: SequenceLayout) -> bool:
    """Whether some rank has other positions in one layout than in the other.

    >>> from tasp_lab.workload.sequence_layout import contiguous, zigzag
    >>> layouts_differ(contiguous(8, 2), zigzag(8, 2)), layouts_differ(contiguous(8, 1), zigzag(8, 1))
    (True, False)
    """
    if before.position_spans == after.position_spans:
        return False
    counts = moved(before, after)
    return bool((counts - np.diag(np.diag(counts))).any())


def layers_of(schedule: Schedule) -> list[tuple[LayerTask, BoolArray]]:
    """The layers of a pass of a hybrid, in the order in which they are computed, without re-layouts.

    Each with the copies of its blocks that may be there before it, a bool array (world_size, blocks of the layer):
    those at the start, and what a forward pass in the stack leaves.
    """
    task = schedule.task
    if not isinstance(task, StackedTask):
        return [(_task(schedule), schedule.initial)]
    found = []
    for each, first, end in zip(task.layers, task.first_block, task.first_block[1:], strict=False):
        if not isinstance(each, RelayoutTask):
            assert isinstance(each, LayerTask), "a stack of layers"
            left = each.contract.saved & ~task.contract.saved[first:end]
            found.append((each, schedule.initial[:, first:end] | left))
    return found


def gradient_dtype_of(schedule: Schedule) -> str | None:
    """The dtype of gradients that a pass sends, None forward; of a hybrid that of softmax layers, if there are any."""
    tasks = [task for task, _ in layers_of(schedule)]
    first = next((task for task in tasks if isinstance(task, AttentionTask)), tasks[0])
    assert isinstance(first, AttentionTask | LinearTask), "there are no other layers"
    return first.gradient_dtype


def relayout_bytes(schedule: Schedule) -> int:
    """The bytes that the re-layouts of a pass send, over all ranks."""
    task = schedule.task
    if not isinstance(task, StackedTask):
        return 0
    moves = np.array([isinstance(each, RelayoutTask) for each in task.layers])
    sent = (step.block[moves[task.layer_of(step.block)]] for step in schedule.steps)
    return sum(int(schedule.block_bytes[blocks].sum()) for blocks in sent)
