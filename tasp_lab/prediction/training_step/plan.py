"""What is trained, and how: a model, its batch, and how ranks share sequences, states and activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from tasp_lab.core.choices import Checkpointing, MatrixDtype
from tasp_lab.core.errors import WorkloadError
from tasp_lab.schedules.attention.options import DEFAULT_OPTIONS, AttentionOptions
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.models.model import Model


@dataclass(frozen=True)
class StepPlan:
    """One step.

    Parameters
    ----------
    model : the model.
    sequence, batch : positions per sequence, and how many sequences a group has in a micro-batch.
    schedule : of attention, within each group.
    group : the ranks that share each sequence, consecutive ones; all ranks if None. Groups have different sequences.
    options : of the schedule; its passes are those of the step: ``both``, or ``forward`` for a step without training.
    fsdp : whether parameters, gradients and optimiser states are sharded over all ranks; else each rank has all.
    checkpointing : what the backward pass computes again: ``none``; ``selective``, all of a layer but attention, whose
        results are kept; ``full``, all of a layer.
    matrix_dtype : of the multiplications with parameters.
    accumulate : micro-batches per step. Without `fsdp` only the last one reduces gradients.

    Raises `WorkloadError` for numbers below 1, unknown choices, and a step that is neither.
    """

    model: Model
    sequence: int
    schedule: str
    batch: int = 1
    group: int | None = None
    options: AttentionOptions = DEFAULT_OPTIONS
    fsdp: bool = True
    checkpointing: Checkpointing = "full"
    matrix_dtype: MatrixDtype = "bf16"
    accumulate: int = 1

    def __post_init__(self) -> None:
        for name in ("sequence", "batch", "group", "accumulate"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise WorkloadError(f"{name}: {value}, expected 1 or more")
        for name, choice in (("checkpointing", Checkpointing), ("matrix_dtype", MatrixDtype)):
            if getattr(self, name) not in get_args(choice):
                known = ", ".join(get_args(choice))
                raise WorkloadError(f"{name.replace('_', ' ')}: {getattr(self, name)!r}, expected one of {known}")
        if self.options.passes == "backward":
            raise WorkloadError("pass 'backward' of a whole step, expected both or forward")

    @property
    def trains(self) -> bool:
        """Whether there is a backward pass."""
        return self.options.passes == "both"

    @property
    def layer(self) -> Workload:
        """The attention layer of the model, or one period of a hybrid, over the sequences of a group."""
        return self.model.layer(self.sequence, self.batch)
