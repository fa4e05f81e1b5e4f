"""Each rule of the proof: a small schedule that breaks it and no other, and what is said of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from tasp_lab.core.arrays import BoolArray, IntArray
from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedule.blocks import Blocks, Kind, Pool
from tasp_lab.schedule.calls import Calls
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.schedule import Schedule
from tests.support.small_task import SmallTask, adding

DATUM, SUM, MOVING, MOVING_SUM = range(4)
"""The blocks of all small worlds: what comes of the first two stays, the others are received into three buffers."""

PARTS = 3
EXISTING = np.array([[1, 0, 0], [1, 1, 1]] * 2, dtype=bool)
WITHOUT_MIDDLE = np.array([[1, 0, 0], [1, 0, 1]] * 2, dtype=bool)
"""Bool arrays (blocks, parts): the parts that exist."""

KINDS = (
    Kind("datum"),
    Kind("sum", "add"),
    Kind("moving", "", Pool("arrivals", 3)),
    Kind("moving sum", "add", Pool("arrivals", 3)),
)


@dataclass
class World:
    """Three ranks and the four blocks; what each rank has at the start and in the end."""

    steps: list[Step] = field(default_factory=list)
    initial: BoolArray = field(default_factory=lambda: np.zeros((3, 4), dtype=bool))
    final: BoolArray = field(default_factory=lambda: np.zeros((3, 4), dtype=bool))
    part: IntArray = field(default_factory=lambda: np.full((3, 4), -1))
    kept: BoolArray = field(default_factory=lambda: np.zeros((3, 4), dtype=bool))
    exists: BoolArray = field(default_factory=EXISTING.copy)
    with_task: bool = True

    def starts(self, rank: int, block: int, part: int = -1) -> World:
        self.initial[rank, block], self.part[rank, block] = True, part
        return self

    def ends(self, rank: int, block: int) -> World:
        self.final[rank, block] = True
        return self

    def keeps(self, rank: int, block: int) -> World:
        self.kept[rank, block] = True
        return self

    def step(self, transfers: Sequence[Sequence[int]] = (), calls: Sequence[Calls] = ()) -> World:
        self.steps.append(Step.of(transfers, calls))
        return self

    def schedule(self, **changes: Any) -> Schedule:
        sizes, kinds = np.full(4, 8), np.arange(4)
        blocks = Blocks(KINDS, kinds, sizes, np.array([1, PARTS, 1, PARTS]))
        data: dict[str, Any] = {
            "blocks": blocks,
            "initial": self.initial,
            "final": self.final,
            "steps": self.steps,
            "initial_part": self.part,
            "kept": self.kept,
            "task": SmallTask(self.exists) if self.with_task else None,
        }
        return Schedule("small", 3, 2, **(data | changes))


def world() -> World:
    return World()


def spread_sum(block: int = SUM) -> World:
    """Each rank has its part of a sum."""
    return world().starts(0, block, 0).starts(1, block, 1).starts(2, block, 2)


RIGHT = {
    "data are copied": world()
    .starts(0, DATUM)
    .ends(2, DATUM)
    .step([(0, 1, 0, DATUM)])
    .keeps(1, DATUM)
    .step([(1, 2, 0, DATUM)]),
    "data are given": world().starts(0, DATUM).ends(2, DATUM).step([(0, 2, 0, DATUM, 1)]),
    "data in a buffer are used until the step before the third": world()
    .starts(0, MOVING)
    .ends(2, MOVING)
    .step([(0, 1, 0, MOVING)])
    .step()
    .step([(1, 2, 0, MOVING)]),
    "what was overwritten comes again": world()
    .starts(0, MOVING)
    .step([(0, 1, 0, MOVING)])
    .step()
    .step()
    .step([(0, 1, 0, MOVING)]),
    "what was given may come again at once, and then it stays for its own time": world()
    .starts(0, MOVING)
    .ends(2, MOVING)
    .ends(1, SUM)
    .step([(0, 1, 0, MOVING)])
    .step([(1, 2, 0, MOVING, 1), (0, 1, 0, MOVING)])
    .step(calls=[adding((1, [MOVING], SUM, 0))])
    .step(calls=[adding((1, [MOVING], SUM, 1), (1, [MOVING], SUM, 2))]),
    "a sum is gathered": spread_sum().ends(0, SUM).step([(1, 0, 0, SUM, 1), (2, 0, 0, SUM, 1)]),
    "a sum is reduced along a chain": spread_sum().ends(2, SUM).step([(0, 1, 0, SUM, 1)]).step([(1, 2, 0, SUM, 1)]),
    "partial sums are copied": spread_sum()
    .ends(0, SUM)
    .ends(1, SUM)
    .ends(2, SUM)
    .step([(0, 1, 0, SUM), (1, 0, 0, SUM)])
    .step([(0, 2, 0, SUM), (2, 0, 0, SUM), (2, 1, 0, SUM)]),
    "a sum is computed": world()
    .ends(1, SUM)
    .step(calls=[adding((1, [], SUM, 0), (1, [], SUM, 2))])
    .step(calls=[adding((1, [], SUM, 1))]),
    "a sum is received into buffers and computed there": world()
    .ends(2, MOVING_SUM)
    .step(calls=[adding((0, [], MOVING_SUM, 0))])
    .step([(0, 1, 0, MOVING_SUM, 1)], [adding((1, [], MOVING_SUM, 1))])
    .step([(1, 2, 0, MOVING_SUM, 1)], [adding((2, [], MOVING_SUM, 2))]),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_accepted(name: str) -> None:
    schedule = RIGHT[name].schedule()
    assert schedule.transfers == sum(map(len, schedule.steps))


WRONG: dict[str, list[tuple[World, str]]] = {
    "P1": [
        (world().step([(1, 2, 0, DATUM)]), "rank 1 does not hold block 0 (datum) when the step begins"),
        (
            world().step([(1, 2, 1, SUM)]),
            "step 0: rank 1 sends block 1 (sum) to rank 2 on lane 1: rank 1 holds no part of",
        ),
        (
            world().starts(0, DATUM).step([(0, 1, 0, DATUM), (1, 2, 0, DATUM)]),
            "step 0: rank 1 sends block 0 (datum) to rank 2 on lane 0: rank 1 does not hold",
        ),
        (
            world().starts(0, MOVING).step([(0, 1, 0, MOVING)]).step().step().step([(1, 2, 0, MOVING)]),
            "step 3: rank 1 sends block 2 (moving) to rank 2 on lane 0: rank 1 does not hold",
        ),
        (
            world().starts(0, DATUM).ends(1, DATUM).step([(0, 1, 0, DATUM, 1)]).step([(0, 2, 0, DATUM)]),
            "step 1: rank 0 sends block 0 (datum) to rank 2 on lane 0: rank 0 does not hold",
        ),
        (world().starts(0, DATUM).step([(0, 0, 0, DATUM)]), "to rank 0 on lane 0: a rank sends to itself"),
        *(
            (world().starts(0, DATUM).step([row]), "there are 3 ranks, 2 lanes and 4 blocks")
            for row in ((0, 3, 0, 0), (-1, 0, 0, 0), (0, 1, 2, 0), (0, 1, 0, 4), (0, 1, -1, 0))
        ),
    ],
    "P2": [
        (
            world().ends(1, SUM).step(calls=[adding((1, [MOVING], SUM, 0))]),
            "step 0: rank 1 computes with block 2 (moving), which it does not hold when the step begins",
        ),
        (
            world().starts(0, MOVING).step([(0, 1, 0, MOVING)], [adding((1, [MOVING], SUM, 0))]),
            "step 0: rank 1 computes with block 2 (moving), which it does not hold",
        ),
        (
            spread_sum().step(calls=[adding((1, [SUM], DATUM, 0))]),
            "step 0: rank 1 computes with block 1 (sum), of which it lacks part 0 when the step begins",
        ),
        (
            world().step(calls=[adding((1, [4], SUM, 0))]),
            "step 0: rank 1 computes with block 4, there are 4 blocks",
        ),
        (world().step(calls=[adding((3, [], SUM, 0))]), "step 0: rank 3 computes, there are 3 ranks"),
    ],
    "P3": [
        (
            world().step(calls=[replace(adding((1, [], SUM, 0)), kernel="attend")]),
            "step 0: unknown kernel 'attend', expected 'add'",
        ),
        (
            world().step().step(calls=[adding((1, [], SUM, 3))]),
            "step 1: rank 1 computes part 3 of block 1, which does not exist",
        ),
        (world().step(calls=[adding((1, [], 4, 0))]), "rank 1 computes part 0 of block 4, which does not exist"),
        (
            replace(world(), exists=WITHOUT_MIDDLE).step(calls=[adding((1, [], SUM, 1))]),
            "step 0: rank 1 computes part 1 of block 1 (sum), which does not exist",
        ),
        (
            replace(world(), with_task=False).step(calls=[adding((2, [], SUM, 0))]),
            "step 0: rank 2 computes, but there is no task to compute",
        ),
    ],
    "P4": [
        (
            world().starts(0, DATUM).starts(1, DATUM).step([(0, 1, 0, DATUM)]),
            "step 0: rank 0 sends block 0 (datum) to rank 1 on lane 0: rank 1 already holds block 0 (datum)",
        ),
        (
            world().starts(0, MOVING).step([(0, 1, 0, MOVING)]).step([(0, 1, 0, MOVING)]),
            "step 1: rank 0 sends block 2 (moving) to rank 1 on lane 0: rank 1 already holds block 2 (moving)",
        ),
        (
            world().starts(0, DATUM).starts(1, DATUM).ends(2, DATUM).step([(0, 2, 0, DATUM), (1, 2, 1, DATUM)]),
            "to rank 2 on lane 0: rank 2 receives block 0 (datum) twice in this step",
        ),
        (
            spread_sum().ends(1, SUM).step([(0, 1, 0, SUM), (2, 1, 0, SUM, 1)]).step([(0, 1, 0, SUM, 1)]),
            "step 1: rank 0 sends block 1 (sum) to rank 1 on lane 0: rank 1 already has part 0 of it",
        ),
        (
            spread_sum().ends(2, SUM).step([(1, 0, 0, SUM)]).step([(0, 2, 0, SUM, 1), (1, 2, 1, SUM, 1)]),
            "step 1: rank 1 sends block 1 (sum) to rank 2 on lane 1: rank 2 receives part 1 of block 1 (sum) twice",
        ),
        (
            spread_sum().ends(2, SUM).step([(0, 2, 0, SUM, 1), (0, 1, 1, SUM, 1)]),
            "step 0: rank 0 sends block 1 (sum) to rank 1 on lane 1: rank 0 gives it twice in this step",
        ),
        (
            spread_sum().step(calls=[adding((1, [], SUM, 1))]),
            "step 0: rank 1 computes part 1 of block 1 (sum), which it already has",
        ),
        (
            world().step(calls=[adding((1, [], SUM, 1), (1, [], SUM, 2)), adding((1, [], SUM, 1))]),
            "step 0: rank 1 computes part 1 of block 1 (sum) twice in this step",
        ),
        (
            world().starts(1, DATUM).step(calls=[adding((1, [], DATUM, 0))]),
            "step 0: rank 1 computes block 0 (datum), which it already has",
        ),
    ],
    "P5": [
        (
            world().step(calls=[adding((0, [], MOVING_SUM, 0))]).step(calls=[adding((0, [], MOVING_SUM, 1))]),
            "step 1: rank 0 computes part 1 of block 3 (moving sum), of which it still has a copy of an earlier step",
        ),
        (
            world()
            .step(calls=[adding((0, [], MOVING_SUM, 0), (1, [], MOVING_SUM, 1))])
            .step([(0, 1, 0, MOVING_SUM, 1)]),
            "to rank 1 on lane 0: rank 1 still has a copy of an earlier step in a buffer",
        ),
    ],
    "P6": [
        (
            world().starts(1, SUM, 0).ends(1, SUM).ends(2, SUM).step([(1, 2, 0, SUM)], [adding((1, [], SUM, 1))]),
            "step 0: rank 1 computes parts of block 1 (sum), which stays there and is sent or read at the same step",
        ),
        (
            world().starts(1, SUM, 0).ends(1, SUM).step([(1, 2, 0, SUM, 1)], [adding((1, [], SUM, 1))]),
            "step 0: rank 1 computes parts of block 1 (sum), which stays there and is sent or read at the same step",
        ),
        (
            replace(world(), exists=np.array([[1, 0, 0], [0, 0, 0]] * 2, dtype=bool)).step(
                calls=[adding((1, [SUM], SUM, 1))]
            ),
            "step 0: rank 1 computes parts of block 1 (sum), which stays there and is sent or read at the same step",
        ),
    ],
    "P7": [
        (
            world().step(calls=[adding((2, [], MOVING_SUM, 1))]).step().step().step(),
            "step 3: rank 2 overwrites the buffer of block 3 (moving sum), an incomplete sum, and loses part 1",
        ),
        (
            world().step(calls=[adding((2, [], MOVING_SUM, 1))]),
            "after the last step: rank 2 has 1 of the 3 parts of block 3 (moving sum), expected none, part 1 is left",
        ),
        (
            spread_sum().step([(0, 1, 0, SUM, 1)]),
            "after the last step: rank 1 has 2 of the 3 parts of block 1 (sum), expected none, part 0 is left",
        ),
        (
            world().starts(0, DATUM).step([(0, 1, 0, DATUM)]),
            "after step 0: rank 1 should not have received block 0 (datum)",
        ),
        (
            world().step(calls=[adding((1, [], SUM, 0), (1, [], SUM, 1), (1, [], SUM, 2))]),
            "after the last step: rank 1 has 3 of the 3 parts of block 1 (sum), expected none, part 0 is left",
        ),
    ],
    "P8": [
        (
            world().starts(0, DATUM).ends(1, DATUM).ends(2, DATUM).step([(0, 1, 0, DATUM)]),
            "after step 0: rank 2 never received block 0 (datum)",
        ),
        (
            world().ends(2, SUM).step(calls=[adding((2, [], SUM, 2), (2, [], SUM, 0))]),
            "rank 2 has 2 of the 3 parts of block 1 (sum), expected all of them, part 1 is missing",
        ),
    ],
}
"""For each rule, worlds that break it, and what is said."""


@pytest.mark.parametrize(("rule", "at"), [(rule, at) for rule in WRONG for at in range(len(WRONG[rule]))])
def test_what_breaks_a_rule_is_named(rule: str, at: int) -> None:
    wrong, told = WRONG[rule][at]
    with pytest.raises(ScheduleError, match=re.escape(told)):
        wrong.schedule()


def test_initial_parts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ScheduleError, match=r"'small': rank 2 starts with part 3 of block 1 \(sum\), which has 3"):
        world().starts(2, SUM, 3).schedule()
    with pytest.raises(ScheduleError, match=r"rank 1 starts with part 1 of block 0 \(datum\), which has 1"):
        world().starts(1, DATUM, 1).schedule()
    with pytest.raises(ScheduleError, match="rank 0 starts with part -2 of block 1"):
        world().starts(0, SUM, -2).schedule()
    with pytest.raises(ScheduleError, match=r"rank 0 starts with part 1 of block 1 \(sum\), which does not exist"):
        replace(world(), exists=WITHOUT_MIDDLE).starts(0, SUM, 1).schedule()
    with pytest.raises(
        ScheduleError, match=r"initial_part has the shape \(2, 1\), expected one that broadcasts to \(3, 4\)"
    ):
        world().schedule(initial_part=np.zeros((2, 1), dtype=np.int64))


def test_a_complete_sum_lacks_what_does_not_exist() -> None:
    """Part 1 does not exist; a sum of no parts is complete everywhere."""
    exists = np.array([[1, 0, 0], [1, 0, 1], [1, 0, 0], [0, 0, 0]], dtype=bool)
    found = replace(world(), exists=exists).starts(0, SUM).ends(2, SUM).ends(1, MOVING_SUM)
    assert found.step([(0, 1, 0, SUM)]).keeps(1, SUM).step([(1, 2, 0, SUM)]).schedule().transfers == 2


def test_what_takes_too_much_memory_is_refused_at_once() -> None:
    def sums(parts: int, ranks: int, blocks: int) -> Schedule:
        everything = np.broadcast_to(np.ones(blocks, dtype=bool), (ranks, blocks))
        return Schedule(
            "large", ranks, 1, Blocks.of_sums(np.ones(blocks, dtype=np.int64), parts), everything, everything, []
        )

    with pytest.raises(ScheduleError, match=r"'large': block 0 \(sum\) has 2147483647 parts, too many to replay"):
        sums(2**31 - 1, 1, 1)
    with pytest.raises(ScheduleError, match="'large': sets of 17179869184 parts in all are too many to replay"):
        sums(2**24, 1024, 1)
    with pytest.raises(ScheduleError, match="sets of 17179869184 parts in all are too many to replay"):
        sums(2**24, 1, 1024)
    with pytest.raises(ScheduleError, match="'large': 65536 ranks and 32768 blocks are too many to replay"):
        sums(1, 2**16, 2**15)
