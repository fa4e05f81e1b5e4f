"""A walk by steps on GPU-like streams: whatever order the events allow, kernels read what was sent to them.

Three streams per rank (computing, communication, the library's own) run their operations in order, but each stream as
early or late as chance wills, only events hold them back. Kernels and transfers take time: what they read must be the
same when they begin and when they end, and what is being received is garbage until it has arrived. So do sums: what is
added up is read when that begins and written when it ends, and what was written in between is lost.
"""

from __future__ import annotations

import contextlib
import random
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.executor.copies import Action, Copies
from runtime.executor.executor import Executor
from runtime.executor.messages import Message, Transport, Wait
from runtime.executor.streams import Mark, Streams
from runtime.executor.sums import Parts
from runtime.trials.patterns import PatternWork, fill, verify
from tasp_lab.core.errors import RunError
from tasp_lab.schedule.buffer_layout import OUTSIDE
from tasp_lab.schedule.calls import Calls
from tasp_lab.schedule.composition.groups import over_groups
from tasp_lab.schedule.dependencies import RESIDENT
from tasp_lab.schedule.rank_part import CallRow, Join, Place
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.backward import DATAFLOWS, Dataflow
from tasp_lab.schedules.attention.forward import CIRCULATIONS, attention
from tasp_lab.schedules.build import collective
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tests.schedules.attention.test_backward import Case, cases_of
from tests.support.selection import fifth

Operation = tuple[Callable[[], bool], Callable[[], None]]


class Device:
    """All streams of all ranks: each runs its operations in order, the next one is drawn among those that can run.

    Some streams are far slower than others.
    """

    def __init__(self, seed: int) -> None:
        self.streams: defaultdict[tuple[int, str], deque[Operation]] = defaultdict(deque)
        self.mail: defaultdict[tuple[int, int, int], deque[torch.Tensor]] = defaultdict(deque)
        self._random = random.Random(seed)
        self.held: Callable[[int, Message], bool] = lambda rank, message: False
        self.arrived: list[tuple[int, int]] = []
        """The rank and the tag of each message that has arrived."""

    def run(self) -> None:
        self.advance()
        assert not any(self.streams.values()), "a deadlock"

    def advance(self) -> None:
        """Run until no stream can run."""
        weight = {name: self._random.choice([1, 1e-4]) for name in self.streams}
        while waiting := [name for name, stream in self.streams.items() if stream]:
            able = [name for name in waiting if self.streams[name][0][0]()]
            if not able:
                return
            drawn = self._random.choices(able, [weight[name] for name in able])[0]
            self.streams[drawn].popleft()[1]()


class Reached:
    """A point in a stream."""

    def __init__(self, stream: str) -> None:
        self.stream, self.reached = stream, False

    def reach(self) -> None:
        self.reached = True

    def __call__(self) -> float:
        return 0.0


Edge = tuple[str, str]
"""A stream, and one that waits for it."""

EDGES = [
    ("computing", "communicating"),
    ("communicating", "computing"),
    ("communicating", "library"),
    ("library", "communicating"),
]

BETWEEN_CHANNELS = ("communicating", "communicating")
BETWEEN_LANES = ("computing", "computing")


def kind_of(stream: str) -> str:
    """A stream without its channel."""
    return stream.split()[0]


class DrawnStreams:
    """The streams of one rank; over the `ignored` edges nothing waits for anything."""

    queues = True

    def __init__(self, device: Device, rank: int, ignored: Collection[Edge]) -> None:
        self.device, self.rank, self.ignored, self.current = device, rank, ignored, "computing"
        self._used: set[str] = set()

    def queue(self, run: Callable[[], None], ready: Callable[[], bool] = lambda: True) -> None:
        self.device.streams[self.rank, self.current].append((ready, run))

    def begin(self) -> None:
        self._began = self.mark()
        self._used.clear()

    @contextlib.contextmanager
    def in_stream(self, name: str) -> Iterator[None]:
        before, self.current = self.current, name
        try:
            yield
        finally:
            self.current = before

    def communicating(self, channel: int = 0) -> contextlib.AbstractContextManager[object]:
        return self._in_side_stream(f"communicating {channel}")

    def computing(self, lane: int = 0) -> contextlib.AbstractContextManager[object]:
        return self._in_side_stream(f"computing {lane}") if lane else self.in_stream("computing")

    def _in_side_stream(self, name: str) -> contextlib.AbstractContextManager[object]:
        if name not in self._used:
            self._used.add(name)
            with self.in_stream(name):
                self.wait(self._began)
        return self.in_stream(name)

    def mark(self) -> Mark:
        mark = Reached(self.current)
        self.queue(mark.reach)
        return mark

    def wait(self, mark: Mark) -> None:
        assert isinstance(mark, Reached)
        if (kind_of(mark.stream), kind_of(self.current)) not in self.ignored:
            self.queue(lambda: None, lambda: mark.reached)

    def finish(self) -> None:
        for name in self._used:
            with self.in_stream(name):
                ended = self.mark()
            self.wait(ended)


