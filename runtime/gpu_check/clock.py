"""Times of calls on all ranks: by CUDA events in the current stream, or by the host's clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from runtime.gpu_check.group import CheckedGroup

BATCHES = 5


def seconds_per_call(group: CheckedGroup, call: Callable[[], object], count: int) -> float:
    """The time of a call on the slowest rank, in seconds: `count` back to back, the median of several batches."""
    call()
    batches = []
    for _ in range(BATCHES):
        group.barrier()
        batches.append(_batch_s(call, count, group.device) / count)
    return group.slowest(statistics.median(batches))


def _batch_s(call: Callable[[], object], count: int, device: torch.device) -> float:
    if device.type == "cpu":
        began_s = time.perf_counter()
        for _ in range(count):
            call()
        return time.perf_counter() - began_s
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    began.record()
    for _ in range(count):
        call()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3
