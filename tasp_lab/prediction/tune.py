"""Find the options of a schedule that give the shortest predicted time.

Dtypes of messages are not varied: they change the numbers that a layer computes. (What a schedule rounds may depend on
what it sends: ``kv-and-q-rings`` sends results only if queries travel, by default in the layer's dtype.) An option that
is given with another value than its default stays.

All combinations are tried: no schedule has more than 60.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any, NamedTuple

from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedules.attention.options import DEFAULT_OPTIONS, OPTIONS, AttentionOptions
from tasp_lab.schedules.registry import NOT_APPLICABLE, options_of

SEARCHED: Mapping[str, Sequence[object]] = {name: option.tried for name, option in OPTIONS.items() if option.tried}
"""The values that are tried of each searched field of `AttentionOptions`, where it applies to a schedule."""

EQUAL = 1e-9
"""Times that differ by this share are equal: both engines agree to it."""

Axes = Mapping[str, Sequence[object]]
"""The values of fields to try."""


class Tuned(NamedTuple):
    """The best options, their time, and that of the options with which the search began, in seconds."""

    options: AttentionOptions
    time_s: float
    untuned_s: float


def axes_of(name: str, options: AttentionOptions) -> Axes:
    """What is searched for a schedule, given these options.

    >>> axes_of("tasp", AttentionOptions(buffers=2))
    {'trim': [True, False]}
    """
    found = {}
    for field, values in SEARCHED.items():
        is_given = getattr(options, field) != getattr(DEFAULT_OPTIONS, field)
        if field in options_of(name) and not is_given:
            found[field] = [each for each in values if _changed(options, {field: each}) is not None]
    return {field: values for field, values in found.items() if len(values) > 1}


def trials(axes: Axes) -> int:
    """The largest number of combinations that `search` tries.

    >>> trials({"trim": (True, False), "buffers": (2, 3, 4)})
    6
    """
    return prod(len(values) for values in axes.values())


def search(time_s: Callable[[AttentionOptions], float], start: AttentionOptions, axes: Axes) -> Tuned:
    """The options with the shortest time; of equal times, those with the fewest changes.

    Parameters
    ----------
    time_s : the time of options. Options for which it raises one of `NOT_APPLICABLE` are no candidates; raised for
        `start`, it ends the search.
    start : what is tried first.
    axes : the fields to vary, see `axes_of`.
    """
    times = {start: time_s(start)}
    for values in product(*axes.values()):
        options = _changed(start, dict(zip(axes, values, strict=True)))
        if options is not None and options not in times:
            with suppress(*NOT_APPLICABLE):
                times[options] = time_s(options)
    shortest_s = min(times.values())
    close = (options for options, seconds in times.items() if seconds <= (1 + EQUAL) * shortest_s)
    best = min(close, key=lambda options: sum(getattr(options, each) != getattr(start, each) for each in axes))
    return Tuned(best, times[best], times[start])


def _changed(options: AttentionOptions, values: Mapping[str, Any]) -> AttentionOptions | None:
    """The options with other values, or None where these contradict each other."""
    try:
        return replace(options, **values)
    except ScheduleError:
        return None