class Library(Transport):
    """Batches of one rank on the library's own stream, as NCCL runs them; with `channels`, one for each of them."""

    receives_ahead = 0
    whole_steps = True

    def __init__(self, streams: DrawnStreams, channels: bool) -> None:
        self._streams, self._receives, self._done = streams, [], Reached("library")  # type: ignore[var-annotated]
        self.channels = channels

    def open(self, channels: int, memory: torch.Tensor, streams: Streams) -> None:
        """No-op: streams are made when they are used."""

    def receive(self, messages: Sequence[Message]) -> list[Wait]:
        self._receives, self._done = list(messages), Reached("library")
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
            found: defaultdict[tuple[int, int, int], int] = defaultdict(int)
            for message in receives:
                found[message.peer, rank, message.tag] += 1
            if any(streams.device.held(rank, message) for message in receives):
                return False
            return all(len(mail[box]) >= count for box, count in found.items())

        def end() -> None:
            for message in receives:
                message.data.copy_(mail[message.peer, rank, message.tag].popleft())
                streams.device.arrived.append((rank, message.tag))
            for message, copies in sent:
                if not torch.equal(message.data, copies[0]):
                    raise RunError("what was being sent has changed")
            done.reach()

        channel = next((message.channel for message in (*receives, *messages)), 0)
        with streams.in_stream(f"library {channel}"):
            streams.wait(posted)
            streams.queue(begin)
            streams.queue(end, arrived)
        return [self._wait_for(done)] * len(messages)

    def _wait_for(self, done: Reached) -> Wait:
        return lambda: self._streams.wait(done)


Later = list[torch.Tensor]
"""Bytes that an operation of a stream will have found."""


class SlowCopies(Copies):
    """Kernel calls and joins as operations of the streams of a rank. What the host notes, it notes at once."""

    def __init__(self, executor: Executor, work: PatternWork, streams: DrawnStreams, checked: list[CallRow]) -> None:
        super().__init__(executor.schedule, executor.part, executor.memory, work, as_bytes=True)
        self._patterns, self._streams, self._checked = work, streams, checked
        self._coming: dict[tuple[int, int], Later] = {}

    def call(self, row: CallRow) -> Action:
        return lambda: self._queue_call(row)

    def _queue_call(self, row: CallRow) -> None:
        assert kind_of(self._streams.current) == "computing"
        found: Later = []
        self._streams.queue(lambda: self._read(row))
        self._streams.queue(lambda: found.extend(part.fields[0] for part in self._read(row)))
        for at, place in enumerate(row.adds):
            part: Later = []
            self._streams.queue(lambda part=part, at=at: part.append(found[at]))
            if place.since == RESIDENT:
                self._sum_up(place, [part], [])
            else:
                self._coming[row.operation, place.block] = part
        self._streams.queue(lambda: self._checked.append(row))

    def _read(self, row: CallRow) -> Sequence[Parts]:
        return self._patterns.compute(row, [self.operand(each) for each in row.operands])

    def join(self, joins: Sequence[Join]) -> Action:
        return lambda: [self._join(each) for each in joins]

    def _join(self, each: Join) -> None:
        assert kind_of(self._streams.current) == "communicating"
        keys = [(operation, each.place.block) for operation in each.operations]
        calls = [key for key in keys if key[0] >= self.part.first_call]
        if any(key not in self._coming for key in calls):
            raise RunError(f"{each} is joined when the host knows of too few parts")
        self._sum_up(each.place, [self._coming.pop(key) for key in calls], each.received, each.begun)

    def _sum_up(self, place: Place, parts: Sequence[Later], received: Sequence[int], begun: bool = False) -> None:
        """Join parts and what lies at some offsets to a copy, whose content is read when that begins."""
        if place.since == RESIDENT:
            begun = place.block in self._has_parts
            self._has_parts.add(place.block)
        found: Later = []

        def begin() -> None:
            if not all(parts):
                raise RunError(f"a part of block {place.block} is not computed yet")
            terms = [part[0] for part in parts] + [self.data(place.block, offset) for offset in received]
            terms += [self._bytes(place)] if begun else []
            found.append(torch.stack(terms).sum(0, dtype=torch.uint8))

        def end() -> None:
            self._bytes(place).copy_(found[0])

        self._streams.queue(begin)
        self._streams.queue(end)

    def _bytes(self, place: Place) -> torch.Tensor:
        is_outside = place.offset == OUTSIDE
        return self.work.bound([place.block])[0] if is_outside else self.data(place.block, place.offset)


