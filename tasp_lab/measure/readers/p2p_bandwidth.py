"""Tables of pairs from p2pBandwidthLatencyTest of the CUDA samples.

The orientation of a matrix depends on the version. The newer one prints ``(P2P Writes)`` or ``(P2P Reads)``: with
writes and without peer access the row is the sender, with reads the receiver. The older one prints neither and copies
from the GPU of the column to that of the row. Tables here always have the sender in the row. "Bidirectional" is the sum
of both directions. The latency is the one measured by the GPU, without the time of the CPU to issue the copy. The size
of a copy is not printed.

Source: NVIDIA/cuda-samples, Samples/5_Domain_Specific/p2pBandwidthLatencyTest, p2pBandwidthLatencyTest.cu.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tasp_lab.core.arrays import FloatArray
from tasp_lab.measure.readers.file_position import FilePosition, quoted, read_text
from tasp_lab.measure.readers.pairs import PairTable, matrix

_TITLE = re.compile(
    r"\s*(?:(Uni|Bi)directional )?P2P=(Disabled|Enabled) (Bandwidth|Latency)(?: \(P2P (Writes|Reads)\))? Matrix "
    r"\((.*?)\)\s*"
)
_COLUMNS = re.compile(r"\s*(?:D\\D|GPU)((?:\s+\d+)+)\s*")
_UNITS = {("Bandwidth", "GB/s"): 1e9, ("Latency", "us"): 1e-6}


class _Setting(NamedTuple):
    """The settings that distinguish the measurements of one run."""

    peer_to_peer: bool
    method: str | None


def read_p2p_bandwidth(path: Path) -> list[PairTable]:
    """The tables in a log. Raises `TableError` as `parse_p2p_bandwidth` does, and for a file that cannot be read."""
    return parse_p2p_bandwidth(read_text(path), str(path))


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
    bandwidths: list[tuple[_Setting, str, FloatArray]] = []
    latencies: dict[_Setting, FloatArray] = {}
    for title, values in _matrices(lines, name):
        setting = _Setting(title[2] == "Enabled", title[4])
        values = values if is_newer and setting.method != "Reads" else values.T
        if title[3] == "Latency":
            latencies[setting] = values
        else:
            bandwidths.append((setting, title[1], values))
    return [
        PairTable(
            name,
            "unidirectional" if direction == "Uni" else "bidirectional-sum",
            values,
            latencies.get(setting) if direction == "Uni" else None,
            peer_to_peer=setting.peer_to_peer,
        )
        for setting, direction, values in bandwidths
    ]


def _matrices(lines: Sequence[str], name: str) -> Iterator[tuple[re.Match[str], FloatArray]]:
    """Each title with its matrix as printed; lines after the rows are ignored."""
    for index, line in enumerate(lines):
        if title := _TITLE.fullmatch(line):
            place = FilePosition(name, index + 1)
            unit = _UNITS.get((title[3], title[5]))
            if unit is None:
                raise place.error(f"unit {quoted(title[5])}", "GB/s for bandwidths and us for latencies")
            columns = _COLUMNS.fullmatch(lines[index + 1]) if index + 1 < len(lines) else None
            if columns is None:
                raise place.error("no line with GPU numbers below", "one")
            yield title, _matrix(lines, index + 1, columns[1].split(), name, unit)


def _matrix(lines: Sequence[str], header: int, columns: Sequence[str], name: str, unit: float) -> FloatArray:
    """The rows below the line with index `header`."""
    rows = {}
    for number, line in enumerate(lines[header + 1 : header + 1 + len(columns)], header + 2):
        gpu, *cells = line.split() or [""]
        rows[gpu] = (FilePosition(name, number), cells)
    return matrix(FilePosition(name, header + 1), columns, rows, unit)
