"""A pulse: shared memory in which ranks show that they are alive and whom they wait for.

One row of three 64-bit integers per rank: a counter that a background thread raises five times a second, a counter
of the rank's own progress, and the rank it waits for (or one of the states below).
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from dataclasses import dataclass

WORKING, IDLE, AT_BARRIER = -1, -2, -3
"""States of a rank that waits for no single other: it computes or posts, it has no job, it waits for all."""

_ROW_BYTES = 24


class Pulse:
    """The shared rows, over a descriptor made by `create`."""

    def __init__(self, descriptor: int, world_size: int) -> None:
        self._memory = mmap.mmap(descriptor, world_size * _ROW_BYTES)
        self._cells = memoryview(self._memory).cast("q")

    @staticmethod
    def create(world_size: int) -> int:
        """A descriptor of zeroed memory for that many ranks; inherited by child processes when passed on."""
        descriptor = os.memfd_create("tasp-lab-pulse")
        os.ftruncate(descriptor, world_size * _ROW_BYTES)
        return descriptor

    def beat(self, rank: int) -> None:
        """Start the thread that shows that this process is alive."""

        def forever() -> None:
            while True:
                self._cells[3 * rank] += 1
                time.sleep(0.2)

        threading.Thread(target=forever, daemon=True, name="pulse").start()

    def report(self, rank: int, waiting_for: int) -> None:
        """Note progress, and whom the rank waits for now."""
        self._cells[3 * rank + 1] += 1
        self._cells[3 * rank + 2] = waiting_for

    def row(self, rank: int) -> tuple[int, int, int]:
        """(beats, progress, waiting_for) of a rank."""
        beats, progress, waiting_for = self._cells[3 * rank : 3 * rank + 3]
        return beats, progress, waiting_for


@dataclass
class _Seen:
    row: tuple[int, int, int]
    beat_at_s: float
    progress_at_s: float


class Watch:
    """Watches the pulse of all ranks and names the one that hangs."""

    def __init__(self, pulse: Pulse, world_size: int, longest_silence_s: float, no_beat_s: float = 5.0) -> None:
        self._pulse = pulse
        self._longest_silence_s, self._no_beat_s = longest_silence_s, no_beat_s
        now = time.monotonic()
        self._seen = [_Seen(pulse.row(rank), now, now) for rank in range(world_size)]

    def culprit(self) -> tuple[int, str] | None:
        """The rank that hangs and how it shows, or None while all is well."""
        now = time.monotonic()
        for rank, seen in enumerate(self._seen):
            row = self._pulse.row(rank)
            if row[0] != seen.row[0]:
                seen.beat_at_s = now
            if row[1] != seen.row[1]:
                seen.progress_at_s = now
            seen.row = row
        for rank, seen in enumerate(self._seen):
            if now - seen.beat_at_s > self._no_beat_s:
                return rank, f"the process shows no sign of life for {self._no_beat_s:.0f} s"
            if seen.row[2] == WORKING and now - seen.progress_at_s > self._longest_silence_s:
                return rank, f"no progress for {self._longest_silence_s:.0f} s"
        if all(now - seen.progress_at_s > self._longest_silence_s for seen in self._seen if seen.row[2] != IDLE):
            return self._blamed(now)
        return None

    def _blamed(self, now: float) -> tuple[int, str] | None:
        """All wait: blame the rank that the longest silent one waits for."""
        waiting = [(seen.progress_at_s, rank) for rank, seen in enumerate(self._seen) if seen.row[2] >= 0]
        if not waiting:
            return None
        since, rank = min(waiting)
        return self._seen[rank].row[2], f"rank {rank} waits for it since {now - since:.0f} s"
