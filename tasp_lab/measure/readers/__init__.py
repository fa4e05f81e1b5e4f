"""Measurements as tables, read from CSV files and from the logs of benchmark tools.

- A *table* holds the times of one collective at several sizes (`table`). It is a CSV file with headers, which may have
  several, or a run in a log of nccl-tests or rccl-tests (`nccl_tests`).
- A *table of layers* holds the times of whole attention calls (`layer_table`), a *table of kernels* those of single
  calls on one GPU (`kernel_table`). They differ in their columns.
- A *table of pairs* holds the bandwidth between each pair of GPUs of a host, from a log of TransferBench or of
  p2pBandwidthLatencyTest of the CUDA samples (`pairs`).

Sizes are in bytes, times in seconds, bandwidths in bytes/s, one way. Invalid input raises a one-line `TableError` that
names file, line, what was found and what was expected.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

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
    "read_nccl_tests",
    "parse_nccl_tests",
    "parse_transfer_bench",
    "parse_p2p_bandwidth",
]

AnyTable = MeasuredTable | LayerTable | KernelTable
"""A table of a collective, of layers or of kernels."""

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
    return tuple(table for path, is_named in _files(paths).items() for table in _read(path, is_named))


def find_tables(paths: Iterable[Path], *, in_place: bool = False) -> tuple[MeasuredTable, ...]:
    """The tables in files and, recursively, in folders, in the given order and inside a folder by name.

    In a folder these are the .csv files except tables of kernels and layers, and the .log, .out and .txt files that
    contain a run of nccl-tests. `in_place` selects the columns of logs. Each file is read once.

    Raises `TableError` for malformed content, for a file in `paths` that is empty, not text or without a table, and
    for a path that does not exist.
    """
    tables = [_read(path, is_named, in_place, collectives=True) for path, is_named in _files(paths).items()]
    return tuple(table for each in tables for table in each if isinstance(table, MeasuredTable))


def _read(path: Path, is_named: bool, in_place: bool = False, *, collectives: bool = False) -> Iterable[AnyTable]:
    """The tables in a file, or those of `collectives` only; one that `is_named` by the user must have a table."""
    if is_named:
        check_is_text(path)
    if path.suffix.lower() == ".csv":
        content = parse_csv(read_text(path), str(path))
        if not collectives:
            return _tables(content)
        # a named table of another kind is read too, so that what it lacks is said
        is_other = is_kernel_table(content) or is_layer_table(content)
        return collective_tables(content) if is_named or not is_other else ()
    runs = read_nccl_tests(path, in_place=in_place)
    if is_named and not runs:
        raise TableError(f"{path}: no table in it, expected a CSV table (.csv) or a log of nccl-tests")
    return runs


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
