"""Files of kernels from tables: which rows fit which kernel, and what is assumed for a pass without rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from tasp_lab.calibration.fit_kernels import KernelTime, fit_kernel
from tasp_lab.files import write_whole
from tasp_lab.kernels.constants import KernelConstant, KernelFile, Variant, gpus, kernel_document
from tasp_lab.kernels.kernel import nearest_variant
from tasp_lab.measurements.kernel_table import KernelTable
from tasp_lab.progress import ProgressCallback, no_progress

Passing = Literal["forward", "backward"]
Key = tuple[str, str]
"""GPU and kernel."""

PASSES: tuple[Passing, ...] = ("forward", "backward")
_LEAST_ROWS = 4
_FORWARD_OF = {"aiter-asm-a16": "aiter-asm", "cudnn-deterministic": "cudnn"}
"""Kernels that differ backward only."""

_WIDER = 0.25


class Rows(msgspec.Struct):
    """The rows of a kernel and pass, and their tables."""

    times: list[KernelTime]
    tables: dict[str, str]

    def source(self) -> str:
        """The tables, by name and what their headers state as the source."""
        return ", ".join(f"{name} ({source})" for name, source in self.tables.items())


def kernel_rows(tables: Iterable[KernelTable]) -> dict[Key, dict[Passing, Rows]]:
    """Rows by GPU and kernel, then pass; rows of both passes at once are left out.

    Eager calls, with the host's share in their times, fit only what no table of kernel times does.
    """
    found: dict[str, dict[tuple[str, str, Passing], Rows]] = {"kernel": {}, "eager": {}}
    for table in tables:
        for row in table.rows:
            if len(row.shapes) == 1:
                shape = row.shapes[0]
                kept = found[table.timing].setdefault((row.gpu, row.kernel, shape.passing), Rows([], {}))
                kept.times.append(KernelTime(shape, row.measured_s, table.name))
                kept.tables[Path(table.name).stem] = table.headers.get("source", "").split("\n")[0]
    chosen = {key: rows for key, rows in found["kernel"].items() if len(rows.times) >= _LEAST_ROWS}
    late = {key: rows for key, rows in found["eager"].items() if len(rows.times) >= _LEAST_ROWS}
    chosen = late | chosen
    by_kernel: dict[Key, dict[Passing, Rows]] = defaultdict(dict)
    for (gpu, kernel, passing), rows in chosen.items():
        by_kernel[gpu, kernel][passing] = rows
    return dict(by_kernel)


def fit_files(tables: Iterable[KernelTable], progress: ProgressCallback = no_progress) -> dict[Key, KernelFile]:
    """A file per kernel and GPU whose constants are known, with both passes."""
    fitted: dict[Key, dict[Passing, tuple[Variant, ...]]] = {}
    for (gpu, kernel), by_pass in sorted(kernel_rows(tables).items()):
        if gpu not in gpus() or kernel in LINEAR_KERNELS:
            continue
        for passing, rows in by_pass.items():
            found = fit_kernel(gpus()[gpu], kernel, passing, rows.times, rows.source())
            error = abs(found.residuals).mean()
            progress(f"{gpu} {kernel} {passing}: {len(rows.times)} rows, mean residual {error:.1%}")
            fitted.setdefault((gpu, kernel), {})[passing] = found.variants
    return {key: KernelFile(*key, _both(key, passes, fitted)) for key, passes in fitted.items()}


LINEAR_KERNELS = ("chunk-gla", "chunk-gdn", "chunk-retention", "fla-chunk-gla", "tileops-gla", "flaggems-chunk-gla")
"""Kernels of linear attention (`tasp_lab.kernels.linear`)."""

_Fitted = Mapping[Key, Mapping[Passing, tuple[Variant, ...]]]


def _both(key: Key, passes: Mapping[Passing, tuple[Variant, ...]], fitted: _Fitted) -> tuple[Variant, ...]:
    """The variants of both passes; those of a pass without rows from a relative, with its ratio to the other pass."""
    variants = [variant for found in passes.values() for variant in found]
    for passing in PASSES:
        if passing not in passes:
            other = PASSES[1 - PASSES.index(passing)]
            variants += [_derived(each, passing, _relative(key, fitted)) for each in passes[other]]
    return tuple(variants)


def _relative(key: Key, fitted: _Fitted) -> tuple[Key, Mapping[Passing, tuple[Variant, ...]]]:
    """The nearest kernel with both passes: this one's own forward, on a GPU alike, then another on this GPU."""
    gpu, kernel = key
    like = [gpu, *gpus()[gpu].like]
    near = [(gpu, _FORWARD_OF.get(kernel, kernel)), *((each, kernel) for each in like)]
    near += [(each, other) for each in like for other in ("flash-attention-4", "flash-attention-3", "cudnn")]
    near += [(each, "flash-attention-2") for each in like] + [("mi300x", "aiter-asm"), ("h800", "flash-attention-2")]
    return next((each, fitted[each]) for each in near if len(fitted.get(each, {})) == len(PASSES))


def _derived(
    variant: Variant, passing: Passing, relative: tuple[Key, Mapping[Passing, tuple[Variant, ...]]]
) -> Variant:
    key, passes = relative
    of_pass = nearest_variant(passes[passing], passing, variant.head_dim)
    of_other = nearest_variant(passes[variant.passing], variant.passing, variant.head_dim)
    rate = variant.rate.value * of_pass.rate.value / of_other.rate.value
    source = f"assumed: no {passing} rows; the ratio to {variant.passing} that {key[1]} has on {key[0]}"
    value, low, high = (float(f"{rate * each:.4g}") for each in (1, 1 - _WIDER, 1 + _WIDER))
    constant = KernelConstant(value, low, high, source)
    return msgspec.structs.replace(of_pass, head_dim=variant.head_dim, rate=constant)


def write_files(files: Mapping[Key, KernelFile], folder: Path) -> list[Path]:
    """Write ``GPU/KERNEL.toml`` per kernel."""
    written = []
    for (gpu, kernel), file in files.items():
        path = folder / gpu / f"{kernel}.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, kernel_document(file))
        written.append(path)
    return written


def split_alternately(rows: Sequence[KernelTime]) -> tuple[list[KernelTime], list[KernelTime]]:
    """Every second row, in order of shape, and the others."""
    ordered = sorted(rows, key=lambda row: (row.shape.high, row.shape.low, row.shape))
    return ordered[::2], ordered[1::2]
