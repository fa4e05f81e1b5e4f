"""What a study's sensitivity prints: the constants that move an answer, the largest effect first."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import shorten

from tasp_lab.core.report import Report
from tasp_lab.core.tables import Part, Table
from tasp_lab.core.units import format_time
from tasp_lab.study.find.effects import Effect, Outcome, SobolIndex
from tasp_lab.study.find.factors import Factor
from tasp_lab.study.find.sensitivity_question import SensitivityQuestion
from tasp_lab.study.point import Point

MAX_SOURCE = 80
"""Characters of a source in the table; ``--json`` has all of it."""


@dataclass(frozen=True, repr=False)
class Sensitivity(Report):
    """Which constants move an answer.

    Parameters
    ----------
    question : what was asked.
    point : where.
    schedules : the schedule, and the one that its speed-up is over, if any.
    base : the times with all constants as they are.
    effects : of all factors, the largest first; empty with the method ``sobol``.
    indices : of all factors, the largest first; empty with the method ``one-at-a-time``.
    spread : 5 and 95 % points of the answer over the design of Sobol; None without one.
    refused : schedules that do not apply, and why.
    """

    question: SensitivityQuestion
    point: Point
    schedules: tuple[str, ...]
    base: Outcome
    effects: tuple[Effect, ...] = ()
    indices: tuple[SobolIndex, ...] = ()
    spread: tuple[float, float] | None = None
    refused: tuple[tuple[str, str], ...] = ()

    def to_dict(self) -> dict[str, object]:
        return {
            "at": dict(self.point.labels) | {"machine": self.point.machine, "seq": self.point.layer.sequence},
            "of": self.question.of,
            "schedules": list(self.schedules),
            "value": self._value(self.base),
            "times_s": dict(self.base.times_s),
            "fastest": self.base.winner,
            "method": self.question.method,
            **({"samples": self.question.samples, "seed": self.question.seed} if self.indices else {}),
            **({} if self.spread is None else {"value_low": self.spread[0], "value_high": self.spread[1]}),
            "constants": self.records(),
            "refused": dict(self.refused),
        }

    def records(self) -> list[dict[str, object]]:
        """A row per constant, all of them."""
        return [*map(self._of_effect, self.effects), *map(self._of_index, self.indices)]

    def parts(self) -> list[Part]:
        found: list[Part] = [self._table()]
        rest = len(self.effects or self.indices) - self.question.top
        found += (
            [f"{rest} more constants have smaller effects; --top {rest + self.question.top} lists all"]
            if rest > 0
            else []
        )
        found += [] if self.effects or self.indices else ["no constant on which the machine depends has an interval"]
        found += [f"{name} does not apply: {reason}" for name, reason in self.refused]
        return found

    def _table(self) -> Table:
        what = self._text(self.base)
        title = f"{self._what} is {what} at {where_of(self.point)}, fastest: {self.base.winner}"
        if self.indices:
            columns = ("constant", "range", "alone", "with others", "source", "would settle it")
            rows = [self._index_row(each) for each in self.indices[: self.question.top]]
            return Table(f"{title}{self._spread_text()}; shares of its variance", columns, rows, (0, 1, 4, 5))
        columns = (
            "constant",
            "range",
            f"{'time' if len(self.schedules) == 1 else 'speed-up'} becomes",
            "fastest",
            "source",
            "would settle it",
        )
        rows = [self._effect_row(each) for each in self.effects[: self.question.top]]
        return Table(title, columns, rows, (0, 1, 2, 3, 4, 5))

    @property
    def _what(self) -> str:
        if len(self.schedules) == 1:
            return f"time of {self.schedules[0]}"
        return f"speed-up of {self.schedules[0]} over {self.schedules[1]}"

    def _spread_text(self) -> str:
        return (
            ""
            if self.spread is None
            else f", {self._shown(self.spread[0])} .. {self._shown(self.spread[1])} (5 to 95 %)"
        )

    def _value(self, outcome: Outcome) -> float:
        return value_of(outcome, self.schedules)

    def _text(self, outcome: Outcome) -> str:
        return self._shown(self._value(outcome))

    def _shown(self, value: float) -> str:
        return format_time(value) if len(self.schedules) == 1 else f"{value:.3g}x"

    def _effect_row(self, each: Effect) -> tuple[str, ...]:
        becomes = f"{self._text(each.at_low)} .. {self._text(each.at_high)}"
        winners = " .. ".join(dict.fromkeys(end.winner for end in (each.at_low, each.at_high)))
        fastest = winners if each.changes_winner(self.base) else "the same"
        return (each.factor.name, each.factor.text, becomes, fastest, *_origin(each.factor))

    def _index_row(self, each: SobolIndex) -> tuple[str, ...]:
        alone, total = f"{each.first:.0%} ± {each.first_conf:.0%}", f"{each.total:.0%} ± {each.total_conf:.0%}"
        return (each.factor.name, each.factor.text, alone, total, *_origin(each.factor))

    def _of_effect(self, each: Effect) -> dict[str, object]:
        return _of_factor(each.factor) | {
            "value_at_low": self._value(each.at_low),
            "value_at_high": self._value(each.at_high),
            "effect": each.size(self.base, *pair_of(self.schedules)),
            "fastest_at_low": each.at_low.winner,
            "fastest_at_high": each.at_high.winner,
            "changes_fastest": each.changes_winner(self.base),
        }

    def _of_index(self, each: SobolIndex) -> dict[str, object]:
        return _of_factor(each.factor) | {
            "first": each.first,
            "first_conf": each.first_conf,
            "total": each.total,
            "total_conf": each.total_conf,
        }


def value_of(outcome: Outcome, schedules: Sequence[str]) -> float:
    """The time of one schedule, or the speed-up of the first over the second."""
    return outcome.ratio(*pair_of(schedules))


def pair_of(schedules: Sequence[str]) -> tuple[str, str | None]:
    """The schedule and the one that its speed-up is over, None of a time."""
    return schedules[0], schedules[1] if len(schedules) > 1 else None


def _of_factor(factor: Factor) -> dict[str, object]:
    return {
        "constant": factor.name,
        "range": factor.text,
        "factor_low": factor.low_factor,
        "factor_high": factor.high_factor,
        "source": factor.source,
        "assumed": factor.assumed,
        "settled_by": factor.settled_by or None,
    }


def _origin(factor: Factor) -> tuple[str, str]:
    assumed = "ASSUMED: " if factor.assumed else ""
    text = re.sub(r"^assum\w*:? ", "", factor.source)
    return shorten(assumed + text, MAX_SOURCE, placeholder=" ..."), factor.settled_by or "-"


def where_of(point: Point) -> str:
    """The axes of a point but its schedule, on one line."""
    labels = {name: value for name, value in point.labels if name not in ("schedule", "variant")}
    return (
        ", ".join(f"{name} {value}" for name, value in labels.items()) or f"{point.machine}, seq {point.layer.sequence}"
    )
