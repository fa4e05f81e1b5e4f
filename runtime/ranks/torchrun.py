"""Ranks started by torchrun: this process is one of them and every rank runs the same program.

The backend is NCCL (RCCL on AMD) if every rank of this node has its own GPU, else gloo; all nodes must be identical.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from runtime.executor.transports import LAUNCH_ORDER
from runtime.protocol.jobs import Job, Result, Value
from runtime.ranks.run_job import perform
from tasp_lab.errors import RunError, first_line

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_START_LIMIT = timedelta(seconds=120)


class TorchrunRanks:
    """The ranks of the process group; see `runtime.protocol.jobs.Ranks`. Results are gathered on every rank."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    @property
    def is_reporter(self) -> bool:
        """See `runtime.protocol.jobs.Ranks`: every rank runs the same program, rank 0 reports."""
        return self.rank == 0

    def perform(self, job: Job, longest_silence_s: float) -> list[Result]:
        """Perform the job with all ranks. Raises `RunError` if a rank is lost or silent for `longest_silence_s`."""
        own = perform(job, longest_silence_s, lambda peer: None)
        results: list[Result] = [None] * self.world_size
        try:
            dist.all_gather_object(results, own)
        except RuntimeError as error:
            raise RunError(f"rank {self.rank}: lost a rank ({first_line(error)})") from None
        return results

    def agree(self, value: Value) -> Value:
        """See `runtime.protocol.jobs.Ranks`. All ranks return rank 0's value."""
        shared = [value]
        try:
            dist.broadcast_object_list(shared, src=0)
        except RuntimeError as error:
            raise RunError(f"rank {self.rank}: lost a rank ({first_line(error)})") from None
        return shared[0]


def started_ranks() -> int:
    """How many ranks torchrun has started, known before they join. Raises `RunError` if this process is none."""
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        raise RunError(
            f"not started by torchrun ({missing[0]} is not set): torchrun --nproc-per-node N -m tasp_lab.cli ..."
        )
    return int(os.environ["WORLD_SIZE"])


@contextlib.contextmanager
def join() -> Iterator[TorchrunRanks]:
    """Join the process group described by torchrun's environment variables. Raises `RunError`."""
    started_ranks()
    on_gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) <= torch.cuda.device_count()
    if on_gpus:
        os.environ.setdefault(LAUNCH_ORDER, "1")
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    try:
        dist.init_process_group("nccl" if on_gpus else "gloo", timeout=_START_LIMIT)
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        reason = first_line(error)
        raise RunError(f"rank {os.environ['RANK']}: cannot join the process group at {where}: {reason}") from None
    try:
        yield TorchrunRanks()
    finally:
        dist.destroy_process_group()
