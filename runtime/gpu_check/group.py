"""The ranks of a check. What they tell each other goes through the store of the process group.

So a rank that waits for the others holds no kernel of the communication library, and its GPU is free for what others
start on it.
"""

from __future__ import annotations

import os
import pickle
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from runtime.executor.transports import default_device
from runtime.gpu_check.watch import Store
from runtime.ranks.torchrun import TorchrunRanks
from tasp_lab.core.choices import BackendKind

Value = TypeVar("Value")

_PATIENCE = timedelta(days=1)
"""Waits end with the process: `runtime.gpu_check.watch` has the limits."""


class CheckedGroup:
    """This rank among those of the default process group."""

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))
        self.ranks = TorchrunRanks()
        self.store = store_of_group()
        self._told = 0

    @property
    def backend(self) -> BackendKind:
        """The communication library: ``nccl``, also of AMD, or ``gloo``."""
        return "gloo" if dist.get_backend() == "gloo" else "nccl"

    @property
    def device(self) -> torch.device:
        """The device of this rank's blocks."""
        return torch.device(default_device())

    @property
    def on_gpu(self) -> bool:
        """Whether blocks lie on a GPU, so that limits of speed apply."""
        return self.device.type == "cuda"

    def gather(self, value: Value) -> list[Value]:
        """The values of all ranks."""
        self._told += 1
        self.store.set(self._key(self.rank), pickle.dumps(value))
        return [pickle.loads(self.store.get(self._key(rank))) for rank in range(self.world_size)]

    def slowest(self, seconds: float) -> float:
        """The longest time of all ranks."""
        return max(self.gather(seconds))

    def barrier(self) -> None:
        """Wait for all ranks, and for this rank's GPU."""
        if self.on_gpu:
            torch.cuda.synchronize()
        self.gather(None)

    def _key(self, rank: int) -> str:
        return f"gpu-check/told/{self._told}/{rank}"


def store_of_group() -> Store:
    """A connection of its own to the store of the default process group; its waits have no limit of their own."""
    store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    store.set_timeout(_PATIENCE)
    found: Store = store
    return found
