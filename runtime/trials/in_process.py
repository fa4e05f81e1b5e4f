"""Runs of a schedule with all ranks in this process, a thread each: no ports, no GPUs, any number of ranks::

run_in_process(collective("ring", full_mesh(4), 1024))  # a timeline
"""

from __future__ import annotations

import queue
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from runtime.executor.messages import LostPeer, Message, Transport, Wait, no_wait
from runtime.executor.streams import Streams
from runtime.protocol.records import merge_records
from runtime.trials.layers import AttentionTrial
from runtime.trials.workloads import Trial, make_trial
from tasp_lab.machines.machine import Compute
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.timeline.events import Timeline

TIMEOUT_S = 120.0
"""What a rank waits for another one at most."""


class _Boxes(Transport):
    """The transport of one rank: a message lies in a box of its source, destination and tag until it is received."""

    whole_steps = False

    def __init__(self, boxes: defaultdict[tuple[int, int, int], queue.SimpleQueue[torch.Tensor]], rank: int) -> None:
        self._boxes, self._rank = boxes, rank

    def receive(self, messages: Sequence[Message]) -> list[Wait]:
        return [partial(self._take, message) for message in messages]

    def _take(self, message: Message) -> None:
        try:
            message.data.copy_(self._boxes[message.peer, self._rank, message.tag].get(timeout=TIMEOUT_S))
        except queue.Empty:
            raise LostPeer(f"nothing arrived within {TIMEOUT_S:g} s") from None

    def send(self, messages: Sequence[Message]) -> list[Wait]:
        for message in messages:
            self._boxes[self._rank, message.peer, message.tag].put(message.data.clone())
        return [no_wait] * len(messages)


def run_in_process(schedule: Schedule) -> Timeline:
    """Execute a schedule once on this host, each rank a thread, and check the result. Raises `RunError`."""
    boxes = defaultdict[tuple[int, int, int], queue.SimpleQueue[torch.Tensor]](queue.SimpleQueue)
    return run_threads(schedule, [_Boxes(boxes, rank) for rank in range(schedule.world_size)])


def run_threads(schedule: Schedule, transports: Sequence[Transport], compute: Compute | None = None) -> Timeline:
    """As `run_in_process`, over transports; `compute` is as in `runtime.protocol.jobs.RunSchedule`."""
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
    schedule: Schedule, transports: Sequence[Transport], compute: Compute | None = None, device: str = "cpu"
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
