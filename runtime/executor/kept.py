"""Executors that are kept for later runs, with their memory, views and messages.

>>> from runtime.executor.kept import release_memory
>>> release_memory()                 # free what is kept, as before a phase of a program without attention

A layer is called again and again with tensors of one shape, so its schedules, and what a rank prepares for them, are
the same. One executor of each kind is kept and reused by all layers that are alike, one after the other.

On a GPU that also bounds the memory of a backward pass. torch notes for the whole memory that NCCL's stream uses it
(`record_stream`), so a memory that is freed is reused only when the GPU has come so far. The host runs ahead of it, and
the memories of many layers would be allocated (https://github.com/pytorch/pytorch/issues/132292). A memory that is kept
needs no such care: at the end of a run the current stream waits for all others, and the next run begins in the same
stream.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator

import torch

from runtime.executor.copies import Work
from runtime.executor.executor import Executor
from runtime.executor.messages import Transport
from tasp_lab.schedule.rank_part import RankPart
from tasp_lab.schedule.schedule import Schedule

MAX_KEPT = 4
"""Executors that are kept for all layers: those of both passes of two layers of different shapes."""


class Kept:
    """Executors between their runs, `most` of them at most.

    `in_one_order`: all runs follow one another, whatever streams they begin in, as a caller promises that owns them.
    """

    def __init__(self, most: int, in_one_order: bool = False) -> None:
        self.most, self._in_one_order = most, in_one_order
        self._kept: OrderedDict[Hashable, Executor] = OrderedDict()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def executor(
        self, schedule: Schedule, part: RankPart, transport: Transport, work: Work | None, device: torch.device
    ) -> Iterator[Executor]:
        """An executor for one run, a new one if none is kept; it is kept unless the run fails.

        If memory is exhausted, what is kept for all layers is freed and the allocation is tried once more.
        """
        stream = 0 if self._in_one_order else _stream(device)
        key = id(schedule), part.rank, transport.key, device, stream
        with self._lock:
            executor = self._kept.pop(key, None)
        if executor is None:
            executor = _made(lambda: Executor(schedule, part.rank, transport, work, device, part=part))
        else:
            executor.reuse(transport, work)
        yield executor
        executor.reuse(transport, None)  # the tensors of the caller are not kept
        with self._lock:
            self._kept[key] = executor
            dropped = [self._kept.popitem(last=False)[1] for _ in range(len(self._kept) - self.most)]
        for each in dropped:
            each.give_back()

    def release(self) -> None:
        """Free the memories; they are allocated again when they are needed."""
        with self._lock:
            dropped = list(self._kept.values())
            self._kept.clear()
        for each in dropped:
            each.give_back()

    @property
    def size_bytes(self) -> int:
        """The memory that is kept."""
        with self._lock:
            return sum(each.memory.numel() for each in self._kept.values())


OF_ALL_LAYERS = Kept(MAX_KEPT)


def release_memory() -> None:
    """Free the memories of runs that are kept for later ones of all layers, except those of prepared layers."""
    OF_ALL_LAYERS.release()


def _made(make: Callable[[], Executor]) -> Executor:
    try:
        return make()
    except torch.OutOfMemoryError:
        if not OF_ALL_LAYERS.size_bytes:
            raise
    release_memory()
    return make()


def _stream(device: torch.device) -> int:
    """The current stream, in which later runs begin."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0
