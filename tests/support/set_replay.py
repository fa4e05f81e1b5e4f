"""What becomes of sums and data, followed with Python's sets and counters: shares no code with the proof.

`ends_right` follows contents as bags of parts, as if numbers were added: a part that is joined twice counts twice. It
knows nothing of the rules; it says whether every promised copy has each part once in the end, and whether everything
that was read was complete. `SmallTask` is a task whose calls say themselves what they add.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray
from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedule.blocks import Blocks
from tasp_lab.schedule.calls import BlockLists, Calls, Contract, Effects
from tasp_lab.schedule.schedule import Schedule
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


def ends_right(schedule: Schedule) -> bool:
    """Whether a schedule that may be wrong does what it promises."""
    blocks = schedule.blocks
    count = len(blocks)
    whole = [
        Counter(
            part
            for part in range(int(blocks.parts[block]))
            if schedule.task is None or schedule.task.existing_parts(np.array([block]))[0, part]
        )
        for block in range(count)
    ]
    has: dict[tuple[int, int], Counter[int]] = {}
    for rank, block in np.argwhere(schedule.initial).tolist():
        part = -1
        if schedule.initial_part is not None:
            part = int(np.broadcast_to(schedule.initial_part, schedule.initial.shape)[rank, block])
        has[rank, block] = whole[block].copy() if part < 0 else Counter([part])
    came: dict[tuple[int, int], int] = {}
    for index, step in enumerate(schedule.steps):
        for at in [at for at, when in came.items() if when == index - blocks.buffers[at[1]]]:
            del came[at]
            has.pop(at, None)
        sent = []
        for source, destination, _, block in step.rows():
            if source == destination or not has.get((source, block)):
                return False
            sent.append(((destination, block), has[source, block].copy()))
        for calls in step.calls:
            for rank, operands, (block, part) in calls.rows():
                if any(has.get((rank, each)) != whole[each] for operand in operands for each in operand):
                    return False
                sent.append(((rank, block), Counter([part])))
        for (source, _, _, block), gives in zip(step.rows(), step.gives.tolist(), strict=True):
            if gives:
                has.pop((source, block), None)
                came.pop((source, block), None)
        for at, content in sent:
            if at in came and came[at] != index:
                return False  # it comes to a buffer that is another one
            stays = (
                blocks.buffers[at[1]] == 0
                or schedule.initial[at]
                or schedule.final[at]
                or (schedule.kept is not None and schedule.kept[at])
            )
            if not stays:
                came[at] = index
            has[at] = has.get(at, Counter()) + content
            if not blocks.kind_of(at[1]).join:
                has[at] = Counter([0])  # data that come twice are the same data
    return all(has.get((r, b), Counter()) == whole[b] for r, b in np.argwhere(schedule.final).tolist())
