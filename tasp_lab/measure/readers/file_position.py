"""A position in a text file, with parsers whose errors name it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

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
    return ascii(text if len(text) <= 40 else text[:37] + "...")


def read_text(path: Path) -> str:
    """The text of a file without terminal colours; invalid UTF-8 becomes replacement characters.

    Raises `TableError` if it cannot be read.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig", errors="replace")
    except (OSError, ValueError) as error:
        raise TableError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    return _ESCAPE.sub("", text)


def check_is_text(path: Path) -> None:
    """Raise `TableError` for a file that cannot be read, is empty or is no text."""
    text = read_text(path)
    if not text.strip():
        raise TableError(f"{path}: is empty, expected a table of measurements")
    if "\0" in text:
        raise TableError(f"{path}: is no text, expected a table of measurements")
