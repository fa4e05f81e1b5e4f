"""A published result: the question, its figures beside their predictions, and what was tried where they differ."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from experiments.common import Record
from tasp_lab.core.errors import TableError
from tasp_lab.prediction.interval import Interval

NOT_EXPLAINED = "not explained"


@dataclass(frozen=True)
class Figure:
    """A published number beside its prediction.

    Parameters
    ----------
    what, unit : the quantity.
    published, predicted : in that unit.
    low, high : the 5 and 95 % points of the prediction.
    reason : why it differs; shown where the published number is outside.
    """

    what: str
    unit: str
    published: float
    predicted: float
    low: float
    high: float
    reason: str = NOT_EXPLAINED

    @classmethod
    def of(cls, what: str, published_ms: float, interval: Interval, reason: str = NOT_EXPLAINED) -> Figure:
        """The figure of a time in milliseconds."""
        predicted, low, high = (1e3 * time_s for time_s in (interval.time_s, interval.low_s, interval.high_s))
        return cls(what, "ms", published_ms, predicted, low, high, reason)

    @property
    def inside(self) -> bool:
        """Whether the interval holds the published number."""
        return self.low <= self.published <= self.high

    @property
    def error(self) -> float:
        """The predicted over the published number, less one."""
        return self.predicted / self.published - 1

    @property
    def predicted_text(self) -> str:
        """The prediction with its interval."""
        return f"{self.predicted:.3g} ({self.low:.3g} to {self.high:.3g})"

    @property
    def published_text(self) -> str:
        """The published number with its unit."""
        return f"{self.published:.3g} {self.unit}".strip()

    @property
    def verdict(self) -> str:
        """Inside the interval, or outside with the reason."""
        return "inside" if self.inside else f"outside: {self.reason}"

    def record(self) -> Record:
        """The figure for JSON."""
        return {**vars(self), "reason": None if self.inside else self.reason, "inside": self.inside}


@dataclass(frozen=True)
class Trial:
    """One thing changed, which checks a reason: the same figures as predicted, and with the change."""

    change: str
    before: tuple[Figure, ...]
    after: tuple[Figure, ...]
    found: str = ""

    def record(self) -> Record:
        """The trial for JSON, without its figures."""
        return {"change": self.change, "figures": len(self.before), "found": self.found} | {
            f"{name}_{when}": value(figures)
            for when, figures in (("before", self.before), ("after", self.after))
            for name, value in (("inside", inside_of), ("median_error", median_error))
        }


@dataclass(frozen=True)
class Found:
    """What a reproduction found: figures, trials, and further tables as sections in Markdown."""

    figures: tuple[Figure, ...]
    trials: tuple[Trial, ...] = ()
    sections: tuple[str, ...] = ()
    record: Record = field(default_factory=dict)


@dataclass(frozen=True)
class Reproduction:
    """A published result that is predicted; all but `name` and `find` are in the file ``published.toml`` of its folder.

    Parameters
    ----------
    name, title : of the folder, and of the page.
    question : what is asked, one sentence.
    source : where the figures are from.
    setting : the machine, the layer, and how the published code is run.
    headline : the figure that stands for the result in the index.
    verdict : what explains the differences, one sentence.
    find : predicts everything.
    """

    name: str
    find: Callable[[], Found]
    title: str
    question: str
    source: str
    setting: str
    headline: str
    verdict: str


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows of a record by column; lines with ``#`` are its headers.

    Raises `TableError` for rows of another length than the header.
    """
    header, *rows = csv.reader(line for line in path.read_text().splitlines() if not line.startswith("#"))
    for row in rows:
        if len(row) != len(header):
            raise TableError(f"{path}: {','.join(row)}: {len(row)} fields, expected {len(header)}")
    return [dict(zip(header, row, strict=True)) for row in rows]


def inside_of(figures: Sequence[Figure]) -> int:
    """How many figures are inside their intervals."""
    return sum(figure.inside for figure in figures)


def median_error(figures: Sequence[Figure]) -> float:
    """The median of their absolute errors."""
    return statistics.median(abs(figure.error) for figure in figures)
