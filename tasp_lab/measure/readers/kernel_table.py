"""Tables of kernel times by shape.

A table is a CSV file with headers ``# key: value`` and these columns::

    gpu,kernel,pass,dtype,causal,batch,heads,kv_heads,head_dim,seq_q,seq_k,time_us,tflops

``pass`` is ``fwd``, ``bwd``, ``bwd-det`` (deterministic) or ``fwdbwd`` (both, in turn). A row has a time, a rate or
both. Causal masks end at the bottom right. Headers ``profile`` and ``kernel`` name GPU and kernel where the columns do
not.

**FLOPs.** Attention has 4 FLOPs forward per (query, key) pair and element of a head, and 10 backward. Tables differ in
the pairs: those that a causal mask leaves (*masked*, half of a square), or all of the rectangle (*full*). A rate
without that convention is no time, so a table must state it: ``# flops: causal halved`` or ``causal full``. Benchmark
tables state it in a line ``# note: FLOPs = ...; causal halved``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from tasp_lab.core.errors import TableError
from tasp_lab.machines.kernel_model.catalogue import gpu_alias, kernel_by_shape
from tasp_lab.measure.readers.file_position import CsvText, FilePosition, Measured, parse_csv, quoted, read_text
from tasp_lab.workload.kernel_shapes import KernelShape, Passing, pairs_in_band

CountedPairs = Literal["masked", "full"]
"""The pairs that a table counts under a causal mask."""

FLOPS_BY_PASS = {"forward": 4, "backward": 10}
"""FLOPs per pair and element of a head."""

PASSES: Mapping[str, tuple[Passing, ...]] = {
    "fwd": ("forward",), "bwd": ("backward",), "fwdbwd": ("forward", "backward"), "fwd+bwd": ("forward", "backward"),
    "forward": ("forward",), "backward": ("backward",), "forward+backward": ("forward", "backward"),
}  # fmt: skip
"""Passes by their names in tables, of kernels and of layers."""

_WORDS: dict[str, CountedPairs] = {"half": "masked", "halved": "masked", "masked": "masked", "full": "full"}
_CONVENTION = re.compile(rf"\b({'|'.join(_WORDS)})\b", re.IGNORECASE)
_NOTE = re.compile(
    r"t?flops = .*?\bcausal[ -](?:is |are )?(?:counted )?(?:as |in )?(half|halved|full)\b", re.IGNORECASE
)


def counted_pairs(headers: Mapping[str, str], file: str) -> CountedPairs | None:
    """The pairs that the rates of a table count; None if its headers do not state them.

    >>> counted_pairs({"flops": "causal full"}, "t.csv"), counted_pairs({"source": "a page"}, "t.csv")
    ('full', None)
    >>> counted_pairs({"note": "FLOPs = 4*B*H*Sq*Sk*D forward, 2.5x that backward; causal halved"}, "t.csv")
    'masked'

    Raises `TableError` for a header ``flops`` with neither.
    """
    if stated := headers.get("flops"):
        match = _CONVENTION.search(stated)
        if match is None:
            raise TableError(f"{file}: header flops {quoted(stated)}, expected causal halved or causal full")
        return _WORDS[match[1].lower()]
    for line in headers.get("note", "").splitlines():
        if match := _NOTE.match(line):
            return _WORDS[match[1].lower()]
    return None


def attention_flops(
    passes: Sequence[Passing], batch: int, heads: int, head_dim: int, sequence: int, *, causal: bool
) -> int:
    """The FLOPs of attention of a sequence to itself.

    >>> attention_flops(["forward"], 1, 1, 1, 3, causal=True), attention_flops(["backward"], 1, 1, 1, 3, causal=False)
    (24, 90)
    """
    pairs = pairs_in_band(0 if causal else 1 - sequence, sequence - 1, sequence, sequence)
    return sum(FLOPS_BY_PASS[passing] for passing in passes) * int(pairs) * batch * heads * head_dim


Timing = Literal["kernel", "eager"]
"""Time of the kernel on the GPU, or of an eager call with the host's share."""

COLUMNS = ("pass", "causal", "batch", "heads", "head_dim", "seq_q", "seq_k")
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "": "bf16"}
_EAGER = re.compile(r"eager|wall time|do_bench|event latency|with launch", re.IGNORECASE)


class RefusedRow(NamedTuple):
    """A row that is none: its line, its cells by column, and why."""

    line: int
    cells: Mapping[str, str]
    reason: str


class KernelRow(NamedTuple):
    """One measurement.

    `shapes` are the calls that were timed together: one, or forward and backward. `gpu` and `kernel` are names of
    `tasp_lab.machines.kernel_model` where they are known there, else as printed.
    """

    gpu: str
    kernel: str
    shapes: tuple[KernelShape, ...]
    measured_s: float
    line: int

    @property
    def flops(self) -> int:
        return sum(shape.flops for shape in self.shapes)


@dataclass(frozen=True)
class KernelTable(Measured):
    """A table of kernels."""

    rows: tuple[KernelRow, ...]
    timing: Timing
    refused: tuple[RefusedRow, ...] = ()


def is_kernel_table(content: CsvText) -> bool:
    """Whether the columns are those of a table of kernels."""
    return {"pass", "seq_q", "seq_k", "head_dim"}.issubset(content.columns)


def read_kernel_table(path: Path) -> KernelTable:
    """The table in a CSV file. Raises `TableError` as `kernel_table` does."""
    return kernel_table(parse_csv(read_text(path), str(path)))


