"""Robust fit of a model's parameters to measured times, with confidence intervals.

**Estimate.** Parameters are positive and fitted as logarithms. A residual is the logarithm of predicted over measured
time, so 1 KiB and 1 GiB have equal weight. Parameters are M-estimates with Huber's loss and his "proposal 2" for the
scale of the noise: measurements within 1.345 standard deviations have full weight, outliers a bounded one.

**Intervals.** 95 % intervals follow from the Jacobian J of the residuals and the asymptotic covariance of the
M-estimate, (J'J)^-1 sum psi^2 / (n - p) / mean(psi')^2 with Huber's correction for small samples, and Student's t with
n - p degrees of freedom. They assume independent noise and a correct model; a wrong model shows in the residuals.

**Identifiability.** The *effects* of parameters are d log(time) / d log(parameter), one row per measurement and one
column per parameter. A parameter is *not identifiable* if its column is zero, if it takes part in a combination of
columns that cancels, if it reaches the limit of the search, or if its interval spans more than a factor of 4. Each has
its reason in words.

Source: P. J. Huber and E. M. Ronchetti, Robust Statistics, 2nd ed., Wiley 2009, sections 7.6 and 7.7.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from scipy.optimize import least_squares
from scipy.stats import norm, t

from tasp_lab.core.arrays import BoolArray, FloatArray
from tasp_lab.core.errors import FitError
from tasp_lab.core.progress import ProgressCallback, no_progress

WIDEST_INTERVAL = 4.0
"""The ratio of the ends of an interval above which a parameter counts as not identifiable."""

_CONFIDENCE = 0.95
_SEARCH_FACTOR = 1e6
"""A parameter stays within this factor of its start, in both directions."""

_TUNING = 1.345
"""Huber's k: 95 % of the efficiency of least squares for normal noise."""

_CONSISTENCY = float(1 - 2 * _TUNING * norm.pdf(_TUNING) - 2 * (1 - _TUNING**2) * norm.sf(_TUNING))
"""The mean of psi^2 for standard normal noise, for which the scale is then the standard deviation."""

_MAX_ROUNDS = 20
"""Rounds of parameters and scale in turn."""

_ROUNDING = 1e-9
"""Residuals below this are rounding errors."""

Predict = Callable[[FloatArray], FloatArray]
"""From the parameters, in the order of their names, to the predicted seconds of all points."""


class Estimate(NamedTuple):
    """A fitted value with its 95 % interval; `why` is the reason if it is not identifiable, otherwise empty."""

    value: float
    low: float
    high: float
    why: str = ""

    @property
    def identifiable(self) -> bool:
        """Whether the points tell it."""
        return not self.why


def fit(
    predict: Predict, measured_s: FloatArray, start: Mapping[str, float], progress: ProgressCallback = no_progress
) -> dict[str, Estimate]:
    """Fit the parameters named in `start` to measured times in seconds, one per point.

    `predict` maps the parameters, an array in the order of `start`, to the times of all points. It should be
    continuous. The fit is a local one: `start` should be right within a factor of about ten.
    `progress` is called with the noise that each round finds.

    >>> size_bytes = np.array([1e3, 1e4, 1e5, 1e6, 1e7])
    >>> found = fit(lambda p: p[0] + size_bytes / p[1], 5e-6 + size_bytes / 50e9, {"latency_s": 1e-6, "bandwidth": 1e9})
    >>> {name: (f"{parameter.value:.4g}", parameter.identifiable) for name, parameter in found.items()}
    {'latency_s': ('5e-06', True), 'bandwidth': ('5e+10', True)}

    Raises `FitError` if there are not more points than parameters.
    """
    names, count, points = list(start), len(start), len(measured_s)
    if points <= count:
        raise FitError(
            f"{points} points cannot determine {count} parameters ({', '.join(names)}), expected {count + 1} or more"
        )
    origin = np.array(list(start.values()))

    def residuals(logarithms: FloatArray) -> FloatArray:
        return np.asarray(np.log(predict(origin * np.exp(logarithms)) / measured_s))

    at, found, jacobian, scale = _estimate(residuals, count, progress)
    of_jacobian, pull = directions(jacobian), _TUNING * scale
    # the factor of (J'J)^-1 in the covariance of an M-estimate, with Huber's correction for few points
    share = float((np.abs(found) < pull).mean())
    correction = 1 + count / points * (1 - share) / share
    variance = correction**2 * (np.clip(found, -pull, pull) ** 2).sum() / (points - count) / share**2
    deviations = np.sqrt(variance * np.diag(of_jacobian.covariance)) / of_jacobian.lengths
    widths = deviations * float(t.ppf((1 + _CONFIDENCE) / 2, points - count))
    estimates = {}
    for index, name in enumerate(names):
        value, factor = float(origin[index] * np.exp(at[index])), float(np.exp(min(widths[index], 300.0)))
        low, high, why = value / factor, value * factor, reason(names, index, of_jacobian)
        if not why and abs(at[index]) > 0.999 * np.log(_SEARCH_FACTOR):
            why = f"it reached the limit of the search, a factor of {_SEARCH_FACTOR:.0e} from its start"
        if why:
            low, high = 0.0, np.inf
        elif (span := high / low) > WIDEST_INTERVAL:
            why = f"its 95 % interval spans a factor of {f'{span:.3g}' if span < 1000 else '>1000'}"
            spread = np.sqrt(np.diag(of_jacobian.covariance))
            correlations = of_jacobian.covariance[index] / np.where(spread > 0, spread, 1.0) / spread[index]
            if partners := _partners(names, index, correlations, 0.95):
                why += f"; {partners} can compensate for it"
        estimates[name] = Estimate(value, low, high, why)
    return estimates


