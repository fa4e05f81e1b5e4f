"""Tables of single kernel calls beside their predictions.

A row counts unless the constants of the kernel that predicts it were fitted to its table, which is in their source.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from tasp_lab.core.choices import WHAT_IF_DTYPE
from tasp_lab.core.errors import ProfileError, TaspLabError
from tasp_lab.machines.kernel_model.catalogue import attention_kernel, gpu_alias, gpu_names
from tasp_lab.machines.kernel_model.constants import constants_in
from tasp_lab.machines.kernel_model.kernel import AttentionKernel
from tasp_lab.machines.sampling import NO_SAMPLES, Sampling, kernel_samples
from tasp_lab.measure.accuracy.table_accuracy import MeasuredRow, TableAccuracy, reason_of
from tasp_lab.measure.inputs import left_out_with
from tasp_lab.measure.readers import KernelRow, KernelTable
from tasp_lab.prediction.interval import Interval, residual_interval
from tasp_lab.prediction.residuals import EAGER_CALLS, KERNELS
from tasp_lab.workload.kernel_shapes import KernelShape
from tasp_lab.workload.layer import ELEMENT_BYTES

FITTED = "this table gave constants of the kernel"
"""Why a row that is predicted does not count."""


def evaluate_kernel(table: KernelTable, sampling: Sampling = NO_SAMPLES) -> TableAccuracy:
    """A table beside its prediction; rows without one keep the reason."""
    refused = (MeasuredRow(None, None, row.reason, None, {"line": row.line, **row.cells}) for row in table.refused)
    rows = (*(_row(table, row, sampling) for row in table.rows), *refused)
    counts = any(row.in_scope for row in rows)
    reason = "" if counts else Counter(row.reason for row in rows).most_common(1)[0][0]
    return TableAccuracy(table, reason, rows)


def _row(table: KernelTable, row: KernelRow, sampling: Sampling) -> MeasuredRow:
    shape = _shape(row)
    dtype = row.shapes[0].dtype
    if dtype not in ELEMENT_BYTES:
        return MeasuredRow(row.measured_s, None, f"unknown dtype {dtype!r}", None, shape)
    if dtype == WHAT_IF_DTYPE:
        return MeasuredRow(row.measured_s, None, f"dtype {dtype!r}: no kernel has constants of it", None, shape)
    if stated := table.headers.get("out_of_scope"):
        return MeasuredRow(row.measured_s, None, stated, None, shape)
    try:
        kernel = attention_kernel(_gpu(table, row), row.kernel)
    except TaspLabError as error:
        return MeasuredRow(row.measured_s, None, reason_of(error), None, shape)
    predicted_s = sum(float(kernel.time_s(each)) for each in row.shapes)
    reason = FITTED if any(_is_fitted(table, kernel, each) for each in row.shapes) else ""
    counts = bool(sampling.samples) and not reason
    interval = _interval(table, row, kernel, predicted_s, sampling) if counts else None
    return MeasuredRow(row.measured_s, predicted_s, reason, None, shape, interval=interval)


def _interval(
    table: KernelTable, row: KernelRow, kernel: AttentionKernel, predicted_s: float, sampling: Sampling
) -> Interval:
    """Samples of the kernel's constants beside the residual of tables timed alike, without the source of the table."""
    samples = kernel_samples(kernel, sampling)
    times_s = np.array([sum(float(each.time_s(shape)) for shape in row.shapes) for each in samples])
    regime = EAGER_CALLS if table.timing == "eager" else KERNELS
    return residual_interval(predicted_s, regime, left_out_with(table), times_s)


def _gpu(table: KernelTable, row: KernelRow) -> str:
    """The GPU of a row. Raises `ProfileError` for another one than that of the profile of its table."""
    profile = table.headers.get("profile")
    if not profile:
        return row.gpu
    stated = gpu_alias(profile)
    of_profile = stated if stated in gpu_names() else gpu_alias(profile.partition("-")[0])
    if row.gpu == stated:  # no column names the GPU
        return of_profile
    if of_profile in gpu_names() and row.gpu != of_profile:
        raise ProfileError(f"GPU {row.gpu!r} is not that of the profile {profile}")
    return row.gpu


def _is_fitted(table: KernelTable, kernel: AttentionKernel, shape: KernelShape) -> bool:
    """Whether constants of a kernel name a source of the table as what they were fitted to."""
    variant = kernel.variant(shape.passing, shape.head_dim)
    stated = " ".join(each.source for each in constants_in(variant).values())
    return any(source in stated for source in table.headers.get("source", "").splitlines() if source)


def _shape(row: KernelRow) -> dict[str, object]:
    first, passes = row.shapes[0], [shape.passing for shape in row.shapes]
    return {
        "line": row.line,
        "gpu": row.gpu,
        "kernel": row.kernel,
        "pass": "+".join(passes),
        "dtype": first.dtype,
        "causal": first.low > 1 - first.keys,
        "batch": first.batch,
        "heads": first.heads,
        "kv_heads": first.kv_heads,
        "head_dim": first.head_dim,
        "seq_q": first.queries,
        "seq_k": first.keys,
    }
