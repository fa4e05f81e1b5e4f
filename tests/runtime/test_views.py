"""Fields of blocks as tensors; that prepared views are those of the bytes, every trial by real kernels shows."""

from __future__ import annotations

import pytest
import torch

from runtime.executor.views import Format, store, views
from tasp_lab.core.errors import RunError
from tasp_lab.schedule.blocks import Field


def test_a_block_of_one_position_may_be_unaligned() -> None:
    """Its only row has a stride all the same, which no float32 has."""
    fields = [Field("k", "bf16", (1,)), Field("lse", "fp32", (1,))]
    values = [torch.full((1, 1), 2, dtype=torch.bfloat16), torch.full((1, 1), 3.0)]
    data = torch.zeros(6, dtype=torch.uint8)
    store(data, fields, values)
    assert [each.item() for each in views(data, fields)] == [2, 3]


def test_fields_of_positions_beside_fields_of_blocks_are_refused() -> None:
    mixed = [Field("state", "fp32", (2,), per_position=False), Field("k", "bf16", (2,))]
    with pytest.raises(RunError, match="fields state, k: expected all per position or all per block"):
        Format(torch.zeros(24, dtype=torch.uint8), mixed)
