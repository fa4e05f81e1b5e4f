"""Identifiability: which parameters a set of measurements determines.

The *effects* of parameters are d log(time) / d log(parameter), one row per measurement and one column per parameter. A
parameter is not identifiable if its column is zero, or if it takes part in a combination of columns that cancels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tasp_lab.core.arrays import BoolArray, FloatArray

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
        partners = listed(names, index, found.cancelled[index], 0.05 * share)
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


def listed(names: Sequence[str], index: int, weights: FloatArray, threshold: float) -> str:
    """The other parameters whose weight exceeds the threshold, as text."""
    others = (name for place, name in enumerate(names) if place != index and abs(weights[place]) > threshold)
    return " and ".join(repr(name) for name in others)
