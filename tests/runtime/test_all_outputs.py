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

from runtime import SequenceParallelAttention, attention_with_lse, linear_attention, prepare
from runtime.kernels import fused
from runtime.sequence_parallel.sharding import shard
from tasp_lab.core.errors import RunError, TaspLabError, WorkloadError
from tasp_lab.schedules.attention.backward import DATAFLOWS, attention_passes
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import attention_layout
from tasp_lab.schedules.registry import attention_names_on, state_schedules
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tests.runtime.test_layers_on_ranks import linear
from tests.support.linear_recurrence import recurrence
from tests.support.rank_layers import Shard, dout_of, gates_of, layer_of, relative_errors, seen_by, squares
from tests.support.ranks import on_ranks, succeeded

pytestmark = pytest.mark.distributed

Tensor = torch.Tensor

LAYERS = [
    Workload(37, batch=2, heads=4, kv_heads=2, head_dim=16, dtype="fp32", mask="causal", value_dim=8),
    Workload(26, heads=4, kv_heads=4, head_dim=16, dtype="fp32", mask="full"),
    Workload(
        40, heads=4, kv_heads=4, head_dim=16, dtype="fp32", mask="causal", documents=(7, 0, 1, 20, 12), value_dim=24
    ),
    Workload(40, heads=4, kv_heads=4, head_dim=16, dtype="fp32", mask="causal", window=9),
]


def dlse_of(work: Workload) -> Tensor:
    """A gradient of the log-sum-exp, [batch, positions, heads]."""
    return torch.randn(work.batch, work.sequence, work.heads, generator=torch.Generator().manual_seed(4))


def sinks_of(work: Workload) -> list[Tensor]:
    """The sinks of a layer, if it has some: as large as scores, far below them, and so large that keys hardly count."""
    return [torch.tensor([0.7, -20.0, 6.0, -0.4, *range(work.heads)])[: work.heads]] if work.sinks else []


