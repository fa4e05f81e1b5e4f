"""Fitting the parameters of a model to measured times, with an honest word on what the measurements determine.

**What is fitted.** All parameters are positive and are fitted in their logarithms; a residual is the logarithm of
predicted over measured, so that a size of 1 KiB counts as much as one of 1 GiB. Parameters are M-estimates with
Huber's loss, and the scale of the noise his "proposal 2": measurements within 1.345 standard deviations count in full,
those further away, outliers, with a bounded pull.

**How sure it is.** 95 % intervals follow from the Jacobian J of the residuals and the asymptotic covariance of the
M-estimate, (J'J)^-1 sum psi^2 / (n - p) / mean(psi')^2 with the correction of Huber for small samples, and Student's t
with n - p degrees of freedom. They hold for noise that is independent from point to point, and for a model that is
right; they do not see that a model is wrong, which the residuals show.

**What cannot be told.** A parameter is *not identifiable* if it changes no prediction, if it only changes predictions
as a combination of others does, or if its interval spans more than a factor of 4. The reason is given in words.

Source: P. J. Huber and E. M. Ronchetti, Robust Statistics, 2nd ed., Wiley 2009, sections 7.6 and 7.7.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from scipy.optimize import least_squares
from scipy.stats import norm, t

from tasp_lab.arrays import FloatArray
from tasp_lab.errors import FitError

WIDEST_INTERVAL = 4.0
"""The ratio of the ends of an interval above which a parameter counts as not identifiable."""

_CONFIDENCE = 0.95
_SEARCH_FACTOR = 1e6
"""A parameter stays within this factor of its start, either way."""

_STEP = 1e-4
"""Relative step of the differences that make the Jacobian: small, and far above the rounding of a prediction."""

_NO_EFFECT = 1e-4
"""A parameter has none if doubling it changes no prediction by more than about this share."""

_COLLINEAR = 1e-4
"""Smallest singular value, of columns of length 1, of a combination that has an effect of its own."""

_TUNING = 1.345
"""Huber's k: as good as least squares to 95 % for normal noise."""

_CONSISTENCY = float(1 - 2 * _TUNING * norm.pdf(_TUNING) - 2 * (1 - _TUNING**2) * norm.sf(_TUNING))
"""The mean of psi^2 for standard normal noise, so that the scale is the standard deviation there."""

_ROUNDING = 1e-9
"""Residuals below this are rounding; exact data have no other."""

Predict = Callable[[FloatArray], FloatArray]
"""From the parameters, in the order of their names, to the predicted seconds of all points."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A fitted value with its 95 % interval; `why` says why it is not identifiable, and is empty if it is."""

    value: float
    low: float
    high: float
    identifiable: bool
    why: str = ""


@dataclass(frozen=True, eq=False)
class Fit:
    """What the measurements say. `residuals` are predicted / measured - 1, one per point."""

    parameters: Mapping[str, Parameter]
    residuals: FloatArray
    mean_relative_error: float
    degrees_of_freedom: int


class _Estimate(NamedTuple):
    """Logarithms of parameter over start, residuals and Jacobian there, and the standard deviation of the noise."""

    logarithms: FloatArray
    residuals: FloatArray
    jacobian: FloatArray
    scale: float


def fit(predict: Predict, measured_s: FloatArray, start: Mapping[str, float]) -> Fit:
    """Fit the parameters named in `start`, beginning there, to measured times in seconds, one per point.

    `predict` takes the parameters as an array in the order of `start` and gives the times of all points. It should be
    continuous; the fit is the one that is found from `start`, which should be right within a factor of ten or so.

    >>> size_bytes = np.array([1e3, 1e4, 1e5, 1e6, 1e7])
    >>> found = fit(lambda p: p[0] + size_bytes / p[1], 5e-6 + size_bytes / 50e9, {"latency_s": 1e-6, "bandwidth": 1e9})
    >>> {name: (f"{parameter.value:.4g}", parameter.identifiable) for name, parameter in found.parameters.items()}
    {'latency_s': ('5e-06', True), 'bandwidth': ('5e+10', True)}

    Raises `FitError` if there are not more points than parameters, or if a time or a start is not a positive number.
    """
    names, measured = list(start), np.asarray(measured_s, float)
    _check(names, measured, start)
    origin = np.array([start[name] for name in names])

    def residuals(logarithms: FloatArray) -> FloatArray:
        return _residuals(np.asarray(predict(origin * np.exp(logarithms)), float), measured)

    estimate = _estimate(residuals, len(names))
    degrees_of_freedom = len(measured) - len(names)
    parameters = _parameters(names, origin * np.exp(estimate.logarithms), estimate, degrees_of_freedom)
    relative = np.expm1(estimate.residuals)
    return Fit(parameters, relative, float(np.abs(relative).mean()), degrees_of_freedom)


def _check(names: Sequence[str], measured: FloatArray, start: Mapping[str, float]) -> None:
    if measured.ndim != 1 or not names:
        raise FitError(f"{measured.ndim}-dimensional times and {len(names)} parameters, expected a row and 1 or more")
    if len(measured) <= len(names):
        raise FitError(
            f"{len(measured)} points cannot determine {len(names)} parameters ({', '.join(names)}), "
            f"expected {len(names) + 1} or more"
        )
    for point, time_s in enumerate(measured.tolist()):
        if not 0 < time_s < np.inf:
            raise FitError(f"point {point}: measured {time_s} s, expected a positive time")
    for name, value in start.items():
        if not 0 < value < np.inf:
            raise FitError(f"parameter {name!r} starts at {value}, expected a positive number")


