"""A table of pairs: the bandwidth between each pair of GPUs of one host, as benchmark tools print it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tasp_lab.core.arrays import FloatArray
from tasp_lab.measure.readers.file_position import FilePosition

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
    All cells have the same number of decimals, so one with fewer is the end of a truncated log.
    """
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
