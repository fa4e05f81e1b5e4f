"""Worker processes, and functions that run on them.

    with processes(4) as executor:
        for item, result in as_they_end(function, items, executor, 4):
            ...

Without an executor everything runs in this process, one item after the other. The executor may also be one of another
engine, such as that of a Dask cluster. Functions, items and results travel by pickle.

    results = deal(function, items, 2, shared=[machine])

deals items out to this process and to copies of it, which need not import or prepare anything again.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from tasp_lab.core.errors import RunError
from tasp_lab.core.process import beside_workers

Item = TypeVar("Item")
Result = TypeVar("Result")

AHEAD = 4
"""Items per worker that are handed out ahead, so that no worker waits and few are lost at an interrupt."""

LOST = "a worker ended before its work, perhaps for want of memory: start again, with fewer workers"


def as_they_end(
    function: Callable[[Item], Result], items: Iterable[Item], executor: Executor | None, workers: int
) -> Iterator[tuple[Item, Result]]:
    """Each item with its result, in the order in which they end. Raises `RunError` if a worker process ends early.

    What runs when the caller stops is left to whoever ends the executor: in Python 3.11 the thread of a pool of
    processes fails if a worker ends while futures are cancelled.

    >>> list(as_they_end(len, ["a", "bcd"], None, 1))
    [('a', 1), ('bcd', 3)]
    """
    if executor is None:
        yield from ((item, function(item)) for item in items)
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
        raise RunError(LOST) from error


def in_order(
    function: Callable[[Item], Result], items: Iterable[Item], executor: Executor | None, workers: int
) -> Iterator[Result]:
    """The results in the order of the items, see `as_they_end`.

    >>> list(in_order(len, ["a", "bcd"], None, 1))
    [1, 3]
    """
    early, due = dict[int, Result](), 0
    for (number, _), result in as_they_end(partial(_of_second, function), enumerate(items), executor, workers):
        early[number] = result
        while due in early:
            yield early.pop(due)
            due += 1


def _of_second(function: Callable[[Item], Result], pair: tuple[int, Item]) -> Result:
    return function(pair[1])


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
        with _interrupts_blocked():  # workers inherit that, and do not hear Ctrl-C while they import, either
            for _ in range(count):
                executor.submit(os.getpid)
        yield executor
        executor.shutdown()
    except BaseException:
        for worker in set(multiprocessing.active_children()) - before:
            worker.kill()
        executor.shutdown(cancel_futures=True)  # its thread ends now, not while the interpreter does
        raise


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Ctrl-C comes after this context; processes that start in it never hear it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
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


def deal(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    jobs: int,
    shared: Sequence[object] = (),
    begin: Callable[[int], None] = lambda number: None,
    end: Callable[[], None] = lambda: None,
) -> list[Result]:
    """The results in the order of the items, which this process and copies of it take one after the other.

    Parameters
    ----------
    function : need not be picklable; its results are. What it raises in a copy is raised here.
    jobs : processes, this one among them; one where processes cannot be copied safely.
    shared : objects that results may refer to, instead of bringing copies of them.
    begin : called here with the number of each item, in order, once it has begun.
    end : called in each copy when it has no more items.

    Raises `RunError` if a copy ends early. An interrupt ends all.
    """
    results = dict[int, Any]()
    copies = min(jobs, len(items)) - 1 if sys.platform == "linux" else 0
    if copies < 1:
        for number, item in enumerate(items):
            begin(number)
            results[number] = function(item)
        return list(results.values())
    # A pool of `concurrent.futures` would need another copy in place of this process, which then had nothing ready for
    # the rest of the command. A copy sends its results at once, so that what two of them share is sent once.
    context = multiprocessing.get_context("fork")
    next_item, begun = context.Value("q", 0), 0

    def take() -> Iterator[int]:
        while True:
            with next_item.get_lock():
                number, next_item.value = next_item.value, next_item.value + 1
            if number >= len(items):
                return
            yield number

    def work_in_copy(connection: Connection) -> None:
        _begin_worker()
        done: list[tuple[int, Result | Exception]] = []
        for number in take():
            try:
                done.append((number, function(items[number])))
            except Exception as error:
                done.append((number, error))
                break
        end()
        file = io.BytesIO()
        _Pickler(file, shared).dump(done)
        connection.send_bytes(file.getvalue())

    ends = [context.Pipe(duplex=False) for _ in range(copies)]
    workers = [context.Process(target=work_in_copy, args=(sends,), daemon=True) for _, sends in ends]
    try:
        with _interrupts_blocked():
            for worker, (_, sends) in zip(workers, ends, strict=True):
                worker.start()
                sends.close()
        with beside_workers():
            for number in take():
                while begun <= number:
                    begin(begun)
                    begun += 1
                results[number] = function(items[number])
        for receives, _ in ends:
            results |= dict(_Unpickler(io.BytesIO(receives.recv_bytes()), shared).load())
    except EOFError as error:
        raise RunError(LOST) from error
    finally:
        for worker in workers:
            worker.kill()  # it has sent all, or nobody waits for it
            worker.join()
    for number in range(len(items)):
        if isinstance(results[number], BaseException):
            raise results[number]
    for number in range(begun, len(items)):
        begin(number)
    return [results[number] for number in range(len(items))]


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, shared: Sequence[object]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._places = {id(each): place for place, each in enumerate(shared)}

    def persistent_id(self, value: object) -> int | None:
        return self._places.get(id(value))


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, shared: Sequence[object]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, place: int) -> object:
        return self._shared[place]
