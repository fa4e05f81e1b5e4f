"""Comparisons of two schedules whose times are formulas, so that tests know every crossing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tasp_lab.prediction.paired import Setting
from tasp_lab.study.crossover import Comparison
from tasp_lab.study.point import Point, Row
from tasp_lab.workload.layer import Workload

Formula = Callable[[float], float]
"""A time in seconds by the sequence length."""

POINT = Point("h100-8", "one", Workload(1024, heads=1, mask="full"))


def comparison(
    one: Formula, two: Formula, values: Sequence[float], margin: float = 0.0, setting: Setting = "exact"
) -> Comparison:
    """A comparison of the schedules ``one`` and ``two``, whose times follow formulas and whose messages are free."""
    formulas = {"one": one, "two": two}

    def evaluate(point: Point) -> Row:
        time_s = formulas[point.schedule](point.layer.sequence)
        bound = "compute" if point.layer.sequence > 4096 else "latency"
        common = {"status": "ok", "exposed_s": 0.0, "setting": setting}
        return common | {"time_s": time_s, "bottleneck": f"{bound} of {point.schedule}"}

    return Comparison(POINT, ("one", "two"), "seq", values, evaluate, margin)


def by_ratio(log_ratio: Formula) -> tuple[Formula, Formula]:
    """Two times, the second over the first of which has this logarithm."""
    return (lambda seq: 1.0), (lambda seq: math.exp(log_ratio(seq)))
