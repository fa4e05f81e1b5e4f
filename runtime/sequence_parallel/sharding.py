"""Sharding of tensors by a sequence layout: shard, unshard, and the positions of a shard."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from runtime.sequence_parallel.arguments import TYPES
from tasp_lab.core.arguments import check_arguments, is_whole
from tasp_lab.core.errors import WorkloadError, of_type
from tasp_lab.workload.sequence_layout import SequenceLayout


def positions(layout: SequenceLayout, rank: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """The positions of a rank's shard in its order, int64; rotary embeddings need them.

    Raises `WorkloadError` for a rank that the layout does not have.
    """
    check_arguments({"layout": layout, "rank": rank}, TYPES)
    if not 0 <= rank < layout.world_size:
        raise WorkloadError(f"rank: {rank}, expected 0 to {layout.world_size - 1}, as the layout is for "
                            f"{layout.world_size} ranks")  # fmt: skip
    return torch.from_numpy(layout.positions(rank)).to(device)


def shard(x: torch.Tensor, layout: SequenceLayout, rank: int, dim: int = 1) -> torch.Tensor:
    """A rank's shard of a tensor whose dimension `dim` is the sequence.

    Raises `WorkloadError` if the length of the dimension differs from that of the layout, and as `positions`.

    >>> from tasp_lab.workload.sequence_layout import zigzag
    >>> shard(torch.arange(8), zigzag(8, 2), rank=0, dim=0).tolist()
    [0, 1, 6, 7]
    """
    if not isinstance(x, torch.Tensor):
        raise WorkloadError(of_type("x", x, "a torch.Tensor"))
    here = positions(layout, rank, x.device)
    if not is_whole(dim) or not -x.dim() <= dim < x.dim():
        raise WorkloadError(f"dim: {dim!r}, expected one of the {x.dim()} dimensions of x")
    if x.shape[dim] != layout.sequence:
        raise WorkloadError(f"a tensor of {x.shape[dim]} positions, but the layout is for {layout.sequence}")
    return x.index_select(dim, here)


def unshard(shards: Sequence[torch.Tensor], layout: SequenceLayout, dim: int = 1) -> torch.Tensor:
    """The sequence from the shards of all ranks, in rank order. Raises `WorkloadError` if their lengths differ."""
    lengths = [each.shape[dim] for each in shards]
    expected = [layout.length(rank) for rank in range(layout.world_size)]
    if lengths != expected:
        raise WorkloadError(f"shards of {lengths} positions, but the layout gives {expected}")
    order = np.argsort(np.concatenate([layout.positions(rank) for rank in range(layout.world_size)]))
    return torch.cat(list(shards), dim).index_select(dim, torch.from_numpy(order).to(shards[0].device))
