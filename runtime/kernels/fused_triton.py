"""The functions of `runtime.kernels.fused` as kernels of Triton; each `launch_` is one launch.

An item is one head of one position of one batch entry; a program computes some items, all elements of a head at once.
Never executed on a GPU by us; tests run the kernels in Triton's interpreter, and compile them for five GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor

ELEMENTS = 2048
"""Elements that a program holds of each tensor: 16 per thread of four warps."""

ITEMS = ["items"]
"""What a kernel is not compiled anew for: Triton would for 1 and for multiples of 16, in the middle of a training whose
sequences are ragged. Strides are told apart, since what is known of them makes loads wide.
"""


@triton.jit
def _items(items, batch, heads, size, block_items: tl.constexpr, block_size: tl.constexpr):
    """Which items of a program there are; their heads, batch entries and positions, 64 bits wide, as offsets of large
    tensors are; their elements, and which of these there are.
    """
    item = tl.program_id(0) * block_items + tl.arange(0, block_items)
    there, element = item < items, tl.arange(0, block_size)
    head, entry, position = item % heads, item // heads % batch, item // (heads * batch)
    inside = there[:, None] & (element < size)[None, :]
    return there, head.to(tl.int64), entry.to(tl.int64), position.to(tl.int64), element, inside


@triton.jit
def _places(position, entry, head, element, stride_p, stride_b, stride_h):
    """Where the elements of items lie in a tensor."""
    return (position * stride_p + entry * stride_b + head * stride_h)[:, None] + element[None, :]


@triton.jit
def _row_of(rows, position, mask, has_rows: tl.constexpr):
    if has_rows:
        return tl.load(rows + position, mask=mask, other=0).to(tl.int64)
    return position


@triton.jit(do_not_specialize=ITEMS)
def _merge(
    out, lse, part, part_lse, rows, part_rows, items, batch, heads, size,
    out_p, out_b, out_h, lse_p, lse_b, lse_h, part_p, part_b, part_h, part_lse_p, part_lse_b, part_lse_h,
    has_rows: tl.constexpr, has_part_rows: tl.constexpr, is_empty: tl.constexpr,
    block_items: tl.constexpr, block_size: tl.constexpr,
):  # fmt: skip
    there, head, entry, position, element, inside = _items(items, batch, heads, size, block_items, block_size)
    at, part_at = _row_of(rows, position, there, has_rows), _row_of(part_rows, position, there, has_part_rows)
    place = _places(part_at, entry, head, element, part_p, part_b, part_h)
    new = tl.load(part + place, mask=inside, other=0.0).to(tl.float32)
    new_lse = tl.load(part_lse + part_at * part_lse_p + entry * part_lse_b + head * part_lse_h, mask=there, other=0.0)
    first = tl.sum(tl.where((element == 0)[None, :], new, 0.0), axis=1)
    nothing = (new_lse == -float("inf")) | ((new_lse == float("inf")) & (first == 0.0))
    new_lse = tl.where(nothing, -float("inf"), new_lse.to(tl.float32))
    new = tl.where(nothing[:, None], 0.0, new)
    into = _places(at, entry, head, element, out_p, out_b, out_h)
    into_lse = at * lse_p + entry * lse_b + head * lse_h
    if not is_empty:
        old = tl.load(out + into, mask=inside, other=0.0).to(tl.float32)
        old_lse = tl.load(lse + into_lse, mask=there, other=0.0).to(tl.float32)
        distance = new_lse - old_lse
        weight = tl.where(nothing, 1.0, 1.0 / (1.0 + tl.exp(distance)))
        new_weight = tl.where(nothing, 0.0, 1.0 / (1.0 + tl.exp(-distance)))
        new = old * weight[:, None] + new * new_weight[:, None]
        larger = tl.maximum(old_lse, new_lse) + tl.log(1.0 + tl.exp(-tl.abs(distance)))
        new_lse = tl.where(nothing, old_lse, tl.where(distance == distance, larger, distance))
    tl.store(out + into, new.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + into_lse, new_lse.to(lse.dtype.element_ty), mask=there)


def launch_merge(
    out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, rows: Tensor | None, part_rows: Tensor | None, empty: bool
) -> None:
    """See `runtime.kernels.fused.merge`; tensors are [positions, batch, heads, ...]."""
    positions = len(part) if part_rows is None else len(part_rows)
    _, batch, heads, size = part.shape
    out, part = _rows_contiguous(out), _rows_contiguous(part)
    items, block, grid = _grid(positions * batch * heads, size)
    if items:
        _merge[grid](
            out, lse, part, part_lse, _or(rows, lse), _or(part_rows, lse), items, batch, heads, size,
            *out.stride()[:3], *lse.stride(), *part.stride()[:3], *part_lse.stride(),
            has_rows=rows is not None, has_part_rows=part_rows is not None, is_empty=empty, **block,
        )  # fmt: skip


@triton.jit
def _add_one(
    into, part, at, part_at, entry, head, element, inside, into_p, into_b, into_h, part_p, part_b, part_h,
    is_empty: tl.constexpr, is_rounded: tl.constexpr,
):  # fmt: skip
    place = _places(at, entry, head, element, into_p, into_b, into_h)
    part_place = _places(part_at, entry, head, element, part_p, part_b, part_h)
    new = tl.load(part + part_place, mask=inside, other=0.0).to(tl.float32)
    if not is_empty:
        if is_rounded:
            new = new.to(into.dtype.element_ty).to(tl.float32)
        new += tl.load(into + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(into + place, new.to(into.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=ITEMS)
def _add(
    into, part, second_into, second_part, rows, part_rows, items, batch, heads, size,
    into_p, into_b, into_h, part_p, part_b, part_h, into_p2, into_b2, into_h2, part_p2, part_b2, part_h2,
    has_rows: tl.constexpr, has_part_rows: tl.constexpr, is_empty: tl.constexpr, is_rounded: tl.constexpr,
    block_items: tl.constexpr, block_size: tl.constexpr,
):  # fmt: skip
    there, head, entry, position, element, inside = _items(items, batch, heads, size, block_items, block_size)
    at, part_at = _row_of(rows, position, there, has_rows), _row_of(part_rows, position, there, has_part_rows)
    if tl.program_id(1) == 0:
        _add_one(into, part, at, part_at, entry, head, element, inside,
                 into_p, into_b, into_h, part_p, part_b, part_h, is_empty, is_rounded)  # fmt: skip
    else:
        _add_one(second_into, second_part, at, part_at, entry, head, element, inside,
                 into_p2, into_b2, into_h2, part_p2, part_b2, part_h2, is_empty, is_rounded)  # fmt: skip


def launch_add(
    into: Sequence[Tensor], part: Sequence[Tensor], rows: Tensor | None, part_rows: Tensor | None,
    empty: bool, rounded: bool,
) -> None:  # fmt: skip
    """See `runtime.kernels.fused.add`."""
    positions = len(part[0]) if part_rows is None else len(part_rows)
    _, batch, heads, size = part[0].shape
    into, part = [_rows_contiguous(each) for each in into], [_rows_contiguous(each) for each in part]
    items, block, grid = _grid(positions * batch * heads, size)
    if items:
        _add[(*grid, len(into))](
            into[0], part[0], into[-1], part[-1], _or(rows, part[0]), _or(part_rows, part[0]),
            items, batch, heads, size,
            *into[0].stride()[:3], *part[0].stride()[:3], *into[-1].stride()[:3], *part[-1].stride()[:3],
            has_rows=rows is not None, has_part_rows=part_rows is not None, is_empty=empty, is_rounded=rounded, **block,
        )  # fmt: skip


@triton.jit(do_not_specialize=ITEMS)
def _inner_products(
    dout, out, delta, items, batch, heads, size, dout_p, dout_b, dout_h, out_p, out_b, out_h, delta_p, delta_b, delta_h,
    block_items: tl.constexpr, block_size: tl.constexpr,
):  # fmt: skip
    there, head, entry, position, element, inside = _items(items, batch, heads, size, block_items, block_size)
    place = _places(position, entry, head, element, dout_p, dout_b, dout_h)
    left = tl.load(dout + place, mask=inside, other=0.0).to(tl.float32)
    place = _places(position, entry, head, element, out_p, out_b, out_h)
    right = tl.load(out + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(delta + position * delta_p + entry * delta_b + head * delta_h, tl.sum(left * right, axis=1), mask=there)


def launch_inner_products(dout: Tensor, out: Tensor) -> Tensor:
    """See `runtime.kernels.fused.inner_products`; the order of the first three dimensions does not matter."""
    dout, out = _rows_contiguous(dout), _rows_contiguous(out)
    delta = torch.empty(dout.shape[:-1], dtype=torch.float32, device=dout.device)
    items, block, grid = _grid(delta.numel(), dout.shape[-1])
    if items:
        _inner_products[grid](
            dout, out, delta, items, *dout.shape[1:], *dout.stride()[:3], *out.stride()[:3], *delta.stride(), **block
        )
    return delta


@triton.jit(do_not_specialize=ITEMS)
def _stand_in(
    dout, delta, out, items, batch, heads, size, dout_p, dout_b, dout_h, delta_p, delta_b, delta_h, out_p, out_b, out_h,
    block_items: tl.constexpr, block_size: tl.constexpr,
):  # fmt: skip
    there, head, entry, position, element, inside = _items(items, batch, heads, size, block_items, block_size)
    place = _places(position, entry, head, element, dout_p, dout_b, dout_h)
    rows = tl.load(dout + place, mask=inside, other=0.0).to(tl.float32)
    wanted = tl.load(delta + position * delta_p + entry * delta_b + head * delta_h, mask=there, other=0.0)
    largest = tl.max(tl.abs(rows), axis=1)
    unit = rows / tl.where(largest == 0.0, 1.0, largest)[:, None]
    lengths = tl.sum(unit * unit, axis=1) * largest
    found = unit * (wanted.to(tl.float32) / tl.where(lengths == 0.0, 1.0, lengths))[:, None]
    place = _places(position, entry, head, element, out_p, out_b, out_h)
    tl.store(out + place, found.to(out.dtype.element_ty), mask=inside)


def launch_stand_in(dout: Tensor, delta: Tensor) -> Tensor:
    """See `runtime.kernels.fused.stand_in_for_out`; the order of the first three dimensions does not matter."""
    dout = _rows_contiguous(dout)
    out = torch.empty(dout.shape, dtype=dout.dtype, device=dout.device)
    items, block, grid = _grid(delta.numel(), dout.shape[-1])
    if items:
        _stand_in[grid](
            dout, delta, out, items, *dout.shape[1:], *dout.stride()[:3], *delta.stride(), *out.stride()[:3], **block
        )
    return out


def _grid(items: int, size: int) -> tuple[int, dict[str, int], tuple[int]]:
    """The items, how a program is sized, and the grid of programs."""
    width = triton.next_power_of_2(max(size, 1))
    block = max(1, ELEMENTS // width)
    return items, {"block_items": block, "block_size": width}, (triton.cdiv(items, block),)


def _rows_contiguous(x: Tensor) -> Tensor:
    """Kernels read the elements of a head side by side; what is written always is so."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _or(rows: Tensor | None, unused: Tensor) -> Tensor:
    return unused if rows is None else rows


# A copy by as many programs as a message of NCCL has channels, to run beside attention (`runtime.kernels.libraries`).
#
# NCCL's blocks have 544 threads; Triton's have powers of two, so these have 512.

COPIED = 8192
"""Elements of 4 bytes that a program copies at a time: 16 per thread, four of the widest loads."""


@triton.jit
def _copy(into, source, elements, trips: tl.constexpr, block: tl.constexpr):
    for trip in range(trips):
        place = (trip * tl.num_programs(0) + tl.program_id(0)) * block + tl.arange(0, block)
        tl.store(into + place, tl.load(source + place, mask=place < elements), mask=place < elements)


def launch_copy(into: Tensor, source: Tensor, blocks: int) -> None:
    """Copy less than 2**31 elements of 4 bytes by so many programs of 512 threads."""
    trips = triton.cdiv(source.numel(), blocks * COPIED)
    _copy[(blocks,)](into, source, source.numel(), trips=trips, block=COPIED, num_warps=16)
