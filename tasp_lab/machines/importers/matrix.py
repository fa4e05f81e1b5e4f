"""Square tables in text: a header with names, and below it one row per name with a cell for each column.

Both nvidia-smi and rocm-smi print such tables of GPUs; nvidia-smi adds columns for NICs and, after the cells, words
about CPUs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from tasp_lab.core.errors import TopologyError
from tasp_lab.machines.importers.survey import Pair, shown

GPU = re.compile(r"GPU[0-9]+")
"""The name of a GPU as both tools write it."""


@dataclass(frozen=True)
class Row:
    """The words after the name of a row, and the number of its line, counted from 1."""

    line: int
    words: tuple[str, ...]


@dataclass(frozen=True)
class Matrix:
    """A table: the names of its columns, and the rows of the GPUs among them, in the order of the columns.

    `last_line` is the number of the line in which the table ends.
    """

    columns: tuple[str, ...]
    gpus: tuple[str, ...]
    rows: tuple[Row, ...]
    last_line: int

    def cells(self) -> Iterator[tuple[str, Row, str, str]]:
        """Each GPU with its row, and for each column the cell in it."""
        for gpu, row in zip(self.gpus, self.rows, strict=True):
            for column, cell in zip(self.columns, row.words, strict=False):
                yield gpu, row, column, cell

    def symmetric_cells(self, diagonal: str) -> dict[Pair, str]:
        """The cell of each two GPUs. Raises if it is another the other way round, or if the diagonal differs."""
        for gpu, row, column, cell in self.cells():
            if gpu == column and cell != diagonal:
                raise TopologyError(f"line {row.line}: {gpu} to itself is {shown(cell)}, expected {diagonal}")
        place_of = {column: place for place, column in enumerate(self.columns)}
        places = [place_of[gpu] for gpu in self.gpus]
        cells = {}
        for a, b in combinations(range(len(self.gpus)), 2):
            there, back = self.rows[a].words[places[b]], self.rows[b].words[places[a]]
            if there != back:
                raise TopologyError(
                    f"line {self.rows[a].line}: {self.gpus[a]} to {self.gpus[b]} is {shown(there)}, but "
                    f"{shown(back)} the other way round in line {self.rows[b].line}"
                )
            cells[a, b] = there
        return cells


def read_matrix(lines: Sequence[str], header: int, columns: Sequence[str]) -> Matrix:
    """The table below the line with index `header`, which names the columns; it ends before a line that is no row.

    Raises `TopologyError` if a GPU has no row or more than one, if a row has no column, or has too few cells.
    """
    gpus = [column for column in columns if GPU.fullmatch(column)]
    if len(set(columns)) < len(columns):
        raise TopologyError(f"line {header + 1}: a column is there twice, expected each GPU once")
    rows: dict[str, Row] = {}
    for line, text in enumerate(lines[header + 1 :], header + 2):
        name, *words = text.split() or [""]
        if name not in columns and not GPU.fullmatch(name):
            break
        if name not in columns:
            raise TopologyError(f"line {line}: {shown(name)} has a row but no column in line {header + 1}")
        if name in rows:
            raise TopologyError(f"line {line}: {shown(name)} has another row in line {rows[name].line}")
        if name in gpus and len(words) < len(columns):
            raise TopologyError(f"line {line}: {name} has {len(words)} cells, expected {len(columns)}, one per column")
        rows[name] = Row(line, tuple(words))
    if missing := [gpu for gpu in gpus if gpu not in rows]:
        raise TopologyError(f"line {header + 1}: {missing[0]} has a column but no row below")
    return Matrix(tuple(columns), tuple(gpus), tuple(rows[gpu] for gpu in gpus), header + 1 + len(rows))
