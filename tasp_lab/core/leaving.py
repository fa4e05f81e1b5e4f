"""How a process ends after an error: in order, or at once.

A rank whose group of processes still exists must not wait for the others when it ends: the destructor of the group and
its threads may wait for ranks that wait for this one (https://github.com/pytorch/pytorch/issues/119249). What it has to
say is printed first; then the operating system ends it, and whoever started the ranks sees its exit code.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn

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
