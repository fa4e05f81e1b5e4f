"""Test patterns: what blocks hold when nothing but their way is of interest, so that every bit can be checked."""

from __future__ import annotations

import numpy as np
import torch

from runtime.executor import Executor
from tasp_lab.errors import RunError
from tasp_lab.rooms import CallRow


def test_pattern(block: int, size_bytes: int) -> torch.Tensor:
    """The bytes of a block in a test run: pseudo-random, the same on every rank, different for every block."""
    generator = np.random.Generator(np.random.Philox(key=block))
    return torch.from_numpy(generator.integers(0, 256, size_bytes, dtype=np.uint8))


test_pattern.__test__ = False  # type: ignore[attr-defined]


def fill(executor: Executor) -> None:
    """Put the test pattern into the blocks that the rank holds at the start and zeros everywhere else."""
    executor.buffer.zero_()
    for block, offset in executor.part.home.items():
        place = executor.block(block, offset)
        place.copy_(test_pattern(block, place.numel()))


def verify(executor: Executor) -> None:
    """Check every block that stays with the rank, bit for bit. Raises `RunError`."""
    for block, offset in executor.part.kept.items():
        _check(executor, block, offset)


def verify_keys(executor: Executor, row: CallRow) -> None:
    """Check the key blocks of a kernel call, bit for bit. Raises `RunError`."""
    offset = row.offset
    for block, _ in row.keys:
        offset += _check(executor, block, offset)


def _check(executor: Executor, block: int, offset: int) -> int:
    found = executor.block(block, offset).cpu()
    if not torch.equal(found, test_pattern(block, found.numel())):
        raise RunError(f"rank {executor.part.rank}: block {block} is not what its owner sent")
    return found.numel()
