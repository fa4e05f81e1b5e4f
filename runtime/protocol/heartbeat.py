"""Heartbeats: shared memory with the liveness, progress and awaited peer of every rank.

It holds three 64-bit integers per rank: a counter that a background thread increments five times a second, a counter
of the rank's progress, and the rank it waits for (or one of the states below).
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

WORKING, IDLE, AT_BARRIER = -1, -2, -3
"""States of a rank that waits for no single peer: it computes or posts, it has no job, or it waits for all ranks."""

_ROW_BYTES = 24


class Heartbeat:
    """The shared memory behind a descriptor made by `create`."""

    def __init__(self, descriptor: int, world_size: int) -> None:
        self._memory = mmap.mmap(descriptor, world_size * _ROW_BYTES)
        self._cells = memoryview(self._memory).cast("q")

    @staticmethod
    def create(world_size: int) -> int:
        """A descriptor of zeroed shared memory for `world_size` ranks, to be inherited by child processes."""
        descriptor = os.memfd_create("tasp-lab-heartbeat")
        os.ftruncate(descriptor, world_size * _ROW_BYTES)
        return descriptor

    def beat(self, rank: int) -> None:
        """Start the background thread that increments the liveness counter."""

        def forever() -> None:
            while True:
                self.show_life(rank)
                time.sleep(0.2)

        threading.Thread(target=forever, daemon=True, name="heartbeat").start()

    def show_life(self, rank: int) -> None:
        """One beat: the process of a rank is alive."""
        self._cells[3 * rank] += 1

    def report(self, rank: int, waiting_for: int) -> None:
        """Record progress, and the rank or state for which this rank now waits."""
        self._cells[3 * rank + 1] += 1
        self._cells[3 * rank + 2] = waiting_for

    def row(self, rank: int) -> tuple[int, int, int]:
        """(beats, progress, waiting_for) of a rank."""
        beats, progress, waiting_for = self._cells[3 * rank : 3 * rank + 3]
        return beats, progress, waiting_for


@dataclass
class _LastRow:
    row: tuple[int, int, int]
    beat_at_s: float
    progress_at_s: float


class Watchdog:
    """Monitors the heartbeats of all ranks and identifies a rank that hangs. `clock` returns seconds."""

    def __init__(
        self,
        heartbeat: Heartbeat,
        world_size: int,
        longest_silence_s: float,
        no_beat_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._heartbeat, self._clock = heartbeat, clock
        self._longest_silence_s, self._no_beat_s = longest_silence_s, no_beat_s
        now = clock()
        self._last = [_LastRow(heartbeat.row(rank), now, now) for rank in range(world_size)]

    def failed_rank(self) -> tuple[int, str] | None:
        """The rank that hangs and the reason in words, or None."""
        now = self._clock()
        for rank, last in enumerate(self._last):
            row = self._heartbeat.row(rank)
            if row[0] != last.row[0]:
                last.beat_at_s = now
            if row[1] != last.row[1]:
                last.progress_at_s = now
            last.row = row
        for rank, last in enumerate(self._last):
            if now - last.beat_at_s > self._no_beat_s:
                return rank, f"no heartbeat for {self._no_beat_s:.0f} s"
            if last.row[2] == WORKING and now - last.progress_at_s > self._longest_silence_s:
                return rank, f"no progress for {self._longest_silence_s:.0f} s"
        if all(now - last.progress_at_s > self._longest_silence_s for last in self._last if last.row[2] != IDLE):
            return self._awaited_rank(now)
        return None

    def _awaited_rank(self, now: float) -> tuple[int, str] | None:
        """If all ranks wait: the rank for which the longest silent one waits."""
        waiting = [(last.progress_at_s, rank) for rank, last in enumerate(self._last) if last.row[2] >= 0]
        if not waiting:
            return None
        since, rank = min(waiting)
        return self._last[rank].row[2], f"rank {rank} has been waiting for it for {now - since:.0f} s"
