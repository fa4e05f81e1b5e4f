"""Signals of the processes that tests start: a test run may itself have been started with SIGINT ignored."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


def hear_interrupts() -> None:
    """The `preexec_fn` of a process that is to be interrupted: SIGINT does what it does by default."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def interrupts_heard() -> Iterator[None]:
    """SIGINT raises `KeyboardInterrupt` in this process."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
