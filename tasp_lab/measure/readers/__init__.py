"""Measurements as tables, read from CSV files and from the logs of benchmark tools::

    tables = find_tables([Path("my-cluster/")])

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
from tasp_lab.measure.readers.file_position import CsvText, parse_csv, read_text
from tasp_lab.measure.readers.kernel_table import KernelRow, KernelTable, is_kernel_table, kernel_table
from tasp_lab.measure.readers.layer_table import LayerRow, LayerTable, is_layer_table, layer_table
from tasp_lab.measure.readers.nccl_tests import parse_nccl_tests
from tasp_lab.measure.readers.pairs import PairTable, parse_pairs
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
    "EXPECTED",
    "find_all_tables",
    "find_tables",
    "read_files",
    "parse_any_table",
    "read_table",
    "parse_table",
    "parse_nccl_tests",
    "parse_pairs",
]

AnyTable = MeasuredTable | LayerTable | KernelTable
"""A table of a collective, of layers or of kernels."""

EXPECTED = "a CSV table (.csv), or a log of nccl-tests, rccl-tests, TransferBench or p2pBandwidthLatencyTest"

_ENDINGS = (".csv", ".log", ".out", ".txt")


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


def find_tables(paths: Iterable[Path]) -> tuple[MeasuredTable, ...]:
    """The tables of collectives in files and folders, see `read_files`."""
    return tuple(table for table in read_files(paths) if isinstance(table, MeasuredTable))


def find_all_tables(paths: Iterable[Path]) -> tuple[AnyTable, ...]:
    """The tables of collectives, layers and kernels in files and folders, see `read_files`."""
    return tuple(table for table in read_files(paths) if not isinstance(table, PairTable))


def read_files(paths: Iterable[Path], *, in_place: bool | None = False) -> list[AnyTable | PairTable]:
    """The tables of every kind in files and, recursively, in folders, in the given order and inside a folder by name.

    In a folder these are those of the .csv files, and of the .log, .out and .txt files that have some. `in_place`
    selects the columns of logs of nccl-tests (`parse_nccl_tests`). Each file is read once.

    Raises `TableError` for malformed content, for a file in `paths` that is empty, not text or without a table, and
    for a path that does not exist.
    """
    is_named: dict[Path, bool] = {}
    for path in paths:
        if not path.is_dir():
            is_named[path] = True
            continue
        for file in sorted(path.rglob("*")):
            if file.is_file() and file.suffix.lower() in _ENDINGS:
                is_named.setdefault(file, False)
    found: list[AnyTable | PairTable] = []
    for path, must_have_one in is_named.items():
        text, name = read_text(path, must_be_text=must_have_one), str(path)
        if path.suffix.lower() == ".csv":
            found += _tables(parse_csv(text, name))
        elif in_log := parse_nccl_tests(text, name, in_place=in_place) or parse_pairs(text, name):
            found += in_log
        elif must_have_one:
            raise TableError(f"{path}: no measurement in it, expected {EXPECTED}")
    return found
