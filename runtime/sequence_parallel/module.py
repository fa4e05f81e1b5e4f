"""Sequence-parallel attention as a `torch.nn.Module`, for models written with modules."""

from __future__ import annotations

from typing import Unpack

import torch

from runtime.sequence_parallel.api import AttentionKeywords, attention
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.backward import Passes
from tasp_lab.topology.graph import Topology


class SequenceParallelAttention(torch.nn.Module):
    """`runtime.attention` with its keywords; it has no parameters.

    It takes the place of `torch.nn.functional.scaled_dot_product_attention`, but with positions before heads: q is
    [batch, positions, heads, head_dim], k and v are [batch, positions, kv_heads, head_dim], this rank's shard.

    >>> SequenceParallelAttention(schedule="tasp", causal=True)
    SequenceParallelAttention(schedule=tasp, causal=True)
    """

    def __init__(self, **keywords: Unpack[AttentionKeywords]) -> None:
        super().__init__()
        self.keywords = keywords

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """As `runtime.attention`, with its errors."""
        return attention(q, k, v, **self.keywords)

    def extra_repr(self) -> str:
        """The keywords that were given, schedules and topologies by their names."""
        return ", ".join(f"{name}={_shown(value)}" for name, value in self.keywords.items())


def _shown(value: object) -> object:
    value = value.forward if isinstance(value, Passes) else value
    return value.name if isinstance(value, Schedule | Topology) else value
