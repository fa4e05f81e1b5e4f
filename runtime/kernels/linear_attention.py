"""Kernels of causal linear attention with one decay per KV head, in chunks (`tasp_lab.linear_attention.task`).

Tensors are [positions, batch, heads, head_dim], states [batch, KV heads, head_dim, head_dim]. All is computed in
float32. Query head h uses KV head h // (heads / KV heads).
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def make_state(k: Tensor, v: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """The state of a chunk as its last position sees it, and the chunk's total decay [KV heads]."""
    behind = torch.arange(len(k) - 1, -1, -1, device=k.device)
    weights = decay[None] ** behind[:, None]
    return torch.einsum("ibhd,ibhe,ih->bhde", k.float(), v.float(), weights), decay ** len(k)


def attend(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, ahead: int) -> Tensor:
    """What keys contribute to the outputs of queries whose first position is `ahead` of the first key.

    >>> one = torch.ones(2, 1, 1, 1)
    >>> attend(one, one, one, torch.tensor([0.5]), ahead=0).flatten().tolist()
    [1.0, 1.5]
    """
    distance = torch.arange(len(q), device=q.device)[:, None] - torch.arange(len(k), device=q.device)[None] + ahead
    weights = torch.where(distance >= 0, decay[:, None, None] ** distance.clamp(min=0), 0.0)
    scores = torch.einsum("ibhgd,jbhd->bhgij", _grouped(q, len(decay)), k.float())
    found = torch.einsum("bhgij,hij,jbhd->ibhgd", scores, weights, v.float())
    return found.flatten(2, 3)


def fold(states: Tensor, decays: Tensor) -> Tensor:
    """The state before the next chunk from those of consecutive chunks, [chunks, ...], with their decays."""
    behind = torch.cat([decays[1:], torch.ones_like(decays[:1])]).flip(0).cumprod(0).flip(0)
    return torch.einsum("cbhde,ch->bhde", states, behind)


def apply_state(q: Tensor, state: Tensor, decay: Tensor) -> Tensor:
    """What all chunks before that of the queries contribute to their outputs, from their state."""
    weights = decay[None] ** torch.arange(1, len(q) + 1, device=q.device)[:, None]
    return torch.einsum("ibhgd,bhde,ih->ibhge", _grouped(q, len(decay)), state, weights).flatten(2, 3)


def _grouped(q: Tensor, kv_heads: int) -> Tensor:
    """Queries by KV head: [positions, batch, KV heads, heads of each, head_dim], float32."""
    return q.float().view(*q.shape[:2], kv_heads, -1, q.shape[3])
