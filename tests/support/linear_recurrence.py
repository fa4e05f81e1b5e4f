"""Linear attention position by position, S_i = diag(a_i) S_(i-1) + k_i v_i^T and o_i = q_i^T S_i, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tensor = torch.Tensor


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor | None = None,
    decays: Sequence[float] | None = None,
    starts: frozenset[int] = frozenset(),
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The outputs, and the state behind the last position; the state is reset at `starts`.

    q is [batch, positions, heads, channels]; gates are [batch, positions, KV heads] or also per channel; `decays` are
    constants per KV head; `state`, that before the first position, is [batch, KV heads, channels, channels of v].
    """
    a = torch.ones_like(k) if gates is None else gates.exp().reshape(*k.shape[:3], -1).expand_as(k)
    if decays:
        a = a * torch.tensor(decays, dtype=k.dtype)[:, None]
    state = k.new_zeros(k.shape[0], *k.shape[2:], v.shape[3]) if state is None else state
    users, outputs = q.shape[2] // k.shape[2], [q.new_empty(*q.shape[:1], 0, q.shape[2], v.shape[3])]
    for i in range(q.shape[1]):
        kept = 0 if i in starts else a[:, i, ..., None] * state
        state = kept + torch.einsum("bhd,bhe->bhde", k[:, i], v[:, i])
        outputs.append(torch.einsum("bhd,bhde->bhe", q[:, i], state.repeat_interleave(users, 1))[:, None])
    return torch.cat(outputs, 1), state
