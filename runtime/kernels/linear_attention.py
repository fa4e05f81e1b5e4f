"""Kernels of linear attention, a chunk of consecutive positions at a time (`tasp_lab.schedules.linear.task`).

The state of a KV head is ``S_i = a_i S_(i-1) + k_i v_i`` and the output ``o_i = q_i S_i``. The decay a_i of a position
is at most 1: one number, or one per channel of the keys. Query head h uses KV head h // (heads / KV heads).

Tensors are [positions, batch, heads, channels], states [batch, KV heads, channels of keys, channels of values].
*Gates* are the logarithms of decays, [positions, batch, KV heads, channels of keys]; the first two dimensions and the
last are 1 where they are the same for all. They are None if nothing decays. All is computed in float32, or in float64
for inputs of that dtype.

A document that starts in a chunk resets the state; `starts` are the positions within the chunk at which one does,
ascending. What comes from before the chunk ends at the first of them; what leaves the chunk begins at the last.

A chunk is computed in tiles of `TILE` positions: all pairs within a tile, and a state from tile to tile. Decays are
only taken from an earlier to a later position, so they neither overflow nor divide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

Tensor = torch.Tensor

TILE = 64
"""Positions per tile: scores of 64 x 64 pairs per head."""

CHANNEL_TILE = 16
"""The same with a decay per channel, where each pair has as many weights as keys have channels."""


def attend(q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None = None, starts: Sequence[int] = ()) -> Tensor:
    """What the positions of a chunk contribute to its outputs, causally: [positions, batch, heads, channels of v].

    >>> one = torch.ones(3, 1, 1, 1)
    >>> attend(one, one, one, torch.tensor([[[[0.5]]]]).log()).flatten().tolist()
    [1.0, 1.5, 1.75]
    >>> attend(one, one, one, starts=[2]).flatten().tolist()
    [1.0, 2.0, 1.0]
    """
    q, k, v = _wide(q), _wide(k), _wide(v)
    segments = [slice(first, end) for first, end in pairwise([0, *starts, len(q)]) if first < end]
    found = [_attend_causally(q[each], k[each], v[each], _rows(gates, each)) for each in segments]
    return torch.cat([v.new_empty(0, *q.shape[1:3], v.shape[3]), *found])


def attend_at_distance(q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, ahead: int) -> Tensor:
    """What keys contribute to queries, pair by pair; the first query is `ahead` positions behind the first key.

    Gates are the same at all positions, since those between the chunks count, too. A query sees keys up to its own
    position.
    """
    q, k, v = _wide(q), _wide(k), _wide(v)
    distance = torch.arange(len(q), device=q.device)[:, None] - torch.arange(len(k), device=q.device) + ahead
    weights = (distance >= 0).to(q.dtype).expand(k.shape[2], -1, -1)
    if gates is not None:
        weights = weights * torch.exp(gates[0, 0, :, :, None] * distance.clamp(min=0))
    scores = torch.einsum("ibhgd,jbhd->bhgij", _grouped(q, k.shape[2]), k)
    return torch.einsum("bhgij,hij,jbhe->ibhge", scores, weights, v).flatten(2, 3)


def make_state(k: Tensor, v: Tensor, gates: Tensor | None = None, starts: Sequence[int] = ()) -> Tensor:
    """The state that the positions of a chunk leave, as its last position sees it."""
    last = slice(max(starts, default=0), len(k))
    k, v, gates = _wide(k[last]), _wide(v[last]), _rows(gates, last)
    if gates is not None:  # summed over all positions behind each one
        rows = gates.double().expand(len(k), *gates.shape[1:])
        behind = torch.cat([rows[1:], torch.zeros_like(rows[:1])]).flip(0).cumsum(0).flip(0)
        k = k * torch.exp(behind.to(gates.dtype))
    return torch.einsum("ibhd,ibhe->bhde", k, v)


def total_decay(gates: Tensor, positions: int, starts: Sequence[int] = ()) -> Tensor:
    """The decay of a state over a chunk, [batch, KV heads, channels]: 0 if a document starts in it."""
    total = torch.exp(gates.sum(0) if len(gates) == positions else gates[0] * positions)
    return total * 0 if len(starts) else total


def apply_state(q: Tensor, state: Tensor, gates: Tensor | None = None, starts: Sequence[int] = ()) -> Tensor:
    """What the state before a chunk contributes to its outputs."""
    queries = _decayed_queries(q, state.shape[1], gates, starts)
    found = torch.einsum("ibhgd,bhde->ibhge", queries, state.to(queries.dtype)).flatten(2, 3)
    return pad(found, (0, 0) * 3 + (0, len(q) - len(found)))


def make_gradient_state(
    q: Tensor, dout: Tensor, kv_heads: int, gates: Tensor | None = None, starts: Sequence[int] = ()
) -> Tensor:
    """The gradient of the state before a chunk, from those of its outputs."""
    queries = _decayed_queries(q, kv_heads, gates, starts)
    return torch.einsum("ibhgd,ibhge->bhde", queries, _grouped(_wide(dout[: len(queries)]), kv_heads))


def fold(states: Tensor, totals: Tensor | None) -> Tensor:
    """The state behind consecutive chunks from theirs, [chunks, ...], with their total decays, in their order."""
    found = states[0]
    for index in range(1, len(states)):
        found = advance(found, states[index], None if totals is None else totals[index])
    return found


def advance(state: Tensor, own: Tensor, total: Tensor | None) -> Tensor:
    """The state behind a chunk from that before it, the state that the chunk makes and its total decay."""
    return own + (state if total is None else state * total[..., None])


def state_behind(before: Tensor | None, k: Tensor, v: Tensor, gates: Tensor | None, starts: Sequence[int]) -> Tensor:
    """The state behind a chunk from that before it, None for 0."""
    own = make_state(k, v, gates, starts)
    if before is None:
        return own
    return advance(before, own, None if gates is None else total_decay(gates, len(k), starts))


def _decayed_queries(q: Tensor, kv_heads: int, gates: Tensor | None, starts: Sequence[int]) -> Tensor:
    """The queries that see the state before a chunk, decayed as the state is for them, by KV head."""
    first = slice(0, min(starts, default=len(q)))
    queries, gates = _grouped(_wide(q[first]), kv_heads), _rows(gates, first)
    if gates is None:
        return queries
    sums = gates.double().expand(len(queries), *gates.shape[1:]).cumsum(0).to(gates.dtype)
    return queries * torch.exp(sums)[:, :, :, None]


def _attend_causally(q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None) -> Tensor:
    """A chunk without a start of a document."""
    tile = CHANNEL_TILE if gates is not None and gates.shape[3] > 1 else TILE
    count, kv_heads = len(q), k.shape[2]
    q, k, v = (_tiles(each, tile) for each in (_grouped(q, kv_heads), k, v))
    causal = torch.ones(tile, tile, dtype=torch.bool, device=q.device).tril()
    if gates is None:
        scores = torch.einsum("nibhgd,njbhd->nbhgij", q, k) * causal
    else:
        gates = _tiles(gates.expand(count, *gates.shape[1:]), tile)
        sums = gates.double().cumsum(1)  # [tiles, positions, batch, KV heads, channels or 1]
        seen, behind = sums.to(q.dtype), (sums[:, -1:] - sums).to(q.dtype)
        between = (sums[:, :, None] - sums[:, None]).to(q.dtype).masked_fill(~causal[..., None, None, None], -torch.inf)
        if gates.shape[-1] == 1:
            weights = torch.exp(between)[..., 0].permute(0, 3, 4, 1, 2)[:, :, :, None]
            scores = torch.einsum("nibhgd,njbhd->nbhgij", q, k) * weights
        else:
            scores = torch.einsum("nibhgd,njbhd,nijbhd->nbhgij", q, k, torch.exp(between))
        k = k * torch.exp(behind)
        q = q * torch.exp(seen)[:, :, :, :, None]
    found = torch.einsum("nbhgij,njbhe->nibhge", scores, v)
    made = torch.einsum("njbhd,njbhe->nbhde", k, v)
    state, before = torch.zeros_like(made[:1]), []
    for index in range(len(made)):
        before.append(state)
        total = None if gates is None else torch.exp(seen[index : index + 1, -1])
        state = advance(state, made[index : index + 1], total)
    if before:
        found = found + torch.einsum("nibhgd,nbhde->nibhge", q, torch.cat(before))
    return found.flatten(0, 1)[:count].flatten(2, 3)


def _tiles(x: Tensor, tile: int) -> Tensor:
    """Positions in tiles, the last one filled with zeros: [tiles, positions of a tile, ...]."""
    full = pad(x, (0, 0) * (x.dim() - 1) + (0, -len(x) % tile))
    return full.reshape(len(full) // tile, tile, *x.shape[1:])


def _rows(gates: Tensor | None, rows: slice) -> Tensor | None:
    """The gates of some positions; all of them where positions are alike."""
    return gates if gates is None or len(gates) == 1 else gates[rows]


def _grouped(q: Tensor, kv_heads: int) -> Tensor:
    """Queries by KV head: [positions, batch, KV heads, heads of each, channels]."""
    return q.reshape(*q.shape[:2], kv_heads, q.shape[2] // kv_heads, q.shape[3])


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


# Gradients of a chunk of linear attention: vector-Jacobian products of its forward kernels, by autograd.


class Chunk(NamedTuple):
    """What outputs and states of a chunk depend on; queries are None where only states count."""

    q: Any
    k: Any
    v: Any
    gates: Tensor | None
    before: Tensor | None


Forward = Callable[[Chunk], Sequence[Tensor]]
"""Outputs and states of a chunk."""


def gradients_of(
    forward: Forward, chunk: Chunk, wanted: Sequence[bool], gradients: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """The products of gradients with the Jacobians of a function, in float32, for the inputs that are wanted."""
    with torch.enable_grad():
        # autograd refuses tensors of a memory that changes anywhere
        inputs = [None if each is None else each.detach().to(torch.float32, copy=True) for each in chunk]
        leaves = [x.requires_grad_() for x, each in zip(inputs, wanted, strict=True) if each and x is not None]
        out = forward(Chunk(*inputs))
        like = [gradient.to(each.dtype) for each, gradient in zip(out, gradients, strict=True)]
        found = iter(torch.autograd.grad(out, leaves, like, materialize_grads=True))
    return [next(found) if x is not None and x.requires_grad else None for x in inputs]
