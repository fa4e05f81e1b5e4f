"""Measurements as tables, read from CSV files and from the logs of benchmark tools.

- A *table* holds the times of one collective at several sizes (`tasp_lab.measurements.table`). It is a CSV file with
  headers, or a run in a log of nccl-tests or rccl-tests (`tasp_lab.measurements.nccl_tests`).
- A *table of pairs* holds the bandwidth between each pair of GPUs of a host (`tasp_lab.measurements.pairs`). It comes
  from a log of TransferBench (`tasp_lab.measurements.transfer_bench`) or of p2pBandwidthLatencyTest of the CUDA samples
  (`tasp_lab.measurements.p2p_bandwidth`).

Sizes are in bytes, times in seconds, bandwidths in bytes/s, one way. Invalid input raises a one-line `TableError` that
names file, line, what was found and what was expected.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tasp_lab.errors import TableError
from tasp_lab.measurements.file_position import check_is_text
from tasp_lab.measurements.nccl_tests import parse_nccl_tests, read_nccl_tests
from tasp_lab.measurements.p2p_bandwidth import parse_p2p_bandwidth, read_p2p_bandwidth
from tasp_lab.measurements.pairs import PairTable
from tasp_lab.measurements.table import COLLECTIVES, MeasuredTable, Row, parse_table, read_table
from tasp_lab.measurements.transfer_bench import parse_transfer_bench, read_transfer_bench

__all__ = [
    "MeasuredTable",
    "PairTable",
    "Row",
    "COLLECTIVES",
    "find_tables",
    "read_table",
    "parse_table",
    "read_nccl_tests",
    "parse_nccl_tests",
    "read_transfer_bench",
    "parse_transfer_bench",
    "read_p2p_bandwidth",
    "parse_p2p_bandwidth",
]

_LOG_ENDINGS = (".log", ".out", ".txt")


def find_tables(
    paths: Iterable[Path], *, in_place: bool = False, profile: str | None = None
) -> tuple[MeasuredTable, ...]:
    """The tables in files and, recursively, in folders, in the given order and inside a folder by name.

    In a folder these are the .csv files, and the .log, .out and .txt files that contain a run of nccl-tests. `in_place`
    selects the columns of logs; `profile` names the machine of tables without one. Each file is read once.

    Raises `TableError` for malformed content, for a file in `paths` that is empty, not text or without a table, and
    for a path that does not exist.
    """
    tables: list[MeasuredTable] = []
    for path, is_named in _files(paths).items():
        if is_named:
            check_is_text(path)
        if path.suffix.lower() == ".csv":
            tables.append(read_table(path))
            continue
        runs = read_nccl_tests(path, in_place=in_place, profile=profile)
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
