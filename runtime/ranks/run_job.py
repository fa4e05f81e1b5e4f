"""Execution of a job as one rank of a torch.distributed process group.

>>> from runtime.protocol.jobs import RunSchedule
>>> from tasp_lab.schedules.build import collective
>>> from tasp_lab.topology.builders import full_mesh
>>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
>>> job = RunSchedule(collective("ring", full_mesh(1), 64), "auto", repeats=3)
>>> len(perform(job, timeout_s=60, progress=lambda peer: None))               # a record of each repeat
3
>>> dist.destroy_process_group()
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from runtime.executor.actions import Progress
from runtime.executor.messages import Group, LostPeer, call_all, call_peers
from runtime.executor.streams import streams_for
from runtime.executor.transports import default_device, make_transport
from runtime.protocol.heartbeat import AT_BARRIER, WORKING
from runtime.protocol.jobs import (
    BatchTime,
    Job,
    KernelTimes,
    MeasureCompute,
    MeasurePair,
    PairTimes,
    Result,
    RunSchedule,
)
from runtime.protocol.records import RankRecord
from runtime.trials.workloads import Trial, compute_alone, draw_operands, make_trial
from tasp_lab.core.errors import RunError, first_line

SETTLING_RUNS = 2
"""Runs on a GPU right before the timed ones, as it was idle while results were checked."""

OF_THIS_RANK: tuple[type[Exception], ...] = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", MemoryError))
"""Errors that no peer has caused: exhausted memory and failed kernels; before torch 2.8 those have no type."""


def perform(job: Job, timeout_s: float, progress: Progress, group: Group = None) -> Result:
    """Perform a job together with all other ranks; messages of schedules go through `group`, which has all of them.

    Raises `RunError` that names the lost rank, or this one.
    """
    try:
        if isinstance(job, RunSchedule):
            return _run_schedule(job, timeout_s, progress, group)
        if isinstance(job, MeasureCompute):
            return _measure_compute(job, timeout_s, progress)
        barrier(progress)  # of all ranks: the first call of a group opens its communicator, which its batches then use
        return measure_pair(job, timeout_s, progress)
    except OF_THIS_RANK as error:
        raise RunError(f"rank {dist.get_rank()}: {first_line(error)}") from None


def _run_schedule(job: RunSchedule, timeout_s: float, progress: Progress, group: Group) -> list[RankRecord]:
    transport, rank = make_transport(job.transport, timeout_s, group), dist.get_rank()
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
    call_all("at a barrier", dist.barrier)
    progress(WORKING)


# Messages between a pair of ranks, timed.
#
# On a host (gloo) a message is posted and waited for by itself, and the clock is that of the host. On a GPU (NCCL,
# RCCL) messages are batches on the group that schedules use, and the clock is that of the device.


MESSAGES_PER_BATCH = (1, 2, 4, 8)
"""How many messages of one byte the batches have whose times give the launch per batch and per message."""

ROUND_TRIPS = 20
"""Round trips between two events. The host can queue about a thousand kernels before it has to wait."""

HOLD_S = 0.05
"""How long a device sleeps while the host queues `ROUND_TRIPS`, far longer than that takes."""

_SLEEP_CYCLES = 10**6


def measure_pair(job: MeasurePair, timeout_s: float, progress: Progress) -> PairTimes | None:
    """Perform the job as one rank; only the source has a result. Raises `RunError` that names the lost rank."""
    rank = dist.get_rank()
    if rank not in (job.source, job.destination):
        return None
    on_gpu = dist.get_backend() == "nccl"
    pair = _DevicePair(job) if on_gpu else _HostPair(job, timeout_s, progress)
    try:
        return call_peers(on_gpu, pair.send if rank == job.source else pair.answer)
    except LostPeer as error:
        peer = job.destination if rank == job.source else job.source
        raise RunError(f"rank {rank}: lost rank {peer} while measuring ({error})") from None


class _DevicePair:
    """Both ends of a measurement on GPUs.

    Messages are batches, as in the executor: a send outside of a batch opens a communicator of two ranks, in which NCCL
    gives a message more channels. Waits make a stream wait and not the host: given a timeout, NCCL's wait polls with
    pauses of a millisecond. Both devices sleep while their hosts queue all round trips, so times are those of devices
    alone; one round trip goes before the first event, as the sleeps do not end at once.

    Sources: `pointToPoint` and `WorkNCCL::wait` in torch's ProcessGroupNCCL.cpp; NCCL's enqueue.cc for channels.
    """

    def __init__(self, job: MeasurePair) -> None:
        self._job = job
        is_source = dist.get_rank() == job.source
        self._peer = job.destination if is_source else job.source
        self._calls = (dist.isend, dist.irecv) if is_source else (dist.irecv, dist.isend)
        size = max(job.sizes_bytes, default=1)
        self._large = torch.empty(size, dtype=torch.uint8, device=default_device()).random_()
        self._tiny = self._large.new_zeros(max(MESSAGES_PER_BATCH))
        self._cycles_per_s = _cycles_per_s()

    def send(self) -> PairTimes:
        """Run the source's side."""
        sizes = [size for size in self._job.sizes_bytes for _ in range(self._job.repeats)]
        found = [self._round_trips(messages) for messages in self._batches()]
        large, tiny, batches = found[: len(sizes)], found[len(sizes) :][: self._job.tiny], found[len(sizes) :]
        answered = tuple((size, each.answered_s) for size, each in zip(sizes, large, strict=True))
        return PairTimes(
            answered,
            tuple(each.answered_s for each in tiny),
            tuple(each.posted_s for each in tiny),
            tuple(batches),
        )

    def answer(self) -> None:
        """Run the destination's side."""
        for messages in self._batches():
            self._round_trips(messages)

    def _batches(self) -> Iterator[Sequence[torch.Tensor]]:
        """The batch of each measurement: a large message, a tiny one, several tiny ones."""
        for size in self._job.sizes_bytes:
            yield from [[self._large[:size]]] * self._job.repeats
        yield from [[self._tiny[:1]]] * self._job.tiny
        for count in MESSAGES_PER_BATCH:
            yield from [self._tiny[:count].split(1)] * self._job.repeats  # type: ignore[no-untyped-call]

    def _round_trips(self, messages: Sequence[torch.Tensor]) -> BatchTime:
        """The mean time of a round trip: a batch of these messages, answered with one byte."""
        self._round_trip(messages)  # opens connections, which takes longer than the sleep
        torch.cuda.synchronize()
        torch.cuda._sleep(int(HOLD_S * self._cycles_per_s))  # type: ignore[no-untyped-call]
        self._round_trip(messages)
        began, ended = _event(), _event()
        began.record()
        posted_s = [self._round_trip(messages) for _ in range(ROUND_TRIPS)]
        ended.record()
        ended.synchronize()
        answered_s = began.elapsed_time(ended) / 1e3 / ROUND_TRIPS
        return BatchTime(len(messages), answered_s, sum(posted_s) / ROUND_TRIPS)

    def _round_trip(self, messages: Sequence[torch.Tensor]) -> float:
        """This end's half of a round trip; returns the time to post the messages."""
        posted_s = self._batch(self._calls[0], messages)
        self._batch(self._calls[1], [self._tiny[:1]])
        return posted_s

    def _batch(self, call: Callable[..., object], messages: Sequence[torch.Tensor]) -> float:
        """Post a batch and make the stream wait for it; returns the time of the host."""
        began_s = time.perf_counter()
        for work in dist.batch_isend_irecv([dist.P2POp(call, each, group_peer=self._peer) for each in messages]):
            work.wait()
        return time.perf_counter() - began_s


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _cycles_per_s() -> float:
    """The clock in which a device sleeps, which is not its compute clock on every kind of GPU."""
    began, ended = _event(), _event()
    torch.cuda._sleep(_SLEEP_CYCLES)  # type: ignore[no-untyped-call]
    began.record()
    torch.cuda._sleep(_SLEEP_CYCLES)  # type: ignore[no-untyped-call]
    ended.record()
    ended.synchronize()
    return float(_SLEEP_CYCLES / (began.elapsed_time(ended) / 1e3))


