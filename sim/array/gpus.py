"""Kernel calls in progress, slowed by the messages in flight at their GPU (`tasp_lab.machines.contention`).

GPUs are classes, as constraints are. The *clock* of a GPU reads for how long a call that began with it would have run
alone, and a call ends at a reading that stays the same. So only the calls of a GPU whose speed changes are planned
again, which is once per instant.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from sim.array.event_queue import EventQueue, put
from tasp_lab.core.arrays import Int32Array, IntArray, Table
from tasp_lab.core.compiled import table
from tasp_lab.machines.contention import Contention


class Gpus(NamedTuple):
    """All GPUs and the calls in progress there; empty without contention.

    Attributes
    ----------
    gpus : a table: the channels `sending` and `receiving`; the `speed` since `since_s`, when the clock had this
        `reading`; its `first` call in progress, or -1; whether it `is_changed` at this instant.
    calls : a table by operation: the reading at its `end`, and the `next` call in progress on its GPU, or -1.
    changed : the GPUs whose messages have changed at this instant; `sizes` has their number.
    channel_share, max_channels : what a channel takes of a GPU, and how many channels take something.
    """

    gpus: Table
    calls: Table
    changed: Int32Array
    sizes: IntArray
    channel_share: float
    max_channels: float

    @classmethod
    def of(cls, count: int, operations: int, contention: Contention) -> Gpus:
        """So many GPUs without messages and calls."""
        gpus = table(
            count, sending="f8", receiving="f8", speed="f8", reading="f8", since_s="f8", first="i4", is_changed="i4"
        )
        gpus["speed"], gpus["first"] = 1.0, -1
        return cls(
            gpus=gpus,
            calls=table(operations if count else 0, end="f8", next="i4"),
            changed=np.zeros(count, dtype=np.int32),
            sizes=np.zeros(1, dtype=np.int64),
            channel_share=float(contention.share(1, 1)) if contention.slows else 0.0,
            max_channels=float(contention.max_channels),
        )


def occupy(gpus: Gpus, at: Any, channels: float) -> None:
    """Let a transfer of the class in row `at` take channels at both ends, or give them back if negative."""
    if at.sends_at >= 0:
        gpus.gpus[at.sends_at].sending += at.sends * channels
        gpus.gpus[at.receives_at].receiving += at.receives * channels
        _note_change(gpus, at.sends_at)
        _note_change(gpus, at.receives_at)


def _note_change(gpus: Gpus, number: int) -> None:
    if not gpus.gpus[number].is_changed:
        gpus.gpus[number].is_changed = 1
        gpus.changed[gpus.sizes[0]] = number
        gpus.sizes[0] += 1


def begin_call(gpus: Gpus, number: int, gpu_number: int, time_s: float, queue: EventQueue, now_s: float) -> None:
    """Begin a call that takes `time_s` alone, and put its end into the queue."""
    gpu, call = gpus.gpus[gpu_number], gpus.calls[number]
    if gpu.first < 0:
        gpu.reading, gpu.since_s = 0.0, now_s
    _advance(gpu, now_s)
    call.end, call.next = gpu.reading + time_s, gpu.first
    gpu.first = number
    put(queue, number, now_s + time_s / gpu.speed)


def end_call(gpus: Gpus, number: int, gpu_number: int) -> None:
    """End a call that is done."""
    before = gpus.gpus[gpu_number].first
    if before == number:
        gpus.gpus[gpu_number].first = gpus.calls[number].next
        return
    while gpus.calls[before].next != number:
        before = gpus.calls[before].next
    gpus.calls[before].next = gpus.calls[number].next


def settle_gpus(gpus: Gpus, queue: EventQueue, now_s: float) -> None:
    """Update the speeds after messages came or went, and the ends of the calls that these affect."""
    for at in range(gpus.sizes[0]):
        gpu = gpus.gpus[gpus.changed[at]]
        gpu.is_changed = 0
        speed = 1.0 - min(max(gpu.sending, gpu.receiving), gpus.max_channels) * gpus.channel_share
        if speed != gpu.speed:
            _advance(gpu, now_s)
            gpu.speed = speed
            number = gpu.first
            while number >= 0:
                put(queue, number, now_s + max(0.0, gpus.calls[number].end - gpu.reading) / speed)
                number = gpus.calls[number].next
    gpus.sizes[0] = 0


def _advance(gpu: Any, now_s: float) -> None:
    """Bring the clock of a GPU to the present."""
    gpu.reading += gpu.speed * (now_s - gpu.since_s)
    gpu.since_s = now_s
