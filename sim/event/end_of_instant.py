"""Callbacks at the end of the current instant, after all its other events."""

from __future__ import annotations

from collections.abc import Callable

import simpy

AFTER_EVERYTHING = 2
"""A SimPy priority lower than URGENT (0) and NORMAL (1)."""


def after_everything(env: simpy.Environment, callback: Callable[[simpy.Event], None]) -> None:
    """Schedule a callback at the current simulated time, after all other events of that time."""
    event = simpy.Event(env)
    event._ok, event._value = True, None
    event.callbacks = [callback]
    env.schedule(event, priority=AFTER_EVERYTHING)  # type: ignore[arg-type]