def outputs_in_float64(work: Workload, q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> tuple[Tensor, Tensor]:
    """The result and its log-sum-exp, [batch, positions, heads], differentiable; a sink is a key of value 0."""
    k, v = (x.repeat_interleave(work.heads // work.kv_head_count, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * work.head_dim**-0.5
    scores = scores.masked_fill(~seen_by(work), -torch.inf)
    for each in sinks:
        scores = torch.cat([scores, each.view(-1, 1, 1).expand(*scores.shape[:3], 1)], -1)
        v = torch.cat([v, torch.zeros_like(v[:, :1])], 1)
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
    whole = [x.double().requires_grad_() for x in (*layer_of(work), *sinks_of(work))]
    of_loss = loss.of(*outputs_in_float64(work, *whole), dout_of(work).double(), dlse_of(work).double())
    return list(torch.autograd.grad(of_loss, whole, materialize_grads=True))


def keywords_of(work: Workload) -> dict[str, Any]:
    ends = None if work.documents is None else [0, 7, 7, 8, 28, 40]
    return {"causal": work.mask == "causal", "window": work.window, "cu_seqlens": ends}


Case = tuple[Workload, str, Loss, dict[str, Any]]


def differentiated(cases: Sequence[Case]) -> list[list[tuple[float, float]]]:
    """On a rank: of each case the squares of errors of the gradients, and of the gradients; those of sinks are sums."""
    found = []
    for work, name, loss, keywords in cases:
        here = Shard(work, name)
        sinks = [each.requires_grad_() for each in sinks_of(work)]
        given = {"sinks": sinks[0]} if sinks else {}
        out, lse = attention_with_lse(*here.inputs, schedule=name, **keywords_of(work), **given, **keywords)
        of_loss = loss.of(out, lse.transpose(1, 2), here.dout, here.of(dlse_of(work)))
        grads, expected = torch.autograd.grad(of_loss, (*here.inputs, *sinks)), gradients(work, loss)
        assert [x.dtype for x in grads] == [x.dtype for x in (*here.inputs, *sinks)]
        for each in grads[3:]:
            dist.all_reduce(each)
        found.append(squares(grads, [*map(here.of, expected[:3]), *expected[3:]]))
    return found


def check(cases: Sequence[Case], world_size: int, most: float) -> None:
    """Errors of a gradient that is 0 are relative to those of the queries."""
    for case, *of_ranks in zip(cases, *succeeded(on_ranks(differentiated, world_size, cases)), strict=True):
        queries, *keys_and_values = ([rank[at] for rank in of_ranks] for at in range(len(of_ranks[0])))
        (error,) = relative_errors([[each] for each in queries])
        scale = sum(expected for _, expected in queries)
        errors = [(sum(x for x, _ in each) / (sum(y for _, y in each) or scale)) ** 0.5 for each in keys_and_values]
        assert max(error, *errors) < most, (case, error, errors)


@pytest.mark.parametrize("world_size", [2, 4])
def test_gradients_of_the_log_sum_exp_by_every_schedule(world_size: int) -> None:
    names = attention_names_on(world_size)
    cases: list[Case] = [(LAYERS[number % 2], name, LOSSES[0], {}) for number, name in enumerate(names)]
    if world_size == 2:
        cases += [(LAYERS[0], name, LOSSES[1], {}) for name in names]
    check(cases, world_size, 1e-5)


def test_gradients_of_the_log_sum_exp_in_every_loss_and_layer() -> None:
    cases: list[Case] = [(work, "tasp", loss, {}) for work, loss in product(LAYERS, LOSSES)]
    cases += [(LAYERS[0], "zigzag-token-ring", loss, {}) for loss in LOSSES]
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


WITH_SINKS = [replace(work, sinks=True) for work in LAYERS]


@pytest.mark.parametrize("world_size", [3, 4, 8])
def test_gradients_of_sinks_by_every_schedule(world_size: int) -> None:
    """Those of ranks add up to those of one process, also where the loss is of results or of log-sum-exps alone."""
    names = [name for name in attention_names_on(world_size) if world_size == 4 or "ulysses" not in name]
    layers = WITH_SINKS if world_size == 4 else WITH_SINKS[:3]
    check([(layers[at % len(layers)], name, LOSSES[at % 3], {}) for at, name in enumerate(names)], world_size, 1e-5)


def test_sinks_with_padded_heads_other_kernels_and_dataflows() -> None:
    padded = replace(WITH_SINKS[0], heads=14, kv_heads=2, value_dim=None)
    cases: list[Case] = [(padded, "ulysses", LOSSES[0], {"options": AttentionOptions("both", padded_heads=True)})]
    cases += [
        (work, "tasp", loss, {"options": AttentionOptions("both", dataflow=dataflow), "kernel": kernel})
        for (work, loss), kernel in zip(product(WITH_SINKS, LOSSES[:2]), ("sdpa", "reference") * 4, strict=True)
        for dataflow in DATAFLOWS
    ]
    check(cases, 4, 1e-5)


@pytest.mark.parametrize(("dtype", "most"), [("bf16", 2e-2), ("fp16", 4e-3)])
def test_gradients_of_sinks_in_half_precision(dtype: Any, most: float) -> None:
    check([(replace(work, dtype=dtype), "tasp", LOSSES[0], {}) for work in WITH_SINKS[:2]], 3, most)


def close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(torch.allclose(x.double(), y.double(), 1e-4, 1e-5) for x, y in zip(found, expected, strict=True))


def partly_on_rank() -> None:
    """On a rank: a loss of another output on every rank, by a checkpoint, and by a prepared layer."""
    work = LAYERS[0]
    losses = LOSSES[1], LOSSES[5], LOSSES[0]
    whole = [x.double().requires_grad_() for x in layer_of(work)]
    here = Shard(work, "tasp")
    out, lse = outputs_in_float64(work, *whole)
    of_ranks = []
    for rank, loss in enumerate(losses):
        at = torch.from_numpy(here.layout.positions(rank))
        of_ranks.append(loss.of(out[:, at], lse[:, at], dout_of(work)[:, at], dlse_of(work)[:, at]))
    expected = [here.of(x) for x in torch.autograd.grad(torch.stack(of_ranks).sum(), whole)]
    call = partial(attention_with_lse, schedule="tasp", causal=True)
    prepared = prepare(*here.inputs, schedule="tasp", causal=True)
    again = partial(checkpoint, call, use_reentrant=False)
    for attend in (call, prepared.with_lse, again):
        out, lse = attend(*here.inputs)
        loss = losses[here.rank].of(out, lse.transpose(1, 2), here.dout, here.of(dlse_of(work)))
        assert close(torch.autograd.grad(loss, here.inputs), expected)


def sinks_on_rank() -> list[str]:
    """On a rank: a layer with sinks called in every way; and what is refused."""
    work, world_size = WITH_SINKS[0], dist.get_world_size()
    here, (sinks,) = Shard(work, "tasp"), sinks_of(work)
    call = partial(attention_with_lse, schedule="tasp", causal=True)
    expected = [x.detach() for x in call(*here.inputs, sinks=sinks)]
    prepared = prepare(*here.inputs, sinks=sinks, schedule="tasp", causal=True)
    again = partial(checkpoint, call, use_reentrant=False)
    built = attention_passes("tasp", full_mesh(world_size), replace(work, sinks=False))
    for attend in (partial(prepared.with_lse, sinks=sinks), partial(again, sinks=sinks),
                   partial(call, sinks=sinks, schedule=built)):  # fmt: skip
        assert close(attend(*here.inputs), expected)
    module = SequenceParallelAttention(schedule="tasp", causal=True, sinks=torch.nn.Parameter(sinks))
    (module(*here.inputs) * here.dout).sum().backward()
    (parameter,) = module.parameters()
    assert parameter is module.sinks
    whole = [x.double().requires_grad_() for x in (*layer_of(work), sinks)]
    out, lse = outputs_in_float64(work, *whole)
    (of_sinks,) = torch.autograd.grad((out * dout_of(work)).sum(), whole[3:])
    dist.all_reduce(parameter.grad)
    assert close([parameter.grad], [of_sinks])
    # Of cached keys there are no gradients; the queries are those of the other positions.
    cached = replace(work, cached_keys=9)
    layout = attention_layout("tasp", cached, world_size)
    after = layout.after(9)
    q, k, v = layer_of(work)
    with torch.no_grad():
        new = call(shard(q[:, 9:], after, here.rank), *(shard(x, layout, here.rank) for x in (k, v)), cached_keys=9,
                   sinks=sinks)  # fmt: skip
    wanted = shard(out[:, 9:].detach(), after, here.rank), shard(lse[:, 9:].detach(), after, here.rank).transpose(1, 2)
    assert close(new, wanted)
    refused = []
    for attend, wrong in (
        (call, sinks[:3]), (call, sinks.long()), (call, 0.5), (call, None if here.rank else sinks),
        (prepared.with_lse, None), (prepared.with_lse, sinks.double()),
    ):  # fmt: skip
        with pytest.raises(TaspLabError) as error:
            attend(*here.inputs, sinks=wrong)
        refused.append(str(error.value))
    return refused


def test_layers_with_sinks_are_called_in_every_way() -> None:
    for refused in succeeded(on_ranks(sinks_on_rank, 3)):
        assert refused == [
            "sinks is [3] of torch.float32 on cpu, expected [4], one for each head of q, of a floating dtype on cpu",
            "sinks is [4] of torch.int64 on cpu, expected [4], one for each head of q, of a floating dtype on cpu",
            "sinks: 0.5 of type float, expected a torch.Tensor or None",
            "rank 1: sinks is False, on rank 0 it is True",
            "sinks is None, expected [4] of torch.float32 on cpu, for which the layer was prepared",
            "sinks is [4] of torch.float64 on cpu, expected [4] of torch.float32 on cpu, for which the layer was "
            "prepared",
        ]


def test_each_rank_may_have_a_loss_of_another_output() -> None:
    assert succeeded(on_ranks(partly_on_rank, 3)) == [None] * 3


elements = st.floats(-1e3, 1e3, width=32) | st.sampled_from([0.0, 1e-30, 1e-38, 1e-45, 3e4])


@given(st.data(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_stand_ins_have_the_inner_products_that_gradients_of_the_log_sum_exp_need(
    data: st.DataObject, dtype: torch.dtype
) -> None:
    """Gradients of the result change by less than the rounding error of the inner products, and never overflow."""
    size, eps = data.draw(st.integers(1, 4)), torch.finfo(dtype).eps
    dout, out = (torch.tensor([data.draw(st.lists(elements, min_size=size, max_size=size))], dtype=dtype) for _ in "do")
    dlse = torch.tensor([data.draw(elements)])
    wanted = fused.inner_products(dout, out) - dlse
    changed, stand_in = fused.with_lse_gradient(dout, out, dlse)
    assert stand_in.isfinite().all()
    most = eps * float(wanted.abs()) + (2**-23 if dtype == torch.float16 else 1e-29)
    assert float((changed.double() - dout.double()).abs().max()) <= most
    found = (changed.double() * stand_in.double()).sum(-1)
    assert float((found - wanted).abs()) <= 2 * most


LINEAR = linear(23, decay="scalar", value_dim=3)


class Wanted(NamedTuple):
    """Which inputs of linear attention require a gradient, and which outputs are in the loss."""

    inputs: str
    outputs: tuple[str, ...]


WANTED = [
    Wanted("state", ("out",)),
    Wanted("state", ("final",)),
    Wanted("state", ("out", "final")),
    Wanted("gates", ("out",)),
    Wanted("gates state", ("final",)),
    Wanted("q k v gates state", ("final",)),
    Wanted("k", ("out", "final")),
]


def states_of(work: Workload) -> tuple[Tensor, Tensor]:
    """A state before the first position, and the gradient of the last one."""
    shape = 2, work.batch, work.kv_head_count, work.head_dim, work.value_size
    first, last = torch.randn(shape, generator=torch.Generator().manual_seed(6))
    return first, last


def expected_of(work: Workload, wanted: Wanted) -> dict[str, Tensor]:
    """The gradients by the recurrence in float64; 0 where a loss does not depend on an input."""
    here = dict(zip(["q", "k", "v", "gates", "state"], inputs_of(work), strict=True))
    leaves = {name: x.double().requires_grad_(name in wanted.inputs.split()) for name, x in here.items()}
    q, k, v, gates, state = leaves.values()
    out, final = recurrence(q, k, v, gates, state=state)
    terms = {"out": (out * dout_of(work)).sum(), "final": (final * states_of(work)[1]).sum()}
    loss = torch.stack([terms[each] for each in wanted.outputs]).sum()
    names = wanted.inputs.split()
    found = torch.autograd.grad(loss, [leaves[name] for name in names], materialize_grads=True)
    return dict(zip(names, found, strict=True))


def inputs_of(work: Workload) -> list[Tensor]:
    gates = gates_of(work)
    assert gates is not None
    return [*layer_of(work), gates, states_of(work)[0]]


def linear_on_rank(names: Sequence[str]) -> None:
    """On a rank: gradients of some inputs, the state of rank 0 among them, by losses of some outputs."""
    work, rank, last = LINEAR, dist.get_rank(), dist.get_world_size() - 1
    for name, wanted in product(names, WANTED):
        here = Shard(work, name)
        tensors = dict(zip(["q", "k", "v", "gates"], [x.detach() for x in here.inputs], strict=True))
        if rank == 0:
            tensors["state"] = states_of(work)[0]
        for each in wanted.inputs.split():
            if each in tensors:
                tensors[each].requires_grad_()
        q, k, v, gates, state = (tensors.get(each) for each in ["q", "k", "v", "gates", "state"])
        out, final = linear_attention(q, k, v, gates=gates, initial_state=state, schedule=name, return_final_state=True)  # type: ignore[call-overload]
        assert out.requires_grad
        terms = [(out * here.dout).sum() if "out" in wanted.outputs else out.sum() * 0]
        if "final" in wanted.outputs and rank == last:
            terms = [(final * states_of(work)[1]).sum(), *(terms if "out" in wanted.outputs else [])]
        torch.stack(terms).sum().backward()
        for each, gradient in expected_of(work, wanted).items():
            if each in tensors:
                share = gradient if each == "state" else here.of(gradient)
                assert tensors[each].grad is not None, (name, wanted, each)
                assert close([tensors[each].grad], [share]), (name, wanted, each)  # type: ignore[list-item]


@pytest.mark.parametrize("world_size", [2, 4])
def test_each_input_and_each_output_of_linear_attention_may_be_alone(world_size: int) -> None:
    """Only rank 0 has the state, and only the last rank has the last one."""
    assert succeeded(on_ranks(linear_on_rank, world_size, state_schedules())) == [None] * world_size


def refused_states_on_rank() -> list[str]:
    """On a rank: what is wrong where a rank could not go back to the state that requires a gradient."""
    q, k, v = (torch.randn(1, 4, 2, 4) for _ in "qkv")
    rank, found = dist.get_rank(), []
    state = torch.zeros(1, 2, 4, 4, requires_grad=True) if rank == 0 else None
    with torch.set_grad_enabled(rank == 0), pytest.raises(RunError) as without:
        linear_attention(q, k, v, initial_state=state)
    found.append(str(without.value))
    with pytest.raises(WorkloadError) as forward:
        linear_attention(q, k, v, initial_state=state, options=AttentionOptions("forward"))
    found.append(str(forward.value))
    decay = torch.full((2,), 0.5, requires_grad=True)
    with pytest.raises(WorkloadError) as constant:
        linear_attention(q, k, v, decay=decay)
    found.append(str(constant.value))
    with torch.no_grad():
        linear_attention(q, k, v, initial_state=state)
    return found


def test_a_gradient_that_would_not_be_computed_is_refused() -> None:
    for found in succeeded(on_ranks(refused_states_on_rank, 2)):
        assert found == [
            "rank 1: the call is under torch.no_grad, expected none there, as the initial_state on rank 0 requires a "
            "gradient",
            "options: passes is forward, expected both, for gradients are wanted",
            "decay requires a gradient, which constants have not, expected it in gates, as "
            "decay.log().expand(*q.shape[:2], -1)",
        ]
