"""Trials: the block contents, kernel calls and result checks of a schedule that is measured."""

from __future__ import annotations

import time
from itertools import chain
from typing import Protocol

import torch

from runtime.executor.actions import Progress, no_progress
from runtime.executor.executor import Executor
from runtime.executor.messages import Transport
from runtime.executor.streams import streams_for
from runtime.protocol.jobs import KernelTimes
from runtime.trials.layers import AttentionTrial, GatherShards, LinearTrial
from runtime.trials.patterns import PatternTrial
from tasp_lab.core.errors import RunError
from tasp_lab.machines.machine import Compute
from tasp_lab.schedule.buffer_layout import OUTSIDE
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.task import AttentionTask
from tasp_lab.schedules.linear.task import LinearTask


class Trial(Protocol):
    """One rank's run of a schedule: `set_up`, then the executor runs, then `check`. Checks raise `RunError`."""

    executor: Executor

    def set_up(self, checked: bool) -> None:
        """Initialise the memory; `checked` enables the checks that would disturb a timed run."""
        ...

    def check(self) -> None: ...


def make_trial(
    schedule: Schedule,
    rank: int,
    transport: Transport,
    compute: Compute | None,
    device: str = "cpu",
    progress: Progress = no_progress,
    gather_shards: GatherShards | None = None,
) -> Trial:
    """The trial of a schedule: real attention for its task without `compute`, else test patterns.

    With `compute` kernel calls are timed waits. `gather_shards` gathers the shards of all ranks; without it fewer
    gradients of a backward pass are checked.

    Raises `RunError` for timed waits on a GPU, where the host must not wait.
    """
    if compute is not None and schedule.task is not None and device != "cpu":
        raise RunError(f"rank {rank}: timed kernel calls are for gloo; on {device} they are real")
    if isinstance(schedule.task, AttentionTask) and compute is None:
        return AttentionTrial(schedule, rank, transport, device, progress, gather_shards)
    if isinstance(schedule.task, LinearTask) and compute is None:
        return LinearTrial(schedule, rank, transport, device, progress)
    return PatternTrial(schedule, rank, transport, compute, device, progress)


def draw_operands(executor: Executor) -> None:
    """Fill what kernel calls will read from the memory with random numbers, as arrivals would.

    Zeros would do, but for the time: with them a GPU draws less power and keeps a higher clock.
    """
    executor.memory.zero_()  # what is between, and fields of odd sizes, whose views are copies
    drawn = torch.Generator(executor.memory.device).manual_seed(executor.part.rank)
    for row in executor.part.calls:
        for piece in chain.from_iterable(operand.pieces or (operand,) for operand in row.operands):
            if piece.offset != OUTSIDE:
                for field in executor.copies.operand(piece):
                    field.normal_(generator=drawn)


def compute_alone(executor: Executor) -> KernelTimes:
    """Make all kernel calls of the rank on the current content of its memory."""
    streams = streams_for(executor.memory.device, timed=True)
    calls = executor.calls
    executor.copies.begin()
    streams.begin()
    began_s = time.perf_counter()
    for call in calls:
        call()
    issued_s = time.perf_counter() - began_s
    return KernelTimes(streams.mark()(), issued_s if executor.memory.is_cuda else None)
