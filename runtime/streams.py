"""Two streams of work per rank, communication and computing, and what each waits for in the other.

On a host there is nothing to wait for: whoever posts a transfer or calls a kernel does so when it may run. On a GPU
both are queued ahead of time; communication has a stream of its own, and events between the two streams keep a kernel
from reading what has not arrived, and a transfer from overwriting what a kernel still reads. The host never waits.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch

Mark = Callable[[], float]
"""A point in one of the streams; called after `Streams.finish`, it says when that was, in seconds from `begin`."""


class Streams(Protocol):
    """What a walk by steps needs."""

    def begin(self) -> None:
        """All times count from here; communication sees all that was computed so far."""
        ...

    def communicating(self) -> AbstractContextManager[object]:
        """What is queued inside belongs to communication."""
        ...

    def mark(self) -> Mark:
        """The point that the current stream has reached when it gets here."""
        ...

    def wait(self, mark: Mark) -> None:
        """What is queued after this in the current stream runs after that point."""
        ...

    def finish(self) -> None:
        """Computing goes on when communication has ended. With times asked for, the host waits for both."""
        ...


class HostStreams:
    """Everything happens when the host does it."""

    def __init__(self) -> None:
        self._began_s = time.perf_counter()

    def begin(self) -> None:
        self._began_s = time.perf_counter()

    def communicating(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def mark(self) -> Mark:
        seconds = time.perf_counter() - self._began_s
        return lambda: seconds

    def wait(self, mark: Mark) -> None:
        """Nothing: it has been reached."""

    def finish(self) -> None:
        """Nothing: it has ended."""


class _CudaMark:
    """An event in a stream, and the one that times count from."""

    def __init__(self, began: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
        self._began = began
        self.event = _event()
        self.event.record(stream)

    def __call__(self) -> float:
        self.event.synchronize()
        return float(self._began.elapsed_time(self.event)) / 1e3


class CudaStreams:
    """Communication on a stream of its own beside the device's stream that is current when this is made."""

    def __init__(self, device: torch.device | None = None, timed: bool = False) -> None:
        self._timed, self._device = timed, device
        self._computing = torch.cuda.current_stream(device)
        self._communicating = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._began = _event()

    def begin(self) -> None:
        self._began.record(self._computing)
        self._communicating.wait_stream(self._computing)

    def communicating(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._communicating)

    def mark(self) -> Mark:
        return _CudaMark(self._began, torch.cuda.current_stream(self._device))

    def wait(self, mark: Mark) -> None:
        assert isinstance(mark, _CudaMark), "a mark of these streams"
        torch.cuda.current_stream(self._device).wait_event(mark.event)

    def finish(self) -> None:
        self._computing.wait_stream(self._communicating)
        if self._timed:
            self._computing.synchronize()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def streams_for(device: torch.device, timed: bool = False) -> Streams:
    """The streams of a device. `timed` when marks will be asked for their times."""
    return CudaStreams(device, timed) if device.type == "cuda" else HostStreams()
