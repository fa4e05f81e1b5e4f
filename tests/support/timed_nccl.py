"""The clocks of two GPUs and their hosts under NCCL: a model, in which ranks are threads and time is virtual.

Each rank has a host and a current stream. A host that posts a batch goes on; the batch begins on the library's stream
when the host has posted it, the current stream has come so far, the batch before it has ended, and the other rank has
got there, too. `wait()` makes the current stream wait and not the host. `wait(timeout)` makes the host look whether the
batch has ended, and pause for a millisecond if it has not, as `WorkNCCL::wait` does. A single send opens a communicator
of two ranks, with a bandwidth of its own. Times are derived when they are asked for, so they do not depend on threads.

`installed` puts the model in the place of torch in a module.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from types import ModuleType
from typing import Any, Self
from unittest import mock

POLL_S = 1e-3
CYCLES_PER_S = 1.5e9

Point = Callable[[], float]
"""A time in seconds, known when whatever it depends on is."""


@dataclass
class TimedNccl:
    """Two ranks. A batch of n messages takes ``batch_s + n * message_s`` and its bytes at the bandwidth."""

    bandwidth_bytes_per_s: float
    batch_s: float = 9e-6
    message_s: float = 1e-6
    post_batch_s: float = 25e-6
    post_message_s: float = 5e-6
    pair_bandwidth_bytes_per_s: float = 1.0
    host_s: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def __post_init__(self) -> None:
        self._posted = threading.Condition()
        self._batches: defaultdict[tuple[int, int], list[_Batch]] = defaultdict(list)
        self._library: list[Point] = [lambda: 0.0, lambda: 0.0]
        self._streams: list[Point] = [lambda: 0.0, lambda: 0.0]
        self._rank = threading.local()

    def run(self, call: Callable[[], object]) -> list[Any]:
        """The results of both ranks."""

        def on(rank: int) -> object:
            self._rank.number = rank
            return call()

        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(on, range(2)))

    @property
    def rank(self) -> int:
        number: int = self._rank.number
        return number

    def advance(self, seconds: float) -> None:
        self.host_s[self.rank] += seconds

    def after_stream(self, seconds: float = 0.0) -> Point:
        """Queue an operation of this duration on the current stream; returns its end."""
        rank, host_s, before = self.rank, self.host_s[self.rank], self._streams[self.rank]
        self._streams[rank] = ended = _once(lambda: max(before(), host_s) + seconds)
        return ended

    def wait_in_stream(self, point: Point) -> None:
        before = self._streams[self.rank]
        self._streams[self.rank] = _once(lambda: max(before(), point()))

    def wait_on_host(self, point: Point) -> None:
        self.host_s[self.rank] = max(self.host_s[self.rank], point())

    def post(self, sends: bool, sizes: Sequence[int], alone: bool = False) -> Point:
        """Post one side of a batch to the other rank; returns its end."""
        self.advance(self.post_batch_s + len(sizes) * self.post_message_s)
        rank = self.rank
        way = (rank, 1 - rank) if sends else (1 - rank, rank)
        before, library = self.after_stream(), self._library[rank]
        bandwidth = self.pair_bandwidth_bytes_per_s if alone else self.bandwidth_bytes_per_s
        busy_s = self.batch_s + len(sizes) * self.message_s + sum(sizes) / bandwidth
        own = _Batch(tuple(sizes), _once(lambda: max(before(), library())))
        sides = self._batches[way[0] * 2 + way[1], int(sends)], self._batches[way[0] * 2 + way[1], int(not sends)]
        with self._posted:
            sides[0].append(own)
            self._posted.notify_all()
        number = len(sides[0]) - 1

        def end() -> float:
            with self._posted:
                assert self._posted.wait_for(lambda: len(sides[1]) > number, timeout=30), "nobody posts the other side"
            other = sides[1][number]
            assert other.sizes == own.sizes, "both sides of a batch are of the same sizes"
            return max(own.ready(), other.ready()) + busy_s

        self._library[rank] = ended = _once(end)
        return ended


@dataclass(frozen=True)
class _Batch:
    sizes: tuple[int, ...]
    ready: Point


def _once(derive: Point) -> Point:
    known: list[float] = []
    lock = threading.Lock()

    def get() -> float:
        with lock:
            if not known:
                known.append(derive())
        return known[0]

    return get


class _Bytes:
    """A tensor of bytes without the bytes."""

    def __init__(self, size: int, **_: object) -> None:
        self._size = size

    def numel(self) -> int:
        return self._size

    def random_(self) -> Self:
        return self

    def new_zeros(self, size: int) -> _Bytes:
        return _Bytes(size)

    def __getitem__(self, part: slice) -> _Bytes:
        return _Bytes(part.stop)

    def split(self, size: int) -> list[_Bytes]:
        return [_Bytes(size)] * (self._size // size)


class _Work:
    def __init__(self, nccl: TimedNccl, ended: Point) -> None:
        self._nccl, self._ended = nccl, ended

    def wait(self, timeout: timedelta | None = None) -> None:
        self._nccl.wait_in_stream(self._ended)
        if timeout is not None:
            while self._nccl.host_s[self._nccl.rank] < self._ended():
                self._nccl.advance(POLL_S)


class _Event:
    def __init__(self, nccl: TimedNccl) -> None:
        self._nccl = nccl

    def record(self) -> None:
        self.at = self._nccl.after_stream()

    def synchronize(self) -> None:
        self._nccl.wait_on_host(self.at)

    def elapsed_time(self, later: _Event) -> float:
        return (later.at() - self.at()) * 1e3


@contextlib.contextmanager
def installed(nccl: TimedNccl, module: ModuleType) -> Iterator[None]:
    """Put the model in the place of `torch`, `dist` and `time` in a module."""

    def isend(data: _Bytes, dst: int | None = None, **_: object) -> _Work:
        return _Work(nccl, nccl.post(True, [data.numel()], alone=True))

    def irecv(data: _Bytes, src: int | None = None, **_: object) -> _Work:
        return _Work(nccl, nccl.post(False, [data.numel()], alone=True))

    def batch(operations: Sequence[Any]) -> list[_Work]:
        calls = {operation.op for operation in operations}
        assert len(calls) == 1, "batches of one direction"
        return [_Work(nccl, nccl.post(calls == {isend}, [operation.tensor.numel() for operation in operations]))]

    def operation(op: object, tensor: _Bytes, group: object = None, group_peer: int | None = None) -> object:
        assert group is None, "the group that schedules use"
        assert group_peer == 1 - nccl.rank
        return types.SimpleNamespace(op=op, tensor=tensor)

    dist = types.SimpleNamespace(
        isend=isend, irecv=irecv, batch_isend_irecv=batch, P2POp=operation, get_rank=lambda: nccl.rank,
        get_backend=lambda: "nccl", DistError=RuntimeError, Work=object,
    )  # fmt: skip
    cuda = types.SimpleNamespace(
        Event=lambda enable_timing: _Event(nccl),
        _sleep=lambda cycles: nccl.after_stream(cycles / CYCLES_PER_S),
        synchronize=lambda: nccl.wait_on_host(nccl.after_stream()),
        current_stream=lambda: types.SimpleNamespace(synchronize=lambda: nccl.wait_on_host(nccl.after_stream())),
    )
    fakes = {
        "dist": dist,
        "torch": types.SimpleNamespace(cuda=cuda, empty=_Bytes, zeros=_Bytes, uint8=None),
        "time": types.SimpleNamespace(perf_counter=lambda: nccl.host_s[nccl.rank]),
        "default_device": lambda: "cpu",
    }
    with mock.patch.multiple(module, **fakes):
        yield
