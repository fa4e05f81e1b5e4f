"""Execution of schedules on torch.distributed. Public names are imported lazily, so launching ranks needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasp_lab.core.lazy import lazy_names

if TYPE_CHECKING:
    from runtime.executor.kept import release_memory
    from runtime.sequence_parallel.api import SequenceParallelAttention, attention, attention_with_lse, prepare
    from runtime.sequence_parallel.linear_attention import linear_attention
    from runtime.sequence_parallel.relayout import relayout
    from runtime.sequence_parallel.sharding import positions, shard, unshard

__all__ = [
    "attention",
    "attention_with_lse",
    "linear_attention",
    "prepare",
    "relayout",
    "release_memory",
    "SequenceParallelAttention",
    "positions",
    "shard",
    "unshard",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "attention": "runtime.sequence_parallel.api",
        "attention_with_lse": "runtime.sequence_parallel.api",
        "linear_attention": "runtime.sequence_parallel.linear_attention",
        "prepare": "runtime.sequence_parallel.api",
        "relayout": "runtime.sequence_parallel.relayout",
        "release_memory": "runtime.executor.kept",
        "SequenceParallelAttention": "runtime.sequence_parallel.api",
        "positions": "runtime.sequence_parallel.sharding",
        "shard": "runtime.sequence_parallel.sharding",
        "unshard": "runtime.sequence_parallel.sharding",
    },
)
