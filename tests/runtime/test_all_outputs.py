"""Gradients flow through every output of a layer, by every schedule, and are those of float64; or the call is refused.

Outputs are the result and the log-sum-exp of softmax attention, and the result and the last state of linear attention.
Each may be alone in a loss, on all ranks or on some of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from runtime import attention, attention_with_lse, linear_attention, prepare
from runtime.kernels import fused
from runtime.sequence_parallel.api import SequenceParallelAttention
from tasp_lab.core.errors import RunError, WorkloadError
from tasp_lab.schedules.attention.backward import DATAFLOWS
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.registry import attention_names_on, state_schedules
from tasp_lab.workload.layer import Workload
from tests.runtime.test_layers_on_ranks import linear
from tests.support.linear_recurrence import recurrence
from tests.support.rank_layers import DECAYS, Shard, dout_of, layer_of, relative_errors, seen_by, squares
from tests.support.ranks import on_ranks, succeeded

pytestmark = pytest.mark.distributed

Tensor = torch.Tensor

LAYERS = [
    Workload(37, batch=2, heads=4, kv_heads=2, head_dim=16, dtype="fp32", mask="causal"),
    Workload(26, heads=4, kv_heads=4, head_dim=16, dtype="fp32"),
    Workload(40, heads=4, kv_heads=4, head_dim=16, dtype="fp32", mask="causal", documents=(7, 0, 1, 20, 12)),
    Workload(40, heads=4, kv_heads=4, head_dim=16, dtype="fp32", mask="causal", window=9),
]


def dlse_of(work: Workload) -> Tensor:
    """A gradient of the log-sum-exp, [batch, positions, heads]."""
    return torch.randn(work.batch, work.sequence, work.heads, generator=torch.Generator().manual_seed(4))


def outputs_in_float64(work: Workload, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The result and its log-sum-exp, [batch, positions, heads], differentiated by torch."""
    k, v = (x.repeat_interleave(work.heads // work.kv_head_count, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * work.head_dim**-0.5
    scores = scores.masked_fill(~seen_by(work), -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v), scores.logsumexp(-1).transpose(1, 2)


class Loss(NamedTuple):
    """How much of the result and of its log-sum-exp is in a loss; None: it is not in the graph."""

    out: float | None
    lse: float | None

    def of(self, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor) -> Tensor:
        pairs = (self.out, out, dout), (self.lse, lse, dlse)
        terms = [(share * x * dx.to(x.dtype)).sum() for share, x, dx in pairs if share is not None]
        return torch.stack([each.double() for each in terms]).sum()


LOSSES = [Loss(1, 1), Loss(None, 1), Loss(0, 1), Loss(1e-12, 1), Loss(1, 1e3), Loss(1, None)]
"""Rows of gradients of 0, and far smaller ones than those of the log-sum-exp, are among them."""


def gradients(work: Workload, loss: Loss) -> list[Tensor]:
    whole = [x.double().requires_grad_() for x in layer_of(work)]
    of_loss = loss.of(*outputs_in_float64(work, *whole), dout_of(work).double(), dlse_of(work).double())
    return list(torch.autograd.grad(of_loss, whole, materialize_grads=True))


def keywords_of(work: Workload) -> dict[str, Any]:
    ends = None if work.documents is None else [0, 7, 7, 8, 28, 40]
    return {"causal": work.mask == "causal", "window": work.window, "cu_seqlens": ends}


Case = tuple[Workload, str, Loss, dict[str, Any]]


def differentiated(cases: Sequence[Case]) -> list[list[tuple[float, float]]]:
    """On a rank: of each case the squares of errors of the gradients, and of the gradients."""
    found = []
    for work, name, loss, keywords in cases:
        here = Shard(work, name)
        out, lse = attention_with_lse(*here.inputs, schedule=name, **keywords_of(work), **keywords)
        of_loss = loss.of(out, lse.transpose(1, 2), here.dout, here.of(dlse_of(work)))
        grads = torch.autograd.grad(of_loss, here.inputs)
        assert [x.dtype for x in grads] == [x.dtype for x in here.inputs]
        found.append(squares(grads, [here.of(x) for x in gradients(work, loss)]))
    return found


def check(cases: Sequence[Case], world_size: int, most: float) -> None:
    """Errors of a gradient that is 0 are relative to those of the queries."""
    for case, *of_ranks in zip(cases, *succeeded(on_ranks(differentiated, world_size, cases)), strict=True):
        queries, *keys_and_values = ([rank[at] for rank in of_ranks] for at in range(3))
        (error,) = relative_errors([[each] for each in queries])
        scale = sum(expected for _, expected in queries)
        errors = [
            (sum(x for x, _ in each) / (sum(y for _, y in each) or scale)) ** 0.5 for each in keys_and_values
        ]
        assert max(error, *errors) < most, (case, error, errors)


@pytest.mark.parametrize("world_size", [2, 4])
def test_gradients_of_the_log_sum_exp_by_every_schedule(world_size: int) -> None:
    names = attention_names_on(world_size)
    cases: list[Case] = [(LAYERS[number % 2], name, LOSSES[0], {}) for number, name in enumerate(names)]
    cases += [(LAYERS[0], name, LOSSES[1], {}) for name in names]
    check(cases, world_size, 1e-5)


def test_gradients_of_the_log_sum_exp_in_every_loss_and_layer() -> None:
    every = product(LAYERS, ("tasp", "zigzag-token-ring"), LOSSES)
    cases: list[Case] = [(work, name, loss, {}) for work, name, loss in every]
    cases += [
        (LAYERS[0], "tasp", loss, {"options": AttentionOptions("both", dataflow=dataflow)})
        for loss, dataflow in product(LOSSES[:2], DATAFLOWS)
    ]
    cases += [(work, "tasp", loss, {"kernel": "reference"}) for work, loss in product(LAYERS[:2], LOSSES[:3])]
    check(cases, 3, 1e-5)


@pytest.mark.parametrize(("dtype", "most"), [("bf16", 2e-2), ("fp16", 4e-3)])
def test_gradients_of_the_log_sum_exp_in_half_precision(dtype: Any, most: float) -> None:
    layer = replace(LAYERS[0], dtype=dtype)
    names = ("tasp", "zigzag-token-ring", "ulysses")
    losses = [each for each in LOSSES if each.out != 1e-12]
    check([(layer, name, loss, {}) for name, loss in product(names, losses)], 2, most)
