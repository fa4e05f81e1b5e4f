"""What is bound by memory: copies, merges of the partial outputs of ring steps, sums of gradients."""

from __future__ import annotations

from tasp_lab.machines.kernel_model.constants import Gpu, KernelConstant

ELEMENTWISE_LAUNCH = KernelConstant(
    2.3e-6,
    1.5e-6,
    4e-6,
    "norms of 8192 x 128 bf16 take 3 us on H200, GB200 and GB300 (NVIDIA/cudnn-frontend benchmark/norms 3929da2e), "
    "less their bytes over the bandwidth",
)
"""The fixed part of an element-wise kernel."""


def copy_s(gpu: Gpu, size_bytes: float) -> float:
    """The time to copy so many bytes within the memory of a GPU: each is read and written."""
    return bound_s(gpu, 2 * size_bytes)


def merge_s(gpu: Gpu, positions: int, heads: int, head_dim: int, batch: int = 1, *, partial_bytes: int = 2) -> float:
    """The time to merge the partial output of a ring step into the float32 sum, in one kernel.

    The sum is read and written in float32, the partial output read in `partial_bytes` per element; both have a
    log-sum-exp per row (zhuzilin/ring-flash-attention, update_out_and_lse).
    """
    rows = positions * heads * batch
    return bound_s(gpu, rows * (head_dim * (8 + partial_bytes) + 12))


def bound_s(gpu: Gpu, moved_bytes: float) -> float:
    """The time of one kernel that moves so many bytes and computes next to nothing."""
    return ELEMENTWISE_LAUNCH.value + moved_bytes / gpu.memory_bytes_per_s.value
