"""What is trained, and how: a model, its batch, and how ranks share sequences, states and activations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import get_args

from tasp_lab.core.choices import MatrixDtype
from tasp_lab.core.errors import WorkloadError
from tasp_lab.prediction.training_step.costs import LayerKind, kinds_of
from tasp_lab.prediction.training_step.layout import DEFAULT_LAYOUT, Layout
from tasp_lab.schedules.attention.options import DEFAULT_OPTIONS, AttentionOptions
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.models.model import Model


@dataclass(frozen=True)
class StepPlan:
    """One step.

    Parameters
    ----------
    model : the model.
    sequence, batch : positions per sequence, and how many sequences a context group has in a micro-batch.
    schedule : of attention, within each context group.
    layout : how ranks share the step, see `tasp_lab.prediction.training_step.layout.Layout`.
    options : of the schedule; its passes are those of the step: ``both``, or ``forward`` for a step without training.
    matrix_dtype : of the multiplications with parameters.

    Raises `WorkloadError` for numbers below 1, unknown choices, and a step that is neither; `ScheduleError` for a
    layout that does not divide the model.
    """

    model: Model
    sequence: int
    schedule: str
    layout: Layout = DEFAULT_LAYOUT
    batch: int = 1
    options: AttentionOptions = DEFAULT_OPTIONS
    matrix_dtype: MatrixDtype = "bf16"

    def __post_init__(self) -> None:
        for name in ("sequence", "batch"):
            if getattr(self, name) < 1:
                raise WorkloadError(f"{name}: {getattr(self, name)}, expected 1 or more")
        if self.matrix_dtype not in get_args(MatrixDtype):
            known = ", ".join(get_args(MatrixDtype))
            raise WorkloadError(f"matrix dtype: {self.matrix_dtype!r}, expected one of {known}")
        if self.options.passes == "backward":
            raise WorkloadError("pass 'backward' of a whole step, expected both or forward")
        self.layout.check(self.model)

    @property
    def trains(self) -> bool:
        """Whether there is a backward pass."""
        return self.options.passes == "both"

    @property
    def layer(self) -> Workload:
        """The attention layer of a context group, or one period of a hybrid: that of the model, with heads over tp."""
        tp, attention = self.layout.tp, self.model.attention
        if tp == 1:
            return self.model.layer(self.sequence, self.batch)
        kv_heads = max(1, attention.passed_kv_heads // tp)
        return self.model.layer(self.sequence, self.batch, heads=attention.heads // tp, kv_heads=kv_heads)

    @property
    def parts(self) -> list[tuple[LayerKind, ...]]:
        """The layers of each part of the model; part c is of stage ``c % pp``."""
        return parts_of(self.model, self.layout.chunks)


@lru_cache(maxsize=256)
def parts_of(model: Model, count: int) -> list[tuple[LayerKind, ...]]:
    """The layers of each of so many parts of a model."""
    return Layout(pp=count).split(kinds_of(model))
