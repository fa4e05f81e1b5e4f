"""Comparisons of two schedules whose times are formulas, so that tests know every crossing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from tasp_lab.prediction.interval import Interval
from tasp_lab.prediction.residual_fit import Residual
from tasp_lab.prediction.residuals import Regime
from tasp_lab.study.crossover import Comparison
from tasp_lab.study.point import Point, Row
from tasp_lab.workload.layer import Workload

Formula = Callable[[float], float]
"""A time in seconds by the sequence length."""

REGIME = Regime("layer", "intra", "any", "documented", "modelled")
POINT = Point("h100-8", "one", Workload(1024, heads=1))


def comparison(
    one: Formula, two: Formula, values: Sequence[float], margin: float = 0.0, own: float | None = None
) -> Comparison:
    """Of schedules ``one`` and ``two``; each time has `own` as spread on one machine, None for no intervals."""
    formulas = {"one": one, "two": two}

    def evaluate(point: Point) -> Row:
        time_s = formulas[point.schedule](point.layer.sequence)
        bound = "compute" if point.layer.sequence > 4096 else "latency"
        return {"status": "ok", "time_s": time_s, "bottleneck": f"{bound} of {point.schedule}"}

    def interval_of(point: Point) -> Interval:
        residual = Residual(REGIME, 1.0, 0.3, 0.0, own or 0.0, 10, 2, REGIME)
        return Interval(formulas[point.schedule](point.layer.sequence), np.zeros(0), residual)

    return Comparison(POINT, ("one", "two"), "seq", values, evaluate, None if own is None else interval_of, margin)


def by_ratio(log_ratio: Formula) -> tuple[Formula, Formula]:
    """Two times, the second over the first of which has this logarithm."""
    return (lambda seq: 1.0), (lambda seq: math.exp(log_ratio(seq)))
