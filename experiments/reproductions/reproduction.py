"""A published result: the question, its figures beside their predictions, and what was tried where they differ."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from experiments.common import Record
from tasp_lab import Workload, predict
from tasp_lab.core.choices import Pass
from tasp_lab.machines.machine import Machine
from tasp_lab.measure.readers.file_position import parse_csv, read_text
from tasp_lab.prediction.answer import Answer
from tasp_lab.prediction.interval import Interval
from tasp_lab.prediction.residuals import Residual, residual_of
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.registry import options_for

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
    left_out : why no model can meet the published number, which then counts in no score; empty where it counts.
    """

    what: str
    unit: str
    published: float
    predicted: float
    low: float
    high: float
    reason: str = NOT_EXPLAINED
    left_out: str = ""

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
        """Inside the interval, or outside with the reason, or why it does not count."""
        if self.left_out:
            return f"left out of scores: {self.left_out}"
        return "inside" if self.inside else f"outside: {self.reason}"

    def record(self) -> Record:
        """The figure for JSON."""
        text = {name: value for name, value in vars(self).items() if name != "left_out" or value}
        return {**text, "reason": None if self.inside else self.reason, "inside": self.inside}


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
    left_out : figures that no model can meet, by what their names begin with, each with the arithmetic that shows it.
    """

    name: str
    find: Callable[[], Found]
    title: str
    question: str
    source: str
    setting: str
    headline: str
    verdict: str
    left_out: Mapping[str, str] = field(default_factory=dict)

    def found(self) -> Found:
        """What `find` finds, with the figures of `left_out` marked; `ValueError` for an entry that names none."""
        result = self.find()
        for start in self.left_out:
            if not any(figure.what.startswith(start) for figure in result.figures):
                raise ValueError(f"{self.name}: left_out names no figure: {start!r}")
        return replace(result, figures=tuple(map(self._marked, result.figures)))

    def _marked(self, figure: Figure) -> Figure:
        why = [text for start, text in self.left_out.items() if figure.what.startswith(start)]
        return replace(figure, left_out=why[0]) if why else figure


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows of a record by column; lines with ``#`` are its headers. Raises `TableError` as `parse_csv` does."""
    return [cells for _, cells in parse_csv(read_text(path), str(path)).rows()]


def numbers_of(path: Path) -> list[dict[str, float | None]]:
    """The numbers of a record by column, None where nothing was published. Raises `TableError` for other texts."""
    return [
        {name: place.number(cell, name) if cell else None for name, cell in row.items()}
        for place, row in parse_csv(read_text(path), str(path)).rows()
    ]


def scored(figures: Iterable[Figure]) -> list[Figure]:
    """The figures that count in scores."""
    return [figure for figure in figures if not figure.left_out]


def inside_of(figures: Sequence[Figure]) -> int:
    """How many figures are inside their intervals."""
    return sum(figure.inside for figure in figures)


def median_error(figures: Sequence[Figure]) -> float:
    """The median of their absolute errors."""
    return statistics.median(abs(figure.error) for figure in figures)


# Published and assumed quantities as ranges, with what communication can be of them.


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


def figure_of(
    what: str, unit: str, published: float, possible: Range, residual: Residual, reason: str = NOT_EXPLAINED
) -> Figure:
    """A figure whose prediction is any of a range, beside the residual of its regime."""
    low, high = (Interval(1.0, np.zeros(0), residual).quantile_s(share) for share in (0.05, 0.95))
    ends = min(low, 1.0) * possible.low, max(high, 1.0) * possible.high
    return Figure(what, unit, published, possible.middle, *ends, reason)


# Predictions of layers as published code runs them.


def predicted(
    machine: str | Machine, schedule: str, layer: Workload, passes: Pass = "forward", **changes: Any
) -> Answer:
    """The prediction of a schedule that sends all blocks, as published code does; `changes` go to `predict`."""
    options = options_for(schedule, AttentionOptions(passes, trim=False))
    found = predict(machine, schedule, layer, events=False, options=options, **changes)[-1]
    assert isinstance(found, Answer), "only layers are predicted"
    return found


def interval_of(prediction: Answer) -> Interval:
    """The interval of a prediction."""
    assert prediction.interval is not None, "intervals were asked for"
    return prediction.interval


def without(source: str, interval: Interval) -> Interval:
    """The interval with the residual of all sources but one."""
    return replace(interval, residual=residual_of(interval.residual.asked, source))
