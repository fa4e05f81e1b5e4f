"""Streams of work per rank, for communication and for computation, and their dependencies.

On a host no synchronisation is needed: a transfer or kernel is issued only when it may run. On a GPU both are queued
ahead of time. Each channel of messages and each lane of kernel calls has its own stream, and events between streams
prevent a kernel from reading a block before it has arrived and a transfer from overwriting a block that a kernel still
reads. The host never blocks.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache

import torch

Mark = Callable[[], float]
"""A point in one of the streams; called after `Streams.finish`, it returns its time in seconds since `begin`.

On a GPU the host then waits until the point has been reached.
"""


class Streams:
    """Streams of a host, where all work is synchronous; `CudaStreams` are those of a GPU."""

    queues = False
    """Whether work is queued and the host goes on, so that to wait costs the host nothing."""

    def __init__(self) -> None:
        self._began_s = time.perf_counter()

    def begin(self) -> None:
        """Set the origin of all times; communication waits for the computation queued so far."""
        self._began_s = time.perf_counter()

    def communicating(self, channel: int = 0) -> AbstractContextManager[object]:
        """A context in which work is queued on the communication stream of a channel."""
        return _NO_CONTEXT

    def computing(self, lane: int = 0) -> AbstractContextManager[object]:
        """A context in which kernel calls of a lane are queued; outside of it, those of lane 0 are."""
        return _NO_CONTEXT

    def mark(self) -> Mark:
        """Record a point in the current stream."""
        seconds = time.perf_counter() - self._began_s
        return lambda: seconds

    def wait(self, mark: Mark) -> None:
        """Make later work of the current stream wait for a mark."""

    def finish(self) -> None:
        """Make lane 0 of computation wait for all other streams."""


_NO_CONTEXT = contextlib.nullcontext()


class _CudaMark:
    """An event in a stream, and the event at the origin of times."""

    def __init__(self, began: torch.cuda.Event, stream: torch.cuda.Stream, timed: bool) -> None:
        self._began = began
        self.event = _event(timed)
        self.event.record(stream)

    def __call__(self) -> float:
        self.event.synchronize()
        return float(self._began.elapsed_time(self.event)) / 1e3


class CudaStreams(Streams):
    """Streams for channels and for further lanes of calls, beside the device's current stream, which is lane 0."""

    queues = True

    def __init__(self, device: torch.device | None = None, timed: bool = False) -> None:
        self._timed, self._device = timed, device
        self._computing = torch.cuda.current_stream(device)
        self._began = _event(timed)
        self._used: dict[tuple[str, int], torch.cuda.Stream] = {}

    def begin(self) -> None:
        self._began.record(self._computing)
        self._used.clear()

    def communicating(self, channel: int = 0) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream("communicating", channel))

    def computing(self, lane: int = 0) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream("computing", lane)) if lane else _NO_CONTEXT

    def mark(self) -> Mark:
        return _CudaMark(self._began, torch.cuda.current_stream(self._device), self._timed)

    def wait(self, mark: Mark) -> None:
        assert isinstance(mark, _CudaMark), "a mark of these streams"
        torch.cuda.current_stream(self._device).wait_event(mark.event)

    def finish(self) -> None:
        for stream in self._used.values():
            self._computing.wait_stream(stream)

    def _stream(self, kind: str, number: int) -> torch.cuda.Stream:
        if (kind, number) not in self._used:
            index = None if self._device is None else self._device.index  # one stream has one key
            index = torch.cuda.current_device() if index is None else index
            stream = self._used[kind, number] = _side_stream(index, kind, number)
            stream.wait_event(self._began)
        return self._used[kind, number]


@cache
def _side_stream(device: int, kind: str, number: int) -> torch.cuda.Stream:
    """The same stream in every run: the allocator keeps memory per stream, and torch has 32 streams per priority."""
    priority = -1 if kind == "communicating" else 0
    return torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]


def _event(timed: bool) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]


def streams_for(device: torch.device, timed: bool = False) -> Streams:
    """The streams of a device. `timed` makes marks readable after `finish`."""
    return CudaStreams(device, timed) if device.type == "cuda" else Streams()
