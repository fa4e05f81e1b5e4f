"""Ranks agree in a few bytes on what they have agreed on before; whoever differs is named, whatever was remembered."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from runtime import attention
from runtime.executor.messages import Message, Wait
from runtime.executor.transports import AGREEMENT_TAG, PointToPoint
from runtime.sequence_parallel import failures
from runtime.sequence_parallel.agreement import agree
from runtime.trials.layers import random_layer
from tasp_lab.core.errors import RunError, TaspLabError
from tasp_lab.schedules.build import attention_layout
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.distributed


def attend(sequence: int = 32, **keywords: Any) -> torch.Tensor:
    """This rank's rows of a layer, which are compared with those of all keys at once."""
    layer = Workload(sequence, heads=2, kv_heads=2, head_dim=8, dtype="fp32", mask="full")
    layout = attention_layout("ring-attention", layer, dist.get_world_size())
    whole = random_layer(layer, torch.float32, "cpu")[:3]
    rows = torch.from_numpy(layout.positions(dist.get_rank()))
    q, k, v = (each[:, rows] for each in whole)
    found = attention(q, k, v, schedule="ring-attention", timeout_s=20, **keywords)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(each.transpose(1, 2) for each in whole), is_causal=keywords.get("causal", False)
    ).transpose(1, 2)
    torch.testing.assert_close(found, expected[:, rows], rtol=1e-4, atol=1e-5)
    return found


class Told:
    """The sizes of what this rank tells another one, in bytes."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def send(self, transport: PointToPoint, messages: Sequence[Message]) -> list[Wait]:
        """As `PointToPoint.send`."""
        self.sizes += [each.data.numel() for each in messages if each.tag == AGREEMENT_TAG]
        return SEND(transport, messages)

    def counted(self) -> Any:
        return patch.object(PointToPoint, "send", lambda *arguments: self.send(*arguments))


SEND = PointToPoint.send


def sizes_by_call() -> list[list[int]]:
    """On a rank: what calls exchange, the same ones again, with a topology, in both passes."""
    found = []
    for keywords in (
        {},
        {},
        {"causal": True},
        {},
        {"causal": True},
        {"topology": full_mesh(2)},
        {"topology": full_mesh(2)},
    ):
        told = Told()
        with told.counted():
            attend(**keywords)
        found.append(told.sizes)
    return found


def test_what_was_agreed_on_is_not_exchanged_again() -> None:
    for found in on_ranks(sizes_by_call, 2):
        assert isinstance(found, list), found
        first, again, other, first_again, other_again, rings, rings_again = (sum(sizes) for sizes in found)
        assert again == first_again == other_again <= 16
        assert rings_again <= 32
        assert min(first, other, rings) > 1000


def shards_that_change() -> None:
    """On a rank: layers of 33 and 32 positions. Rank 1 has 16 of both."""
    lengths = [len(attend(sequence)[0]) for sequence in (33, 32, 33, 32)]
    assert lengths == ([17, 16, 17, 16] if dist.get_rank() == 0 else [16] * 4)


def test_a_shard_that_changes_on_one_rank_changes_the_schedule_of_all() -> None:
    assert on_ranks(shards_that_change, 2) == [None, None]


def disagreements() -> list[tuple[str, float]]:
    """On a rank: what it is told, and after how many seconds, where the ranks remember what they now mix up."""
    attend()
    attend(causal=True)
    found = []
    odd = dist.get_rank() == 1
    for keywords in (
        {"causal": odd},
        {"causal": not odd},
        {"scale": 2.0 if odd else None},
        {"kernel": "no" if odd else "auto"},
    ):
        began_s = time.monotonic()
        try:
            attend(**keywords)
        except TaspLabError as error:
            found.append((str(error), time.monotonic() - began_s))
    attend()
    return found


def test_ranks_that_mix_up_what_they_remember_are_told() -> None:
    """Neither waits for messages of the other: both ends remember both, one has changed, one cannot take part."""
    answers: list[Any] = on_ranks(disagreements, 2)
    for rank, found in enumerate(answers):
        causal, not_causal, scale, kernel = (message for message, _ in found)
        assert causal == "rank 1: mask is causal, on rank 0 it is full"
        assert not_causal == "rank 1: mask is full, on rank 0 it is causal"
        assert scale.startswith("rank 1: scale is 2.0, on rank 0 it is 0.35")
        assert ("rank 1: " in kernel) == (rank == 0)
        assert all(seconds < 10 for _, seconds in found)


def connections_made() -> int:
    """On a rank: how often three exchanges connect the hosts, without `dist.new_group`."""
    made = []

    def counted(*arguments: Any) -> dist.ProcessGroup:
        made.append(arguments)
        return GLOO(*arguments)

    with patch.object(failures, "_gloo", counted), patch.object(dist, "new_group", None):
        for at in range(3):
            found = agree({"rank": dist.get_rank(), "at": at}, None, 20.0, apart=("rank", "at"))
            assert found == [{"rank": rank, "at": at} for rank in range(dist.get_world_size())]
    return len(made)


GLOO = failures._gloo


def test_hosts_are_connected_once() -> None:
    assert on_ranks(connections_made, 2) == [1, 1]


def no_gloo() -> str:
    dist.barrier()  # a rank must not leave while the other one is still joining it

    def refused(*_: Any, **__: Any) -> dist.ProcessGroup:
        raise RuntimeError("[enforce fail at device.cc:84] rp != nullptr. Unable to find address for: eth7")

    with patch.object(failures, "_gloo", refused):
        try:
            agree({}, None, 20.0)
        except RunError as error:
            return str(error)
    return ""


def test_gloo_that_does_not_start_is_named() -> None:
    for said in on_ranks(no_gloo, 2):
        assert ": hosts talk over gloo, which does not start ([enforce fail at device.cc:84]" in str(said)
        assert "GLOO_SOCKET_IFNAME" in str(said)


def told_of_no_memory() -> str:
    """On a rank: what it is told if it has no memory for what it sends."""

    def refused(*_: Any, **__: Any) -> object:
        raise torch.OutOfMemoryError("no memory")

    with patch.object(PointToPoint, "send", refused):
        try:
            agree({}, None, 20.0)
        except (torch.OutOfMemoryError, RunError) as error:
            return f"{type(error).__name__}: {error}"
    return ""


def test_an_error_of_this_rank_is_not_a_lost_one() -> None:
    assert on_ranks(told_of_no_memory, 1) == ["OutOfMemoryError: no memory"]


def beside_a_group_of_some() -> object:
    """On a rank: arguments compared by all ranks, of which some are in one more group."""
    dist.new_group([0, 1])
    return agree({"rank": dist.get_rank()}, None, 10.0, apart=("rank",))


def test_ranks_in_different_numbers_of_groups_agree() -> None:
    assert on_ranks(beside_a_group_of_some, 3) == [[{"rank": rank} for rank in range(3)]] * 3
