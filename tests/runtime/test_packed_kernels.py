"""Calls on packed documents against the mask pair by pair, on every kernel; those of FlashAttention are stand-ins."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.kernels.packed import PackedCall, attend_packed, gradients_packed
from runtime.kernels.partials import Gradients, Partial, Rows, boolean_mask, trim
from runtime.kernels.registry import KERNELS
from tasp_lab.schedules.attention.span_blocks import span_task
from tasp_lab.schedules.attention.task import KEYS, QUERIES, AttentionTask
from tasp_lab.workload.kernel_shapes import Segment
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.packing import PackedSegment
from tasp_lab.workload.sequence_layout import LAYOUTS
from tests.runtime.test_kernels import Implementations, bottom_right, install_flash_attn

Tensor = torch.Tensor
CPU = torch.device("cpu")


@st.composite
def tasks(draw: st.DrawFn) -> AttentionTask:
    """A layer of packed documents on a few ranks, with whole spans as blocks."""
    lengths = draw(st.lists(st.integers(0, 14), min_size=1, max_size=5).filter(sum))
    mask = draw(st.sampled_from(["full", "causal"]))
    window = draw(st.none() | st.integers(1, 9)) if mask == "causal" else None
    heads, kv_heads = draw(st.sampled_from([(2, 1), (2, 2), (6, 3)]))
    layer = Workload(
        sum(lengths), batch=draw(st.integers(1, 2)), heads=heads, kv_heads=kv_heads, head_dim=8, mask=mask,
        window=window, documents=tuple(lengths), value_dim=draw(st.sampled_from([None, 5, 12])),
    )  # fmt: skip
    layout = LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))](layer.sequence, draw(st.integers(1, 3)), layer.documents)
    return span_task(layer, layout, "fp32")


def positions_of(task: AttentionTask, blocks: list[int]) -> Tensor:
    stride = task.layout.stride
    places = [task.start[block] + stride * np.arange(task.count[block]) for block in blocks]
    return torch.from_numpy(task.layout.positions_at(np.concatenate(places)))


def visible(task: AttentionTask, queries: Tensor, keys: Tensor) -> Tensor:
    """Bool [queries, keys], from the definition of the mask; both are positions."""
    layer = task.workload
    document = torch.arange(len(layer.documents or ())).repeat_interleave(torch.tensor(layer.documents))
    ahead = queries[:, None] - keys
    seen = document[queries][:, None] == document[keys]
    if layer.mask == "causal":
        seen &= (ahead >= 0) & (ahead < (layer.window or layer.sequence))
    return seen


def by_definition(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Partial:
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bihj", q, k) * 0.3
    scores = scores.masked_fill(~seen[:, None], -math.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None].masked_fill(lse[..., None] == -math.inf, 0)).exp()
    return Partial(torch.einsum("bihj,bjhd->bihd", weights, v), lse)


class FlashAttn:
    """Release 2.8 as it documents packed sequences: rows one after another, lse [heads, rows]. It counts its calls."""

    def __init__(self) -> None:
        self.calls = Counter[str]()

    def install(self, patch: pytest.MonkeyPatch) -> None:
        install_flash_attn(patch, _flash_attn_varlen_forward=self.forward, _flash_attn_varlen_backward=self.backward)

    def forward(self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
                causal, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
                return_softmax=False):  # type: ignore[no-untyped-def]  # fmt: skip
        self.calls["forward"] += 1
        assert q.shape[2] == v.shape[2], "others are padded"
        parts = [
            _one(q[a:b], k[c:d], v[c:d], softmax_scale, window_size_left, 0 if causal else window_size_right)
            for a, b, c, d in _bounds(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        ]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts]).T.contiguous(), None, None

    def backward(self, dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                 max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
                 alibi_slopes, deterministic):  # type: ignore[no-untyped-def]  # fmt: skip
        self.calls["backward"] += 1
        assert q.shape[2] == v.shape[2] == dout.shape[2], "others are padded"
        assert softmax_lse.is_contiguous()
        assert softmax_lse.shape == (q.shape[1], len(q))
        for a, b, c, d in _bounds(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
            window = bottom_right(b - a, d - c, window_size_left, 0 if causal else window_size_right)
            low, high = _band_of(window)
            operands = (x[None] for x in (dout[a:b], q[a:b], k[c:d], v[c:d], out[a:b], softmax_lse.T[a:b]))
            found = KERNELS["reference"].backward(*operands, scale=softmax_scale, low=low, high=high)
            for into, rows, x in ((dq, slice(a, b), found.q), (dk, slice(c, d), found.k), (dv, slice(c, d), found.v)):
                into[rows] = x[0]


def _bounds(q, k, cu_q, cu_k, max_q, max_k):  # type: ignore[no-untyped-def]
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert (cu_q[-1], cu_k[-1]) == (len(q), len(k))
    assert (int(cu_q.diff().max()), int(cu_k.diff().max())) == (max_q, max_k)
    return zip(*(x.tolist() for x in (cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:])), strict=True)


def _band_of(window: Tensor) -> tuple[int, int]:
    rows, columns = window.nonzero().T
    return int((rows - columns).min()), int((rows - columns).max())


def _one(q: Tensor, k: Tensor, v: Tensor, scale: float, left: int, right: int) -> tuple[Tensor, Tensor]:
    low, high = _band_of(bottom_right(len(q), len(k), left, right))
    found = KERNELS["reference"].attend(q[None], k[None], v[None], scale=scale, low=low, high=high)
    return found.out[0].to(q.dtype), found.lse[0].float()


class TorchFlash(FlashAttn):
    """torch's operator on packed sequences, where None is no limit."""

    def install(self, patch: pytest.MonkeyPatch) -> None:
        Implementations(patch)
        patch.setattr(torch.ops.aten, "_flash_attention_forward", self.torch_forward)
        patch.setattr(torch.ops.aten, "_flash_attention_backward", self.torch_backward)

    def torch_forward(self, q, k, v, starts_q, starts_k, most_q, most_k, dropout_p, causal, debug, *, scale,
                      window_size_left, window_size_right):  # type: ignore[no-untyped-def]  # fmt: skip
        left, right = (-1 if each is None else each for each in (window_size_left, window_size_right))
        return *self.forward(q, k, v, starts_q, starts_k, most_q, most_k, 0.0, scale, causal, left, right), None

    def torch_backward(self, dout, q, k, v, out, lse, starts_q, starts_k, most_q, most_k, dropout_p, causal, rng_state,
                       unused, *, scale, window_size_left, window_size_right):  # type: ignore[no-untyped-def]  # fmt: skip
        left, right = (-1 if each is None else each for each in (window_size_left, window_size_right))
        gradients = tuple(map(torch.empty_like, (q, k, v)))
        self.backward(dout, q, k, v, out, lse, *gradients, starts_q, starts_k, most_q, most_k, 0.0, scale, causal,
                      left, right, 0.0, None, False)  # fmt: skip
        return gradients


