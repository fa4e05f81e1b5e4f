"""Re-layouts on real processes: shards and gradients against plain indexing, the bytes sent, and refusals."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from runtime import linear_attention, relayout
from runtime.sequence_parallel.sharding import shard
from tasp_lab.core.errors import RunError
from tasp_lab.schedules.hybrid.relayout import relayout as relayout_schedules
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.sequence_layout import SequenceLayout, contiguous, zigzag
from tests.support.layouts import LAYOUTS
from tests.support.ranks import on_ranks, succeeded
from tests.support.refusals import check_refusals
from tests.support.sent_bytes import SentBytes

pytestmark = pytest.mark.distributed

DOCUMENTS = (13, 0, 1, 30, 15)
SHAPES = [(61, None, (2, 6)), (59, DOCUMENTS, (1, 2, 3)), (3, None, (1, 4)), (40, None, (3,))]
"""Positions, documents, and the other dimensions: batch first; lengths that leave some ranks nothing."""


def cases(world_size: int) -> list[tuple[SequenceLayout, SequenceLayout, tuple[int, ...], torch.dtype]]:
    """Every pair of layouts, equal ones included, in one dtype or the other."""
    dtypes = torch.float32, torch.bfloat16, torch.float16
    return [
        (before(length, world_size, documents), after(length, world_size, documents), shape, dtypes[number % 3])
        for number, ((length, documents, shape), (before, after)) in enumerate(
            product(SHAPES, product(LAYOUTS.values(), repeat=2))
        )
    ]


def tensors(length: int, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the whole sequence, and the gradient behind it; the same in every process."""
    random = torch.Generator().manual_seed(7)
    batch, *rest = shape
    x, dout = (torch.randn(batch, length, *rest, generator=random).to(dtype) for _ in range(2))
    return x, dout


def moved_on_rank() -> list[int]:
    """On a rank: every case, with strides and without, with gradients and without; the bytes that it sent."""
    sent = SentBytes()
    found, rank = [], dist.get_rank()
    for before, after, shape, dtype in cases(dist.get_world_size()):
        whole, gradient = tensors(before.sequence, shape, dtype)
        x, dout = shard(whole, before, rank), shard(gradient, after, rank)
        strided = torch.stack([x, x], -1)[..., 0].requires_grad_()
        assert torch.equal(relayout(x, before, after), shard(whole, after, rank))
        sent.count = 0
        out = relayout(strided, before, after)
        assert torch.equal(out, shard(whole, after, rank))
        (dx,) = torch.autograd.grad(out * 2, strided, dout)
        assert torch.equal(dx, shard(2 * gradient, before, rank))
        assert (out.dtype, dx.dtype) == (dtype, dtype)
        found.append(sent.count)
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_shards_and_gradients_are_those_of_plain_indexing(world_size: int) -> None:
    """Exactly; and the bytes that go to the transport are those of the ledger."""
    parts = succeeded(on_ranks(moved_on_rank, world_size))
    for (before, after, (batch, *rest), dtype), *of_ranks in zip(cases(world_size), *parts, strict=True):
        name = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
        layer = Workload(before.sequence, batch, 1, head_dim=torch.Size(rest).numel(), dtype=name, mask="full")
        passes = relayout_schedules(full_mesh(world_size), layer, before, after, "both")
        assert of_ranks == list(sum(each.bytes_sent().sum(axis=(0, 2)) for each in passes))


def of_one_of_two_groups() -> bool:
    """On a rank of four: as one of two, in one of two groups, by other transports, and there and back again."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group, layouts = groups[dist.get_rank() % 2], (contiguous(9, 2), zigzag(9, 2))
    whole = torch.arange(18.0).view(1, 9, 2) + 100 * (dist.get_rank() % 2)
    x = shard(whole, layouts[0], dist.get_rank(group))
    found = [relayout(x, *layouts, group, transport=each) for each in ("p2p", "batched", "all-to-all")]
    assert all(torch.equal(each, shard(whole, layouts[1], dist.get_rank(group))) for each in found)
    back = relayout(found[0], *layouts[::-1], group=group, topology=full_mesh(2))
    return torch.equal(back, x)


def test_groups_and_transports() -> None:
    assert succeeded(on_ranks(of_one_of_two_groups, 4)) == [True] * 4


CHANGES = {
    "shape": ("rank 1: elements is 3, on rank 0 it is 4",) * 2,
    "batch": ("rank 1: batch is 2, on rank 0 it is 1",) * 2,
    "dtype": ("rank 1: dtype is bf16, on rank 0 it is fp32",) * 2,
    "float64": ("rank 1: x is [1, 4, 4] of torch.float64, expected", "x is [1, 4, 4] of torch.float64, expected"),
    "one dimension": ("x is [4] of torch.float32, expected [batch, positions, ...]",) * 2,
    "after": ("rank 1: after is contiguous of 8 positions",) * 2,
    "before": ("rank 1: before is zigzag of 8 positions",) * 2,
    "lengths": ("rank 1 has 3 of 7 positions, the contiguous layout of relayout assigns 4 to it",) * 2,
    "group": ("the contiguous layout is for 3 ranks, the group has 2",) * 2,
    "other sequence": ("relayout: the zigzag layout has 9 positions, expected the 8 of the workload",) * 2,
    "gradients": ("rank 1: gradients is True, on rank 0 it is False",) * 2,
    "other function": ("rank 1: kind is linear, on rank 0 it is relayout",) * 2,
    "topology": ("schedule 'relayout' is for 2 ranks, full-mesh:3 has 3",) * 2,
    "transport": ("unknown transport 'pigeon'",) * 2,
}
"""What is wrong, and what rank 0 and rank 1 are told."""


def refusal(change: str) -> None:
    """On a rank: a re-layout where rank 1, or every rank, does something that cannot work."""
    odd, before, after = dist.get_rank() == 1, contiguous(8, 2), zigzag(8, 2)
    x, keywords = torch.ones(1, 4, 4), dict[str, Any]()
    if change == "one dimension":
        x = x[0, 0]
    elif change == "group":
        before = contiguous(8, 3)
    elif change == "other sequence":
        after = zigzag(9, 2)
    elif change == "topology":
        keywords["topology"] = full_mesh(3)
    elif change == "transport":
        keywords["transport"] = "pigeon"
    elif odd:
        changed = {
            "shape": x[..., 1:],
            "batch": torch.cat([x, x]),
            "dtype": x.bfloat16(),
            "float64": x.double(),
            "lengths": x[:, 1:],
            "gradients": x.clone().requires_grad_(),
        }
        x = changed.get(change, x)
        before, after = {"before": (after, after), "after": (before, before)}.get(change, (before, after))
        if change == "other function":
            q = x[..., None]
            linear_attention(q, q, q)
    relayout(x, before, after, **keywords)


def test_what_cannot_work_is_refused_in_one_line_before_data_moves() -> None:
    """So the group can still be used afterwards."""
    check_refusals(refusal, CHANGES)


def lost_on_rank() -> str:
    """On a rank: what it is told when rank 1 does not take part."""
    dist.barrier()  # rank 1 must not leave while rank 0 is still joining it
    if dist.get_rank() == 1:
        return ""
    with pytest.raises(RunError) as lost:
        relayout(torch.ones(1, 4, 4), contiguous(8, 2), zigzag(8, 2), timeout_s=2.0)
    return str(lost.value)


def test_a_rank_that_does_not_come_is_reported() -> None:
    assert "rank 0: lost rank 1 before the start" in str(on_ranks(lost_on_rank, 2)[0])
