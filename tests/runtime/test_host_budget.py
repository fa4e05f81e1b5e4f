"""What a pass costs the host: library calls, operations of torch and calls of our own functions, counted, not timed.

A rank of eight runs both passes on torch's fake process group, whose calls end at once, with a kernel that does
nothing. On a GPU the host must queue a step faster than the device executes it, so each has a budget per message end,
kernel call and join.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from experiments.benchmarks.executor_host import FreeKernel
from runtime.executor.transports import Batched
from runtime.sequence_parallel.autograd import Plan, Saved, run_backward, run_forward
from tasp_lab.attention.options import AttentionOptions
from tasp_lab.attention.registry import attention_layout, attention_schedules
from tasp_lab.schedule.channels import channels
from tasp_lab.schedule.rank_part import rank_part
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload

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


TORCH = Budget(message=3, call=40, join=6, once=60)
"""A message is a slice and a send. A call views, transposes and scales operands of up to six fields and merges two."""

OURS = Budget(message=11, call=70, join=15, once=160)


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
    plan = Plan(forward, backward, RANK, FreeKernel(), 1.0, Batched(10.0, None, torch.device("cpu")))
    length = attention_layout(request.param, LAYER, RANKS).length(RANK)
    q, k, v, dout = torch.zeros(4, 1, length, LAYER.heads, LAYER.head_dim)
    saved = Saved(q, k, v, *run_forward(plan, q, k, v))
    found = Passes(
        forward, backward, lambda: run_forward(plan, q, k, v), lambda: run_backward(plan, saved, dout)
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
        batch = dist.batch_isend_irecv
        with patch.object(dist, "batch_isend_irecv", lambda ops: (batches.append(len(ops)), batch(ops))[1]):  # noqa: B023
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
