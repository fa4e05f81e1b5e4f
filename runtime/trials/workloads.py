"""Trials: the block contents, kernel calls and result checks of a schedule that is measured."""

from __future__ import annotations

import time
from typing import Protocol

from runtime.executor.executor import Executor, no_progress
from runtime.executor.message_io import Progress
from runtime.executor.transports import Transport
from runtime.sequence_parallel.gradient_sums import Sums
from runtime.trials.attention import GatherShards, layer_trial
from runtime.trials.patterns import (
    expected_sums,
    fill,
    fill_with_parts,
    part_of_gradient,
    verify,
    verify_gradients,
    verify_reads,
    verify_sums,
)
from tasp_lab.errors import RunError
from tasp_lab.schedule.buffer_layout import CallRow, Sum
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
    """The trial of a schedule: sums for a reduction, real attention for a task without `flops_per_s`, else patterns.

    With `flops_per_s` kernel calls are timed waits. `gather_shards` gathers the shards of all ranks; without it fewer
    gradients of a backward pass are checked.

    Raises `RunError` for timed waits on a GPU, where the host must not wait.
    """
    if flops_per_s is not None and schedule.task is not None and device != "cpu":
        raise RunError(f"rank {rank}: timed kernel calls are for gloo; on {device} they are real")
    if schedule.reduction is not None:
        return SumTrial(schedule, rank, transport, device, progress)
    if schedule.task is None or flops_per_s is not None:
        return PatternTrial(schedule, rank, transport, flops_per_s, device, progress)
    return layer_trial(schedule, rank, transport, device, progress, gather_shards)


class SumTrial:
    """Blocks hold a rank's part of a sum at the start; the final sums are checked."""

    def __init__(
        self, schedule: Schedule, rank: int, transport: Transport, device: str = "cpu", progress: Progress = no_progress
    ) -> None:
        self.executor = Executor(schedule, rank, transport, device=device, progress=progress)
        self._expected = expected_sums(self.executor)

    def set_up(self, checked: bool) -> None:
        fill_with_parts(self.executor)

    def check(self) -> None:
        verify_sums(self.executor, self._expected)


class PatternTrial:
    """Blocks hold test patterns; a kernel call is replaced by a wait of its duration."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        transport: Transport,
        flops_per_s: float | None,
        device: str = "cpu",
        progress: Progress = no_progress,
    ) -> None:
        self.executor = Executor(schedule, rank, transport, self._call, self._join, device, progress)
        self._flops_per_s = flops_per_s or float("inf")
        self._checked = True

    def set_up(self, checked: bool) -> None:
        self._checked = checked
        self._sums = Sums(self.executor.part, lambda block, offset: [self.executor.block(block, offset)])
        fill(self.executor)

    def _call(self, row: CallRow) -> None:
        if self._checked:
            verify_reads(self.executor, row)
            for at, place in enumerate(row.adds):
                self._sums.add(place, [part_of_gradient(self.executor, row, at)])
        time.sleep(row.flops / self._flops_per_s)

    def _join(self, each: Sum) -> None:
        if self._checked:
            self._sums.join(each)

    def check(self) -> None:
        verify(self.executor)
        if self._checked:
            verify_gradients(self.executor)