@pytest.mark.parametrize("name", ["reference", "sdpa", "flash-attn", "flash-attn-3"])
@given(tasks(), st.data())
@settings(max_examples=40)
def test_calls_on_documents_are_the_mask_pair_by_pair(name: str, task: AttentionTask, data: st.DataObject) -> None:
    blocks = [
        data.draw(st.lists(st.sampled_from(task.blocks_of(each).tolist()), min_size=1, unique=True))
        for each in (QUERIES, KEYS)
    ]
    if task.layout.stride > 1:
        blocks[1] = blocks[1][:1]  # striped shards interleave
    at = [positions_of(task, each) for each in blocks]
    seen, layer = visible(task, *at), task.workload
    call = PackedCall(task.segments(*blocks), len(at[0]), len(at[1]), CPU)
    assert call.rest is None, "a query of packed documents is in one segment"
    rows, columns = (layer.batch, len(at[0]), layer.heads), (layer.batch, len(at[1]), layer.kv_head_count)
    _check(name, call, seen, rows, columns, layer.value_size)


def _check(
    name: str, call: PackedCall, seen: Tensor, rows: tuple[int, ...], columns: tuple[int, ...], value_dim: int
) -> FlashAttn:
    """Both passes of a call against the mask pair by pair, bool [queries, keys]; the stand-in that counted calls."""
    random = torch.Generator().manual_seed(0)
    q, dout, out = (torch.randn(*rows, size, generator=random) for size in (8, value_dim, value_dim))
    k, v = (torch.randn(*columns, size, generator=random) for size in (8, value_dim))
    exact = by_definition(*(x.double() for x in (q, k, v)), seen)
    whole = exact.lse.logaddexp(torch.zeros_like(exact.lse))  # other keys have been seen elsewhere
    rows = Rows(dout, q, out, whole.float())
    flash = (TorchFlash if name == "flash-attn-3" else FlashAttn)()
    with pytest.MonkeyPatch.context() as patch:
        flash.install(patch)
        found = attend_packed(KERNELS[name], q, k, v, 0.3, call)
        gradients = gradients_packed(KERNELS[name], rows, k, v, 0.3, call)
    assert (found.out - exact.out).abs().max() < 1e-5
    assert torch.equal(found.lse == -math.inf, exact.lse == -math.inf)
    assert (found.lse - exact.lse).nan_to_num(0).abs().max() < 1e-5
    for part, expected in zip(gradients, _gradients(rows, k, v, seen), strict=True):
        assert (part - expected).abs().max() < 1e-4
    return flash


