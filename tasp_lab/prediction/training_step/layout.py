"""What a step trains (`StepPlan`), and the groups of ranks that share it (`tasp_lab.prediction.layout.Layout`).

Ranks that differ in one part of their place alone are a group of that kind, and all groups of a kind exchange messages
at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import get_args

import numpy as np

from tasp_lab.core.arrays import IntArray
from tasp_lab.core.choices import MatrixDtype
from tasp_lab.core.errors import WorkloadError
from tasp_lab.machines.stack import COMPILED, StepSoftware
from tasp_lab.prediction.layout import DEFAULT_LAYOUT as DEFAULT_LAYOUT
from tasp_lab.prediction.layout import KINDS as KINDS
from tasp_lab.prediction.layout import Layout as Layout
from tasp_lab.prediction.training_step.costs import EAGER, FUSED, ElementWise, LayerKind, kinds_of
from tasp_lab.schedule.calls import Passing
from tasp_lab.schedules.attention.options import DEFAULT_OPTIONS, AttentionOptions
from tasp_lab.topology.derived import equal_parts
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.models.model import Model


def tensor_groups(places: IntArray) -> IntArray:
    """The ranks of each tensor group, an int array (groups, tp)."""
    return places.reshape(-1, places.shape[-1])


def context_groups(places: IntArray) -> IntArray:
    """The ranks that share each sequence, with the same part of each tensor, an int array (groups, cp)."""
    return places.swapaxes(2, 3).reshape(-1, places.shape[2])


def state_groups(places: IntArray) -> IntArray:
    """The ranks with the same parameters, an int array (groups, dp x cp)."""
    return places.transpose(0, 3, 1, 2).reshape(-1, places.shape[1] * places.shape[2])


def expert_groups(places: IntArray, ep: int) -> IntArray:
    """The ranks that share experts, an int array (groups, ep)."""
    return state_groups(places).reshape(-1, ep)


def stage_of(topology: Topology, layout: Layout) -> tuple[Topology, IntArray]:
    """Where the phases of a stage are simulated, and its ranks by place there, an int array (stages, dp, cp, tp).

    Stages in nodes of their own share no NICs, so one of them stands for all; others are simulated all at once. Raises
    `TopologyError` if stages have other links than each other.
    """
    places = layout.ranks(topology.world_size)
    stages = np.sort(places.reshape(len(places), -1), axis=1)
    nodes = [{topology.node_of_rank[rank] for rank in stage} for stage in stages.tolist()]
    if len(stages) == 1 or len(set().union(*nodes)) < sum(map(len, nodes)):
        return topology, places
    return equal_parts(topology, stages), np.searchsorted(stages[0], places[:1])


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
    software : how the software runs a step.

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
    software: StepSoftware = COMPILED

    def __post_init__(self) -> None:
        for name in ("sequence", "batch"):
            if getattr(self, name) < 1:
                raise WorkloadError(f"{name}: {getattr(self, name)}, expected 1 or more")
        check_matrix_dtype(self.matrix_dtype)
        if self.options.passes == "backward":
            raise WorkloadError("pass 'backward' of a whole step, expected both or forward")
        self.layout.check(self.model)

    @property
    def trains(self) -> bool:
        """Whether there is a backward pass."""
        return self.options.passes == "both"

    @property
    def trained(self) -> tuple[Passing, ...]:
        """The passes of a step."""
        return ("forward", "backward") if self.trains else ("forward",)

    @property
    def layer(self) -> Workload:
        """The attention layer of a context group, or one period of a hybrid: that of the model, with heads over tp."""
        return _layer_of(self.model, self.sequence, self.batch, self.layout.tp)

    @property
    def element_wise(self) -> ElementWise:
        """What element-wise work moves with the software."""
        return FUSED if self.software.fused else EAGER

    def layer_of(self, letter: str) -> Workload:
        """The attention layer of a letter of the model's pattern: L, S, or W, which is S with the window."""
        return _of_letter(self.layer, letter, self.model.attention.window)

    @property
    def windowed_layer(self) -> Workload:
        """The layer that decides whether a stack runs a schedule, as some take no window: W if the model has it."""
        return self.layer_of("W") if "W" in self.model.pattern else self.layer

    @property
    def parts(self) -> list[tuple[LayerKind, ...]]:
        """The layers of each part of the model; part c is of stage ``c % pp``."""
        return parts_of(self.model, self.layout.chunks)


def check_matrix_dtype(dtype: str) -> None:
    """Raise `WorkloadError` for a dtype in which matrix products are not predicted."""
    if dtype not in get_args(MatrixDtype):
        raise WorkloadError(f"matrix dtype: {dtype!r}, expected one of {', '.join(get_args(MatrixDtype))}")


@lru_cache(maxsize=256)
def _layer_of(model: Model, sequence: int, batch: int, tp: int) -> Workload:
    """The attention layer of `StepPlan.layer`: thousands of layouts have few."""
    if tp == 1:
        return model.layer(sequence, batch)
    attention = model.attention
    kv_heads = max(1, attention.passed_kv_heads // tp)
    return model.layer(sequence, batch, heads=attention.heads // tp, kv_heads=kv_heads)


@lru_cache(maxsize=256)
def _of_letter(layer: Workload, letter: str, window: int | None) -> Workload:
    layer = layer.of("L" if letter == "L" else "S") if layer.kind == "hybrid" else layer
    return replace(layer, window=window) if letter == "W" else layer


@lru_cache(maxsize=256)
def parts_of(model: Model, count: int) -> list[tuple[LayerKind, ...]]:
    """The layers of each of so many parts of a model."""
    return Layout(pp=count).split(kinds_of(model))


def describe(plan: StepPlan) -> str:
    """How a step is laid out, in a few words.

    >>> from tasp_lab.workload.models.catalogue import load_model
    >>> both, shared = AttentionOptions("both"), Layout(2, 4, 1, 2, microbatches=3)
    >>> describe(StepPlan(load_model("llama-3-8b"), 8192, "ulysses", shared, options=both))
    'tp 2 x cp 4 x dp 2, ulysses, FSDP, 3 micro-batches, full checkpointing'
    """
    layout = plan.layout
    shown = [(name, getattr(layout, name)) for name in ("tp", "cp", "pp", "dp")]
    found = [
        " x ".join(f"{name} {degree}" for name, degree in shown if degree != 1) or "1 GPU",
        f"ep {layout.ep}" if layout.ep > 1 else "",
        plan.schedule if layout.cp != 1 else "",
        ("", "ZeRO 1", "ZeRO 2", "FSDP")[layout.zero] if (layout.cp or 1) * (layout.dp or 1) > 1 else "",
        f"{layout.interleave} parts per stage" if layout.interleave > 1 else "",
        f"micro-batches of {plan.batch}" if plan.batch > 1 else "",
        f"{layout.microbatches} micro-batches" if layout.microbatches > 1 else "",
        f"logits in {layout.logit_chunks} chunks" if layout.logit_chunks > 1 else "",
        "optimizer states on the host" if layout.offload else "",
        layout.recomputing if plan.trains else "",
    ]
    return ", ".join(filter(None, found))
