"""The sum of gradients over all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from runtime.executor.messages import LostPeer, call_peers
from tasp_lab.core.errors import RunError


class LostRankError(RunError):
    """A rank was lost during training, as reported by one rank."""


class Gradients:
    """The gradients of a model and its loss in one tensor, summed over all ranks by a single all_reduce.

    DistributedDataParallel would divide by the number of ranks, and its communication would overlap that of attention
    in the backward pass.
    """

    def __init__(self, model: nn.Module) -> None:
        parameters = list(model.parameters())
        sizes = [parameter.numel() for parameter in parameters]
        self._all = torch.zeros(sum(sizes) + 1, device=parameters[0].device)
        for parameter, part in zip(parameters, torch.split(self._all[:-1], sizes), strict=True):
            parameter.grad = part.view_as(parameter)

    def clear(self) -> None:
        self._all.zero_()

    def sum_over_ranks(self, loss: torch.Tensor) -> float:
        """Sum the gradients and the loss over all ranks; returns the loss. Raises `LostRankError`."""
        self._all[-1] = loss.detach()
        try:
            call_peers(self._all.is_cuda, dist.all_reduce, self._all)
        except LostPeer as error:
            lost = f"rank {dist.get_rank()}: lost a rank while gradients were summed ({error})"
            raise LostRankError(lost) from None
        return float(self._all[-1])
