"""The forward and the backward phase of a step, as chains of so many layers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from tasp_lab.core.arrays import IntArray
from tasp_lab.prediction.training_step.attention_passes import AllPasses, passes_of
from tasp_lab.prediction.training_step.chain import Link, Slot, chain
from tasp_lab.prediction.training_step.costs import (
    BACKWARD,
    NO_COST,
    Cost,
    LayerKind,
    before_attention,
    behind_attention,
    kinds_of,
    output_cost,
    stored_parameters,
)
from tasp_lab.prediction.training_step.messages import all_reduce, gather, reduce_scatter
from tasp_lab.prediction.training_step.plan import StepPlan
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.topology.graph import Topology

PARAMETER_BYTES, GRADIENT_BYTES = 2, 4
"""On the wire, per parameter: bf16 for parameters, float32 for gradients, as FSDP of PyTorch with mixed precision."""


class Run(NamedTuple):
    """Layers that follow each other: a unit of one or more kinds, so many times."""

    unit: tuple[LayerKind, ...]
    times: int


def runs_of(plan: StepPlan) -> list[Run]:
    """The layers of the model as runs: layers with an MLP, then those with experts, each with its period.

    >>> from tasp_lab.workload.models.catalogue import load_model
    >>> [run.times for run in runs_of(StepPlan(load_model("deepseek-v3"), 4096, "tasp"))]
    [3, 58]
    """
    found = []
    for _, group in groupby(kinds_of(plan.model), key=lambda kind: kind.has_experts):
        kinds = tuple(group)
        sizes = (size for size in range(1, len(kinds) + 1) if len(kinds) % size == 0)
        size = next(each for each in sizes if kinds == kinds[:each] * (len(kinds) // each))
        found.append(Run(kinds[:size], len(kinds) // size))
    return found


class Phases:
    """Builds the phases of a step. Parameters of all layers of a run take as many bytes as its largest layer."""

    def __init__(self, plan: StepPlan, topology: Topology) -> None:
        self.plan, self.topology = plan, topology
        self.passes: AllPasses = passes_of(plan, topology)

    def tokens(self, letter: str) -> IntArray:
        """The positions of each rank in a layer, over its sequences, an int array (world_size,)."""
        layout, groups = self.passes.layers[letter].forward.layout, self.passes.groups
        own = np.array([layout.length(rank) for rank in range(groups.shape[1])], dtype=np.int64)
        found = np.zeros(groups.size, dtype=np.int64)
        found[groups] = own
        return found * self.plan.batch

    def forward(self, unit: Sequence[LayerKind], count: int, *, ends: bool) -> Schedule:
        """The forward phase of so many units of layers; `ends` if the output is behind them."""
        kinds = list(unit) * count
        slots: list[Slot] = []
        cost = NO_COST
        for number, kind in enumerate(kinds):
            slot = []
            if number and (moving := self.passes.between.get((kinds[number - 1].letter, kind.letter, False))):
                slot.append(Link(*self._costs(NO_COST, kind), moving))
            cost = cost.plus(before_attention(self.plan.model, kind))
            slot.append(Link(*self._costs(cost, kind), self.passes.layers[kind.letter].forward, opens=True))
            cost = behind_attention(self.plan.model, kind)
            slots.append(slot)
        if ends:
            cost = cost.plus(output_cost(self.plan.model))
        last = Link(*self._costs(cost, kinds[-1]))
        return chain("forward", slots, last, self._gather(unit), None)

    def backward(self, unit: Sequence[LayerKind], count: int, *, begins: bool, reduces: bool) -> Schedule:
        """The backward phase of so many units; `begins` if the output is before them, `reduces` if gradients are."""
        model, full = self.plan.model, self.plan.checkpointing == "full"
        kinds = list(reversed(list(unit) * count))
        slots: list[Slot] = []
        cost = output_cost(model).times(BACKWARD) if begins else NO_COST
        for number, kind in enumerate(kinds):
            slot = []
            if number and (moving := self.passes.between.get((kind.letter, kinds[number - 1].letter, True))):
                slot.append(Link(*self._costs(NO_COST, kind), moving, is_backward=True))
            before, behind = before_attention(model, kind), behind_attention(model, kind)
            layer, reduce = self.passes.layers[kind.letter], reduces and number > 0
            assert layer.backward is not None, "a step that trains has backward passes"
            if self.plan.checkpointing != "none":
                cost = cost.plus(before)
                behind = behind.plus(behind.times(BACKWARD))
            else:
                behind = behind.times(BACKWARD)
            if full:
                opening = Link(*self._costs(cost, kind), layer.forward, opens=True, reduces=reduce, is_backward=True)
                slot += [opening, Link(*self._costs(behind, kind), layer.backward, reads=True, is_backward=True)]
            else:
                both = self._costs(cost.plus(behind), kind)
                slot.append(Link(*both, layer.backward, opens=True, reduces=reduce, is_backward=True))
            cost = before_attention(model, kind).times(BACKWARD)
            slots.append(slot)
        last = Link(*self._costs(cost, kinds[-1]), reduces=reduces, is_backward=True)
        return chain("backward", slots, last, self._gather(unit), self._reduction(unit))

    def _costs(self, cost: Cost, kind: LayerKind) -> tuple[IntArray, IntArray]:
        """FLOPs and bytes of a call at each rank."""
        tokens = self.tokens(kind.letter)
        return tokens * cost.flops, tokens * cost.moved_bytes

    def _largest(self, unit: Sequence[LayerKind]) -> int:
        return max(stored_parameters(self.plan.model, kind) for kind in unit)

    def _gather(self, unit: Sequence[LayerKind]) -> Schedule | None:
        if not self.plan.fsdp or self.topology.world_size == 1:
            return None
        return gather(self.topology, PARAMETER_BYTES * self._largest(unit))

    def _reduction(self, unit: Sequence[LayerKind]) -> Schedule | None:
        if self.topology.world_size == 1:
            return None
        found = reduce_scatter if self.plan.fsdp else all_reduce
        return found(self.topology, GRADIENT_BYTES * self._largest(unit))
