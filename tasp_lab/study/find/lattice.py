"""The values that an axis may have between two ends, in ascending order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from tasp_lab.core.errors import StudyError
from tasp_lab.study.find.moved import WHOLE_AXES

TOLERANCE = 0.02
"""A value is found to 2 %, or to the lattice where that is coarser."""

STEPPED = ("seq", "heads", "head_dim", "window", "cached_keys")
"""Axes of large numbers, whose values have a common divisor."""


def lattice(
    axis: str, scan: Sequence[float], *, multiple: int = 1, heads: int = 1, tolerance: float = TOLERANCE
) -> Sequence[float]:
    """The values of an axis between the ends of `scan`, those of `scan` among them.

    Lengths, heads and the like are multiples of a step between any two scanned neighbours: the greatest common divisor
    of all scanned values, halved while it is more than `tolerance` of the lower neighbour and stays a multiple of
    `multiple`, what schedules need. KV heads divide the `heads`. Factors are a geometric series of steps of at most
    `tolerance`. All others are whole numbers.

    >>> found = lattice("seq", [8192, 16384, 32768], multiple=16)
    >>> len(found), found[1] - found[0], found[-1] - found[-2]
    (129, 128, 256)
    >>> lattice("kv_heads", [1, 8], heads=32)
    [1, 2, 4, 8]

    Raises `StudyError` for an empty interval.
    """
    values = sorted(set(scan))
    if len(values) < 2:
        raise StudyError(f"axis {axis!r}: the interval is empty, expected two values or more")
    if axis not in WHOLE_AXES:
        return _factors(values, tolerance)
    whole = [int(each) for each in values]
    if axis == "kv_heads":
        return [each for each in range(whole[0], whole[-1] + 1) if heads % each == 0 or each in whole]
    first = math.gcd(*whole) if axis in STEPPED else 1
    steps = [_step(first, multiple, tolerance * low) for low in whole]
    between = zip(pairwise(whole), steps, strict=False)
    return [*(each for ends, step in between for each in range(*ends, step)), whole[-1]]


def _step(first: int, multiple: int, most: float) -> int:
    """A step, halved while it is more than `most` and remains a multiple."""
    step = first
    while step > max(most, 1) and step % (2 * multiple) == 0:
        step //= 2
    return step


def _factors(values: Sequence[float], tolerance: float) -> list[float]:
    """A geometric series between any two neighbours."""
    found = []
    for low, high in pairwise(values):
        steps = math.ceil(math.log(high / low) / math.log1p(tolerance))
        found += [low * (high / low) ** (index / steps) for index in range(steps)]
    return [*found, values[-1]]
