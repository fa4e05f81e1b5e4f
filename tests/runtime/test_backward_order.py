"""Ranks that go back through layers in different orders are all told; equal orders work, whatever they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from runtime import attention, linear_attention, relayout
from runtime.executor.messages import Message, Post
from runtime.executor.transports import Batched, PointToPoint
from tasp_lab.core.errors import RunError
from tasp_lab.workload.sequence_layout import contiguous, zigzag
from tests.support.ranks import on_ranks, succeeded

pytestmark = pytest.mark.distributed

Tensor = torch.Tensor
Layer = Callable[[Tensor], Tensor]

RANKS = 3
ODD = 1
"""The rank with an order of its own."""

SEQUENCE = 24


def states(seed: int, sequence: int = SEQUENCE) -> Tensor:
    """This rank's part of hidden states [1, positions, 2, 8], which want gradients."""
    drawn = torch.randn(1, sequence, 2, 8, generator=torch.Generator().manual_seed(seed))
    return drawn.chunk(dist.get_world_size(), 1)[dist.get_rank()].clone().requires_grad_()


def softmax(x: Tensor, **keywords: Any) -> Tensor:
    return attention(x, x, x, **{"schedule": "ring-attention", "timeout_s": 60.0, **keywords})


def linear(x: Tensor, **keywords: Any) -> Tensor:
    return linear_attention(x, x, x, timeout_s=60.0, **keywords)


def moved(x: Tensor, **keywords: Any) -> Tensor:
    n, ranks = x.shape[1] * dist.get_world_size(), dist.get_world_size()
    return relayout(x, contiguous(n, ranks), zigzag(n, ranks), timeout_s=60.0, **keywords)


def told(run: Callable[[], object]) -> str:
    """What a rank is told. If it waited for a rank in vain, that would be the message."""
    try:
        run()
    except RunError as error:
        return str(error)
    return "nothing"


def two(layer: Layer, sequences: Sequence[int] = (SEQUENCE, SEQUENCE)) -> list[Tensor]:
    """The sums of two layers, which do not depend on each other."""
    return [layer(states(seed, sequence)).square().sum() for seed, sequence in enumerate(sequences)]


def backward_in_order(sums: Sequence[Tensor]) -> None:
    """Backward from the first of two sums first, but on the odd rank."""
    for each in sums[:: -1 if dist.get_rank() == ODD else 1]:
        each.backward()


def untagged(self: Batched, receives: Sequence[Message], sends: Sequence[Message]) -> Post:
    """Messages that meet others of their peer in the order in which they are posted, as those of NCCL do."""
    return TAGGED(self, *([replace(each, tag=0) for each in messages] for messages in (receives, sends)))


TAGGED = Batched.bind


LAYERS: Mapping[str, Layer] = {
    "softmax": softmax,
    "tasp": lambda x: softmax(x, schedule="tasp", causal=True),
    "linear": linear,
    "linear, all-scan": lambda x: linear(x, schedule="all-scan"),
    "relayout": moved,
    "batched": lambda x: softmax(x, transport="batched"),
    "all-to-all": lambda x: softmax(x, transport="all-to-all"),
}


def orders_on_rank() -> dict[str, str]:
    """On a rank: what it is told of two layers of one kind."""
    found = {}
    with patch.object(Batched, "bind", untagged):
        for name, layer in LAYERS.items():
            found[name] = told(lambda layer=layer: backward_in_order(two(layer)))  # type: ignore[misc]
    return found


def test_another_order_on_one_rank_is_named_on_all() -> None:
    """Layers of one shape: each message of one would be taken for one of the other, with tags or without."""
    answers: list[Any] = succeeded(on_ranks(orders_on_rank, RANKS))
    for of_rank in answers:
        for number, (name, message) in enumerate(of_rank.items()):
            first, second = (f"the backward pass of call {2 * number + each} of {2 * number + 2} (" for each in (1, 2))
            assert f"ranks 0, 2: {first}" in message, (name, message)
            assert f"rank 1: {second}" in message, (name, message)
            assert "24 positions" in message, (name, message)
            assert message == answers[0][name]
    assert "(tasp, 24 positions, 2 heads (2 KV heads) of 8, causal, fp32)" in answers[0]["tasp"]
    assert "(lasp-2, 24 positions" in answers[0]["linear"]
    assert "(relayout" in answers[0]["relayout"]


def mixed_on_rank() -> list[str]:
    """On a rank: what it is told of layers of different shapes and kinds, and of graphs gone through once more."""

    def shapes() -> None:
        backward_in_order(two(softmax, (SEQUENCE, 2 * SEQUENCE)))

    def kinds() -> None:
        backward_in_order([layer(states(0)).square().sum() for layer in (softmax, linear)])

    def more() -> None:
        first, second = two(softmax)
        first.backward(retain_graph=True)
        (first if dist.get_rank() == ODD else second).backward()

    def skipped() -> None:
        first, second = two(softmax)
        if dist.get_rank() != ODD:
            first.backward()
        second.backward()

    def next_forward() -> None:
        out = softmax(states(0)).square().sum()
        if dist.get_rank() != ODD:
            out.backward()
        softmax(states(1))

    return [told(each) for each in (shapes, kinds, more, skipped, next_forward)]


