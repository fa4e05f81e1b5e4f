"""How parts of a block are joined: data are copied, sums added, attention results merged by their log-sum-exp."""

from __future__ import annotations

from runtime.executor.views import Views
from runtime.kernels.lse_merge import copy, merge
from runtime.kernels.partials import Partial
from tasp_lab.schedule.blocks import Join


def join(how: Join, into: Views, part: Views, empty: bool, rounded: bool) -> None:
    """Join a part to a copy, which it replaces if the copy is `empty`.

    `rounded`: what is added is rounded to the dtype of the copy first, so that two parts may come in any order.
    """
    if how == "merge":
        (_copy_result if empty else _merge)(into, part)
    elif how == "add" and not empty:
        for total, new in zip(into, part, strict=True):
            total.add_(new.to(total.dtype) if rounded and new.dtype != total.dtype else new)
    else:
        for old, new in zip(into, part, strict=True):
            old.copy_(new)


def _copy_result(into: Views, part: Views) -> None:
    out, lse = into
    copy(out, lse, Partial(*part))


def _merge(into: Views, part: Views) -> None:
    out, lse = into
    merge(out, lse, Partial(*part))
