"""A walk by steps on GPU-like streams: whatever order the events allow, kernels read what was sent to them.

Three streams per rank (computing, communication, the library's own) run their operations in order, but each stream as
early or late as chance wills, only events hold them back. Kernels and transfers take time: what they read must be the
same when they begin and when they end, and what is being received is garbage until it has arrived.
"""

from __future__ import annotations

import contextlib
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.executor import Executor
from runtime.patterns import fill, verify_reads
from runtime.streams import Mark
from runtime.transport import Message, Wait
from tasp_lab.attention import ATTENTION, attention
from tasp_lab.builders import full_mesh
from tasp_lab.errors import RunError
from tasp_lab.rooms import CallRow
from tasp_lab.schedule import Schedule
from tasp_lab.workload import Workload

Operation = tuple[Callable[[], bool], Callable[[], None]]


class Device:
    """All streams of all ranks: each runs its operations in order, the next one is drawn among those that can run."""

    def __init__(self, seed: int) -> None:
        self.streams: defaultdict[tuple[int, str], deque[Operation]] = defaultdict(deque)
        self.mail: defaultdict[tuple[int, int, int], deque[torch.Tensor]] = defaultdict(deque)
        self._random = random.Random(seed)

    def run(self) -> None:
        while waiting := [stream for stream in self.streams.values() if stream]:
            able = [stream for stream in waiting if stream[0][0]()]
            assert able, "a deadlock"
            self._random.choice(able).popleft()[1]()


class Reached:
    """A point in a stream."""

    def __init__(self) -> None:
        self.reached = False

    def reach(self) -> None:
        self.reached = True

    def __call__(self) -> float:
        return 0.0


class DrawnStreams:
    """The streams of one rank; with `careless` nothing waits for anything."""

    def __init__(self, device: Device, rank: int, careless: bool) -> None:
        self.device, self.rank, self.careless, self.current = device, rank, careless, "computing"

    def queue(self, run: Callable[[], None], ready: Callable[[], bool] = lambda: True) -> None:
        self.device.streams[self.rank, self.current].append((ready, run))

    def begin(self) -> None:
        begun = self.mark()
        with self.communicating():
            self.wait(begun)

    @contextlib.contextmanager
    def in_stream(self, name: str) -> Iterator[None]:
        before, self.current = self.current, name
        try:
            yield
        finally:
            self.current = before

    def communicating(self) -> contextlib.AbstractContextManager[object]:
        return self.in_stream("communicating")

    def mark(self) -> Mark:
        mark = Reached()
        self.queue(mark.reach)
        return mark

    def wait(self, mark: Mark) -> None:
        assert isinstance(mark, Reached)
        if not self.careless:
            self.queue(lambda: None, lambda: mark.reached)

    def finish(self) -> None:
        with self.communicating():
            ended = self.mark()
        self.wait(ended)


class Library:
    """Batches of one rank on the library's own stream, as NCCL runs them."""

    receives_ahead = 0
    whole_steps = True

    def __init__(self, streams: DrawnStreams) -> None:
        self._streams, self._receives, self._done = streams, [], Reached()  # type: ignore[var-annotated]

    def receive(self, messages: Sequence[Message]) -> list[Wait]:
        self._receives, self._done = list(messages), Reached()
        return [self._wait_for(self._done)] * len(messages)

    def send(self, messages: Sequence[Message]) -> list[Wait]:
        streams, receives, done, rank = self._streams, self._receives, self._done, self._streams.rank
        mail, sent = streams.device.mail, [(message, []) for message in messages]  # type: ignore[var-annotated]
        posted = streams.mark()

        def begin() -> None:
            for message in receives:
                message.data.fill_(255)
            for message, copies in sent:
                copies.append(message.data.clone())
                mail[rank, message.peer, message.tag].append(copies[0])

        def arrived() -> bool:
            found = defaultdict(int)
            for message in receives:
                found[message.peer, rank, message.tag] += 1
            return all(len(mail[box]) >= count for box, count in found.items())

        def end() -> None:
            for message in receives:
                message.data.copy_(mail[message.peer, rank, message.tag].popleft())
            for message, copies in sent:
                if not torch.equal(message.data, copies[0]):
                    raise RunError("what was being sent has changed")
            done.reach()

        with streams.in_stream("library"):
            streams.wait(posted)
            streams.queue(begin)
            streams.queue(end, arrived)
        return [self._wait_for(done)] * len(messages)

    def _wait_for(self, done: Reached) -> Wait:
        return lambda: self._streams.wait(done)


def run(schedule: Schedule, seed: int, careless: bool = False) -> int:
    """Run a schedule on all ranks; returns how many kernel calls were checked. Raises `RunError`."""
    device = Device(seed)
    checked: list[CallRow] = []
    for rank in range(schedule.world_size):
        streams = DrawnStreams(device, rank, careless)
        executor = _executor(schedule, rank, streams, checked)
        fill(executor)
        executor.prepare(streams)
        executor.run()
    device.run()
    return len(checked)


def _executor(schedule: Schedule, rank: int, streams: DrawnStreams, checked: list[CallRow]) -> Executor:
    def compute(row: CallRow) -> None:
        assert streams.current == "computing"
        streams.queue(lambda: verify_reads(executor, row))
        streams.queue(lambda: verify_reads(executor, row))
        streams.queue(lambda: checked.append(row))

    executor = Executor(schedule, rank, Library(streams), compute)
    return executor


@given(
    st.sampled_from(sorted(ATTENTION)),
    st.integers(1, 5),
    st.integers(1, 40),
    st.sampled_from(["full", "causal"]),
    st.integers(2, 4),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_every_kernel_reads_what_was_sent(
    name: str, world_size: int, sequence: int, mask: str, rooms: int, trim: bool, seed: int
) -> None:
    workload = Workload(sequence, head_dim=4, mask=mask)  # type: ignore[arg-type]
    schedule = attention(name, full_mesh(world_size), workload, rooms=rooms, trim=trim)
    assert run(schedule, seed) == sum(len(step.calls) for step in schedule.steps)


def test_without_events_it_goes_wrong() -> None:
    """So the test above can fail."""
    schedule = attention("tasp", full_mesh(5), Workload(40, head_dim=4))
    with pytest.raises(RunError):
        run(schedule, seed=0, careless=True)
