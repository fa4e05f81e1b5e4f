"""Execution of a job as one rank of a torch.distributed process group."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from runtime.executor.message_io import Progress
from runtime.executor.streams import streams_for
from runtime.executor.transports import default_device, make_transport
from runtime.protocol.heartbeat import AT_BARRIER, WORKING
from runtime.protocol.jobs import Job, MeasureCompute, MeasurePair, PairTimes, Result, RunSchedule
from runtime.protocol.records import RankRecord
from runtime.trials.workloads import compute_alone, make_trial
from tasp_lab.errors import RunError, first_line


def perform(job: Job, timeout_s: float, progress: Progress) -> Result:
    """Perform a job together with all other ranks. Raises `RunError` that names the lost rank."""
    if isinstance(job, RunSchedule):
        return _run_schedule(job, timeout_s, progress)
    if isinstance(job, MeasureCompute):
        return _measure_compute(job, timeout_s, progress)
    return _measure_pair(job, timeout_s, progress)


def _run_schedule(job: RunSchedule, timeout_s: float, progress: Progress) -> list[RankRecord]:
    transport = make_transport(job.transport, timeout_s)
    trial = make_trial(
        job.schedule, dist.get_rank(), transport, job.flops_per_s, default_device(), progress, _gather_shards
    )
    records: list[RankRecord] = []
    for run in range(job.warm_ups + job.repeats):
        trial.set_up(checked=run < job.warm_ups)
        trial.executor.prepare(streams_for(trial.executor.memory.device, timed=True))
        barrier(progress)
        records.append(trial.executor.run_timed())
        trial.check()
    return records[job.warm_ups :]


def _gather_shards(own: torch.Tensor) -> list[torch.Tensor]:
    """The shards of all ranks."""
    found: list[torch.Tensor | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own.cpu())
    return [each.to(own.device) for each in found if each is not None]


def _measure_compute(job: MeasureCompute, timeout_s: float, progress: Progress) -> float:
    transport = make_transport("auto", timeout_s)
    trial = make_trial(job.schedule, dist.get_rank(), transport, None, default_device(), progress)
    trial.executor.memory.zero_()
    seconds = []
    for _ in range(job.repeats + 1):
        trial.set_up(checked=False)
        barrier(progress)
        seconds.append(compute_alone(trial.executor))
    return statistics.median(seconds[1:])


def barrier(progress: Progress) -> None:
    """Wait for all ranks. Raises `RunError` if a rank is lost."""
    progress(AT_BARRIER)
    try:
        dist.barrier()
    except RuntimeError as error:
        raise RunError(f"rank {dist.get_rank()}: lost a rank at a barrier ({first_line(error)})") from None
    progress(WORKING)


def _measure_pair(job: MeasurePair, timeout_s: float, progress: Progress) -> PairTimes | None:
    rank = dist.get_rank()
    barrier(progress)
    if rank not in (job.source, job.destination):
        return None
    pair = _Pair(job, timeout_s, progress)
    try:
        if rank == job.source:
            return pair.send()
        pair.answer()
        return None
    except RuntimeError as error:
        peer = job.destination if rank == job.source else job.source
        raise RunError(f"rank {rank}: lost rank {peer} while measuring ({first_line(error)})") from None


class _Pair:
    """Both ends of a point-to-point measurement.

    With gloo all receives are posted before the first message, as in the executor. With NCCL a posted receive blocks
    the sends queued behind it, so each is posted in its turn.
    """

    def __init__(self, job: MeasurePair, timeout_s: float, progress: Progress) -> None:
        self._job, self._progress = job, progress
        self._timeout = timedelta(seconds=timeout_s)
        self._sizes = [size for size in job.sizes_bytes for _ in range(job.repeats)]
        self._data = torch.zeros(max(job.sizes_bytes, default=1), dtype=torch.uint8, device=default_device())

    def send(self) -> PairTimes:
        """Run the source's side."""
        peer = self._job.destination
        answers = self._receives([1] * (len(self._sizes) + self._job.tiny + 1), peer)
        answered: list[tuple[int, float]] = []
        for size in self._sizes + [1] * self._job.tiny:
            began = time.perf_counter()
            self._send(size, peer)
            self._wait(next(answers), peer)
            answered.append((size, time.perf_counter() - began))
        posted = self._post_back_to_back(peer)
        self._wait(next(answers), peer)
        large, tiny = answered[: len(self._sizes)], answered[len(self._sizes) :]
        return PairTimes(tuple(large), tuple(seconds for _, seconds in tiny), tuple(posted))

    def answer(self) -> None:
        """Run the destination's side."""
        peer = self._job.source
        answered = self._sizes + [1] * self._job.tiny
        messages = self._receives(answered + [1] * self._job.tiny, peer)
        for _ in answered:
            self._wait(next(messages), peer)
            self._send(1, peer)
        for message in messages:
            self._wait(message, peer)
        self._send(1, peer)

    def _receives(self, sizes_bytes: list[int], peer: int) -> Iterator[dist.Work]:
        """Receives in order: all posted at once with gloo, each posted on demand with NCCL."""
        lazily = (self._posted(dist.irecv(self._data[:size], peer)) for size in sizes_bytes)
        return lazily if dist.get_backend() == "nccl" else iter(list(lazily))

    def _post_back_to_back(self, peer: int) -> list[float]:
        posted: list[float] = []
        works: list[dist.Work] = []
        for _ in range(self._job.tiny):
            began = time.perf_counter()
            works.append(self._posted(dist.isend(self._data[:1], peer)))
            posted.append(time.perf_counter() - began)
        for work in works:
            self._wait(work, peer)
        return posted

    def _send(self, size_bytes: int, peer: int) -> None:
        self._wait(self._posted(dist.isend(self._data[:size_bytes], peer)), peer)

    def _posted(self, work: dist.Work | None) -> dist.Work:
        assert work is not None, "this process is not part of the group"
        return work

    def _wait(self, work: dist.Work, peer: int) -> None:
        self._progress(peer)
        work.wait(self._timeout)
        if dist.get_backend() == "nccl":
            torch.cuda.current_stream().synchronize()
        self._progress(WORKING)
