"""How a check ends: by a failing rank, by a signal, or by a step that takes too long.

A rank may be anywhere when that happens, also inside a call of the communication library that never returns. So a
thread ends the process: it sees signals through a pipe that Python's C-level handler writes to, and failures of other
ranks in the store of the process group. The reporter, rank 0, first calls `report`, which writes the record.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Literal, NoReturn, Protocol

from tasp_lab.core.progress import print_line

EndKind = Literal["failed", "interrupted"]

FAILED, INTERRUPTED = 2, 130
"""Exit codes."""

POLL_S = 0.2
_GRACE_S = 1.0
"""How long the reporter waits, after the first failure, for what other ranks say."""

_LATER_S = 60.0
"""How much longer other ranks wait for a step to end, in case that the reporter cannot end it."""

_WRITING_S = 20.0
"""How long a failing rank waits for the reporter to write the record."""


class Store(Protocol):
    """What is used of `torch.distributed.Store`."""

    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


@dataclass(frozen=True)
class End:
    """Why a check ends early; `rank` is the first rank that failed, None for a signal or a time limit."""

    kind: EndKind
    message: str
    rank: int | None = None


class Watch:
    """Ends this process when the check is over; a context manager of the main thread.

    Parameters
    ----------
    rank, world_size : this rank; rank 0 reports.
    report : called on rank 0 before the process ends, with None if it knows the failure.
    """

    def __init__(self, rank: int, world_size: int, report: Callable[[End | None], None]) -> None:
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
        if store is None:
            self._end(End("failed", _of_rank(self._rank, message), self._rank))
        with contextlib.suppress(Exception):  # its host may be gone
            store.set(_failure(self._rank), pickle.dumps((time.time(), message)))
        self.leave(store)

    def leave(self, store: Store) -> NoReturn:
        """End this process after a failure that the reporter knows, or will find in the store."""
        if self._rank == 0:
            self._end(None)
        with contextlib.suppress(Exception):
            self._await_the_record(store)
        os._exit(FAILED)

    def _await_the_record(self, store: Store) -> None:
        until = time.monotonic() + _WRITING_S
        while time.monotonic() < until and not store.check([_WRITTEN]):
            time.sleep(POLL_S)

    def _watch(self) -> None:
        while not self._left.is_set():
            ready, _, _ = select.select([self._read], [], [], POLL_S)
            if self._left.is_set():
                return
            if ready:
                self._heard(os.read(self._read, 64))
            elif self._rank == 0 and self._has_failures():
                self._end(None)
            elif self._rank and self._is_written():
                os._exit(FAILED)
            elif time.monotonic() > self._deadline_s:
                self._end(End("failed", f"{self._what} did not end in time"))

    def _heard(self, numbers: bytes) -> None:
        if signal.SIGINT in numbers:
            self._end(End("interrupted", "interrupted"))
        elif signal.SIGTERM in numbers:
            told = "ended by SIGTERM: another rank has died, see what torchrun says, or the job was cancelled"
            self._end(End("failed", told))

    def _has_failures(self) -> bool:
        if self._store is None:
            return False
        with contextlib.suppress(Exception):  # a store that is gone: its host sends SIGTERM, too
            return any(self._store.check([_failure(rank)]) for rank in range(self._world_size))
        return False

    def _is_written(self) -> bool:
        """Whether the reporter has ended the check."""
        with contextlib.suppress(Exception):  # a store that is gone: its host sends SIGTERM, too
            return self._store is not None and self._store.check([_WRITTEN])
        return False

    def _end(self, end: End | None) -> NoReturn:
        """End this process. What the ranks say in the store comes before any reason but Ctrl-C."""
        with self._ending:  # never released: the first reason is reported
            interrupted = end is not None and end.kind == "interrupted"
            if self._rank == 0:
                if not interrupted and self._has_failures():
                    time.sleep(_GRACE_S)
                    end = self._first_failure()
                with contextlib.suppress(Exception):
                    self._report(end)
                with contextlib.suppress(Exception):
                    if self._store is not None:
                        self._store.set(_WRITTEN, b"1")
            elif end is not None and self._store is None:
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
                at_s, message = pickle.loads(self._store.get(_failure(rank)))
                found.append((at_s, rank, message))
        (_, rank, message), *others = sorted(found)
        also = "".join(f"; then {_of_rank(other, told)}" for _, other, told in others[:3])
        return End("failed", _of_rank(rank, message) + also, rank)


def _of_rank(rank: int, message: str) -> str:
    """The message with its rank, which many have already."""
    return message if message.startswith(f"rank {rank}") else f"rank {rank}: {message}"


_WRITTEN = "gpu-check/written"


def _failure(rank: int) -> str:
    return f"gpu-check/failed/{rank}"


def _note(number: int, frame: FrameType | None) -> None:
    """No-op handler: the signal has been written to the pipe."""
