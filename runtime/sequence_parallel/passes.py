"""Both passes of an attention layer on one rank, softmax or linear, and what is left from one for the other.

with passes.run(passes.forward_schedule, layer, device) as copies:     # layer: an AttentionLayer or a LinearLayer
    left = passes.left_behind(copies)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import ClassVar, TypeVar

import numpy as np
import torch

from runtime.executor.copies import Copies, Work
from runtime.executor.kept import OF_ALL_LAYERS, Kept
from runtime.executor.messages import Transport
from tasp_lab.schedule.rank_part import RankPart, rank_part
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.task import AttentionTask
from tasp_lab.schedules.linear.task import PREFIX_STATES, LinearTask


@dataclass(frozen=True)
class AttentionPasses:
    """The schedules of both passes, the second None if no gradients are required; `kept` has the executors.

    A forward pass also keeps the copies with which the backward pass starts and which are not the rank's own: keys of
    other ranks, states of earlier chunks. They are bytes, in the order of their numbers in the backward pass.
    """

    forward_schedule: Schedule
    backward_schedule: Schedule | None
    rank: int
    transport: Transport
    _: KW_ONLY
    kept: Kept = OF_ALL_LAYERS
    outputs: ClassVar[int] = 2

    @contextlib.contextmanager
    def run(
        self, schedule: Schedule, layer: Work, device: torch.device, left: torch.Tensor | None = None
    ) -> Iterator[Copies]:
        """Run a pass, which starts with what the pass before it has `left`."""

        def load(copies: Copies) -> None:
            layer.load(copies)
            if left is not None:
                copies.load_bytes(blocks_left(schedule, self.rank), left)

        with run_pass(schedule, self.rank, self.transport, layer, device, load, self.kept) as copies:
            yield copies

    def left_behind(self, copies: Copies) -> torch.Tensor:
        """What the forward pass leaves for the backward pass; no view, which would keep the whole memory alive."""
        left = _left_there(self.forward_schedule, self.backward_schedule, self.rank)
        # joining nothing would launch a kernel, too
        return torch.cat([*map(copies.left_behind, left)]) if left else copies.memory.new_empty(0)


_Task = TypeVar("_Task")


def task_of(schedule: Schedule, kind: type[_Task]) -> _Task:
    """The task of a schedule, which is of this kind, as its builder is."""
    assert isinstance(schedule.task, kind), f"a schedule for {kind.__name__} has one"
    return schedule.task


@lru_cache(maxsize=16)
def blocks_left(schedule: Schedule, rank: int) -> list[int]:
    """The blocks with which a rank starts a backward pass beside its own tensors."""
    task = schedule.task
    assert isinstance(task, AttentionTask | LinearTask), "a schedule of attention has a task"
    is_left = task.owner != rank if isinstance(task, AttentionTask) else task.tensor == PREFIX_STATES
    blocks: list[int] = np.flatnonzero(schedule.initial[rank] & is_left).tolist()
    return blocks


@lru_cache(maxsize=16)
def _left_there(forward: Schedule, backward: Schedule | None, rank: int) -> list[int]:
    """The blocks of `blocks_left`, by their numbers in the forward schedule; none without a backward pass."""
    if backward is None:
        return []
    assert isinstance(backward.task, AttentionTask | LinearTask), "a schedule of attention has a task"
    assert forward.task is not None, "a schedule of attention has a task"
    number = dict(zip(*(each.tolist() for each in backward.task.saved(forward.task)), strict=True))
    return [number[block] for block in blocks_left(backward, rank)]


@contextlib.contextmanager
def run_pass(
    schedule: Schedule, rank: int, transport: Transport, work: Work | None, device: torch.device,
    load: Callable[[Copies], object], kept: Kept = OF_ALL_LAYERS,
) -> Iterator[Copies]:  # fmt: skip
    """Run a schedule after `load` has filled the memory, which is used again after the context has ended."""
    part = part_of(schedule, rank)
    with kept.executor(schedule, part, transport, work, device) as executor:
        load(executor.copies)
        executor.prepare()
        executor.run()
        yield executor.copies


@lru_cache(maxsize=16)
def part_of(schedule: Schedule, rank: int) -> RankPart:
    """The part of a rank. Layers are called with the same schedules again and again."""
    return rank_part(schedule, rank)
