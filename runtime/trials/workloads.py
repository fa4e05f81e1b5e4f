"""Trials: the block contents, kernel calls and result checks of a schedule that is measured."""

from __future__ import annotations

import time
from typing import Protocol

import torch

from runtime.executor.executor import Executor
from runtime.executor.message_io import Progress, no_progress
from runtime.executor.transports import Transport
from runtime.trials.attention import AttentionTrial, GatherShards
from runtime.trials.linear_attention import LinearTrial
from runtime.trials.patterns import PatternTrial
from tasp_lab.attention.task import AttentionTask
from tasp_lab.errors import RunError
from tasp_lab.linear_attention.task import LinearTask
from tasp_lab.schedule.schedule import Schedule


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
    flops_per_s: float | None,
    device: str = "cpu",
    progress: Progress = no_progress,
    gather_shards: GatherShards | None = None,
) -> Trial:
    """The trial of a schedule: real attention for its task without `flops_per_s`, else test patterns.

    With `flops_per_s` kernel calls are timed waits. `gather_shards` gathers the shards of all ranks; without it fewer
    gradients of a backward pass are checked.

    Raises `RunError` for timed waits on a GPU, where the host must not wait.
    """
    if flops_per_s is not None and schedule.task is not None and device != "cpu":
        raise RunError(f"rank {rank}: timed kernel calls are for gloo; on {device} they are real")
    if isinstance(schedule.task, AttentionTask) and flops_per_s is None:
        return AttentionTrial(schedule, rank, transport, device, progress, gather_shards)
    if isinstance(schedule.task, LinearTask) and flops_per_s is None:
        return LinearTrial(schedule, rank, transport, device, progress)
    return PatternTrial(schedule, rank, transport, flops_per_s, device, progress)


def compute_alone(executor: Executor) -> float:
    """Make all kernel calls of the rank on the current content of its memory; returns the time in seconds."""
    device = executor.memory.device
    began_s = _now(device)
    for row in executor.part.calls:
        executor.copies.compute(row)
    return _now(device) - began_s


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
