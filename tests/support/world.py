"""A world: all that a schedule says, as plain rows that may be wrong. It becomes a `Schedule` when it is proven."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray
from tasp_lab.schedule.blocks import Blocks
from tasp_lab.schedule.calls import Calls, Task
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.collectives.conditions import check_collective
from tasp_lab.schedules.collectives.kinds import CollectiveKind


class Transfer(NamedTuple):
    source: int
    destination: int
    lane: int
    block: int
    gives: bool = False


class KernelCall(NamedTuple):
    kernel: str
    rank: int
    operands: tuple[tuple[int, ...], ...]
    params: tuple[int, ...] = ()


class Row(NamedTuple):
    """A step."""

    transfers: tuple[Transfer, ...] = ()
    calls: tuple[KernelCall, ...] = ()

    @property
    def groups(self) -> list[list[KernelCall]]:
        """The calls of each kernel, with equally many operands and parameters."""
        found: dict[tuple[str, int, int], list[KernelCall]] = {}
        for call in self.calls:
            found.setdefault((call.kernel, len(call.operands), len(call.params)), []).append(call)
        return list(found.values())

    @property
    def step(self) -> Step:
        """The step; calls are in the order of their groups."""
        groups = [
            Calls.of(group[0].kernel, [(call.rank, call.operands, call.params) for call in group])
            for group in self.groups
        ]
        return Step.of([tuple(map(int, each)) for each in self.transfers], groups)


@dataclass(frozen=True, eq=False)
class World:
    """The arguments of a `Schedule`, under the same names, with steps as rows."""

    name: str
    world_size: int
    lanes: int
    blocks: Blocks
    initial: BoolArray
    final: BoolArray
    rows: tuple[Row, ...]
    kept: BoolArray
    task: Task | None = None
    initial_part: IntArray | None = None
    lazy: tuple[tuple[Row, ...], Sequence[Step]] | None = None
    """Rows and the lazy steps that generated them, whose form may prove the schedule as long as the rows are these."""
    collective: tuple[CollectiveKind, int] | None = None
    """The collective that it is, with its `shard_bytes`, if it has no task."""

    def schedule(self) -> Schedule:
        """The schedule; `ScheduleError` if it is not valid, or not the collective."""
        found = Schedule(
            self.name, self.world_size, self.lanes, self.blocks, self.initial.copy(), self.final.copy(),
            self._steps(), self.task, initial_part=self.initial_part, kept=self.kept.copy(),
        )  # fmt: skip
        if self.collective is not None:
            check_collective(found, *self.collective)
        return found

    def _steps(self) -> Sequence[Step]:
        if self.lazy is not None and self.lazy[0] is self.rows:
            return self.lazy[1]
        return [row.step for row in self.rows]

    @classmethod
    def of(cls, schedule: Schedule) -> World:
        """The rows of a schedule."""
        rows = []
        for step in schedule.steps:
            sent = zip(step.rows(), step.gives.tolist(), strict=True)
            calls = [
                KernelCall(each.kernel, rank, tuple(map(tuple, operands)), tuple(params))
                for each in step.calls
                for rank, operands, params in each.rows()
            ]
            rows.append(Row(tuple(Transfer(*row, gives) for row, gives in sent), tuple(calls)))
        found = tuple(rows)
        kept = np.zeros_like(schedule.initial) if schedule.kept is None else schedule.kept
        return cls(
            schedule.name, schedule.world_size, schedule.lanes, schedule.blocks, schedule.initial, schedule.final,
            found, kept, schedule.task, schedule.initial_part, (found, schedule.steps),
        )  # fmt: skip

    @property
    def residents(self) -> BoolArray:
        """Bool array (world_size, blocks): which copies stay where they are."""
        without_pool = np.array([kind.pool is None for kind in self.blocks.kinds])[self.blocks.kind]
        found: BoolArray = self.initial | self.final | self.kept | without_pool
        return found


def world(
    name: str,
    blocks: Blocks,
    initial: BoolArray,
    final: BoolArray,
    steps: Iterable[tuple[Sequence[Transfer], Sequence[KernelCall]]],
    task: Task | None = None,
    initial_part: IntArray | None = None,
) -> World:
    """A world with as many lanes as its transfers use. Data of kinds without a pool are kept wherever they come."""
    rows = [Row(tuple(transfers), tuple(calls)) for transfers, calls in steps]
    lanes = 1 + max((each.lane for row in rows for each in row.transfers), default=0)
    stays = np.array([kind.pool is None and not kind.join for kind in blocks.kinds])[blocks.kind]
    kept = np.tile(stays, (len(initial), 1))
    return World(name, len(initial), lanes, blocks, initial, final, tuple(rows), kept, task, initial_part)


def table(world_size: int, blocks: int, pairs: Iterable[tuple[int, int]]) -> BoolArray:
    """Bool array (world_size, blocks) of (rank, block) pairs."""
    found = np.zeros((world_size, blocks), dtype=np.bool_)
    for rank, block in pairs:
        found[rank, block] = True
    return found
