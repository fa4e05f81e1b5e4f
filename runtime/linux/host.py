"""The clock and the load of the host."""

from __future__ import annotations

import os
import platform
from functools import cache


@cache
def clock_name() -> str:
    """A name that processes share if their monotonic clocks are one: the boot of a host, else the host."""
    boot = "/proc/sys/kernel/random/boot_id"
    if not os.path.exists(boot):
        return platform.node()
    with open(boot) as stream:
        return stream.read().strip()


class BusyShare:
    """The busy share of all cores, by any process, since construction; 0 without ``/proc/stat``."""

    def __init__(self) -> None:
        self._began = _ticks()

    def so_far(self) -> float:
        busy, total = (now - then for now, then in zip(_ticks(), self._began, strict=True))
        return busy / total if total else 0.0


def _ticks() -> tuple[int, int]:
    """Busy ticks and total ticks of all cores since boot."""
    if not os.path.exists("/proc/stat"):
        return 0, 0
    with open("/proc/stat") as stream:
        ticks = [int(value) for value in stream.readline().split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)
