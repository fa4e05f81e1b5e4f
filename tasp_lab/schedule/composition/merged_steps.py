"""Steps of several schedules as those of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tasp_lab.core.arrays import IntArray
from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedule.blocks import Blocks, Kind
from tasp_lab.schedule.calls import BlockLists, Calls
from tasp_lab.schedule.proof import check_holdings
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedule.step import LazySteps, Step

NO_STEP = Step.of(())

Renumber = Callable[[IntArray], IntArray]
"""From old to new numbers."""


def check_world_sizes(schedules: Sequence[Schedule]) -> None:
    """Raise `ScheduleError` unless there is a schedule and all have one world size."""
    if not schedules:
        raise ScheduleError("nothing to compose, expected one schedule or more")
    first = schedules[0]
    for each in schedules[1:]:
        if each.world_size != first.world_size:
            raise ScheduleError(
                f"schedule {each.name!r} is for {each.world_size} ranks, {first.name!r} for {first.world_size}"
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
        ends = [begin + len(steps) for begin, steps in zip(self.begin, self.parts, strict=True)]
        return max([*ends, *(index + 1 for index in self.more)])

    def step(self, index: int) -> Step:
        found = [
            moved(steps[index - begin], first)
            for steps, begin, first in zip(self.parts, self.begin, self.first_block, strict=True)
            if 0 <= index - begin < len(steps)
        ]
        return joined([*found, self.more.get(index, NO_STEP)])
