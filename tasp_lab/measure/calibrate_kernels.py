"""``calibrate --kernels``: the constants of an attention kernel on a GPU, from a table of times or measured live."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from tasp_lab.core.arrays import FloatArray
from tasp_lab.core.errors import FitError, QuantityError, TableError
from tasp_lab.core.progress import ProgressCallback, no_progress
from tasp_lab.core.tables import Part, Table
from tasp_lab.machines.kernel_model.catalogue import attention_kernel, gpu_names, kernel_names
from tasp_lab.machines.kernel_model.constants import (
    PASSES,
    Gpu,
    KernelConstant,
    KernelFile,
    Passing,
    Variant,
    constants_in,
    gpus,
    kernel_document,
)
from tasp_lab.machines.kernel_model.kernel import AttentionKernel
from tasp_lab.measure.fit.acceptance import Acceptance, Fitted, folds, mean_error
from tasp_lab.measure.fit.fit_kernels import KernelTime, fit_kernel
from tasp_lab.measure.readers.file_position import FilePosition, parse_csv
from tasp_lab.measure.readers.kernel_table import KernelTable, kernel_table, read_kernel_table

LIVE = "live"
_ASSUMED_GPU = "h100"
_HARDWARE = {"sms": 1.0, "peak_tflops": 1e12, "vector_tflops": 1e12, "memory_gb_per_s": 1e9}
_NO_ROWS_WIDER = 0.5


def calibrate_kernels(
    measurements: Sequence[Path | str], profile: str | None = None, progress: ProgressCallback = no_progress
) -> Fitted[KernelFile]:
    """Fit one kernel on one GPU.

    Parameters
    ----------
    measurements : tables of kernel times (`tasp_lab.measure.readers.kernel_table`), or ``live``: time the fastest
        kernel of this machine's GPU, or of its processor where it has none.
    profile : the machine that the rows must be of.

    A GPU that is not known is described by headers ``sms``, ``peak_tflops``, ``vector_tflops`` and
    ``memory_gb_per_s``; without them it is assumed to be like an H100, with wide intervals.

    Raises `TableError` for rows of another GPU than the profile's or of several kernels, and `FitError`.
    """
    if not measurements:
        raise QuantityError("--kernels: nothing to calibrate from, expected tables of kernel times, or live")
    if LIVE in map(str, measurements):
        if len(measurements) > 1:
            raise QuantityError("--kernels live: measured here, expected no tables beside it")
        tables = [_measured_here(progress)]
    else:
        tables = [read_kernel_table(Path(path)) for path in measurements]
    gpu, kernel = _only_kernel(tables, profile)
    hardware = gpus().get(gpu) or _described(gpu, tables)
    rows = {passing: times for passing in PASSES if (times := _rows(tables, passing))}
    if not rows:
        raise FitError(f"{tables[0].name}: no row of one pass, expected fwd or bwd")
    source = ", ".join(Path(table.name).name for table in tables)
    found = {passing: fit_kernel(hardware, kernel, passing, times, source) for passing, times in rows.items()}
    notes, variants = [], [variant for fit in found.values() for variant in fit.variants]
    for passing in PASSES:
        if passing not in found:
            other = next(iter(found))
            notes.append(f"{passing}: no rows; assumed at the rate of {other}")
            variants += [_assumed(variant, passing, other) for variant in found[other].variants]
    if hardware.name not in gpus():
        notes.append(f"GPU {gpu}: {hardware.sms.source}")
    own = None if gpu in gpus() else hardware
    acceptances = tuple(
        _acceptance(hardware, kernel, passing, times, fit.residuals, progress)
        for (passing, times), fit in zip(rows.items(), found.values(), strict=True)
    )
    file = KernelFile(gpu, kernel, tuple(variants), own)
    constants = [
        {"pass": variant.passing, "head_dim": variant.head_dim, "name": name, **msgspec.structs.asdict(constant)}
        for variant in file.variants
        for name, constant in constants_in(variant).items()
    ]
    document = {
        "gpu": gpu,
        "kernel": kernel,
        "accepted": all(each.accepted for each in acceptances),
        "acceptance": {each.what: each.to_dict() for each in acceptances},
        "constants": constants,
        "mean_relative_error_of_fit": {each.what: each.after for each in acceptances},
        "rows": {each.what: each.rows for each in acceptances},
        "notes": notes,
    }
    parts: list[Part] = [
        *Table.of(f"{kernel} on {gpu}", constants, {
            "pass": "{pass}", "head dim": "{head_dim}", "constant": "{name}", "value": "{value:.4g}",
            "90 % from": "{low:.4g}", "to": "{high:.4g}", "source": "{source}",
        }, (0, 2, 6)),
        *Table.of("predicted against measured", map(vars, acceptances), {
            "pass": "{what}", "rows": "{rows}", "mean error before": "{before:.1%}", "after": "{after:.1%}",
            "held out": "{held_out:.1%}",
        }),
        *(each.line() for each in acceptances),
        *notes,
    ]  # fmt: skip
    return Fitted(document, constants, parts, file, lambda _: kernel_document(file), acceptances, tuple(notes))


def _rows(tables: Sequence[KernelTable], passing: Passing) -> list[KernelTime]:
    """The rows of one pass alone."""
    return [
        KernelTime(row.shapes[0], row.measured_s, table.name)
        for table in tables
        for row in table.rows
        if len(row.shapes) == 1 and row.shapes[0].passing == passing
    ]


def _acceptance(
    gpu: Gpu, kernel: str, passing: Passing, rows: Sequence[KernelTime], residuals: FloatArray,
    progress: ProgressCallback,
) -> Acceptance:  # fmt: skip
    """Whether a fit of a pass is better than the constants that tasp-lab has, also on held-out rows."""
    measured_s, before = np.array([row.time_s for row in rows]), None
    if gpu.name in gpus() and kernel in kernel_names(gpu.name):
        known = attention_kernel(gpu.name, kernel)
        before = mean_error(np.array([known.time_s(row.shape) for row in rows], float), measured_s)
    held_out_s, why = _held_out(gpu, kernel, passing, rows, progress)
    held_out = None if why else mean_error(held_out_s, measured_s)
    return Acceptance(len(rows), before, float(np.abs(np.expm1(residuals)).mean()), held_out, why, passing)


def _held_out(
    gpu: Gpu, kernel: str, passing: Passing, rows: Sequence[KernelTime], progress: ProgressCallback
) -> tuple[FloatArray, str]:
    """The seconds of each row by a fit to other rows; none, with the reason, if a fit would lack a head dimension."""
    order = sorted(range(len(rows)), key=lambda row: rows[row].shape)
    head_dims, found_s = {row.shape.head_dim for row in rows}, np.zeros(len(rows))
    for number, places in enumerate(parts := folds(len(rows)), 1):
        aside = {order[place] for place in places}
        kept = [row for place, row in enumerate(rows) if place not in aside]
        if lacking := head_dims - {row.shape.head_dim for row in kept}:
            return np.zeros(0), f"too few of head dimension {min(lacking)}"
        progress(
            f"{passing}: fit {number} of {len(parts)} without {len(aside)} of {len(rows)} rows, which are held out"
        )
        variants = fit_kernel(gpu, kernel, passing, kept, "rows that are kept").variants
        fitted = AttentionKernel(gpu, KernelFile(gpu.name, kernel, variants))
        for row in aside:
            found_s[row] = fitted.time_s(rows[row].shape)
    return found_s, ""


def _only_kernel(tables: Sequence[KernelTable], profile: str | None) -> tuple[str, str]:
    """The GPU and the kernel of all rows."""
    expected = gpu_of_profile(profile) if profile else None
    first = tables[0].rows[0]
    for table in tables:
        for row in table.rows:
            place = FilePosition(table.name, row.line)
            if expected and row.gpu != expected:
                raise place.error(f"measured on {row.gpu}", f"{expected}, the GPU of {profile}")
            if (row.gpu, row.kernel) != (first.gpu, first.kernel):
                raise place.error(f"{row.kernel} on {row.gpu}", f"one kernel on one GPU, {first.kernel} on {first.gpu}")
    return first.gpu, first.kernel


def gpu_of_profile(profile: str) -> str:
    """The GPU of a profile's machines: the name begins with it. Raises `TableError` if it does not.

    >>> gpu_of_profile("h100-2x8"), gpu_of_profile("a100_100g")
    ('h100', 'a100')
    """
    found = [gpu for gpu in gpu_names() if re.match(rf"{gpu}($|[-_:.])", profile)]
    if not found:
        raise TableError(f"profile {profile}: its GPU is not known, expected a name that begins with one of ours")
    return max(found, key=len)


def _described(name: str, tables: Sequence[KernelTable]) -> Gpu:
    """A GPU that is not ours, from the headers of its tables; what they do not tell is assumed."""
    headers = {key: value for table in tables for key, value in table.headers.items()}
    like = gpus()[_ASSUMED_GPU]
    defaults = (like.sms, like.peak_flops, like.vector_flops, like.memory_bytes_per_s)
    constants = []
    for (header, unit), default in zip(_HARDWARE.items(), defaults, strict=True):
        if header in headers:
            value = FilePosition(tables[0].name, 1).positive(headers[header], header) * unit
            constants.append(KernelConstant(value, value, value, f"header {header!r} of the table"))
        else:
            source = f"assumed: no header {header!r}, that of {_ASSUMED_GPU}"
            constants.append(KernelConstant(default.value, default.value / 2, default.value * 2, source))
    sms, peak_flops, vector_flops, memory_bytes_per_s = constants
    return Gpu(name, (), sms, peak_flops, vector_flops, memory_bytes_per_s, like.exponentials)


def _assumed(variant: Variant, passing: Passing, other: str) -> Variant:
    rate = variant.rate.value
    low, high = rate * (1 - _NO_ROWS_WIDER), rate * (1 + _NO_ROWS_WIDER)
    constant = KernelConstant(rate, low, high, f"assumed: no {passing} rows; the rate of {other}")
    return msgspec.structs.replace(variant, passing=passing, rate=constant)


def _measured_here(progress: ProgressCallback) -> KernelTable:
    from runtime.kernels.timing import measured_table

    return kernel_table(parse_csv(measured_table(progress), LIVE))
