"""One schedule after another, and the steps of several schedules as those of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import numpy as np

from tasp_lab.core.arrays import IntArray
from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedule.blocks import Blocks, Kind
from tasp_lab.schedule.calls import BlockLists, Calls
from tasp_lab.schedule.model import LazySteps, Step
from tasp_lab.schedule.proof import check_holdings
from tasp_lab.schedule.schedule import Schedule

NO_STEP = Step.of(())

Renumber = Callable[[IntArray], IntArray]
"""From old to new numbers."""


def check_world_sizes(schedules: Sequence[Schedule]) -> None:
    """Raise `ScheduleError` unless there is a schedule and all have one world size."""
    if not schedules:
        raise ScheduleError("nothing to compose, expected one schedule or more")
    first = schedules[0]
    for schedule in schedules[1:]:
        if schedule.world_size != first.world_size:
            raise ScheduleError(
                f"schedule {schedule.name!r} is for {schedule.world_size} ranks, {first.name!r} for {first.world_size}"
            )


def check_size(name: str, world_size: int, blocks: int) -> None:
    """Raise `ScheduleError` if a schedule of this size is too large to replay, before any memory is taken."""
    try:
        check_holdings(world_size, blocks)
    except ScheduleError as error:
        raise ScheduleError(f"schedule {name!r}: {error}") from None


def check_no_calls(schedule: Schedule, why: str) -> None:
    """Raise `ScheduleError` if a schedule has a task."""
    if schedule.task is not None:
        raise ScheduleError(f"schedule {schedule.name!r} has kernel calls, {why}")


def joined(steps: Sequence[Step]) -> Step:
    """What several steps do, as one step; the transfers of earlier ones come first."""
    used = [step for step in steps if len(step) or step.calls]
    if len(used) < 2:
        return used[0] if used else NO_STEP
    columns = zip(*((s.source, s.destination, s.lane, s.block, s.gives) for s in used), strict=True)
    source, destination, lane, block, gives = (np.concatenate(each) for each in columns)
    return Step(source, destination, lane, block, gives, tuple(calls for step in used for calls in step.calls))


def renumbered(step: Step, block: Renumber, rank: Renumber) -> Step:
    """A step with other numbers of blocks and of ranks, in its transfers and in its calls."""
    calls = tuple(
        Calls(
            each.kernel,
            rank(each.rank),
            tuple(BlockLists(lists.offset, block(lists.block)) for lists in each.operands),
            each.params,
            each.lane,
        )
        for each in step.calls
    )
    return Step(rank(step.source), rank(step.destination), step.lane, block(step.block), step.gives, calls)


def moved(step: Step, first_block: int, ranks: IntArray | None = None) -> Step:
    """A step with the numbers of its blocks increased by `first_block`, and with ranks replaced by ``ranks[rank]``."""
    return renumbered(step, lambda block: block + first_block, lambda rank: rank if ranks is None else ranks[rank])


def tables_joined(tables: Sequence[Blocks]) -> Blocks:
    """The blocks of several tables, one after another; equal kinds become one."""
    kinds: list[Kind] = list(dict.fromkeys(kind for table in tables for kind in table.kinds))
    kind = [np.array([kinds.index(each) for each in table.kinds], dtype=np.int64)[table.kind] for table in tables]
    sizes, parts = ([getattr(table, name) for table in tables] for name in ("bytes", "parts"))
    return Blocks(kinds, np.concatenate(kind), np.concatenate(sizes), np.concatenate(parts))


@dataclass(frozen=True, eq=False)
class ShiftedSteps(LazySteps):
    """The steps of several schedules, those of schedule i from step ``begin[i]`` on.

    `first_block` is added to the numbers of their blocks. Further steps, `more`, are joined to those at their index.
    """

    parts: Sequence[Sequence[Step]]
    begin: Sequence[int]
    first_block: Sequence[int]
    more: dict[int, Step]

    def __len__(self) -> int:
        return self._length

    @cached_property
    def _length(self) -> int:
        return max([*self._ends, *(index + 1 for index in self.more)])

    @cached_property
    def _ends(self) -> list[int]:
        return [begin + len(steps) for begin, steps in zip(self.begin, self.parts, strict=True)]

    def step(self, index: int) -> Step:
        steps_now = [
            moved(steps[index - begin], first)
            for steps, begin, end, first in zip(self.parts, self.begin, self._ends, self.first_block, strict=True)
            if begin <= index < end
        ]
        return joined([*steps_now, self.more.get(index, NO_STEP)])


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
        kept=first.left if second.kept is None else first.left | second.kept,
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
