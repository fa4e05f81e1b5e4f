"""Test patterns: runs of any schedule in which every byte can be checked, whatever its kernels compute.

Part p of block b is a string of pseudo-random bytes, and the content of a copy is the sum of its parts modulo 256.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from runtime.executor.actions import Progress, no_progress
from runtime.executor.copies import Work
from runtime.executor.executor import Executor
from runtime.executor.messages import Transport
from runtime.executor.sums import Parts
from runtime.executor.views import Views
from tasp_lab.core.errors import RunError
from tasp_lab.machines.machine import Compute
from tasp_lab.schedule.calls import Calls
from tasp_lab.schedule.rank_part import CallRow
from tasp_lab.schedule.schedule import Schedule

_GARBAGE = 0xA5
"""What the memory holds where nothing has been received yet."""


def pattern(block: int, size_bytes: int, part: int = 0) -> torch.Tensor:
    """The bytes of a part of a block: pseudo-random, the same on every rank, different for every part and block."""
    generator = np.random.Generator(np.random.Philox(key=(block << 32) + part))
    return torch.from_numpy(generator.integers(0, 256, size_bytes, dtype=np.uint8))


class PatternWork(Work):
    """The contents of blocks, kernel calls and bound copies of one rank.

    `checked`: what calls read is checked, and they add parts; each takes the time of `compute`, or none.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        device: str = "cpu",
        compute: Compute | None = None,
        checked: bool = True,
    ) -> None:
        self._schedule, self._rank, self._device, self.checked = schedule, rank, device, checked
        self._compute = compute
        self._sizes: list[int] = schedule.block_bytes.tolist()
        self._zeros: dict[int, torch.Tensor] = {}
        self._bound: dict[int, torch.Tensor] = {}
        self._initial: dict[int, torch.Tensor] = {}

    def sum(self, block: int, parts: Iterable[int]) -> torch.Tensor:
        """The sum of some parts of a block."""
        total = torch.zeros(self._sizes[block], dtype=torch.uint8)
        for part in parts:
            total += pattern(block, len(total), part)
        return total

    def complete(self, block: int) -> torch.Tensor:
        """The sum of all parts of a block."""
        task = self._schedule.task
        if task is None:
            return self.sum(block, range(int(self._schedule.blocks.parts[block])))
        return self.sum(block, np.flatnonzero(task.existing_parts(np.array([block]))[0]).tolist())

    def initial(self, block: int) -> torch.Tensor:
        """What the rank has of a block at the start; made once, as runs follow each other."""
        if block not in self._initial:
            parts, part = self._schedule.initial_part, -1
            if parts is not None:
                part = int(np.broadcast_to(parts, self._schedule.initial.shape)[self._rank, block])
            found = self.complete(block) if part < 0 else self.sum(block, [part])
            self._initial[block] = found.to(self._device)
        return self._initial[block]

    def added(self, row: CallRow) -> list[Parts]:
        """The parts that a kernel call adds to each of its blocks, as the task defines them."""
        task = self._schedule.task
        assert task is not None, "a schedule with calls has a task"
        operands = [list(each.blocks) for each in row.operands]
        effects = task.effects(Calls.of(row.kernel, [(self._rank, operands, row.params)], row.lane))
        sums = [self.sum(place.block, effects.part[effects.block == place.block].tolist()) for place in row.adds]
        return [Parts((place.block,), [each.to(self._device)]) for place, each in zip(row.adds, sums, strict=True)]

    def compute(self, row: CallRow, operands: Sequence[Views]) -> Sequence[Parts]:
        if self.checked:
            self.verify_reads(row, operands)
        if self._compute is not None:
            time.sleep(float(self._compute.time_s(row.shape)))
        return self.added(row) if self.checked else [Parts((at.block,), [self._nothing(at.block)]) for at in row.adds]

    def verify_reads(self, row: CallRow, operands: Sequence[Views]) -> None:
        """Check that all that a kernel call reads is complete, byte by byte. Raises `RunError`."""
        for operand, tensors in zip(row.operands, operands, strict=True):
            sizes = [self._sizes[block] for block in operand.blocks]
            contents = (content for data in tensors for content in torch.split(data.cpu(), sizes))
            for block, content in zip(operand.blocks, contents, strict=True):
                if not torch.equal(content, self.complete(block)):
                    raise RunError(
                        f"rank {self._rank}: step {row.step} computes with block {block}, which is not complete"
                    )

    def bound(self, blocks: Sequence[int]) -> Views:
        for block in blocks:
            if block not in self._bound:
                self._bound[block] = torch.full((self._sizes[block],), _GARBAGE, dtype=torch.uint8, device=self._device)
        found = [self._bound[block] for block in blocks]
        return [found[0] if len(found) == 1 else torch.cat(found)]

    def _nothing(self, block: int) -> torch.Tensor:
        """Zeros to add."""
        size = self._sizes[block]
        if size not in self._zeros:
            self._zeros[size] = torch.zeros(size, dtype=torch.uint8, device=self._device)
        return self._zeros[size]


class PatternTrial:
    """A run on test patterns."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        transport: Transport,
        compute: Compute | None = None,
        device: str = "cpu",
        progress: Progress = no_progress,
    ) -> None:
        self.work = PatternWork(schedule, rank, device, compute)
        self.executor = Executor(schedule, rank, transport, self.work, device, progress, as_bytes=True)

    def set_up(self, checked: bool) -> None:
        self.work.checked = checked
        fill(self.executor, self.work)

    def check(self) -> None:
        verify(self.executor, self.work)


def fill(executor: Executor, work: PatternWork) -> None:
    """Set what the rank has at the start; all else is garbage."""
    executor.memory.fill_(_GARBAGE)
    for block in np.flatnonzero(executor.schedule.initial[executor.part.rank]).tolist():
        _copy(executor, work, block).copy_(work.initial(block))


def verify(executor: Executor, work: PatternWork) -> None:
    """Check every copy that is promised at the end, and all data of the start, byte by byte. Raises `RunError`."""
    schedule, rank = executor.schedule, executor.part.rank
    for block in np.flatnonzero(schedule.final[rank] | schedule.initial[rank]).tolist():
        is_sum = bool(schedule.blocks.kind_of(block).join)
        is_moved = bool(schedule.initial[:, block].any())  # its parts are there at the start, no kernel call adds any
        if (is_sum and not schedule.final[rank, block]) or not (work.checked or is_moved):
            continue
        if not torch.equal(_copy(executor, work, block).cpu(), work.complete(block)):
            what = "the sum of its parts" if is_sum else "what its owner sent"
            raise RunError(f"rank {rank}: {schedule.blocks.name(block)} is not {what}")


def _copy(executor: Executor, work: PatternWork, block: int) -> torch.Tensor:
    """The bytes of a resident copy."""
    offset = executor.part.resident.get(block)
    return work.bound([block])[0] if offset is None else executor.copies.data(block, offset)
