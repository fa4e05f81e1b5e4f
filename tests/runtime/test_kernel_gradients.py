"""Backward passes of the kernels: derivatives by autograd, and parts that add up wherever keys and queries are cut."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from runtime.kernels import flash, partials, sdpa
from runtime.kernels.partials import Band
from runtime.kernels.registry import KERNELS, Gradients, Kernel, Partial
from tests.runtime.test_kernels import (  # noqa: F401
    TORCH_KERNELS,
    Case,
    Implementations,
    Takes,
    _one_thread,
    as_on_gpus,
    bottom_right,
    cases,
    cuts,
    error,
    install_flash_attn,
    on_both,
    only_equal,
)

Tensor = torch.Tensor


def backward(kernel: Kernel, case: Case, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: Partial) -> Gradients:
    """With the result and log-sum-exp of all keys in the dtypes in which a caller has them; the reference takes all."""
    exact = kernel.name == "reference"
    out = whole.out if exact else whole.out.to(q.dtype)
    lse = whole.lse if exact else whole.lse.to(partials.lse_dtype(q.dtype))
    lse = partials.lse_for_gradients(lse)
    return kernel.backward(dout, q, k, v, out, lse, scale=case.scale, low=case.low, high=case.high)


def drawn_dout(case: Case, q: Tensor) -> Tensor:
    """Laid out as the queries are, where it is as wide."""
    drawn = torch.randn(*q.shape[:3], case.value_dim, generator=torch.Generator().manual_seed(case.seed + 1))
    return torch.empty_like(q).copy_(drawn) if drawn.shape == q.shape else drawn.to(q.dtype)


def by_autograd(case: Case, dout: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Partial, Gradients]:
    """Plain softmax attention in float64, and its derivatives; rows that see nothing have out 0 and lse -inf."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    query, key, value = leaves[0], *(x.repeat_interleave(case.group, 2) for x in leaves[1:])
    seen = case.seen()
    rows = seen.any(1)
    scores = (torch.einsum("bihd,bjhd->bhij", query, key) * case.scale).masked_fill(~seen, -math.inf)[:, :, rows]
    out = query.new_zeros(*query.shape[:3], value.shape[3])
    out[:, rows] = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), value)
    lse = torch.full(q.shape[:3], -math.inf, dtype=torch.float64)
    lse[:, rows] = scores.logsumexp(-1).transpose(1, 2)
    gradients = torch.autograd.grad(out, leaves, dout.double(), materialize_grads=True)
    return Partial(out.detach(), lse.detach()), Gradients(*gradients)


def joint_error(found: Gradients, expected: Gradients, dout: Tensor) -> float:
    """Relative in norm, of all three together and of dout: gradients are sums over dout, in which all may cancel.

    So they do for a row that sees one key: it has no gradient by that key, nor by its query.
    """
    assert [x.shape for x in found] == [x.shape for x in expected]
    return error(*(torch.cat([x.double().flatten() for x in (*gradients, dout)]) for gradients in (found, expected)))


@given(cases(), st.sampled_from([3, 512]))
@settings(max_examples=100)
@example(Case(kv_heads=0), 512)
@example(Case(batch=0, low=-3, high=3), 512)
def test_every_kernel_gives_the_derivatives_of_softmax_attention(case: Case, rows_at_once: int) -> None:
    """For any sizes, ratio of heads, mask and strides. What sees nothing or is not seen has gradient 0."""
    q, k, v = case.tensors()
    dout = drawn_dout(case, q)
    whole, expected = by_autograd(case, dout, q, k, v)
    unseeing, unseen = ~case.seen().any(1), ~case.seen().any(0)
    for kernel, most in (KERNELS["reference"], 1e-12), (KERNELS["sdpa"], 1e-5):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(partials, "ROWS_AT_ONCE", rows_at_once)
            found = backward(kernel, case, dout, q, k, v, whole)
        assert joint_error(found, expected, dout) < most
        assert not found.q[:, unseeing].any()
        assert not any(x[:, unseen].any() for x in found[1:])


