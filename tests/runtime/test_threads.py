"""Threads of lanes are kept between runs, hold nothing of a run, and are not expected after a fork."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from unittest.mock import patch

import pytest
import torch

from runtime.executor import per_lane as threads
from runtime.executor.executor import Executor
from runtime.executor.messages import LostPeer, Message
from runtime.executor.per_lane import run_beside
from tasp_lab.core.errors import RunError
from tasp_lab.schedules.build import collective
from tasp_lab.topology.builders import full_mesh
from tests.support.loopback import Board, Loopback


@pytest.fixture(autouse=True)
def no_threads_of_others() -> Iterator[None]:
    """Idle threads of other tests are left alone."""
    before = threads._IDLE[:]
    threads._IDLE.clear()
    yield
    threads._IDLE.extend(before)


def ended(count: int = 1) -> threading.Barrier:
    """A barrier that tasks pass with the test."""
    return threading.Barrier(count + 1, timeout=20)


def wait_until_idle(count: int) -> None:
    """Threads are idle a moment after their tasks have ended."""
    while len(threads._IDLE) < count:
        os.sched_yield()


def test_a_thread_is_kept() -> None:
    names = []
    for _ in range(3):
        together = ended()
        run_beside(lambda together=together: (names.append(threading.get_ident()), together.wait()))  # type: ignore[misc]
        together.wait()
        wait_until_idle(1)
    assert len(set(names)) == 1


def test_an_idle_thread_holds_nothing() -> None:
    together = ended()
    memory = torch.zeros(3)
    held = weakref.ref(memory)
    run_beside(partial(lambda what: (what.add_(1), together.wait()), memory))
    together.wait()
    wait_until_idle(1)
    del memory
    gc.collect()
    assert held() is None


def test_a_forked_process_starts_threads_of_its_own() -> None:
    """As the ranks of the fork server: threads do not survive a fork."""
    together = ended()
    run_beside(together.wait)
    together.wait()
    wait_until_idle(1)
    read, write = os.pipe()
    process = os.fork()
    if not process:
        os.close(read)
        run_beside(lambda: os.write(write, b"done"))  # type: ignore[arg-type, return-value]
        threading.Event().wait(20)
        os._exit(1)
    os.close(write)
    try:
        assert os.read(read, 4) == b"done"
    finally:
        os.close(read)
        os.kill(process, 9)
        os.waitpid(process, 0)


def test_a_lane_that_fails_in_anothers_place_is_reported() -> None:
    """One thread posts and joins for all while others wait for messages; what fails there ends the run."""
    schedule = collective("multi-ring", full_mesh(3), 90)
    board = Board(1.0)
    for peer in (0, 2):
        messages = [Message(1, tag, torch.zeros(45, dtype=torch.uint8)) for tag in range(2 * schedule.lanes)]
        Loopback(board, peer, whole_steps=False).send(messages)
    transport = Loopback(board, 1, whole_steps=False)
    executor = Executor(schedule, 1, transport)
    executor.prepare()
    posted = [*([[lambda: None]] * 2), LostPeer("gone")]
    with patch.object(transport, "send", side_effect=posted), pytest.raises(RunError, match=r"sending it .*\(gone\)"):
        executor.run()
