"""LASP-2 (arXiv:2502.07563): linear attention with one AllGather of states, beside the attention within chunks.

Each rank makes the state of its chunk, which carries the chunk's total decay. The states circulate around a ring while
every rank attends within its chunk; then it folds the states of all chunks before its own and applies the sum to its
queries. The bytes that are sent do not depend on the sequence length. Forward pass only.
"""

from __future__ import annotations

import numpy as np

from tasp_lab.choices import DEFAULT_BUFFERS
from tasp_lab.linear_attention.task import (
    APPLY_STATE,
    ATTEND,
    CHUNK_STATES,
    FOLD,
    KEYS,
    MAKE_STATE,
    PREFIX_STATES,
    QUERIES,
    RESULTS,
    TENSORS,
    LinearTask,
)
from tasp_lab.schedule.blocks import Pool
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedule.step import Step
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.sequence_layout import contiguous


def lasp2(
    topology: Topology,
    workload: Workload,
    decay: float | tuple[float, ...] = 1.0,
    *,
    trim: bool = True,
    buffers: int = DEFAULT_BUFFERS,
) -> Schedule:
    """The forward pass.

    Parameters
    ----------
    topology, workload : the ranks and links, and the layer.
    decay : the decay per position, one number or one per KV head.
    trim : whether a state stops after the last rank that folds it; published is the AllGather, to all ranks.
    buffers : number of buffers for prefix states, 2 or more.

    Raises `ScheduleError` for a layer that is not causal, and with a window or packed documents.
    """
    decays = decay if isinstance(decay, tuple) else (decay,) * workload.kv_head_count
    task = LinearTask(workload, contiguous(workload.sequence, topology.world_size, workload.documents), decays)
    chunks = np.arange(len(task.owner))
    makers = chunks[:-1] if trim else chunks
    steps = [Step.of((), [task.calls(MAKE_STATE, makers)])]
    for hop in range(1, len(chunks)):
        moving = chunks[:-hop] if trim else chunks
        source, destination = (task.owner[(moving + place) % len(chunks)] for place in (hop - 1, hop))
        calls = (task.calls(ATTEND, chunks),) if hop == 1 else ()
        lane = np.zeros_like(moving)
        steps.append(Step(source, destination, lane, task.block(CHUNK_STATES, moving), calls=calls))
    steps += [Step.of((), [task.calls(kernel, chunks[1:])]) for kernel in (FOLD, APPLY_STATE)]
    kept = np.zeros((topology.world_size, len(task.tensor)), dtype=np.bool_)
    kept[np.ix_(task.owner, task.block(CHUNK_STATES, makers))] = (makers <= chunks[:, None]) | (not trim)
    schedule = Schedule(
        name="lasp2",
        world_size=topology.world_size,
        lanes=1,
        blocks=task.blocks({PREFIX_STATES: Pool(TENSORS[PREFIX_STATES], buffers)}),
        initial=task.owned(KEYS, QUERIES),
        final=task.owned(RESULTS),
        steps=steps if len(chunks) > 1 else [Step.of((), [task.calls(ATTEND, chunks)])],
        task=task,
        kept=kept,
    )
    schedule.check_routes(topology)
    return schedule
