"""A rank that fails in a pass: all ranks raise its error within seconds, and what is repeated has the right numbers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from runtime import linear_attention, prepare, relayout
from runtime.executor.copies import Copies
from runtime.sequence_parallel.layer import AttentionLayer
from runtime.sequence_parallel.linear_layer import LinearLayer
from tasp_lab.core.errors import RunError
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.sequence_layout import contiguous, zigzag
from tests.support.rank_layers import Shard, relative_errors, squares
from tests.support.ranks import on_ranks, succeeded

pytestmark = pytest.mark.distributed

IMPORTED_BY_RANKS = ("runtime.sequence_parallel.api",)

LIMIT_S, LONG_S = 30.0, 1000.0
"""Within which ranks raise, on a machine that others use, too; and how long they would wait for messages."""

NO_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB"


def work(batch: int = 1, heads: int = 8, mask: Any = "causal") -> Workload:
    return Workload(48, heads=heads, kv_heads=heads, head_dim=8, dtype="fp32", mask=mask, batch=batch)


@contextmanager
def failing(
    ranks: tuple[int, ...], call: int = 1, error: BaseException | None = None, layer: type = AttentionLayer
) -> Iterator[None]:
    """On some ranks a kernel call fails, by its number from 1, or from the end if it is negative."""
    of_layer = layer.compute  # type: ignore[attr-defined]
    made = 0

    def compute(self: Any, row: Any, operands: Any) -> Any:
        nonlocal made
        made += 1
        if made == call and dist.get_rank() in ranks:
            raise error or torch.OutOfMemoryError(f"{NO_MEMORY}\nand more")
        return of_layer(self, row, operands)

    with patch.object(layer, "compute", compute):
        yield


class Told(NamedTuple):
    """What a rank raised, and after how many seconds."""

    kind: str
    text: str
    seconds: float


def told(call: Callable[[], object]) -> Told:
    began_s = time.monotonic()
    try:
        call()
    except BaseException as error:
        return Told(type(error).__name__, str(error), time.monotonic() - began_s)
    return Told("", "", time.monotonic() - began_s)


def check_told(answers: list[list[Told]], failed: tuple[int, ...], during: str, name: str = "OutOfMemoryError") -> None:
    """Every rank raises once and soon: its own error, or one that names a rank that failed, its error and the pass."""
    for rank, of_rank in enumerate(answers):
        raised = [each for each in of_rank if each.kind]
        assert len(raised) == 1, (rank, of_rank)
        (only,) = raised
        assert only.seconds < LIMIT_S
        if rank in failed:
            assert only.kind == name
        else:
            assert only.kind == "RunError"
            assert any(f"rank {each} raised {name} in {during}" in only.text for each in failed), only
            assert "\n" not in only.text


# A pass fails, and the program repeats it with a smaller batch.


def step(here: Shard, **keywords: Any) -> list[tuple[float, float]]:
    return squares(here.run(timeout_s=LONG_S, **keywords), here.expected())


class Repeated(NamedTuple):
    raised: list[Told]
    errors: list[tuple[float, float]]


def repeated(schedule: str, transport: str, failed: tuple[int, ...], call: int, times: int) -> Repeated:
    """On a rank: steps that fail on some ranks at a kernel call of both passes, and are repeated with half the batch."""
    found, raised, batch = list[tuple[float, float]](), [], 4
    step(Shard(work(1), schedule), transport=transport)
    for _ in range(times):
        with failing(failed, call):
            raised.append(told(lambda: step(Shard(work(4), schedule), transport=transport)))
        assert raised[-1].kind, "a rank that has left the forward pass raises in the backward pass"
    batch //= 2
    found = step(Shard(work(batch), schedule), transport=transport)
    return Repeated(raised, found)


SCHEDULES = ("zigzag-ring-attention", "tasp", "ulysses", "token-ring", "kv-all-gather")


def check_repeated(world_size: int, *arguments: Any) -> None:
    answers = succeeded(on_ranks(repeated, world_size, *arguments))
    failed = arguments[2]
    for at in range(arguments[-1]):
        check_told([[each.raised[at]] for each in answers], failed, "the ")
    assert max(relative_errors([each.errors for each in answers])) < 1e-5


@pytest.mark.parametrize("call", [1, 2, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_is_repeated_after_a_kernel_has_failed_on_one_rank(schedule: str, call: int) -> None:
    check_repeated(4, schedule, "auto", (1,), call, 1)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("transport", ["p2p", "batched", "all-to-all"])
def test_whatever_messages_go_over(world_size: int, transport: str) -> None:
    check_repeated(world_size, "tasp", transport, (world_size - 1,), 2, 1)


@pytest.mark.parametrize("failed", [(0,), (0, 2), (0, 1, 2, 3)])
def test_whoever_fails_and_however_often(failed: tuple[int, ...]) -> None:
    check_repeated(4, "zigzag-ring-attention", "auto", failed, 2, 3)


def test_the_first_call_of_a_group() -> None:
    answers: Any = on_ranks(first_call, 3)
    assert [each[:2] for each in answers] == [("RunError", True), ("RunError", True), ("OutOfMemoryError", False)]


def first_call() -> tuple[str, bool]:
    with failing((2,)):
        found = told(lambda: step(Shard(work(), "ring-attention")))
    step(Shard(work(), "ring-attention"))
    return (
        found.kind,
        "rank 2 raised OutOfMemoryError in the forward pass of call 1 of 1 (ring-attention, 48 " in found.text,
    )
