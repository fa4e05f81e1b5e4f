"""Worker processes, and functions that run on them.

    with processes(4) as executor:
        for item, result in as_they_end(function, items, executor, 4):
            ...

Without an executor everything runs in this process, one item after the other. The executor may also be one of another
engine, such as that of a Dask cluster. Functions, items and results travel by pickle.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice
from typing import TypeVar

from tasp_lab.core.errors import RunError

Item = TypeVar("Item")
Result = TypeVar("Result")

AHEAD = 4
"""Items per worker that are handed out ahead, so that no worker waits and few are lost at an interrupt."""


def as_they_end(
    function: Callable[[Item], Result], items: Iterable[Item], executor: Executor | None, workers: int
) -> Iterator[tuple[Item, Result]]:
    """Each item with its result, in the order in which they end. Raises `RunError` if a worker process ends early.

    >>> list(as_they_end(len, ["a", "bcd"], None, 1))
    [('a', 1), ('bcd', 3)]
    """
    if executor is None:
        for item in items:
            yield item, function(item)
        return
    waiting, running = iter(items), dict[Future[Result], Item]()
    try:
        while True:
            for item in islice(waiting, AHEAD * workers - len(running)):
                running[executor.submit(function, item)] = item
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()
    except BrokenProcessPool as error:
        raise _lost_worker() from error
    finally:
        for future in running:
            future.cancel()


def in_order(
    function: Callable[[Item], Result], items: Iterable[Item], executor: Executor | None, workers: int
) -> Iterator[Result]:
    """The results in the order of the items. Raises `RunError` if a worker process ends early.

    >>> list(in_order(len, ["a", "bcd"], None, 1))
    [1, 3]
    """
    if executor is None:
        yield from map(function, items)
        return
    waiting, running = iter(items), deque[Future[Result]]()
    try:
        while True:
            running += (executor.submit(function, item) for item in islice(waiting, AHEAD * workers - len(running)))
            if not running:
                return
            yield running.popleft().result()
    except BrokenProcessPool as error:
        raise _lost_worker() from error
    finally:
        for future in running:
            future.cancel()


def _lost_worker() -> RunError:
    return RunError("a worker ended before its work, perhaps for want of memory: start again, with fewer workers")


@contextmanager
def processes(count: int) -> Iterator[Executor | None]:
    """Worker processes, which end with this context and with this process; none for a single one."""
    if count < 2:
        yield None
        return
    context = multiprocessing.get_context("spawn")
    before = set(multiprocessing.active_children())
    executor = ProcessPoolExecutor(count, mp_context=context, initializer=_begin_worker)
    try:
        _start(executor, count)
        yield executor
        executor.shutdown()
    except BaseException:
        for worker in set(multiprocessing.active_children()) - before:
            worker.kill()
        executor.shutdown(cancel_futures=True)  # its thread ends now, not while the interpreter does
        raise


def _start(executor: Executor, count: int) -> None:
    """Start all workers, which inherit that Ctrl-C is blocked: they do not hear it while they import, either."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for _ in range(count):
            executor.submit(os.getpid)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin_worker() -> None:
    """Leave Ctrl-C to the parent, and end when it does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
