"""Tables of single kernel calls beside their predictions.

A row counts unless the constants of the kernel that predicts it were fitted to its table, which is in their source.
"""

from __future__ import annotations

import numpy as np

from tasp_lab.core.choices import WHAT_IF_DTYPE
from tasp_lab.core.errors import ProfileError, TaspLabError, WorkloadError, first_line
from tasp_lab.machines.kernel_model.catalogue import attention_kernel, gpu_alias, gpu_names
from tasp_lab.machines.kernel_model.constants import constants_in
from tasp_lab.machines.kernel_model.kernel import AttentionKernel
from tasp_lab.machines.sampling import NO_SAMPLES, Sampling, kernel_samples
from tasp_lab.measure.accuracy.table_accuracy import MeasuredRow, TableAccuracy
from tasp_lab.measure.inputs import left_out_with
from tasp_lab.measure.readers import KernelRow, KernelTable
from tasp_lab.prediction.interval import Interval, residual_interval
from tasp_lab.prediction.residuals import EAGER_CALLS, KERNELS
from tasp_lab.workload.layer import ELEMENT_BYTES

FITTED = "this table gave constants of the kernel"
"""Why a row that is predicted does not count."""


def evaluate_kernel(table: KernelTable, sampling: Sampling = NO_SAMPLES) -> TableAccuracy:
    """A table beside its prediction; rows without one keep the reason."""
    refused = [MeasuredRow(None, None, row.reason, shape={"line": row.line, **row.cells}) for row in table.refused]
    return TableAccuracy.of(table, [*(_row(table, row, sampling) for row in table.rows), *refused])


def _row(table: KernelTable, row: KernelRow, sampling: Sampling) -> MeasuredRow:
    first = row.shapes[0]
    shape: dict[str, object] = {
        "line": row.line, "gpu": row.gpu, "kernel": row.kernel, "pass": "+".join(each.passing for each in row.shapes),
        "dtype": first.dtype, "causal": first.low > 1 - first.keys, "batch": first.batch, "heads": first.heads,
        "kv_heads": first.kv_heads, "head_dim": first.head_dim, "seq_q": first.queries, "seq_k": first.keys,
    }  # fmt: skip
    try:
        kernel = _kernel(table, row)
    except TaspLabError as error:
        return MeasuredRow(row.measured_s, None, first_line(error), shape=shape)
    predicted_s = sum(float(kernel.time_s(each)) for each in row.shapes)
    if _is_fitted(table, row, kernel):
        return MeasuredRow(row.measured_s, predicted_s, FITTED, shape=shape)
    interval = _interval(table, row, kernel, predicted_s, sampling) if sampling.samples else None
    return MeasuredRow(row.measured_s, predicted_s, shape=shape, interval=interval)


def _kernel(table: KernelTable, row: KernelRow) -> AttentionKernel:
    """The kernel that predicts a row. Raises `TaspLabError` with the reason if there is none."""
    dtype = row.shapes[0].dtype
    if dtype not in ELEMENT_BYTES:
        raise WorkloadError(f"unknown dtype {dtype!r}")
    if dtype == WHAT_IF_DTYPE:
        raise WorkloadError(f"dtype {dtype!r}: no kernel has constants of it")
    if stated := table.headers.get("out_of_scope"):
        raise WorkloadError(stated)
    gpu, profile = row.gpu, table.headers.get("profile")
    if profile:
        stated = gpu_alias(profile)
        of_profile = stated if stated in gpu_names() else gpu_alias(profile.partition("-")[0])
        if gpu == stated:  # no column names the GPU
            gpu = of_profile
        elif of_profile in gpu_names() and gpu != of_profile:
            raise ProfileError(f"GPU {gpu!r} is not that of the profile {profile}")
    return attention_kernel(gpu, row.kernel)


def _is_fitted(table: KernelTable, row: KernelRow, kernel: AttentionKernel) -> bool:
    """Whether constants of a kernel name a source of the table as what they were fitted to."""
    variants = [kernel.variant(shape.passing, shape.head_dim) for shape in row.shapes]
    stated = [" ".join(each.source for each in constants_in(variant).values()) for variant in variants]
    sources = [source for source in table.headers.get("source", "").splitlines() if source]
    return any(source in text for text in stated for source in sources)


def _interval(
    table: KernelTable, row: KernelRow, kernel: AttentionKernel, predicted_s: float, sampling: Sampling
) -> Interval:
    """Samples of the kernel's constants beside the residual of tables timed alike, without the source of the table."""
    samples = kernel_samples(kernel, sampling)
    times_s = np.array([sum(float(each.time_s(shape)) for shape in row.shapes) for each in samples])
    regime = EAGER_CALLS if table.timing == "eager" else KERNELS
    return residual_interval(predicted_s, regime, left_out_with(table), times_s)