def run(schedule: Schedule, seed: int, ignored: Collection[Edge] = (), channels: bool = True) -> int:
    """Run a schedule on all ranks; returns how many kernel calls were checked. Raises `RunError`.

    Whatever comes next in the stream of computing finds all results complete.
    """
    device, checked = issued(schedule, seed, ignored, channels)
    device.run()
    return len(checked)


def issued(
    schedule: Schedule, seed: int, ignored: Collection[Edge] = (), channels: bool = True
) -> tuple[Device, list[CallRow]]:
    """What all ranks have queued in their streams; and the calls, which are checked when it runs."""
    device = Device(seed)
    checked: list[CallRow] = []
    for rank in range(schedule.world_size):
        streams = DrawnStreams(device, rank, ignored)
        work = PatternWork(schedule, rank)
        executor = Executor(schedule, rank, Library(streams, channels), work, as_bytes=True)
        executor.copies = SlowCopies(executor, work, streams, checked)
        fill(executor, work)
        executor.prepare(streams)
        executor.run()
        streams.queue(partial(verify, executor, work))
    return device, checked


def _calls(schedule: Schedule) -> int:
    return sum(len(calls) for step in schedule.steps for calls in step.calls)


@given(
    st.sampled_from(sorted(CIRCULATIONS)),
    st.integers(1, 5),
    st.integers(1, 40),
    st.sampled_from(["full", "causal"]),
    st.integers(2, 4),
    st.booleans(),
    st.integers(0, 2**32),
    st.booleans(),
)
def test_every_kernel_reads_what_was_sent(
    name: str, world_size: int, sequence: int, mask: str, buffers: int, trim: bool, seed: int, channels: bool
) -> None:
    workload = Workload(sequence, head_dim=4, mask=mask, heads=1)  # type: ignore[arg-type]
    schedule = attention(name, full_mesh(world_size), workload, buffers=buffers, trim=trim)
    assert run(schedule, seed, channels=channels) == _calls(schedule)


@settings(max_examples=80)
@given(cases_of(st.sampled_from(DATAFLOWS), max_positions=20), st.integers(0, 2**32), st.booleans())
def test_every_gradient_is_complete(case: Case, seed: int, channels: bool) -> None:
    assert run(case.backward, seed, channels=channels) == _calls(case.backward)


@settings(max_examples=100)
@given(cases_of(st.sampled_from(DATAFLOWS), max_positions=20), st.integers(1, 3), st.integers(0, 2**32))
def test_several_lanes_of_calls(case: Case, lanes: int, seed: int) -> None:
    """Calls of a step on different lanes run at the same time, in streams of their own."""
    schedule = on_lanes(case.backward, lanes)
    assert run(schedule, seed) == _calls(schedule)


