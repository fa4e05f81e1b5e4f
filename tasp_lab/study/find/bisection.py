"""Changes of a state along ascending values: found by bisection between values where it differs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Generic, TypeVar

State = TypeVar("State", bound=Hashable)


@dataclass(frozen=True)
class Change(Generic[State]):
    """A state that changes between two indices of the values: `before` at `low` and below, `after` at `high`."""

    low: int
    high: int
    before: State
    after: State


def changes(
    values: Sequence[float], scan: Sequence[int], state: Callable[[int], State | None], tolerance: float = 0.0
) -> list[Change[State]]:
    """All changes of a state that the scanned indices tell apart, ascending.

    Between two scanned neighbours of different states the one of the first is bisected until it ends, then the next. A
    bisection ends with two adjacent values, with two that differ by `tolerance` at most, or where a state is None: it
    does not exist there. Changes that come and go between neighbours are not seen.

    Parameters
    ----------
    values : ascending, more than 0.
    scan : ascending indices of values; those without a state are left out.
    state : the state at an index, called once for each.

    >>> [(each.low, each.high) for each in changes(range(1, 101), [0, 99], lambda index: index >= 30)]
    [(29, 30)]
    """
    known = cache(state)
    there = [(index, found) for index in scan if (found := known(index)) is not None]
    return [
        change
        for (low, before), (high, after) in pairwise(there)
        if before != after
        for change in _between(values, low, high, before, after, known, tolerance)
    ]


def _between(
    values: Sequence[float],
    low: int,
    high: int,
    before: State,
    after: State,
    state: Callable[[int], State | None],
    tolerance: float,
) -> list[Change[State]]:
    """The changes from one state to another, of which there may be several."""
    last, first = bisected(values, low, high, lambda index: _same(state(index), before), tolerance)
    reached = state(first)
    assert reached is not None, "a bisection ends at states that exist"
    rest = [] if reached == after else _between(values, first, high, reached, after, state, tolerance)
    return [Change(last, first, before, reached), *rest]


def _same(found: State | None, wanted: State) -> bool | None:
    return None if found is None else found == wanted


def bisected(
    values: Sequence[float], low: int, high: int, holds: Callable[[int], bool | None], tolerance: float = 0.0
) -> tuple[int, int]:
    """Two indices between which a predicate ends that holds at `low` and not at `high`.

    They are adjacent, or their values differ by `tolerance` at most, or the predicate is None between them.

    >>> bisected(range(1, 101), 0, 99, lambda index: index < 30)
    (29, 30)
    """
    while high - low > 1 and values[high] > values[low] * (1 + tolerance):
        middle = (low + high) // 2
        found = holds(middle)
        if found is None:
            break
        low, high = (middle, high) if found else (low, middle)
    return low, high
