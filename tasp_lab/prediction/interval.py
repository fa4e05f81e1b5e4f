"""The interval of a predicted time. Needs no simulator."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from tasp_lab.core.arrays import FloatArray
from tasp_lab.core.tables import brief
from tasp_lab.core.units import format_time
from tasp_lab.prediction.residuals import Regime, Residual, residual_of

TIE = 0.95
"""A ranking with a smaller probability is a tie."""

DECIDED = 0.02
"""A question is decided if the expected regret of its recommendation is at most this."""


IDEAL_LINKS = "ideal links: exact"
"""What is said once where nothing but rates of kernels is uncertain."""

EQUAL = 1e-9
"""Exact times whose logarithms differ by less are equal: the same operations in another order."""


@dataclass(frozen=True, eq=False, repr=False)
class Interval:
    """The interval of a predicted time.

    Parameters
    ----------
    time_s : the prediction.
    samples_s : the times with samples of the constants, shape (samples,); empty where they are not sampled.
    residual : of the regime.
    """

    time_s: float
    samples_s: FloatArray
    residual: Residual

    def __repr__(self) -> str:
        return brief(self, self.text, f"{len(self.samples_s)} samples")

    @cached_property
    def low_s(self) -> float:
        """The 5 % point, or the prediction if it is less."""
        return min(self.time_s, self.quantile_s(0.05))

    @cached_property
    def high_s(self) -> float:
        """The 95 % point, or the prediction if it is more: the account's middle may be far from it."""
        return max(self.time_s, self.quantile_s(0.95))

    @cached_property
    def median_s(self) -> float:
        """The 50 % point: the time to expect of a measured run, as predictions of this class were mostly too short."""
        return self.quantile_s(0.5)

    @property
    def is_exact(self) -> bool:
        """Whether the time is exact: links are ideal, and no rate of a kernel has an interval."""
        return self.residual.is_exact and not len(self.samples_s)

    @property
    def text(self) -> str:
        """The median and both ends to three digits, like ``6.1 (5.93 to 6.4 ms)``; empty where the time is exact."""
        if self.is_exact:
            return ""
        texts = [format_time(time_s, 3) for time_s in (self.median_s, self.low_s, self.high_s)]
        if len({text.rpartition(" ")[2] for text in texts}) == 1:
            texts[:2] = [text.rpartition(" ")[0] for text in texts[:2]]
        median, low, high = texts
        return f"{median} ({low} to {high})"

    @property
    def record(self) -> dict[str, object]:
        """Its median, and what it is made of: regime of residuals, what was measured there, is borrowed, samples."""
        found = self.residual
        return {
            "median_s": self.median_s,
            "regime": IDEAL_LINKS if found.is_exact else str(found.regime),
            "rows": found.rows,
            "machines": found.machines,
            "borrowed": found.borrowed or None,
            "samples": len(self.samples_s),
        }

    def quantile_s(self, share: float) -> float:
        """The time below which the measured one is with this probability."""
        if self.is_exact:
            return self.time_s
        centres = self._log_times() + math.log(self.residual.middle)
        spread = self.residual.beside if len(self.samples_s) else self.residual.spread
        return math.exp(quantile(centres, spread, share))

    def _log_times(self) -> FloatArray:
        return np.log(np.atleast_1d(self.samples_s if len(self.samples_s) else np.float64(self.time_s)))

    def __add__(self, other: Interval) -> Interval:
        """Of two passes, one after the other: the same samples, and the residual of the longer pass."""
        both = len(self.samples_s) == len(other.samples_s)
        samples_s = self.samples_s + other.samples_s if both else np.zeros(0)
        longer = self if self.time_s > other.time_s else other
        return Interval(self.time_s + other.time_s, samples_s, longer.residual)

    def over(self, other: Interval) -> tuple[float, float, float]:
        """This time over another: 5, 50 and 95 %. On the same samples, beside what each schedule has of its own."""
        one, two = self._log_times(), other._log_times()
        if len(one) != len(two):
            one, two = np.array([math.log(self.time_s)]), np.array([math.log(other.time_s)])
        spread = math.hypot(self.residual.own, other.residual.own)
        low, middle, high = (math.exp(quantile(one - two, spread, share)) for share in (0.05, 0.5, 0.95))
        return low, middle, high


def residual_interval(time_s: float, regime: Regime, without: str, samples_s: FloatArray | None = None) -> Interval:
    """The interval of a time by the residual of a regime `without` a source; alone, or beside samples of constants."""
    return Interval(time_s, np.zeros(0) if samples_s is None else samples_s, residual_of(regime, without))


def quantile(centres: ArrayLike, spread: float, share: float) -> float:
    """The quantile of an equal mixture of normal distributions with these centres and one standard deviation.

    >>> round(quantile([0.0], 1.0, 0.95), 3), quantile([1.0, 3.0], 0.0, 0.5)
    (1.645, 2.0)
    """
    found = np.asarray(centres, float)
    if not spread:
        return float(np.quantile(found, share))
    low, high, values = float(found.min()) - 9 * spread, float(found.max()) + 9 * spread, found.ravel().tolist()
    scale = 1 / (spread * math.sqrt(2))
    for _ in range(60):
        middle = (low + high) / 2
        # without arrays, which take longer than the few centres
        below = sum(math.erfc((centre - middle) * scale) for centre in values) / (2 * len(values))
        low, high = (middle, high) if below < share else (low, middle)
    return (low + high) / 2
