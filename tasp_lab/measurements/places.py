"""Where something stands in a file, and the numbers that can stand there; what is wrong is refused with that place."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from tasp_lab.errors import QuantityError, TableError
from tasp_lab.quantities import parse_size_bytes

_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
"""A terminal escape sequence: colours of a launcher that a log has kept."""

_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_DECIMAL_COMMA = re.compile(r"[+-]?[0-9]+,[0-9]+")


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a file, counted from 1."""

    file: str
    line: int

    def error(self, found: str, expected: str) -> TableError:
        """What to raise here.

        >>> str(Place("log", 3).error("2 columns", "4"))
        'log, line 3: 2 columns, expected 4'
        """
        return TableError(f"{self}: {found}, expected {expected}")

    def number(self, text: str, what: str) -> float:
        """Any finite number, written with a point."""
        if _DECIMAL_COMMA.fullmatch(text):
            raise self.error(f"{what} {shown(text)} has a comma", "a decimal point (LC_ALL=C prints one)")
        value = float(text) if _NUMBER.fullmatch(text) else math.nan
        if not math.isfinite(value):
            raise self.error(f"{what} {shown(text)}", "a number")
        return value

    def positive(self, text: str, what: str) -> float:
        """A number above 0. A time of 0 is one that the tool rounded away."""
        value = self.number(text, what)
        if value <= 0:
            raise self.error(f"{what} {shown(text)}", "more than 0")
        return value

    def time_s(self, text: str) -> float:
        """A time in microseconds, as seconds."""
        return self.positive(text, "time") / 1e6

    def size_bytes(self, text: str) -> int:
        """A size: a number of bytes, or one with a unit that says whether it counts in 1000 or in 1024.

        >>> Place("log", 3).size_bytes("64KiB"), Place("log", 3).size_bytes("64KB")
        (65536, 64000)
        """
        try:
            return parse_size_bytes(text)
        except QuantityError as error:
            raise self.error(f"size {shown(text)}", "a whole number of bytes above 0, or like 64KiB or 64KB") from error

    def count(self, text: str, what: str) -> int:
        """A positive whole number."""
        if not re.fullmatch(r"[0-9]{1,12}", text) or int(text) < 1:
            raise self.error(f"{what} {shown(text)}", "a whole number, 1 or more")
        return int(text)

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}"


def shown(text: str) -> str:
    """A piece of a file in a message: quoted, on one line, and not too long."""
    return ascii(text if len(text) <= 40 else text[:37] + "...")


def read_text(path: Path) -> str:
    """The text of a file, without terminal colours; bytes that are no UTF-8 are kept as signs that match nothing.

    Raises `TableError` if it cannot be read.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig", errors="replace")
    except (OSError, ValueError) as error:
        raise TableError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    return _ESCAPE.sub("", text)
