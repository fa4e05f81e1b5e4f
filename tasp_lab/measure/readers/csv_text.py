"""A CSV file of measurements as text: headers ``# key: value``, column names and rows of cells, with positions."""

from __future__ import annotations

import csv
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from tasp_lab.measure.readers.file_position import FilePosition

_HEADER = re.compile(r"#\s*([A-Za-z_][\w -]*?)\s*:(?:\s+(.*?))?\s*")


@dataclass(frozen=True)
class CsvText:
    """The content of a file.

    `headers` are those with a value, by lower-case name; `places` are their lines. `lines` are the others, the
    first one with the column names.
    """

    name: str
    headers: Mapping[str, str]
    places: Mapping[str, FilePosition]
    lines: tuple[tuple[FilePosition, list[str]], ...]

    @property
    def columns(self) -> list[str]:
        """The column names; none of a file without a line."""
        return self.lines[0][1] if self.lines else []

    def check_columns(self) -> None:
        """Raise `TableError` for a column that is there twice."""
        if len(set(self.columns)) < len(self.columns):
            raise self.lines[0][0].error("duplicate column", "each once")

    def rows(self) -> Iterator[tuple[FilePosition, dict[str, str]]]:
        """The rows by column. Raises `TableError` for too few or too many cells."""
        columns = self.columns
        for place, cells in self.lines[1:]:
            if len(cells) != len(columns):
                raise place.error(f"{len(cells)} cells", f"{len(columns)}, one per column")
            yield place, dict(zip(columns, cells, strict=True))


def parse_csv(text: str, name: str, unique: Collection[str]) -> CsvText:
    """The content of a CSV file; a header repeated is joined by line breaks, unless it must be `unique`.

    >>> found = parse_csv("# source: a page\\nsize_B,time_us\\n1024,5\\n", "t.csv", ())
    >>> found.headers, [cells for _, cells in found.rows()]
    ({'source': 'a page'}, [{'size_B': '1024', 'time_us': '5'}])

    Raises `TableError` for a unique header that is there twice, and for malformed cells.
    """
    headers: dict[str, str] = {}
    places: dict[str, FilePosition] = {}
    lines: list[tuple[FilePosition, list[str]]] = []
    for number, line in enumerate(text.splitlines(), 1):
        place = FilePosition(name, number)
        if line.lstrip().startswith("#"):
            _add_header(headers, places, place, line.strip(), unique)
        elif line.strip():
            lines.append((place, _cells(line, place)))
    return CsvText(name, headers, places, tuple(lines))


def _add_header(
    headers: dict[str, str], places: dict[str, FilePosition], place: FilePosition, line: str, unique: Collection[str]
) -> None:
    """Store a line ``# key: value``; other comments are ignored."""
    match = _HEADER.fullmatch(line)
    if match is None:
        return
    key, value = match[1].lower(), match[2] or ""
    if key in headers and key in unique:
        raise place.error(f"duplicate header {key!r}", f"only that in line {places[key].line}")
    headers[key] = f"{headers[key]}\n{value}" if key in headers else value
    places[key] = place


def _cells(line: str, place: FilePosition) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([line]))]
    except csv.Error as error:
        raise place.error(str(error), "comma-separated cells") from error
