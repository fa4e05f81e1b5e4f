"""This process: its cores, interrupts while extension modules are imported, and how it ends after an error.

A rank whose group of processes still exists must not wait for the others when it ends: the destructor of the group and
its threads may wait for ranks that wait for this one (https://github.com/pytorch/pytorch/issues/119249). Its output
is printed first; then the operating system ends it, and whoever started the ranks sees its exit code.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


def usable_cores() -> int:
    """The number of cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Pause cyclic garbage collection: scanning the millions of objects of a simulation multiplies its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_beside_workers = False


@contextmanager
def beside_workers() -> Iterator[None]:
    """Inside the context other processes do their part of the work of this one, with the other cores."""
    global _beside_workers
    before, _beside_workers = _beside_workers, True
    try:
        yield
    finally:
        _beside_workers = before


def spare_cores() -> int:
    """The number of cores for threads of this process: one in a worker and `beside_workers`, which have the others."""
    from multiprocessing import parent_process  # commands that start no process do not need it

    return 1 if _beside_workers or parent_process() is not None else usable_cores()


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Block SIGINT inside the context and deliver it on exit.

    Some extension modules turn a `KeyboardInterrupt` raised during their import into an `ImportError`, or swallow it.
    Has no effect outside the main thread, where Python does not handle signals, or if the SIGINT handler was not
    installed from Python and could not be restored.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT)
    if not in_main_thread or handler is None:
        yield
        return
    received: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if received:
            signal.raise_signal(signal.SIGINT)


_at_once = False


def at_once() -> None:
    """From now on `leave` ends this process without waiting for threads, destructors or other processes."""
    global _at_once
    _at_once = True


def leaves_at_once() -> bool:
    """Whether `at_once` was called."""
    return _at_once


def leave(code: int) -> NoReturn:
    """End the process with an exit code, after its output."""
    if not _at_once:
        sys.exit(code)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