def _estimate(
    residuals: Callable[[FloatArray], FloatArray], count: int, progress: ProgressCallback
) -> tuple[FloatArray, FloatArray, FloatArray, float]:
    """Estimate parameters and scale alternately until the scale converges.

    The logarithms of parameter over start, the residuals and the Jacobian there, and the standard deviation of the
    noise.
    """
    known: dict[bytes, FloatArray] = {}

    def jacobian(at: FloatArray) -> FloatArray:
        key = at.tobytes()
        if key not in known:  # each minimisation begins where the one before has ended
            known[key] = effects_at(residuals, at)
        return known[key]

    def minimise(begin: FloatArray, loss: Literal["soft_l1", "huber"], pull: float) -> FloatArray:
        limit = np.log(_SEARCH_FACTOR)
        result = least_squares(
            residuals, begin, jacobian, (-limit, limit), loss=loss, f_scale=pull, xtol=1e-10, ftol=1e-12, gtol=1e-14
        )
        return np.asarray(result.x, float)

    # the first minimisation knows no scale, so it takes one that real noise seldom exceeds
    at = minimise(np.zeros(count), "soft_l1", 0.1)
    found = residuals(at)
    scale = max(float(np.median(np.abs(found))) / norm.ppf(0.75), _ROUNDING)
    for rounds in range(_MAX_ROUNDS):
        progress(f"round {rounds + 1} of at most {_MAX_ROUNDS}: noise of {scale:.1%}")
        at = minimise(at, "huber", _TUNING * scale)
        found = residuals(at)
        before_round = scale
        # Huber's proposal 2: the standard deviation at which the clipped residuals have their expected variance
        for _ in range(100):
            clipped = np.clip(found, -_TUNING * scale, _TUNING * scale)
            before, scale = scale, float(np.sqrt((clipped**2).sum() / ((len(found) - count) * _CONSISTENCY)))
            scale = max(scale, _ROUNDING)
            if abs(scale - before) <= 1e-3 * before:
                break
        if abs(scale - before_round) <= 0.01 * before_round:
            break
    return at, found, jacobian(at), scale


# Which parameters a set of measurements determines.


NO_EFFECT = 1e-4
"""Effects below this count as zero: doubling the parameter changes no predicted time by more than about this share."""

COLLINEAR = 1e-3
"""Combinations of columns of unit length that are shorter than this count as cancelled."""

_STEP = 1e-4
"""Relative step of the central differences: small, and far above the rounding of a prediction."""


def effects_at(log_times: Callable[[FloatArray], FloatArray], logarithms: FloatArray) -> FloatArray:
    """The effects (measurements x parameters) of parameters at these logarithms, by central differences."""
    steps = _STEP * np.eye(len(logarithms))
    columns = [(log_times(logarithms + step) - log_times(logarithms - step)) / (2 * _STEP) for step in steps]
    return np.column_stack(columns)


class Directions(NamedTuple):
    """Singular value decomposition of the columns of effects, scaled to unit length.

    Attributes
    ----------
    lengths : of the columns; 1 where a parameter has no effect.
    has_effect : whether a parameter has an effect.
    covariance : pseudo-inverse of the scaled columns' Gram matrix, over the directions that have an effect.
    cancelled : projection onto the combinations of parameters with an effect that change no predicted time.
    """

    lengths: FloatArray
    has_effect: BoolArray
    covariance: FloatArray
    cancelled: FloatArray


def directions(effects: FloatArray) -> Directions:
    """The directions that effects of the shape (measurements, parameters) determine."""
    has_effect = np.abs(effects).max(axis=0) >= NO_EFFECT
    lengths = np.where(has_effect, np.linalg.norm(effects, axis=0), 1.0)
    scaled = np.where(has_effect, effects / lengths, 0.0)
    _, singular, combinations = np.linalg.svd(scaled, full_matrices=len(effects) < effects.shape[1])
    singular = np.pad(singular, (0, len(combinations) - len(singular)))
    is_cancelled = singular < COLLINEAR
    inverse = np.where(is_cancelled, 0.0, 1 / np.where(is_cancelled, 1.0, singular))
    cancelled = combinations[is_cancelled].T @ combinations[is_cancelled]
    return Directions(lengths, has_effect, (combinations.T * inverse**2) @ combinations, cancelled)


def reason(names: Sequence[str], index: int, found: Directions) -> str:
    """Why a parameter is not identifiable; empty if it is."""
    if not found.has_effect[index]:
        return "no predicted time depends on it"
    share = found.cancelled[index, index]
    if share > COLLINEAR:
        partners = _partners(names, index, found.cancelled[index], 0.05 * share)
        return f"predicted times depend only on a combination of it with {partners}"
    return ""


def not_identifiable(names: Sequence[str], effects: FloatArray) -> dict[str, str]:
    """The parameters that are not identifiable beside those before them, each with the reason.

    Of parameters that act only in combination, the first is kept.

    >>> effects = np.array([[1.0, 2.0, 0.0, 0.0], [1.0, 2.0, 0.0, 1.0]])
    >>> list(not_identifiable(["a", "b", "c", "d"], effects))
    ['b', 'c']
    """
    reasons: dict[str, str] = {}
    kept: list[int] = []
    for index, name in enumerate(names):
        columns = [*kept, index]
        if why := reason([names[column] for column in columns], len(kept), directions(effects[:, columns])):
            reasons[name] = why
        else:
            kept.append(index)
    return reasons


def _partners(names: Sequence[str], index: int, weights: FloatArray, threshold: float) -> str:
    """The other parameters whose weight exceeds the threshold, as text."""
    others = (name for place, name in enumerate(names) if place != index and abs(weights[place]) > threshold)
    return " and ".join(repr(name) for name in others)
