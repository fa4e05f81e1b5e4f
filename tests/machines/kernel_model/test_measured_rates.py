"""Rates beside what was measured: none is far above it, and no backward pass outruns its forward pass unexplained."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Literal

import pytest

from experiments.tables.kernel_fits import kernel_tables
from tasp_lab.machines.kernel_model import AttentionKernel, attention_kernel, gpu_names, kernel_names
from tasp_lab.machines.kernel_model.constants import KernelFile, gpus
from tasp_lab.measure.calibrate_kernels import EXTRAPOLATION, KernelTime, fit_kernel
from tasp_lab.measure.readers.kernel_table import attention_shape
from tasp_lab.workload.kernel_shapes import KernelShape

KERNELS = [attention_kernel(gpu, name) for gpu in gpu_names() for name in kernel_names(gpu)]
FITTED = [kernel for kernel in KERNELS if not kernel.note]
UNMEASURED = 1.1
"""A head dimension that a file does not have is told by exponentials, which slow the forward pass more; on a GPU that
takes the kernel of another one, memory is faster or slower beside equal rates.
"""


def long_call(
    passing: Literal["forward", "backward"], head_dim: int, length: int, *, causal: bool = False, group: int = 1
) -> KernelShape:
    """A call whose tiles fill all SMs many times."""
    return attention_shape(passing, "bf16", 1, 64, 64 // group, head_dim, length, length, causal=causal)


def rate(kernel: AttentionKernel, shape: KernelShape) -> float:
    return shape.flops / kernel.time_s(shape)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: f"{kernel.gpu.name}-{kernel.name}")
def test_backward_is_faster_than_forward_for_a_stated_reason_only(kernel: AttentionKernel) -> None:
    for head_dim in (64, 128, 192, 256):
        variant = kernel.variant("backward", head_dim)
        own = variant.head_dim == head_dim and not kernel.note
        for length, causal, group in itertools.product((4096, 8192, 32768, 131072), (False, True), (1, 8)):
            forward, backward = (
                rate(kernel, long_call(passing, head_dim, length, causal=causal, group=group))
                for passing in ("forward", "backward")
            )
            if backward > forward and not variant.faster_than_forward:
                assert not own, f"head dimension {head_dim}: {backward:.4g} FLOP/s against {forward:.4g}, no reason"
                assert kernel.assumption("backward", head_dim)
                assert backward < UNMEASURED * forward


def test_no_rate_is_far_above_the_fastest_row() -> None:
    """Head dimensions with rows: a rate beyond them says so in its source, and none is beyond the peak of the GPU."""
    fastest: dict[tuple[str, str, str, int], float] = defaultdict(float)
    for table in kernel_tables():
        for row in table.rows:
            if len(row.shapes) == 1:
                key = row.gpu, row.kernel, row.shapes[0].passing, row.shapes[0].head_dim
                fastest[key] = max(fastest[key], row.flops / row.measured_s)
    checked = 0
    for kernel in FITTED:
        for variant in kernel.file.variants:
            assert variant.rate.value <= kernel.gpu.peak_flops.value
            measured = fastest.get((kernel.gpu.name, kernel.name, variant.passing, variant.head_dim), 0.0)
            if measured and not variant.rate.assumed:
                found = max(rate(kernel, long_call(variant.passing, variant.head_dim, 2**n)) for n in (15, 17))
                assert found <= (1 + EXTRAPOLATION) * measured or "extrapolated" in variant.rate.source, (
                    f"{kernel.name} on {kernel.gpu.name}, {variant.passing}, {variant.head_dim}: {found:.4g} FLOP/s, "
                    f"measured up to {measured:.4g}"
                )
                checked += 1
    assert checked > 50


def test_what_a_benchmark_runs_beside_a_kernel_is_no_reason_for_a_higher_rate() -> None:
    """Autograd adds gradients to those of the call before, 6 bytes per element of each of the three, and its host takes
    100 us. The first grows with the sequence as starts and ends of tiles do, so four rows cannot tell them apart.
    """
    h100, known = gpus()["h100"], attention_kernel("h100", "flash-attention-3")
    rows = []
    for length in (1024, 2048, 4096, 8192):
        shape = attention_shape("backward", "bf16", 4, 48, 48, 128, length, length, causal=True)
        gradients_s = 3 * 6 * 4 * 48 * length * 128 / h100.memory_bytes_per_s.value
        rows.append(KernelTime(shape, known.time_s(shape) + gradients_s + 100e-6))
    fitted = fit_kernel(h100, "triton-tlx", "backward", rows, "rows made here").variants
    kernel = AttentionKernel(h100, KernelFile("h100", "triton-tlx", fitted))
    fastest, shape = max(row.shape.flops / row.time_s for row in rows), long_call("backward", 128, 131072)
    assert fastest < rate(kernel, shape) <= (1 + EXTRAPOLATION) * fastest
    assert rate(kernel, shape) <= rate(known, shape)