@on_both
@given(case=cases(), data=st.data())
@settings(max_examples=80)
def test_the_parts_of_any_segments_of_keys_and_queries_add_up(kernel: Kernel, case: Case, data: st.DataObject) -> None:
    """Each knows only its own keys and queries, and of all others only out and lse: what a ring needs."""
    q, k, v = case.tensors()
    dout = drawn_dout(case, q)
    whole, expected = by_autograd(case, dout, q, k, v)
    total = Gradients(*(torch.zeros_like(x) for x in expected))
    query_cuts, key_cuts = data.draw(cuts(case.queries)), data.draw(cuts(case.keys))
    for rows, keys in [(slice(*rows), slice(*keys)) for rows in query_cuts for keys in key_cuts]:
        shift = keys.start - rows.start
        block = Case(**{**vars(case), "low": case.low + shift, "high": case.high + shift})
        known = Partial(whole.out[:, rows], whole.lse[:, rows])
        part = backward(kernel, block, dout[:, rows], q[:, rows], k[:, keys], v[:, keys], known)
        total.q[:, rows] += part.q
        total.k[:, keys] += part.k
        total.v[:, keys] += part.v
    assert joint_error(total, expected, dout) < (1e-12 if kernel.name == "reference" else 1e-5)


@pytest.mark.parametrize("low", [-1999, 0, -500])
@pytest.mark.parametrize("keys", [1500, 800])
def test_gradients_over_more_than_a_tile(keys: int, low: int) -> None:
    """Masks that cut the blocks in which the operator and the kernel walk; each gradient by itself is as exact."""
    case = Case(1, 1100, keys, 1, 2, 8, low, 1999 if low == 0 else 300)
    q, k, v = case.tensors()
    dout = drawn_dout(case, q)
    whole, expected = by_autograd(case, dout, q, k, v)
    found = backward(KERNELS["sdpa"], case, dout, q, k, v, whole)
    assert max(map(error, found, expected)) < 1e-5


@given(cases(), st.sampled_from([torch.float64, torch.bfloat16, torch.float16]))
@settings(max_examples=40)
@example(Case(queries=700, keys=700, kv_heads=2, group=2), torch.bfloat16)
def test_gradients_are_not_rounded_to_the_dtype_of_the_inputs(case: Case, dtype: torch.dtype) -> None:
    """Parts of many kernel calls are summed, so they come in float32 at least, on a CPU."""
    q, k, v = case.tensors(dtype)
    dout = drawn_dout(case, q)
    whole = by_autograd(case, dout, q, k, v)[0]
    rounded = Partial(whole.out.to(dtype), whole.lse)
    expected = backward(KERNELS["reference"], case, dout, q, k, v, rounded)
    found = backward(KERNELS["sdpa"], case, dout, q, k, v, rounded)
    assert {x.dtype for x in found} == {partials.lse_dtype(dtype)}
    assert {x.dtype for x in expected} == {torch.float64}
    noise = 1e-12 if dtype == torch.float64 else 1e-5
    for x, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(x.double(), exact, rtol=noise, atol=noise)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("low", [-999, 0, -40])
def test_gradients_in_bfloat16_are_as_exact_as_those_of_torch(head_dim: int, low: int) -> None:
    """The error of each gradient is at most 1.5 times that of autograd through torch's public function."""
    case = Case(1, 300, 300, 2, 2, head_dim, low, 999, value_dim=head_dim)
    q, k, v = case.tensors(torch.bfloat16)
    dout = drawn_dout(case, q)
    whole, expected = by_autograd(case, dout, q, k, v)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    query, key, value = (x.transpose(1, 2) for x in leaves)
    out = scaled_dot_product_attention(query, key, value, attn_mask=case.seen(), enable_gqa=True)
    torchs = torch.autograd.grad(out, leaves, dout.transpose(1, 2))
    found = backward(KERNELS["sdpa"], case, dout, q, k, v, whole)
    for ours, theirs, exact in zip(found, torchs, expected, strict=True):
        assert error(ours, exact) <= 1.5 * error(theirs, exact)