def test_layers_of_other_shapes_and_graphs_gone_through_again_are_named() -> None:
    """None of them waits until a message is given up."""
    answers: list[Any] = succeeded(on_ranks(mixed_on_rank, RANKS))
    assert all(each == answers[0] for each in answers)
    shapes, kinds, more, skipped, next_forward = answers[0]
    back = "the backward pass of call"
    assert f"ranks 0, 2: {back} 1 of 2 (ring-attention, 24 positions" in shapes
    assert f"rank 1: {back} 2 of 2 (ring-attention, 48 positions" in shapes
    assert f"ranks 0, 2: {back} 3 of 4 (ring-attention" in kinds
    assert f"rank 1: {back} 4 of 4 (lasp-2" in kinds
    assert f"ranks 0, 2: {back} 6 of 6" in more
    assert f"rank 1: {back} 5 of 6" in more
    assert f"ranks 0, 2: {back} 7 of 8" in skipped
    assert f"rank 1: {back} 8 of 8" in skipped
    assert f"ranks 0, 2: {back} 9 of 9" in next_forward
    assert "rank 1: a new call (softmax)" in next_forward


def checkpointed_on_rank() -> list[str]:
    """On a rank: what it is told of layers that checkpoints compute again, of both kinds, alone and in each other."""

    def region(x: Tensor) -> Tensor:
        return softmax(x.tanh()).tanh()

    def again(layer: Layer, reentrant: bool) -> Layer:
        return lambda x: checkpoint(layer, x, use_reentrant=reentrant)  # type: ignore[no-any-return]

    layers = [again(region, True), again(region, False), again(again(region, True), True), again(moved, True)]
    return [told(lambda layer=layer: backward_in_order(two(layer))) for layer in layers]  # type: ignore[misc]


def test_checkpoints_that_compute_layers_again_in_another_order_are_named() -> None:
    """The forward passes that they run again meet each other, too."""
    answers: list[Any] = succeeded(on_ranks(checkpointed_on_rank, RANKS))
    assert all(each == answers[0] for each in answers)
    for number, message in enumerate(answers[0]):
        assert "ranks run different passes" in message, (number, message)
        assert "ranks 0, 2: the " in message
        assert "rank 1: the " in message
    assert "the forward pass, run again, of call 1 of 2 (ring-attention" in answers[0][0]
    assert "the forward pass, run again, of call 2 of 2 (ring-attention" in answers[0][0]


def equal_orders_on_rank() -> None:
    """On a rank: gradients of three layers whose backward passes run in every order, the same on all ranks."""

    def gradients(order: Sequence[int], layer: Layer) -> list[Tensor]:
        inputs = [states(seed) for seed in range(len(order))]
        outputs = [layer(x) for x in inputs]
        for each in order:
            outputs[each].square().sum().backward()
        return [x.grad for x in inputs if x.grad is not None]

    def again(x: Tensor, reentrant: bool) -> Tensor:
        return checkpoint(softmax, x, use_reentrant=reentrant)  # type: ignore[no-any-return]

    for layer in (softmax, linear, moved, lambda x: moved(linear(softmax(x)))):
        expected = gradients((0, 1, 2), layer)
        assert len(expected) == 3
        for order in (2, 1, 0), (1, 0, 2):
            torch.testing.assert_close(gradients(order, layer), expected)
    for reentrant in (False, True):
        for order in (0, 1, 2), (2, 0, 1):
            found = gradients(order, lambda x: again(x, reentrant))  # noqa: B023
            torch.testing.assert_close(found, gradients((0, 1, 2), softmax))


def in_groups_on_rank() -> None:
    """On a rank: a group of its ranks in reverse, and one of some, which numbers its calls by itself."""
    everyone = dist.new_group(list(range(dist.get_world_size()))[::-1])
    some = dist.new_group([0, 2])
    for _ in range(2):
        outputs = [softmax(states(0), group=everyone)]
        if dist.get_rank() != ODD:
            outputs += [softmax(states(1), group=some), softmax(states(2), group=some)]
        outputs += [softmax(states(3), group=everyone)]
        torch.autograd.backward([each.square().sum() for each in outputs])


def equal_on_rank() -> None:
    equal_orders_on_rank()
    in_groups_on_rank()


def test_equal_orders_on_all_ranks_raise_nothing() -> None:
    """Also those that are not the opposite of the forward pass, and those of groups."""
    succeeded(on_ranks(equal_on_rank, RANKS))


def absent_on_rank() -> str:
    """On a rank: what it is told when the odd rank makes no backward pass, nor anything else."""
    out = softmax(states(0)).square().sum()
    return "" if dist.get_rank() == ODD else told(out.backward)


def test_a_rank_without_a_backward_pass_is_named() -> None:
    answers = succeeded(on_ranks(absent_on_rank, RANKS))
    assert answers.pop(ODD) == ""
    assert any("lost rank 1 before the start" in message for message in answers), answers
    assert all("in the backward pass of call 1 of 1 (ring-attention, 24 positions" in each for each in answers)


def swapped_on_rank() -> list[int]:
    """On a rank: what arrives at rank 1, which awaits messages of two calls in the opposite order; tags of any size."""
    sends = dist.get_rank() == 0
    transports = [PointToPoint(60.0, None, torch.device("cpu"), call) for call in (1, 2)]
    data, waits = [], []
    for call in (0, 1) if sends else (1, 0):
        for tag in (0, 1, 1 << 25):
            data.append(torch.tensor([10 * call + min(tag, 2) if sends else 99], dtype=torch.uint8))
            post = transports[call].send if sends else transports[call].receive
            waits += post([Message(1 - dist.get_rank(), tag, data[-1])])
    for wait in waits:
        wait()
    return [int(each) for each in data]


def test_tags_keep_messages_of_calls_apart() -> None:
    """A message of one call is never taken for one of another, also where ranks have not agreed."""
    assert succeeded(on_ranks(swapped_on_rank, 2)) == [[0, 1, 2, 10, 11, 12], [10, 11, 12, 0, 1, 2]]
