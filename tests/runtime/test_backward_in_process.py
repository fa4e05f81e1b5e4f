"""Backward passes by the executor, every rank a thread: sums of test patterns, which the trial checks bit for bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from threading import Event

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.executor.copies import Action, Copies
from runtime.executor.messages import Message, Transport, Wait
from runtime.executor.streams import Streams
from runtime.trials.patterns import PatternTrial
from tasp_lab.core.errors import RunError
from tasp_lab.machines.machine import ComputeRate
from tasp_lab.schedule.dependencies import RESIDENT
from tasp_lab.schedule.rank_part import Join
from tasp_lab.schedules.attention.backward import DATAFLOWS
from tasp_lab.timeline.events import DIFFERENTIATE
from tasp_lab.workload.layer import Workload
from tests.schedules.attention.test_backward import Case, cases_of
from tests.support.one_device import run_in_process
from tests.support.schedules import assert_every_transfer_once, task_of
from tests.support.selection import fifth

COMPUTE = ComputeRate(1e12)
"""Test patterns instead of attention; a call takes no time worth waiting for."""

TRANSPORTS = [(0, False), (4, False), (0, True)]
"""Receives posted in their turn or steps ahead, and whole steps."""

transports = st.sampled_from(TRANSPORTS)

Sent = tuple[torch.Tensor, Event]
"""What is sent, where it lies, and what is set when its receiver has it."""


@settings(max_examples=100)
@given(cases_of(st.sampled_from(DATAFLOWS), max_positions=24), transports)
def test_every_gradient_is_the_sum_of_its_parts(case: Case, transport: tuple[int, bool]) -> None:
    """The timeline has every transfer and every kernel call once."""
    schedule = case.backward
    timeline = run_in_process(schedule, *transport, compute=COMPUTE)
    calls = Counter((e.step, e.rank, e.flops) for e in timeline.events if e.kind == DIFFERENTIATE)
    steps = list(enumerate(schedule.steps))
    assert_every_transfer_once(timeline.events, schedule)
    assert calls == Counter(
        (at, *row)
        for at, step in steps
        for each in step.calls
        for row in zip(each.rank.tolist(), task_of(schedule).flops(each).tolist(), strict=True)
    )


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_several_runs_of_each_way(transport: tuple[int, bool]) -> None:
    """Chance decides which thread is first; two buffers leave it the least freedom to be so."""
    layer = Workload(30, head_dim=2, mask="causal", documents=(11, 19), heads=1)
    for dataflow in DATAFLOWS:
        case = Case("tasp", "full-mesh:5", layer, dataflow)
        for _ in range(fifth(4)):
            run_in_process(case.backward, *transport, compute=COMPUTE)


class Meeting(Transport):
    """A transport of one rank that keeps no copies: a message is read where it lies when its receiver comes for it.

    So it is wrong if what is being sent is overwritten, and nothing hides a buffer that is used too early.
    """

    receives_ahead, whole_steps, channels, short_bytes = 4, False, False, 0

    def __init__(self, rank: int, boxes: dict[tuple[int, int, int], SimpleQueue[Sent]]) -> None:
        self._rank, self._boxes = rank, boxes

    def open(self, channels: int, memory: torch.Tensor, streams: Streams) -> None:
        """No-op: messages do not wait for each other."""

    def receive(self, messages: Sequence[Message]) -> list[Wait]:
        return [partial(self._take, message) for message in messages]

    def send(self, messages: Sequence[Message]) -> list[Wait]:
        taken = [Event() for _ in messages]
        for message, each in zip(messages, taken, strict=True):
            self._box(self._rank, message.peer, message.tag).put((message.data, each))
        return [partial(self._until, each) for each in taken]

    def _box(self, source: int, destination: int, tag: int) -> SimpleQueue[Sent]:
        return self._boxes.setdefault((source, destination, tag), SimpleQueue())

    def _take(self, message: Message) -> None:
        data, taken = self._box(message.peer, self._rank, message.tag).get(timeout=20)
        message.data.copy_(data)
        taken.set()

    def _until(self, taken: Event) -> None:
        assert taken.wait(timeout=20), "nobody came for it"


@settings(max_examples=50)
@given(cases_of(st.sampled_from(DATAFLOWS), max_positions=16))
def test_nothing_is_overwritten_before_its_receiver_has_it(case: Case) -> None:
    boxes: dict[tuple[int, int, int], SimpleQueue[Sent]] = {}

    def run(rank: int) -> None:
        trial = PatternTrial(case.backward, rank, Meeting(rank, boxes), COMPUTE)
        trial.set_up(checked=True)
        trial.executor.prepare()
        trial.executor.run()
        trial.check()

    with ThreadPoolExecutor(case.world_size) as threads:
        list(threads.map(run, range(case.world_size)))


# ---------------------------------------------------------------------------------------- the checks above can fail


CASE = Case("tasp", "full-mesh:4", Workload(24, head_dim=2, heads=1, mask="full"), "rotate-kv-back")

NOT_THE_SUM = r"rank \d: block \d+ \(key gradients\) is not the sum of its parts"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_part_that_is_left_out_is_found(transport: tuple[int, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    join = Copies.join

    def forgetful(self: Copies, joins: Sequence[Join]) -> Action:
        return join(self, [each._replace(operations=()) if each.begun else each for each in joins])

    monkeypatch.setattr(Copies, "join", forgetful)
    with pytest.raises(RunError, match=NOT_THE_SUM):
        run_in_process(CASE.backward, *transport, compute=COMPUTE)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_sum_that_is_made_twice_is_found(transport: tuple[int, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    join = Copies.join

    def eager(self: Copies, joins: Sequence[Join]) -> Action:
        once, again = join(self, joins), join(self, [each for each in joins if each.place.since == RESIDENT])
        return lambda: (once(), again())

    monkeypatch.setattr(Copies, "join", eager)
    with pytest.raises(RunError, match=NOT_THE_SUM):
        run_in_process(CASE.backward, *transport, compute=COMPUTE)


def test_sums_to_which_the_first_part_is_added_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is garbage at first, so the first part replaces it."""
    begin = Copies.begin

    def careless(self: Copies) -> None:
        begin(self)
        self._has_parts.update(self.part.resident)

    monkeypatch.setattr(Copies, "begin", careless)
    with pytest.raises(RunError, match=NOT_THE_SUM):
        run_in_process(CASE.backward, compute=COMPUTE)
