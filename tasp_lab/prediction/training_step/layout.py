"""What a step trains (`StepPlan`), and how ranks share it: tensor, context, pipeline and data parallelism.

    Layout(tp=8, cp=4, pp=2, dp=1).on(64)

Each rank has a place ``(stage, replica, part of a sequence, part of a tensor)``. Ranks that differ in one of these
alone are a group of that kind, and all groups of a kind exchange messages at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar, get_args

import numpy as np

from tasp_lab.core.arrays import IntArray
from tasp_lab.core.choices import Checkpointing, MatrixDtype
from tasp_lab.core.errors import ScheduleError, WorkloadError
from tasp_lab.machines.stack import COMPILED, StepSoftware
from tasp_lab.prediction.training_step.costs import EAGER, FUSED, ElementWise, LayerKind, kinds_of
from tasp_lab.schedules.attention.options import DEFAULT_OPTIONS, AttentionOptions
from tasp_lab.topology.derived import equal_parts
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.models.model import Model

KINDS = ("tp", "cp", "dp", "pp")
"""Tensor, context, data and pipeline parallelism, from the one with most messages to the one with fewest."""

ZERO_STAGES = (0, 1, 2, 3)

T = TypeVar("T")


@dataclass(frozen=True)
class Layout:
    """How ranks share parameters, sequences, layers and batches.

    Parameters
    ----------
    tp : ranks that share the heads and the MLP of each layer, with sequence parallelism between them
        (arXiv:2205.05198).
    cp : ranks that share each sequence: the attention schedule runs on them, with heads divided by `tp`. None: all
        ranks that the others leave.
    pp : pipeline stages, consecutive layers each.
    dp : replicas with sequences of their own. None: all ranks that the others leave.
    zero : what the ``cp x dp`` ranks with the same parameters shard among them: 0, nothing, gradients are all-reduced;
        1, optimizer states, parameters are gathered once a step; 2, also gradients, reduced in each micro-batch; 3,
        also parameters, gathered for each layer as FSDP does (arXiv:1910.02054).
    interleave : parts of the model per stage, each of consecutive layers (arXiv:2104.04473).
    microbatches : of a step, one after another, or in a pipeline by 1F1B.
    checkpointing : what the backward pass computes again: ``none``; ``selective``, all of a layer but attention and
        every other matrix product, whose results are kept; ``full``, all of a layer; ``offload``, likewise, with the
        inputs of layers in the memory of the host.
    logit_chunks : parts in which logits and their gradients are computed; only one part is in memory.
    offload : whether optimizer states are in the memory of the host, which updates them.
    ep : ranks that share experts, consecutive ones of those with the same parameters; tokens travel to their experts
        and back. 1: each rank has a part of all experts.
    overlap : whether parameters and gradients move beside layers. By default as the stack does without flags, and
        without a stack yes. With ZeRO 3 they always do.
    order : from the ranks that are neighbours to those that are farthest apart. By default tensor groups, whose
        messages nothing hides, are inside a node, and pipeline stages, which exchange least, in different ones.

    Raises `WorkloadError` for numbers below 1, unknown choices, and an interleaved pipeline that is none.
    """

    tp: int = 1
    cp: int | None = None
    pp: int = 1
    dp: int | None = None
    zero: int = 3
    interleave: int = 1
    microbatches: int = 1
    checkpointing: Checkpointing = "full"
    logit_chunks: int = 1
    offload: bool = False
    ep: int = 1
    overlap: bool | None = None
    order: str = "tp-cp-dp-pp"

    def __post_init__(self) -> None:
        for name in (*KINDS, "ep", "interleave", "microbatches", "logit_chunks"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise WorkloadError(f"{name.replace('_', ' ')}: {value}, expected 1 or more")
        if self.checkpointing not in get_args(Checkpointing):
            known = ", ".join(get_args(Checkpointing))
            raise WorkloadError(f"checkpointing: {self.checkpointing!r}, expected one of {known}")
        if self.zero not in ZERO_STAGES:
            raise WorkloadError(f"zero: {self.zero!r}, expected one of {', '.join(map(str, ZERO_STAGES))}")
        if sorted(self.order.split("-")) != sorted(KINDS):
            raise WorkloadError(f"order: {self.order!r}, expected tp, cp, dp and pp in some order, like tp-cp-dp-pp")
        if self.interleave > 1 and (self.pp == 1 or self.microbatches % self.pp):
            raise WorkloadError(
                f"interleave {self.interleave} with {self.pp} stages and {self.microbatches} micro-batches, expected "
                "2 stages or more, and a multiple of them as micro-batches"
            )

    def on(self, ranks: int) -> Layout:
        """The layout of so many ranks, with no None left.

        Raises `ScheduleError` unless the product of all four is the number of ranks.

        >>> Layout(tp=2).on(8).cp, Layout(cp=2).on(8).dp
        (4, 4)
        """
        known = self.tp * self.pp * (self.cp or 1) * (self.dp or 1)
        left = ranks // known
        if known * left != ranks or (left > 1 and self.cp is not None and self.dp is not None):
            parts = " x ".join(f"{name} {getattr(self, name)}" for name in KINDS if getattr(self, name) is not None)
            expected = "a divisor of" if self.cp is None or self.dp is None else "a product of"
            raise ScheduleError(f"layout {parts} on {ranks} ranks, expected {expected} {ranks}")
        cp = left if self.cp is None else self.cp
        return replace(self, cp=cp, dp=self.dp or (left if self.cp is not None else 1))

    def check(self, model: Model) -> None:
        """Raise `ScheduleError` unless heads and layers of a model can be divided like this."""
        heads, kv_heads = model.attention.heads, model.attention.kv_head_count
        if heads % self.tp:
            raise ScheduleError(f"{model.name}: {heads} heads on tp {self.tp}, expected a divisor of {heads}")
        if kv_heads % self.tp and self.tp % kv_heads:
            raise ScheduleError(f"{model.name}: {kv_heads} KV heads on tp {self.tp}, expected a divisor or a multiple")
        experts, sharing = model.experts, (self.cp or 1) * (self.dp or 1)
        if self.ep > 1 and (experts is None or experts.count % self.ep or sharing % self.ep):
            raise ScheduleError(
                f"{model.name}: ep {self.ep} with {experts.count if experts else 'no'} experts and {sharing} ranks of "
                "the same parameters (cp x dp), expected a divisor of both"
            )
        if "L" in model.pattern and self.tp > 1:
            raise ScheduleError(f"{model.name} has linear attention, expected tp 1: its tensors are not divided")
        chunks, layers = self.pp * self.interleave, len(model.pattern)
        if chunks > layers:
            what = f"{self.pp} stages" + (f" of {self.interleave} parts" if self.interleave > 1 else "")
            raise ScheduleError(f"{model.name}: {layers} layers on {what}, expected at most {layers} in all")

    def ranks(self, world_size: int) -> IntArray:
        """The rank of each place, an int array (pp, dp, cp, tp).

        >>> Layout(tp=2, cp=1, dp=2, pp=2).ranks(8).tolist()
        [[[[0, 1]], [[2, 3]]], [[[4, 5]], [[6, 7]]]]
        """
        full = self.on(world_size)
        names = self.order.split("-")[::-1]
        places = np.arange(world_size).reshape([getattr(full, name) for name in names])
        return places.transpose([names.index(name) for name in ("pp", "dp", "cp", "tp")])

    @property
    def repeated(self) -> float:
        """The share of the messages of a layer's forward pass that its backward pass repeats."""
        return {"none": 0.0, "selective": 0.5}.get(self.checkpointing, 1.0)

    @property
    def repeats_layers(self) -> bool:
        """Whether the backward pass computes all of each layer again."""
        return self.checkpointing in ("full", "offload")

    @property
    def recomputing(self) -> str:
        """What is computed again, in words.

        >>> Layout().recomputing, Layout(checkpointing="none").recomputing
        ('full checkpointing', 'no checkpointing')
        """
        words = {"none": "no checkpointing", "offload": "full checkpointing with layer inputs on the host"}
        return words.get(self.checkpointing, f"{self.checkpointing} checkpointing")

    @property
    def chunks(self) -> int:
        """The parts of the model, of consecutive layers, over all stages: part c is of stage ``c % pp``."""
        return self.pp * self.interleave

    def split(self, layers: Sequence[T]) -> list[tuple[T, ...]]:
        """The layers of each part of the model. Where they do not divide, the first and the last part, which have
        embedding and output, have one less before others have.

        >>> [len(each) for each in Layout(pp=8).split(range(126))]
        [15, 16, 16, 16, 16, 16, 16, 15]
        """
        count = self.chunks
        least, more = divmod(len(layers), count)
        longer = [*range(1, count - 1), 0, count - 1][:more]
        ends = np.cumsum([least + (number in longer) for number in range(count)]).tolist()
        return [tuple(layers[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]


DEFAULT_LAYOUT = Layout()
"""All ranks share each sequence, with FSDP and full checkpointing."""


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
    def element_wise(self) -> ElementWise:
        """What element-wise work moves with the software."""
        return FUSED if self.software.fused else EAGER

    def layer_of(self, letter: str) -> Workload:
        """The attention layer of a letter of the model's pattern: L, S, or W, which is S with the window."""
        layer = self.layer.of("L" if letter == "L" else "S") if self.layer.kind == "hybrid" else self.layer
        return replace(layer, window=self.model.attention.window) if letter == "W" else layer

    @property
    def windowed_layer(self) -> Workload:
        """The layer that decides whether a stack runs a schedule, as some take no window: W if the model has it."""
        return self.layer_of("W") if "W" in self.model.pattern else self.layer

    @property
    def parts(self) -> list[tuple[LayerKind, ...]]:
        """The layers of each part of the model; part c is of stage ``c % pp``."""
        return parts_of(self.model, self.layout.chunks)


@lru_cache(maxsize=256)
def parts_of(model: Model, count: int) -> list[tuple[LayerKind, ...]]:
    """The layers of each of so many parts of a model."""
    return Layout(pp=count).split(kinds_of(model))
