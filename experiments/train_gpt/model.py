"""A decoder-only transformer on a subset of the positions of a sequence.

Only attention combines positions, and only rotary embeddings depend on their index. The model therefore runs on a shard
if it receives the shard's positions and a sequence-parallel attention function.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from experiments.train_gpt.data import VOCABULARY
from experiments.train_gpt.options import Recipe

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Causal attention of q, k and v, [batch, positions, heads or KV heads, head_dim] each, in the shape of q."""

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, [positions, 1, head_dim / 2] each."""


class GPT(nn.Module):
    """Pre-norm blocks with tied embedding and output matrix; initialised from torch's default generator."""

    def __init__(self, recipe: Recipe, attend: Attention, checkpoint_activations: bool = False) -> None:
        super().__init__()
        self._head_dim, self._checkpoint = recipe.head_dim, checkpoint_activations
        self.embedding = nn.Embedding(VOCABULARY, recipe.width)
        self.blocks = nn.ModuleList(Block(recipe, attend) for _ in range(recipe.layers))
        self.norm = nn.RMSNorm(recipe.width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits, float32 [batch, positions, vocabulary], of tokens [batch, positions] at these positions."""
        x = self.embedding(tokens)
        at = rotation(positions, self._head_dim)
        for block in self.blocks:
            x = checkpoint(block, x, at, use_reentrant=False) if self._checkpoint else block(x, at)
        logits: torch.Tensor = nn.functional.linear(self.norm(x), self.embedding.weight)
        return logits.float()


class Block(nn.Module):
    """Attention and an MLP, both residual, on x [batch, positions, width]."""

    def __init__(self, recipe: Recipe, attend: Attention) -> None:
        super().__init__()
        width, kv_width = recipe.width, recipe.kv_heads * recipe.head_dim
        self._attend, self._head_dim = attend, recipe.head_dim
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, kv_width, bias=False)
        self.value = nn.Linear(width, kv_width, bias=False)
        self.result = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor, at: Rotation) -> torch.Tensor:
        y = self.attention_norm(x)
        q, k, v = (layer(y).unflatten(-1, (-1, self._head_dim)) for layer in (self.query, self.key, self.value))
        out = self._attend(rotate(q, at), rotate(k, at), v)
        x = x + self.result(out.flatten(-2))
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


def rotation(positions: torch.Tensor, head_dim: int) -> Rotation:
    """The cosines and sines of rotary embeddings at global positions."""
    half = head_dim // 2
    rates = 10000.0 ** (-torch.arange(half, device=positions.device) / half)
    angles = positions[:, None, None] * rates
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, at: Rotation) -> torch.Tensor:
    """Rotary embedding of [batch, positions, heads, head_dim], in the dtype of x, which autocast may have lowered."""
    cos, sin = at
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).to(x.dtype)
