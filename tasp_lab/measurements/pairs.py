"""A table of pairs: how fast each GPU of one host sends to each other, as tools print it in a square matrix."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tasp_lab.arrays import FloatArray
from tasp_lab.measurements.places import Place

Kind = Literal["unidirectional", "bidirectional", "bidirectional-sum", "all-to-all", "transfers"]
"""What is under way at the same time: one transfer; one each way, of which the table holds one; both of these, added
up; all pairs; or the transfers of the table, whatever they are."""


@dataclass(frozen=True, eq=False)
class PairTable:
    """Bandwidths from each GPU (row) to each other (column), n x n, nan where the tool printed none.

    On the diagonal are copies within a GPU. `latency_s` is of the same form, None if the tool did not measure it for
    this kind; `bytes_per_transfer` is None if the tool does not print it or if the transfers differ. `peer_to_peer`
    says whether the GPUs reached each other's memory, None if the tool does not say.
    """

    name: str
    kind: Kind
    bandwidth_bytes_per_s: FloatArray
    latency_s: FloatArray | None = None
    bytes_per_transfer: int | None = None
    peer_to_peer: bool | None = None


Cells = Mapping[str, tuple[Place, Sequence[str]]]
"""For each row its place and its cells, as text."""


def matrix(header: Place, columns: Sequence[str], rows: Cells, unit: float) -> FloatArray:
    """The matrix of a table whose columns are named in the line `header`, in SI units.

    >>> place = Place("log", 1)
    >>> matrix(place, ["0", "1"], {"0": (place, ["N/A", "48.5"]), "1": (place, ["47.5", "N/A"])}, 1e9).tolist()
    [[nan, 48500000000.0], [47500000000.0, nan]]

    Raises `TableError` if a column has no row, or a row has too few cells or one that is no positive number. All have
    as many decimals, so one with fewer is the end of a log that was cut.
    """
    decimals = max((len(cell.partition(".")[2]) for _, cells in rows.values() for cell in cells), default=0)
    values = np.full((len(columns), len(columns)), math.nan)
    for row, name in enumerate(columns):
        if name not in rows:
            raise header.error(f"{name} has a column but no row below", "a row for each column")
        place, cells = rows[name]
        if len(cells) < len(columns):
            raise place.error(f"{len(cells)} cells", f"{len(columns)}, one per column")
        for column, cell in enumerate(cells[: len(columns)]):
            if cell != "N/A":
                if len(cell.partition(".")[2]) < decimals and cells[column + 1 :] == []:
                    raise place.error(f"value {cell!a} is cut", f"{decimals} decimals as in the others")
                values[row, column] = place.positive(cell, "value") * unit
    return values
