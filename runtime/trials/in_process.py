"""Runs of a schedule with all ranks in one process over a loopback, for ``gpu-check --one`` and tests of many cases."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from runtime.executor.executor import Executor
from runtime.executor.loopback import Board, Loopback, prepare_on, run_together
from runtime.executor.streams import Streams
from runtime.protocol.records import merge_records
from runtime.trials.layers import AttentionTrial
from runtime.trials.workloads import Trial, make_trial
from tasp_lab.machines.machine import Compute
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.timeline.events import Timeline

_TIMEOUT_S = 120.0


def run_in_process(
    schedule: Schedule, receives_ahead: int = 0, whole_steps: bool = False, compute: Compute | None = None
) -> Timeline:
    """Execute a schedule once on this host, as with gloo, and check the result. Raises `RunError`.

    By lanes each rank is a thread; by whole steps they take turns. `receives_ahead` and `whole_steps` are the
    properties of the emulated transport; `compute` is as in `runtime.protocol.jobs.RunSchedule`.
    """
    board = Board(_TIMEOUT_S)
    transports = [
        Loopback(board, rank, receives_ahead, whole_steps, channels=False) for rank in range(schedule.world_size)
    ]
    trials = make_trials(schedule, transports, compute)
    executors = [each.executor for each in trials]
    for each in trials:
        each.set_up(checked=True)
    for executor in executors:
        executor.prepare(Streams(), timed=True)
    began_s = time.monotonic()
    if whole_steps:
        run_together(executors, board)
        records = [each.record(began_s) for each in executors]
    else:
        with ThreadPoolExecutor(schedule.world_size) as threads:
            records = list(threads.map(lambda each: each.run_timed(), executors))
    for each in trials:
        each.check()
    return merge_records(records, schedule, "in-process")


def run_on_one_device(
    schedule: Schedule,
    device: torch.device,
    seed: int = 0,
    transports: type[Loopback] = Loopback,
    change: Callable[[Executor], None] = lambda executor: None,
) -> None:
    """Execute a schedule once as on a GPU, all ranks on this device, in an order of ranks and of streams that is drawn.

    `transports` and `change`, which is called with each executor before it runs, are for planted faults.

    Raises `RunError` if ranks wait for each other, use memory that is in use, or have a wrong result.
    """
    board = Board(_TIMEOUT_S)
    trials = make_trials(schedule, [transports(board, rank) for rank in range(schedule.world_size)], None, str(device))
    for each in trials:
        each.set_up(checked=True)
    executors = [each.executor for each in trials]
    streams = prepare_on(executors, device)
    for executor in executors:
        change(executor)
    run_together(executors, board, seed, streams)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    board.check()
    for each in trials:
        each.check()


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
