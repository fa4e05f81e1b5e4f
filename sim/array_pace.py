"""Programs in which no two transfers ever meet: their times follow step by step, for all classes at once.

Where every constraint is passed by one hop of one ring only, a transfer always has the rate of its narrowest
constraint, or of its own limit. It begins when the one before it on its lane has left and its block is there; so with
the times of the steps before, those of a step are maxima and sums of arrays.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from sim.array_operations import BLOCK, LANE
from sim.array_program import Program
from sim.array_run import Record
from sim.array_sharing import SAME, Share, Traffic, fair_shares
from tasp_lab.arrays import BoolArray, FloatArray, IntArray


class _Step(NamedTuple):
    """When the transfers of one step did what, in seconds, and what they waited for; arrays (classes,)."""

    free_s: FloatArray
    there_s: FloatArray
    start_s: FloatArray
    launched_s: FloatArray
    sent_s: FloatArray
    end_s: FloatArray
    waited_for: IntArray


def meets_nobody(program: Program) -> bool:
    """Whether a program is one of rings whose hops share nothing with each other, and no host either."""
    passes = Counter(constraint for way in program.ways for constraint, _ in way)
    return (
        program.operations.repeats > 1
        and max(passes.values(), default=1) == 1
        and all(count == 1 for way in program.ways for _, count in way)
        and max(program.hosts) < 0
    )


def end_s(program: Program) -> float:
    """When the last transfer of such a program ends."""
    return float(max(step.end_s.max() for step in _steps(program)))


def paced(program: Program) -> Record:
    """The record of such a program."""
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
    """The share of each class by variant: each class is alone."""
    known: dict[Traffic, Share] = {}

    def share(traffic: Traffic) -> Share:
        if traffic not in known:
            known[traffic] = fair_shares([traffic], program.capacity_bytes_per_s)[0]
        return known[traffic]

    by_class = zip(program.ways, program.costs, strict=True)
    rows = [[share(Traffic(way, cost.most_bytes_per_s)) for cost in costs] for way, costs in by_class]
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
    """Whether a block was awaited; one that comes at once, with no latency, comes after what left at that instant."""
    later = there_s * (1 - SAME) > free_s
    return later | (at_once & (there_s > 0) & (there_s * (1 + SAME) >= free_s))


def _durations(program: Program) -> tuple[FloatArray, FloatArray, FloatArray]:
    """How long launches, flows and latencies take, in seconds; float arrays (variants, classes)."""
    costs = list(zip(*program.costs, strict=True))
    rates = np.array([[share.bytes_per_s for share in row] for row in _shares(program)])
    launch_s = np.array([[cost.launch_s for cost in row] for row in costs])
    wire_bytes = np.array([[cost.wire_bytes for cost in row] for row in costs])
    return launch_s, wire_bytes / rates, np.array([[cost.latency_s for cost in row] for row in costs])


def _hop_before(program: Program) -> tuple[IntArray, int]:
    """For each class the one whose block it passes on, and how many steps later."""
    classes = len(program.kinds)
    before = np.zeros(classes, dtype=np.int64)
    lag = 1
    for each, followers in enumerate(program.after_arrived):
        for offset, _ in followers:
            lag, follower = divmod(each + offset, classes)
            before[follower] = each
    return before, lag
