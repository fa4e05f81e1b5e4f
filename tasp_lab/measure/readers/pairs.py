"""Tables of pairs: the bandwidth between each pair of GPUs of one host, as benchmark tools print it in matrices.

**p2pBandwidthLatencyTest** of the CUDA samples: the unidirectional matrix with peer access. The newer version prints
``(P2P Writes)`` or ``(P2P Reads)``: with writes the row is the sender, with reads the receiver. The older one prints
neither and copies from the GPU of the column to that of the row. Tables here always have the sender in the row.

Source: NVIDIA/cuda-samples, Samples/5_Domain_Specific/p2pBandwidthLatencyTest, p2pBandwidthLatencyTest.cu.

**TransferBench**: the unidirectional matrix of the preset p2p, and the matrix of a2a, in GB/s of 10**9 bytes, between
GPUs; CPUs are left out, and tables of several hosts raise `TableError`.

Source: ROCm/TransferBench, src/client/Presets/AllToAll.hpp and PeerToPeer.hpp, src/client/Utilities.hpp.

Other matrices of both tools (both directions at once, through the host's memory, latencies of kernels that wait) tell
no constant, and are not read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from tasp_lab.core.arrays import FloatArray
from tasp_lab.measure.readers.file_position import FilePosition, quoted

Kind = Literal["unidirectional", "all-to-all"]
"""The concurrent transfers: one, or all pairs."""


class PairTable(NamedTuple):
    """Bandwidths from each GPU (row) to each other (column), n x n, nan where the tool printed none.

    The diagonal holds copies within a GPU.
    """

    name: str
    kind: Kind
    bandwidth_bytes_per_s: FloatArray


@dataclass
class _Matrix:
    """A matrix while it is read: its columns, and the position and the cells of each row by its name."""

    kind: Kind
    header: FilePosition
    columns: Sequence[str]
    is_sender_in_column: bool = False
    rows: dict[str, tuple[FilePosition, list[str]]] = field(default_factory=dict)

    def table(self, name: str) -> PairTable:
        """The table of the GPUs; CPUs are left out."""
        # all cells have the same number of decimals, so one with fewer is the end of a truncated log
        decimals = max((len(cell.partition(".")[2]) for _, cells in self.rows.values() for cell in cells), default=0)
        gpus = [place for place, column in enumerate(self.columns) if not column.startswith("CPU")]
        values = np.full((len(gpus), len(gpus)), math.nan)
        for row, gpu in enumerate(self.columns[place] for place in gpus):
            if gpu not in self.rows:
                raise self.header.error(f"column {gpu} without a row", "one row per column")
            place, cells = self.rows[gpu]
            if len(cells) < len(self.columns):
                raise place.error(f"{len(cells)} cells", f"{len(self.columns)}, one per column")
            for column, at in enumerate(gpus):
                if (cell := cells[at]) == "N/A":
                    continue
                if at == len(cells) - 1 and len(cell.partition(".")[2]) < decimals:
                    raise place.error(f"truncated value {cell!a}", f"{decimals} decimals as in the others")
                values[row, column] = place.positive(cell, "value") * 1e9
        return PairTable(name, self.kind, values.T if self.is_sender_in_column else values)


_P2P_TITLE = re.compile(r"\s*(.*\bP2P=\w+ (?:Bandwidth|Latency))(?: \(P2P (\w+)\))? Matrix \((.*?)\)\s*")
_P2P_COLUMNS = re.compile(r"\s*(?:D\\D|[CG]PU)(\s+0(?:\s+\d+)*)\s*")
_BENCH_TITLE = re.compile(r"(Uni|Bi)directional copy peak bandwidth GB/s\b")
_BENCH_COLUMNS = re.compile(r"\s*SRC(?:\+EXE)?\\(?:EXE\+)?DST(?:\+EXE)?((?:\s+[CG]PU \d+)+)(?:\s+(NIC|STotal)\b.*)?\s*")
_BENCH_HOSTS = re.compile(r"\s*SRC\S*\\\S*DST\S*.*\bRank \d+.*")
_BORDERS = str.maketrans(dict.fromkeys("|,│┌┐└┘├┤┬┴┼", " "))
_ROW = re.compile(r"\s*((?:GPU )?\d+)(?!\S|\s*(?:<|min|max|sd))\s*(?:->)?(.*)")


def parse_pairs(text: str, name: str) -> list[PairTable]:
    r"""The tables in the text of a log named `name`, in its order; none if there are none.

    >>> nvidia, amd = parse_pairs(r'''
    ... Unidirectional P2P=Enabled Bandwidth (P2P Writes) Matrix (GB/s)
    ...    D\D     0      1
    ...      0 2500.00 380.00
    ...      1 370.00 2500.00
    ... SRC\DST  GPU 00     GPU 01        STotal      Actual
    ... GPU 00      N/A     47.500        47.500      47.500
    ... GPU 01   46.500        N/A        46.500      46.500
    ... ''', "log")
    >>> nvidia.kind, nvidia.bandwidth_bytes_per_s[0].tolist(), amd.kind, amd.bandwidth_bytes_per_s[1].tolist()
    ('unidirectional', [2500000000000.0, 380000000000.0], 'all-to-all', [46500000000.0, nan])

    Raises `TableError` for an unknown unit, for a matrix with missing rows or cells, or cells that are not positive
    numbers, and for several hosts.
    """
    found: list[_Matrix] = []
    matrix: _Matrix | None = None  # the one whose rows follow; None in what is not read
    title: tuple[FilePosition, str | None] | None = None  # of the next matrix of the CUDA samples, and its method
    bench_kind: Kind | None = "all-to-all"
    for number, raw in enumerate(text.splitlines(), 1):
        place, line = FilePosition(name, number), raw.translate(_BORDERS)
        columns = _P2P_COLUMNS.fullmatch(line)
        if title is not None:
            if columns is None:
                break
            # writes go from the row; reads, and the copies of older versions, which print no method, come from the row
            matrix = _Matrix("unidirectional", place, columns[1].split(), title[1] != "Writes")
            found.append(matrix)
            title = None
        elif match := _P2P_TITLE.fullmatch(line):
            what, method, unit = match.groups()
            matrix = None
            if what == "Unidirectional P2P=Enabled Bandwidth":
                if unit != "GB/s":
                    raise place.error(f"unit {quoted(unit)}", "GB/s for bandwidths")
                title = place, method
        elif columns is not None:
            matrix = None
        elif match := _BENCH_TITLE.search(line):
            bench_kind = "unidirectional" if match[1] == "Uni" else None
        elif match := _BENCH_COLUMNS.fullmatch(line):
            matrix = None
            if (kind := "all-to-all" if match[2] else bench_kind) is not None:
                matrix = _Matrix(kind, place, re.findall(r"[CG]PU \d+", match[1]))
                found.append(matrix)
        elif _BENCH_HOSTS.fullmatch(line):
            raise place.error("a table of several hosts", "the GPUs of one host")
        # a comma is a border in TransferBench's CSV, and in a row of the CUDA samples a decimal comma, which is refused
        elif matrix is not None and (match := _ROW.fullmatch(raw if matrix.columns[0].isdecimal() else line)):
            matrix.rows.setdefault(match[1], (place, match[2].split()))
    if title is not None:
        raise title[0].error("no line with GPU numbers below", "one")
    return [each.table(name) for each in found]
