"""Items that are dealt out to copies of this process: the results, the order, errors, and the end."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from tasp_lab.core.errors import RunError, ScheduleError
from tasp_lab.core.workers import as_they_end, deal, processes
from tests.support.signals import interrupts_heard

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are copied on Linux only")


@pytest.fixture
def only_in_a_copy() -> Iterator[Callable[[Callable[[], object]], Callable[[int], object]]]:
    """A function of items that does something in a copy of this process, and here waits until a copy has an item.

    It waits for a byte in a pipe, which Ctrl-C interrupts; the locks of `multiprocessing` do not survive that.
    """
    here, (reading, writing) = os.getpid(), os.pipe()

    def wrapped(action: Callable[[], object]) -> Callable[[int], object]:
        def function(_: int) -> object:
            if os.getpid() == here:
                assert select.select([reading], [], [], 30)[0]
                return None
            os.write(writing, b"x")
            return action()

        return function

    yield wrapped
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize("jobs", [1, 2, 3, 9])
def test_results_are_in_the_order_of_the_items_whoever_has_taken_them(jobs: int) -> None:
    begun: list[int] = []
    known = object()
    found = deal(lambda item: (2 * item, known), range(5), jobs, [known], begun.append)
    assert [each for each, _ in found] == [0, 2, 4, 6, 8]
    assert all(each is known for _, each in found)
    assert begun == [0, 1, 2, 3, 4]
    assert not multiprocessing.active_children()


def test_copies_take_part(only_in_a_copy: Callable[..., Callable[[int], object]]) -> None:
    assert set(deal(only_in_a_copy(os.getpid), range(4), 2)) > {None}


def test_an_error_in_a_copy_is_raised_here(only_in_a_copy: Callable[..., Callable[[int], object]]) -> None:
    def fail() -> None:
        raise ScheduleError("there")

    with pytest.raises(ScheduleError, match="there"):
        deal(only_in_a_copy(fail), range(4), 2)


def test_a_copy_that_ends_early_is_an_error(only_in_a_copy: Callable[..., Callable[[int], object]]) -> None:
    with pytest.raises(RunError, match="a worker ended before its work"):
        deal(only_in_a_copy(lambda: os._exit(1)), range(4), 2)


def test_an_interrupt_ends_all_processes(only_in_a_copy: Callable[..., Callable[[int], object]]) -> None:
    """Ctrl-C reaches all processes of a terminal: the copies leave it to this one, which ends them."""
    here = os.getpid()

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(here, signal.SIGINT)
        time.sleep(60)

    with interrupts_heard(), pytest.raises(KeyboardInterrupt):
        deal(only_in_a_copy(interrupt), range(4), 2)
    assert not multiprocessing.active_children()


def test_a_pool_with_much_ahead_ends_without_a_word_of_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread finds that workers have ended while futures wait; whether any was cancelled by then is a race."""
    failed: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    for _ in range(20):
        with suppress(KeyboardInterrupt), processes(2) as executor:
            next(as_they_end(time.sleep, [0.01] * 1000, executor, 200))
            raise KeyboardInterrupt
    assert not failed
