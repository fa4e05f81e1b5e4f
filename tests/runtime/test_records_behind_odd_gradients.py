"""Queries travel as records with float32 in them, wherever 16-bit gradients of odd sizes leave buffer for them."""

from __future__ import annotations

import pytest

from runtime.trials.in_process import run_in_process
from tasp_lab.schedules.attention.backward import attention_passes
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_records_may_begin_at_any_even_byte(dtype: str) -> None:
    """The gradients of a shard of 5 positions with one head of 3 elements: 30 bytes. The trial checks the result."""
    layer = Workload(15, heads=1, head_dim=3, dtype=dtype)
    passes = attention_passes("ring-attention", full_mesh(3), layer, dataflow="rotate-q", gradient_dtype="input")
    run_in_process(passes.backward)
