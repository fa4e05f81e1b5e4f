"""Decisions beside measurements: what taking the schedule that is predicted to be best would have cost.

A *question* is what several measured rows of one table do: the same layer on the same machine. Its *regret* is the
measured time of the pick over the measured best, less one. `Decisions` has the regrets of the picks of tasp-lab beside
those of simple rules, and the pairs of rows: which order was called, and whether it was right::

    report = accuracy("my-cluster/")
    decisions_of(report.tables).mean_regret

The errors of pairs are those fitted without the source of the table (`tasp_lab.prediction.paired`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tasp_lab.core.tables import Part, Table
from tasp_lab.measure.accuracy.table_accuracy import MeasuredRow, TableAccuracy
from tasp_lab.measure.inputs import left_out_with
from tasp_lab.measure.scores import RULES, Decision, Pair, Span, Way, figures_of, regret_figures, regret_of
from tasp_lab.prediction.interval import DECIDED
from tasp_lab.prediction.paired import PairedErrors, Rival, paired_errors


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
        return tuple(rival_of(row, self.errors) for row in self.rows)

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
        return regret_of([measured(row) for row in self.rows], number)

    @property
    def ways(self) -> list[Way]:
        """What simple rules need of each row."""
        return [way_of(row) for row in self.rows]


def rival_of(row: MeasuredRow, errors: PairedErrors) -> Rival:
    """What the comparison needs of a row; `errors` have the layouts that were measured."""
    assert row.predicted_s is not None, "rows of questions have times"
    assert row.costs is not None, "rows of questions have costs"
    measured = errors.has_measured(row.costs.layouts)
    return Rival(row.schedule, row.predicted_s, row.costs.exposed_share, max(row.costs.steps, 1.0), measured)


def way_of(row: MeasuredRow) -> Way:
    """What simple rules need of a row."""
    assert row.costs is not None, "rows of questions have costs"
    return Way(row.schedule, row.costs.bytes_per_rank, row.costs.steps, row.costs.link_bytes_per_s)


def span_of(row: MeasuredRow) -> Span | None:
    """The interval of a row; None without one."""
    return None if row.interval is None else Span(row.interval.low_s, row.interval.high_s, measured(row))


def measured(row: MeasuredRow) -> float:
    """The measured time of a row of a question."""
    assert row.measured_s is not None, "rows of questions have times"
    return row.measured_s


def pairs_of(rows: Sequence[MeasuredRow], errors: PairedErrors) -> list[Pair]:
    """All pairs of the rows of one question."""
    found = []
    for place, first in enumerate(rows):
        for second in rows[place + 1 :]:
            one, two = rival_of(first, errors), rival_of(second, errors)
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

    @property
    def spans(self) -> list[Span]:
        """The intervals of the rows of all questions."""
        found = (span_of(row) for question in self.questions for row in question.rows)
        return [each for each in found if each is not None]

    def regrets_of(self, rule: str) -> list[float]:
        """The measured regrets of a simple rule, of the questions that it answers."""
        picks = ((question, RULES[rule](question.ways)) for question in self.questions)
        return [question.regret(pick) for question, pick in picks if pick is not None]

    @cached_property
    def figures(self) -> dict[str, object]:
        """The field `decisions` of ``accuracy --json``; numbers are null where there is nothing to count."""
        decisions = [
            Decision(regret, question.expected_regret)
            for regret, question in zip(self.regrets, self.questions, strict=True)
        ]
        rules = {rule: regret_figures(self.regrets_of(rule)) for rule in RULES}
        return {**figures_of(decisions, self.pairs, self.spans), "rules": rules}


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
    rows = [{"name": name, **decisions.figures} for name, decisions in figures.items()]
    rules = [{"rule": rule, **regret_figures(regrets)} for rule in RULES if (regrets := everything.regrets_of(rule))]
    regret = {
        "questions": "{questions}", "mean": "{mean_regret:.1%}", "90 %": "{p90_regret:.1%}",
        "largest": "{worst_regret:.1%}", "within 2 %": "{within_2:.1%}",
    }  # fmt: skip
    pairs = {
        "decided": "{decided:.1%}", "pairs": "{pairs}", "called at 95 %": "{called:.1%}",
        "of these right": "{called_right:.1%}", "Brier": "{brier:.3f}",
    }  # fmt: skip
    title = "decisions: measured time of the pick over the measured best"
    return [
        *Table.of(title, rows, {"regret of the pick": "{name}", **regret, **pairs}),
        *Table.of("simple rules", rules, {"rule": "{rule}", **regret}),
    ]
