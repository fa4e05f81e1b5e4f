"""Decisions beside measurements: what taking the schedule that is predicted to be best would have cost.

A *question* is what several measured rows of one table do: the same layer on the same machine. Its *regret* is the
measured time of the pick over the measured best, less one. `Decisions` has the regrets of the picks of tasp-lab beside
those of simple rules, and the pairs of rows: which order was called, and whether it was right::

    report = accuracy("my-cluster/")
    decisions_of(report.tables).mean_regret

The errors of pairs are those fitted without the source of the table (`tasp_lab.prediction.paired`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from tasp_lab.core.tables import Part, Table
from tasp_lab.measure.accuracy.table_accuracy import MeasuredRow, TableAccuracy
from tasp_lab.measure.inputs import left_out_with
from tasp_lab.prediction.interval import TIE
from tasp_lab.prediction.paired import PairedErrors, Rival, paired_errors
from tasp_lab.prediction.recommend import DECIDED

CALLED = TIE
"""An order is called from this probability on."""

CLOSE = 0.02
"""Picks within this share of the measured best count as near it."""

ALPHA_S = 10e-6
"""The alpha-beta rule: 10 us per message on the busiest rank, and its bytes at the bandwidth of its slowest link."""


@dataclass(frozen=True)
class Pair:
    """Two rows of a question: `first` and `second` are their lines, ratios are first over second."""

    first: int
    second: int
    predicted_ratio: float
    measured_ratio: float
    probability_first_faster: float

    @property
    def is_called(self) -> bool:
        """Whether one of them is predicted to be faster with a probability of at least `CALLED`."""
        return max(self.probability_first_faster, 1 - self.probability_first_faster) >= CALLED

    @property
    def is_right(self) -> bool:
        """Whether the one that was measured to be faster is the likelier one."""
        return (self.probability_first_faster > 0.5) == (self.measured_ratio < 1)

    @property
    def brier(self) -> float:
        """The squared error of the probability."""
        return (self.probability_first_faster - (self.measured_ratio < 1)) ** 2

    def to_dict(self) -> dict[str, object]:
        """The object of ``accuracy --pairs --json``."""
        return {
            "first": self.first,
            "second": self.second,
            "predicted_ratio": self.predicted_ratio,
            "probability_first_faster": self.probability_first_faster,
            "measured_ratio": self.measured_ratio,
        }


@dataclass(frozen=True, eq=False)
class Question:
    """Rows of one table that do the same work by several schedules or libraries."""

    machine: str
    source: str
    rows: tuple[MeasuredRow, ...]
    errors: PairedErrors

    @cached_property
    def rivals(self) -> tuple[Rival, ...]:
        """What the comparison needs of each row."""
        return tuple(rival_of(row) for row in self.rows)

    @cached_property
    def expected_regrets(self) -> list[float]:
        """The expected regret of each row."""
        costs = self.rows[0].costs
        assert costs is not None, "rows of questions have costs"
        return [float(each) for each in self.errors.expected_regrets(self.rivals, costs.setting)]

    @property
    def pick(self) -> int:
        """The row that tasp-lab takes: the least expected regret, of equal ones the first."""
        return min(range(len(self.rows)), key=lambda number: self.expected_regrets[number])

    @property
    def expected_regret(self) -> float:
        """That of the pick."""
        return self.expected_regrets[self.pick]

    @property
    def is_decided(self) -> bool:
        """Whether the expected regret is at most `DECIDED`."""
        return self.expected_regret <= DECIDED

    def regret(self, number: int) -> float:
        """The measured time of a row over the least measured time, less one."""
        times = [measured(row) for row in self.rows]
        return times[number] / min(times) - 1


def rival_of(row: MeasuredRow) -> Rival:
    """What the comparison needs of a row."""
    assert row.predicted_s is not None, "rows of questions have times"
    assert row.costs is not None, "rows of questions have costs"
    return Rival(row.schedule, row.predicted_s, row.costs.exposed_share, max(row.costs.steps, 1.0))


def measured(row: MeasuredRow) -> float:
    """The measured time of a row of a question."""
    assert row.measured_s is not None, "rows of questions have times"
    return row.measured_s


def pairs_of(rows: Sequence[MeasuredRow], errors: PairedErrors) -> list[Pair]:
    """All pairs of the rows of one question."""
    found = []
    for place, first in enumerate(rows):
        for second in rows[place + 1 :]:
            one, two = rival_of(first), rival_of(second)
            assert first.costs is not None, "rows of questions have costs"
            chance = errors.first_is_faster(one, two, first.costs.setting)
            ratios = one.time_s / two.time_s, measured(first) / measured(second)
            found.append(Pair(line_of(first), line_of(second), *ratios, chance))
    return found


def line_of(row: MeasuredRow) -> int:
    """The line of a row in its file."""
    return int(str(row.shape["line"]))


def questions_of(table: TableAccuracy) -> list[Question]:
    """The questions of a table of layers: the works that at least two of its rows do."""
    if table.kind != "layer":
        return []
    works: defaultdict[tuple[object, ...], list[MeasuredRow]] = defaultdict(list)
    for row in table.rows:
        if row.in_scope and row.work and row.costs is not None and row.measured_s and row.predicted_s:
            works[row.work].append(row)
    source = left_out_with(table.table)
    errors = paired_errors(source)
    return [Question(str(work[0]), source, tuple(rows), errors) for work, rows in works.items() if len(rows) > 1]


def table_pairs(table: TableAccuracy) -> list[Pair]:
    """The pairs of a table, in the order of its lines."""
    return [pair for question in questions_of(table) for pair in pairs_of(question.rows, question.errors)]


Rule = Callable[[Question], int | None]
"""A simple rival: the row that it takes, None where it has no answer."""


def _by_name(*starts: str) -> Rule:
    """Take the fastest predicted row whose schedule has a name that begins so."""

    def rule(question: Question) -> int | None:
        fitting = [number for number, row in enumerate(question.rows) if row.schedule.startswith(starts)]
        return fitting[0] if fitting else None

    return rule


def _least(cost: Callable[[MeasuredRow], float]) -> Rule:
    return lambda question: min(range(len(question.rows)), key=lambda number: cost(question.rows[number]))


def _alpha_beta_s(row: MeasuredRow) -> float:
    assert row.costs is not None, "rows of questions have costs"
    return ALPHA_S * row.costs.steps + row.costs.bytes_per_rank / row.costs.link_bytes_per_s


def _bytes(row: MeasuredRow) -> float:
    assert row.costs is not None, "rows of questions have costs"
    return row.costs.bytes_per_rank


RULES: Mapping[str, Rule] = {
    "always ring": _by_name("zigzag-ring", "striped-ring", "ring-attention"),
    "always Ulysses": _by_name("ulysses"),
    "always USP": _by_name("usp"),
    "least bytes": _least(_bytes),
    "alpha-beta": _least(_alpha_beta_s),
}
"""Rules that need no simulation. A rule has no answer where none of the measured schedules is its own."""


@dataclass(frozen=True, eq=False)
class Decisions:
    """The questions of some tables, their pairs, and how good the picks were."""

    questions: tuple[Question, ...]

    @cached_property
    def pairs(self) -> list[Pair]:
        """The pairs of all questions."""
        return [pair for question in self.questions for pair in pairs_of(question.rows, question.errors)]

    @cached_property
    def regrets(self) -> list[float]:
        """The measured regret of each question's pick."""
        return [question.regret(question.pick) for question in self.questions]

    def regrets_of(self, rule: str) -> list[float]:
        """The measured regrets of a simple rule, of the questions that it answers."""
        picks = ((question, RULES[rule](question)) for question in self.questions)
        return [question.regret(pick) for question, pick in picks if pick is not None]

    def to_dict(self) -> dict[str, object]:
        """The field `decisions` of ``accuracy --json``; numbers are null where there is nothing to count."""
        decided = [number for number, question in enumerate(self.questions) if question.is_decided]
        called = [pair for pair in self.pairs if pair.is_called]
        return {
            "questions": len(self.questions),
            **_regret_figures(self.regrets),
            "expected_regret": _mean([question.expected_regret for question in self.questions]),
            "decided": len(decided) / len(self.questions) if self.questions else None,
            "mean_regret_of_decided": _mean([self.regrets[number] for number in decided]),
            "expected_regret_of_decided": _mean([self.questions[number].expected_regret for number in decided]),
            "pairs": len(self.pairs),
            "called": len(called) / len(self.pairs) if self.pairs else None,
            "called_right": _mean([float(pair.is_right) for pair in called]),
            "right": _mean([float(pair.is_right) for pair in self.pairs]),
            "brier": _mean([pair.brier for pair in self.pairs]),
            "rules": {
                rule: {"questions": len(regrets), **_regret_figures(regrets)}
                for rule in RULES
                for regrets in [self.regrets_of(rule)]
            },
        }