def kernel_table(content: CsvText, *, lenient: bool = False) -> KernelTable:
    """The table in a CSV file; a `lenient` reader refuses single rows, not the file.

    >>> table = kernel_table(parse_csv('''# gpu: H200
    ... # kernel: cudnn
    ... pass,causal,batch,heads,kv_heads,head_dim,seq_q,seq_k,time_us
    ... fwd,1,1,64,8,128,2048,2048,140.125
    ... ''', "table.csv"))
    >>> table.rows[0].gpu, table.rows[0].kernel, table.rows[0].shapes[0].low, table.rows[0].measured_s
    ('h200', 'cudnn', 0, 0.000140125)

    Raises `TableError`, naming file and line, for a missing column, for cells that are no positive numbers, for a
    row without time and rate, and for a rate that contradicts the time or that counts masked pairs.
    """
    headers = content.headers
    expected = f"columns {', '.join(COLUMNS)} and time_us or tflops"
    if not content.lines:
        raise FilePosition(content.name, 1).error("no rows", expected)
    place, columns = content.lines[0]
    content.check()
    if missing := [column for column in COLUMNS if column not in columns]:
        raise place.error(f"no column {missing[0]!r}", expected)
    if not {"time_us", "tflops"} & set(columns):
        raise place.error("neither a column 'time_us' nor 'tflops'", "one of them or both")
    rows: list[KernelRow] = []
    refused: list[RefusedRow] = []
    for at, cells in content.rows():
        try:
            rows.append(_row(at, cells, headers))
        except TableError as error:
            if not lenient:
                raise
            refused.append(RefusedRow(at.line, cells, str(error).removeprefix(f"{at}: ")))
    if not rows and not refused:
        raise place.error("no rows below the columns", "one or more")
    timing: Timing = "eager" if _EAGER.search(headers.get("timing", headers.get("note", ""))) else "kernel"
    return KernelTable(content.name, headers, tuple(rows), timing, tuple(refused))


def _row(place: FilePosition, cells: Mapping[str, str], headers: Mapping[str, str]) -> KernelRow:
    gpu = cells.get("gpu") or headers.get("profile") or headers.get("gpu") or ""
    kernel = cells.get("kernel") or headers.get("kernel") or ""
    if not gpu or not kernel:
        raise place.error("no gpu" if not gpu else "no kernel", "a column or header that names it")
    deterministic = cells["pass"] == "bwd-det"
    passes = PASSES.get("bwd" if deterministic else cells["pass"])
    if passes is None:
        raise place.error(f"pass {quoted(cells['pass'])}", f"one of {', '.join(PASSES)}, bwd-det")
    if (mask := cells["causal"].lower()) not in ("0", "1", "true", "false"):
        raise place.error(f"causal {quoted(cells['causal'])}", "0 or 1")
    names = ("batch", "heads", "head_dim", "seq_q", "seq_k")
    batch, heads, head_dim, queries, keys = (place.count(cells[name], name) for name in names)
    kv_heads = place.count(cells["kv_heads"], "kv_heads") if cells.get("kv_heads") else heads
    if heads % kv_heads:
        raise place.error(f"{heads} heads on {kv_heads} KV heads", "a multiple of the KV heads")
    dtype, causal = _DTYPES.get(cells.get("dtype", ""), cells.get("dtype", "")), mask in ("1", "true")
    shapes = tuple(
        attention_shape(passing, dtype, batch, heads, kv_heads, head_dim, queries, keys, causal=causal)
        for passing in passes
    )
    name = kernel_by_shape(kernel, shapes[-1].passing, head_dim, grouped=kv_heads < heads)
    name += "-deterministic" if deterministic else ""
    return KernelRow(gpu_alias(gpu), name, shapes, _measured_s(place, cells, headers, shapes, causal), place.line)


def attention_shape(
    passing: Passing, dtype: str, batch: int, heads: int, kv_heads: int, head_dim: int, queries: int, keys: int, *,
    causal: bool,
) -> KernelShape:  # fmt: skip
    """A call without mask, or with a causal one whose last query sees all keys."""
    low, high = (queries - keys if causal else 1 - keys), queries - 1
    flops = FLOPS_BY_PASS[passing] * int(pairs_in_band(low, high, queries, keys)) * batch * heads * head_dim
    return KernelShape(
        "attend", "softmax", passing, dtype, batch, heads, kv_heads, head_dim, queries, keys, low, high, flops
    )


def _measured_s(
    place: FilePosition, cells: Mapping[str, str], headers: Mapping[str, str], shapes: Sequence[KernelShape],
    causal: bool,
) -> float:  # fmt: skip
    """The time: as printed, or FLOPs over the rate."""
    time_s = place.time_s(cells["time_us"]) if cells.get("time_us") else None
    if not cells.get("tflops"):
        if time_s is None:
            raise place.error("neither time_us nor tflops", "one of them or both")
        return time_s
    counted, first = counted_pairs(headers, place.file), shapes[0]
    if counted is None and causal and time_s is None:
        raise place.error("a causal rate without a header 'flops'", "causal halved or causal full in it")
    pairs: float = first.queries * first.keys
    if causal and counted != "full":  # benchmarks count half of a square, without its diagonal
        pairs -= min(first.queries, first.keys) ** 2 / 2
    factor = sum(FLOPS_BY_PASS[shape.passing] for shape in shapes)
    flops = factor * pairs * first.batch * first.heads * first.head_dim
    by_rate_s = flops / (place.positive(cells["tflops"], "tflops") * 1e12)
    if time_s is None:
        return by_rate_s
    if not 0.9 < by_rate_s / time_s < 1.1:
        hint = ", or a header 'flops: causal full' if masked pairs are counted" if causal else ""
        raise place.error(
            f"{cells['tflops']} TFLOP/s in {cells['time_us']} us", f"{flops / time_s / 1e12:.4g} by its shape{hint}"
        )
    return time_s
