"""Placements applied to tensors: shards of a sequence, the sequence again, and the positions of a shard."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tasp_lab.errors import WorkloadError
from tasp_lab.placement import Placement


def positions(placement: Placement, rank: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """The positions of a rank's shard in its order, int64: what rotary embeddings need."""
    return torch.from_numpy(placement.positions(rank)).to(device)


def shard(x: torch.Tensor, placement: Placement, rank: int, dim: int = 1) -> torch.Tensor:
    """A rank's shard of a tensor whose dimension `dim` is the sequence.

    Raises `WorkloadError` for another length.

    >>> from tasp_lab.placement import zigzag
    >>> shard(torch.arange(8), zigzag(8, 2), rank=0, dim=0).tolist()
    [0, 1, 6, 7]
    """
    if x.shape[dim] != placement.sequence:
        raise WorkloadError(f"a tensor of {x.shape[dim]} positions, but the placement is for {placement.sequence}")
    return x.index_select(dim, positions(placement, rank, x.device))


def unshard(shards: Sequence[torch.Tensor], placement: Placement, dim: int = 1) -> torch.Tensor:
    """The sequence from the shards of all ranks, in the order of ranks. Raises `WorkloadError` for other lengths."""
    lengths = [each.shape[dim] for each in shards]
    expected = [placement.length(rank) for rank in range(placement.world_size)]
    if lengths != expected:
        raise WorkloadError(f"shards of {lengths} positions, but the placement gives {expected}")
    order = np.argsort(np.concatenate([placement.positions(rank) for rank in range(placement.world_size)]))
    return torch.cat(list(shards), dim).index_select(dim, torch.from_numpy(order).to(shards[0].device))
