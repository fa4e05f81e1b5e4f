"""What a pass does with rows of results beside attention itself, each in one kernel on a GPU.

Partial results over disjoint keys are merged by their log-sum-exp (lse)::

    out' = out * sigmoid(lse - lse_b) + out_b * sigmoid(lse_b - lse)
    lse' = log(exp(lse) + exp(lse_b))

as in online softmax (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). The result does not
depend on the order and grouping of the keys, up to rounding. A row has weight 0 if its lse is -inf, whatever its out,
or if its lse is +inf and its out 0, as flash kernels return rows without keys. Any other row of lse +inf, and any of
NaN, is NaN in the sum.

Tensors are the fields of blocks, [positions, batch, heads, ...], of any strides. `rows` and `part_rows` number the
positions that are meant, int64 on the device; None means all of them. Where torch runs on a GPU and Triton is installed
each function is one launch (`runtime.kernels.fused_triton`), else the same formulas in operations of torch.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from functools import cache
from types import ModuleType

import torch

Tensor = torch.Tensor


def merge(
    out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor,
    rows: Tensor | None = None, part_rows: Tensor | None = None, *, empty: bool = False,
) -> None:  # fmt: skip
    """Merge a part in place, or copy it if there is nothing yet (`empty`); rows of weight 0 get out 0 and lse -inf.

    `out` and `part` are [..., head_dim], `lse` and `part_lse` have the same shape without the last dimension.
    """
    if (triton := _triton_for(out)) is not None:
        triton.launch_merge(out, lse, part, part_lse, rows, part_rows, empty)
        return
    if part_rows is not None:
        part, part_lse = part[part_rows], part_lse[part_rows]
    if rows is None:
        _merge(out, lse, part, part_lse, empty)
        return
    into, into_lse = (x.new_empty(len(rows), *x.shape[1:]) if empty else x[rows] for x in (out, lse))
    _merge(into, into_lse, part, part_lse, empty)
    out.index_copy_(0, rows, into)
    lse.index_copy_(0, rows, into_lse)


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, empty: bool) -> None:
    """Rows of weight 0 are rare, so on a CPU all are looked at together first; a GPU would have to be waited for."""
    nothing = None
    if not part_lse.is_cpu or not math.isfinite(part_lse.sum().item()):
        nothing = (part_lse == -math.inf) | ((part_lse == math.inf) & (part[..., 0] == 0))
        part, part_lse = part.masked_fill(nothing.unsqueeze(-1), 0), part_lse.masked_fill(nothing, -math.inf)
    if empty:
        out.copy_(part)
        lse.copy_(part_lse)
        return
    difference = torch.sub(part_lse, lse)
    part_weight, weight = difference.sigmoid(), difference.neg_().sigmoid_()
    if nothing is not None:
        weight.masked_fill_(nothing, 1)
        part_weight.masked_fill_(nothing, 0)
    out.mul_(weight.unsqueeze(-1)).addcmul_(part, part_weight.unsqueeze(-1))
    torch.logaddexp(lse, part_lse.to(lse.dtype), out=lse)


def add(
    into: Sequence[Tensor], part: Sequence[Tensor],
    rows: Tensor | None = None, part_rows: Tensor | None = None, *, empty: bool = False, rounded: bool = False,
) -> None:  # fmt: skip
    """Add a part to fields in place, or copy it if there is nothing yet (`empty`).

    `rounded`: what is added is rounded to the dtype of the field first, so that two parts may come in any order.
    """
    if (triton := _triton_for(into[0])) is not None and _in_one_launch(into, part):
        triton.launch_add(into, part, rows, part_rows, empty, rounded)
        return
    if triton is not None and len(into) > 1:  # gradients of keys and values of another width
        for total, new in zip(into, part, strict=True):
            add((total,), (new,), rows, part_rows, empty=empty, rounded=rounded)
        return
    for total, new in zip(into, part, strict=True):
        each = new if part_rows is None else new[part_rows]
        if rounded and each.dtype.itemsize > total.dtype.itemsize:
            each = each.to(total.dtype)
        if rows is not None:  # what is written must not lie in the memory that is written to
            each = each.to(total.dtype, copy=part_rows is None) if empty else total[rows] + each
            total.index_copy_(0, rows, each.to(total.dtype))
        elif empty:
            total.copy_(each)
        else:
            total.add_(each)


def _in_one_launch(into: Sequence[Tensor], part: Sequence[Tensor]) -> bool:
    """Whether one launch can add these fields: one or two, of one shape [positions, batch, heads, size]."""
    tensors = (*into, *part)
    return (
        len(into) <= 2
        and all(each.dim() == 4 and each.shape[1:] == into[0].shape[1:] for each in tensors)
        and all(each.dtype in (torch.float32, torch.bfloat16, torch.float16) for each in tensors)
    )


def inner_products(dout: Tensor, out: Tensor) -> Tensor:
    """The inner product of each row of a result with its gradient, float32: [..., head_dim] to [...]."""
    if (triton := _triton_for(dout)) is not None:
        found: Tensor = triton.launch_inner_products(dout, out)
        return found
    return (dout.float() * out.float()).sum(-1)


def stand_in_for_out(dout: Tensor, delta: Tensor) -> Tensor:
    """The shortest rows whose inner products with the rows of dout are delta, in the dtype of dout.

    They are no longer than the actual result, so rounding is no worse. dout is [..., head_dim], delta [...].

    >>> stand_in_for_out(torch.tensor([3.0, 4.0]).view(1, 1, 1, 2), torch.tensor([[[50.0]]])).flatten().tolist()
    [6.0, 8.0]
    """
    if (triton := _triton_for(dout)) is not None:
        found: Tensor = triton.launch_stand_in(dout, delta)
        return found
    rows = dout.double()  # in float32 squares may underflow
    squares = torch.linalg.vecdot(rows, rows).clamp_min_(1e-300)  # rows of 0 have delta 0
    return rows.mul_((delta / squares).unsqueeze(-1)).to(dout.dtype)


def with_lse_gradient(dout: Tensor, out: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of results, and rows in place of the results, with which a kernel adds the gradient of their lse.

    The derivative of lse_i with respect to a score s_ij is the weight P_ij. So the gradient of scores is::

        dS_ij = P_ij * (dO_i . v_j - (dO_i . O_i - dlse_i))

    and kernels, which take the inner product of each row of dout and out, get both through rows that have this one.
    A row of dout of 0 has no inner product but 0 with any row. It gets a first element, so small that what it adds to
    other gradients is lost in rounding. dout and out are [..., head_dim], dlse [...] in float32.

    >>> dout, dlse = torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([-43.0, 1.0])
    >>> dout, out = with_lse_gradient(dout, torch.ones(2, 2), dlse)
    >>> dout.tolist(), inner_products(dout, out).tolist()
    ([[3.0, 4.0], [8.673617379884035e-19, 0.0]], [50.0, -1.0])
    """
    delta = inner_products(dout, out) - dlse
    is_half = dout.dtype == torch.float16
    least = (delta.abs() / (_LARGEST_HALF if is_half else _LARGEST)).clamp_min(_SMALLEST_HALF if is_half else _SMALLEST)
    is_short = (dout.abs().amax(-1) < least) & (delta != 0)
    dout = dout.clone()
    dout[..., 0] = torch.where(is_short, least.to(dout.dtype), dout[..., 0])
    return dout, stand_in_for_out(dout, delta)


_LARGEST, _SMALLEST = 2.0**60, 2.0**-100
"""The largest element in place of a result, and the smallest of a gradient, in types with the exponents of float32.

Both are far from its limits 2**128 and 2**-126, and their product with 1 is far below a rounding error.
"""

_LARGEST_HALF, _SMALLEST_HALF = 2.0**15, 2.0**-24
"""The same in float16: half of its limit, and its smallest number; 2**-15 is below its rounding error, 2**-11."""


def _triton_for(x: Tensor) -> ModuleType | None:
    """The kernels of Triton where a tensor is on a GPU and Triton is installed."""
    return None if x.is_cpu or x.dtype == torch.float64 else _triton()


@cache
def _triton() -> ModuleType | None:
    """`runtime.kernels.fused_triton`, None where torch has no GPU or Triton is missing."""
    if not torch.cuda.is_available():
        return None
    try:
        return importlib.import_module("runtime.kernels.fused_triton")
    except ImportError:
        return None
