"""What the code of kernels fixes: tiles, places on an SM, order of dispatch, split-KV. Each with its source.

Where a kernel's code is closed (cuDNN) or assembly (aiter), `designs` lists the candidates, of which a fit takes the
one that agrees best with its tables. Only calls with fewer tiles than SMs tell a tile alone on its SM from two in turn:
those of H200 and GB200 leave the candidates of cuDNN forward on Hopper and Blackwell.

A kernel of a serving engine reads keys and values from the pages of a KV cache, which the engine fills before:
``vllm-flash-attention-2`` is FlashAttention-2 with pages, and vLLM's copy into them.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tasp_lab.machines.kernel_model.constants import Design, Order
from tasp_lab.machines.kernel_model.tiles import SplitRule

Architecture = Literal["ampere", "ada", "hopper", "blackwell", "blackwell-ultra", "cdna", "other"]
_ARCHITECTURES: dict[str, Architecture] = {
    "a100": "ampere", "a100-pcie": "ampere", "a800": "ampere", "a10": "ada", "l20": "ada", "rtx-4090": "ada",
    "rtx-4090d": "ada", "h100": "hopper", "h800": "hopper", "h200": "hopper", "h20": "hopper", "b200": "blackwell",
    "gb200": "blackwell", "gb300": "blackwell-ultra", "b300": "blackwell-ultra", "mi300x": "cdna", "mi325x": "cdna",
    "mi355x": "cdna", "l40s": "ada",
}  # fmt: skip
BLACKWELL = ("blackwell", "blackwell-ultra")
_FA2 = "Dao-AILab/flash-attention, csrc/flash_attn/src/flash_{pass_}_launch_template.h"
_FA3 = "Dao-AILab/flash-attention, hopper/tile_size.h and hopper/tile_scheduler.hpp"
_FA3_PAGED = f"{_FA3}, flash_prepare_scheduler.cu: with pages heads of a KV head are packed, and keys are split"
_FA3_BACKWARD = "Dao-AILab/flash-attention, hopper/flash_bwd_launch_template.h: with a mask the longest tiles first"
_BEST = "closed source: the candidate that agrees best with the tables"
_SPLIT_KERNEL = (
    "Dao-AILab/flash-attention, csrc/flash_attn/flash_api.cpp: with pages the kernel of split keys, "
    "src/flash_fwd_launch_template.h: run_mha_fwd_splitkv_dispatch"
)
_TRTLLM_GEN = (
    "trtllm-gen, fmhaSm100*H128PagedKvCausalP64VarSeqQ128Kv128PersistentContext: two tiles of 128 queries in turn; "
    "their order agrees best with the rows of B200"
)
_FA4 = "Dao-AILab/flash-attention, flash_attn/cute/interface.py and tile_scheduler.py"


def architecture(gpu: str) -> Architecture:
    """Of a GPU by name; ``other`` for those not listed."""
    return _ARCHITECTURES.get(gpu, "other")


_ENGINES = {
    "vllm": (0, 8, "vLLM, reshape_and_cache_flash: K and V are read, and written to pages"),
    "sglang": (0, 8, "SGLang, MHATokenToKVPool.set_kv_buffer: K and V are read, and written to pages"),
    "tensorrt-llm": (
        4, 8, "TensorRT-LLM, applyBiasRopeUpdateKVCache: Q, K and V are read, rotated and written, K and V to pages"
    ),
}  # fmt: skip
"""Serving engines: bytes per element of Q and of K that they move before each call, and where."""


def core_kernel(kernel: str) -> str:
    """A kernel without its engine.

    >>> core_kernel("vllm-flash-attention-2"), core_kernel("tensorrt-llm"), core_kernel("cudnn")
    ('flash-attention-2', '', 'cudnn')
    """
    engine = _engine(kernel)
    return kernel.removeprefix(engine).removeprefix("-") if engine else kernel


def _engine(kernel: str) -> str:
    return next((name for name in _ENGINES if kernel == name or kernel.startswith(f"{name}-")), "")


def computed_dims(
    kernel: str, passing: Literal["forward", "backward"], head_dim: int, value_dim: int
) -> tuple[int, int]:
    """The elements per head of keys and of values that a kernel computes with, where values have another width.

    FlashAttention-2 takes none (csrc/flash_attn/flash_api.cpp), so callers pad the narrower ones with zeros (vLLM,
    v1/attention/backends/mla/common.py: _pad_v). FlashAttention-3 does forward, for some widths, and backward rounds
    both up to the wider one (hopper/flash_api.cpp of Dao-AILab/flash-attention, mha_fwd and mha_bwd). cuDNN and
    FlashAttention-4 have kernels of 192/128, and of all others it is assumed. Absorbed MLA, 576/512, has kernels of its
    own (FlashMLA; hopper/flash_api.cpp takes queries of 64 and of 512 elements).

    >>> computed_dims("flash-attention-2", "forward", 192, 128), computed_dims("cudnn", "forward", 192, 128)
    ((192, 192), (192, 128))
    """
    core = core_kernel(kernel)
    if (passing, head_dim, value_dim) == ("forward", 576, 512):
        return head_dim, value_dim
    of_fa3 = passing == "forward" and 128 < head_dim <= 192 and 96 < value_dim <= 128
    if core == "flash-attention-2" or (core == "flash-attention-3" and not of_fa3):
        return max(head_dim, value_dim), max(head_dim, value_dim)
    return head_dim, value_dim


def designs(gpu: str, kernel: str, passing: Literal["forward", "backward"], head_dim: int) -> list[Design]:
    """The designs that a kernel may have for this pass and head dimension; one where its code is open."""
    arch, core, engine = architecture(gpu), core_kernel(kernel), _ENGINES.get(_engine(kernel))
    if passing == "backward":
        key_bytes, repeated = _SUMS_OF_GRADIENTS.get(core, (0.0, 0.0))
        beside = {"query_bytes": GRADIENT_BYTES, "key_bytes": key_bytes, "repeated_key_bytes": repeated}
        return [msgspec.structs.replace(each, **beside) for each in _designs(arch, core, passing, head_dim)]
    if engine is None:
        return _designs(arch, kernel, passing, head_dim)
    query_bytes, key_bytes, source = engine
    return [
        msgspec.structs.replace(each, query_bytes=query_bytes, key_bytes=key_bytes, source=f"{each.source}; {source}")
        for each in _paged(arch, core, head_dim)
    ]


def _paged(arch: Architecture, core: str, head_dim: int) -> list[Design]:
    """Forward with a KV cache in pages, and sequences one after the other in a batch of unequal lengths."""
    if core == "flash-attention-2":
        columns = 256 if head_dim <= 64 else 128 if head_dim <= 128 else 64
        return [_design(64, columns, 2, "listed", "never", _SPLIT_KERNEL)]
    if core == "flash-attention-3" and arch in ("ampere", "ada"):
        eight_warps = arch == "ada" and head_dim > 96
        columns = 112 if head_dim <= 64 else 128 if eight_warps else 64 if head_dim <= 128 else 96
        slots = 1 if eight_warps or head_dim > 128 else 2
        return [_design(128, columns, slots, "listed", "flash-attention-3", _FA3_PAGED, packs_heads=True)]
    if core == "flash-attention-3":
        rows = 192 if head_dim <= 96 else 128
        columns = 128 if head_dim <= 128 else 96 if head_dim <= 192 else 80
        return [_design(rows, columns, 1, "reversed", "flash-attention-3", _FA3_PAGED, packs_heads=True)]
    if arch in BLACKWELL and core in ("", "trtllm-gen"):
        return [_design(256, 128, 1, "listed", "never", _TRTLLM_GEN)]
    return _designs(arch, core, "forward", head_dim)


def _designs(arch: Architecture, kernel: str, passing: Literal["forward", "backward"], head_dim: int) -> list[Design]:
    if kernel == "flash-attention-2":
        return [_flash_attention_2(arch, passing, head_dim)]
    if kernel == "flash-attention-3" and passing == "forward":
        rows = 192 if head_dim <= 96 else 128
        columns = 128 if head_dim <= 192 else 80
        return [_design(rows, columns, 1, "longest-first", "never", _FA3)]
    if kernel == "flash-attention-3":
        keys = 128 if head_dim <= 128 else 96 if head_dim <= 192 else 80
        return [_design(keys, 128 if head_dim <= 64 else 64, 1, "longest-first", "never", _FA3_BACKWARD)]
    if kernel == "flash-attention-4" and passing == "forward":
        if arch in BLACKWELL:
            source = f"{_FA4}: two tiles of 128 queries in turn; heads of a KV head packed"
            return [_design(256, 128, 1, "longest-first", "fill", source, packs_heads=True)]
        return [_design(128, 128, 1, order, "never", _FA4) for order in ("longest-first", "listed", "reversed")]
    if arch in ("cdna", "other"):
        return _candidates((64, 128, 192, 256), (1,), _BEST) + _candidates((128,), (2,), _BEST)
    if arch in BLACKWELL and passing == "forward":
        split: SplitRule = "cudnn" if kernel == "cudnn" else "never"
        tall = _candidates((128,), (2,), _BEST, split) + _candidates((256,), (1,), _BEST, split)
        pairs = [msgspec.structs.replace(each, group=2) for each in _candidates((128,), (2,), _BEST, split)]
        if kernel == "cudnn":
            return tall if head_dim <= 128 else pairs
        return _candidates((128,), (1,), _BEST, split) + (tall if head_dim <= 128 else pairs)
    if head_dim > 128:
        return _candidates((64, 128), (1,), _BEST)
    if kernel == "cudnn" and passing == "forward" and arch == "hopper":
        return _candidates((128,), (1,), _BEST)
    return _candidates((128,), (1, 2), _BEST)


def _flash_attention_2(arch: Architecture, passing: Literal["forward", "backward"], head_dim: int) -> Design:
    if passing == "backward":
        keys = 128 if head_dim <= 128 and not (arch == "ada" and head_dim == 128) else 64
        return _design(keys, 128 if head_dim <= 64 else 64, 1, "listed", "never", _FA2.format(pass_="bwd"))
    columns = 128 if head_dim <= 64 else 32 if arch == "ada" and head_dim == 128 else 64
    rows, slots = 128, 2 if head_dim <= 128 else 1
    if head_dim > 192 and arch != "ampere":
        rows, slots = 64, 2 if arch != "ada" else 1
    return _design(rows, columns, slots, "listed", "flash-attention-2", _FA2.format(pass_="fwd"))


def _candidates(
    heights: tuple[int, ...], slots: tuple[int, ...], source: str, split: SplitRule = "never"
) -> list[Design]:
    orders: tuple[Order, ...] = ("longest-first", "listed", "reversed")
    return [_design(rows, 128, count, order, split, source) for rows in heights for count in slots for order in orders]


def _design(
    rows: int, columns: int, slots: int, order: Order, split: SplitRule, source: str, *, packs_heads: bool = False
) -> Design:
    return Design(rows, columns, slots, 1, order, split, packs_heads, source)


GRADIENT_BYTES, OUTPUT_GRADIENT_BYTES = 14.0, 4.0
"""Backward, bytes per element of Q beside the main kernel: dO and O read for their row sums (4), dQ in float32 cleared,
read (8) and cast to 16 bit (2) (flash_bwd_launch_template.h of Dao-AILab/flash-attention); those of O among them."""

_SUMS_OF_GRADIENTS = {
    "flash-attention-2": (4.0, 4.0),
    "flash-attention-2-ck": (4.0, 4.0),
    "flash-attention-3": (20.0, 0.0),
    "flash-attention-4": (20.0, 0.0),
}
"""Backward, bytes per element of K, and of K repeated for all heads, where heads share a KV head.

FlashAttention-2 and Composable Kernel write dK and dV of every head in 16 bit, which the main kernel does beside its
arithmetic, then read them (4) and write their sums (4): at::sum_out in mha_bwd of csrc/flash_attn/flash_api.cpp,
Dao-AILab/flash-attention, and of csrc/py_itfs_ck/mha_bwd_kernels.cu, ROCm/aiter. FlashAttention-3 and 4 clear dK and dV
in float32 (8), add to them, read them (8) and cast them to 16 bit (4): hopper/flash_api.cpp,
flash_bwd_launch_template.h and flash_attn/cute/interface.py. What cuDNN and AITER's assembly do is not public, or not
in their times."""