def _residuals(predicted: FloatArray, measured: FloatArray) -> FloatArray:
    """Logarithms of predicted over measured."""
    if predicted.shape != measured.shape:
        raise FitError(f"the model predicts times of the shape {predicted.shape}, expected {measured.shape}")
    bad = np.flatnonzero(~(np.isfinite(predicted) & (predicted > 0)))
    if len(bad):
        raise FitError(f"the model predicts {predicted[bad[0]]} s for point {bad[0]}, expected a positive time")
    ratios: FloatArray = np.log(predicted / measured)
    return ratios


def _estimate(residuals: Callable[[FloatArray], FloatArray], count: int) -> _Estimate:
    """Parameters and scale in turn, until the scale stands still."""

    def jacobian(at: FloatArray) -> FloatArray:
        steps = _STEP * np.eye(count)
        return np.column_stack([(residuals(at + step) - residuals(at - step)) / (2 * _STEP) for step in steps])

    def minimise(begin: FloatArray, loss: Literal["soft_l1", "huber"], pull: float) -> FloatArray:
        limit = np.log(_SEARCH_FACTOR)
        result = least_squares(
            residuals, begin, jacobian, (-limit, limit), loss=loss, f_scale=pull, xtol=1e-10, ftol=1e-12, gtol=1e-14
        )
        return np.asarray(result.x, float)

    at = minimise(np.zeros(count), "soft_l1", 0.1)
    found = residuals(at)
    scale = max(float(np.median(np.abs(found))) / norm.ppf(0.75), _ROUNDING)
    for _ in range(20):
        at = minimise(at, "huber", _TUNING * scale)
        found = residuals(at)
        before, scale = scale, _scale(found, scale, count)
        if abs(scale - before) <= 0.01 * before:
            break
    return _Estimate(at, found, jacobian(at), scale)


def _scale(residuals: FloatArray, scale: float, count: int) -> float:
    """Huber's proposal 2: the standard deviation for which the clipped residuals are as large as they should be."""
    for _ in range(100):
        clipped = np.clip(residuals, -_TUNING * scale, _TUNING * scale)
        before, scale = scale, float(np.sqrt((clipped**2).sum() / ((len(residuals) - count) * _CONSISTENCY)))
        scale = max(scale, _ROUNDING)
        if abs(scale - before) <= 1e-3 * before:
            break
    return scale


def _parameters(
    names: Sequence[str], values: FloatArray, estimate: _Estimate, degrees_of_freedom: int
) -> dict[str, Parameter]:
    """Each parameter with its interval and, where it has none worth the name, the reason."""
    lengths = np.linalg.norm(estimate.jacobian, axis=0)
    is_silent = np.abs(estimate.jacobian).max(axis=0) < _NO_EFFECT
    directions = np.where(is_silent, 0.0, estimate.jacobian / np.where(is_silent, 1.0, lengths))
    _, singular, combinations = np.linalg.svd(directions, full_matrices=False)
    is_lost = singular < _COLLINEAR
    inverse = np.where(is_lost, 0.0, 1 / np.where(is_lost, 1.0, singular))
    covariance = (combinations.T * inverse**2) @ combinations
    lost = combinations[is_lost].T @ combinations[is_lost]
    deviations = np.sqrt(_variance(estimate, len(names)) * np.diag(covariance)) / np.where(is_silent, 1.0, lengths)
    widths = deviations * float(t.ppf((1 + _CONFIDENCE) / 2, degrees_of_freedom))
    parameters = {}
    for index, name in enumerate(names):
        value, factor = float(values[index]), float(np.exp(min(widths[index], 300.0)))
        low, high = value / factor, value * factor
        if why := _unknown(names, index, estimate, lost):
            low, high = 0.0, np.inf
        elif high > WIDEST_INTERVAL * low:
            why = _too_wide(names, index, high / low, covariance)
        parameters[name] = Parameter(value, low, high, not why, why)
    return parameters


def _unknown(names: Sequence[str], index: int, estimate: _Estimate, lost: FloatArray) -> str:
    """Why nothing is known of a parameter, if so; `lost` projects on the changes that no prediction shows."""
    if np.abs(estimate.jacobian[:, index]).max() < _NO_EFFECT:
        return "near the value found it changes no prediction"
    if lost[index, index] > _COLLINEAR:
        partners = _listed(names, index, lost[index], 0.05 * lost[index, index])
        return f"only a combination of it with {partners} changes a prediction"
    if abs(estimate.logarithms[index]) > 0.999 * np.log(_SEARCH_FACTOR):
        return f"it went to the limit of the search, {_SEARCH_FACTOR:.0e} from its start"
    return ""


def _too_wide(names: Sequence[str], index: int, factor: float, covariance: FloatArray) -> str:
    """That an interval is too wide, and which parameters could make up for an error of this one."""
    deviations = np.sqrt(np.diag(covariance))
    correlations = covariance[index] / np.where(deviations > 0, deviations, 1.0) / deviations[index]
    partners = _listed(names, index, correlations, 0.95)
    why = f"its 95 % interval spans a factor of {factor:.3g}"
    return f"{why}; {partners} can make up for it" if partners else why


def _variance(estimate: _Estimate, count: int) -> float:
    """The factor of (J'J)^-1 in the covariance of an M-estimate."""
    residuals, pull = estimate.residuals, _TUNING * estimate.scale
    points = len(residuals)
    share = float((np.abs(residuals) < pull).mean())
    correction = 1 + count / points * (1 - share) / share
    return float(correction**2 * (np.clip(residuals, -pull, pull) ** 2).sum() / (points - count) / share**2)


def _listed(names: Sequence[str], index: int, weights: FloatArray, least: float) -> str:
    """The other parameters whose weight is not small."""
    others = (name for place, name in enumerate(names) if place != index and abs(weights[place]) > least)
    return " and ".join(repr(name) for name in others)
