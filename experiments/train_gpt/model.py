"""A decoder-only transformer on a subset of the positions of a sequence, of layers of softmax and linear attention.

Blocks are those of Llama 3 (arXiv:2407.21783): RMSNorm, rotary embeddings, grouped KV heads, SwiGLU. Only attention
combines positions, and only rotary embeddings depend on their index. The model therefore runs on a shard if it gets the
positions of the shard and sequence-parallel attention.

Layers of both kinds may need positions at other ranks. Hidden states lie where the layer that is computed needs them:
tokens come in the layout of the first layer, logits are in that of the last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from experiments.train_gpt.options import VOCABULARY, Recipe

Tensor = torch.Tensor


class Attention(Protocol):
    """Causal attention of q, k and v, [batch, positions, heads or KV heads, head_dim] each, in the shape of q."""

    def softmax(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...

    def linear(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Sequence[float] | None = None, gates: Tensor | None = None
    ) -> Tensor: ...

    def relayout(self, x: Tensor, before: str, after: str) -> Tensor:
        """Hidden states [batch, positions, width] behind a layer of one kind, as one of another kind needs them."""


Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, [positions, 1, head_dim / 2] each."""

GATE_DIVISOR = 16
"""Of the logarithms of decays, so that states last, as in gated linear attention (arXiv:2312.06635)."""


class GPT(nn.Module):
    """Pre-norm blocks with tied embedding and output matrix; initialised from torch's default generator."""

    def __init__(self, recipe: Recipe, attention: Attention, checkpoint_activations: bool = False) -> None:
        super().__init__()
        self._head_dim, self._kinds, self._attention = recipe.head_dim, recipe.layers, attention
        self._checkpoint = checkpoint_activations
        self.embedding = nn.Embedding(VOCABULARY, recipe.width)
        kinds = {"S": SoftmaxAttention, "L": LinearAttention}
        self.blocks = nn.ModuleList(Block(recipe.width, kinds[kind](recipe, attention)) for kind in recipe.layers)
        self.norm = nn.RMSNorm(recipe.width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, positions: Mapping[str, Tensor]) -> Tensor:
        """Logits, float32 [batch, positions, vocabulary].

        Parameters
        ----------
        tokens : [batch, positions], in the layout of the first layer; the logits are in that of the last one.
        positions : those of this rank in the layers of each kind.
        """
        x, before = self.embedding(tokens), self._kinds[0]
        rotations = {kind: rotation(each, self._head_dim) for kind, each in positions.items()}
        for kind, block in zip(self._kinds, self.blocks, strict=True):
            x, before = self._attention.relayout(x, before, kind), kind
            at = rotations[kind]
            x = checkpoint(block, x, at, use_reentrant=False) if self._checkpoint else block(x, at)
        logits: Tensor = nn.functional.linear(self.norm(x), self.embedding.weight)
        return logits.float()


class Block(nn.Module):
    """Attention and an MLP, both residual, on x [batch, positions, width]."""

    def __init__(self, width: int, attention: nn.Module) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention, self.mlp = attention, SwiGLU(width)

    def forward(self, x: Tensor, at: Rotation) -> Tensor:
        x = x + self.attention(self.attention_norm(x), at)
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class SwiGLU(nn.Module):
    """The gated MLP of arXiv:2002.05202, with as many parameters as one of four times the width without a gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = 8 * width // 3
        self.gate, self.up, self.down = (
            nn.Linear(width, inner, bias=False),
            nn.Linear(width, inner, bias=False),
            nn.Linear(inner, width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Projections(nn.Module):
    """The projections of x [batch, positions, width] to queries, keys and values, and of their results."""

    def __init__(self, recipe: Recipe, attention: Attention) -> None:
        super().__init__()
        width, kv_width = recipe.width, recipe.kv_heads * recipe.head_dim
        self._attention, self._head_dim = attention, recipe.head_dim
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, kv_width, bias=False)
        self.value = nn.Linear(width, kv_width, bias=False)
        self.result = nn.Linear(width, width, bias=False)

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [batch, positions, heads or KV heads, head_dim]."""
        q, k, v = (layer(x).unflatten(-1, (-1, self._head_dim)) for layer in (self.query, self.key, self.value))
        return q, k, v


class SoftmaxAttention(Projections):
    """Softmax attention with rotary embeddings."""

    def forward(self, x: Tensor, at: Rotation) -> Tensor:
        q, k, v = self.projected(x)
        out = self._attention.softmax(rotate(q, at), rotate(k, at), v)
        return self.result(out.flatten(-2))  # type: ignore[no-any-return]


class LinearAttention(Projections):
    """Linear attention; all but the states is computed on each position alone, outside the schedule.

    - The feature map of queries and keys is ``elu(x) + 1``, which is positive (arXiv:2006.16236). Rotary embeddings
      follow it, so that they still depend on distances only (arXiv:2104.09864).
    - Results are normalised by an RMSNorm per head, as in TransNormer (arXiv:2210.10340), RetNet and gated linear
      attention, not by the sum of all weights: that sum needs a second state and makes gradients unbounded.
    - Decays per ``head`` are constant (`Recipe.decays`); per position, ``scalar`` or ``channel``, they are sigmoids of
      a projection of x, to the power of 1/`GATE_DIVISOR`.
    """

    def __init__(self, recipe: Recipe, attention: Attention) -> None:
        super().__init__(recipe, attention)
        self._decays = recipe.decays or None
        self.norm = nn.RMSNorm(recipe.head_dim)
        per = {"scalar": (recipe.kv_heads,), "channel": (recipe.kv_heads, recipe.head_dim)}.get(recipe.decay)
        self.gate = None if per is None else nn.Sequential(
            nn.Linear(recipe.width, torch.Size(per).numel()), nn.Unflatten(-1, per))  # fmt: skip

    def forward(self, x: Tensor, at: Rotation) -> Tensor:
        q, k, v = self.projected(x)
        q, k = (rotate(nn.functional.elu(each) + 1, at) for each in (q, k))
        gates = None if self.gate is None else nn.functional.logsigmoid(self.gate(x).float()) / GATE_DIVISOR
        out = self._attention.linear(q, k, v, self._decays, gates)
        return self.result(self.norm(out.float()).flatten(-2))  # type: ignore[no-any-return]


def rotation(positions: Tensor, head_dim: int) -> Rotation:
    """The cosines and sines of rotary embeddings at global positions."""
    half = head_dim // 2
    rates = 500000.0 ** (-torch.arange(half, device=positions.device) / half)
    angles = positions[:, None, None] * rates
    return angles.cos(), angles.sin()


def rotate(x: Tensor, at: Rotation) -> Tensor:
    """Rotary embedding of [batch, positions, heads, head_dim], in the dtype of x, which autocast may have lowered."""
    cos, sin = at
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).to(x.dtype)
