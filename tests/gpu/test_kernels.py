"""Kernels on the device of a rank, or on the one device of a check, against float64."""

from __future__ import annotations

import pytest
import torch

from tasp_lab.validation.gpu_check import Check
from tests.gpu.ghosts import merge_bytes_per_s, merge_errors
from tests.gpu.kernels import check_kernels, check_linear_kernels
from tests.gpu.sizes import Sizes

pytestmark = pytest.mark.gpu

MERGE_LIMIT, COPY_SHARE = 4e-6, 0.7
"""Largest error of a merge of four parts in float32, and the least share of a copy's bandwidth."""


def test_every_attention_kernel_dtype_mask_and_pass_agrees_with_float64(
    check: Check, sizes: Sizes, numbers: dict[str, object]
) -> None:
    """A kernel of this torch or flash-attn differs from the mathematics, or returns log-sum-exp in another form.
    Do not use results of this machine; send the record, with the versions in step 0.
    """
    found = numbers["kernels"] = list[dict[str, object]]()
    for checked in check_kernels(check.device, sizes.kernel_rows, sizes.head_dims):
        found.append(checked._asdict())


def test_linear_attention_agrees_with_float64(check: Check, sizes: Sizes, numbers: dict[str, object]) -> None:
    """A kernel of linear attention differs from its recurrence. A fault of tasp-lab; send the record."""
    numbers["linear_attention"] = check_linear_kernels(check.device, sizes.kernel_rows)


def test_merged_results_agree_with_float64(check: Check, numbers: dict[str, object]) -> None:
    """Also where parts have no keys. A fault of tasp-lab; send the record."""
    errors = [merge_errors(check.device, 257, check.seed + each) for each in range(5)]
    for name in ("out", "lse"):
        numbers[f"{name}_error"] = max((each[name] for each in errors), key=abs)
        for each in errors:
            assert each[name] <= MERGE_LIMIT, f"{name} {each[name]:.2g}, expected at most {MERGE_LIMIT:g}"


def test_a_merge_moves_bytes_as_fast_as_a_copy(gpu: torch.device, numbers: dict[str, object]) -> None:
    """The merge is not one kernel, or is slow. A fault of tasp-lab; send the record."""
    merged, copied = merge_bytes_per_s(gpu, 8192)
    numbers |= {"merge_bytes_per_s": merged, "copy_bytes_per_s": copied, "least_share": COPY_SHARE}
    told = f"a merge moves {merged / copied:.0%} of a copy's bytes/s, expected {COPY_SHARE:.0%} or more"
    assert merged >= COPY_SHARE * copied, told
