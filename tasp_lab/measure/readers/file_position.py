"""A position in a text file, with parsers whose errors name it; CSV files and tables of measurements.

A CSV file has headers ``# key: value``, column names and rows of cells.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from tasp_lab.core.errors import QuantityError, TableError
from tasp_lab.core.units import parse_size_bytes

_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
"""A terminal escape sequence, e.g. the colours of a launcher in a log."""

_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_DECIMAL_COMMA = re.compile(r"[+-]?[0-9]+,[0-9]+")


@dataclass(frozen=True, slots=True)
class FilePosition:
    """A line of a file, counted from 1."""

    file: str
    line: int

    def error(self, found: str, expected: str) -> TableError:
        """The error to raise for this line.

        >>> str(FilePosition("log", 3).error("2 columns", "4"))
        'log, line 3: 2 columns, expected 4'
        """
        return TableError(f"{self}: {found}, expected {expected}")

    def number(self, text: str, what: str) -> float:
        """A finite number with a decimal point."""
        if _DECIMAL_COMMA.fullmatch(text):
            raise self.error(f"{what} {quoted(text)} has a comma", "a decimal point (LC_ALL=C prints one)")
        value = float(text) if _NUMBER.fullmatch(text) else math.nan
        if not math.isfinite(value):
            raise self.error(f"{what} {quoted(text)}", "a number")
        return value

    def positive(self, text: str, what: str) -> float:
        """A positive number. Tools print a time of 0 if they round it down."""
        value = self.number(text, what)
        if value <= 0:
            raise self.error(f"{what} {quoted(text)}", "more than 0")
        return value

    def quantity(self, text: str | None, what: str, unit: float) -> float | None:
        """A number from 0 on, in SI units; None of an empty cell."""
        if not text:
            return None
        if (value := self.number(text, what)) < 0:
            raise self.error(f"{what} {quoted(text)}", "0 or more")
        return value * unit

    def time_s(self, text: str) -> float:
        """A time in microseconds, as seconds."""
        return self.positive(text, "time") / 1e6

    def size_bytes(self, text: str) -> int:
        """A size in bytes, or with a decimal or binary unit.

        >>> FilePosition("log", 3).size_bytes("64KiB"), FilePosition("log", 3).size_bytes("64KB")
        (65536, 64000)
        """
        try:
            return parse_size_bytes(text)
        except QuantityError as error:
            raise self.error(
                f"size {quoted(text)}", "a whole number of bytes above 0, or like 64KiB or 64KB"
            ) from error

    def count(self, text: str, what: str) -> int:
        """A positive whole number."""
        if not re.fullmatch(r"[0-9]{1,12}", text) or int(text) < 1:
            raise self.error(f"{what} {quoted(text)}", "a whole number, 1 or more")
        return int(text)

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}"


def quoted(text: str) -> str:
    """Text for an error message: quoted, on one line, and truncated."""
    # ascii, since a cell of a file that is no table may have control characters
    return ascii(text if len(text) <= 40 else text[:37] + "...")


def read_text(path: Path, *, must_be_text: bool = False) -> str:
    """The text of a file without terminal colours; invalid UTF-8 becomes replacement characters.

    Raises `TableError` if it cannot be read and, if it `must_be_text`, if it is empty or is none.
    """
    try:
        text = _ESCAPE.sub("", path.read_bytes().decode("utf-8-sig", errors="replace"))
    except (OSError, ValueError) as error:
        raise TableError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if must_be_text and (not text.strip() or "\0" in text):
        what = "is no text" if text.strip() else "is empty"
        raise TableError(f"{path}: {what}, expected a table of measurements")
    return text


_HEADER = re.compile(r"#\s*([A-Za-z_][\w -]*?)\s*:(?:\s+(.*?))?\s*")


@dataclass(frozen=True)
class CsvText:
    """The content of a file.

    `headers` are by lower-case name, those that are repeated joined by line breaks; `places` are all their lines.
    `lines` are the others, the first one with the column names.
    """

    name: str
    headers: Mapping[str, str]
    places: Mapping[str, Sequence[FilePosition]]
    lines: tuple[tuple[FilePosition, list[str]], ...]

    @property
    def columns(self) -> list[str]:
        """The column names; none of a file without a line."""
        return self.lines[0][1] if self.lines else []

    def check(self, unique: Iterable[str] = ()) -> None:
        """Raise `TableError` for a column that is there twice, and for a header that must be `unique`."""
        for key in unique:
            if len(places := self.places.get(key, ())) > 1:
                raise places[1].error(f"duplicate header {key!r}", f"only that in line {places[0].line}")
        if len(set(self.columns)) < len(self.columns):
            raise self.lines[0][0].error("duplicate column", "each once")

    def count(self, header: str) -> int | None:
        """The positive whole number in a header; None if it is missing or empty."""
        text = self.headers.get(header)
        return self.places[header][0].count(text, header) if text else None

    def rows(self) -> Iterator[tuple[FilePosition, dict[str, str]]]:
        """The rows by column. Raises `TableError` for too few or too many cells."""
        columns = self.columns
        for place, cells in self.lines[1:]:
            if len(cells) != len(columns):
                raise place.error(f"{len(cells)} cells", f"{len(columns)}, one per column")
            yield place, dict(zip(columns, cells, strict=True))


@dataclass(frozen=True)
class Measured:
    """A table of measurements: its file, and the run if a file has several; and the headers of the file, those that are
    repeated joined by line breaks."""

    name: str
    headers: Mapping[str, str]

    @property
    def profile(self) -> str | None:
        """The machine that the table names."""
        return self.headers.get("profile") or None

    def on(self, profile: str) -> Self:
        """The table as one of a machine, by name."""
        return replace(self, headers={**self.headers, "profile": profile})


def parse_csv(text: str, name: str) -> CsvText:
    """The content of a CSV file.

    >>> found = parse_csv("# source: a page\\nsize_B,time_us\\n1024,5\\n", "t.csv")
    >>> found.headers, [cells for _, cells in found.rows()]
    ({'source': 'a page'}, [{'size_B': '1024', 'time_us': '5'}])

    Raises `TableError` for malformed cells.
    """
    headers: dict[str, list[str]] = {}
    places: dict[str, list[FilePosition]] = {}
    lines: list[tuple[FilePosition, list[str]]] = []
    for number, line in enumerate(text.splitlines(), 1):
        place = FilePosition(name, number)
        if line.lstrip().startswith("#"):
            if header := _HEADER.fullmatch(line.strip()):  # other comments are ignored
                headers.setdefault(header[1].lower(), []).append(header[2] or "")
                places.setdefault(header[1].lower(), []).append(place)
        elif line.strip():
            try:
                # line by line, so that a quote that is not closed costs one line, and errors have its number
                lines.append((place, [cell.strip() for cell in next(csv.reader([line]))]))
            except csv.Error as error:
                raise place.error(str(error), "comma-separated cells") from error
    return CsvText(name, {key: "\n".join(texts) for key, texts in headers.items()}, places, tuple(lines))
