"""Test patterns: runs of any schedule in which every byte can be checked, whatever its kernels compute.

Part p of block b is a string of pseudo-random bytes, and the content of a copy is the sum of its parts modulo 256.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from runtime.executor.executor import Executor
from runtime.executor.message_io import Progress, no_progress
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


class Patterns:
    """The contents of blocks in a schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._sizes: list[int] = schedule.block_bytes.tolist()

    def size_bytes(self, block: int) -> int:
        return self._sizes[block]

    def sum(self, block: int, parts: Iterable[int]) -> torch.Tensor:
        """The sum of some parts of a block."""
        total = torch.zeros(self._sizes[block], dtype=torch.uint8)
        for part in parts:
            total += pattern(block, len(total), part)
        return total

    def complete(self, block: int) -> torch.Tensor:
        """The sum of all parts of a block."""
        return self.sum(block, self._existing(block))

    def initial(self, rank: int, block: int) -> torch.Tensor:
        """What a rank has of a block at the start."""
        schedule = self._schedule
        if schedule.initial_part is None:
            return self.complete(block)
        part = int(np.broadcast_to(schedule.initial_part, schedule.initial.shape)[rank, block])
        return self.complete(block) if part < 0 else self.sum(block, [part])

    def _existing(self, block: int) -> Sequence[int]:
        task = self._schedule.task
        if task is None:
            return range(int(self._schedule.blocks.parts[block]))
        found: list[int] = np.flatnonzero(task.existing_parts(np.array([block]))[0]).tolist()
        return found

    def added(self, rank: int, row: CallRow) -> list[torch.Tensor]:
        """What a kernel call adds to each of its blocks: the parts that the task says."""
        task = self._schedule.task
        assert task is not None, "a schedule with calls has a task"
        operands = [list(each.blocks) for each in row.operands]
        effects = task.effects(Calls.of(row.kernel, [(rank, operands, row.params)], row.lane))
        return [self.sum(place.block, effects.part[effects.block == place.block].tolist()) for place in row.adds]


class PatternTrial:
    """A run on test patterns; a kernel call takes the time of `compute`, or none."""

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


class PatternWork:
    """The kernel calls and the bound copies of one rank; `checked`: what calls read is checked, and they add parts."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        device: str = "cpu",
        compute: Compute | None = None,
        checked: bool = True,
    ) -> None:
        self.patterns, self._rank, self._device, self.checked = Patterns(schedule), rank, device, checked
        self._compute = compute
        self._zeros: dict[int, torch.Tensor] = {}
        self._bound: dict[int, torch.Tensor] = {}
        self._initial: dict[int, torch.Tensor] = {}

    def initial(self, block: int) -> torch.Tensor:
        """What the rank has of a block at the start; made once, as runs follow each other."""
        if block not in self._initial:
            self._initial[block] = self.patterns.initial(self._rank, block).to(self._device)
        return self._initial[block]

    def compute(self, row: CallRow, operands: Sequence[Views]) -> Sequence[Parts]:
        if self.checked:
            verify_reads(self._rank, self.patterns, row, operands)
        if self._compute is not None:
            time.sleep(float(self._compute.time_s(row.shape)))
        if not self.checked:
            return [Parts((place.block,), [self._nothing(self.patterns.size_bytes(place.block))]) for place in row.adds]
        found = self.patterns.added(self._rank, row)
        return [Parts((place.block,), [each.to(self._device)]) for place, each in zip(row.adds, found, strict=True)]

    def arranged(self, fields: Views) -> Views:
        return fields

    def bound(self, blocks: Sequence[int]) -> Views:
        for block in blocks:
            if block not in self._bound:
                self._bound[block] = self._garbage(block)
        found = [self._bound[block] for block in blocks]
        return [found[0] if len(found) == 1 else torch.cat(found)]

    def sent(self, block: int) -> Views:
        return self.bound([block])

    def _nothing(self, size_bytes: int) -> torch.Tensor:
        """Zeros to add."""
        if size_bytes not in self._zeros:
            self._zeros[size_bytes] = torch.zeros(size_bytes, dtype=torch.uint8, device=self._device)
        return self._zeros[size_bytes]

    def _garbage(self, block: int) -> torch.Tensor:
        size = self.patterns.size_bytes(block)
        return torch.full((size,), _GARBAGE, dtype=torch.uint8, device=self._device)


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
        if (is_sum and not schedule.final[rank, block]) or not (work.checked or _is_moved(schedule, block)):
            continue
        if not torch.equal(_copy(executor, work, block).cpu(), work.patterns.complete(block)):
            what = "the sum of its parts" if is_sum else "what its owner sent"
            raise RunError(f"rank {rank}: {schedule.blocks.name(block)} is not {what}")


def _is_moved(schedule: Schedule, block: int) -> bool:
    """Whether the parts of a block are there at the start, so that no kernel call adds any."""
    return bool(schedule.initial[:, block].any())


def verify_reads(rank: int, patterns: Patterns, row: CallRow, operands: Sequence[Views]) -> None:
    """Check that all that a kernel call reads is complete, byte by byte. Raises `RunError`."""
    for operand, tensors in zip(row.operands, operands, strict=True):
        sizes = [patterns.size_bytes(block) for block in operand.blocks]
        contents = (content for data in tensors for content in torch.split(data.cpu(), sizes))
        for block, content in zip(operand.blocks, contents, strict=True):
            if not torch.equal(content, patterns.complete(block)):
                raise RunError(f"rank {rank}: step {row.step} computes with block {block}, which is not complete")


def _copy(executor: Executor, work: PatternWork, block: int) -> torch.Tensor:
    """The bytes of a resident copy."""
    offset = executor.part.resident.get(block)
    return work.bound([block])[0] if offset is None else executor.copies.data(block, offset)
