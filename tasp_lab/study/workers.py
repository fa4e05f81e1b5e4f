"""Groups of points on workers: this process, processes of this machine, a Dask cluster, or any other `Executor`."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice

from tasp_lab.core.errors import StudyError, first_line
from tasp_lab.study.evaluate import CODE, answers
from tasp_lab.study.needed import needed
from tasp_lab.study.point import Point
from tasp_lab.study.rows import Row

Group = tuple[Sequence[Point], Collection[str]]
"""Points of one machine and layer, and the keys of rows that they may have already."""

AHEAD = 4
"""Groups per worker that are handed out ahead, so that no worker waits and few are lost at an interrupt."""


def answered(
    groups: Iterable[Group], executor: Executor | None, workers: int, screen: bool = False
) -> Iterator[list[tuple[Point, Row | str]]]:
    """The points of groups with their rows, or keys of rows, in the order in which they end.

    Without an executor they are answered in this process.

    Raises `StudyError` if workers end before their work.
    """
    if executor is None:
        for points, known in groups:
            yield list(zip(points, answers(points, screen, known), strict=True))
        return
    waiting, running = iter(groups), dict[Future[list[Row | str]], Sequence[Point]]()
    try:
        while True:
            for points, known in islice(waiting, AHEAD * workers - len(running)):
                running[executor.submit(answers, points, screen, known, CODE)] = points
            if not running:
                return
            for each in wait(running, return_when=FIRST_COMPLETED).done:
                yield list(zip(running.pop(each), each.result(), strict=True))
    except BrokenProcessPool as error:
        raise StudyError("a worker ended before its work, perhaps for want of memory: start the study again, "
                         "with fewer workers (--jobs)") from error  # fmt: skip
    finally:
        for each in running:
            each.cancel()


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


ANSWER_S = 10
"""How long a scheduler of Dask may take to answer."""


@contextmanager
def dask_executor(address: str) -> Iterator[tuple[Executor, int]]:
    """An executor on the workers of the scheduler at `address`, and how many there are.

    A lost worker's groups go to others. Raises `StudyError` where no scheduler answers or no worker is there.
    """
    distributed = needed("distributed", "--dask")
    try:
        client = distributed.Client(address, timeout=ANSWER_S)
    except (OSError, ValueError, TimeoutError) as error:
        raise StudyError(f"dask {address!r}: {first_line(error)}; expected the address of a scheduler") from error
    with client:
        count = len(client.scheduler_info(n_workers=-1)["workers"])
        if not count:
            raise StudyError(f"dask {address!r}: the scheduler has no workers, expected one or more")
        yield client.get_executor(pure=False), count