def _gradients(rows: Rows, k: Tensor, v: Tensor, seen: Tensor) -> Gradients:
    """The formulas of `runtime.kernels.reference`, with one matrix for all documents."""
    dout, q, out, lse = (x.double() for x in rows)
    group = q.shape[2] // k.shape[2]
    keys, values = (x.double().repeat_interleave(group, 2) for x in (k, v))
    p = (torch.einsum("bihd,bjhd->bihj", q, keys) * 0.3 - lse[..., None]).exp() * seen[:, None]
    ds = p * (torch.einsum("bihd,bjhd->bihj", dout, values) - (dout * out).sum(-1)[..., None]) * 0.3
    dk, dv = (torch.einsum("bihj,bihd->bjhd", x, y).unflatten(2, (-1, group)).sum(3) for x, y in ((ds, q), (p, dout)))
    return Gradients(torch.einsum("bihj,bjhd->bihd", ds, keys), dk, dv)


@st.composite
def rectangles(draw: st.DrawFn) -> tuple[int, int, list[PackedSegment]]:
    """Queries, keys, and segments with any bands that share both, but no pair: each has its own part of a grid."""
    cuts = [sorted({0, *draw(st.sets(st.integers(1, 11), max_size=3)), 12}) for _ in range(2)]
    runs = [[range(*each) for each in pairwise(each)] for each in cuts]
    cells = [(tuple(draw(st.sets(st.sampled_from(range(len(runs[0]))), min_size=1, max_size=2))), column)
             for column in range(len(runs[1])) for _ in range(2)]  # fmt: skip
    found, taken = list[PackedSegment](), set[tuple[int, int]]()
    for rows, column in cells:
        if taken & (own := {(row, column) for row in rows}):
            continue
        taken |= own
        queries, keys = tuple(runs[0][row] for row in sorted(rows)), (runs[1][column],)
        lengths = sum(map(len, queries)), len(keys[0])
        low, high = sorted(draw(st.tuples(st.integers(-12, 12), st.integers(-12, 12))))
        band = trim(*lengths, low, high)
        if (band.queries, band.keys) == lengths:
            found.append(PackedSegment(queries, keys, Segment(*lengths, band.low, band.high)))
    return 12, 12, draw(st.permutations(found))