class _HostPair:
    """Both ends of a measurement on hosts. All receives are posted before the first message, as in the executor."""

    def __init__(self, job: MeasurePair, timeout_s: float, progress: Progress) -> None:
        self._job, self._progress = job, progress
        self._timeout = timedelta(seconds=timeout_s)
        self._sizes = [size for size in job.sizes_bytes for _ in range(job.repeats)]
        self._data = torch.zeros(max(job.sizes_bytes, default=1), dtype=torch.uint8)

    def send(self) -> PairTimes:
        """Run the source's side."""
        peer = self._job.destination
        answers = iter([self._post(dist.irecv, 1, peer) for _ in range(len(self._sizes) + self._job.tiny + 1)])
        answered: list[tuple[int, float]] = []
        for size in self._sizes + [1] * self._job.tiny:
            began_s = time.perf_counter()
            self._wait(self._post(dist.isend, size, peer), peer)
            self._wait(next(answers), peer)
            answered.append((size, time.perf_counter() - began_s))
        posted, works = list[float](), list[dist.Work]()
        for _ in range(self._job.tiny):
            began_s = time.perf_counter()
            works.append(self._post(dist.isend, 1, peer))
            posted.append(time.perf_counter() - began_s)
        for work in (*works, next(answers)):
            self._wait(work, peer)
        large, tiny = answered[: len(self._sizes)], answered[len(self._sizes) :]
        return PairTimes(tuple(large), tuple(seconds for _, seconds in tiny), tuple(posted))

    def answer(self) -> None:
        """Run the destination's side."""
        peer, answered = self._job.source, self._sizes + [1] * self._job.tiny
        messages = iter([self._post(dist.irecv, size, peer) for size in answered + [1] * self._job.tiny])
        for _ in answered:
            self._wait(next(messages), peer)
            self._wait(self._post(dist.isend, 1, peer), peer)
        for message in messages:
            self._wait(message, peer)
        self._wait(self._post(dist.isend, 1, peer), peer)

    def _post(self, call: Callable[..., dist.Work | None], size_bytes: int, peer: int) -> dist.Work:
        work = call(self._data[:size_bytes], peer)
        assert work is not None, "this process is not part of the group"
        return work

    def _wait(self, work: dist.Work, peer: int) -> None:
        self._progress(peer)
        work.wait(self._timeout)
        self._progress(WORKING)
