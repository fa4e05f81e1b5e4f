"""In-process runs: the executor with ranks as threads of one process, without sockets, for tests with many cases."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from runtime.executor.messages import LostPeer, Message, Wait
from runtime.executor.streams import Streams
from runtime.executor.transports import OrdinaryMemory
from runtime.protocol.records import RankRecord, merge_records
from runtime.trials.workloads import make_trial
from tasp_lab.machines.machine import Compute
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.timeline.events import Timeline

_TIMEOUT_S = 30.0


def run_in_process(
    schedule: Schedule, receives_ahead: int = 0, whole_steps: bool = False, compute: Compute | None = None
) -> Timeline:
    """Execute a schedule once with a thread per rank, and check the result. Raises `RunError`.

    `receives_ahead` and `whole_steps` are the properties of the emulated transport; `compute` is as in
    `runtime.protocol.jobs.RunSchedule`.
    """
    mailboxes, table = Mailboxes(), _Table(schedule.world_size)

    def run(rank: int) -> RankRecord:
        transport = InProcess(rank, mailboxes, _TIMEOUT_S, receives_ahead, whole_steps)
        trial = make_trial(schedule, rank, transport, compute, gather_shards=partial(table.share, rank))
        trial.set_up(checked=True)
        trial.executor.prepare(timed=True)
        record = trial.executor.run_timed()
        trial.check()
        return record

    with ThreadPoolExecutor(schedule.world_size) as threads:
        records = list(threads.map(run, range(schedule.world_size)))
    return merge_records(records, schedule, "in-process")


class _Table:
    """All-gather of tensors between threads."""

    def __init__(self, world_size: int) -> None:
        self._places: list[torch.Tensor] = [torch.empty(0)] * world_size
        self._together = threading.Barrier(world_size, timeout=_TIMEOUT_S)

    def share(self, rank: int, own: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks; a collective."""
        self._places[rank] = own
        self._together.wait()
        found = list(self._places)
        self._together.wait()
        return found


class Mailboxes:
    """Queues between ranks that are threads of one process: (source, destination, tag) -> queue of tensors."""

    def __init__(self) -> None:
        self._boxes: dict[tuple[int, int, int], queue.SimpleQueue[torch.Tensor]] = {}

    def box(self, source: int, destination: int, tag: int) -> queue.SimpleQueue[torch.Tensor]:
        return self._boxes.setdefault((source, destination, tag), queue.SimpleQueue())


class InProcess(OrdinaryMemory):
    """The transport of one rank among threads: sent data are copied into the receiver's mailbox."""

    channels = False
    short_bytes = 0

    def __init__(
        self, rank: int, mailboxes: Mailboxes, timeout_s: float, receives_ahead: int = 0, whole_steps: bool = False
    ) -> None:
        self.receives_ahead, self.whole_steps = receives_ahead, whole_steps
        self._rank, self._mailboxes, self._timeout_s = rank, mailboxes, timeout_s
        self._posted: defaultdict[tuple[int, int], deque[Message]] = defaultdict(deque)

    @property
    def key(self) -> Hashable:
        return id(self)

    def open(self, channels: int, memory: torch.Tensor, streams: Streams) -> None:
        """No-op: messages do not wait for each other."""

    def receive(self, messages: Sequence[Message]) -> list[Wait]:
        for message in messages:
            self._posted[message.peer, message.tag].append(message)
        return [lambda m=m: self._take(m) for m in messages]  # type: ignore[misc]

    def send(self, messages: Sequence[Message]) -> list[Wait]:
        for message in messages:
            self._mailboxes.box(self._rank, message.peer, message.tag).put(message.data.clone())
        return [lambda: None for _ in messages]

    def _take(self, message: Message) -> None:
        """Wait for a message; those of one peer and tag arrive in the order in which they were posted."""
        posted = self._posted[message.peer, message.tag]
        while any(each is message for each in posted):
            try:
                arrived = self._mailboxes.box(message.peer, self._rank, message.tag).get(timeout=self._timeout_s)
            except queue.Empty:
                raise LostPeer(f"nothing arrived within {self._timeout_s} s") from None
            posted.popleft().data.copy_(arrived)
