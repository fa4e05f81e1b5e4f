"""What a log says about a machine: whether it is healthy, and which effect explains best that it is not.

Each hypothesis, healthy among them, predicts all measured times, and is as likely as the errors that it leaves
(`tasp_lab.measure.check.errors`).

>>> from tasp_lab.measure.profiles import machine_named
>>> machine = machine_named("h100-8")
>>> calls = [("all_gather", 2**power) for power in range(20, 34, 2)]
>>> healthy_s = Predictions(machine, calls).expected_s
>>> found = diagnose(machine, [Observation(*call, 30 * time_s) for call, time_s in zip(calls, healthy_s, strict=True)])
>>> found.is_slow, found.findings[0].cause.name
(True, 'P2P is off, so data goes through host memory')
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from scipy.special import logsumexp

from tasp_lab.core.arrays import FloatArray
from tasp_lab.machines.machine import Machine
from tasp_lab.measure.check.causes import Cause, Effect
from tasp_lab.measure.check.predictions import Predictions
from tasp_lab.schedules.collectives.kinds import NcclTestsName

HEALTHY = 0.7
"""How probable a healthy machine is before its log is read: people also measure machines that they do not doubt (an
assumption)."""

SURE = 0.6
"""From this probability on a machine is called slow: then some 2 % of healthy logs are
(``experiments/results/checks.md``)."""

NOTABLE = 0.9
"""A machine that reaches more than this share of what is expected is not slow, however sure the difference is."""

OF_CAUSE = 0.08
"""How far the severities that are tried may be from the true one, a standard deviation of the logarithm of times."""


class Observation(NamedTuple):
    """A measured time of a collective; the size as nccl-tests defines it."""

    collective: NcclTestsName
    size_bytes: int
    time_s: float


class Finding(NamedTuple):
    """A cause, its effect, how probable it is, as how severe, and the times that it predicts, an array (rows,)."""

    cause: Cause
    effect: Effect
    probability: float
    severity: float | None
    expected_s: FloatArray


@dataclass(frozen=True)
class Diagnosis:
    """What the rows of one machine say.

    Parameters
    ----------
    machine, rows : what was measured, and on what.
    expected_s, low_s, high_s : what is expected of a healthy machine, with its interval of 90 %; arrays (rows,).
    healthy : how probable it is that nothing is wrong.
    findings : the causes, those of the most probable effect first.
    """

    machine: Machine
    rows: tuple[Observation, ...]
    expected_s: FloatArray
    low_s: FloatArray
    high_s: FloatArray
    healthy: float
    findings: tuple[Finding, ...] = field(repr=False)

    @cached_property
    def share(self) -> FloatArray:
        """The share of the expected bandwidth that each row reaches."""
        measured_s: FloatArray = np.array([row.time_s for row in self.rows])
        return self.expected_s / measured_s

    @property
    def is_slow(self) -> bool:
        """Whether something is wrong that costs time."""
        return self.healthy < 1 - SURE and bool(self.slow_rows)

    @cached_property
    def slow_rows(self) -> list[int]:
        """The rows that are slow and that the most probable cause makes slow; else all that are slow."""
        slow = [row for row in range(len(self.rows)) if self.share[row] < NOTABLE]
        if not self.findings:
            return slow
        explained = self.expected_s / self.findings[0].expected_s
        return [row for row in slow if explained[row] < NOTABLE] or slow


def diagnose(machine: Machine, rows: Sequence[Observation]) -> Diagnosis:
    """The diagnosis of a machine by all that was measured of it."""
    predictions = Predictions(machine, [(row.collective, row.size_bytes) for row in rows])
    return diagnosis_of(predictions, [row.time_s for row in rows])


def diagnosis_of(predictions: Predictions, measured_s: Sequence[float]) -> Diagnosis:
    """The diagnosis by the measured times of all calls, in seconds."""
    chosen, measured = predictions.chosen, np.log(measured_s)

    def log_likelihood(times_s: FloatArray, more: float = 0.0) -> float:
        errors = measured - np.log(times_s * predictions.middle)
        return predictions.errors.log_density(errors[chosen], more)

    healthy = math.log(HEALTHY) + log_likelihood(predictions.healthy_s)
    densities = [(each, log_likelihood(each.times_s, OF_CAUSE)) for each in predictions.variants]
    found = list[Finding]()
    effects = dict.fromkeys(each.effect for each in predictions.variants)
    weights = sum(cause.weight for effect in effects for cause in effect.causes)
    for effect in effects:
        for cause in effect.causes:
            own = [each for each in densities if each[0].effect is effect and cause.may_be(each[0].severity)]
            if own:
                best = max(own, key=lambda each: each[1])[0]
                prior = math.log((1 - HEALTHY) * cause.weight / weights / len(own))
                value = prior + float(logsumexp([density for _, density in own]))
                found.append(Finding(cause, effect, value, best.severity, best.times_s * predictions.middle))
    total = float(logsumexp([healthy, *(each.probability for each in found)]))
    found = [each._replace(probability=math.exp(each.probability - total)) for each in found]
    of_effect = {effect.name: sum(each.probability for each in found if each.effect is effect) for effect in effects}
    found.sort(key=lambda each: (-of_effect[each.effect.name], -each.probability))
    rows = tuple(Observation(*call, time_s) for call, time_s in zip(predictions.calls, measured_s, strict=True))
    expected_s, width = predictions.expected_s, predictions.width
    return Diagnosis(
        predictions.machine, rows, expected_s, expected_s / width, expected_s * width,
        math.exp(healthy - total), tuple(found),
    )  # fmt: skip


def plausibility(machine: Machine, rows: Sequence[Observation]) -> float:
    """The logarithm of the density of measured times on a healthy machine."""
    predictions = Predictions(machine, [(row.collective, row.size_bytes) for row in rows])
    errors = np.log([row.time_s for row in rows]) - np.log(predictions.expected_s)
    return predictions.errors.log_density(errors[predictions.chosen])
