"""Performing a job as one rank of a torch.distributed process group."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from runtime.executor import Executor, Progress
from runtime.jobs import Job, MeasurePair, PairTimes, Result, RunSchedule
from runtime.records import RankRecord
from runtime.transport import TRANSPORTS
from tasp_lab.errors import RunError


def perform(job: Job, timeout_s: float, progress: Progress) -> Result:
    """Perform a job together with all other ranks. Raises `RunError`, naming ranks."""
    if isinstance(job, RunSchedule):
        return _run_schedule(job, timeout_s, progress)
    return _measure_pair(job, timeout_s, progress)


def device() -> str:
    """Where this rank's blocks live: its GPU for NCCL and RCCL, else the host."""
    return f"cuda:{torch.cuda.current_device()}" if dist.get_backend() == "nccl" else "cpu"


def _run_schedule(job: RunSchedule, timeout_s: float, progress: Progress) -> list[RankRecord]:
    transport = TRANSPORTS[job.transport](timeout_s)
    executor = Executor(job.schedule, dist.get_rank(), transport, device(), progress)
    records: list[RankRecord] = []
    for _ in range(job.warm_ups + job.repeats):
        executor.fill()
        barrier()
        records.append(executor.run())
        executor.verify()
    return records[job.warm_ups :]


def barrier() -> None:
    """Wait for all ranks. Raises `RunError` when one of them is gone."""
    try:
        dist.barrier()
    except RuntimeError as error:
        raise RunError(f"rank {dist.get_rank()}: lost a rank at a barrier ({str(error).splitlines()[0]})") from None


def _measure_pair(job: MeasurePair, timeout_s: float, progress: Progress) -> PairTimes | None:
    rank = dist.get_rank()
    barrier()
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
        raise RunError(f"rank {rank}: lost rank {peer} while measuring ({str(error).splitlines()[0]})") from None


class _Pair:
    """Both ends of a point-to-point measurement. Receives are posted before the message they wait for is sent."""

    def __init__(self, job: MeasurePair, timeout_s: float, progress: Progress) -> None:
        self._job, self._progress = job, progress
        self._timeout = timedelta(seconds=timeout_s)
        self._sizes = [size for size in job.sizes_bytes for _ in range(job.repeats)]
        self._data = torch.zeros(max(job.sizes_bytes, default=1), dtype=torch.uint8, device=device())

    def send(self) -> PairTimes:
        """The source's side."""
        answers = [self._receive(1, self._job.destination) for _ in range(self._count())]
        answered: list[tuple[int, float]] = []
        for size in self._sizes + [1] * self._job.tiny:
            began = time.perf_counter()
            self._send(size, self._job.destination)
            self._wait(answers.pop(0), self._job.destination)
            answered.append((size, time.perf_counter() - began))
        posted = self._post_back_to_back()
        self._wait(answers.pop(0), self._job.destination)
        large, tiny = answered[: len(self._sizes)], answered[len(self._sizes) :]
        return PairTimes(tuple(large), tuple(seconds for _, seconds in tiny), tuple(posted))

    def answer(self) -> None:
        """The destination's side."""
        sizes = self._sizes + [1] * self._job.tiny
        waiting = [self._receive(size, self._job.source) for size in sizes]
        back_to_back = [self._receive(1, self._job.source) for _ in range(self._job.tiny)]
        for work in waiting:
            self._wait(work, self._job.source)
            self._send(1, self._job.source)
        for work in back_to_back:
            self._wait(work, self._job.source)
        self._send(1, self._job.source)

    def _count(self) -> int:
        return len(self._sizes) + self._job.tiny + 1

    def _post_back_to_back(self) -> list[float]:
        posted: list[float] = []
        works: list[dist.Work] = []
        for _ in range(self._job.tiny):
            began = time.perf_counter()
            works.append(self._posted(dist.isend(self._data[:1], self._job.destination)))
            posted.append(time.perf_counter() - began)
        for work in works:
            self._wait(work, self._job.destination)
        return posted

    def _receive(self, size_bytes: int, peer: int) -> dist.Work:
        return self._posted(dist.irecv(self._data[:size_bytes], peer))

    def _send(self, size_bytes: int, peer: int) -> None:
        self._wait(self._posted(dist.isend(self._data[:size_bytes], peer)), peer)

    def _posted(self, work: dist.Work | None) -> dist.Work:
        assert work is not None, "this process is not part of the group"
        return work

    def _wait(self, work: dist.Work, peer: int) -> None:
        self._progress(0, peer)
        work.wait(self._timeout)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        self._progress(0, -1)
