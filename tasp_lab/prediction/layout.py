"""How ranks share a training step: tensor, context, pipeline and data parallelism.

    Layout(tp=8, cp=4, pp=2, dp=1).on(64)

Each rank has a place ``(stage, replica, part of a sequence, part of a tensor)``. This module imports nothing heavy: the
command line lists the options.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, TypeVar, get_args

from tasp_lab.core.arguments import Option
from tasp_lab.core.choices import Checkpointing
from tasp_lab.core.errors import ScheduleError, WorkloadError

if TYPE_CHECKING:
    from tasp_lab.core.arrays import IntArray
    from tasp_lab.workload.models.model import Model

KINDS = ("tp", "cp", "dp", "pp")
"""Tensor, context, data and pipeline parallelism, from the one with most messages to the one with fewest."""

ZERO_STAGES = (0, 1, 2, 3)

T = TypeVar("T")


@dataclass(frozen=True)
class Layout:
    """How ranks share parameters, sequences, layers and batches.

    What is not in the help, beside the types of the fields:

    Parameters
    ----------
    tp : with sequence parallelism between the ranks (arXiv:2205.05198).
    cp, dp : all ranks that the others leave if None. The attention schedule runs on `cp` ranks, with heads over `tp`.
    zero : of the ``cp x dp`` ranks with the same parameters: 0, gradients are all-reduced; 1, parameters are gathered
        once a step; 2, gradients are reduced in each micro-batch; 3, parameters are gathered for each layer as FSDP
        does (arXiv:1910.02054).
    interleave : parts of consecutive layers (arXiv:2104.04473); pipelines run by 1F1B.
    checkpointing : ``selective`` keeps the results of attention and of every other matrix product.
    offload : the host updates the optimizer states.
    ep : consecutive ranks of those with the same parameters; tokens travel to their experts and back.
    overlap : with ZeRO 3 messages always move beside layers.
    order : by default tensor groups, whose messages nothing hides, are inside a node, and pipeline stages, which
        exchange least, in different ones.

    Raises `WorkloadError` for numbers below 1, unknown choices, and an interleaved pipeline that is none.
    """

    tp: Annotated[int, Option("Tensor parallelism: ranks that share heads and MLP.")] = 1
    cp: Annotated[
        int | None, Option("Context parallelism: ranks that share a sequence. Default: all that are left.")
    ] = None
    pp: Annotated[int, Option("Pipeline stages.")] = 1
    dp: Annotated[int | None, Option("Replicas with sequences of their own. Default: all that are left.")] = None
    zero: Annotated[
        int, Option("ZeRO stage: 0 shards nothing, 1 optimiser states, 2 also gradients, 3 all. --no-fsdp: 0.")
    ] = 3
    interleave: Annotated[int, Option("Parts of the model per pipeline stage.")] = 1
    microbatches: Annotated[int, Option("Micro-batches per step.")] = 1
    checkpointing: Annotated[
        Checkpointing,
        Option(
            "What the backward pass recomputes: nothing, a layer without its attention (selective), or all; offload: "
            "all, from layer inputs in the memory of the host."
        ),
    ] = "full"
    logit_chunks: Annotated[int, Option("Parts in which logits are computed.")] = 1
    offload: Annotated[
        bool, Option("Keep optimiser states in the memory of the host; of some stacks all that FSDP shards.")
    ] = False
    ep: Annotated[
        int, Option("Expert parallelism: ranks of cp x dp that share experts, else each has a part of all.")
    ] = 1
    overlap: Annotated[
        bool | None,
        Option(
            "Move parameters and gradients beside layers, as with Megatron's --overlap-grad-reduce and "
            "--overlap-param-gather. Default: as the stack does without flags; without a stack yes."
        ),
    ] = None
    order: Annotated[str, Option("Which ranks form groups: from neighbours to those that are farthest apart.")] = (
        "tp-cp-dp-pp"
    )

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
        import numpy as np

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
        import numpy as np

        count = self.chunks
        least, more = divmod(len(layers), count)
        longer = [*range(1, count - 1), 0, count - 1][:more]
        ends = np.cumsum([least + (number in longer) for number in range(count)]).tolist()
        return [tuple(layers[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]


DEFAULT_LAYOUT = Layout()
"""All ranks share each sequence, with FSDP and full checkpointing."""
