"""Executes schedules on torch.distributed. What is named here is imported when asked for: launching needs no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.modules import SequenceParallelAttention
    from runtime.sequence_parallel import attention, attention_with_lse
    from runtime.sharding import positions, shard, unshard

__all__ = ["attention", "attention_with_lse", "SequenceParallelAttention", "positions", "shard", "unshard"]

_MODULES = {
    "attention": "runtime.sequence_parallel",
    "attention_with_lse": "runtime.sequence_parallel",
    "SequenceParallelAttention": "runtime.modules",
    "positions": "runtime.sharding",
    "shard": "runtime.sharding",
    "unshard": "runtime.sharding",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'runtime' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
