"""Threads that are kept for the next run: to start one takes as long as a step."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable

Task = Callable[[], None]

_IDLE: list[queue.SimpleQueue[Task]] = []
"""The tasks of threads that have none."""

os.register_at_fork(after_in_child=_IDLE.clear)  # threads do not survive a fork


def run_beside(task: Task) -> None:
    """Run a task, which must not raise, in a thread that does not keep the process alive."""
    try:
        tasks = _IDLE.pop()
    except IndexError:
        tasks = queue.SimpleQueue()
        threading.Thread(target=_work, args=(tasks,), daemon=True).start()
    tasks.put(task)


def _work(tasks: queue.SimpleQueue[Task]) -> None:
    while True:
        task = tasks.get()
        task()
        del task  # it refers to the memory of a run
        _IDLE.append(tasks)
