"""The record of a simulated program: the times of its operations, and what bounded their flows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sim.array.compiled import table
from sim.array.quotient import Plan
from tasp_lab.core.arrays import FloatArray, Int32Array, IntArray, Table

Bound = tuple[tuple[int, ...], float]
"""Bottlenecks: classes of constraints, none for the flow's own limit; and the seconds during which they applied."""


def times_table(operations: int) -> Table:
    """The times of each operation in seconds, and its last cause of waiting, -1: none; before the first event.

    `free_s` is when the previous operation on its lane had left, `there_s` when its last block was available.
    """
    times: Table = table(
        operations, free_s="f8", there_s="f8", start_s="f8", launched_s="f8", end_s="f8", waited_for="i4"
    )
    times["waited_for"] = -1
    return times


@dataclass(frozen=True, eq=False)
class Bounds:
    """The successive bottlenecks of each operation, by its number.

    Attributes
    ----------
    first : int array (operations + 1,), the range of each operation in the other arrays.
    bits, seconds : arrays (bounds,), bit k for pass k of its class, and for how long.
    """

    plan: Plan
    first: IntArray
    bits: IntArray
    seconds: FloatArray

    @classmethod
    def of_log(cls, plan: Plan, log: Table) -> Bounds:
        """The bounds in a log, see `sim.array.flows`."""
        log = log[np.argsort(log["number"], kind="stable")]
        first = np.searchsorted(log["number"], np.arange(plan.size + 1))
        return cls(plan, first, log["bottlenecks"], log["seconds"])

    def __getitem__(self, number: int) -> list[Bound]:
        first, bits, seconds = self._lists
        index, bounds = number % self.plan.classes, range(first[number], first[number + 1])
        return [(self._names(index, bits[each]), seconds[each]) for each in bounds]

    def items(self) -> Iterator[tuple[int, list[Bound]]]:
        """The operations that have bottlenecks, with these."""
        return ((number, self[number]) for number in np.flatnonzero(np.diff(self.first)).tolist())

    @cached_property
    def _lists(self) -> tuple[list[int], list[int], list[float]]:
        """The arrays as lists, which are faster for single entries."""
        return self.first.tolist(), self.bits.tolist(), self.seconds.tolist()

    def _names(self, index: int, bits: int) -> tuple[int, ...]:
        return tuple([constraint for at, constraint in enumerate(self.plan.path(index)) if bits >> at & 1])


class Record:
    """The record of a program: the columns of `times_table`, and the bounds."""

    def __init__(self, times: Table, bounds: Bounds) -> None:
        self.free_s: FloatArray = times["free_s"]
        self.there_s: FloatArray = times["there_s"]
        self.start_s: FloatArray = times["start_s"]
        self.launched_s: FloatArray = times["launched_s"]
        self.end_s: FloatArray = times["end_s"]
        self.waited_for: Int32Array = times["waited_for"]
        self.bounds = bounds

    def times(self) -> tuple[FloatArray, ...]:
        """All times, in order."""
        return self.free_s, self.there_s, self.start_s, self.launched_s, self.end_s
