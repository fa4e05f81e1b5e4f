"""Test patterns: block contents for runs that test only data movement, so that every bit can be checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from runtime.executor.executor import Executor
from tasp_lab.errors import RunError
from tasp_lab.schedule.buffer_layout import CallRow
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.workload.kernel_calls import Call


def test_pattern(block: int, size_bytes: int) -> torch.Tensor:
    """The bytes of a block in a test run: pseudo-random, the same on every rank, different for every block."""
    generator = np.random.Generator(np.random.Philox(key=block))
    return torch.from_numpy(generator.integers(0, 256, size_bytes, dtype=np.uint8))


test_pattern.__test__ = False  # type: ignore[attr-defined]


def fill(executor: Executor) -> None:
    """Put the test pattern into every block that the rank holds at the start, and zeros everywhere else."""
    for block, place in _zeroed_blocks(executor):
        place.copy_(test_pattern(block, place.numel()))


def fill_with_parts(executor: Executor) -> None:
    """Put the rank's part of the sum into every block that it holds at the start, and zeros everywhere else."""
    for block, place in _zeroed_blocks(executor):
        place.copy_(_sum_of_parts(block, [executor.part.rank], place.numel()))


def _zeroed_blocks(executor: Executor) -> Iterator[tuple[int, torch.Tensor]]:
    """Zero the memory; the blocks that the rank holds at the start, with their bytes."""
    executor.memory.zero_()
    for block, offset in executor.part.resident.items():
        yield block, executor.block(block, offset)


def expected_sums(executor: Executor) -> dict[int, torch.Tensor]:
    """The final blocks of the rank, each the sum of the parts of all ranks that hold one at the start."""
    schedule = executor.schedule
    sizes: list[int] = schedule.block_bytes.tolist()
    return {
        block: _sum_of_parts(block, np.flatnonzero(schedule.initial[:, block]).tolist(), sizes[block])
        for block in np.flatnonzero(schedule.final[executor.part.rank]).tolist()
    }


def verify_sums(executor: Executor, expected: Mapping[int, torch.Tensor]) -> None:
    """Check every final sum of the rank, bit for bit. Raises `RunError`."""
    for block, total in expected.items():
        if not torch.equal(executor.block(block, executor.part.kept[block]).cpu(), total):
            raise RunError(f"rank {executor.part.rank}: block {block} is not the sum of its parts")


def verify(executor: Executor) -> None:
    """Check every block that the rank keeps, bit for bit. Raises `RunError`."""
    for block, offset in executor.part.kept.items():
        _check(executor, block, offset)


def verify_reads(executor: Executor, row: CallRow) -> None:
    """Check the blocks that a kernel call reads, bit for bit. Raises `RunError`."""
    offset = row.offset
    for block, _ in row.reads:
        offset += _check(executor, block, offset)


def part_of_gradient(executor: Executor, row: CallRow, at: int) -> torch.Tensor:
    """The contribution of a kernel call to the gradient of its `at`-th circulating block: a sum modulo 256."""
    gradient = row.adds[at]
    size_bytes = executor.block(gradient.block, gradient.offset).numel()
    return _sum_of_parts(gradient.block, _stationary_blocks(executor.schedule, row.call, at), size_bytes)


def verify_gradients(executor: Executor) -> None:
    """Check that every gradient of the rank contains each of its contributions exactly once. Raises `RunError`."""
    schedule = executor.schedule
    parts: dict[int, list[int]] = {block: [] for block in executor.part.gradients}
    for step in schedule.steps:
        for call in step.calls:
            assert schedule.task is not None, "a schedule with calls has a task"
            gradients = schedule.task.gradient_blocks(schedule.task.sides(call)[0]).tolist()
            for at, block in enumerate(gradients):
                if block in parts:
                    parts[block] += _stationary_blocks(schedule, call, at)
    for block, offset in executor.part.gradients.items():
        found = executor.block(block, offset).cpu()
        if not torch.equal(found, _sum_of_parts(block, parts[block], found.numel())):
            raise RunError(f"rank {executor.part.rank}: gradient block {block} is not the sum of its parts")


def _stationary_blocks(schedule: Schedule, call: Call, at: int) -> list[int]:
    """The stationary blocks that attend to the `at`-th circulating block of a call, or to which it attends."""
    task = schedule.task
    assert task is not None, "a schedule with calls has a task"
    low, high = task.call_bands(call)
    unmasked = low <= high
    chosen = unmasked[:, at] if task.circulating_side == "keys" else unmasked[at]
    blocks: list[int] = task.sides(call)[1][chosen].tolist()
    return blocks


def _sum_of_parts(summed: int, parts: Sequence[int], size_bytes: int) -> torch.Tensor:
    """The sum of parts of a block modulo 256; parts are stationary blocks for a gradient, else ranks."""
    total = torch.zeros(size_bytes, dtype=torch.uint8)
    for part in parts:
        total += test_pattern((summed << 32) + part, size_bytes)
    return total


def _check(executor: Executor, block: int, offset: int) -> int:
    found = executor.block(block, offset).cpu()
    if not torch.equal(found, test_pattern(block, found.numel())):
        raise RunError(f"rank {executor.part.rank}: block {block} is not what its owner sent")
    return found.numel()
