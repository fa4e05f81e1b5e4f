"""Scores of decisions and intervals, of any predictor: regrets, pairs and intervals beside measured times.

`tasp-lab accuracy` and ``experiments/ranking_benchmark`` use them alike. Needs no simulator::

    figures_of([Decision(regret=0.1)], [Pair(1, 2, 0.9, 0.8, 0.97)])

A *question* is one layer on one machine that was measured in several ways. Its *regret* is the measured time of the
pick over the measured best, less one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tasp_lab.prediction.interval import DECIDED, TIE

CALLED = TIE
"""An order is called from this probability on."""

CLOSE = 0.02
"""Picks within this share of the measured best count as near it."""

COVERED = 0.9
"""The probability with which intervals should hold a measured time."""

ALPHA_S = 10e-6
"""The alpha-beta rule: 10 us per message on the busiest rank, and its bytes at the bandwidth of its slowest link."""


@dataclass(frozen=True)
class Pair:
    """Two rows of a question: `first` and `second` are their lines, ratios are first over second.

    The probability is None where a predictor has none; then nothing is called.
    """

    first: int
    second: int
    predicted_ratio: float
    measured_ratio: float
    probability_first_faster: float | None

    @property
    def is_called(self) -> bool:
        """Whether one of them is predicted to be faster with a probability of at least `CALLED`."""
        chance = self.probability_first_faster
        return chance is not None and max(chance, 1 - chance) >= CALLED

    @property
    def is_right(self) -> bool:
        """Whether the one that was measured to be faster is the likelier one, or has the shorter predicted time."""
        chance = self.probability_first_faster
        first = self.predicted_ratio < 1 if chance is None else chance > 0.5
        return first == (self.measured_ratio < 1)

    @property
    def brier(self) -> float | None:
        """The squared error of the probability; None without one."""
        chance = self.probability_first_faster
        return None if chance is None else (chance - (self.measured_ratio < 1)) ** 2


class Span(NamedTuple):
    """An interval of `COVERED` and the measured time, in seconds."""

    low_s: float
    high_s: float
    measured_s: float

    @property
    def is_inside(self) -> bool:
        """Whether it holds the measured time."""
        return self.low_s <= self.measured_s <= self.high_s

    @property
    def score(self) -> float:
        """The interval score over the measured time: the width, and 20 times what the time is outside; less is better.

        T. Gneiting and A. Raftery, J. Am. Stat. Assoc. 102, 2007, section 6.2.
        """
        outside_s = max(self.low_s - self.measured_s, self.measured_s - self.high_s, 0.0)
        return (self.high_s - self.low_s + 2 / (1 - COVERED) * outside_s) / self.measured_s


class Decision(NamedTuple):
    """The regret of the pick of a question, and what the predictor expected; None where it expects nothing."""

    regret: float
    expected_regret: float | None = None


class Way(NamedTuple):
    """What simple rules need of a row: its schedule, and what the busiest rank sends."""

    schedule: str
    bytes_per_rank: float
    steps: float
    link_bytes_per_s: float


Rule = Callable[[Sequence[Way]], int | None]
"""A simple rival: the row of a question that it takes, None where it has no answer."""


def _by_name(*starts: str) -> Rule:
    return lambda ways: next((number for number, way in enumerate(ways) if way.schedule.startswith(starts)), None)


def _least(cost: Callable[[Way], float]) -> Rule:
    return lambda ways: min(range(len(ways)), key=lambda number: cost(ways[number]))


RULES: Mapping[str, Rule] = {
    "always ring": _by_name("zigzag-ring", "striped-ring", "ring-attention"),
    "always Ulysses": _by_name("ulysses"),
    "always USP": _by_name("usp"),
    "least bytes": _least(lambda way: way.bytes_per_rank),
    "alpha-beta": _least(lambda way: ALPHA_S * way.steps + way.bytes_per_rank / way.link_bytes_per_s),
}
"""Rules that need no simulation. A rule has no answer where none of the measured schedules is its own."""


def regret_of(measured_s: Sequence[float], number: int) -> float:
    """The measured time of a row of a question over the least one, less one.

    >>> regret_of([2.0, 1.0, 1.5], 2)
    0.5
    """
    return measured_s[number] / min(measured_s) - 1


def figures_of(
    decisions: Sequence[Decision], pairs: Sequence[Pair] = (), spans: Sequence[Span] = ()
) -> dict[str, float | None]:
    """All scores of a predictor; numbers are None where there is nothing to count.

    >>> figures = figures_of([Decision(0.0, 0.01), Decision(0.5)])
    >>> figures["questions"], figures["mean_regret"], figures["decided"], figures["brier"]
    (2, 0.25, 0.5, None)
    """
    decided = [each for each in decisions if each.expected_regret is not None and each.expected_regret <= DECIDED]
    called = [pair for pair in pairs if pair.is_called]
    return {
        **regret_figures([each.regret for each in decisions]),
        "expected_regret": mean([each.expected_regret for each in decisions]),
        "decided": len(decided) / len(decisions) if decisions else None,
        "mean_regret_of_decided": mean([each.regret for each in decided]),
        "expected_regret_of_decided": mean([each.expected_regret for each in decided]),
        "pairs": len(pairs),
        "called": mean([pair.is_called for pair in pairs]),
        "called_right": mean([pair.is_right for pair in called]),
        "right": mean([pair.is_right for pair in pairs]),
        "brier": mean([pair.brier for pair in pairs]),
        "inside": mean([each.is_inside for each in spans]),
        "interval_score": mean([each.score for each in spans]),
    }


def regret_figures(regrets: Sequence[float]) -> dict[str, float | None]:
    """How many questions; mean, 90 % point and largest regret, and the share of questions within `CLOSE`."""
    values = np.array(regrets)
    return {
        "questions": len(regrets),
        "mean_regret": mean(regrets),
        "p90_regret": float(np.quantile(values, 0.9)) if regrets else None,
        "worst_regret": max(regrets, default=None),
        "within_2": mean([regret <= CLOSE for regret in regrets]),
    }


def mean(values: Sequence[float | None]) -> float | None:
    """The mean of the values that are known; None without any."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None