def on_lanes(schedule: Schedule, lanes: int) -> Schedule:
    """The calls of each rank and step in turn on several lanes, those of the next step beginning with the next lane."""
    steps = []
    for index, step in enumerate(schedule.steps):
        calls = list[Calls]()
        for each in step.calls:
            lane = (np.arange(len(each)) + index) % lanes
            chosen = (np.flatnonzero(lane == number) for number in range(lanes))
            calls += (replace(each.select(own), lane=number) for number, own in enumerate(chosen) if len(own))
        steps.append(replace(step, calls=tuple(calls)))
    return replace(schedule, steps=steps)


@pytest.mark.parametrize("inner_first", [False, True])
@pytest.mark.parametrize("name", ["ring", "ring-reduce-scatter"])
def test_rings_of_rings(name: str, inner_first: bool) -> None:
    """Two channels, the second of which goes on steps later with what the first one brought."""
    for seed in range(fifth(50)):
        run(ring_of_rings(name, inner_first), seed)


def ring_of_rings(name: str = "ring", inner_first: bool = False) -> Schedule:
    """Two groups of four."""
    inner, outer = collective(name, full_mesh(4), 32), collective(name, full_mesh(2), 32)
    return over_groups(inner, outer, inner_first=inner_first)


@pytest.mark.parametrize(("channels", "expected"), [(True, 3), (False, 0)])
def test_the_inner_ring_does_not_wait_for_the_outer_one(channels: bool, expected: int) -> None:
    """A message of the outer ring to rank 0 takes forever; beside it, the inner ring brings the blocks of its group.

    In one batch of all lanes it holds up rank 0 at once, since a batch ends as a whole.
    """
    schedule = ring_of_rings()
    device, _ = issued(schedule, seed=0, channels=channels)
    device.held = lambda rank, message: rank == 0 and message.tag % schedule.lanes == 1
    device.advance()
    assert len([tag for rank, tag in device.arrived if rank == 0]) == expected


def test_what_comes_home_is_added_when_the_rank_has_added_its_own() -> None:
    """Rank 0 sees no keys but its own: nothing else makes communication wait for its call."""
    case = Case("ring-attention", "full-mesh:3", Workload(6, head_dim=2, mask="causal", heads=1), "rotate-kv")
    for seed in range(fifth(100)):
        run(case.backward, seed)


def test_own_gradients_may_come_home_before_the_rank_has_added_its_own() -> None:
    """Calls on own blocks at the last step instead of the first: now they wait for what came home."""
    schedule = Case("tasp", "full-mesh:4", Workload(24, head_dim=2, heads=1, mask="full"), "rotate-kv").backward
    first, *others, last = schedule.steps
    steps = [replace(first, calls=()), *others, replace(last, calls=first.calls)]
    for seed in range(fifth(100)):
        run(replace(schedule, steps=steps), seed)


def test_without_events_it_goes_wrong() -> None:
    """So the tests above can fail."""
    schedule = attention("tasp", full_mesh(5), Workload(40, head_dim=4, heads=1, mask="full"))
    with pytest.raises(RunError):
        run(schedule, seed=0, ignored=EDGES)


@pytest.mark.parametrize("edge", EDGES, ids="->".join)
@pytest.mark.parametrize("dataflow", DATAFLOWS)
def test_no_event_can_be_left_out_of_a_backward_pass(dataflow: Dataflow, edge: Edge) -> None:
    case = Case("tasp", "full-mesh:4", Workload(24, head_dim=2, heads=1, mask="full"), dataflow)

    def run_often() -> None:
        for seed in range(20):
            run(case.backward, seed, ignored=[edge])

    with pytest.raises(RunError):
        run_often()


def test_channels_wait_for_each_other_where_they_must() -> None:
    """The inner ring passes on what the outer one brought."""

    def run_often() -> None:
        for seed in range(20):
            run(ring_of_rings(), seed, ignored=[BETWEEN_CHANNELS])

    with pytest.raises(RunError):
        run_often()


def test_lanes_of_calls_wait_for_each_other_where_they_must() -> None:
    """All add to the same gradients of the rank's own queries."""
    case = Case("zigzag-ring-attention", "full-mesh:4", Workload(24, head_dim=2, mask="causal", heads=1), "rotate-kv")

    def run_often() -> None:
        for seed in range(20):
            run(on_lanes(case.backward, 2), seed, ignored=[BETWEEN_LANES])

    with pytest.raises(RunError):
        run_often()
