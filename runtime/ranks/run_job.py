"""Execution of a job as one rank of a torch.distributed process group."""

from __future__ import annotations

import torch
import torch.distributed as dist

from runtime.executor.message_io import Progress
from runtime.executor.streams import streams_for
from runtime.executor.transports import LostPeer, call_peers, default_device, make_transport
from runtime.protocol.heartbeat import AT_BARRIER, WORKING
from runtime.protocol.jobs import Job, KernelTimes, MeasureCompute, MeasurePair, PairTimes, Result, RunSchedule
from runtime.protocol.records import RankRecord
from runtime.trials.pair_times import measure_pair
from runtime.trials.workloads import Trial, compute_alone, draw_operands, make_trial
from tasp_lab.core.errors import RunError, first_line

SETTLING_RUNS = 2
"""Runs on a GPU right before the timed ones, as it was idle while results were checked."""

OF_THIS_RANK: tuple[type[Exception], ...] = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", MemoryError))
"""Errors that no peer has caused: exhausted memory and failed kernels; before torch 2.8 those have no type."""


def perform(job: Job, timeout_s: float, progress: Progress) -> Result:
    """Perform a job together with all other ranks. Raises `RunError` that names the lost rank, or this one."""
    try:
        return _perform(job, timeout_s, progress)
    except OF_THIS_RANK as error:
        raise RunError(f"rank {dist.get_rank()}: {first_line(error)}") from None


def _perform(job: Job, timeout_s: float, progress: Progress) -> Result:
    if isinstance(job, RunSchedule):
        return _run_schedule(job, timeout_s, progress)
    if isinstance(job, MeasureCompute):
        return _measure_compute(job, timeout_s, progress)
    return _measure_pair(job, timeout_s, progress)


def _run_schedule(job: RunSchedule, timeout_s: float, progress: Progress) -> list[RankRecord]:
    transport, rank = make_transport(job.transport, timeout_s), dist.get_rank()
    trial = make_trial(job.schedule, rank, transport, job.compute_of(rank), default_device(), progress, _gather_shards)
    for _ in range(job.warm_ups):
        _run_once(trial, progress, checked=True)
        trial.check()
    for _ in range(SETTLING_RUNS if trial.executor.memory.is_cuda else 0):
        _run_once(trial, progress, checked=False)
    records = [_run_once(trial, progress, checked=False) for _ in range(job.repeats)]
    trial.check()
    transport.give_back(trial.executor.memory)
    return records


def _run_once(trial: Trial, progress: Progress, checked: bool) -> RankRecord:
    """Run a trial once; between the barrier and the start the host does nothing else."""
    trial.set_up(checked)
    trial.executor.prepare(streams_for(trial.executor.memory.device, timed=True), timed=True)
    barrier(progress)
    return trial.executor.run_timed()


def _gather_shards(own: torch.Tensor) -> list[torch.Tensor]:
    """The shards of all ranks."""
    found: list[torch.Tensor | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own.cpu())
    return [each.to(own.device) for each in found if each is not None]


def _measure_compute(job: MeasureCompute, timeout_s: float, progress: Progress) -> KernelTimes:
    transport = make_transport("auto", timeout_s)
    trial = make_trial(job.schedule, dist.get_rank(), transport, None, default_device(), progress)
    found = []
    for _ in range(job.repeats + 1):
        draw_operands(trial.executor)
        trial.set_up(checked=False)
        barrier(progress)
        found.append(compute_alone(trial.executor))
    return sorted(found[1:], key=lambda times: times.time_s)[job.repeats // 2]


def barrier(progress: Progress) -> None:
    """Wait for all ranks. Raises `RunError` if a rank is lost."""
    progress(AT_BARRIER)
    try:
        call_peers(dist.get_backend() == "nccl", dist.barrier)
    except LostPeer as error:
        raise RunError(f"rank {dist.get_rank()}: lost a rank at a barrier ({error})") from None
    progress(WORKING)


def _measure_pair(job: MeasurePair, timeout_s: float, progress: Progress) -> PairTimes | None:
    barrier(progress)  # of all ranks: the first call of a group opens its communicator, which its batches then use
    return measure_pair(job, timeout_s, progress)
