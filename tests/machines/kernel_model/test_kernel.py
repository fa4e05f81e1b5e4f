"""The time of a call: laws that hold for every kernel, GPU and shape."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasp_lab.machines.kernel_model import AttentionKernel, attention_kernel, gpu_names, kernel_names
from tasp_lab.machines.kernel_model.catalogue import _KERNEL_ALIASES, _NOT_MEASURED, kernel_by_shape
from tasp_lab.machines.kernel_model.designs import computed_dims
from tasp_lab.machines.kernel_model.kernel import call_parts
from tasp_lab.machines.kernel_model.tiles import splits, tile_columns
from tasp_lab.measure.readers.kernel_table import attention_shape
from tasp_lab.workload.kernel_shapes import KernelShape, pairs_in_band
from tests.conftest import ROOT

KERNELS = [attention_kernel(gpu, name) for gpu in gpu_names() for name in kernel_names(gpu)]
NO_SPLIT = [kernel for kernel in KERNELS if all(each.design.split == "never" for each in kernel.file.variants)]
LENGTHS = st.sampled_from([1, 64, 100, 128, 513, 1024, 4096, 8192])


@st.composite
def shapes(draw: st.DrawFn, *, masked: bool = True) -> KernelShape:
    kv_heads = draw(st.sampled_from([1, 2, 8]))
    heads, batch = kv_heads * draw(st.sampled_from([1, 4])), draw(st.sampled_from([1, 3]))
    head_dim, passing = draw(st.sampled_from([64, 128, 192, 256])), draw(st.sampled_from(["forward", "backward"]))
    queries, keys = draw(LENGTHS), draw(LENGTHS)
    shape = attention_shape(passing, "bf16", batch, heads, kv_heads, head_dim, queries, keys, causal=False)
    shape = banded(shape._replace(value_dim=draw(st.sampled_from([0, 64, 128, head_dim]))), 1 - keys, queries - 1)
    if not masked or not draw(st.booleans()):
        return shape
    low = draw(st.integers(1 - keys, queries - 1))
    return banded(shape, low, draw(st.integers(low, queries - 1)))


def banded(shape: KernelShape, low: int, high: int) -> KernelShape:
    pairs = int(pairs_in_band(low, high, shape.queries, shape.keys))
    keys, values = shape.head_dim, shape.value_dim or shape.head_dim
    each = 2 * (keys + values) if shape.passing == "forward" else 2 * (3 * keys + 2 * values)
    flops = each * pairs * shape.batch * shape.heads
    return shape._replace(low=low, high=high, flops=flops)


@given(st.sampled_from(KERNELS), shapes())
def test_never_faster_than_the_rate_nor_than_memory(kernel: AttentionKernel, shape: KernelShape) -> None:
    time_s = kernel.time_s(shape)
    elements = shape.batch * (shape.heads * shape.queries + shape.kv_heads * shape.keys)
    widths = shape.head_dim + (shape.value_dim or shape.head_dim)
    assert time_s >= shape.flops / kernel.peak_rate(shape.passing, shape.head_dim, shape.value_dim) * (1 - 1e-12)
    assert time_s >= 2 * elements * widths / kernel.gpu.memory_bytes_per_s.value
    assert math.isfinite(time_s)
    assert all(part >= -1e-12 for part in kernel.parts(shape))
    assert kernel.time_s(shape) == time_s
    assert 0 <= kernel.handed_out_s(shape) <= time_s * (1 + 1e-9)


@settings(max_examples=200)
@given(st.sampled_from(NO_SPLIT), shapes(masked=False), st.sampled_from(["queries", "keys", "heads", "batch"]))
def test_more_work_takes_no_less_time(kernel: AttentionKernel, shape: KernelShape, what: str) -> None:
    """Without split-KV, which takes more SMs when there are fewer tiles."""
    numbers = {"queries": shape.queries, "keys": shape.keys, "heads": shape.heads, "batch": shape.batch}
    numbers[what] *= 2
    more = attention_shape(
        shape.passing, "bf16", numbers["batch"], numbers["heads"], shape.kv_heads, shape.head_dim, numbers["queries"],
        numbers["keys"], causal=False,
    )._replace(value_dim=shape.value_dim)  # fmt: skip
    assert kernel.time_s(more) >= kernel.time_s(shape) * (1 - 1e-9)


@given(st.sampled_from(KERNELS), shapes())
def test_values_as_wide_as_keys_are_what_is_measured(kernel: AttentionKernel, shape: KernelShape) -> None:
    same, none = (shape._replace(value_dim=each) for each in (shape.head_dim, 0))
    assert kernel.parts(same) == kernel.parts(none)
    for ask in (kernel.peak_rate, kernel.assumption):
        assert ask(shape.passing, shape.head_dim, shape.head_dim) == ask(shape.passing, shape.head_dim)


@given(st.sampled_from(KERNELS), shapes(), st.sampled_from([(192, 128), (128, 64), (64, 128), (256, 128)]))
def test_values_of_another_width_take_the_time_between_both(
    kernel: AttentionKernel, shape: KernelShape, dims: tuple[int, int]
) -> None:
    """With the constants of one head dimension. Of a kernel that pads them, the time of heads that are all as wide; its
    rate counts what is asked for.
    """
    narrow, wide = sorted(dims)
    variants = [each for each in kernel.file.variants if each.passing == shape.passing][:1]
    file = msgspec.structs.replace(kernel.file, variants=tuple(variants))
    one, asked = replace(kernel, file=file), shape._replace(head_dim=dims[0], value_dim=dims[1])
    least, most = (one.time_s(shape._replace(head_dim=each, value_dim=0)) for each in (narrow, wide))
    time_s = one.time_s(asked)
    assert least * (1 - 1e-12) <= time_s <= most * (1 + 1e-12)
    computed = computed_dims(kernel.name, shape.passing, *dims)
    assert computed in (dims, (wide, wide))
    products = 2 * (dims[0] + dims[1]) if shape.passing == "forward" else 2 * (3 * dims[0] + 2 * dims[1])
    if computed != dims:
        assert time_s == most
        of_all = (4 if shape.passing == "forward" else 10) * wide
        rates = one.peak_rate(shape.passing, *dims), one.peak_rate(shape.passing, wide)
        assert rates[0] == pytest.approx(rates[1] * products / of_all)
    assert "assumed" in kernel.assumption(shape.passing, *dims)


@pytest.mark.parametrize(
    ("kernel", "passing", "dims", "computed"),
    [
        ("flash-attention-2", "forward", (192, 128), (192, 192)),
        ("vllm-flash-attention-2", "forward", (192, 128), (192, 192)),
        ("flash-attention-3", "forward", (192, 128), (192, 128)),
        ("flash-attention-3", "forward", (128, 64), (128, 128)),
        ("flash-attention-3", "backward", (192, 128), (192, 192)),
        ("flash-attention-4", "backward", (192, 128), (192, 128)),
        ("cudnn", "backward", (192, 128), (192, 128)),
    ],
)
def test_which_kernels_compute_with_padded_heads(
    kernel: str, passing: Literal["forward", "backward"], dims: tuple[int, int], computed: tuple[int, int]
) -> None:
    """mha_fwd and mha_bwd of csrc/flash_attn/flash_api.cpp and hopper/flash_api.cpp, Dao-AILab/flash-attention."""
    assert computed_dims(kernel, passing, *dims) == computed


@given(st.sampled_from(KERNELS), shapes(masked=False))
def test_a_full_band_equals_no_mask(kernel: AttentionKernel, shape: KernelShape) -> None:
    wide = shape._replace(low=-10 * shape.keys, high=10 * shape.queries)
    assert kernel.time_s(wide) == kernel.time_s(shape)


def test_an_empty_band_takes_no_time() -> None:
    shape = attention_shape("forward", "bf16", 1, 8, 8, 128, 512, 512, causal=False)
    assert attention_kernel("h100", "flash-attention-2").time_s(shape._replace(low=5, high=4, flops=0)) == 0


def test_tiles_backward_are_of_keys() -> None:
    """Causal, 512 x 512: the first 128 keys are seen by all queries, the last by 128."""
    shape = attention_shape("backward", "bf16", 1, 1, 1, 128, 512, 512, causal=True)
    assert tile_columns(shape, 128, 64).tolist() == [512.0, 384.0, 256.0, 128.0]


def test_tiles_of_split_keys_cover_what_one_part_covers() -> None:
    shape = attention_shape("forward", "bf16", 1, 1, 1, 128, 384, 1280, causal=True)
    for count in (2, 3, 7):
        parts = tile_columns(shape, 64, 128, count).reshape(count, -1)
        assert parts.sum(axis=0).tolist() == tile_columns(shape, 64, 128).tolist()


def test_flash_attention_2_splits_keys_only_for_few_tiles() -> None:
    """A100, one head of 128: 8192 queries are 128 tiles of 64, below 0.8 of 216 places; 16384 are 256, above."""
    assert splits("flash-attention-2", 1, 8192, 8192, 128, 108, 128) > 1
    assert splits("flash-attention-2", 1, 16384, 16384, 128, 108, 128) == 1
    assert splits("flash-attention-2", 1, 64, 128, 128, 108, 128) == 1


def test_flash_attention_3_gives_an_sm_a_tenth_more_blocks_than_its_share() -> None:
    """H100, 3072 queries: 24 tiles of 24 blocks of one head are 4.8 blocks per SM, so 5 at a time; 128 tiles fill the
    SMs of a sequence. Four blocks are never split."""
    assert splits("flash-attention-3", 1, 3072, 3072, 128, 132, 128) == 5
    assert splits("flash-attention-3", 1, 128 * 128, 3072, 128, 132, 128) == 1
    assert splits("flash-attention-3", 1, 3072, 512, 128, 132, 128) == 1
    assert splits("flash-attention-3", 8, 3072, 3072, 128, 132, 128, batch=8) == 1


def test_parts_of_split_keys_are_of_what_a_tile_sees() -> None:
    """FlashAttention-3 under a causal mask: five parts of the longest tile, 24 blocks, take as long as 5 blocks."""
    kernel = attention_kernel("h100", "vllm-flash-attention-3")
    variant = kernel.variant("forward", 128)
    shape = attention_shape("forward", "bf16", 1, 1, 1, 128, 3072, 3072, causal=True)._replace(kernel="", flops=0)
    tiles = tile_columns(shape, variant.design.rows, variant.design.columns)
    longest = (-(-tiles.max() / 128 // 5) * 128 + variant.tile_columns.value) * variant.design.rows
    speed = variant.rate.value / 132 * variant.masked.value * variant.split.value
    parts = call_parts(kernel.gpu, variant, shape)
    assert parts.rate_s + parts.waves_s == pytest.approx(longest * 4 * 128 / speed)


@pytest.mark.parametrize(
    ("gpu", "name", "kernel"),
    [
        ("a100", "torch_flow", "tensorrt-llm"),
        ("a100", "vllm_flash_attn", "vllm-flash-attention-2"),
        ("b200", "TRTLLM", "tensorrt-llm"),
        ("b200", "trtllm_mha", "sglang-trtllm-gen"),
        ("gb300", "flashinfer", "sglang-flashinfer"),
        ("gb300", "vllm_flashinfer_trtllmprefill", "vllm-trtllm-gen"),
        ("h100", "vllm_flash_attn_fa3", "vllm-flash-attention-3"),
        ("h100", "FusedAttention", "cudnn"),
        ("mi300x", "ROCM_AITER_FA", "aiter-asm"),
        ("mi355x", "ck", "flash-attention-2-ck"),
    ],
)
def test_names_of_vendors_are_kernels_of_the_model(gpu: str, name: str, kernel: str) -> None:
    assert attention_kernel(gpu, name) == attention_kernel(gpu, kernel)


def test_every_name_of_a_vendor_is_explained_and_names_a_kernel_that_was_measured() -> None:
    text = (ROOT / "docs" / "kernels.md").read_text().casefold().replace("_", "-")
    measured = {name for gpu in gpu_names() for name in kernel_names(gpu)}
    for name, kernel in _KERNEL_ALIASES.items():
        assert name not in measured
        assert kernel_by_shape(kernel) in measured
        assert f"`{name}`" in text
    for name, (_, near) in _NOT_MEASURED.items():
        assert name not in measured
        assert measured.issuperset(near)


def test_float32_has_no_tensor_cores() -> None:
    shape = attention_shape("forward", "fp32", 1, 8, 8, 128, 4096, 4096, causal=False)
    kernel = attention_kernel("a100", "flash-attention-2")
    assert kernel.time_s(shape) == shape.flops / kernel.gpu.vector_flops.value


CUDNN_THAT_SPLITS = [attention_kernel(gpu, "cudnn") for gpu in ("b200", "gb200", "b300", "gb300")]


@settings(max_examples=200)
@given(
    st.sampled_from(CUDNN_THAT_SPLITS),
    st.sampled_from([64, 128, 256]),
    st.sampled_from([1, 2, 8, 9, 16]),
    st.sampled_from([64, 512, 985, 2048, 8192]),
    st.sampled_from([4096, 8192, 30000, 62208]),
)
def test_cudnn_splits_keys_of_few_tiles_where_it_pays(
    kernel: AttentionKernel, head_dim: int, heads: int, queries: int, keys: int
) -> None:
    """Never slower than without, never above the peak of the GPU, and no faster with twice the keys."""
    shape, more = (
        attention_shape("forward", "bf16", 1, heads, heads, head_dim, queries, length, causal=False)._replace(flops=0)
        for length in (keys, 2 * keys)
    )
    variant = kernel.variant("forward", head_dim)
    whole = msgspec.structs.replace(variant, design=msgspec.structs.replace(variant.design, split="never"))
    time_s = call_parts(kernel.gpu, variant, shape).time_s
    assert time_s <= call_parts(kernel.gpu, whole, shape).time_s
    pairs = heads * shape.pairs
    assert time_s >= 4 * head_dim * pairs / kernel.peak_rate("forward", head_dim)
    assert call_parts(kernel.gpu, variant, more).time_s >= time_s


def test_two_designs_of_one_thread_block_split_keys_alike() -> None:
    """Nine heads, 1024 queries on 152 SMs: 36 thread blocks of two tiles of 128, or of one of 256, in four parts. A
    mask keeps cuDNN from it (8 and 32 heads, 256 queries: alike in NVIDIA/cudnn-frontend's prefill on GB200)."""
    kernel = attention_kernel("gb200", "cudnn")
    variant = kernel.variant("forward", 128)
    tall = msgspec.structs.replace(variant, design=msgspec.structs.replace(variant.design, rows=256, slots=1))
    shape = attention_shape("forward", "bf16", 1, 9, 9, 128, 1024, 62208, causal=False)._replace(flops=0)
    merged = [call_parts(kernel.gpu, each, shape).passes_s for each in (variant, tall)]
    assert (
        merged[0] == merged[1] == pytest.approx(2.3e-6 + 4 * 8 * 9 * 1024 * 129 / kernel.gpu.memory_bytes_per_s.value)
    )
    causal = attention_shape("forward", "bf16", 1, 9, 9, 128, 1024, 62208, causal=True)
    assert kernel.parts(causal).passes_s == 0.0


@pytest.mark.parametrize(
    ("gpu", "name", "per_key"),
    [
        ("a100", "flash-attention-2", 8 * 4 + 4),
        ("h100", "flash-attention-3", 20),
        ("mi355x", "flash-attention-2-ck", 8 * 4 + 4),
        ("h100", "cudnn", 0),
    ],
)
def test_gradients_of_a_kv_head_are_summed_over_its_heads(gpu: str, name: str, per_key: int) -> None:
    """Two KV heads of eight heads each beside sixteen KV heads, which need no sum."""
    kernel = attention_kernel(gpu, name)
    grouped, own = (
        kernel.parts(attention_shape("backward", "bf16", 1, 16, kv_heads, 128, 4096, 4096, causal=False)).passes_s
        for kv_heads in (2, 16)
    )
    elements = 2 * 4096 * 128
    assert grouped - own == pytest.approx(per_key * elements / kernel.gpu.memory_bytes_per_s.value)
