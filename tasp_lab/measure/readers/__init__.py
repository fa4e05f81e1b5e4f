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
from tasp_lab.measure.readers.file_position import CsvText, check_is_text, parse_csv, read_text
from tasp_lab.measure.readers.kernel_table import KernelRow, KernelTable, is_kernel_table, kernel_table
from tasp_lab.measure.readers.layer_table import LayerRow, LayerTable, is_layer_table, layer_table
from tasp_lab.measure.readers.nccl_tests import parse_nccl_tests, read_nccl_tests
from tasp_lab.measure.readers.pairs import PairTable, parse_p2p_bandwidth, parse_transfer_bench
from tasp_lab.measure.readers.table import (
    COLLECTIVES,
    MeasuredTable,
    Row,
    collective_tables,
    parse_table,
    parse_tables,
    read_table,
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
    "parse_any_table",
    "read_table",
    "parse_table",
    "parse_tables",
    "read_nccl_tests",
    "parse_nccl_tests",
    "parse_transfer_bench",
    "parse_p2p_bandwidth",
]

AnyTable = MeasuredTable | LayerTable | KernelTable
"""A table of a collective, of layers or of kernels."""

_Found = TypeVar("_Found", bound=AnyTable)
_LOG_ENDINGS = (".log", ".out", ".txt")


def parse_any_table(text: str, name: str) -> AnyTable:
    """The first table in the text of a CSV file, of the kind that its columns show, by default of a collective.

    >>> type(parse_any_table("system,variant,seq_total\\n", "t.csv")).__name__
    'LayerTable'

    Raises `TableError` as `parse_table` does.
    """
    return _tables(parse_csv(text, name))[0]


def _tables(content: CsvText) -> tuple[AnyTable, ...]:
    if is_kernel_table(content):
        return (kernel_table(content, lenient=True),)
    return (layer_table(content),) if is_layer_table(content) else collective_tables(content)


def find_all_tables(paths: Iterable[Path]) -> tuple[AnyTable, ...]:
    """The tables of every kind in files and folders, as `find_tables` finds those of collectives."""
    return _find(paths, lambda content, is_named: _tables(content), read_nccl_tests)


def find_tables(paths: Iterable[Path], *, in_place: bool = False) -> tuple[MeasuredTable, ...]:
    """The tables in files and, recursively, in folders, in the given order and inside a folder by name.

    In a folder these are the .csv files except tables of kernels and layers, and the .log, .out and .txt files that
    contain a run of nccl-tests. `in_place` selects the columns of logs. Each file is read once.

    Raises `TableError` for malformed content, for a file in `paths` that is empty, not text or without a table, and
    for a path that does not exist.
    """

    def of_collectives(content: CsvText, is_named: bool) -> tuple[MeasuredTable, ...]:
        is_other = not is_named and (is_kernel_table(content) or is_layer_table(content))
        return () if is_other else collective_tables(content)

    return _find(paths, of_collectives, partial(read_nccl_tests, in_place=in_place))


def _find(
    paths: Iterable[Path],
    tables_of: Callable[[CsvText, bool], Iterable[_Found]],
    read_log: Callable[[Path], Iterable[_Found]],
) -> tuple[_Found, ...]:
    tables: list[_Found] = []
    for path, is_named in _files(paths).items():
        if is_named:
            check_is_text(path)
        if path.suffix.lower() == ".csv":
            tables += tables_of(parse_csv(read_text(path), str(path)), is_named)
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
