"""The proof against real numbers: what is wrong after a change of a valid schedule must be refused, without exception.

An executor of numbers, which shares no code with the proof, judges every changed schedule. Harmless changes may be
accepted or refused. A sample of each kind of change is judged, by ``make test-all`` every single change.
``pytest -s`` prints the counts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pytest

from tasp_lab.core.arrays import BoolArray, IntArray
from tasp_lab.schedule.blocks import Blocks
from tasp_lab.schedule.calls import Calls, Contract, Effects
from tasp_lab.workload.kernel_shapes import ShapeRows
from tests.conftest import IS_FULL
from tests.support.attention_worlds import Layer, ring, small
from tests.support.mutations import Findings, campaign, is_accepted, is_right_in_orders
from tests.support.numeric_executor import CannotExecuteError, Kernel, is_right
from tests.support.numeric_tasks import SumNumbers, numbers_of
from tests.support.world import KernelCall, Row, Transfer, World, world
from tests.support.worlds import WORLDS, ring_all_reduce

MAX_PER_KIND, DOUBLE = (None, 100) if IS_FULL else (2, 20)
"""Single changes of each kind, and double changes, that are judged per world."""

MIN_WRONG = 25
"""Wrong changes that are tried per world, so that no world passes because nothing happened."""


@pytest.fixture(scope="module")
def total() -> Iterator[Findings]:
    """The verdicts on all worlds, printed by kind of change in the end."""
    found = Findings()
    yield found
    print()
    for kind in [*found.kinds, None]:
        print(f"{kind or 'all':40}{found.verdicts(kind)}")


@pytest.mark.parametrize("name", WORLDS)
def test_no_wrong_change_is_accepted(name: str, total: Findings) -> None:
    unchanged = WORLDS[name]()
    assert is_right_in_orders(unchanged, numbers_of(unchanged), 5)
    assert is_accepted(unchanged)
    found = campaign(unchanged, MAX_PER_KIND, DOUBLE)
    total.count += found.count
    print(f"\n{name}: {found.verdicts()}")
    assert not found.survivors
    assert found.of(right=False) >= MIN_WRONG


class TestExecutor:
    """The executor sees what it is there to see."""

    def test_a_missing_part(self) -> None:
        reduced = ring_all_reduce(3)
        shorter = replace(reduced, rows=(*reduced.rows[:-1], Row(reduced.rows[-1].transfers[1:])))
        assert is_right(reduced, numbers_of(reduced))
        assert not is_right(shorter, numbers_of(reduced))

    def test_a_part_twice(self) -> None:
        attention = ring(Layer.of(3, small(3)))
        last = attention.rows[-1]
        twice = replace(attention, rows=(*attention.rows[:-1], Row(last.transfers, (*last.calls, last.calls[0]))))
        assert not is_right(twice, numbers_of(attention))

    def test_a_buffer_is_overwritten(self) -> None:
        """Keys that come at step 0 into one of three buffers may be read until step 2."""
        attention = ring(Layer.of(4, small(4)))
        late = attention.rows[1].calls[0]
        for step, right in ((2, True), (3, False)):
            rows = [row._replace(calls=tuple(call for call in row.calls if call != late)) for row in attention.rows]
            rows[step] = rows[step]._replace(calls=(*rows[step].calls, late))
            assert is_right(replace(attention, rows=tuple(rows)), numbers_of(attention)) == right

    def test_a_race(self) -> None:
        """Rank 0 sends part 0 of a sum and computes part 1 at the same step: which of them does rank 1 receive?"""
        race = _two_parts(1)
        numbers = MadeNumbers([2])
        assert is_right(race, numbers)
        assert not all(is_right(race, numbers, random.Random(seed)) for seed in range(10))
        assert not is_accepted(race)

    def test_no_race(self) -> None:
        """As above, but rank 0 computes part 1 a step later."""
        assert all(is_right(_two_parts(2), MadeNumbers([2]), random.Random(seed)) for seed in range(100))
        assert is_accepted(_two_parts(2))


@dataclass(frozen=True)
class MadeSum:
    """The task of a sum whose parts are made from nothing, by the kernel ``make``."""

    dtype = "fp32"
    passing: Literal["forward", "backward"] = "forward"
    content: tuple[object, ...] = ()

    def effects(self, calls: Calls) -> Effects:
        return Effects(np.arange(len(calls)), np.zeros(len(calls), dtype=np.int64), calls.params[:, 0])

    @property
    def contract(self) -> Contract:
        """The sum starts nowhere; who has it in the end is up to the schedule."""
        nowhere = np.array([-1])
        return Contract(nowhere, nowhere, nowhere, np.zeros(1, dtype=np.bool_))

    def check(self, blocks: Blocks) -> None:
        """Any blocks will do."""

    def existing_parts(self, blocks: IntArray) -> BoolArray:
        return np.ones((len(blocks), 2), dtype=np.bool_)

    def flops(self, calls: Calls) -> IntArray:
        return np.ones(len(calls), dtype=np.int64)

    def shapes(self, calls: Calls) -> ShapeRows:
        return ShapeRows.of("dense", self.flops(calls))


class MadeNumbers(SumNumbers):
    def kernel(self, call: KernelCall) -> tuple[list[int], Kernel]:
        if call.kernel != "make":
            raise CannotExecuteError(call.kernel)
        return [0], lambda operands: [self.content(0, call.params[0])]


def _two_parts(step: int) -> World:
    """Rank 0 makes part 0 at step 0, sends it at step 1, and makes part 1 at this step; rank 1 makes part 1 itself."""
    made = [KernelCall("make", 0, (), (0,)), KernelCall("make", 0, (), (1,)), KernelCall("make", 1, (), (1,))]
    calls = [[made[0], made[2]], [], []]
    calls[step].append(made[1])
    nothing = np.zeros((2, 1), dtype=np.bool_)
    steps = list(zip([[], [Transfer(0, 1, 0, 0)], []], calls, strict=True))
    return world("two parts", Blocks.of_sums(np.array([8]), 2), nothing, ~nothing, steps, MadeSum())
