"""Kernels bound by memory: chunk kernels of linear attention."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasp_lab.core.errors import ProfileError
from tasp_lab.machines.kernel_model.constants import gpus
from tasp_lab.machines.kernel_model.memory import linear_kernel
from tasp_lab.workload.kernel_shapes import KernelShape


def chunk_shape(heads: int, positions: int, head_dim: int = 64, passing: str = "forward") -> KernelShape:
    return KernelShape("attend", "linear", passing, "bf16", 2, heads, heads, head_dim, positions, positions, 0, 0, 0)  # type: ignore[arg-type]


def test_few_heads_take_a_time_per_chunk() -> None:
    """8 heads of 64 on one H200 (TileOPs pull 534): 0.47 ms of both passes at 4096 positions, 1.85 ms at 16384."""
    for positions, measured_s in ((4096, 470e-6), (16384, 1850e-6)):
        passes = (linear_kernel("chunk-gla", passing) for passing in ("forward", "backward"))
        found_s = sum(kernel.time_s(gpus()["h200"], chunk_shape(4, positions)) for kernel in passes)
        assert found_s == pytest.approx(measured_s, rel=0.08)


@given(st.integers(1, 64), st.integers(1, 64), st.sampled_from(["chunk-gla", "chunk-gdn", "chunk-retention"]))
def test_chunk_kernels_grow_with_heads_and_are_linear_in_length(heads: int, chunks: int, name: str) -> None:
    kernel, gpu = linear_kernel(name, "forward"), gpus()["h100"]
    one, two = (kernel.time_s(gpu, chunk_shape(heads, 64 * chunks * each)) for each in (1, 2))
    assert two - kernel.launch_s.value == pytest.approx(2 * (one - kernel.launch_s.value))
    assert kernel.time_s(gpu, chunk_shape(heads + 1, 64 * chunks)) >= one


def test_an_unknown_kernel_is_one_line() -> None:
    with pytest.raises(ProfileError, match="unknown kernel of linear attention 'chunk-glb', did you mean 'chunk-gla'"):
        linear_kernel("chunk-glb", "forward")
