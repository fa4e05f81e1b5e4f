"""Decisions beside measurements: what taking the schedule that is predicted to be best would have cost.

A *question* is what several measured rows of one table do: the same layer on the same machine. Its *regret* is the
measured time of the pick over the measured best, less one. The picks of tasp-lab stand beside those of simple rules,
with the pairs of rows: which order was called, and whether it was right::

    report = accuracy("my-cluster/")
    decision_figures(questions_by_source(report.tables)["all"])["mean_regret"]

The errors of pairs are those fitted without the source of the table (`tasp_lab.prediction.paired`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path

from tasp_lab.core.tables import Part, Table
from tasp_lab.measure.accuracy.table_accuracy import MeasuredRow, TableAccuracy, by_work
from tasp_lab.measure.inputs import left_out_with
from tasp_lab.measure.scores import RULES, Decision, Pair, Way, figures_of, regret_figures, regret_of
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
        """What the comparison needs of each row; `errors` have the layouts that were measured."""
        rivals = []
        for row in self.rows:
            _, predicted_s, costs = row.known()
            measured = self.errors.has_measured(costs.layouts)
            rivals.append(Rival(row.schedule, predicted_s, costs.exposed_share, max(costs.steps, 1.0), measured))
        return tuple(rivals)

    @cached_property
    def measured_s(self) -> list[float]:
        """The measured seconds of each row."""
        return [row.known()[0] for row in self.rows]

    @cached_property
    def expected_regrets(self) -> list[float]:
        """The expected regret of each row."""
        return [float(each) for each in self.errors.expected_regrets(self.rivals, self.rows[0].known()[2].setting)]

    @property
    def pick(self) -> int:
        """The row that tasp-lab takes: the least expected regret, of equal ones the first."""
        return min(range(len(self.rows)), key=lambda number: self.expected_regrets[number])

    @property
    def decision(self) -> Decision:
        """The regret of the pick, and what was expected of it."""
        return Decision(regret_of(self.measured_s, self.pick), self.expected_regrets[self.pick])

    @property
    def ways(self) -> list[Way]:
        """What simple rules need of each row."""
        every = ((row.schedule, row.known()[2]) for row in self.rows)
        return [Way(schedule, costs.bytes_per_rank, costs.steps, costs.link_bytes_per_s) for schedule, costs in every]

    @cached_property
    def pairs(self) -> list[Pair]:
        """All pairs of rows, by their lines."""
        pairs = []
        for one, two in combinations(range(len(self.rows)), 2):
            first, second = self.rivals[one], self.rivals[two]
            chance = self.errors.first_is_faster(first, second, self.rows[one].known()[2].setting)
            ratios = first.time_s / second.time_s, self.measured_s[one] / self.measured_s[two]
            pairs.append(Pair(line_of(self.rows[one]), line_of(self.rows[two]), *ratios, chance))
        return pairs


def line_of(row: MeasuredRow) -> int:
    """The line of a row in its file."""
    return int(str(row.shape["line"]))


def questions_of(table: TableAccuracy) -> list[Question]:
    """The questions of a table of layers: the works that at least two of its rows do."""
    works = [rows for rows in by_work(table.rows) if len(rows) > 1]
    if not works:
        return []
    source = left_out_with(table.table)
    errors = paired_errors(source)
    return [Question(str(rows[0].work[0]), source, tuple(rows), errors) for rows in works]


def questions_by_source(tables: Iterable[TableAccuracy]) -> dict[str, list[Question]]:
    """The questions of each source on each machine family, like ``UltraAttn on a800``, and of ``all`` tables."""
    groups: defaultdict[str, list[Question]] = defaultdict(list)
    for table in tables:
        for question in questions_of(table):
            groups[f"{Path(question.source).name} on {table.profile or 'several'}"].append(question)
    return {**groups, "all": [question for questions in groups.values() for question in questions]}


def decision_figures(questions: Sequence[Question]) -> dict[str, object]:
    """The field `decisions` of ``accuracy --json``; numbers are null where there is nothing to count."""
    return {
        **figures_of(
            [question.decision for question in questions],
            [pair for question in questions for pair in question.pairs],
            [span for question in questions for row in question.rows if (span := row.span) is not None],
        ),
        "rules": {rule: regret_figures(rule_regrets(questions, rule)) for rule in RULES},
    }


def rule_regrets(questions: Iterable[Question], rule: str) -> list[float]:
    """The measured regrets of a simple rule, of the questions that it answers."""
    picks = ((question.measured_s, RULES[rule](question.ways)) for question in questions)
    return [regret_of(measured_s, pick) for measured_s, pick in picks if pick is not None]


def decision_parts(questions: dict[str, list[Question]]) -> list[Part]:
    """What the picks would have cost, by source, beside simple rules; nothing without questions."""
    if not questions["all"]:
        return []
    rows = [{"name": name, **decision_figures(each)} for name, each in questions.items()]
    regrets = {rule: rule_regrets(questions["all"], rule) for rule in RULES}
    rules = [{"rule": rule, **regret_figures(each)} for rule, each in regrets.items() if each]
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