@pytest.mark.parametrize("name", ["reference", "sdpa", "flash-attn", "flash-attn-3"])
@given(rectangles(), st.sampled_from([(2, 1), (6, 3)]), st.sampled_from([5, 8]))
@settings(max_examples=40)
def test_segments_that_share_queries_are_the_mask_pair_by_pair(
    name: str, drawn: tuple[int, int, list[PackedSegment]], heads: tuple[int, int], value_dim: int
) -> None:
    queries, keys, segments = drawn
    seen, times = torch.zeros(queries, keys, dtype=torch.bool), torch.zeros(queries, dtype=torch.int64)
    for each in segments:
        of_queries, of_keys = (torch.tensor([row for run in runs for row in run]) for runs in each[:2])
        inside = ~boolean_mask(trim(*each.shape), CPU)
        assert not (seen[of_queries[:, None], of_keys] & inside).any(), "a pair is in one segment"
        seen[of_queries[:, None], of_keys] |= inside
        times[of_queries] += 1
    call = PackedCall(segments, queries, keys, CPU)
    _check(name, call, seen, (2, queries, heads[0]), (2, keys, heads[1]), value_dim)
    rounds = list(call.rounds)
    assert sum(len(each.bands) for each in rounds) == len(segments)
    assert len(rounds) >= int(times.max())
    if all(len(each.queries) == 1 for each in segments):
        assert len(rounds) == max(1, int(times.max())), "ranges need as many rounds as share a query"


def test_flash_attn_is_called_once_per_round_and_window() -> None:
    """Blocks of eight under a block-causal mask: each query sees whole blocks before its own, and a half of its own."""
    segments = [
        PackedSegment((range(at, at + 8),), keys, Segment(8, sum(map(len, keys)), low, 7))
        for at in (8, 16, 24)
        for keys, low in (((range(at),), 1 - at), ((range(at, at + 8),), 0))
    ]
    seen = torch.ones(32, 32).tril().bool()
    seen[:8] = False
    call = PackedCall(segments, 32, 32, CPU)
    assert [len(each.bands) for each in call.rounds] == [3, 3]
    assert _check("flash-attn", call, seen, (1, 32, 2), (1, 32, 2), 8).calls == {"forward": 2, "backward": 2}


@pytest.mark.parametrize(("mask", "kinds"), [("full", 1), ("causal", 2)])
def test_flash_attn_is_called_once_per_kind_of_mask(mask: str, kinds: int) -> None:
    """A shard with itself: of a causal mask that is one kind, with the fronts alone and the backs a second one."""
    lengths = (64, 8, 24, 40, 120)
    layer = Workload(256, heads=2, head_dim=8, mask=mask, documents=lengths)
    task = span_task(layer, LAYOUTS["zigzag"](256, 4, lengths), "fp32")
    blocks = [[block for block in task.blocks_of(each).tolist() if task.owner[block] == 1] for each in (QUERIES, KEYS)]
    q, k, v = (torch.randn(1, 64, 2, 8) for _ in range(3))
    counts = []
    for keys in (blocks[1], blocks[1][:1]):
        call = PackedCall(task.segments(blocks[0], keys), 64, 32 * len(keys), CPU)
        flash, rows = FlashAttn(), Rows(q, q, q, torch.zeros(1, 64, 2))
        with pytest.MonkeyPatch.context() as patch:
            flash.install(patch)
            attend_packed(KERNELS["flash-attn"], q, k[:, : 32 * len(keys)], v[:, : 32 * len(keys)], 1.0, call)
            gradients_packed(KERNELS["flash-attn"], rows, k[:, : 32 * len(keys)], v[:, : 32 * len(keys)], 1.0, call)
        counts.append((flash.calls["forward"], flash.calls["backward"]))
    assert counts == [(1, 1), (kinds, kinds)]
