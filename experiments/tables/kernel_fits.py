"""Constants of attention kernels: ``python -m experiments.tables.kernel_fits`` fits them to the tables in
``tasp_lab/measure/tables/kernels`` and writes ``tasp_lab/machines/kernel_model/data/GPU/KERNEL.toml``. It takes some
minutes. Which rows fit which kernel, and what is assumed for a pass without rows, is decided here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from tasp_lab.core.errors import FitError
from tasp_lab.core.files import write_whole
from tasp_lab.core.progress import ProgressCallback, no_progress, print_progress
from tasp_lab.machines.kernel_model.constants import (
    PASSES,
    Gpu,
    KernelConstant,
    KernelFile,
    Passing,
    Variant,
    data_folder,
    gpus,
    kernel_document,
)
from tasp_lab.machines.kernel_model.designs import designs
from tasp_lab.machines.kernel_model.kernel import call_parts, nearest_variant
from tasp_lab.measure.calibrate_kernels import KernelTime, fit_kernel
from tasp_lab.measure.readers.file_position import parse_csv, read_text
from tasp_lab.measure.readers.kernel_table import KernelTable, attention_shape, is_kernel_table, kernel_table

TABLES = Path(__file__).parents[2] / "tasp_lab" / "measure" / "tables" / "kernels"


def kernel_tables() -> list[KernelTable]:
    """All tables of kernels by shape."""
    contents = [parse_csv(read_text(path), str(path)) for path in sorted(TABLES.glob("*.csv"))]
    return [kernel_table(content) for content in contents if is_kernel_table(content)]


Key = tuple[str, str]
"""GPU and kernel."""

_LEAST_ROWS = 4
_FORWARD_OF = {"aiter-asm-a16": "aiter-asm", "cudnn-deterministic": "cudnn"}
"""Kernels that differ backward only."""

_WIDER = 0.25
_EAGER_LEAST_S = 1e-3
"""Shorter eager calls are bound by their host, which takes some tenths of a millisecond, and tell no rate."""


class Rows(msgspec.Struct):
    """The rows of a kernel and pass, and their tables."""

    times: list[KernelTime]
    tables: dict[str, str]

    def source(self) -> str:
        """The tables, by name and what their headers state as the source."""
        return ", ".join(f"{name} ({source})" for name, source in self.tables.items())


def kernel_rows(tables: Iterable[KernelTable]) -> dict[Key, dict[Passing, Rows]]:
    """Rows by GPU and kernel, then pass; rows of both passes at once are left out.

    Eager calls, with the host's share in their times, fit only what no table of kernel times does; short ones nothing.
    """
    found: dict[str, dict[tuple[str, str, Passing], Rows]] = {"kernel": {}, "eager": {}}
    for table in tables:
        for row in table.rows:
            if len(row.shapes) == 1 and (table.timing == "kernel" or row.measured_s >= _EAGER_LEAST_S):
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
    """A file per kernel and GPU whose constants are known, with both passes.

    Raises `FitError` for a kernel whose backward pass has a higher rate than its forward pass for no known reason.
    """
    fitted: dict[Key, dict[Passing, tuple[Variant, ...]]] = {}
    fastest: dict[tuple[Key, Passing, int], float] = defaultdict(float)
    for (gpu, kernel), by_pass in sorted(kernel_rows(tables).items()):
        if gpu not in gpus() or kernel in LINEAR_KERNELS:
            continue
        for passing, rows in by_pass.items():
            found = fit_kernel(gpus()[gpu], kernel, passing, rows.times, rows.source())
            error = abs(found.residuals).mean()
            progress(f"{gpu} {kernel} {passing}: {len(rows.times)} rows, mean residual {error:.1%}")
            fitted.setdefault((gpu, kernel), {})[passing] = found.variants
            for shape, time_s, _ in rows.times:
                at = (gpu, kernel), passing, shape.head_dim
                fastest[at] = max(fastest[at], shape.flops / time_s)
    files = {}
    for key, passes in fitted.items():
        variants = _both(key, passes, fitted)
        files[key] = KernelFile(*key, tuple(_with_reason(key, each, variants, fastest) for each in variants))
    return files


def _with_reason(
    key: Key, variant: Variant, variants: Sequence[Variant], fastest: Mapping[tuple[Key, Passing, int], float]
) -> Variant:
    """A backward variant with the reason why its calls have a higher rate than forward, if they have."""
    if variant.passing == "forward":
        return variant
    gpu, head_dim = gpus()[key[0]], variant.head_dim
    forward = next(each for each in variants if each.passing == "forward" and each.head_dim == head_dim)
    if not any(_rate(gpu, variant, *call) > _rate(gpu, forward, *call) for call in _LONG_CALLS):
        return msgspec.structs.replace(variant, faster_than_forward="")
    measured = fastest.get((key, "backward", head_dim), 0.0), fastest.get((key, "forward", head_dim), 0.0)
    if measured[0] > measured[1] > 0:
        reason = f"measured: up to {measured[0] / 1e12:.0f} TFLOP/s, forward up to {measured[1] / 1e12:.0f}"
    elif variant.rate.low < forward.rate.high:
        reason = f"the intervals of both rates overlap: {variant.rate.low / 1e12:.0f} TFLOP/s and more, forward up to "
        reason += f"{forward.rate.high / 1e12:.0f}"
    else:
        raise FitError(f"{key[1]} on {key[0]}, head dimension {head_dim}: backward is faster than forward, expected "
                       "rows that show it")  # fmt: skip
    return msgspec.structs.replace(variant, faster_than_forward=reason)


_LONG_CALLS = [(length, causal) for length in (4096, 32768, 131072) for causal in (False, True)]
"""Sequence lengths and masks of calls of 64 heads, whose tiles fill all SMs many times."""


def _rate(gpu: Gpu, variant: Variant, length: int, causal: bool) -> float:
    """FLOP/s of a call of 64 heads."""
    shape = attention_shape(variant.passing, "bf16", 1, 64, 64, variant.head_dim, length, length, causal=causal)
    return shape.flops / call_parts(gpu, variant, shape).time_s


LINEAR_KERNELS = ("chunk-gla", "chunk-gdn", "chunk-retention", "fla-chunk-gla", "tileops-gla", "flaggems-chunk-gla")
"""Kernels of linear attention, whose calls are predicted at rates."""

_Fitted = Mapping[Key, Mapping[Passing, tuple[Variant, ...]]]


def _both(key: Key, passes: Mapping[Passing, tuple[Variant, ...]], fitted: _Fitted) -> tuple[Variant, ...]:
    """The variants of both passes for every head dimension of either.

    Those without rows take their ratio to the other pass from this kernel's nearest head dimension, or from a relative
    where a pass has no rows at all. A kernel that differs backward only has the forward pass of the other one.
    """
    gpu, kernel = key
    same = fitted.get((gpu, _FORWARD_OF.get(kernel, "")), {}).get("forward")
    if same is not None and "forward" not in passes:
        passes = {"forward": same, **passes}
    variants = [variant for found in passes.values() for variant in found]
    for passing, other in zip(PASSES, reversed(PASSES), strict=True):
        known = {each.head_dim for each in passes.get(passing, ())}
        relative = (key, passes) if known else _relative(key, fitted)
        variants += [
            _derived(each, passing, relative, key) for each in passes.get(other, ()) if each.head_dim not in known
        ]
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
    variant: Variant, passing: Passing, relative: tuple[Key, Mapping[Passing, tuple[Variant, ...]]], own: Key
) -> Variant:
    key, passes = relative
    of_pass = nearest_variant(passes[passing], passing, variant.head_dim)
    of_other = nearest_variant(passes[variant.passing], variant.passing, of_pass.head_dim)
    rate = variant.rate.value * of_pass.rate.value / of_other.rate.value
    ratio = f"the ratio to {variant.passing} that {key[1]} has on {key[0]}"
    source = f"assumed: no {passing} rows; {ratio}"
    if key == own:
        source = f"assumed: no {passing} rows of head dimension {variant.head_dim}; {ratio} at {of_pass.head_dim}"
    value, low, high = (float(f"{rate * each:.4g}") for each in (1, 1 - _WIDER, 1 + _WIDER))
    constant = KernelConstant(value, low, high, source)
    known = designs(*own, passing, variant.head_dim)
    design = known[0] if len(known) == 1 else of_pass.design
    return msgspec.structs.replace(of_pass, head_dim=variant.head_dim, design=design, rate=constant)


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


if __name__ == "__main__":
    write_files(fit_files(kernel_tables(), print_progress), data_folder())
