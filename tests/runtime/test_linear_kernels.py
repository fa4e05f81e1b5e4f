"""Kernels of linear attention against the recurrence in float64, position by position, and its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.kernels import linear_attention as kernels

Tensor = torch.Tensor

DECAYS = ("none", "head", "scalar", "channel")


class Chunk(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    gates: Tensor | None
    starts: Sequence[int] = ()

    def part(self, first: int, end: int) -> Chunk:
        """Some of its positions, as a chunk of their own."""
        gates = self.gates if self.gates is None or len(self.gates) == 1 else self.gates[first:end]
        starts = [each - first for each in self.starts if first <= each < end]
        return Chunk(self.q[first:end], self.k[first:end], self.v[first:end], gates, starts)

    @property
    def total(self) -> Tensor | None:
        return None if self.gates is None else kernels.total_decay(self.gates, len(self.q), self.starts)


def random_chunk(
    decay: str, positions: int, starts: Sequence[int] = (), *, strength: float = 0.3, seed: int = 0
) -> Chunk:
    random = torch.Generator().manual_seed(seed)
    batch, heads, kv_heads, channels, values = 2, 4, 2, 5, 3

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    shapes = {"head": (1, 1, kv_heads, 1), "scalar": (positions, batch, kv_heads, 1)}
    gates = None
    if decay != "none":
        gates = -strength * normal(*shapes.get(decay, (positions, batch, kv_heads, channels))).abs()
    return Chunk(
        normal(positions, batch, heads, channels),
        normal(positions, batch, kv_heads, channels),
        normal(positions, batch, kv_heads, values),
        gates,
        starts,
    )


def recurrence(chunk: Chunk, state: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs, and the state behind the chunk, one position after the other."""
    q, k, v, gates, starts = chunk
    outputs = [v.new_empty(0, q.shape[1], q.shape[2], v.shape[3])]
    for at in range(len(q)):
        decay = 1 if gates is None else torch.exp(gates[min(at, len(gates) - 1)])[..., None]
        state = (0 if at in starts else 1) * decay * state + torch.einsum("bhd,bhe->bhde", k[at], v[at])
        seen = state.repeat_interleave(q.shape[2] // k.shape[2], 1)
        outputs.append(torch.einsum("bhd,bhde->bhe", q[at], seen)[None])
    return torch.cat(outputs), state


def zero_state(chunk: Chunk) -> Tensor:
    return chunk.k.new_zeros(*chunk.k.shape[1:], chunk.v.shape[3])


def state_of(chunk: Chunk) -> Tensor:
    return kernels.make_state(chunk.k, chunk.v, chunk.gates, chunk.starts)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-10) -> bool:
    difference = found.detach().double() - expected.detach()
    return float(difference.norm()) <= tolerance * max(float(expected.detach().norm()), 1.0)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("positions", [0, 1, 17, 64, 150])
@settings(max_examples=15)
@given(starts=st.sets(st.integers(0, 149), max_size=6), cut=st.integers(0, 150))
def test_two_chunks_and_the_state_between_them_are_the_recurrence(
    decay: str, positions: int, starts: set[int], cut: int
) -> None:
    whole = random_chunk(decay, positions, sorted(each for each in starts if each < positions))
    cut = min(cut, positions)
    first, second = whole.part(0, cut), whole.part(cut, positions)
    expected, final = recurrence(whole, zero_state(whole))
    state = state_of(first)
    found = [kernels.attend(*first), kernels.attend(*second)]
    found[1] = found[1] + kernels.apply_state(second.q, state, second.gates, second.starts)
    assert close(torch.cat(found), expected)
    total = torch.zeros(()) if second.starts else second.total
    after = state_of(second) if second.starts else kernels.advance(state, state_of(second), total)
    assert close(after, final)
    if second.total is not None:
        assert close(kernels.advance(state, state_of(second), second.total), final)


@pytest.mark.parametrize("decay", DECAYS)
def test_folded_states_are_the_state_behind_all_chunks(decay: str) -> None:
    whole = random_chunk(decay, 90)
    chunks = [whole.part(0, 30), whole.part(30, 31), whole.part(31, 90)]
    totals = [each.total for each in chunks if each.total is not None]
    found = kernels.fold(torch.stack([state_of(each) for each in chunks]), torch.stack(totals) if totals else None)
    assert close(found, recurrence(whole, zero_state(whole))[1])


@pytest.mark.parametrize("decay", ["none", "head"])
def test_chunks_pair_by_pair_at_a_distance(decay: str) -> None:
    whole = random_chunk(decay, 40)
    first, second = whole.part(0, 15), whole.part(15, 40)
    found = kernels.attend_at_distance(second.q, first.k, first.v, whole.gates, 15)
    expected = recurrence(whole, zero_state(whole))[0][15:] - recurrence(second, zero_state(second))[0]
    assert close(found, expected)
    assert close(
        kernels.attend_at_distance(first.q, first.k, first.v, whole.gates, 0), recurrence(first, zero_state(first))[0]
    )


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("starts", [(), (0,), (70,), (3, 80)])
def test_gradients(decay: str, starts: Sequence[int]) -> None:
    """Those of the recurrence by automatic differentiation, from gradients of the outputs and of the last state."""
    chunk = random_chunk(decay, 100, starts)
    before = torch.randn_like(zero_state(chunk)).requires_grad_()
    inputs = [each.requires_grad_() for each in (chunk.q, chunk.k, chunk.v, chunk.gates) if each is not None]
    out, after = recurrence(chunk, before)
    dout, dafter = torch.randn_like(out), torch.randn_like(after)
    expected = torch.autograd.grad([out, after], [*inputs, before], [dout, dafter])
    outputs = kernels.attend(*chunk) + kernels.apply_state(chunk.q, before, chunk.gates, starts)
    state = state_of(chunk)
    left = state + before if chunk.total is None and not starts else state
    if chunk.total is not None:
        left = kernels.advance(before, state, chunk.total)
    found = torch.autograd.grad([outputs, left], [*inputs, before], [dout, dafter], materialize_grads=True)
    for ours, theirs in zip(found, expected, strict=True):
        assert close(ours, theirs)
    own = kernels.make_gradient_state(chunk.q, dout, chunk.k.shape[2], chunk.gates, starts)
    carried = dafter * 0 if starts else dafter if chunk.total is None else dafter * chunk.total[..., None]
    assert close(own + carried, expected[-1])


@pytest.mark.parametrize("decay", ["scalar", "channel"])
@pytest.mark.parametrize("strength", [1e-4, 30.0, 200.0])
def test_weak_and_strong_decays_stay_accurate_in_float32(decay: str, strength: float) -> None:
    chunk = random_chunk(decay, 200, strength=strength)
    expected, state = recurrence(chunk, zero_state(chunk))
    assert chunk.gates is not None
    narrow = Chunk(chunk.q.float(), chunk.k.float(), chunk.v.float(), chunk.gates.float())
    assert close(kernels.attend(*narrow), expected, 1e-6)
    assert close(state_of(narrow), state, 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_inputs_of_half_precision_are_computed_in_float32(dtype: torch.dtype) -> None:
    chunk = random_chunk("scalar", 70)
    q, k, v = (each.to(dtype) for each in (chunk.q, chunk.k, chunk.v))
    found = kernels.attend(q, k, v, chunk.gates)
    assert found.dtype == torch.float32
    assert torch.equal(found, kernels.attend(q.float(), k.float(), v.float(), chunk.gates))
