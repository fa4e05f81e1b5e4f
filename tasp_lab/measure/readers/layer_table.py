"""A table of measured layers: the time of whole attention calls by a library on a machine, one row per measurement.

A table is stored as a CSV file with headers::

    # profile: h800
    # source: results_exp/... of oliverYoung2001/UltraAttn
    # note: time of the slowest rank
    system,variant,pass,mask,gpus,nodes,batch,seq_total,heads,kv_heads,head_dim,dtype,time_us,tflops_per_gpu,...
    ring-flash-attention,zigzag,forward,causal,32,4,1,131072,32,32,128,bf16,97620,,...

``profile`` names a machine: a member of a family (``h800-4x8``), or a family, of which `gpus` and `nodes` choose the
member. ``kernel`` names the kernel. ``flops`` states how rates are counted (`tasp_lab.measure.readers.kernel_table`).
``documents`` are the lengths of packed documents, packings apart by ``|``; they are scaled to `seq_total`.
``out_of_scope`` gives the reason why no row counts, ``from_seq_total`` the length below which none does, because the
source itself doubts them, and ``host_bound_below`` the positions times heads per GPU below which, by the source, the
host takes the time. Rows of one head with at most ``fits_host_up_to`` positions gave host times, and do not count.

Cells may be empty; whether a row says enough to be predicted is decided where it is predicted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tasp_lab.measure.readers.file_position import CsvText, FilePosition, Measured
from tasp_lab.measure.readers.kernel_table import CountedPairs, counted_pairs

UNIQUE = ("profile", "kernel", "flops", "documents", "from_seq_total", "host_bound_below", "fits_host_up_to")
"""Headers that a table has once."""

REQUIRED = ("system", "variant", "pass", "mask", "gpus", "nodes", "seq_total", "heads", "head_dim", "dtype")
"""Columns of every table of layers, beside a time or a rate."""


@dataclass(frozen=True)
class LayerRow:
    """One measured layer. A field is None, or empty, where the table has no value.

    `line` is its line in the file, `passing` the text of the table, `time_s` the time of a call on the slowest rank,
    and `flops_per_s` the rate per GPU as the table counts it.
    """

    line: int
    system: str
    variant: str
    passing: str
    mask: str
    gpus: int | None
    nodes: int | None
    batch: int | None
    sequence: int | None
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    dtype: str
    time_s: float | None
    flops_per_s: float | None
    gpu: str = ""
    what: str = ""


@dataclass(frozen=True)
class LayerTable(Measured):
    """Measured layers of one source. `reason` is why no row can be compared with a prediction, empty if some may."""

    rows: tuple[LayerRow, ...]
    counted: CountedPairs | None = None
    documents: tuple[tuple[int, ...], ...] = ()
    from_sequence: int = 0
    host_bound_below: int = 0
    fits_host_up_to: int = 0
    reason: str = ""

    @property
    def kernel(self) -> str | None:
        """The kernel that the table names."""
        return self.headers.get("kernel") or None


def is_layer_table(content: CsvText) -> bool:
    """Whether the columns are those of a table of layers."""
    return {"system", "seq_total"} <= set(content.columns)


def layer_table(content: CsvText) -> LayerTable:
    """The table in a CSV file.

    Raises `TableError` for cells that are no numbers or negative, and for malformed headers.
    """
    content.check(UNIQUE)
    headers = content.headers
    missing = [f"no column {column!r}" for column in REQUIRED if column not in content.columns]
    if not {"time_us", "tflops_per_gpu"} & set(content.columns):
        missing.append("no column 'time_us' or 'tflops_per_gpu'")
    rows = () if missing else tuple(_row(place, cells) for place, cells in content.rows())
    packings = headers.get("documents")
    return LayerTable(
        content.name,
        headers,
        rows,
        counted_pairs(headers, content.name),
        tuple(_documents(content.places["documents"][0], each) for each in packings.split("|")) if packings else (),
        content.count("from_seq_total") or 0,
        content.count("host_bound_below") or 0,
        content.count("fits_host_up_to") or 0,
        ", ".join(missing) or ("" if rows else "no rows"),
    )


def _row(place: FilePosition, cells: Mapping[str, str]) -> LayerRow:
    gpus, nodes, batch, sequence, heads, kv_heads, head_dim = (
        place.count(cells[column], column) if cells.get(column) else None
        for column in ("gpus", "nodes", "batch", "seq_total", "heads", "kv_heads", "head_dim")
    )
    return LayerRow(
        place.line, cells["system"], cells["variant"], cells["pass"], cells["mask"], gpus, nodes, batch, sequence,
        heads, kv_heads, head_dim, cells["dtype"], place.quantity(cells.get("time_us"), "time_us", 1e-6),
        place.quantity(cells.get("tflops_per_gpu"), "tflops_per_gpu", 1e12), cells.get("gpu", ""),
        cells.get("what", ""),
    )  # fmt: skip


def _documents(place: FilePosition, packing: str) -> tuple[int, ...]:
    """The lengths of the documents of a packing."""
    return tuple(place.count(length, "document") for length in re.split(r"[,\s]+", packing.strip()))
