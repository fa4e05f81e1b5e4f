"""A table of pairs: the bandwidth between each pair of GPUs of one host, as benchmark tools print it.

**p2pBandwidthLatencyTest** of the CUDA samples. The orientation of a matrix depends on the version. The newer one
prints ``(P2P Writes)`` or ``(P2P Reads)``: with writes and without peer access the row is the sender, with reads the
receiver. The older one prints neither and copies from the GPU of the column to that of the row. Tables here always have
the sender in the row. "Bidirectional" is the sum of both directions. The latency is the one measured by the GPU,
without the time of the CPU to issue the copy. The size of a copy is not printed.

Source: NVIDIA/cuda-samples, Samples/5_Domain_Specific/p2pBandwidthLatencyTest, p2pBandwidthLatencyTest.cu.

**TransferBench**: the presets p2p and a2a, and tests with single transfers. Bandwidths are in GB/s of 10**9 bytes. Of
the bidirectional matrix the rows ``->`` are read, one of the two concurrent directions. Only transfers from one GPU to
one other GPU are read, not those of CPUs or NICs or to several destinations; tables of several hosts raise
`TableError`.

Source: ROCm/TransferBench, src/client/Presets/AllToAll.hpp and PeerToPeer.hpp, src/client/Utilities.hpp.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from tasp_lab.core.arrays import FloatArray
from tasp_lab.measure.readers.file_position import FilePosition, quoted

Kind = Literal["unidirectional", "bidirectional", "bidirectional-sum", "all-to-all", "transfers"]
"""The concurrent transfers: one; one in each direction, of which the table holds one; the same, as a sum; all pairs; or
the transfers of the table."""


@dataclass(frozen=True, eq=False)
class PairTable:
    """Bandwidths from each GPU (row) to each other (column), n x n, nan where the tool printed none.

    The diagonal holds copies within a GPU. `latency_s` has the same shape, None if not measured for this kind.
    `bytes_per_transfer` is None if it is not printed or differs between transfers. `peer_to_peer` is whether peer
    access was enabled, None if unknown.
    """

    name: str
    kind: Kind
    bandwidth_bytes_per_s: FloatArray
    latency_s: FloatArray | None = None
    bytes_per_transfer: int | None = None
    peer_to_peer: bool | None = None


Cells = Mapping[str, tuple[FilePosition, Sequence[str]]]
"""The position and the cells of each row, as text."""


def matrix(header: FilePosition, columns: Sequence[str], rows: Cells, unit: float) -> FloatArray:
    """The matrix of a table in SI units; `header` is the position of the line with the column names.

    >>> place = FilePosition("log", 1)
    >>> matrix(place, ["0", "1"], {"0": (place, ["N/A", "48.5"]), "1": (place, ["47.5", "N/A"])}, 1e9).tolist()
    [[nan, 48500000000.0], [47500000000.0, nan]]

    Raises `TableError` if a column has no row, or if a row has too few cells or a cell that is not a positive number.
    """
    # all cells have the same number of decimals, so one with fewer is the end of a truncated log
    decimals = max((len(cell.partition(".")[2]) for _, cells in rows.values() for cell in cells), default=0)
    values = np.full((len(columns), len(columns)), math.nan)
    for row, name in enumerate(columns):
        if name not in rows:
            raise header.error(f"column {name} without a row", "one row per column")
        place, cells = rows[name]
        if len(cells) < len(columns):
            raise place.error(f"{len(cells)} cells", f"{len(columns)}, one per column")
        for column, cell in enumerate(cells[: len(columns)]):
            if cell != "N/A":
                if len(cell.partition(".")[2]) < decimals and cells[column + 1 :] == []:
                    raise place.error(f"truncated value {cell!a}", f"{decimals} decimals as in the others")
                values[row, column] = place.positive(cell, "value") * unit
    return values


_P2P_TITLE = re.compile(
    r"\s*(?:(Uni|Bi)directional )?P2P=(Disabled|Enabled) (Bandwidth|Latency)(?: \(P2P (Writes|Reads)\))? Matrix "
    r"\((.*?)\)\s*"
)
_P2P_COLUMNS = re.compile(r"\s*(?:D\\D|GPU)((?:\s+\d+)+)\s*")
_UNITS = {("Bandwidth", "GB/s"): 1e9, ("Latency", "us"): 1e-6}


def parse_p2p_bandwidth(text: str, name: str) -> list[PairTable]:
    r"""The tables in the text of a log named `name`, in its order; none if there are none.

    >>> [table] = parse_p2p_bandwidth(r'''
    ... Unidirectional P2P=Enabled Bandwidth (P2P Writes) Matrix (GB/s)
    ...    D\D     0      1
    ...      0 2500.00 380.00
    ...      1 370.00 2500.00
    ... P2P=Enabled Latency (P2P Writes) Matrix (us)
    ...    GPU     0      1
    ...      0   2.00   2.50
    ...      1   3.00   2.00
    ... ''', "log")
    >>> table.kind, table.bandwidth_bytes_per_s[0].tolist(), table.latency_s[1].tolist()
    ('unidirectional', [2500000000000.0, 380000000000.0], [3e-06, 2e-06])

    Raises `TableError` for an unknown unit, and for a matrix with missing rows or cells, or cells that are not positive
    numbers.
    """
    lines = text.splitlines()
    is_newer = "(P2P Writes)" in text or "(P2P Reads)" in text
    bandwidths: list[tuple[str, tuple[str, str], FloatArray]] = []
    latencies: dict[tuple[str, str], FloatArray] = {}
    for index, line in enumerate(lines):
        if not (title := _P2P_TITLE.fullmatch(line)):
            continue
        (direction, peers, what, method, unit), place = title.groups(), FilePosition(name, index + 1)
        if (what, unit) not in _UNITS:
            raise place.error(f"unit {quoted(unit)}", "GB/s for bandwidths and us for latencies")
        columns = _P2P_COLUMNS.fullmatch(lines[index + 1]) if index + 1 < len(lines) else None
        if columns is None:
            raise place.error("no line with GPU numbers below", "one")
        gpus, rows = columns[1].split(), {}
        for number, row in enumerate(lines[index + 2 : index + 2 + len(gpus)], index + 3):
            gpu, *cells = row.split() or [""]
            rows[gpu] = (FilePosition(name, number), cells)
        values = matrix(FilePosition(name, index + 2), gpus, rows, _UNITS[what, unit])
        values = values if is_newer and method != "Reads" else values.T  # the sender to the row
        if what == "Latency":
            latencies[peers, method] = values
        else:
            bandwidths.append((direction, (peers, method), values))
    tables = []
    for direction, setting, values in bandwidths:
        kind: Kind = "unidirectional" if direction == "Uni" else "bidirectional-sum"
        latency_s = latencies.get(setting) if direction == "Uni" else None
        tables.append(PairTable(name, kind, values, latency_s, peer_to_peer=setting[0] == "Enabled"))
    return tables


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


class _Matrix(NamedTuple):
    """A table of a preset, under construction."""

    header: FilePosition
    kind: Kind
    devices: list[str]
    bytes_per_transfer: int | None
    rows: dict[str, tuple[FilePosition, list[str]]]

    def table(self, name: str) -> PairTable:
        """The table of the GPUs; CPUs are left out."""
        rows, columns = {}, [index for index, device in enumerate(self.devices) if device.startswith("GPU")]
        for gpu, (place, cells) in self.rows.items():
            if len(cells) < len(self.devices):
                raise place.error(f"{len(cells)} cells", f"{len(self.devices)}, one per column")
            rows[gpu] = (place, [cells[index] for index in columns])
        values = matrix(self.header, [self.devices[index] for index in columns], rows, 1e9)
        return PairTable(name, self.kind, values, bytes_per_transfer=self.bytes_per_transfer)


class _Transfers(NamedTuple):
    """The concurrent transfers of one test: source, destination, bytes/s and bytes."""

    number: str
    entries: list[tuple[int, int, float, int]]

    def table(self, name: str) -> PairTable:
        """The sums of transfers between the same GPUs."""
        sources, destinations, bandwidths, sizes = zip(*self.entries, strict=True)
        count = 1 + max(*sources, *destinations)
        values, total = np.full((count, count), math.nan), np.zeros((count, count))
        np.add.at(total, (sources, destinations), bandwidths)
        values[sources, destinations] = total[sources, destinations]
        size_bytes = sizes[0] if len(set(sizes)) == 1 else None
        return PairTable(f"{name}, test {self.number}", "transfers", values, bytes_per_transfer=size_bytes)


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
    results: list[_Matrix | _Transfers] = []
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
            results.append(matrix := _Matrix(place, "all-to-all" if match[2] else kind, devices, size_bytes, {}))
        elif _HOSTS.fullmatch(line):
            raise place.error("a table of several hosts", "the GPUs of one host")
        elif matrix is not None and (match := _ROW.fullmatch(line)):
            matrix.rows.setdefault(match[1], (place, match[2].split()))
        elif match := _TEST.fullmatch(line):
            results.append(_Transfers(match[1], []))
        elif match := _TRANSFER.fullmatch(line):
            bandwidth, time, transferred, *path = match.groups()
            if path[0].startswith("R"):
                raise place.error("a transfer between hosts", "the GPUs of one host")
            if not results or not isinstance(results[-1], _Transfers):
                raise place.error("a transfer before any test", "a line 'Test 1:' above it")
            source, destination = _GPU_MEMORY.fullmatch(path[0]), _GPU_MEMORY.fullmatch(path[2])
            if source and destination:
                place.positive(time, "time")
                rate = place.positive(bandwidth, "bandwidth") * 1e9
                results[-1].entries.append((int(source[1]), int(destination[1]), rate, int(transferred)))
    return [part.table(name) for part in results if isinstance(part, _Matrix) or part.entries]
