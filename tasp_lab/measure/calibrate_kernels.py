"""``calibrate --kernels``: the constants of an attention kernel on a GPU, from a table of times or measured live.

Per GPU, kernel and pass, all head dimensions together. Tiles and their order come from the kernel's code
(`tasp_lab.machines.kernel_model.designs`); of several candidates, the one that agrees best is taken. The few constants
that remain are fitted as logarithms with a robust loss. Weak priors keep those in place that the rows do not identify;
they are what documents say: the exponentials from the units of an SM (16 per clock, against the FLOPs of its tensor
cores), a launch of some microseconds, a start and end that cost about a block of keys.

Starts and ends of tiles slow short calls, as does whatever a benchmark runs beside the kernel in proportion to its
operands. A fit that takes one for the other finds long calls faster than anything measured. So long calls are held
near the fastest row, corrected for SMs that its tiles leave idle: rows with a higher rate move it, extrapolation does
not.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from scipy.optimize import OptimizeResult, least_squares

from tasp_lab.core.arrays import FloatArray
from tasp_lab.core.errors import FitError, QuantityError, TableError
from tasp_lab.core.progress import ProgressCallback, no_progress
from tasp_lab.core.tables import Part, Table
from tasp_lab.machines.kernel_model.catalogue import attention_kernel, gpu_names, kernel_names
from tasp_lab.machines.kernel_model.constants import (
    PASSES,
    Design,
    Gpu,
    KernelConstant,
    KernelFile,
    Passing,
    Variant,
    constants_in,
    gpus,
    kernel_document,
)
from tasp_lab.machines.kernel_model.designs import BLACKWELL, Architecture, architecture, designs
from tasp_lab.machines.kernel_model.kernel import AttentionKernel, busy_share, call_parts, throttled
from tasp_lab.measure.fit.acceptance import Acceptance, Fitted, held_out
from tasp_lab.measure.readers.file_position import FilePosition, parse_csv
from tasp_lab.measure.readers.kernel_table import KernelTable, kernel_table, read_kernel_table
from tasp_lab.workload.kernel_shapes import KernelShape

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
    known = attention_kernel(gpu, kernel) if gpu in gpus() and kernel in kernel_names(gpu) else None
    source = ", ".join(Path(table.name).name for table in tables)
    found: dict[Passing, FittedKernel] = {}
    rows: dict[Passing, list[KernelTime]] = {}
    for passing in PASSES:
        rows[passing] = [
            KernelTime(row.shapes[0], row.measured_s, table.name)
            for table in tables
            for row in table.rows
            if [shape.passing for shape in row.shapes] == [passing]
        ]
        if rows[passing]:
            found[passing] = fit_kernel(hardware, kernel, passing, rows[passing], source)
    if not found:
        raise FitError(f"{tables[0].name}: no row of one pass, expected fwd or bwd")
    notes, variants = [], [variant for fitted in found.values() for variant in fitted.variants]
    for passing in PASSES:
        if passing not in found:
            ((other, fitted),) = found.items()
            notes.append(f"{passing}: no rows; assumed at the rate of {other}")
            variants += [_assumed(variant, passing, other) for variant in fitted.variants]
    if gpu not in gpus():
        notes.append(f"GPU {gpu}: {hardware.sms.source}")
    acceptances = tuple(
        _acceptance(hardware, kernel, known, passing, rows[passing], fitted.residuals, progress)
        for passing, fitted in found.items()
    )
    file = KernelFile(gpu, kernel, tuple(variants), None if gpu in gpus() else hardware)
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


def _acceptance(
    gpu: Gpu, kernel: str, known: AttentionKernel | None, passing: Passing, rows: Sequence[KernelTime],
    residuals: FloatArray, progress: ProgressCallback,
) -> Acceptance:  # fmt: skip
    """Whether a fit of a pass is better than the constants that tasp-lab has, also on held-out rows."""

    def times_s(kernel: AttentionKernel, places: Iterable[int]) -> FloatArray:
        return np.array([kernel.time_s(rows[place].shape) for place in places], float)

    def without(kept: Sequence[int], aside: Sequence[int]) -> FloatArray:
        others = [rows[place] for place in kept]
        if lacking := {row.shape.head_dim for row in rows} - {row.shape.head_dim for row in others}:
            raise FitError(f"one row of head dimension {min(lacking)}, expected two or more")
        variants = fit_kernel(gpu, kernel, passing, others, "rows that are kept").variants
        return times_s(AttentionKernel(gpu, KernelFile(gpu.name, kernel, variants)), aside)

    measured_s, every = np.array([row.time_s for row in rows]), range(len(rows))
    before_s = None if known is None else times_s(known, every)
    held_out_s, why = held_out(sorted(every, key=lambda place: rows[place].shape), without, progress, passing)
    return Acceptance.of(measured_s, before_s, measured_s * np.exp(residuals), held_out_s, why, passing)


def _only_kernel(tables: Sequence[KernelTable], profile: str | None) -> tuple[str, str]:
    """The GPU and the kernel of all rows."""
    expected = gpu_of_profile(profile) if profile else None
    first = tables[0].rows[0]
    for place, row in ((FilePosition(table.name, row.line), row) for table in tables for row in table.rows):
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
    like, constants = gpus()[_ASSUMED_GPU], []
    defaults = (like.sms, like.peak_flops, like.vector_flops, like.memory_bytes_per_s)
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


# ------------------------------------------------------------------------------------------ the fit to rows of a pass

_EXPONENTIALS: Mapping[Architecture, float] = {
    "ampere": 32.0, "ada": 32.0, "hopper": 50.0, "blackwell": 90.0, "blackwell-ultra": 45.0, "cdna": 40.0,
    "other": 40.0,
}  # fmt: skip
"""What the softmax of a score costs before any fit: exponentials of the hardware (`Gpu.exponentials`), of which a part
overlaps with the tensor cores."""

_RATE_BY_DIM = 0.1
"""How much rates of head dimensions differ beyond what exponentials explain, as a standard deviation of logarithms."""

_OVERHEAD = 0.05
"""What launch, starts and ends of tiles and kernels beside it add to the fastest row: a standard deviation of
logarithms."""

EXTRAPOLATION = 0.1
"""A rate of long calls that is further than this above the fastest row is called extrapolated in its source."""

_SCALE = 0.05
"""Residuals beyond this count less."""

_FIRST_SCALE = 0.3
"""Far from the solution, all rows count."""

_LEAST_ROWS = 4
"""Fewer rows of a head dimension do not tell its rate: shared constants and other head dimensions do."""

_NO_ROW = (1.0, 0.0)
"""FLOPs and seconds of no row."""

_ROWS_TO_CHOOSE = 40
"""A design is chosen by at most so many rows, evenly taken."""

_LEAST_SPREAD = 0.01
"""Times are not measured better than this."""

_LEAST_WIDTH = 0.03
"""No fitted constant is claimed to be known better than this."""


class KernelTime(NamedTuple):
    """A measured call, and the table that it is from."""

    shape: KernelShape
    time_s: float
    table: str = ""


class Prior(NamedTuple):
    """A middle and the standard deviation of its logarithm; `most` is the largest value."""

    middle: float
    deviation: float
    most: float = math.inf


class FittedKernel(NamedTuple):
    """The variants of one pass, by head dimension, and the residuals (logarithms of predicted over measured)."""

    variants: tuple[Variant, ...]
    residuals: FloatArray


def priors(gpu: Gpu, passing: Passing) -> dict[str, Prior]:
    """What documents say of the constants that all head dimensions share.

    On Blackwell two tiles of an SM take turns between tensor cores and exponentials: one alone uses little more than
    half of it, as calls with few tiles show (cuDNN on GB200).
    """
    return {
        "exponentials": Prior(_EXPONENTIALS[architecture(gpu.name)] * (1.0 if passing == "forward" else 0.4), 0.4),
        "alone": Prior(0.6 if architecture(gpu.name) in BLACKWELL else 0.75, 0.15, 1.0),
        "tile_columns": Prior(80.0, 0.8),
        "masked": Prior(0.97, 0.04, 1.0),
        "offset": Prior(0.99, 0.05, 1.0),
        "split": Prior(0.85, 0.1, 1.0),
        "launch_s": Prior(4e-6 if passing == "forward" else 12e-6, 0.5),
        "unsustained": Prior(0.05, 0.7, 0.25),
        "settle_s": Prior(10e-3, 0.5),
    }


def fit_kernel(gpu: Gpu, kernel: str, passing: Passing, rows: Sequence[KernelTime], source: str) -> FittedKernel:
    """The constants of a kernel on a GPU for one pass. `source` names the tables of the rows.

    Raises `FitError` without rows.
    """
    if not rows:
        raise FitError(f"{gpu.name}, {kernel}, {passing}: no rows to fit")
    head_dims = sorted({row.shape.head_dim for row in rows})
    best = _Fit(gpu, passing, rows, {d: _best_design(gpu, kernel, passing, rows, d) for d in head_dims})
    text = f"fit: {len(rows)} rows of {source}"
    return FittedKernel(tuple(best.variant(head_dim, text) for head_dim in head_dims), best.residuals(best.result.x))


def _best_design(gpu: Gpu, kernel: str, passing: Passing, rows: Sequence[KernelTime], head_dim: int) -> Design:
    candidates = designs(gpu.name, kernel, passing, head_dim)
    if len(candidates) == 1:
        return candidates[0]
    own = [row for row in rows if row.shape.head_dim == head_dim]
    some = own[:: math.ceil(len(own) / _ROWS_TO_CHOOSE)]
    costs = [float(_Fit(gpu, passing, some, {head_dim: each}, [_SCALE], held=False).result.cost) for each in candidates]
    return candidates[costs.index(min(costs))]


class _Fit:
    """The fit of one design per head dimension. Parameters: logarithms over the middle of each prior, then of rates.

    Rates are `held` near the fastest rows; where designs are compared, rows alone decide.
    """

    def __init__(
        self,
        gpu: Gpu,
        passing: Passing,
        rows: Sequence[KernelTime],
        design: Mapping[int, Design],
        scales: Sequence[float] = (_FIRST_SCALE, _SCALE),
        *,
        held: bool = True,
    ) -> None:
        self.gpu, self.passing, self.rows, self.design = gpu, passing, rows, design
        self.head_dims = list(design)
        self.shared = priors(gpu, passing)
        if all(each.slots == 1 for each in design.values()):
            self.shared["alone"] = Prior(1.0, 1e-3, 1.0)
        self.measured = np.array([row.time_s for row in rows])
        counts = Counter(row.table for row in rows)
        # a table counts by the square root of its rows, so that a long one does not outvote the others
        weights = np.array([counts[row.table] ** -0.25 for row in rows])
        self.weights = weights / np.sqrt((weights**2).mean())
        self.own = {each: [row for row in rows if row.shape.head_dim == each] for each in self.head_dims}
        self.fastest = {each: max(row.shape.flops / row.time_s for row in own) for each, own in self.own.items()}
        self.held = {each: self._held(each) if held else _NO_ROW for each in self.head_dims}
        self.result = self._minimise(scales)

    def _held(self, head_dim: int) -> tuple[float, float]:
        """FLOPs and seconds of the row with the highest rate, less the time of SMs that its tiles leave idle.

        Its seconds are 0 with too few rows to tell.
        """
        own, design = self.own[head_dim], self.design[head_dim]
        if len(own) < _LEAST_ROWS:
            return _NO_ROW
        busy = [(row.shape.flops, row.time_s * busy_share(self.gpu, design, row.shape)) for row in own]
        return max(busy, key=lambda each: each[0] / each[1])

    def _minimise(self, scales: Sequence[float]) -> OptimizeResult:
        most = [min(math.log(prior.most / prior.middle), 4.0) + 1e-9 for prior in self.shared.values()]
        high = np.array([*most, *[4.0] * len(self.head_dims)])
        at = np.zeros(len(high))
        for scale in scales:
            found = least_squares(
                self._all, at, bounds=(-4.0, high), loss="soft_l1", f_scale=scale, diff_step=[1e-3], xtol=1e-4,
                ftol=1e-4,
            )  # fmt: skip
            at = np.clip(found.x, -3.99, high - 1e-10)
        return found

    def _all(self, at: FloatArray) -> FloatArray:
        """Residuals of rows, then of priors; the loss has the scale of the rows, so priors are brought to it."""
        deviations = np.array([prior.deviation for prior in self.shared.values()])
        ideal, overheads = [], []
        for head_dim in self.head_dims:
            values = self._values(at, head_dim)
            ideal.append(np.log(values["rate"] * (head_dim + values["exponentials"]) / head_dim))
            flops, busy_s = self.held[head_dim]
            least_s = throttled(flops / values["rate"], 1 - values["unsustained"], values["settle_s"])
            # the logarithm of the fastest row's time over that of its FLOPs alone
            overheads.append(max(math.log(busy_s / least_s), 0.0) if busy_s else 0.0)
        prior = [at[: len(deviations)] / deviations, (np.array(ideal) - np.mean(ideal)) / _RATE_BY_DIM]
        of_priors = _SCALE * np.concatenate([*prior, np.array(overheads) / _OVERHEAD])
        return np.concatenate([self.residuals(at) * self.weights, of_priors])

    def residuals(self, at: FloatArray) -> FloatArray:
        """Logarithms of predicted over measured."""
        variants = {}
        for head_dim in self.head_dims:
            values = self._values(at, head_dim)
            values["sustained"] = 1 - values.pop("unsustained")
            constants = {name: KernelConstant(value, value, value, "fit") for name, value in values.items()}
            variants[head_dim] = self._variant(head_dim, constants)
        # not the remembered times: each step of a fit has other constants
        time = call_parts.__wrapped__
        times = [time(self.gpu, variants[row.shape.head_dim], row.shape).time_s for row in self.rows]
        return np.asarray(np.log(np.array(times) / self.measured))

    def _values(self, at: FloatArray, head_dim: int) -> dict[str, float]:
        """The constants of a head dimension: those that all share, and its rate."""
        logs = at.tolist()
        values = {
            name: prior.middle * math.exp(log) for (name, prior), log in zip(self.shared.items(), logs, strict=False)
        }
        rate = 1.05 * self.fastest[head_dim] * math.exp(logs[len(self.shared) + self.head_dims.index(head_dim)])
        return {**values, "rate": rate}

    def _variant(self, head_dim: int, constants: Mapping[str, KernelConstant]) -> Variant:
        return Variant(self.passing, head_dim, self.design[head_dim], faster_than_forward="", **constants)

    def variant(self, head_dim: int, source: str) -> Variant:
        """The fitted constants with 90 % intervals."""
        values, widths = self._values(self.result.x, head_dim), 1.645 * self._deviations()
        rate, constants = values.pop("rate"), {}
        for (name, prior), width in zip(self.shared.items(), widths, strict=False):
            factor = math.exp(min(max(width, _LEAST_WIDTH), 2.0))
            high = max(min(values[name] * factor, prior.most), values[name])
            constants[name] = (values[name], values[name] / factor, high)
        lost, least, most = constants.pop("unsustained")
        constants["sustained"] = (1 - lost, max(1 - most, 0.5), 1 - least)
        of_fit = widths[len(self.shared) + self.head_dims.index(head_dim)]
        factor = math.exp(min(max(math.hypot(of_fit, self._between_tables()), _LEAST_WIDTH), 1.0))
        found = {name: _rounded(*numbers, source) for name, numbers in constants.items()}
        evidence = self._evidence(head_dim, rate * (1 - values["unsustained"]))
        found["rate"] = _rounded(rate, rate / factor, rate * factor, f"{source}; {evidence}")
        return self._variant(head_dim, found)

    def _evidence(self, head_dim: int, long_rate: float) -> str:
        """How many rows tell a rate, and how far beyond the fastest of them that of long calls goes."""
        count, fastest = len(self.own[head_dim]), self.fastest[head_dim]
        text = f"{count} of head dimension {head_dim}, up to {fastest / 1e12:.0f} TFLOP/s"
        if long_rate <= (1 + EXTRAPOLATION) * fastest:
            return text
        why = "constants shared with other head dimensions" if count < _LEAST_ROWS else "idle SMs and starts"
        return f"{text}, extrapolated to {long_rate / 1e12:.0f} for long calls ({why})"

    def _between_tables(self) -> float:
        """Half a 90 % interval of what tables of the same kernel differ by: versions, clocks, power."""
        residuals = self.residuals(self.result.x)
        tables = np.array([row.table for row in self.rows])
        medians = [float(np.median(residuals[tables == table])) for table in sorted(set(tables))]
        return 1.645 * float(np.std(medians, ddof=1)) if len(medians) > 1 else 0.0

    def _deviations(self) -> FloatArray:
        """Standard deviations of the parameters: what the rows tell by their spread, and what the priors say."""
        count, jacobian = len(self.rows), np.asarray(self.result.jac)
        residuals = np.clip(self.residuals(self.result.x), -2 * _SCALE, 2 * _SCALE)
        spread = max(float((residuals**2).mean()), _LEAST_SPREAD**2)
        of_rows, of_priors = jacobian[:count], jacobian[count:]
        information = of_rows.T @ of_rows / spread + of_priors.T @ of_priors / _SCALE**2
        return np.asarray(np.sqrt(np.maximum(np.diag(np.linalg.pinv(information, hermitian=True)), 0)))


def _rounded(value: float, low: float, high: float, source: str) -> KernelConstant:
    value, low, high = (float(f"{each:.4g}") for each in (value, low, high))
    return KernelConstant(value, min(low, value), max(high, value), source)
