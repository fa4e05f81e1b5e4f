"""Memories of runs on a GPU, kept for later runs of the same size.

torch notes for the whole memory that NCCL's stream uses it (`record_stream`), so a memory that is freed is reused only
when the GPU has come so far. The host runs ahead of it in a backward pass, and the memories of many layers would be
allocated (https://github.com/pytorch/pytorch/issues/132292). A memory that is kept needs no such care: at the end of a
run the current stream waits for all others, and the next run begins in the same stream.
"""

from __future__ import annotations

from collections import OrderedDict

import torch

MAX_KEPT = 4
"""Sizes of which a memory is kept: those of both passes of two layers of different shapes."""

_Key = tuple[int, int, int]
"""Size in bytes, number of the GPU, and its current stream."""

_kept: OrderedDict[_Key, torch.Tensor] = OrderedDict()


def take(size_bytes: int, device: torch.device) -> torch.Tensor:
    """A memory of bytes, whose content is arbitrary, for work in the current stream."""
    key = _key(size_bytes, device)
    memory = None if key is None else _kept.pop(key, None)
    return torch.empty(size_bytes, dtype=torch.uint8, device=device) if memory is None else memory


def give_back(memory: torch.Tensor) -> None:
    """Keep a memory, when all that reads or writes it is queued in the current stream."""
    key = _key(memory.numel(), memory.device)
    if key is not None:
        _kept[key] = memory
        while len(_kept) > MAX_KEPT:
            _kept.popitem(last=False)


def _key(size_bytes: int, device: torch.device) -> _Key | None:
    """None on a host, where memory is free as soon as it is no longer used."""
    if device.type != "cuda" or not size_bytes:
        return None
    stream = torch.cuda.current_stream(device)
    return size_bytes, stream.device_index, stream.cuda_stream
