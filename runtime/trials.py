"""Trials: what blocks hold while a schedule is measured, what stands for its kernels, and how the result is checked."""

from __future__ import annotations

import time
from typing import Protocol

from runtime.executor import Executor, no_progress
from runtime.layer_trials import Everyone, layer_trial
from runtime.patterns import (
    expected_sums,
    fill,
    fill_with_parts,
    part_of_gradient,
    verify,
    verify_gradients,
    verify_reads,
    verify_sums,
)
from runtime.sums import Sums
from runtime.traffic import Progress
from runtime.transport import Transport
from tasp_lab.errors import RunError
from tasp_lab.rooms import CallRow, Sum
from tasp_lab.schedule import Schedule


class Trial(Protocol):
    """One rank's run of a schedule: `set_up`, then the executor runs, then `check`. Checks raise `RunError`."""

    executor: Executor

    def set_up(self, checked: bool) -> None:
        """Put the data in place; `checked` for runs whose time does not matter, so that more can be checked."""
        ...

    def check(self) -> None: ...


def make_trial(
    schedule: Schedule,
    rank: int,
    transport: Transport,
    flops_per_s: float | None,
    device: str = "cpu",
    progress: Progress = no_progress,
    everyone: Everyone | None = None,
) -> Trial:
    """Test patterns, added up where blocks are sums; timed waits for kernel calls where `flops_per_s` is given, else \
real attention.

    `everyone` gives the shards of all ranks for that of one; without it less of a backward pass is checked.

    Raises `RunError` for timed waits on a GPU, where the host must not wait.
    """
    if flops_per_s is not None and schedule.task is not None and device != "cpu":
        raise RunError(f"rank {rank}: timed kernel calls are for gloo; on {device} they are real")
    if schedule.reduction is not None:
        return SumTrial(schedule, rank, transport, device, progress)
    if schedule.task is None or flops_per_s is not None:
        return PatternTrial(schedule, rank, transport, flops_per_s, device, progress)
    return layer_trial(schedule, rank, transport, device, progress, everyone)


class SumTrial:
    """Blocks hold a rank's part of a sum, and in the end the sum of all parts, computed here alone."""

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
    """Blocks hold test patterns, and a kernel call is a wait of as long as it would take."""

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
