"""A published number beside a prediction, both as intervals, and records of published tables."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from experiments.common import Record, markdown_table
from tasp_lab.errors import TableError

RECORDS = Path(__file__).parents[1] / "published" / "linear"


@dataclass(frozen=True)
class Interval:
    """All numbers from `low` to `high`, which a published or an assumed quantity may have.

    >>> (Interval.of(3, 1) - Interval.of(1)) / Interval.of(2)
    Interval(low=0.0, high=1.0)
    """

    low: float
    high: float

    @classmethod
    def of(cls, *values: float) -> Self:
        """The least interval around these values."""
        return cls(min(values), max(values))

    def __sub__(self, other: Interval) -> Interval:
        return Interval(self.low - other.high, self.high - other.low)

    def __truediv__(self, other: Interval) -> Interval:
        """The quotients by positive numbers."""
        return Interval.of(*(a / b for a in (self.low, self.high) for b in (other.low, other.high)))

    def scaled(self, factor: float) -> Interval:
        """All numbers times a positive factor."""
        return Interval(self.low * factor, self.high * factor)

    def text(self, form: str = ".3g") -> str:
        """The number, or both ends.

        >>> Interval.of(1, 2).text(), Interval.of(-0.5).text("+.0%")
        ('1 to 2', '-50%')
        """
        low, high = format(self.low, form), format(self.high, form)
        return low if low == high else f"{low} to {high}"


@dataclass(frozen=True)
class Row:
    """A published quantity in milliseconds beside its prediction.

    Parameters
    ----------
    what : the quantity.
    published, predicted : in ms.
    communication : the part of the published quantity that communication is predicted, or was published, to take.
    verdict : one sentence.
    """

    what: str
    published: Interval
    predicted: Interval
    communication: Interval
    verdict: str

    @property
    def error(self) -> Interval:
        """The predicted over the published quantity, less one."""
        ratio = self.predicted / self.published
        return Interval(ratio.low - 1, ratio.high - 1)

    @property
    def overhead(self) -> Interval:
        """What is no communication; below zero where more communication is predicted than was published."""
        return self.published - self.communication

    def record(self) -> Record:
        """The row for JSON: pairs of numbers in ms, the error as shares."""
        parts = {"published_ms": self.published, "predicted_ms": self.predicted, "error": self.error,
                 "communication_ms": self.communication, "overhead_ms": self.overhead}  # fmt: skip
        return {"what": self.what} | {k: [v.low, v.high] for k, v in parts.items()} | {"verdict": self.verdict}


@dataclass(frozen=True)
class Check:
    """A published claim, the numbers that it is held against, and a verdict of one sentence."""

    claim: str
    found: str
    verdict: str

    def record(self) -> Record:
        """The check for JSON."""
        return dict(vars(self))


def rows_text(rows: Iterable[Row]) -> str:
    """A table of rows in Markdown."""
    columns = ("what", "published ms", "predicted ms", "error", "communication ms", "overhead ms", "verdict")
    return markdown_table(columns, [
        [each.what, each.published.text(), each.predicted.text(), each.error.text("+.0%"), each.communication.text(),
         each.overhead.text(), each.verdict]
        for each in rows
    ])  # fmt: skip


def checks_text(checks: Iterable[Check]) -> str:
    """A list of checks in Markdown."""
    return "\n".join(f"- *{each.claim}* {each.found} **{each.verdict}**" for each in checks)


def read_record(name: str) -> list[dict[str, float | None]]:
    """The rows of a record by column, None where nothing was published.

    Raises `TableError` for rows of another length than the header, and for what is no number.
    """
    path = RECORDS / f"{name}.csv"
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    header, *rows = csv.reader(lines)
    for row in rows:
        if len(row) != len(header):
            raise TableError(f"{path}: {','.join(row)}: {len(row)} fields, expected {len(header)}")
    return [{name: _number(path, cell) for name, cell in zip(header, row, strict=True)} for row in rows]


def _number(path: Path, cell: str) -> float | None:
    try:
        return float(cell) if cell else None
    except ValueError:
        raise TableError(f"{path}: {cell!r}, expected a number or nothing") from None
