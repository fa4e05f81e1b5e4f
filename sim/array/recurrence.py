"""Contention-free programs: times by a recurrence over steps, for all classes at once.

If every constraint is passed by one hop of one ring only, each transfer has the rate of its narrowest constraint or of
its own limit. It starts when the previous transfer on its lane has left and its block is available, so the times of a
step are maxima and sums of those of earlier steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from sim.array.max_min import SAME
from sim.array.quotient import Program
from sim.array.timeline import Bounds, Record, times_table
from tasp_lab.core.arrays import BoolArray, FloatArray, IntArray
from tasp_lab.schedule.dependencies import BLOCK, LANE


class _Step(NamedTuple):
    """The times of the transfers of one step, in seconds, and the cause of waiting; arrays (classes,)."""

    free_s: FloatArray
    there_s: FloatArray
    start_s: FloatArray
    launched_s: FloatArray
    sent_s: FloatArray
    end_s: FloatArray
    waited_for: IntArray


def is_contention_free(program: Program) -> bool:
    """Whether a program is of rings whose hops share neither constraints nor hosts."""
    plan = program.plan
    passes = np.bincount(plan.passes["constraint"], plan.passes["count"])
    has_hosts = plan.rows["host"][: plan.classes].max(initial=-1) >= 0
    return program.operations.repeats > 1 and passes.max(initial=0) <= 1 and not has_hosts


def end_s(program: Program) -> float:
    """The end of the last transfer of a contention-free program, in seconds; the times are those of `_steps`."""
    operations = program.operations
    variants = [operations.variant(step) for step in range(operations.repeats)]
    return float(last_end_s(_durations(program), variants, *hop_before(program)))


def last_end_s(
    durations_s: tuple[FloatArray, FloatArray, FloatArray], variants: Sequence[int], before: IntArray, lag: int
) -> FloatArray:
    """The end of the last transfer, in seconds.

    Parameters
    ----------
    durations_s : of launches, flows and latencies; float arrays (variants, classes, ...). Further axes are other sizes
        of the same rings, and axes of the result.
    variants : the variant of each step.
    before, lag : see `hop_before`.
    """
    launches_s, flows_s, latencies_s = durations_s
    ends: deque[FloatArray] = deque(maxlen=lag)
    sent_s = latest_s = np.zeros(launches_s.shape[1:])
    for step, variant in enumerate(variants):
        start_s = np.maximum(sent_s, ends[0][before]) if step >= lag else sent_s
        sent_s = start_s + launches_s[variant] + flows_s[variant]
        ends.append(sent_s + latencies_s[variant])
        latest_s = np.maximum(latest_s, ends[-1])
    return np.asarray(latest_s.max(axis=0))


def record_of(program: Program) -> Record:
    """The record of a contention-free program."""
    plan, steps = program.plan, list(_steps(program))
    free_s, there_s, start_s, launched_s, sent_s, arrived_s, waited_for = map(np.concatenate, zip(*steps, strict=True))
    times = times_table(plan.size)
    times["free_s"], times["there_s"], times["start_s"], times["launched_s"] = free_s, there_s, start_s, launched_s
    times["end_s"], times["waited_for"] = arrived_s, waited_for
    bits = _bottlenecks(program)[[program.operations.variant(step) for step in range(len(steps))]].ravel()
    return Record(times, Bounds(plan, np.arange(plan.size + 1), bits, sent_s - launched_s))


def _rates(program: Program) -> FloatArray:
    """The rate of each class in bytes/s, without contention; a float array (variants, classes)."""
    return np.minimum(narrowest_bytes_per_s(program), _of_costs(program, "limit"))


def narrowest_bytes_per_s(program: Program) -> FloatArray:
    """The capacity of the narrowest constraint that each class passes; a float array (classes,)."""
    first = program.plan.rows["first_pass"]
    capacity = np.append(program.capacity_bytes_per_s[program.plan.passes["constraint"]], np.inf)
    return np.where(np.diff(first) > 0, np.minimum.reduceat(capacity, first[:-1]), np.inf)


def _bottlenecks(program: Program) -> IntArray:
    """The bits of `Bounds` of each class; an int array (variants, classes)."""
    plan, rates = program.plan, _rates(program)
    first, bits = plan.rows["first_pass"], np.zeros(rates.shape, dtype=np.int64)
    for at in range(int(np.diff(first).max(initial=0))):
        longer = np.flatnonzero(np.diff(first) > at)
        capacity = program.capacity_bytes_per_s[plan.passes["constraint"][first[longer] + at]]
        bits[:, longer] |= (capacity <= rates[:, longer] * (1 + SAME)).astype(np.int64) << at
    return bits


def _of_costs(program: Program, column: str) -> FloatArray:
    """A column of the costs of each class; a float array (variants, classes)."""
    plan = program.plan
    of_classes: FloatArray = plan.costs[column][plan.cost].reshape(plan.variants, plan.classes)
    return of_classes


def _steps(program: Program) -> Iterator[_Step]:
    launch_s, flow_s, latency_s = _durations(program)
    before, lag = hop_before(program)
    none = np.zeros(len(before))
    past: deque[_Step] = deque(maxlen=lag)
    for step in range(program.operations.repeats):
        variant = program.operations.variant(step)
        free_s = past[-1].sent_s if past else none
        there_s = past[0].end_s[before] if step >= lag else none
        start_s = np.maximum(free_s, there_s)
        launched_s = start_s + launch_s[variant]
        sent_s = launched_s + flow_s[variant]
        at_once = latency_s[program.operations.variant(max(step - lag, 0))][before] == 0
        waited_for = np.where(_awaited(free_s, there_s, at_once), BLOCK, LANE if past else -1)
        past.append(_Step(free_s, there_s, start_s, launched_s, sent_s, sent_s + latency_s[variant], waited_for))
        yield past[-1]


def _awaited(free_s: FloatArray, there_s: FloatArray, at_once: BoolArray) -> BoolArray:
    """Whether a block was waited for; an arrival without latency counts as after the sends of its instant."""
    later = there_s * (1 - SAME) > free_s
    return later | (at_once & (there_s > 0) & (there_s * (1 + SAME) >= free_s))


def _durations(program: Program) -> tuple[FloatArray, FloatArray, FloatArray]:
    """The durations of launches, flows and latencies, in seconds; float arrays (variants, classes)."""
    launch_s, wire_bytes, latency_s = (_of_costs(program, each) for each in ("launch_s", "wire_bytes", "latency_s"))
    return launch_s, wire_bytes / _rates(program), latency_s


def hop_before(program: Program) -> tuple[IntArray, int]:
    """For each class the one whose block it forwards, and the number of steps between them."""
    plan = program.plan
    first = plan.rows["if_arrived"][:-1]
    has_next = first < plan.rows["if_sent"][1:]
    classes = np.arange(plan.classes)[has_next]
    later = classes + plan.after["offset"][first[has_next]]
    before = np.zeros(plan.classes, dtype=np.int64)
    before[later % plan.classes] = classes
    return before, int(later[0]) // plan.classes
