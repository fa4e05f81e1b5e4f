"""A measured table: how long one collective took at several sizes, on a machine and a number of ranks.

A table can be kept as a CSV file with headers above it::

    # profile: h100-8
    # collective: all_gather
    # ranks: 8
    # source: own measurement, NCCL 2.26.2, 2026-01-15
    size_B,time_us
    33554432,123.38

``profile`` names the machine of the catalogue; other headers and other columns are kept aside. ``size_B`` is the size
column of nccl-tests: the bytes that every rank has in the end for all_gather, those that it has at the start for
reduce_scatter, all that it sends for alltoall (its own part included), and one message for sendrecv and all_reduce
(NVIDIA/nccl-tests, doc/PERFORMANCE.md).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from tasp_lab.errors import TableError
from tasp_lab.measurements.places import Place, read_text, shown

Collective = Literal["all_gather", "alltoall", "sendrecv", "reduce_scatter", "all_reduce"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)

_HEADER = re.compile(r"#\s*([A-Za-z_][\w -]*?)\s*:(?:\s+(.*?))?\s*")
_NEEDED = ("profile", "collective", "ranks")
_COLUMNS = ("size_B", "time_us")
_FIRST = "from_size_b"


class Row(NamedTuple):
    """One measurement: the size as nccl-tests counts it, and the time of one call."""

    size_bytes: int
    time_s: float


@dataclass(frozen=True)
class MeasuredTable:
    """One collective on one machine at several sizes.

    Rows of fewer than `from_size_bytes` bytes are there to be seen and do not count.

    `name` is the file, and the run if a file has several. `headers` are all that the file says, those included that
    have fields. `reason` says what is missing to compare the table with a prediction; it is empty if nothing is.
    `warnings` say what was left out. `others` are the columns besides size and time, as text, one cell per row.
    """

    name: str
    profile: str | None
    collective: Collective | None
    ranks: int | None
    source: str | None
    headers: Mapping[str, str]
    rows: tuple[Row, ...]
    reason: str = ""
    warnings: tuple[str, ...] = ()
    others: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    from_size_bytes: int = 1


def read_table(path: Path) -> MeasuredTable:
    """The table in a CSV file. Raises `TableError` as `parse_table` does, and for a file that cannot be read."""
    return parse_table(read_text(path), str(path))


def parse_table(text: str, name: str) -> MeasuredTable:
    """The table in the text of a CSV file.

    >>> table = parse_table('''# profile: h100-8
    ... # collective: all_gather
    ... # ranks: 8
    ... size_B,time_us,note
    ... 33554432,125,warm
    ... ''', "table.csv")
    >>> table.collective, table.ranks, table.rows, table.others
    ('all_gather', 8, (Row(size_bytes=33554432, time_s=0.000125),), {'note': ('warm',)})
    >>> parse_table("# ranks: 8", "table.csv").reason
    "no header 'profile', no header 'collective', no column 'size_B', no column 'time_us'"

    Raises `TableError` for a collective that is none of `COLLECTIVES`, for ranks, sizes or times that are not positive
    numbers, for a row with too few or too many cells, and for a header or column that is there twice. Rows that are
    broken are only a reason where a header is missing: such a file may hold something else.
    """
    headers: dict[str, str] = {}
    places: dict[str, Place] = {}
    lines: list[tuple[Place, list[str]]] = []
    for number, line in enumerate(text.splitlines(), 1):
        place = Place(name, number)
        if line.lstrip().startswith("#"):
            _add_header(headers, places, place, line.strip())
        elif line.strip():
            lines.append((place, _cells(line, place)))
    collective, ranks = _collective(headers, places), _ranks(headers, places)
    first = headers.get(_FIRST)
    from_size_bytes = places[_FIRST].size_bytes(first) if first else 1
    missing = [f"no header {key!r}" for key in _NEEDED if not headers.get(key)]
    try:
        columns, rows, others = _read_rows(lines)
    except TableError as error:
        if not missing:
            raise
        columns, rows, others = list(_COLUMNS), (), {}
        missing.append(str(error))
    missing += [f"no column {column!r}" for column in _COLUMNS if column not in columns] or ["no rows"] * (not rows)
    return MeasuredTable(
        name,
        headers.get("profile") or None,
        collective,
        ranks,
        headers.get("source") or None,
        headers,
        rows,
        ", ".join(missing),
        others=others,
        from_size_bytes=from_size_bytes,
    )


def _add_header(headers: dict[str, str], places: dict[str, Place], place: Place, line: str) -> None:
    """Keep a line ``# key: value``; other comments say nothing to a program, and a note may have several lines."""
    match = _HEADER.fullmatch(line)
    if match is None:
        return
    key, value = match[1].lower(), match[2] or ""
    if key in headers and key in (*_NEEDED, "source", _FIRST):
        raise place.error(f"header {key!r} is there twice", f"one, in line {places[key].line}")
    headers[key] = f"{headers[key]}\n{value}" if key in headers else value
    places[key] = place


def _cells(line: str, place: Place) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([line]))]
    except csv.Error as error:
        raise place.error(str(error), "cells with commas between them") from error


def _collective(headers: Mapping[str, str], places: Mapping[str, Place]) -> Collective | None:
    text = headers.get("collective")
    if not text:
        return None
    for collective in COLLECTIVES:
        if collective == text:
            return collective
    raise places["collective"].error(f"collective {shown(text)}", f"one of {', '.join(COLLECTIVES)}")


def _ranks(headers: Mapping[str, str], places: Mapping[str, Place]) -> int | None:
    return places["ranks"].count(headers["ranks"], "ranks") if headers.get("ranks") else None


def _read_rows(
    lines: Sequence[tuple[Place, list[str]]],
) -> tuple[list[str], tuple[Row, ...], dict[str, tuple[str, ...]]]:
    """The names of the columns, the rows if both columns that make them are there, and the other columns."""
    if not lines:
        return [], (), {}
    (place, columns), *body = lines
    if len(set(columns)) < len(columns):
        raise place.error("a column is there twice", "each once")
    if not set(_COLUMNS) <= set(columns):
        return columns, (), {}
    for place, cells in body:
        if len(cells) != len(columns):
            raise place.error(f"{len(cells)} cells", f"{len(columns)}, one per column")
    cells_of = dict(zip(columns, zip(*(cells for _, cells in body), strict=True), strict=True)) if body else {}
    size, time = (columns.index(column) for column in _COLUMNS)
    rows = tuple(Row(place.size_bytes(cells[size]), place.time_s(cells[time])) for place, cells in body)
    return columns, rows, {column: cells for column, cells in cells_of.items() if column not in _COLUMNS}
