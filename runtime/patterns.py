"""Test patterns: what blocks hold when nothing but their way is of interest, so that every bit can be checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from runtime.executor import Executor
from tasp_lab.calls import Call
from tasp_lab.errors import RunError
from tasp_lab.rooms import CallRow
from tasp_lab.schedule import Schedule


def test_pattern(block: int, size_bytes: int) -> torch.Tensor:
    """The bytes of a block in a test run: pseudo-random, the same on every rank, different for every block."""
    generator = np.random.Generator(np.random.Philox(key=block))
    return torch.from_numpy(generator.integers(0, 256, size_bytes, dtype=np.uint8))


test_pattern.__test__ = False  # type: ignore[attr-defined]


def fill(executor: Executor) -> None:
    """Put the test pattern into the blocks that the rank holds at the start and zeros everywhere else."""
    for block, place in _emptied(executor):
        place.copy_(test_pattern(block, place.numel()))


def fill_with_parts(executor: Executor) -> None:
    """Put the rank's own part of the sum into every block of which it has one, and zeros everywhere else."""
    for block, place in _emptied(executor):
        place.copy_(_sum_of_parts(block, [executor.part.rank], place.numel()))


def _emptied(executor: Executor) -> Iterator[tuple[int, torch.Tensor]]:
    """The blocks that the rank holds at the start, all bytes of its buffer being 0."""
    executor.buffer.zero_()
    for block, offset in executor.part.home.items():
        yield block, executor.block(block, offset)


def expected_sums(executor: Executor) -> dict[int, torch.Tensor]:
    """The blocks that the rank must have in the end, each the sum of the parts of all ranks that start with one."""
    schedule = executor.schedule
    sizes: list[int] = schedule.block_bytes.tolist()
    return {
        block: _sum_of_parts(block, np.flatnonzero(schedule.initial[:, block]).tolist(), sizes[block])
        for block in np.flatnonzero(schedule.final[executor.part.rank]).tolist()
    }


def verify_sums(executor: Executor, expected: Mapping[int, torch.Tensor]) -> None:
    """Check every sum that the rank must have in the end, bit for bit. Raises `RunError`."""
    for block, total in expected.items():
        if not torch.equal(executor.block(block, executor.part.kept[block]).cpu(), total):
            raise RunError(f"rank {executor.part.rank}: block {block} is not the sum of its parts")


def verify(executor: Executor) -> None:
    """Check every block that stays with the rank, bit for bit. Raises `RunError`."""
    for block, offset in executor.part.kept.items():
        _check(executor, block, offset)


def verify_reads(executor: Executor, row: CallRow) -> None:
    """Check the blocks that a kernel call reads, bit for bit. Raises `RunError`."""
    offset = row.offset
    for block, _ in row.reads:
        offset += _check(executor, block, offset)


def part_of_gradient(executor: Executor, row: CallRow, at: int) -> torch.Tensor:
    """What a kernel call adds to the gradient of its travelling block number `at`: sums of patterns, modulo 256."""
    gradient = row.adds[at]
    size_bytes = executor.block(gradient.block, gradient.offset).numel()
    return _sum_of_parts(gradient.block, _met(executor.schedule, row.call, at), size_bytes)


def verify_gradients(executor: Executor) -> None:
    """Check that every gradient of the rank is the sum of all its parts, each once. Raises `RunError`."""
    schedule = executor.schedule
    met: dict[int, list[int]] = {block: [] for block in executor.part.gradients}
    for step in schedule.steps:
        for call in step.calls:
            assert schedule.task is not None, "a schedule with calls has a task"
            gradients = schedule.task.gradient_blocks(schedule.task.sides(call)[0]).tolist()
            for at, block in enumerate(gradients):
                if block in met:
                    met[block] += _met(schedule, call, at)
    for block, offset in executor.part.gradients.items():
        found = executor.block(block, offset).cpu()
        if not torch.equal(found, _sum_of_parts(block, met[block], found.numel())):
            raise RunError(f"rank {executor.part.rank}: gradient block {block} is not the sum of its parts")


def _met(schedule: Schedule, call: Call, at: int) -> list[int]:
    """The staying blocks that see something of a call's travelling block number `at`, or of which it sees something."""
    task = schedule.task
    assert task is not None, "a schedule with calls has a task"
    low, high = task.call_bands(call)
    seen = low <= high
    met: list[int] = task.sides(call)[1][seen[:, at] if task.travellers == "keys" else seen[at]].tolist()
    return met


def _sum_of_parts(summed: int, parts: Sequence[int], size_bytes: int) -> torch.Tensor:
    """The sum of these parts of a block, modulo 256: of a gradient by staying blocks, of any other by ranks."""
    total = torch.zeros(size_bytes, dtype=torch.uint8)
    for part in parts:
        total += test_pattern((summed << 32) + part, size_bytes)
    return total


def _check(executor: Executor, block: int, offset: int) -> int:
    found = executor.block(block, offset).cpu()
    if not torch.equal(found, test_pattern(block, found.numel())):
        raise RunError(f"rank {executor.part.rank}: block {block} is not what its owner sent")
    return found.numel()
