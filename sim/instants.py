"""Doing something at this very instant, but after everything else that happens at it."""

from __future__ import annotations

from collections.abc import Callable

import simpy

AFTER_EVERYTHING = 2
"""A SimPy priority behind URGENT (0) and NORMAL (1)."""


def after_everything(env: simpy.Environment, callback: Callable[[simpy.Event], None]) -> None:
    """Have a callback run at the present simulated time, when no other event of that time is left."""
    event = simpy.Event(env)
    event._ok, event._value = True, None
    event.callbacks = [callback]
    env.schedule(event, priority=AFTER_EVERYTHING)  # type: ignore[arg-type]
