"""One schedule after another."""

from __future__ import annotations

from functools import reduce

import numpy as np

from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedule.blocks import Blocks
from tasp_lab.schedule.composition.merged_steps import ShiftedSteps, check_world_sizes
from tasp_lab.schedule.schedule import Schedule


def in_sequence(*schedules: Schedule) -> Schedule:
    """Schedules one after another: each starts with copies that the one before promises.

    All have the same blocks. A schedule that moves them as data may follow, or precede, one that adds up their parts.
    The result promises what the last schedule promises; copies that earlier ones promise are kept. It is one call of
    the communication library if all of them are.

    Raises `ScheduleError` for schedules of different world sizes, blocks or tasks, for one that starts with other
    copies, and if the result is not valid.

    >>> from tasp_lab.schedules.collectives.all_gather import ring_all_gather
    >>> from tasp_lab.schedules.collectives.ring_reductions import ring_reduce_scatter
    >>> from tasp_lab.topology.builders import full_mesh
    >>> all_reduce = in_sequence(ring_reduce_scatter(full_mesh(4), 64), ring_all_gather(full_mesh(4), 64))
    >>> all_reduce.name, len(all_reduce.steps)
    ('ring-reduce-scatter then ring', 6)
    """
    check_world_sizes(schedules)
    return reduce(_then, schedules)


def _then(first: Schedule, second: Schedule) -> Schedule:
    names = f"schedule {second.name!r} after {first.name!r}"
    tasks = [each.task for each in (first, second) if each.task is not None]
    if len({task.content for task in tasks}) > 1:
        raise ScheduleError(f"{names}: they compute different layers, expected the same one")
    missing = second.initial & ~first.final
    if missing.any() or (second.initial_part is not None and (second.initial_part >= 0).any()):
        rank, block = np.argwhere(missing if missing.any() else second.initial)[0].tolist()
        raise ScheduleError(
            f"{names}: rank {rank} starts with {second.blocks.name(block)}, expected complete copies that the first "
            "schedule promises"
        )
    kept = first.final if first.kept is None else first.final | first.kept
    return Schedule(
        name=f"{first.name} then {second.name}",
        world_size=first.world_size,
        lanes=max(first.lanes, second.lanes),
        blocks=_common_blocks(names, first.blocks, second.blocks),
        initial=first.initial,
        final=second.final,
        steps=ShiftedSteps((first.steps, second.steps), (0, len(first.steps)), (0, 0), {}),
        task=tasks[0] if tasks else None,
        fused=first.fused and second.fused,
        initial_part=first.initial_part,
        kept=kept if second.kept is None else kept | second.kept,
    )


def _common_blocks(names: str, first: Blocks, second: Blocks) -> Blocks:
    """The blocks of both schedules: equal, or of one of them data of the same sizes."""
    if np.array_equal(first.bytes, second.bytes):
        if (first.parts == 1).all() and not first.pools and not any(kind.join for kind in first.kinds):
            return second
        if (second.parts == 1).all() and not second.pools and not any(kind.join for kind in second.kinds):
            return first
        equal = first.kinds == second.kinds and np.array_equal(first.kind, second.kind)
        if equal and np.array_equal(first.parts, second.parts):
            return first
    raise ScheduleError(f"{names}: they have different blocks, expected the same ones")
