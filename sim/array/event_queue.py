"""Queues of operations: binary heaps that also move single entries.

An operation is in at most one queue at a time, so all queues share the table of operations, which has the time of each
and where it stands in its heap.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tasp_lab.core.arrays import Int32Array, IntArray, Table


class EventQueue(NamedTuple):
    """Some of the operations, in the order of `due`.

    Attributes
    ----------
    operations : a table with the columns `due` and `place`, which is -1 for an operation that is in no queue.
    heap : int array (operations,), the numbers of those in this queue.
    size : int array (1,), how many these are.
    """

    operations: Table
    heap: Int32Array
    size: IntArray

    @classmethod
    def of(cls, operations: Table) -> EventQueue:
        """An empty queue."""
        return cls(operations, np.empty(len(operations), dtype=np.int32), np.zeros(1, dtype=np.int64))


def first_due(queue: EventQueue) -> float:
    """When the first operation is due."""
    due: float = queue.operations[queue.heap[0]].due
    return due


def put(queue: EventQueue, number: int, due: float) -> None:
    """Add an operation, or change when it is due."""
    at = queue.operations[number].place
    queue.operations[number].due = due
    if at < 0:
        at = queue.size[0]
        queue.size[0] += 1
    _sink(queue, number, _rise(queue, number, at))


def pop(queue: EventQueue) -> int:
    """Remove the operation that is due first."""
    number: int = queue.heap[0]
    queue.operations[number].place = -1
    queue.size[0] -= 1
    if queue.size[0]:
        _sink(queue, queue.heap[queue.size[0]], 0)
    return number


def remove(queue: EventQueue, number: int) -> None:
    """Remove an operation."""
    at = queue.operations[number].place
    queue.operations[number].place = -1
    queue.size[0] -= 1
    last = queue.heap[queue.size[0]]
    if last != number:
        _sink(queue, last, _rise(queue, last, at))


def _rise(queue: EventQueue, number: int, at: int) -> int:
    """Move down what is due later above a free place; returns the place that is free then."""
    due = queue.operations[number].due
    while at:
        above = (at - 1) // 2
        other = queue.heap[above]
        if queue.operations[other].due <= due:
            break
        queue.heap[at] = other
        queue.operations[other].place = at
        at = above
    return at


def _sink(queue: EventQueue, number: int, at: int) -> None:
    """Move up what is due earlier below a free place, and put the operation where it is free then."""
    due, size = queue.operations[number].due, queue.size[0]
    while 2 * at + 1 < size:
        below = 2 * at + 1
        if below + 1 < size and queue.operations[queue.heap[below + 1]].due < queue.operations[queue.heap[below]].due:
            below += 1
        other = queue.heap[below]
        if queue.operations[other].due >= due:
            break
        queue.heap[at] = other
        queue.operations[other].place = at
        at = below
    queue.heap[at] = number
    queue.operations[number].place = at
