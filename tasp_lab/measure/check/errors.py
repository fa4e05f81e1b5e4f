"""How predictions of healthy machines err over the rows of a log: the distribution of log(measured / expected).

A machine has an error that all its calls share, each collective one of its own, and both change slowly with the size:
as much from a size to twice that size as measured tables show (`Residual.step`). So a flat factor is likelier than a
step, and a step likelier where protocols change than among large messages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.stats import multivariate_t

from tasp_lab.core.arrays import FloatArray
from tasp_lab.prediction.residuals import Residual

FREEDOM = 6
"""Degrees of freedom of Student's t: few machines gave the spreads (an assumption)."""

ALIKE = 12.0
"""The error that all calls of a machine share is alike over so many doublings of the size (an assumption)."""

OF_HOST_S = 6e-6
"""What calls take more or less on another host than on that whose constants are known, a standard deviation: processors
differ, and so does one process per GPU from one for all. Healthy public logs reach 0.54 to 0.96 of what is expected
below 64 KiB, where calls take 8 to 20 us (``experiments/logs``)."""

OF_ROW = 0.03
"""What repeated measurements of one call differ by (USP's tables: `tasp_lab.measure.accuracy.table_accuracy.TIE`)."""


class Errors:
    """The errors of rows.

    Parameters
    ----------
    collectives, sizes_bytes, times_s, residuals : of each row; the times are predicted ones.
    """

    def __init__(
        self, collectives: Sequence[str], sizes_bytes: Sequence[int], times_s: FloatArray, residuals: Sequence[Residual]
    ) -> None:
        doublings = np.log2(sizes_bytes)
        apart = abs(doublings[:, None] - doublings)
        # classes of sizes have sharp ends and errors have none, so variances are means over sizes near by
        near = np.exp(-apart)
        near /= near.sum(axis=1, keepdims=True)
        own = near @ [max(each.own**2, 1e-4) for each in residuals]
        shared = near @ [max(each.spread**2 - each.own**2, 1e-4) for each in residuals]
        steps = near @ [each.step**2 for each in residuals]
        # a stationary process with this mean square of differences after one doubling; where that differs from size to
        # size, sizes are as far apart as the process changes between them
        rate = -np.log(np.clip(1 - steps / (2 * own), 0.05, 0.999))
        order = np.argsort(doublings)
        between = np.diff(doublings[order]) * (rate[order][1:] + rate[order][:-1]) / 2
        place = np.empty(len(order))
        place[order] = np.concatenate([[0.0], np.cumsum(between)])
        same = np.equal.outer(np.array(collectives), np.array(collectives))
        self._covariance = (
            np.sqrt(np.outer(shared, shared)) * np.exp(-apart / ALIKE)
            + np.sqrt(np.outer(own, own)) * np.exp(-abs(place[:, None] - place)) * same
            + np.outer(OF_HOST_S / times_s, OF_HOST_S / times_s)
            + np.diag(np.full(len(own), OF_ROW**2))
        )

    def log_density(self, errors: FloatArray, more: float = 0.0) -> float:
        """The logarithm of the density of the errors of all rows.

        Parameters
        ----------
        errors : float array (rows,).
        more : a standard deviation that all rows share beside, and half of it that each has.
        """
        covariance = self._covariance + more**2 + np.diag(np.full(len(errors), (more / 2) ** 2))
        return float(multivariate_t.logpdf(errors, None, covariance, df=FREEDOM))

    def draw(self, random: np.random.Generator, count: int) -> FloatArray:
        """Errors of so many machines; float array (count, rows)."""
        n = len(self._covariance)
        return multivariate_t.rvs(np.zeros(n), self._covariance, FREEDOM, count, random).reshape(count, n)
