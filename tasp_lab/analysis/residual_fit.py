"""From residuals of the account to the distribution of the factor between a measured and a predicted time.

Errors have two parts: machines differ from each other, and rows of one machine do. The variance between machines is
estimated over a *family* of regimes, because few machines were measured in each: documented networks inside domains,
between them, clouds (whose domains are documented no better than their networks), layers. A family that has too few
machines to tell (`MIN_FREEDOM`) borrows from all of the same work. The spread is that of a machine that is not among
them, with Student's t for the number of machines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from tasp_lab.analysis.residuals import Group, Regime, groups
from tasp_lab.machines.sampling import NORMAL_95

T_95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753, 1.746)
"""95 % points of Student's t by degrees of freedom from 1; with more that of the last."""

MIN_FREEDOM = 2
"""Fewer degrees of freedom do not tell how machines of a family differ."""


@dataclass(frozen=True)
class Residual:
    """The factor of a regime from predicted to measured times, log-normal.

    Parameters
    ----------
    regime, asked : the regime that was measured, the nearest one to what was asked.
    middle : its median.
    spread : standard deviation of its logarithm on a new machine, so that 1.645 of it lead to the 5 and 95 % points.
    constants : what of it the intervals of constants explain, a standard deviation.
    own : standard deviation within one machine: what schedules on it do not have in common.
    rows, machines : how many of the account.
    """

    regime: Regime
    middle: float
    spread: float
    constants: float
    own: float
    rows: int
    machines: int
    asked: Regime

    @property
    def beside(self) -> float:
        """The spread beside samples of constants, which have their part of it."""
        return math.sqrt(max(self.spread**2 - self.constants**2, 0.0))


@cache
def residual_of(regime: Regime, without: str = "") -> Residual:
    """The residual of a regime, `without` the groups of a source or provider.

    For a regime that was not measured, that of the nearest one. No layers were measured on clouds: there it is the
    wider one of layers on documented networks and collectives on clouds.
    """
    known = [each for each in groups() if each.key != without]
    found = _nearest(known, regime)
    if regime.work == "layer" and regime.network == "cloud" and found.regime.network != "cloud":
        clouds = [each for each in known if each.regime.network == "cloud"]
        found = max(found, _nearest(clouds, regime), key=lambda each: each.spread)
    return replace(found, asked=regime)


def fit(known: Sequence[Group], regime: Regime) -> Residual:
    """The distribution in a regime that some of these groups are of."""
    own = [each for each in known if each.regime == regime]
    between, freedom = _between([each for each in known if _family(each.regime) == _family(regime)])
    if freedom < MIN_FREEDOM:
        wider = [each for each in known if _family(each.regime)[::2] == _family(regime)[::2]]
        between, freedom = max(_between(wider), (between, freedom))
    middle = sum(each.mean for each in own) / len(own)
    rows = sum(each.rows for each in own)
    within = sum(each.rows * each.variance for each in own) / max(rows - len(own), 1)
    t_95 = T_95[min(max(freedom, 1), len(T_95)) - 1]
    spread = t_95 / NORMAL_95 * math.sqrt(between * (1 + 1 / len(own)) + within)
    constants = sum(each.constants for each in own) / len(own)
    return Residual(regime, math.exp(middle), spread, math.sqrt(constants), math.sqrt(within), rows, len(own), regime)


def _between(family: Sequence[Group]) -> tuple[float, int]:
    """The variance between machines around the mean of their regime, over a family, and its degrees of freedom."""
    total, freedom = 0.0, 0
    for regime in dict.fromkeys(each.regime for each in family):
        means = [each.mean for each in family if each.regime == regime]
        centre = sum(means) / len(means)
        total += sum((mean - centre) ** 2 for mean in means)
        freedom += len(means) - 1
    return total / max(freedom, 1), freedom


def _family(regime: Regime) -> tuple[str, ...]:
    """The regimes that share the variance between machines."""
    reach = regime.reach if regime.work == "collective" and regime.network == "documented" else ""
    return regime.work, f"{regime.network} {reach}", regime.library


def _nearest(known: Sequence[Group], regime: Regime) -> Residual:
    regimes = dict.fromkeys(each.regime for each in known)
    fits = [(_distance(each, regime), fit(known, each)) for each in regimes]
    return min(fits, key=lambda pair: (pair[0], -pair[1].spread))[1]


def _distance(one: Regime, other: Regime) -> int:
    """How far two regimes are from each other: what matters most weighs most."""
    weights = {"work": 16, "network": 8, "library": 4, "reach": 2, "size": 1}
    return sum(weight for name, weight in weights.items() if getattr(one, name) != getattr(other, name))
