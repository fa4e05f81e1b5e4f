"""Blocks as tensors: views of bytes by the fields of a kind.

A block has its positions one after another, and each position all fields one after another; K and V of a position are
adjacent. Contiguous blocks of one kind therefore form one tensor per field, [positions, *shape of the field], and
nothing needs to be concatenated. Fields of whole blocks are stored likewise, a block in place of a position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch

from tasp_lab.core.errors import RunError
from tasp_lab.schedule.blocks import Field

DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""torch's dtypes by the names of `tasp_lab.workload.layer`."""

Views = Sequence[torch.Tensor]
"""The tensors of a block, or of contiguous blocks, one per field; of plain bytes, one tensor of bytes."""


def views(data: torch.Tensor, fields: Sequence[Field]) -> Views:
    """The bytes of contiguous blocks by their fields, [positions, *shape] each; without fields, as they are.

    Fields that odd sizes before them have left unaligned for their dtype are copies, see `store`.

    Raises `RunError` for fields of positions beside fields of whole blocks.
    """
    if not fields:
        return (data,)
    parts = zip(_split(data, fields), fields, strict=True)
    return tuple(
        (part if _is_aligned(part, field) else part.clone(memory_format=torch.contiguous_format))
        .view(DTYPES[field.dtype])
        .view(len(part), *field.shape)
        for part, field in parts
    )


def store(data: torch.Tensor, fields: Sequence[Field], values: Views) -> None:
    """Copy tensors into the bytes of contiguous blocks; not if they are views of these already."""
    if not fields:
        if data.is_meta or data.data_ptr() != values[0].data_ptr():
            data.copy_(values[0])
        return
    for part, field, old, new in zip(_split(data, fields), fields, views(data, fields), values, strict=True):
        if _is_aligned(part, field):
            if old.is_meta or old.data_ptr() != new.data_ptr():
                old.copy_(new)
        else:
            part.copy_(new.to(old.dtype).contiguous().view(len(part), -1).view(torch.uint8))


class Format:
    """The fields of copies of a kind in a memory: as on the wire, or of resident copies; none for bytes.

    A *row* is a position, or a block where fields are of whole blocks; of bytes, a byte. Views are prepared once, as a
    view is one operation of torch. `memory` are the bytes, from the beginning of their storage on.

    Raises `RunError` for fields of positions beside fields of whole blocks.
    """

    def __init__(self, memory: torch.Tensor, fields: Sequence[Field]) -> None:
        self.fields, self.memory = fields, memory
        sizes, start = _sizes_of(fields), 0
        self.row_bytes = sum(sizes) or 1
        self._typed: list[tuple[torch.Tensor, int, int, tuple[int, ...], tuple[int, ...]]] = []
        for field, size in zip(fields, sizes, strict=True):
            dtype = DTYPES[field.dtype]
            typed = memory[: len(memory) // dtype.itemsize * dtype.itemsize].view(dtype)
            strides = tuple(prod(field.shape[at + 1 :]) for at in range(len(field.shape)))
            self._typed.append((typed, dtype.itemsize, start, field.shape, strides))
            start += size

    def views(self, offset: int, size_bytes: int) -> tuple[Views, bool]:
        """The fields of contiguous copies, and whether they are the copies themselves: not if a field is unaligned."""
        if not self.fields:
            return (self.memory[offset : offset + size_bytes],), True
        count, found = size_bytes // self.row_bytes, []
        for typed, itemsize, start, shape, strides in self._typed:
            if (offset + start) % itemsize or self.row_bytes % itemsize:
                return views(self.memory[offset : offset + size_bytes], self.fields), False
            stride = (self.row_bytes // itemsize, *strides)
            found.append(typed.as_strided((count, *shape), stride, (offset + start) // itemsize))
        return found, True


def _split(data: torch.Tensor, fields: Sequence[Field]) -> Sequence[torch.Tensor]:
    """The bytes of each field, [positions, bytes]."""
    sizes = _sizes_of(fields)
    return torch.split(data.view(-1, sum(sizes)), sizes, 1)


def _sizes_of(fields: Sequence[Field]) -> list[int]:
    """The bytes of each field in a position, or in a block."""
    if len({each.per_position for each in fields}) > 1:
        raise RunError(f"fields {', '.join(each.name for each in fields)}: expected all per position or all per block")
    return [DTYPES[each.dtype].itemsize * prod(each.shape) for each in fields]


def _is_aligned(part: torch.Tensor, field: Field) -> bool:
    size = DTYPES[field.dtype].itemsize
    return part.storage_offset() % size == 0 and part.stride(0) % size == 0
