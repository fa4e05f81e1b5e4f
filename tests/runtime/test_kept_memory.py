"""Memories of runs that are kept for later runs of the same size; a host stands in for a GPU."""

from __future__ import annotations

import threading

import pytest
import torch

from runtime import attention, linear_attention, relayout
from runtime.executor import transports
from runtime.executor.transports import MAX_KEPT, give_back_memory, take_memory
from tasp_lab.workload.sequence_layout import contiguous, zigzag
from tests.support.ranks import on_ranks

CPU = torch.device("cpu")


def as_on_a_gpu(size_bytes: int, device: torch.device) -> tuple[int, int, int] | None:
    """Each thread has a stream."""
    return (size_bytes, 0, threading.get_ident()) if size_bytes else None


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "_key", as_on_a_gpu)
    monkeypatch.setattr(transports, "_kept", type(transports._kept)())


def test_one_memory_per_size_over_many_layers(gpu: None) -> None:
    places = set()
    for _ in range(100):
        memory = take_memory(1000, CPU)
        places.add(memory.data_ptr())
        give_back_memory(memory)
    assert len(places) == 1


def test_two_runs_at_once_have_memories_of_their_own(gpu: None) -> None:
    first, second = take_memory(1000, CPU), take_memory(1000, CPU)
    assert first.data_ptr() != second.data_ptr()
    give_back_memory(first)
    other = list[torch.Tensor]()
    thread = threading.Thread(target=lambda: other.append(take_memory(1000, CPU)))
    thread.start()
    thread.join()
    assert other[0].data_ptr() != first.data_ptr()
    assert take_memory(1000, CPU).data_ptr() == first.data_ptr()


def test_few_sizes_are_kept(gpu: None) -> None:
    for size in range(1, 3 * MAX_KEPT):
        give_back_memory(take_memory(size, CPU))
    assert len(transports._kept) == MAX_KEPT


def test_a_host_keeps_nothing() -> None:
    give_back_memory(take_memory(1000, CPU))
    assert not transports._kept


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
    """On a rank: whether results are those without kept memories; what is kept is overwritten at once."""
    expected = gradients(3)
    transports._key = as_on_a_gpu

    def overwritten(memory: torch.Tensor) -> None:
        memory.fill_(255)
        give_back_memory(memory)

    transports.give_back_memory = overwritten
    found = gradients(3)
    return all(map(torch.equal, expected, found)) and len(found) == len(expected) >= 30, len(transports._kept)


@pytest.mark.distributed
def test_no_result_lies_in_a_memory_that_is_kept() -> None:
    answers = on_ranks(is_the_same_with_kept_memories, 2)
    assert [answer[0] for answer in answers if isinstance(answer, tuple)] == [True, True], answers
    assert all(answer[1] > 0 for answer in answers if isinstance(answer, tuple))
