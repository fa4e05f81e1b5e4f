"""Predictions of layers as published code runs them, and their ratios."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tasp_lab import Workload, predict
from tasp_lab.core.choices import Pass
from tasp_lab.machines.machine import Machine
from tasp_lab.prediction.answer import Answer
from tasp_lab.prediction.interval import Interval
from tasp_lab.prediction.residuals import residual_of
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.registry import options_for


def predicted(
    machine: str | Machine, schedule: str, layer: Workload, passes: Pass = "forward", **changes: Any
) -> Answer:
    """The prediction of a schedule that sends all blocks, as published code does; `changes` go to `predict`."""
    options = options_for(schedule, AttentionOptions(passes, trim=False))
    found = predict(machine, schedule, layer, events=False, options=options, **changes)[-1]
    assert isinstance(found, Answer), "only layers are predicted"
    return found


def interval_of(prediction: Answer) -> Interval:
    """The interval of a prediction."""
    assert prediction.interval is not None, "intervals were asked for"
    return prediction.interval


def without(source: str, interval: Interval) -> Interval:
    """The interval with the residual of all sources but one."""
    return replace(interval, residual=residual_of(interval.residual.asked, source))
