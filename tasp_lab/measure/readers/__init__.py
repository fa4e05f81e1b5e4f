"""Measurements as tables, read from CSV files and from the logs of benchmark tools.

- A *table* holds the times of one collective at several sizes (`tasp_lab.measure.readers.table`). It is a CSV file
  with headers, which may have several, or a run in a log of nccl-tests or rccl-tests
  (`tasp_lab.measure.readers.nccl_tests`).
- A *table of layers* holds the times of whole attention calls (`tasp_lab.measure.readers.layer_table`), a *table of
  kernels* those of single calls on one GPU (`tasp_lab.measure.readers.kernel_table`). They differ in their columns.
- A *table of pairs* holds the bandwidth between each pair of GPUs of a host (`tasp_lab.measure.readers.pairs`). It
  comes from a log of TransferBench (`tasp_lab.measure.readers.pairs`) or of p2pBandwidthLatencyTest of the
  CUDA samples (`tasp_lab.measure.readers.pairs`).

Sizes are in bytes, times in seconds, bandwidths in bytes/s, one way. Invalid input raises a one-line `TableError` that
names file, line, what was found and what was expected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TypeVar

from tasp_lab.core.errors import TableError
from tasp_lab.measure.readers.file_position import check_is_text, parse_csv, read_text
from tasp_lab.measure.readers.kernel_table import (
    KernelRow,
    KernelTable,
    is_kernel_table,
    parse_kernel_table,
    read_kernel_table,
)
from tasp_lab.measure.readers.layer_table import UNIQUE, LayerRow, LayerTable, is_layer_table, layer_table
from tasp_lab.measure.readers.nccl_tests import parse_nccl_tests, read_nccl_tests
from tasp_lab.measure.readers.pairs import (
    PairTable,
    parse_p2p_bandwidth,
    parse_transfer_bench,
    read_p2p_bandwidth,
    read_transfer_bench,
)
from tasp_lab.measure.readers.table import (
    COLLECTIVES,
    MeasuredTable,
    Row,
    parse_table,
    parse_tables,
    read_table,
    read_tables,
)

__all__ = [
    "AnyTable",
    "MeasuredTable",
    "LayerTable",
    "LayerRow",
    "KernelTable",
    "KernelRow",
    "PairTable",
    "Row",
    "COLLECTIVES",
    "find_all_tables",
    "find_tables",
    "is_kernel_table",
    "parse_any_table",
    "parse_kernel_table",
    "read_kernel_table",
    "read_table",
    "read_tables",
    "parse_table",
    "parse_tables",
    "read_nccl_tests",
    "parse_nccl_tests",
    "read_transfer_bench",
    "parse_transfer_bench",
    "read_p2p_bandwidth",
    "parse_p2p_bandwidth",
]

_T = TypeVar("_T")

AnyTable = MeasuredTable | LayerTable | KernelTable
"""A table of a collective, of layers or of kernels."""

_LOG_ENDINGS = (".log", ".out", ".txt")


def parse_any_table(text: str, name: str) -> AnyTable:
    """The table in the text of a CSV file, of the kind that its columns show, by default of a collective.

    >>> type(parse_any_table("system,variant,seq_total\\n", "t.csv")).__name__
    'LayerTable'

    Raises `TableError` as `parse_table` does.
    """
    if is_kernel_table(text):
        return parse_kernel_table(text, name, lenient=True)
    content = parse_csv(text, name, ())
    return layer_table(parse_csv(text, name, UNIQUE)) if is_layer_table(content) else parse_table(text, name)


def find_all_tables(paths: Iterable[Path]) -> tuple[AnyTable, ...]:
    """The tables of every kind in files and folders, as `find_tables` finds those of collectives."""
    return _find(paths, _read_any, read_nccl_tests)


def _read_any(path: Path) -> tuple[AnyTable, ...]:
    return (parse_any_table(read_text(path), str(path)),) if _is_other_table(path) else read_tables(path)


def find_tables(
    paths: Iterable[Path], *, in_place: bool = False, profile: str | None = None
) -> tuple[MeasuredTable, ...]:
    """The tables in files and, recursively, in folders, in the given order and inside a folder by name.

    In a folder these are the .csv files except tables of kernels and layers, and the .log, .out and .txt files that
    contain a run of nccl-tests. `in_place` selects the columns of logs; `profile` names the machine of tables without
    one. Each file is read once.

    Raises `TableError` for malformed content, for a file in `paths` that is empty, not text or without a table, and
    for a path that does not exist.
    """
    read_log = partial(read_nccl_tests, in_place=in_place, profile=profile)
    return _find(paths, read_tables, read_log, leave_out=_is_other_table)


def _is_other_table(path: Path) -> bool:
    """Whether a CSV file is a table of kernels or of layers."""
    text = read_text(path)
    return is_kernel_table(text) or is_layer_table(parse_csv(text, str(path), ()))


def _find(
    paths: Iterable[Path],
    read_csv: Callable[[Path], Iterable[_T]],
    read_log: Callable[[Path], Iterable[_T]],
    leave_out: Callable[[Path], bool] = lambda path: False,
) -> tuple[_T, ...]:
    tables: list[_T] = []
    for path, is_named in _files(paths).items():
        if is_named:
            check_is_text(path)
        elif path.suffix.lower() == ".csv" and leave_out(path):
            continue
        if path.suffix.lower() == ".csv":
            tables += read_csv(path)
            continue
        runs = tuple(read_log(path))
        if is_named and not runs:
            raise TableError(f"{path}: no table in it, expected a CSV table (.csv) or a log of nccl-tests")
        tables += runs
    return tuple(tables)


def _files(paths: Iterable[Path]) -> dict[Path, bool]:
    """The files to read, and whether each was given explicitly."""
    files: dict[Path, bool] = {}
    for path in paths:
        if not path.is_dir():
            files[path] = True
            continue
        for file in sorted(path.rglob("*")):
            if file.is_file() and file.suffix.lower() in (".csv", *_LOG_ENDINGS):
                files.setdefault(file, False)
    return files
