"""A point of a study: a question about a layer by names, with the values of the study's axes as its labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tasp_lab.prediction.question import NO_SAMPLES, Question, Value, key_of
from tasp_lab.workload.layer import Workload

__all__ = ["AS_IS", "NO_SAMPLES", "Point", "Value", "key_of"]

AS_IS = "as is"
"""The variant in which nothing is changed."""


@dataclass(frozen=True)
class Point(Question):
    """A question that a file can ask: its machine and its schedule are names.

    The array engine is the faster one where no events are asked for.
    """

    machine: str
    schedule: str
    work: Workload
    engine: Literal["auto", "simpy", "array"] = "array"
