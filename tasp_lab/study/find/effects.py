"""What the ends of factors do to an answer: one at a time, or all together by a design of Sobol.

An answer is a number of logarithms of factors by name; factors that are not named are as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tasp_lab.core.arrays import FloatArray
from tasp_lab.core.errors import StudyError
from tasp_lab.machines.sampling import log_normal
from tasp_lab.study.find.factors import Factor
from tasp_lab.study.needed import needed

Logs = Mapping[str, float]

NEAREST_END = 1e-6
"""Quantiles of a design are no nearer to 0 and 1 than this."""


@dataclass(frozen=True)
class Outcome:
    """The times of schedules in seconds, by name."""

    times_s: Mapping[str, float]

    @property
    def winner(self) -> str:
        """The fastest, the first of equal ones."""
        return min(self.times_s, key=lambda name: self.times_s[name])

    def ratio(self, first: str, second: str | None) -> float:
        """The time of the first schedule, or the speed-up of the first over the second."""
        return self.times_s[first] if second is None else self.times_s[second] / self.times_s[first]


OutcomeOf = Callable[[Logs], Outcome]


@dataclass(frozen=True)
class Effect:
    """A factor at its two ends, all others as they are."""

    factor: Factor
    at_low: Outcome
    at_high: Outcome

    def size(self, base: Outcome, first: str, second: str | None) -> float:
        """The largest logarithm of the change of the answer, without a sign."""
        answer = base.ratio(first, second)
        return max(abs(math.log(end.ratio(first, second) / answer)) for end in (self.at_low, self.at_high))

    def changes_winner(self, base: Outcome) -> bool:
        """Whether another schedule is the fastest at one of the ends."""
        return any(end.winner != base.winner for end in (self.at_low, self.at_high))


def one_at_a_time(factors: Sequence[Factor], outcome_of: OutcomeOf) -> list[Effect]:
    """Every factor at both ends: 2 evaluations each."""
    return [Effect(each, *(outcome_of({each.name: end}) for end in (each.low, each.high))) for each in factors]


@dataclass(frozen=True)
class SobolIndex:
    """The share of the variance of an answer that a factor has alone, and with all that it takes part in.

    `first_conf` and `total_conf` are the half widths of their 95 % intervals.
    """

    factor: Factor
    first: float
    first_conf: float
    total: float
    total_conf: float


def check_samples(samples: int) -> None:
    """Raise `StudyError` unless a design of Sobol can have as many samples."""
    if samples < 2 or samples & (samples - 1):
        raise StudyError(f"samples: {samples}, expected a power of two, such as 64")


def sobol(
    factors: Sequence[Factor], answer: Callable[[Logs], float], samples: int, seed: int
) -> tuple[list[SobolIndex], FloatArray]:
    """Sobol indices of factors by a design of Saltelli, and the answers of the design.

    It takes `samples` (k + 2) answers, k being the number of factors. Logarithms of factors are normal with the 5 and
    95 % points of their intervals, each half apart, as in `tasp_lab.machines.sampling`.

    References
    ----------
    A. Saltelli et al., Variance based sensitivity analysis of model output, Computer Physics Communications 181 (2010).

    Raises `StudyError` unless `samples` is a power of two, and `MissingPackageError` without SALib.
    """
    check_samples(samples)
    if not factors:
        return [], np.zeros(0)
    names = [each.name for each in factors]
    problem = {"num_vars": len(names), "names": names, "bounds": [[0.0, 1.0]] * len(names)}
    what = "sensitivity by the method sobol"
    design = needed("SALib.sample.sobol", what).sample(problem, samples, calc_second_order=False, seed=seed)
    logs = _logs(factors, np.clip(design, NEAREST_END, 1 - NEAREST_END))
    answers = np.array([answer(dict(zip(names, row.tolist(), strict=True))) for row in logs])
    if np.ptp(answers) <= 1e-12 * abs(answers).max():
        return [SobolIndex(each, 0.0, 0.0, 0.0, 0.0) for each in factors], answers
    analyze = needed("SALib.analyze.sobol", what).analyze
    found = analyze(problem, answers, calc_second_order=False, seed=seed, print_to_console=False)
    return [_index(each, found, number) for number, each in enumerate(factors)], answers


def _index(factor: Factor, found: Mapping[str, Any], number: int) -> SobolIndex:
    return SobolIndex(factor, *(float(found[name][number]) for name in ("S1", "S1_conf", "ST", "ST_conf")))


def _logs(factors: Sequence[Factor], shares: FloatArray) -> FloatArray:
    """Logarithms of factors at these shares of their distributions, shape (rows, factors)."""
    from scipy.special import ndtri

    normals = ndtri(shares)
    columns = [log_normal(normals[:, number], each.low, each.high) for number, each in enumerate(factors)]
    return np.stack(columns, axis=1)