@on_both
def test_rows_that_weigh_nothing_contribute_nothing(kernel: Kernel) -> None:
    """Though they see keys here; and neither they nor anything else is written to."""
    case = Case(queries=9, keys=7, kv_heads=2, group=2, low=-3)
    q, k, v = case.tensors()
    dout = drawn_dout(case, q)
    whole = by_autograd(case, dout, q, k, v)[0]
    without = whole._replace(lse=whole.lse.index_fill(1, torch.tensor([2, 5]), -math.inf))
    given_tensors = (dout, q, k, v, *without)
    before = [x.clone() for x in given_tensors]
    found = backward(kernel, case, dout, q, k, v, without)
    assert all(map(torch.equal, given_tensors, before))
    none = dout.index_fill(1, torch.tensor([2, 5]), 0)
    assert joint_error(found, backward(kernel, case, none, q, k, v, whole), dout) < 1e-6
    assert not found.q[:, [2, 5]].any()


@on_both
def test_a_gradient_that_is_one_number_everywhere(kernel: Kernel) -> None:
    """As sums give it: a tensor of strides 0."""
    case = Case(queries=9, keys=7, low=-3)
    q, k, v = case.tensors()
    dout = torch.ones(()).expand(*q.shape[:3], v.shape[3])
    whole, expected = by_autograd(case, dout, q, k, v)
    assert joint_error(backward(kernel, case, dout, q, k, v, whole), expected, dout) < 1e-5


def by_definition(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seen: Tensor, scale: float
) -> Gradients:
    """What an operator computes: all [batch, heads, rows, head_dim], but for lse [batch, heads, queries]."""
    group = q.shape[1] // k.shape[1]
    every_k, every_v = (x.repeat_interleave(group, 1) for x in (k, v))
    weights = ((q @ every_k.mT * scale).masked_fill(~seen, -math.inf) - lse[..., None]).exp()
    dscores = weights * (dout @ every_v.mT - (dout * out).sum(-1, keepdim=True)) * scale
    dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (dscores.mT @ q, weights.mT @ dout))
    return Gradients(dscores @ every_k, dk, dv)


def flash_by_definition(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    scale: float, causal: bool, left: int, right: int, takes: Takes = only_equal,
) -> Tensor:  # fmt: skip
    """What flash-attn fills in, given the lse [batch, heads, queries]; causal overrides the limit on the right."""
    assert lse.is_contiguous()
    assert takes(q.shape[-1], v.shape[-1])
    seen = bottom_right(q.shape[1], k.shape[1], left, 0 if causal else right)
    dout, q, k, v, out = partials.heads_first(dout, q, k, v, out)
    for filled, x in zip((dq, dk, dv), by_definition(dout, q, k, v, out, lse, seen, scale), strict=True):
        filled.copy_(x.transpose(1, 2))
    return (dout * out).sum(-1)


def flash_2_6(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
    deterministic, rng_state=None,
):  # fmt: skip
    delta = flash_by_definition(dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal, *window_size)
    return dq, dk, dv, delta


