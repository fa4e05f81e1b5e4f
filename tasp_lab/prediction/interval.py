"""The interval of a predicted time, and what two of them say about an order. Needs no simulator."""

from __future__ import annotations

import math
from collections.abc import Sequence
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

    def to_dict(self) -> dict[str, object]:
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
        return math.exp(quantile(centres, self._spread, share))

    @property
    def _spread(self) -> float:
        return self.residual.beside if len(self.samples_s) else self.residual.spread

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
        centres, spread = self._paired(other)
        low, middle, high = (math.exp(quantile(centres, spread, share)) for share in (0.05, 0.5, 0.95))
        return low, middle, high

    def first_is_faster(self, other: Interval) -> float:
        """The probability that this time is less than another."""
        centres, spread = self._paired(other)
        return float(_below(0.0, centres, spread))

    def _paired(self, other: Interval) -> tuple[FloatArray, float]:
        one, two = self._log_times(), other._log_times()
        if len(one) != len(two):
            one, two = np.array([math.log(self.time_s)]), np.array([math.log(other.time_s)])
        return one - two, math.hypot(self.residual.own, other.residual.own)


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
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _share_below(middle, values, spread) < share else (low, middle)
    return (low + high) / 2


def _below(value: float, centres: FloatArray, spread: float) -> float:
    """The probability that a mixture is below a value."""
    if not spread:
        equal = abs(centres - value) < EQUAL
        return float(((centres < value) & ~equal).mean() + equal.mean() / 2)
    return _share_below(value, centres.tolist(), spread)


def _share_below(value: float, centres: Sequence[float], spread: float) -> float:
    """That of a mixture with a spread; without arrays, which take longer than the few centres."""
    scale = 1 / (spread * math.sqrt(2))
    return sum(math.erfc((centre - value) * scale) for centre in centres) / (2 * len(centres))
