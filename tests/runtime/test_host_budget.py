"""What a pass costs the host: library calls, operations of torch and calls of our own functions, counted, not timed.

A rank of eight runs both passes on torch's fake process group, whose calls end at once, with a kernel that does
nothing. On a GPU the host must queue a step faster than the device executes it, so each has a budget per message end,
kernel call and join.
"""

from __future__ import annotations

import sys
import tracemalloc
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.executor import per_lane, transports
from runtime.executor.executor import Executor
from runtime.executor.kept import release_memory
from runtime.executor.messages import Message, Wait
from runtime.executor.transports import Batched
from runtime.sequence_parallel.layer import SoftmaxPasses
from tasp_lab.schedule.buffer_layout import OUTSIDE
from tasp_lab.schedule.dependencies import channels
from tasp_lab.schedule.rank_part import rank_part
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import attention_layout, attention_schedules, collective
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tests.support.free_executor import FreeKernel, Nothing, Zeros

RANKS, RANK = 8, 1
LAYER = Workload(sequence=4 * RANKS**2, head_dim=8, heads=2, kv_heads=2, dtype="fp32", mask="causal")
NAMES = ("ring-attention", "zigzag-ring-attention", "striped-ring-attention", "token-ring", "tasp")


class Budget(NamedTuple):
    """Per end of a message, kernel call and join, and for what a pass does once."""

    message: int
    call: int
    join: int
    once: int

    def of(self, schedule: Schedule) -> int:
        part = rank_part(schedule, RANK)
        ends = len(part.messages_in) + len(part.messages_out)
        return self.message * ends + self.call * len(part.calls) + self.join * len(part.joins) + self.once


TORCH = Budget(message=1, call=20, join=4, once=30)
"""A message is a send. A call scales operands of up to six fields, which are viewed once, and merges two."""

OURS = Budget(message=4, call=45, join=14, once=140)

MESSAGES = Budget(message=0, call=12, join=4, once=20)
"""Calls of our own functions where an executor runs again, which posts and waits by steps."""

OF_A_STEP = 4
"""Beside `MESSAGES`, whose messages are posted, and waited for, together, in calls that do not depend on how many."""


class Passes(NamedTuple):
    forward: Schedule
    backward: Schedule
    run_forward: Callable[[], object]
    run_backward: Callable[[], object]

    def each(self) -> list[tuple[Schedule, Callable[[], object]]]:
        return [(self.forward, self.run_forward), (self.backward, self.run_backward)]


@pytest.fixture(params=NAMES)
def passes(request: pytest.FixtureRequest) -> Iterator[Passes]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=RANKS)
    forward, backward = attention_schedules(request.param, full_mesh(RANKS), LAYER, options=AttentionOptions("both"))
    layer = SoftmaxPasses(forward, backward, RANK, Batched(10.0, None, torch.device("cpu")), FreeKernel(), 1.0)
    length = attention_layout(request.param, LAYER, RANKS).length(RANK)
    q, k, v, dout = torch.zeros(4, 1, length, LAYER.heads, LAYER.head_dim)
    saved = layer.saved((q, k, v), *layer.forward(q, k, v))
    found = Passes(
        forward, backward, lambda: layer.forward(q, k, v), lambda: layer.backward(saved, dout)
    )  # fmt: skip
    for _, run in found.each():
        run()  # plans are made once
    yield found
    dist.destroy_process_group()


def test_library_calls(passes: Passes) -> None:
    """One batch per step and channel with messages, and in it what `joint_messages` leaves; no other call."""
    for schedule, run in passes.each():
        part, channel_of = rank_part(schedule, RANK), channels(schedule)
        messages = (*part.messages_in, *part.messages_out)
        batches: list[int] = []
        post = transports._post_each
        count = lambda ends, *more: (batches.append(len(ends)), post(ends, *more))[1]  # noqa: B023, E731
        with patch.object(transports, "_post_each", count):
            release_memory()  # what is bound is made anew
            run()
        assert sum(batches) == len(messages)
        assert len(batches) == len({(rows[0].step, channel_of[rows[0].lane]) for rows in messages})


def test_a_ring_sends_one_message_per_step() -> None:
    """To its neighbour, as its blocks lie side by side. The seven rings of `tasp` send two blocks each."""
    layer = replace(LAYER, mask="full")
    for name, most in (("ring-attention", 1), ("zigzag-ring-attention", 1), ("tasp", 2 * (RANKS - 1))):
        (schedule,) = attention_schedules(name, full_mesh(RANKS), layer, options=AttentionOptions("forward"))
        sent = [rows[0].step for rows in rank_part(schedule, RANK).messages_out]
        assert max(sent.count(step) for step in set(sent)) <= most
        assert len(sent) <= most * (RANKS - 1)


def test_operations_of_torch(passes: Passes) -> None:
    for schedule, run in passes.each():
        with Operations() as counted:
            run()
        assert counted.count <= TORCH.of(schedule)


def test_calls_of_our_own_functions(passes: Passes) -> None:
    for schedule, run in passes.each():
        assert own_calls(run) <= OURS.of(schedule)


# an executor that runs again, with a library that does nothing


class Short(Nothing):
    """Single messages that may be posted by steps."""

    short_bytes = 1 << 20


