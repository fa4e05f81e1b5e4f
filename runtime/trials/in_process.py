"""Runs of a schedule with all ranks in this process, over a loopback: no ports, no GPUs, any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from runtime.executor.loopback import Board, Loopback
from runtime.executor.streams import Streams
from runtime.protocol.records import merge_records
from runtime.trials.layers import AttentionTrial
from runtime.trials.workloads import Trial, make_trial
from tasp_lab.machines.machine import Compute
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.timeline.events import Timeline

TIMEOUT_S = 120.0


def run_in_process(schedule: Schedule, receives_ahead: int = 0, compute: Compute | None = None) -> Timeline:
    """Execute a schedule once on this host, each rank a thread, and check the result. Raises `RunError`.

    `receives_ahead` is a property of the emulated transport; `compute` is as in `runtime.protocol.jobs.RunSchedule`.
    """
    board = Board(TIMEOUT_S)
    transports = [Loopback(board, rank, receives_ahead, whole_steps=False) for rank in range(schedule.world_size)]
    trials = make_trials(schedule, transports, compute)
    for each in trials:
        each.set_up(checked=True)
    for each in trials:
        each.executor.prepare(Streams(), timed=True)
    with ThreadPoolExecutor(schedule.world_size) as threads:
        records = list(threads.map(lambda each: each.executor.run_timed(), trials))
    for each in trials:
        each.check()
    return merge_records(records, schedule, "in-process")


def make_trials(
    schedule: Schedule, transports: Sequence[Loopback], compute: Compute | None = None, device: str = "cpu"
) -> list[Trial]:
    """The trials of all ranks, which have the results of a forward pass from each other."""
    trials: list[Trial] = []

    def gather(own: torch.Tensor) -> list[torch.Tensor]:
        of_layer = [each for each in trials if isinstance(each, AttentionTrial)]
        name = next(name for name in ("out", "lse") if any(getattr(each, name) is own for each in of_layer))
        return [getattr(each, name) for each in of_layer]

    trials += [
        make_trial(schedule, rank, transport, compute, device, gather_shards=gather)
        for rank, transport in enumerate(transports)
    ]
    return trials
