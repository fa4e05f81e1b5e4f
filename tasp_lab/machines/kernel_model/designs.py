"""What the code of kernels fixes: tiles, places on an SM, order of dispatch, split-KV. Each with its source.

Where a kernel's code is closed (cuDNN) or assembly (aiter), `designs` lists the candidates, of which a fit takes the
one that agrees best with its tables.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tasp_lab.machines.kernel_model.constants import Design, Order
from tasp_lab.machines.kernel_model.tiles import SplitRule

Architecture = Literal["ampere", "ada", "hopper", "blackwell", "cdna", "other"]
_ARCHITECTURES: dict[str, Architecture] = {
    "a100": "ampere", "a100-pcie": "ampere", "a800": "ampere", "a10": "ada", "l20": "ada", "rtx-4090": "ada",
    "rtx-4090d": "ada", "h100": "hopper", "h800": "hopper", "h200": "hopper", "h20": "hopper", "b200": "blackwell",
    "gb200": "blackwell", "gb300": "blackwell", "b300": "blackwell", "mi300x": "cdna", "mi355x": "cdna",
}  # fmt: skip
_FA2 = "Dao-AILab/flash-attention, csrc/flash_attn/src/flash_{pass_}_launch_template.h"
_FA3 = "Dao-AILab/flash-attention, hopper/tile_size.h and hopper/tile_scheduler.hpp"
_FA3_BACKWARD = "Dao-AILab/flash-attention, hopper/flash_bwd_launch_template.h: with a mask the longest tiles first"
_BEST = "closed source: the candidate that agrees best with the tables"
_FA4 = "Dao-AILab/flash-attention, flash_attn/cute/interface.py and tile_scheduler.py"


def architecture(gpu: str) -> Architecture:
    """Of a GPU by name; ``other`` for those not listed."""
    return _ARCHITECTURES.get(gpu, "other")


def designs(gpu: str, kernel: str, passing: Literal["forward", "backward"], head_dim: int) -> list[Design]:
    """The designs that a kernel may have for this pass and head dimension; one where its code is open."""
    arch = architecture(gpu)
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
        if arch == "blackwell":
            source = f"{_FA4}: two tiles of 128 queries in turn; heads of a KV head packed"
            return [_design(256, 128, 1, "longest-first", "fill", source, packs_heads=True)]
        return [_design(128, 128, 1, order, "never", _FA4) for order in ("longest-first", "listed", "reversed")]
    if arch in ("cdna", "other"):
        return _candidates((64, 128, 192, 256), (1,), _BEST) + _candidates((128,), (2,), _BEST)
    if arch == "blackwell" and passing == "forward":
        split: SplitRule = "fill" if kernel == "cudnn" else "never"
        tall = _candidates((128,), (2,), _BEST, split) + _candidates((256,), (1,), _BEST, split)
        pairs = [msgspec.structs.replace(each, group=2) for each in _candidates((128,), (2,), _BEST, split)]
        return _candidates((128,), (1,), _BEST, split) + (tall if head_dim <= 128 else pairs)
    if head_dim > 128:
        return _candidates((64, 128), (1,), _BEST)
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
