"""How a check ends: by a failing rank, by a signal, or by a step that takes too long.

A rank may be anywhere when that happens, also inside a call of the communication library that never returns. So a
thread ends the process: it sees signals through a pipe that Python's C-level handler writes to, and failures of other
ranks in the store of the process group. The reporter, rank 0, first calls `report`, which writes the record.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import Literal, NamedTuple, NoReturn, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store  # whose `set` takes bytes, too, unlike its stub

from runtime.executor.transports import default_device
from runtime.ranks.torchrun import TorchrunRanks
from tasp_lab.core.choices import BackendKind
from tasp_lab.core.progress import print_line

FAILED, INTERRUPTED = 2, 130
"""Exit codes."""

POLL_S = 0.2
_GRACE_S = 1.0
"""How long the reporter waits, after the first failure, for the failures of other ranks."""

_LATER_S = 60.0
"""How much longer other ranks wait for a step to end, in case that the reporter cannot end it."""

_WRITING_S = 20.0
"""How long a failing rank waits for the reporter to write the record."""


class End(NamedTuple):
    """Why a check ends early."""

    kind: Literal["failed", "interrupted"]
    message: str


class Watch:
    """Ends this process when the check is over; a context manager of the main thread.

    Parameters
    ----------
    rank, world_size : this rank; rank 0 reports.
    report : called on rank 0 before the process ends.
    """

    def __init__(self, rank: int, world_size: int, report: Callable[[End], None]) -> None:
        self._rank, self._world_size, self._report = rank, world_size, report
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._store: Store | None = None
        self._deadline_s, self._what = float("inf"), ""
        self._ending, self._left = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gpu-check watch", daemon=True)

    def __enter__(self) -> Watch:
        self._handlers = {each: signal.signal(each, _note) for each in (signal.SIGINT, signal.SIGTERM)}
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._thread.join()
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._read)
        os.close(self._write)

    def connect(self, store: Store) -> None:
        """Watch for failures of other ranks; the store is used by this thread only."""
        self._store = store

    def limit(self, what: str, seconds: float) -> None:
        """From now on `what` may take so long; the reporter is the first to end it."""
        late_s = _LATER_S if self._rank else 0.0
        self._what, self._deadline_s = what, time.monotonic() + seconds + late_s

    def fail(self, message: str, store: Store | None) -> NoReturn:
        """End the check on all ranks because of this one. The store is one that the main thread may use."""
        end = End("failed", _of_rank(self._rank, message))
        if store is None:
            self._end(end)
        with contextlib.suppress(Exception):  # its host may be gone
            store.set(_failure(self._rank), msgspec.msgpack.encode((time.time(), message)))  # type: ignore[arg-type]
        if self._rank == 0:
            self._end(end)
        with contextlib.suppress(Exception):
            until = time.monotonic() + _WRITING_S
            while time.monotonic() < until and not store.check([_WRITTEN]):
                time.sleep(POLL_S)
        os._exit(FAILED)

    def _watch(self) -> None:
        while not self._left.is_set():
            ready, _, _ = select.select([self._read], [], [], POLL_S)
            if self._left.is_set():
                return
            heard = os.read(self._read, 64) if ready else b""
            if signal.SIGINT in heard:
                self._end(End("interrupted", "interrupted"))
            elif signal.SIGTERM in heard:
                told = "ended by SIGTERM: another rank died (see the output of torchrun), or the job was cancelled"
                self._end(End("failed", told))
            elif self._rank == 0 and self._has_failures():
                self._end(End("failed", "another rank has failed"))
            elif self._rank and self._has(_WRITTEN):  # the reporter has ended the check
                os._exit(FAILED)
            elif time.monotonic() > self._deadline_s:
                self._end(End("failed", f"{self._what} did not end in time"))

    def _has_failures(self) -> bool:
        return any(self._has(_failure(rank)) for rank in range(self._world_size))

    def _has(self, key: str) -> bool:
        with contextlib.suppress(Exception):  # a store that is gone: its host sends SIGTERM, too
            return self._store is not None and self._store.check([key])
        return False

    def _end(self, end: End) -> NoReturn:
        """End this process. Failures in the store are reported before any other reason but Ctrl-C."""
        with self._ending:  # never released: the first reason is reported
            interrupted = end.kind == "interrupted"
            if self._rank == 0:
                if not interrupted and self._has_failures():
                    time.sleep(_GRACE_S)
                    end = self._first_failure()
                with contextlib.suppress(Exception):
                    self._report(end)
                with contextlib.suppress(Exception):
                    if self._store is not None:
                        self._store.set(_WRITTEN, b"1")  # type: ignore[arg-type]
            elif self._store is None:
                print_line(f"tasp-lab: {end.message}", sys.stderr)
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            os._exit(INTERRUPTED if interrupted else FAILED)

    def _first_failure(self) -> End:
        assert self._store is not None, "failures are in the store"
        found: list[tuple[float, int, str]] = []
        for rank in range(self._world_size):
            if self._store.check([_failure(rank)]):
                at_s, message = _read_failure(self._store.get(_failure(rank)))
                found.append((at_s, rank, message))
        (_, rank, message), *others = sorted(found)
        also = "".join(f"; then {_of_rank(other, told)}" for _, other, told in others[:3])
        return End("failed", _of_rank(rank, message) + also)


def _of_rank(rank: int, message: str) -> str:
    """The message with its rank, which many have already."""
    return message if message.startswith(f"rank {rank}") else f"rank {rank}: {message}"


_WRITTEN = "gpu-check/written"


def _failure(rank: int) -> str:
    return f"gpu-check/failed/{rank}"


def _read_failure(told: bytes) -> tuple[float, str]:
    """When a rank failed and why; what is no failure of a rank, which anyone may write, comes last."""
    try:
        return msgspec.msgpack.decode(told, type=tuple[float, str])
    except msgspec.MsgspecError:
        return float("inf"), "failed, and its message cannot be read"


def _note(number: int, frame: FrameType | None) -> None:
    """No-op handler: the signal has been written to the pipe."""


# The ranks of a check, which exchange values through the store of the process group. Whoever reaches the store's port
# may write there, so what is read is data of a known type and never code, as a pickle would be.
#
# So a rank that waits for the others holds no kernel of the communication library, and its GPU is free for what others
# start on it.


Value = TypeVar("Value")

_PATIENCE = timedelta(days=1)
"""Waits end with the process: `runtime.ranks.watch` has the limits."""


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
        """The values of all ranks, which have the type of this one: a number, a text, a list or a data class of those.

        What has another type inside a data class arrives as text.
        """
        self._told += 1
        self.store.set(self._key(self.rank), msgspec.msgpack.encode(value, enc_hook=str))  # type: ignore[arg-type]
        decoder = msgspec.msgpack.Decoder(type(value))
        return [
            value if rank == self.rank else decoder.decode(self.store.get(self._key(rank)))
            for rank in range(self.world_size)
        ]

    def barrier(self) -> None:
        """Wait for all ranks, and for this rank's GPU."""
        if self.on_gpu:
            torch.cuda.synchronize()
        self.gather(None)

    def _key(self, rank: int) -> str:
        return f"gpu-check/told/{self._told}/{rank}"


def store_of_group() -> Store:
    """A connection of its own to the store of the default process group; its waits have no limit of their own."""
    store: Store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    store.set_timeout(_PATIENCE)
    return store