def repeated(name: str, library: Nothing) -> tuple[Schedule, Callable[[], None]]:
    """A schedule, and a run of its executor, which has run before."""
    (schedule,) = attention_schedules(name, full_mesh(RANKS), LAYER, options=AttentionOptions("forward"))
    executor = Executor(schedule, RANK, library, Zeros(schedule), as_bytes=True)

    def run() -> None:
        executor.prepare()
        executor.run()

    run()
    return schedule, run


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("library", [Nothing(whole_steps=True), Short(whole_steps=False)], ids=["steps", "short"])
def test_messages_of_a_run_again(name: str, library: Nothing) -> None:
    """Few calls of our own; only joining is an operation of torch; what is sent and received has been viewed before."""
    schedule, run = repeated(name, library)
    part = rank_part(schedule, RANK)
    assert own_calls(run) <= MESSAGES.of(schedule) + OF_A_STEP * len(schedule.steps)
    gathered = sum(rows[0].offset == OUTSIDE for rows in part.messages_out)
    joined = sum(len(row.adds) for row in part.calls) + sum(len(each.received) + 1 for each in part.joins)
    with Operations() as counted:
        run()
    assert counted.count <= 3 * gathered + 2 * joined + 3 * sum(len(row.operands) for row in part.calls)


@pytest.mark.parametrize("name", ["ring", "multi-ring"])
def test_an_all_gather_again_costs_its_messages_only(name: str) -> None:
    """No operation of torch, and no memory that is not freed."""
    schedule = collective(name, full_mesh(RANKS), 64)
    executor = Executor(schedule, RANK, Short(whole_steps=False))
    ends = len(executor.part.messages_in) + len(executor.part.messages_out)

    def run() -> None:
        executor.prepare()
        executor.run()

    run()
    with Operations() as counted:
        run()
    assert counted.count == 0
    assert own_calls(run) <= MESSAGES.of(schedule) + OF_A_STEP * len(schedule.steps)
    tracemalloc.start()
    try:
        run()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(20):
            run()
        assert tracemalloc.get_traced_memory()[0] - before < 20 * ends
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("shard", "short_bytes", "threads"),
    [(56, 1, 0), (57, 1, RANKS - 1), (57, 1 << 20, 0), (56, 0, RANKS - 1)],
    ids=["alike", "long", "short", "free threads"],
)
def test_lanes_have_threads_only_where_they_delay_each_other(shard: int, short_bytes: int, threads: int) -> None:
    """Seven lanes share a shard: 56 bytes give them messages of one size."""
    library = Nothing(whole_steps=False)
    library.short_bytes = short_bytes
    assert threads_of(Executor(collective("multi-ring", full_mesh(RANKS), shard), RANK, library)) == threads


@pytest.mark.parametrize(
    ("name", "positions", "short_bytes", "threads"),
    [
        ("ring-attention", 1, 1, 0), ("ring-attention", 256, 1, 1),
        ("tasp", 7 * 32, 1, 1), ("tasp", 7 * 32 + 1, 1, RANKS - 1), ("tasp", 7 * 32, 0, RANKS - 1),
    ],
)  # fmt: skip
def test_messages_have_a_thread_only_beside_long_calls(
    name: str, positions: int, short_bytes: int, threads: int
) -> None:
    """One for lanes that are alike. Calls with one row of keys take no time, those with 200 a core about 100 us."""
    layer = Workload(sequence=positions * RANKS, head_dim=8, heads=1, dtype="fp32", mask="full")
    (schedule,) = attention_schedules(name, full_mesh(RANKS), layer, options=AttentionOptions("forward"))
    library = Nothing(whole_steps=False)
    library.short_bytes = short_bytes
    assert threads_of(Executor(schedule, RANK, library, Zeros(schedule), as_bytes=True)) == threads


def threads_of(executor: Executor) -> int:
    """How many threads a run has beside the calling one."""
    executor.prepare()
    with patch.object(per_lane, "run_beside", wraps=per_lane.run_beside) as started:
        executor.run()
    return started.call_count


def test_a_batch_is_made_once() -> None:
    """The messages of a batch find their group when they are bound."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=RANKS)
    try:
        executor = Executor(collective("ring", full_mesh(RANKS), 64), RANK, Batched(10.0, None, torch.device("cpu")))
        with patch.object(Batched, "bind", autospec=True, side_effect=Batched.bind) as bound:
            for _ in range(3):
                executor.prepare()
                executor.run()
        assert bound.call_count == RANKS - 1
    finally:
        dist.destroy_process_group()


def test_works_outlive_their_run() -> None:
    """To free a work of gloo right after it has ended contends with gloo's thread; the next run replaces them."""
    alive: list[weakref.ref[Wait]] = []

    class Kept(Short):
        def receive(self, messages: Sequence[Message]) -> list[Wait]:
            waits: list[Wait] = [partial(nothing) for _ in messages]
            alive.extend(map(weakref.ref, waits))
            return waits

    executor = Executor(collective("ring", full_mesh(RANKS), 64), RANK, Kept(whole_steps=False))
    for runs in (1, 2, 3):
        executor.prepare()
        executor.run()
        there = [each() is not None for each in alive]
        assert there == [False] * ((runs - 1) * (RANKS - 1)) + [True] * (RANKS - 1)


def nothing() -> None:
    """A wait that is over."""


class Operations(TorchDispatchMode):
    """Counts the operations of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def own_calls(run: Callable[[], object]) -> int:
    """How many functions of the package `runtime` are called."""
    count = 0

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_globals.get("__name__", "").startswith("runtime.")

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count
