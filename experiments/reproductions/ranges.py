"""Published and assumed quantities as ranges, with what communication can be of them, and records of tables."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from experiments.common import Record
from experiments.reproductions.reproduction import NOT_EXPLAINED, Figure, rows_of
from tasp_lab.core.errors import TableError
from tasp_lab.prediction.interval import Interval
from tasp_lab.prediction.residuals import Residual


@dataclass(frozen=True)
class Range:
    """All numbers from `low` to `high`, which a published or an assumed quantity may have.

    >>> (Range.of(3, 1) - Range.of(1)) / Range.of(2)
    Range(low=0.0, high=1.0)
    """

    low: float
    high: float

    @classmethod
    def of(cls, *values: float) -> Self:
        """The least interval around these values."""
        return cls(min(values), max(values))

    def __sub__(self, other: Range) -> Range:
        return Range(self.low - other.high, self.high - other.low)

    def __truediv__(self, other: Range) -> Range:
        """The quotients by positive numbers."""
        return Range.of(*(a / b for a in (self.low, self.high) for b in (other.low, other.high)))

    def scaled(self, factor: float) -> Range:
        """All numbers times a positive factor."""
        return Range(self.low * factor, self.high * factor)

    @property
    def middle(self) -> float:
        """The geometric mean of both ends, which are positive."""
        return math.sqrt(self.low * self.high)

    def text(self, form: str = ".3g") -> str:
        """The number, or both ends.

        >>> Range.of(1, 2).text(), Range.of(-0.5).text("+.0%")
        ('1 to 2', '-50%')
        """
        low, high = format(self.low, form), format(self.high, form)
        return low if low == high else f"{low} to {high}"


@dataclass(frozen=True)
class Check:
    """A published claim, the numbers that it is held against, and a verdict of one sentence."""

    claim: str
    found: str
    verdict: str

    def record(self) -> Record:
        """The check for JSON."""
        return dict(vars(self))


def figure_of(
    what: str, unit: str, published: float, possible: Range, residual: Residual, reason: str = NOT_EXPLAINED
) -> Figure:
    """A figure whose prediction is any of a range, beside the residual of its regime."""
    low, high = (Interval(1.0, np.zeros(0), residual).quantile_s(share) for share in (0.05, 0.95))
    ends = min(low, 1.0) * possible.low, max(high, 1.0) * possible.high
    return Figure(what, unit, published, possible.middle, *ends, reason)


def checks_text(checks: Iterable[Check]) -> str:
    """A list of checks in Markdown."""
    return "\n".join(f"- *{each.claim}* {each.found} **{each.verdict}**" for each in checks)


def read_record(path: Path) -> list[dict[str, float | None]]:
    """The rows of a record by column, None where nothing was published.

    Raises `TableError` as `rows_of` does, and for what is no number.
    """
    return [{name: _number(path, cell) for name, cell in row.items()} for row in rows_of(path)]


def _number(path: Path, cell: str) -> float | None:
    try:
        return float(cell) if cell else None
    except ValueError:
        raise TableError(f"{path}: {cell!r}, expected a number or nothing") from None
