"""Tables of pairs from TransferBench: the presets p2p and a2a, and tests with single transfers.

Bandwidths are in GB/s of 10**9 bytes. Of the bidirectional matrix the rows ``->`` are read, one of the two concurrent
directions. Only transfers from one GPU to one other GPU are read, not those of CPUs or NICs or to several destinations;
tables of several hosts raise `TableError`.

Source: ROCm/TransferBench, src/client/Presets/AllToAll.hpp and PeerToPeer.hpp, src/client/Utilities.hpp.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tasp_lab.measure.readers.file_position import FilePosition, read_text
from tasp_lab.measure.readers.pairs import Kind, PairTable, matrix

_BORDERS = str.maketrans(dict.fromkeys("|,│┌┐└┘├┤┬┴┼", " "))
_TITLE = re.compile(r"(Uni|Bi)directional copy peak bandwidth GB/s\b")
_BYTES = re.compile(r"Bytes Per Direction\s+(\d+)|\b(\d+) bytes per Transfer|\bCopying (\d+) bytes\b")
_COLUMNS = re.compile(r"\s*SRC(?:\+EXE)?\\(?:EXE\+)?DST(?:\+EXE)?((?:\s+[CG]PU \d+)+)(?:\s+(NIC|STotal)\b.*)?\s*")
_HOSTS = re.compile(r"\s*SRC\S*\\\S*DST\S*.*\bRank \d+.*")
_ROW = re.compile(r"\s*(GPU \d+)(?!\s*(?:<|min|max|sd))\s*(?:->)?(\s.*|)")
_TEST = re.compile(r"\s*Test (\d+):.*")
_TRANSFER = re.compile(
    r"\s*Transfer\s+\d+\s+(\S+)\s+GB/s\s+(\S+)\s+ms\s+(\d+)\s+bytes\s+(?:@\S+\s+)?(\S+)\s*->\s*(\S+)\s*->\s*(\S+)\s*"
)
_GPU_MEMORY = re.compile(r"[GF](\d+)")


@dataclass
class _Matrix:
    """A table of a preset, under construction."""

    header: FilePosition
    kind: Kind
    devices: list[str]
    bytes_per_transfer: int | None
    rows: dict[str, tuple[FilePosition, list[str]]] = field(default_factory=dict)

    def table(self, name: str) -> PairTable:
        gpus = [device for device in self.devices if device.startswith("GPU")]
        places = [self.devices.index(gpu) for gpu in gpus]
        rows = {}
        for gpu, (place, cells) in self.rows.items():
            if len(cells) < len(self.devices):
                raise place.error(f"{len(cells)} cells", f"{len(self.devices)}, one per column")
            rows[gpu] = (place, [cells[index] for index in places])
        values = matrix(self.header, gpus, rows, 1e9)
        return PairTable(name, self.kind, values, bytes_per_transfer=self.bytes_per_transfer)


@dataclass
class _Transfers:
    """The concurrent transfers of one test: source, destination, bytes/s and bytes."""

    number: str
    entries: list[tuple[int, int, float, int]] = field(default_factory=list)

    def table(self, name: str) -> PairTable:
        count = 1 + max(max(source, destination) for source, destination, _, _ in self.entries)
        values = np.full((count, count), math.nan)
        for source, destination, bandwidth_bytes_per_s, _ in self.entries:
            values[source, destination] = np.nansum([values[source, destination], bandwidth_bytes_per_s])
        sizes = {size_bytes for *_, size_bytes in self.entries}
        size_bytes = sizes.pop() if len(sizes) == 1 else None
        return PairTable(f"{name}, test {self.number}", "transfers", values, bytes_per_transfer=size_bytes)


def read_transfer_bench(path: Path) -> list[PairTable]:
    """The tables in a log. Raises `TableError` as `parse_transfer_bench` does, and for a file that cannot be read."""
    return parse_transfer_bench(read_text(path), str(path))


def parse_transfer_bench(text: str, name: str) -> list[PairTable]:
    r"""The tables in the text of a log named `name`, in its order; none if there are none.

    Transfers of a test with the same source and destination are summed.

    >>> [table] = parse_transfer_bench(r'''
    ... Summary: [67108864 bytes per Transfer] [GFX:8] [1 Read(s) 1 Write(s)]
    ... SRC\DST  GPU 00     GPU 01        STotal      Actual
    ... GPU 00      N/A     47.500        47.500      47.500
    ... GPU 01   46.500        N/A        46.500      46.500
    ... ''', "log")
    >>> table.kind, table.bandwidth_bytes_per_s[1].tolist(), table.bytes_per_transfer
    ('all-to-all', [46500000000.0, nan], 67108864)

    Raises `TableError` for a matrix with missing rows or cells, or cells that are not positive numbers, and for
    transfers between hosts.
    """
    found: list[_Matrix | _Transfers] = []
    kind: Kind = "all-to-all"
    size_bytes: int | None = None
    matrix: _Matrix | None = None
    for number, raw in enumerate(text.splitlines(), 1):
        place, line = FilePosition(name, number), raw.translate(_BORDERS)
        if match := _BYTES.search(line):
            size_bytes = int(next(filter(None, match.groups())))
        if match := _TITLE.search(line):
            kind = "unidirectional" if match[1] == "Uni" else "bidirectional"
        elif match := _COLUMNS.fullmatch(line):
            devices = re.findall(r"[CG]PU \d+", match[1])
            found.append(matrix := _Matrix(place, "all-to-all" if match[2] else kind, devices, size_bytes))
        elif _HOSTS.fullmatch(line):
            raise place.error("a table of several hosts", "the GPUs of one host")
        elif matrix is not None and (match := _ROW.fullmatch(line)):
            matrix.rows.setdefault(match[1], (place, match[2].split()))
        elif match := _TEST.fullmatch(line):
            found.append(_Transfers(match[1]))
        elif match := _TRANSFER.fullmatch(line):
            _add_transfer(found, place, match.groups())
    return [part.table(name) for part in found if isinstance(part, _Matrix) or part.entries]


def _add_transfer(found: Sequence[_Matrix | _Transfers], place: FilePosition, cells: Sequence[str]) -> None:
    """Store a transfer from one GPU to another."""
    bandwidth, time, size_bytes, source, _, destination = cells
    if source.startswith("R"):
        raise place.error("a transfer between hosts", "the GPUs of one host")
    ends = [_GPU_MEMORY.fullmatch(end) for end in (source, destination)]
    if not found or not isinstance(found[-1], _Transfers):
        raise place.error("a transfer before any test", "a line 'Test 1:' above it")
    if ends[0] and ends[1]:
        place.positive(time, "time")
        bandwidth_bytes_per_s = place.positive(bandwidth, "bandwidth") * 1e9
        found[-1].entries.append((int(ends[0][1]), int(ends[1][1]), bandwidth_bytes_per_s, int(size_bytes)))