def _regret_figures(regrets: Sequence[float]) -> dict[str, float | None]:
    """Mean, 90 % point and largest regret, and the share of questions within `CLOSE`."""
    if not regrets:
        return dict.fromkeys(("mean_regret", "p90_regret", "worst_regret", "within_2"))
    values = np.array(regrets)
    return {
        "mean_regret": float(values.mean()),
        "p90_regret": float(np.quantile(values, 0.9)),
        "worst_regret": float(values.max()),
        "within_2": float((values <= CLOSE).mean()),
    }


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def decisions_of(tables: Iterable[TableAccuracy]) -> dict[str, Decisions]:
    """The decisions of each source on each machine family, like ``UltraAttn on a800``, and of ``all`` tables."""
    groups: defaultdict[str, list[Question]] = defaultdict(list)
    for table in tables:
        for question in questions_of(table):
            groups[f"{Path(question.source).name} on {table.profile or 'several'}"].append(question)
    found = {name: Decisions(tuple(questions)) for name, questions in groups.items()}
    everything = tuple(question for each in found.values() for question in each.questions)
    return found | {"all": Decisions(everything)}


def decision_parts(tables: Sequence[TableAccuracy]) -> list[Part]:
    """What the picks would have cost, by source, beside simple rules; nothing without questions."""
    figures = decisions_of(tables)
    everything = figures["all"]
    if not everything.questions:
        return []
    columns = (
        "regret of the pick", "questions", "mean", "90 %", "largest", "within 2 %", "decided", "pairs",
        "called at 95 %", "of these right", "Brier",
    )  # fmt: skip
    rows = [_cells(name, decisions.to_dict()) for name, decisions in figures.items()]
    rules = [
        (rule, str(len(regrets)), *(_percent(value) for value in _regret_figures(regrets).values()))
        for rule in RULES
        if (regrets := everything.regrets_of(rule))
    ]
    beside = Table("simple rules", ("rule", "questions", "mean", "90 %", "largest", "within 2 %"), rules, (0,))
    return [Table("decisions: measured time of the pick over the measured best", columns, rows, (0,)), beside]


def _cells(name: str, found: Mapping[str, object]) -> tuple[str, ...]:
    percents = ("mean_regret", "p90_regret", "worst_regret", "within_2", "decided")
    brier = found["brier"]
    return (
        name, str(found["questions"]), *(_percent(found[each]) for each in percents), str(found["pairs"]),
        _percent(found["called"]), _percent(found["called_right"]), "-" if brier is None else f"{brier:.3f}",
    )  # fmt: skip


def _percent(value: object) -> str:
    return "-" if value is None else f"{float(str(value)):.1%}"
