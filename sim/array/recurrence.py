"""Contention-free programs: times by a recurrence over steps, for all classes at once.

If every constraint is passed by one hop of one ring only, each transfer has the rate of its narrowest constraint or of
its own limit. It starts when the previous transfer on its lane has left and its block is available, so the times of a
step are maxima and sums of those of earlier steps.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from sim.array.event_loop import Record
from sim.array.max_min import SAME, FlowDemand, Share, fair_shares
from sim.array.operations import BLOCK, LANE
from sim.array.quotient import Program
from tasp_lab.arrays import BoolArray, FloatArray, IntArray


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
    passes = Counter(constraint for path in program.paths for constraint, _ in path)
    return (
        program.operations.repeats > 1
        and max(passes.values(), default=1) == 1
        and all(count == 1 for path in program.paths for _, count in path)
        and max(program.hosts) < 0
    )


def end_s(program: Program) -> float:
    """The end of the last transfer of a contention-free program, in seconds."""
    return float(max(step.end_s.max() for step in _steps(program)))


def record_of(program: Program) -> Record:
    """The record of a contention-free program."""
    shares = _shares(program)
    columns = zip(*_steps(program), strict=True)
    free_s, there_s, start_s, launched_s, sent_s, arrived_s, waited_for = (np.concatenate(each) for each in columns)
    flowing_s = (sent_s - launched_s).tolist()
    classes, variant = len(program.kinds), program.operations.variant
    bounds = {
        number: [(shares[variant(number // classes)][number % classes].bottlenecks, seconds)]
        for number, seconds in enumerate(flowing_s)
    }
    return Record(
        free_s=free_s.tolist(),
        there_s=there_s.tolist(),
        start_s=start_s.tolist(),
        launched_s=launched_s.tolist(),
        end_s=arrived_s.tolist(),
        waited_for=waited_for.tolist(),
        bounds=bounds,
    )


def _shares(program: Program) -> list[list[Share]]:
    """The share of each class by variant, without contention."""
    known: dict[FlowDemand, Share] = {}

    def share(traffic: FlowDemand) -> Share:
        if traffic not in known:
            known[traffic] = fair_shares([traffic], program.capacity_bytes_per_s)[0]
        return known[traffic]

    by_class = zip(program.paths, program.costs, strict=True)
    rows = [[share(FlowDemand(path, cost.max_bytes_per_s)) for cost in costs] for path, costs in by_class]
    return [list(column) for column in zip(*rows, strict=True)]


def _steps(program: Program) -> Iterator[_Step]:
    launch_s, flow_s, latency_s = _durations(program)
    before, lag = _hop_before(program)
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
    costs = list(zip(*program.costs, strict=True))
    rates = np.array([[share.bytes_per_s for share in row] for row in _shares(program)])
    launch_s = np.array([[cost.launch_s for cost in row] for row in costs])
    wire_bytes = np.array([[cost.wire_bytes for cost in row] for row in costs])
    return launch_s, wire_bytes / rates, np.array([[cost.latency_s for cost in row] for row in costs])


def _hop_before(program: Program) -> tuple[IntArray, int]:
    """For each class the one whose block it forwards, and the number of steps between them."""
    classes = len(program.kinds)
    before = np.zeros(classes, dtype=np.int64)
    lag = 1
    for each, followers in enumerate(program.after_arrived):
        for offset, _ in followers:
            lag, follower = divmod(each + offset, classes)
            before[follower] = each
    return before, lag
