"""A measured table: the times of one collective at several sizes, on one machine and number of ranks.

A table is stored as a CSV file with headers::

    # profile: h100-8
    # collective: all_gather
    # ranks: 8
    # source: own measurement, NCCL 2.26.2, 2026-01-15
    size_B,time_us
    33554432,123.38

``profile`` names a machine of the catalogue, or a profile file beside the table (`MeasuredTable.machine`); other
headers are kept as text, other columns left out. A file has several tables if some of `KEYS` are columns instead of
headers: one for each combination of their cells. ``size_B`` is the size column of nccl-tests, in bytes: the output of a
rank for all_gather, its input for reduce_scatter, its send buffer for alltoall (its own part included), and one message
for sendrecv and all_reduce (NVIDIA/nccl-tests, doc/PERFORMANCE.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Self, get_args

from tasp_lab.core.errors import TableError
from tasp_lab.measure.readers.file_position import CsvText, FilePosition, Measured, parse_csv, quoted, read_text
from tasp_lab.schedules.collectives.kinds import NcclTestsName

COLLECTIVES: tuple[NcclTestsName, ...] = get_args(NcclTestsName)

_REQUIRED = ("profile", "collective", "ranks")
KEYS = ("system", "folder", "profile", "library", "collective", "ranks")
"""Headers that a file with several tables has as columns: the measured system, the folder of its source, the machine,
the library with its version, and what was measured."""

_COLUMNS = ("size_B", "time_us")
_FROM_SIZE = "from_size_b"
_UNIQUE = (*_REQUIRED, "source", _FROM_SIZE)


class Row(NamedTuple):
    """One measurement: the size as defined by nccl-tests, and the time of one call."""

    size_bytes: int
    time_s: float


@dataclass(frozen=True)
class MeasuredTable(Measured):
    """One collective on one machine at several sizes.

    Rows below `from_size_bytes` are shown but not evaluated.

    `reason` is why the table cannot be compared with a prediction, empty if it can. `warnings` list skipped content.
    """

    collective: NcclTestsName | None
    ranks: int | None
    rows: tuple[Row, ...]
    reason: str = ""
    warnings: tuple[str, ...] = ()
    from_size_bytes: int = 1

    @property
    def machine(self) -> str | None:
        """The machine by which `tasp_lab.machines.profile.member` finds the profile of the table.

        A profile of one's own, such as ``my.toml:2x8``, is looked for in the folder of the table, then in the working
        directory.
        """
        return self.profile and profile_beside(self.profile, Path(self.name).parent)

    def on(self, profile: str) -> Self:
        """The table as one of a machine, by name."""
        return replace(super().on(profile), reason=", ".join(self.reasons))

    @property
    def reasons(self) -> list[str]:
        """The reasons but that its machine is missing, which `on` names."""
        return [each for each in self.reason.split(", ") if each not in ("", "no header 'profile'")]

    @property
    def size(self) -> str:
        """The size of a machine with its ranks, like ``2x8``: of a log by its nodes, else all ranks on one node."""
        if "ranks_per_node" in self.headers and self.headers["nodes"] != "1":
            return f"{self.headers['nodes']}x{self.headers['ranks_per_node']}"
        return str(self.ranks)


def profile_beside(profile: str, folder: Path) -> str:
    """A profile by the path of its file in `folder`, if it is one such as ``my.toml:2x8``; else as it is."""
    path, ending, size = profile.rpartition(".toml")
    beside = folder / f"{path}{ending}"
    return f"{beside}{size}" if ending and beside.is_file() else profile


def read_table(path: Path) -> MeasuredTable:
    """The table in a CSV file. Raises `TableError` as `parse_table` does, and for a file that cannot be read."""
    return parse_table(read_text(path), str(path))


def collective_tables(content: CsvText) -> tuple[MeasuredTable, ...]:
    """The tables in a CSV file: one, or several if some of `KEYS` are columns.

    >>> text = "# profile: h100-8\\n# ranks: 8\\ncollective,size_B,time_us\\nall_gather,1024,10\\nalltoall,1024,8\\n"
    >>> [(table.name, table.collective) for table in collective_tables(parse_csv(text, "t.csv"))]
    [('t.csv, all_gather', 'all_gather'), ('t.csv, alltoall', 'alltoall')]

    Raises `TableError` as `parse_table` does.
    """
    content.check(_UNIQUE)
    keys = [column for column in KEYS if column in content.columns]
    if not keys:
        return (_table(content),)
    for key in keys:
        if key in content.headers:
            raise content.places[key][0].error(f"{key!r} is a header and a column", "one of them")
    groups: dict[tuple[str, ...], list[tuple[FilePosition, list[str]]]] = {}
    columns = [column for column in content.columns if column not in keys]
    for place, row in content.rows():
        groups.setdefault(tuple(row[key] for key in keys), []).append((place, [row[column] for column in columns]))
    tables = []
    for values, lines in groups.items():
        name = f"{content.name}, {' '.join(dict.fromkeys(filter(None, values)))}"
        headers = {**content.headers, **dict(zip(keys, values, strict=True))}
        places = {**content.places, **dict.fromkeys(keys, lines[0][:1])}
        tables.append(_table(CsvText(name, headers, places, ((content.lines[0][0], columns), *lines))))
    return tuple(tables)


def parse_table(text: str, name: str) -> MeasuredTable:
    """The table in the text of a CSV file.

    >>> table = parse_table('''# profile: h100-8
    ... # collective: all_gather
    ... # ranks: 8
    ... size_B,time_us,note
    ... 33554432,125,warm
    ... ''', "table.csv")
    >>> table.collective, table.ranks, table.rows
    ('all_gather', 8, (Row(size_bytes=33554432, time_s=0.000125),))
    >>> parse_table("# ranks: 8", "table.csv").reason
    "no header 'profile', no header 'collective', no column 'size_B', no column 'time_us'"

    Raises `TableError` for a collective not in `COLLECTIVES`, for ranks, sizes or times that are not positive numbers,
    for a row with too few or too many cells, and for a duplicate header or column. If a required header is missing, the
    file may not be a table, and malformed rows only extend the reason.
    """
    (table,) = collective_tables(parse_csv(text, name))
    return table


def _table(content: CsvText) -> MeasuredTable:
    headers, places = content.headers, content.places
    stated, first = headers.get("collective"), headers.get(_FROM_SIZE)
    collective = next((each for each in COLLECTIVES if each == stated), None)
    if stated and collective is None:
        raise places["collective"][0].error(f"collective {quoted(stated)}", f"one of {', '.join(COLLECTIVES)}")
    ranks = content.count("ranks")
    from_size_bytes = places[_FROM_SIZE][0].size_bytes(first) if first else 1
    missing = [f"no header {key!r}" for key in _REQUIRED if not headers.get(key)]
    absent = [f"no column {column!r}" for column in _COLUMNS if column not in content.columns]
    rows: tuple[Row, ...] = ()
    try:
        if not absent:
            rows = tuple(Row(at.size_bytes(row["size_B"]), at.time_s(row["time_us"])) for at, row in content.rows())
    except TableError as error:
        if not missing:
            raise
        missing.append(str(error))
    reason = ", ".join([*missing, *(absent or ["no rows"] * (not rows))])
    return MeasuredTable(content.name, headers, collective, ranks, rows, reason, from_size_bytes=from_size_bytes)
