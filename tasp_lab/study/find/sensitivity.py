"""Sensitivity: which constants of a machine move an answer of a study, or its ranking, within their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tasp_lab.core.arrays import FloatArray
from tasp_lab.core.errors import StudyError, unknown
from tasp_lab.core.progress import ProgressCallback, no_progress
from tasp_lab.study.find.effects import Logs, Outcome, one_at_a_time, sobol
from tasp_lab.study.find.factors import Factor, changed, factors_of
from tasp_lab.study.find.on_machine import OnMachine
from tasp_lab.study.find.sensitivity_question import SensitivityQuestion
from tasp_lab.study.find.sensitivity_report import Sensitivity, pair_of, value_of, where_of
from tasp_lab.study.point import Point


def find_sensitivity(
    points: Sequence[Point],
    question: SensitivityQuestion,
    baseline: str | None = None,
    progress: ProgressCallback = no_progress,
) -> Sensitivity:
    """The sensitivity at points that differ in the schedule only.

    Rings stay those that are fastest with all constants as they are.

    Raises `StudyError` for a schedule that is not among them or does not apply, with its reason.
    """
    names = _schedules(points, question, baseline)
    rivals = [each for each in points if not question.between or each.schedule in names]
    here = OnMachine.of(rivals)
    for name in names:
        if name in here.refused:
            raise StudyError(f"schedule {name!r} does not apply at {where_of(points[0])}: {here.refused[name]}")
    design = _Design(here, question, names, points[0], progress)
    return design.of_sobol() if question.method == "sobol" else design.one_at_a_time()


@dataclass(frozen=True)
class _Design:
    """The answers of a design at a point."""

    here: OnMachine
    question: SensitivityQuestion
    names: tuple[str, ...]
    point: Point
    progress: ProgressCallback

    def one_at_a_time(self) -> Sensitivity:
        """Every constant at both ends; the fastest of all schedules is told."""
        factors = self._factors()
        count = 2 * len(factors) * len(self.here.passes)
        self.progress(f"constants at both ends: {len(factors)}, in {count} predictions")
        effects = one_at_a_time(factors, self._outcome)
        base = self._outcome({})
        effects.sort(key=lambda each: -each.size(base, *pair_of(self.names)))
        return self._found(base, effects=tuple(effects))

    def of_sobol(self) -> Sensitivity:
        """All constants together; only the schedules of the answer are predicted."""
        factors, samples = self._factors(), self.question.samples
        count = samples * (len(factors) + 2) * len(self.names)
        self.progress(f"constants in a design of Sobol: {len(factors)}, in {count} predictions")
        indices, answers = sobol(factors, self._answer, samples, self.question.seed)
        indices.sort(key=lambda each: -each.total)
        return self._found(self._outcome({}), indices=tuple(indices), spread=spread_of(answers))

    def _factors(self) -> list[Factor]:
        return factors_of(self.here.machine, self.here.layer, self.point.options.passes, self.question.width)

    def _outcome(self, logs: Logs, schedules: Sequence[str] = ()) -> Outcome:
        return Outcome(self.here.times_s(changed(self.here.machine, logs), schedules))

    def _answer(self, logs: Logs) -> float:
        return value_of(self._outcome(logs, self.names), self.names)

    def _found(self, base: Outcome, **found: Any) -> Sensitivity:
        refused = tuple(self.here.refused.items())
        return Sensitivity(self.question, self.point, self.names, base, refused=refused, **found)


def spread_of(answers: FloatArray) -> tuple[float, float] | None:
    """The 5 and 95 % points of some answers; None without any."""
    return (float(np.quantile(answers, 0.05)), float(np.quantile(answers, 0.95))) if len(answers) else None


def _schedules(points: Sequence[Point], question: SensitivityQuestion, baseline: str | None) -> tuple[str, ...]:
    """The schedule, and for a speed-up the one that it is over."""
    known = list(dict.fromkeys(each.schedule for each in points))
    others = [name for name in known if name != baseline]
    given = question.between or tuple(others[:1] or known[:1])
    if len(given) < 2 and question.of == "speedup":
        given += (baseline,) if baseline else tuple(others[1:2])
    for name in given:
        if name not in known:
            raise StudyError(f"{unknown('schedule', name, known)} at this point")
    if question.of == "time":
        return given[:1]
    if len(given) < 2 or given[0] == given[1]:
        expected = "a baseline of the study, --between A --between B, or --of time"
        raise StudyError(f"a speed-up needs two schedules, expected {expected}")
    return given
