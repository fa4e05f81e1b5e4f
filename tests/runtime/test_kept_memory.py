"""Executors and their memories that are kept for later runs of the same schedules."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch

from runtime import attention, linear_attention, relayout
from runtime.executor import kept
from runtime.executor.executor import Executor
from runtime.executor.kept import MAX_KEPT, OF_ALL_LAYERS, release_memory
from tasp_lab.schedule.rank_part import rank_part
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.build import collective
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.sequence_layout import contiguous, zigzag
from tests.support.free_executor import Nothing
from tests.support.ranks import on_ranks

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    release_memory()
    yield
    release_memory()


def run(schedule: Schedule) -> Executor:
    with OF_ALL_LAYERS.executor(schedule, rank_part(schedule, 0), Nothing(whole_steps=True), None, CPU) as executor:
        return executor


def ring(size_bytes: int) -> Schedule:
    return collective("ring", full_mesh(2), size_bytes)


def test_one_executor_and_memory_over_many_layers() -> None:
    schedule = ring(1000)
    assert len({run(schedule) for _ in range(20)}) == 1
    assert OF_ALL_LAYERS.size_bytes == rank_part(schedule, 0).memory_bytes


def test_two_runs_at_once_have_memories_of_their_own() -> None:
    schedule = ring(1000)
    part = rank_part(schedule, 0)
    with OF_ALL_LAYERS.executor(schedule, part, Nothing(whole_steps=True), None, CPU) as first:
        other = list[Executor]()
        thread = threading.Thread(target=lambda: other.append(run(schedule)))
        thread.start()
        thread.join()
        assert other[0].memory.data_ptr() != first.memory.data_ptr()


def test_few_executors_are_kept_and_none_once_they_are_released() -> None:
    schedules = [ring(8 * size) for size in range(1, 3 * MAX_KEPT)]
    for schedule in schedules:
        run(schedule)
    assert OF_ALL_LAYERS.size_bytes == sum(rank_part(each, 0).memory_bytes for each in schedules[-MAX_KEPT:])
    release_memory()
    assert OF_ALL_LAYERS.size_bytes == 0


def test_a_run_that_fails_is_not_used_again() -> None:
    schedule = ring(1000)
    with (
        pytest.raises(ZeroDivisionError),
        OF_ALL_LAYERS.executor(schedule, rank_part(schedule, 0), Nothing(whole_steps=True), None, CPU),
    ):
        raise ZeroDivisionError
    assert OF_ALL_LAYERS.size_bytes == 0


def test_what_is_kept_is_freed_where_memory_is_exhausted() -> None:
    run(ring(8))
    made = list[int]()

    def exhausted(*arguments: object, **options: object) -> Executor:
        made.append(OF_ALL_LAYERS.size_bytes)
        if len(made) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Executor(*arguments, **options)  # type: ignore[arg-type]

    with patch.object(kept, "Executor", exhausted):
        run(ring(16))
    assert made == [rank_part(ring(8), 0).memory_bytes, 0]


def gradients(steps: int) -> list[torch.Tensor]:
    torch.manual_seed(torch.distributed.get_rank())
    found = list[torch.Tensor]()
    for _ in range(steps):
        q, k, v = (torch.randn(1, 12, heads, 8, requires_grad=True) for heads in (4, 2, 2))
        out = attention(q, k, v, schedule="ring-attention", causal=True)
        out.square().sum().backward()
        found += [out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]
        q, k, v, x = (torch.randn(1, 12, heads, 8, requires_grad=True) for heads in (4, 2, 2, 2))
        linear, state = linear_attention(q, k, v, schedule="lasp", return_final_state=True)
        moved = relayout(x, contiguous(24, 2), zigzag(24, 2))
        (linear.square().sum() + moved.square().sum() + (0 if state is None else state.square().sum())).backward()
        found += [linear.detach(), moved.detach(), *(each.grad for each in (q, k, v, x) if each.grad is not None)]
        found += [] if state is None else [state.detach()]
    return found


def is_the_same_with_kept_memories() -> tuple[bool, int]:
    """On a rank: whether results are those without kept memories; what is kept is overwritten before it is used."""
    with patch.object(OF_ALL_LAYERS, "most", 0):
        expected = gradients(3)
    reuse = Executor.reuse

    def overwritten(self: Executor, *arguments: object) -> None:
        self.memory.fill_(255)
        reuse(self, *arguments)  # type: ignore[arg-type]

    with patch.object(Executor, "reuse", overwritten):
        found = gradients(3)
    return all(map(torch.equal, expected, found)) and len(found) == len(expected) >= 30, OF_ALL_LAYERS.size_bytes


@pytest.mark.distributed
def test_no_result_lies_in_a_memory_that_is_kept() -> None:
    answers = on_ranks(is_the_same_with_kept_memories, 2)
    assert [answer[0] for answer in answers if isinstance(answer, tuple)] == [True, True], answers
    assert all(answer[1] > 0 for answer in answers if isinstance(answer, tuple))
