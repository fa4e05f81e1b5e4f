"""A task whose calls say themselves what they add."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray
from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedule.blocks import Blocks
from tasp_lab.schedule.calls import BlockLists, Calls, Contract, Effects
from tasp_lab.workload.kernel_shapes import ShapeRows


@dataclass(frozen=True, eq=False)
class SmallTask:
    """Calls ``add`` read blocks and add one part, ``params = (block, part)``; bool array (blocks, parts) of those."""

    exists: BoolArray
    dtype: str = "fp32"
    passing: Literal["forward", "backward"] = "forward"

    @property
    def content(self) -> tuple[object, ...]:
        return ("small", self.exists.tobytes())

    def effects(self, calls: Calls) -> Effects:
        if calls.kernel != "add":
            raise ScheduleError(f"unknown kernel {calls.kernel!r}, expected 'add'")
        return Effects(np.arange(len(calls)), calls.params[:, 0], calls.params[:, 1])

    @property
    def contract(self) -> Contract:
        """Blocks may be anywhere at the start, and need not be anywhere in the end."""
        nowhere = np.full(len(self.exists), -1)
        return Contract(nowhere, nowhere, nowhere, np.ones(len(nowhere), dtype=np.bool_))

    def check(self, blocks: Blocks) -> None:
        """Any blocks will do."""

    def existing_parts(self, blocks: IntArray) -> BoolArray:
        return self.exists[blocks]

    def flops(self, calls: Calls) -> IntArray:
        return np.ones(len(calls), dtype=np.int64)

    def shapes(self, calls: Calls) -> ShapeRows:
        return ShapeRows.of("dense", self.flops(calls))


def adding(*rows: tuple[int, list[int], int, int]) -> Calls:
    """Calls from rows (rank, blocks that are read, block, part)."""
    return Calls(
        "add",
        np.array([row[0] for row in rows]),
        (BlockLists.of([row[1] for row in rows]),),
        np.array([row[2:] for row in rows]),
    )
