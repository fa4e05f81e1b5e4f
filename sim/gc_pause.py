"""Simulating without cyclic garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Pause cyclic garbage collection: scanning the millions of objects of a run multiplies its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
