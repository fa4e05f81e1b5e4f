"""Deferred handling of SIGINT (Ctrl-C)."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


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
