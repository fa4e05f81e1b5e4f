"""A rank that fails in a pass: all ranks raise its error within seconds, and what is repeated has the right numbers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from runtime import attention, linear_attention, prepare, relayout
from runtime.executor.copies import Copies
from runtime.sequence_parallel import failures
from runtime.sequence_parallel.failures import hosts_of
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


class Kernels:
    """Counts the kernel calls of this rank from now on; that with a number raises an error, on some ranks."""

    def __init__(self, layer: type = AttentionLayer) -> None:
        self._layer, self._compute = layer, layer.compute  # type: ignore[attr-defined]
        self.count, self._fails_at, self._error = 0, 0, BaseException()
        layer.compute = lambda *arguments: self._counted(*arguments)  # type: ignore[attr-defined]

    def _counted(self, *arguments: Any) -> Any:
        self.count += 1
        if self.count == self._fails_at:
            raise self._error
        return self._compute(*arguments)

    def fail(self, ranks: tuple[int, ...], call: int = 1, error: BaseException | None = None) -> None:
        """Let the call with this number from now fail, once."""
        if dist.get_rank() in ranks:
            self._fails_at = self.count + call
            self._error = error or torch.OutOfMemoryError(f"{NO_MEMORY}\nand more")


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
    """Every rank raises once and soon: its own error, or one that names a rank that failed, its error and the pass.

    Where several fail, one may be ended by the other before it gets so far.
    """
    for rank, of_rank in enumerate(answers):
        raised = [each for each in of_rank if each.kind]
        assert len(raised) == 1, (rank, of_rank)
        (only,) = raised
        assert only.seconds < LIMIT_S
        if rank not in failed or (only.kind != name and len(failed) > 1):
            assert only.kind == "RunError"
            assert any(f"rank {each} raised {name} in {during}" in only.text for each in failed), only
            assert "\n" not in only.text
        else:
            assert only.kind == name


# A pass fails, and the program repeats it with a smaller batch.


def step(here: Shard, **keywords: Any) -> list[tuple[float, float]]:
    return squares(here.run(timeout_s=LONG_S, **keywords), here.expected())


class Failure(NamedTuple):
    """A step in which a kernel call of both passes fails on some ranks; a negative number is counted from the end."""

    schedule: str
    failed: tuple[int, ...]
    call: int
    transport: str = "auto"


class Repeated(NamedTuple):
    raised: list[Told]
    errors: list[tuple[float, float]]


def repeated(cases: list[Failure]) -> list[Repeated]:
    """On a rank: steps that fail, one after another, each repeated with a smaller batch.

    A rank that has all results before a step fails goes on to another step.
    """
    kernels, found = Kernels(), list[Repeated]()
    for schedule, failed, call, transport in cases:

        def run(batch: int) -> list[tuple[float, float]]:
            return step(Shard(work(batch), schedule), transport=transport)  # noqa: B023

        before = kernels.count
        run(2)
        kernels.fail(failed, call if call > 0 else kernels.count - before + 1 + call)
        raised = [told(lambda: run(4))]
        if not raised[0].kind:
            raised.append(told(lambda: run(4)))
        kernels.fail(failed, -1)  # a call that was not reached
        found.append(Repeated(raised, run(2)))
    return found


def check_repeated(world_size: int, cases: list[Failure]) -> None:
    for failure, *of_ranks in zip(cases, *succeeded(on_ranks(repeated, world_size, cases)), strict=True):
        check_told([each.raised for each in of_ranks], failure.failed, "the ")
        assert max(relative_errors([each.errors for each in of_ranks])) < 1e-5, failure


def test_a_step_is_repeated_after_a_kernel_has_failed_on_one_rank() -> None:
    schedules = "zigzag-ring-attention", "tasp", "ulysses", "token-ring", "kv-all-gather"
    check_repeated(4, [Failure(each, (1,), call) for each in schedules for call in (1, 2, -2, -1)])


@pytest.mark.parametrize("world_size", [2, 3])
def test_whatever_messages_go_over(world_size: int) -> None:
    transports = "p2p", "batched", "all-to-all"
    check_repeated(world_size, [Failure("tasp", (world_size - 1,), 2, each) for each in transports])


def test_whoever_fails_and_however_often() -> None:
    ranks = (0,), (0, 2), (0, 1, 2, 3)
    check_repeated(4, [Failure("zigzag-ring-attention", failed, 2) for failed in ranks for _ in range(3)])


def without_memory() -> list[Repeated]:
    with patch.object(failures, "ALIKE_S", LONG_S):  # over as soon as all have failed
        return repeated([Failure("tasp", (0, 1, 2, 3), 1)])


def test_a_batch_for_which_no_rank_has_memory() -> None:
    """The first kernel call waits for no message, so every rank raises its own error."""
    for (found,) in succeeded(on_ranks(without_memory, 4)):
        assert [each.kind for each in found.raised] == ["OutOfMemoryError"]


def first_call() -> list[Told]:
    """On a rank: the first call of a group fails, and is repeated."""
    kernels = Kernels()
    kernels.fail((2,))
    found = told(lambda: step(Shard(work(), "ring-attention")))
    step(Shard(work(), "ring-attention"))
    return [found]


def test_the_first_call_of_a_group() -> None:
    answers = succeeded(on_ranks(first_call, 3))
    check_told(answers, (2,), "the forward pass of call 1 of 1 (ring-attention, 48 positions, 8 heads")


def without_gradients() -> list[Told]:
    """On a rank: forward passes alone. A rank that has its result raises in its next call."""
    here, kernels = Shard(work(), "zigzag-ring-attention"), Kernels()
    kernels.fail((1,), 2)
    with torch.no_grad():
        found = [told(lambda: here.attend(timeout_s=LONG_S))]
        if not found[0].kind:
            found.append(told(lambda: here.attend(timeout_s=LONG_S)))
        torch.testing.assert_close(here.attend().double(), here.expected()[0], rtol=1e-4, atol=1e-5)
    return found


def test_passes_without_gradients() -> None:
    check_told(succeeded(on_ranks(without_gradients, 4)), (1,), "the forward pass of call 1 of 1 (zigzag-ring")


def uses_of_the_store() -> list[str]:
    """On a rank: what passes without a failure ask of the store, once hosts are connected."""
    here, asked = Shard(work(), "tasp"), list[str]()
    layer = prepare(*here.inputs, schedule="tasp", causal=True)
    here.run()

    class Asked:
        def __getattr__(self, name: str) -> None:
            asked.append(name)

    hosts_of(None)._store = Asked()  # type: ignore[assignment]
    for _ in range(2):
        here.run()
        layer(here.q, here.k, here.v).sum().backward()
    return asked


def test_passes_without_a_failure_ask_nothing_of_the_store() -> None:
    assert on_ranks(uses_of_the_store, 3) == [[], [], []]


# Other layers, and other errors.


def other_layers(of_layer: str) -> list[Told]:
    """On a rank: both passes of a layer, of which rank 1 fails in the backward pass, then again without a fault."""
    kernels = Kernels(LinearLayer if of_layer == "linear" else AttentionLayer)
    x = torch.randn(1, 16, 4, 8, requires_grad=True)
    layer = prepare(x, x, x, schedule="zigzag-ring-attention", timeout_s=LONG_S) if of_layer == "prepared" else None

    def forward() -> torch.Tensor:
        match of_layer:
            case "linear":
                return linear_attention(x, x, x, schedule="lasp-2", timeout_s=LONG_S)
            case "prepared":
                assert layer is not None
                return layer(x, x, x)
            case "relayout":
                return relayout(x, contiguous(48, 3), zigzag(48, 3), timeout_s=LONG_S)
        again = partial(attention, schedule="tasp", timeout_s=LONG_S)
        return checkpoint(again, x, x, x, use_reentrant=of_layer == "reentrant")  # type: ignore[no-any-return]

    def step() -> torch.Tensor:
        x.grad = None
        forward().square().sum().backward()
        assert x.grad is not None
        return x.grad

    expected, made, found = step(), kernels.count, list[Told]()
    if of_layer == "relayout":
        store = Copies.store
        with patch.object(Copies, "store", no_memory if dist.get_rank() == 1 else store):
            found.append(told(step))
    else:
        kernels.fail((1,), made // 2 + 1)
        found.append(told(step))
    if not found[-1].kind:
        found.append(told(step))
    torch.testing.assert_close(step(), expected)
    return found


def no_memory(*_: object) -> None:
    raise torch.OutOfMemoryError(NO_MEMORY)


@pytest.mark.parametrize(
    ("of_layer", "during"),
    [
        ("linear", "the backward pass of call 2 of 2 (lasp-2, 48 positions"),
        ("prepared", "the backward pass of a prepared layer (zigzag-ring-attention, 48 positions"),
        ("relayout", "the forward pass of call 2 of 2 (relayout of 48 positions, contiguous to zigzag"),
        ("reentrant", "the forward pass of call 4 of 4 (tasp, 48 positions"),
        ("without reentry", "the forward pass of call 4 of 4 (tasp, 48 positions"),
    ],
)
def test_layers_of_any_kind(of_layer: str, during: str) -> None:
    check_told(succeeded(on_ranks(other_layers, 3, of_layer)), (1,), during)


def other_errors(error: BaseException) -> list[Told]:
    kernels = Kernels()
    kernels.fail((1,), 2, error)
    found = [told(lambda: step(Shard(work(), "tasp")))]
    step(Shard(work(), "tasp"))
    return found


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), ValueError("a\nb"), RunError("no kernel"), SystemExit(3)], ids=repr
)
def test_errors_of_any_kind(error: BaseException) -> None:
    answers = succeeded(on_ranks(other_errors, 3, error))
    check_told(answers, (1,), "the forward pass of call 1 of 1 (tasp", type(error).__name__)


def in_groups() -> list[Told]:
    """On a rank: two groups that share rank 1, which fails in a pass of the first one; then both are used again."""
    first, second = dist.new_group([0, 1]), dist.new_group([1, 2])
    kernels, found = Kernels(), list[Told]()

    def run(group: Any) -> None:
        assert max(relative_errors([step(Shard(work(), "ring-attention", group))])) < 1e-5

    rank = dist.get_rank()
    kernels.fail((1,), 2)
    if rank < 2:
        found.append(told(lambda: run(first)))
    for group in (second, first):
        if rank in dist.get_process_group_ranks(group):
            run(group)
    return found


def test_groups_that_share_a_rank() -> None:
    """The other group has no part in the failure, and its ranks raise nothing."""
    answers = succeeded(on_ranks(in_groups, 3))
    assert answers.pop() == []
    check_told(answers, (1,), "the forward pass of call 1 of 1 (ring-attention")


# Errors between passes, layers that are used on some ranks only, and ranks that end.


def states() -> torch.Tensor:
    return torch.randn(1, 16, 4, 8, requires_grad=True)


def softmax(x: torch.Tensor, timeout_s: float = LONG_S) -> torch.Tensor:
    return attention(x, x, x, schedule="ring-attention", timeout_s=timeout_s)


def in_a_hook(after: str) -> list[Told]:
    """On a rank: a hook of rank 1 fails between two backward passes; it goes on to the next step, or ends."""
    x = states()
    between = softmax(x)
    if dist.get_rank() == 1:
        between.register_hook(lambda gradient: no_memory())
    out = softmax(between)
    found = [told(out.sum().backward)]
    if after == "next" and dist.get_rank() == 1:
        found.append(told(lambda: softmax(x)))
    if after == "end":
        return found
    torch.testing.assert_close(softmax(x), between.detach())
    return found


def test_a_hook_that_fails_between_two_backward_passes() -> None:
    """What the ranks do instead is compared in their next call: one waits in the backward pass, one begins anew."""
    answers = succeeded(on_ranks(in_a_hook, 3, "next"))
    for rank, of_rank in enumerate(answers):
        *hook, last = of_rank
        assert [each.kind for each in hook] == ["OutOfMemoryError"] * (rank == 1)
        assert last.kind == "RunError"
        assert last.seconds < LIMIT_S
        assert "rank 1: a new call (softmax)" in last.text
        assert "ranks 0, 2: the backward pass of call 1 of 2 (ring-attention" in last.text


def test_a_process_that_ends_after_a_hook_has_failed() -> None:
    answers: Any = on_ranks(in_a_hook, 3, "end")
    assert answers.pop(1)[0].kind == "OutOfMemoryError"
    for (only,) in answers:
        assert "lost rank 1 before the start" in only.text
        assert "the backward pass of call 1 of 2 (ring-attention" in only.text
        assert only.seconds < LIMIT_S


def used_on_one_rank(timeout_s: float) -> list[Told]:
    """On a rank: a layer whose result is in the loss of rank 0 alone, and what the ranks do next."""
    x, rank = states(), dist.get_rank()
    out = softmax(x, timeout_s)
    found = [told(out.sum().backward)] if rank == 0 else []
    if timeout_s < LONG_S:
        dist.barrier()  # the others come when rank 0 has waited for as long as it may
    if rank != 0:
        found.append(told(lambda: softmax(x)))
    torch.testing.assert_close(softmax(x), out.detach())
    return [each for each in found if each.kind]


def test_a_layer_in_the_loss_of_one_rank() -> None:
    answers = succeeded(on_ranks(used_on_one_rank, 3, LONG_S))
    for (only,) in answers:
        assert "rank 0: the backward pass of call 1 of 1 (ring-attention" in only.text
        assert "ranks 1, 2: a new call (softmax)" in only.text
        assert only.seconds < LIMIT_S


def test_a_layer_in_the_loss_of_one_rank_that_waits_as_long_as_it_may() -> None:
    answers = succeeded(on_ranks(used_on_one_rank, 3, 1.0))
    for (only,) in answers:
        assert only.kind == "RunError"
        assert (
            "rank 0: lost ranks 1, 2 before the start (they have not come within 1 s; is the result used in the "
            "loss there?), in the backward pass of call 1 of 1 (ring-attention" in only.text
        )


def after_an_end(how: str) -> list[Told]:
    """On a rank: rank 1 fails and ends; the others call again."""
    x = states()
    softmax(x)
    kernels = Kernels()
    kernels.fail((1,), 1, KilledError() if how == "killed" else None)
    found = [told(lambda: softmax(x))]
    if dist.get_rank() == 1:
        return found
    return [*found, *(told(lambda: softmax(x)) for _ in range(3))]


class KilledError(Exception):
    """Ends the process where it is raised."""

    def __str__(self) -> str:
        os.kill(os.getpid(), signal.SIGKILL)
        return ""


@pytest.mark.parametrize("how", ["returned", "killed"])
def test_later_calls_name_what_ended_a_group(how: str) -> None:
    answers: Any = on_ranks(after_an_end, 3, how)
    answers.pop(1)
    cause = "lost rank 1 " if how == "killed" else "rank 1 raised OutOfMemoryError in the forward pass of call 2 of 2"
    for of_rank in answers:
        first, *later = [each for each in of_rank if each.kind]
        assert cause in first.text
        for each in later:
            assert cause in each.text
            assert each.seconds < LIMIT_S
        assert len(later) >= 2
        assert later[-1].seconds < 1
