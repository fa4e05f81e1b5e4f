"""What the host of a run is doing."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class BusyShare:
    """The share of all cores' time that was spent, by anybody, since this was made; 0 where Linux does not tell."""

    def __init__(self) -> None:
        self._began = _ticks()

    def so_far(self) -> float:
        busy, total = (now - then for now, then in zip(_ticks(), self._began, strict=True))
        return busy / total if total else 0.0


def _ticks() -> tuple[int, int]:
    """Ticks that all cores were busy, and all their ticks, since the host started."""
    if not os.path.exists("/proc/stat"):
        return 0, 0
    with open("/proc/stat") as stream:
        ticks = [int(value) for value in stream.readline().split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)
