"""What people have measured, as tables: CSV files, and the logs of the tools that measured it.

- A *table* holds the times of one collective at several sizes (`tasp_lab.measurements.table`): a CSV file with a few
  headers, or a run in a log of nccl-tests or rccl-tests (`tasp_lab.measurements.nccl_tests`).
- A *table of pairs* holds the bandwidth between each two GPUs of a host (`tasp_lab.measurements.pairs`), from a log of
  TransferBench (`tasp_lab.measurements.transfer_bench`) or of p2pBandwidthLatencyTest of the CUDA samples
  (`tasp_lab.measurements.p2p_bandwidth`).

Sizes are in bytes, times in seconds, bandwidths in bytes/s, one way. What cannot be read is a `TableError` of one line
that names file, line, what was found and what was expected.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tasp_lab.errors import TableError
from tasp_lab.measurements.nccl_tests import parse_nccl_tests, read_nccl_tests
from tasp_lab.measurements.p2p_bandwidth import parse_p2p_bandwidth, read_p2p_bandwidth
from tasp_lab.measurements.pairs import PairTable
from tasp_lab.measurements.places import read_text
from tasp_lab.measurements.table import COLLECTIVES, Collective, MeasuredTable, Row, parse_table, read_table
from tasp_lab.measurements.transfer_bench import parse_transfer_bench, read_transfer_bench

__all__ = [
    "MeasuredTable",
    "PairTable",
    "Row",
    "Collective",
    "COLLECTIVES",
    "find_tables",
    "find_pairs",
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
    """The tables in files and, however deep, in folders, in the order given and inside a folder by name.

    In a folder these are the files that end in .csv, and those in .log, .out or .txt that have a run of nccl-tests in
    them. `in_place` chooses the columns of logs, `profile` names the machine for those that name none. A file is read
    once, however often it is given.

    Raises `TableError` for what is broken in a file, for a file that is named but has no table, and for a path that
    does not exist.
    """
    tables: list[MeasuredTable] = []
    for path, is_named in _files(paths).items():
        if path.suffix.lower() == ".csv":
            tables.append(read_table(path))
            continue
        runs = read_nccl_tests(path, in_place=in_place, profile=profile)
        if is_named and not runs:
            raise TableError(f"{path}: no table in it, expected a CSV table (.csv) or a log of nccl-tests")
        tables += runs
    return tuple(tables)


def find_pairs(path: Path) -> list[PairTable]:
    """The tables of pairs in a log of TransferBench or p2pBandwidthLatencyTest.

    Raises `TableError` for what is broken in it, and if there is none.
    """
    text, name = read_text(path), str(path)
    tables = parse_p2p_bandwidth(text, name) + parse_transfer_bench(text, name)
    if not tables:
        raise TableError(f"{path}: no table of pairs in it, expected a log of TransferBench or p2pBandwidthLatencyTest")
    return tables


def _files(paths: Iterable[Path]) -> dict[Path, bool]:
    """The files to read, and whether each was named itself."""
    files: dict[Path, bool] = {}
    for path in paths:
        if not path.is_dir():
            files[path] = True
            continue
        for file in sorted(path.rglob("*")):
            if file.is_file() and file.suffix.lower() in (".csv", *_LOG_ENDINGS):
                files.setdefault(file, False)
    return files
