"""Sequences of linear attention that begin with a state and leave one, against the recurrence in float64."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.kernels.linear_attention import attend
from runtime.sequence_parallel.agreement import Call
from runtime.sequence_parallel.calls import run_layer
from runtime.sequence_parallel.linear_attention import LinearPasses
from runtime.sequence_parallel.sharding import shard
from tasp_lab.core.choices import Decay
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import linear_schedules
from tasp_lab.schedules.registry import LINEAR, state_schedules
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.sequence_layout import contiguous
from tests.conftest import ROOT
from tests.support.linear_recurrence import recurrence
from tests.support.loopback import Board, Loopback

Tensor = torch.Tensor

TREE_SCAN = f"{ROOT}/experiments/schedules/linear.py:tree-scan"


class OnlyCall(Call):
    """The call of threads that make no other one, so they need not agree on it."""

    def __init__(self) -> None:
        self.number = 1

    def agree_on_backward(self, computed_as: int | None = None, problem: Exception | None = None) -> None:
        assert (computed_as, problem) == (1, None)

    def running(self, *_: object, **__: object) -> AbstractContextManager[None]:
        return nullcontext()


def random_inputs(layer: Workload) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """q, k, v and the gates if there are any; a state; and the gradients of the outputs and of the last state."""
    random = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(layer.batch, *shape, generator=random)

    n, heads, kv_heads, size, values = (
        layer.sequence, layer.heads, layer.kv_head_count, layer.head_dim, layer.value_size
    )  # fmt: skip
    q, dout = normal(n, heads, size), normal(n, heads, values)
    k, v = normal(n, kv_heads, size), normal(n, kv_heads, values)
    per = {"scalar": (kv_heads,), "channel": (kv_heads, size)}
    gates = [-0.3 * normal(n, *per[layer.decay]).abs()] if layer.decay in per else []
    state, dstate = normal(kv_heads, size, values), normal(kv_heads, size, values)
    return [q, k, v, *gates], state, dout, dstate


def decays_of(layer: Workload) -> tuple[float, ...]:
    return tuple(0.9 ** (1 + head) for head in range(layer.kv_head_count)) if layer.decay == "head" else ()


def by_threads(layer: Workload, name: str, n: int, with_state: bool, with_final: bool, **options: Any) -> list[Tensor]:
    """The outputs, the last state, and the gradients of all inputs, of the state too, by a schedule on n ranks."""
    inputs, state, dout, dstate = random_inputs(layer)
    layout, board = contiguous(layer.sequence, n), Board()
    passes = linear_schedules(name, full_mesh(n), layer, None, AttentionOptions("both", **options), decays_of(layer))
    last = max(rank for rank in range(n) if layout.length(rank))

    def run(rank: int) -> tuple[list[Tensor], Tensor | None, Tensor | None]:
        leaves = [shard(x, layout, rank).clone().requires_grad_() for x in inputs]
        initial = state.clone().requires_grad_() if with_state and rank == 0 else None
        transport = Loopback(board, rank, whole_steps=False)
        layer = LinearPasses(passes[0], passes[1], rank, transport, with_final and rank == last, attend)
        gates = leaves[3] if len(leaves) > 3 else None
        out, after = run_layer(layer, OnlyCall(), True, *leaves[:3], gates, initial)
        ends = [(out, shard(dout, layout, rank)), *([] if after is None else [(after, dstate)])]
        wanted = leaves if initial is None else [*leaves, initial]
        found = list(torch.autograd.grad([x for x, _ in ends], wanted, [x for _, x in ends]))
        dinitial = found.pop() if initial is not None else None
        return [out.detach(), *found], None if after is None else after.detach(), dinitial

    with ThreadPoolExecutor(n) as threads:
        ranks = list(threads.map(run, range(n)))
    shards = [torch.cat(each, 1) for each in zip(*(found for found, _, _ in ranks), strict=True)]
    assert [rank for rank, each in enumerate(ranks) if each[1] is not None] == ([last] if with_final else [])
    states = [*([ranks[last][1]] if with_final else []), *([ranks[0][2]] if with_state else [])]
    return [*shards, *(each for each in states if each is not None)]


def in_one_piece(layer: Workload, with_state: bool, with_final: bool) -> list[Tensor]:
    """The same by the recurrence."""
    given, state, dout, dstate = random_inputs(layer)
    leaves = [each.double().requires_grad_() for each in given]
    initial = state.double().requires_grad_()
    gates = leaves[3] if len(leaves) > 3 else None
    q, k, v = leaves[:3]
    out, after = recurrence(q, k, v, gates, decays_of(layer), state=initial if with_state else None)
    ends = [(out, dout.double()), *([(after, dstate.double())] if with_final else [])]
    wanted = [*leaves, initial] if with_state else leaves
    found = torch.autograd.grad([x for x, _ in ends], wanted, [x for _, x in ends])
    gradients, dinitial = found[: len(leaves)], found[len(leaves) :]
    return [out.detach(), *gradients, *([after.detach()] if with_final else []), *dinitial]


@pytest.mark.parametrize("name", [*state_schedules(), TREE_SCAN])
@settings(max_examples=12)
@given(st.data())
def test_states_at_both_ends_and_all_gradients_are_those_of_the_recurrence(name: str, data: st.DataObject) -> None:
    """Short and empty shards, one rank, GQA, batches, every decay, either end alone."""
    kv_heads = data.draw(st.sampled_from([1, 2]))
    layer = Workload(
        data.draw(st.one_of(st.integers(1, 5), st.integers(60, 70))),
        batch=data.draw(st.integers(1, 2)),
        heads=kv_heads * data.draw(st.integers(1, 2)),
        kv_heads=kv_heads,
        head_dim=data.draw(st.sampled_from([1, 4])),
        value_dim=data.draw(st.sampled_from([None, 3])),
        dtype="fp32",
        mask="causal",
        kind="linear",
        decay=data.draw(st.sampled_from(get_args(Decay))),
    )
    with_state, with_final = data.draw(st.sampled_from([(True, True), (True, False), (False, True)]))
    options: dict[str, Any] = {"trim": data.draw(st.booleans())} if "trim" in LINEAR[name].options else {}
    if "pieces" in LINEAR[name].options:
        options["pieces"] = data.draw(st.sampled_from([None, kv_heads]))
    found = by_threads(layer, name, data.draw(st.integers(1, 4)), with_state, with_final, **options)
    expected = in_one_piece(layer, with_state, with_final)
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours.double() - theirs).norm()) <= 1e-5 * max(float(theirs.norm()), 1.0)
