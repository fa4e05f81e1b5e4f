"""The communication library's own speed: messages around a ring of ranks, all-to-all and all-gather.

Sizes and bus bandwidths are those of nccl-tests: a size is that of a message for ``sendrecv``, of what a rank sends
altogether for ``alltoall``, and of the whole result for ``all_gather``; see PERFORMANCE.md of NVIDIA/nccl-tests.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from runtime.gpu_check.clock import seconds_per_call
from runtime.gpu_check.group import CheckedGroup
from tasp_lab.core.errors import RunError

OPERATIONS = ("sendrecv", "alltoall", "all_gather")

PROGRAMS_TAKE_S = 300.0


def bus_bandwidth(operation: str, size_bytes: int, time_s: float, world_size: int) -> float:
    """The bus bandwidth in bytes/s.

    >>> bus_bandwidth("sendrecv", 100, 2.0, 4), bus_bandwidth("all_gather", 100, 0.5, 4)
    (50.0, 150.0)
    """
    share = 1.0 if operation == "sendrecv" else (world_size - 1) / world_size
    return size_bytes / time_s * share


def measure_operation(group: CheckedGroup, operation: str, size_bytes: int, count: int) -> float:
    """The time of one call in seconds. Raises `RunError` if its result is wrong."""
    call, check = _operation(group, operation, size_bytes)
    call()
    check()
    return seconds_per_call(group, call, count)


def _operation(group: CheckedGroup, operation: str, size_bytes: int) -> tuple[Callable[[], object], Callable[[], None]]:
    """The call, and a check of its result: every byte is the number of the rank that it is from."""
    rank, n = group.rank, group.world_size
    part = size_bytes if operation == "sendrecv" else size_bytes // n
    sent = torch.full((part * (n if operation == "alltoall" else 1),), rank, dtype=torch.uint8, device=group.device)
    received = torch.full((part * (1 if operation == "sendrecv" else n),), 255, dtype=torch.uint8, device=group.device)
    sources = [(rank - 1) % n] if operation == "sendrecv" else list(range(n))

    def call() -> None:
        if operation == "sendrecv":
            ring = [dist.P2POp(dist.isend, sent, (rank + 1) % n), dist.P2POp(dist.irecv, received, (rank - 1) % n)]
            for work in dist.batch_isend_irecv(ring):
                work.wait()
        elif operation == "alltoall":
            dist.all_to_all_single(received, sent)
        else:
            _all_gather(received, sent)

    def check() -> None:
        expected = torch.tensor(sources, dtype=torch.uint8).repeat_interleave(part)
        if not torch.equal(received.cpu(), expected):
            raise RunError(f"{operation} of {size_bytes} bytes: what arrived is not what was sent")

    return call, check


def _all_gather(received: torch.Tensor, sent: torch.Tensor) -> None:
    """The call has a new name from torch 2.13 on, and the old one warns."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    call(received, sent)


def installed_programs() -> dict[str, str]:
    """The programs of nccl-tests or rccl-tests on the path, by operation."""
    found = {operation: shutil.which(f"{operation}_perf") for operation in OPERATIONS}
    return {operation: path for operation, path in found.items() if path}


def run_program(path: str, gpus: int, sizes_bytes: Sequence[int]) -> str:
    """The output of a program on GPUs of this host. Raises `RunError`."""
    first, last = min(sizes_bytes), max(sizes_bytes)
    line = [path, "-g", str(gpus), "-b", str(first), "-e", str(last), "-f", "8"]
    try:
        done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=PROGRAMS_TAKE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RunError(f"{path}: {error}") from None
    if done.returncode:
        last_line = ((done.stderr or done.stdout).strip().splitlines() or ["no output"])[-1]
        raise RunError(f"{path} ended with exit code {done.returncode}: {last_line}")
    return done.stdout