class Flash28:
    """An operator made with torch.library.custom_op takes anything and keeps its first definition."""

    def __call__(self, *tensors, **options):
        return self._init_fn(*tensors, **options)

    @staticmethod
    def _init_fn(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        return flash_by_definition(
            dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal, window_size_left, window_size_right
        )


@given(cases())
@settings(max_examples=60)
@example(Case())
def test_flash_attn_is_asked_for_gradients_in_every_release(case: Case) -> None:
    """Against a stand-in that follows its documentation, with the signatures of releases 2.6 and 2.7 to 2.8."""
    q, k, v = case.tensors()
    dout = drawn_dout(case, q)
    whole, expected = by_autograd(case, dout, q, k, v)
    releases: list[Callable[..., object]] = [flash_2_6, Flash28()]
    for release in releases:
        with pytest.MonkeyPatch.context() as patch:
            install_flash_attn(patch, _flash_attn_backward=release)
            assert joint_error(backward(KERNELS["flash-attn"], case, dout, q, k, v, whole), expected, dout) < 1e-5


def torch_operator(
    dout, q, k, v, out, lse, starts_q, starts_k, most_q, most_k, dropout_p, causal, rng_state, unused, *, scale,
    window_size_left, window_size_right, takes=only_equal,
):  # fmt: skip
    """What torch's operator of FlashAttention gives; None is no limit."""
    assert starts_q is starts_k is None
    assert (most_q, most_k) == (q.shape[1], k.shape[1])
    left, right = (-1 if each is None else each for each in (window_size_left, window_size_right))
    gradients = tuple(map(torch.empty_like, (q, k, v)))
    flash_by_definition(dout, q, k, v, out, lse, *gradients, scale, causal, left, right, takes)
    return gradients


@given(cases())
@settings(max_examples=60)
@example(Case())
@example(Case(queries=40, keys=40, low=0))
@example(Case(queries=40, keys=30, low=-9, kv_heads=2, group=3))
@example(Case(head_dim=192, value_dim=128))
def test_the_flash_attention_of_torch_is_asked_for_the_right_gradients(case: Case) -> None:
    """Against a stand-in with the operator's signature."""
    q, k, v = case.tensors()
    dout = drawn_dout(case, q)
    whole, expected = by_autograd(case, dout, q, k, v)
    with pytest.MonkeyPatch.context() as patch:
        Implementations(patch)
        as_on_gpus(patch)
        for name, takes in TORCH_KERNELS:
            patch.setattr(torch.ops.aten, "_flash_attention_backward", partial(torch_operator, takes=takes))
            assert joint_error(backward(KERNELS[name], case, dout, q, k, v, whole), expected, dout) < 1e-5


def cudnn_operator(
    dout, q, k, v, out, lse, seed, offset, bias, starts_q, starts_k, queries, keys, dropout_p, causal, *, scale
):  # fmt: skip
    """What torch's cuDNN operator demands, and what it gives."""
    assert bias is starts_q is starts_k is None
    assert (queries, keys) == (q.shape[2], k.shape[2])
    assert lse.shape == (*q.shape[:3], 1)
    assert lse.is_contiguous()
    assert not causal or queries == keys
    return by_definition(
        dout, q, k, v, out, lse[..., 0], torch.ones(queries, keys).tril(0 if causal else keys).bool(), scale
    )


@given(cases())
@settings(max_examples=60)
@example(Case(queries=40, keys=40, low=0))
@example(Case(queries=40, keys=40, kv_heads=2, group=3))
def test_cudnn_is_asked_for_the_right_gradients(case: Case) -> None:
    q, k, v = case.tensors()
    dout = drawn_dout(case, q)
    whole, expected = by_autograd(case, dout, q, k, v)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops.aten, "_flash_attention_backward", torch_operator)
        patch.setattr(torch.backends.cuda, "can_use_cudnn_attention", lambda parameters: True)
        patch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention_backward", cudnn_operator)
        assert joint_error(backward(KERNELS["cudnn"], case, dout, q, k, v, whole), expected, dout) < 1e-5


@pytest.mark.parametrize(
    ("operator", "band"),
    [
        (sdpa._cudnn_gradient_operator, Band(0, 40, 0, 40, 0, 39)),
        (sdpa._cudnn_gradient_operator, Band(0, 40, 0, 50, -49, 39)),
        (flash.TORCH_FLASH.differentiate, Band(0, 40, 0, 40, 0, 39)),
        (flash.TORCH_FLASH.differentiate, Band(0, 40, 0, 50, -49, 39)),
        (flash.TORCH_FLASH.differentiate, Band(0, 40, 0, 50, -20, 30)),
    ],
)
def test_the_gpu_operators_for_gradients_take_our_arguments(operator: partials.Differentiate, band: Band) -> None:
    """Their signatures and shapes, on tensors without data; their numbers need a GPU."""
    q = torch.empty(2, band.queries, 6, 64, dtype=torch.bfloat16, device="meta")
    k = torch.empty(2, band.keys, 3, 64, dtype=torch.bfloat16, device="meta")
    rows = partials.Rows(q, q, q, torch.empty(2, band.queries, 6, device="meta"))
    found = operator(rows, k, k, 0.125, band)
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in (q, k, k)]
