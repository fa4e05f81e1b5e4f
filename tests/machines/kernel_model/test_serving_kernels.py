"""Kernels of serving engines, and kernels of GPUs that were not measured."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tasp_lab.measure.tables
from experiments.tables.kernel_fits import kernel_rows
from tasp_lab.machines.kernel_model import attention_kernel, kernel_names
from tasp_lab.machines.kernel_model.catalogue import borrowed_kernel
from tasp_lab.machines.kernel_model.constants import KernelConstant, Variant
from tasp_lab.machines.kernel_model.designs import designs
from tasp_lab.machines.kernel_model.kernel import call_parts
from tasp_lab.measure.readers.kernel_table import KernelRow, attention_shape, read_kernel_table

SERVING = read_kernel_table(Path(tasp_lab.measure.tables.__path__[0]) / "kernels" / "serving_prefill.csv")
LEFT_OUT = [
    ("a100", "vllm-flash-attention-2"), ("a100", "sglang-flash-attention-3"), ("h100", "vllm-flash-attention-3"),
    ("h100", "sglang-flash-attention-3"), ("b200", "vllm-trtllm-gen"), ("b200", "sglang-trtllm-gen"),
    ("b200", "tensorrt-llm"), ("gb300", "vllm-trtllm-gen"), ("gb300", "sglang-trtllm-gen"), ("gb300", "tensorrt-llm"),
]  # fmt: skip


def rows_of(gpu: str, kernel: str) -> list[KernelRow]:
    return [row for row in SERVING.rows if (row.gpu, row.kernel) == (gpu, kernel)]


def of_kernel(variant: Variant) -> str:
    """What all constants of a variant state as their source."""
    every = (getattr(variant, field.name) for field in msgspec.structs.fields(variant))
    return " ".join(each.source for each in every if isinstance(each, KernelConstant))


@pytest.mark.parametrize(("gpu", "kernel"), LEFT_OUT)
def test_prefill_of_a_gpu_whose_table_was_left_out(gpu: str, kernel: str) -> None:
    """The mean error is within 10 % with constants of other GPUs; on H100 with those of the kernel without pages."""
    borrowed, rows = borrowed_kernel(gpu, kernel), rows_of(gpu, kernel)
    assert borrowed.file != attention_kernel(gpu, kernel).file
    predicted_s = np.array([borrowed.time_s(row.shapes[0]) for row in rows])
    errors = predicted_s / [row.measured_s for row in rows] - 1
    assert np.abs(errors).mean() < 0.1


@pytest.mark.parametrize(("gpu", "kernel"), [each for each in LEFT_OUT if each[0] in ("a100", "h100")])
def test_a_kernel_with_pages_borrows_nothing_from_tables_of_serving_engines(gpu: str, kernel: str) -> None:
    source = SERVING.headers["source"]
    assert source in of_kernel(attention_kernel(gpu, kernel).variant("forward", 128))
    assert source not in of_kernel(borrowed_kernel(gpu, kernel).variant("forward", 128))


@given(st.integers(1, 16), st.sampled_from([1, 2, 8]), st.integers(1, 64))
def test_an_engine_reads_and_writes_keys_and_values_before_a_call(batch: int, kv_heads: int, blocks: int) -> None:
    """8 bytes per element of K in bf16, and 4 per element of Q where it is rotated, over the memory bandwidth."""
    for gpu, name, query_bytes in (("a100", "vllm-flash-attention-2", 0), ("b200", "tensorrt-llm", 4)):
        kernel = attention_kernel(gpu, name)
        shape = attention_shape("forward", "bf16", batch, 8, kv_heads, 128, 64 * blocks, 64 * blocks, causal=True)
        variant = kernel.variant("forward", 128)
        bare = msgspec.structs.replace(variant.design, query_bytes=0.0, key_bytes=0.0)
        plain = shape._replace(kernel="", flops=0)
        without = call_parts(kernel.gpu, msgspec.structs.replace(variant, design=bare), plain)
        elements = batch * 64 * blocks * 128
        moved = elements * (8 * kv_heads + query_bytes * 8)
        assert kernel.time_s(shape) - without.time_s == pytest.approx(moved / kernel.gpu.memory_bytes_per_s.value)


def test_with_pages_flash_attention_2_runs_its_kernel_of_split_keys() -> None:
    """64 queries by 128 keys for every head dimension up to 128 (flash_fwd_launch_template.h), at the speed that split
    keys have in tables of the same architecture."""
    (design,) = designs("l20", "vllm-flash-attention-2", "forward", 128)
    assert (design.rows, design.columns, design.split) == (64, 128, "never")
    plain, paged = attention_kernel("a100", "flash-attention-2"), borrowed_kernel("a100", "vllm-flash-attention-2")
    variant = plain.variant("forward", 128)
    assert paged.variant("forward", 128).rate.value == pytest.approx(variant.rate.value * variant.split.value)


def test_exponentials_twice_as_fast_speed_up_what_they_cost() -> None:
    """B200 to GB300: the part of a score that is softmax takes half the elements of a head."""
    slow, fast = attention_kernel("b200", "sglang-trtllm-gen"), borrowed_kernel("gb300", "sglang-trtllm-gen")
    before, after = (each.variant("forward", 128) for each in (slow, fast))
    assert after.exponentials.value == pytest.approx(before.exponentials.value / 2)
    assert slow.gpu.exponentials.value == 2 * fast.gpu.exponentials.value
    peaks = fast.gpu.peak_flops.value / slow.gpu.peak_flops.value
    scores = (128 + before.exponentials.value) / (128 + after.exponentials.value)
    assert after.rate.value == pytest.approx(before.rate.value * peaks * scores)


def test_slow_tensor_cores_hide_exponentials() -> None:
    """A800 to L20: an exponential takes 8 elements of a head instead of 32, so heads of 32 lose little to it."""
    a800, l20 = attention_kernel("a800", "flash-attention-2"), attention_kernel("l20", "flash-attention-2")
    assert a800.gpu.exponentials.value == 4 * l20.gpu.exponentials.value
    slower = [each.peak_rate("forward", 32) / each.peak_rate("forward", 128) for each in (a800, l20)]
    cost = a800.variant("forward", 128).exponentials.value
    expected = [32 / (32 + each) * (128 + each) / 128 for each in (cost, cost / 4)]
    assert slower == pytest.approx(expected)


def test_short_eager_calls_tell_no_rate() -> None:
    """GB200: FlashAttention-2 of heads of 64 was timed in one eager call of 0.16 ms, which its host bounds. So GB200
    has no rate of its own there, and that of its longer calls predicts the kernel times of B200."""
    kernels = Path(tasp_lab.measure.tables.__path__[0]) / "kernels"
    rows = kernel_rows([read_kernel_table(kernels / "linear_fla_readme_gb200.csv")])["gb200", "flash-attention-2"]
    assert min(row.time_s for row in rows["forward"].times) >= 1e-3
    assert {row.shape.head_dim for row in rows["forward"].times} == {128, 256}
    model = borrowed_kernel("b200", "flash-attention-2")
    for row in read_kernel_table(kernels / "fa_1589_b200.csv").rows:
        if row.kernel == "flash-attention-2":
            assert model.time_s(row.shapes[0]) == pytest.approx(row.measured_s, rel=0.25)


def test_calls_with_fewer_tiles_than_sms_follow_from_the_design_of_the_generation() -> None:
    """cuDNN on H200, 41 calls of a prefill in chunks, by H100's constants, whose own tables have no such call."""
    table = read_kernel_table(Path(tasp_lab.measure.tables.__path__[0]) / "kernels" / "cudnn_prefill_h200.csv")
    model = borrowed_kernel("h200", "cudnn")
    calls = [(row.shapes[0], row.measured_s) for row in table.rows if row.shapes[0].head_dim == 128]
    few = [(shape, time_s) for shape, time_s in calls if -(-shape.queries // 128) * shape.heads <= 132]
    assert len(few) == 41
    assert np.mean([abs(model.time_s(shape) / time_s - 1) for shape, time_s in few]) < 0.15


def test_engines_have_the_kernels_of_their_architecture() -> None:
    assert "vllm-flash-attention-2" in kernel_names("l20")
    assert "vllm-flash-attention-3" in kernel_names("h200")
    assert not any(name.startswith("vllm-flash") for name in kernel_names("b200"))
