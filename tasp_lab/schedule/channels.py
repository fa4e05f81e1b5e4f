"""Which lanes share a batch of messages where a library sends batches, as NCCL does.

A batch ends when all its messages have ended, so lanes of one batch wait for each other. That costs nothing if what
they bring is needed at once: the next step waits for all of it anyway. It does where one lane's messages are needed
only steps later, as those of the outer ring of a ring of rings, or never again, as gradients that have come home.

So lanes are one **channel** if what they bring is needed equally soon: if the fewest steps from an arrival to its first
use at its rank, by a transfer or a kernel call, are the same. All rings of TASP are one channel. Every rank derives the
same channels.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from tasp_lab.core.arrays import IntArray
from tasp_lab.schedule.dependencies import Uses, accesses
from tasp_lab.schedule.schedule import Schedule


@lru_cache(maxsize=16)
def channels(schedule: Schedule) -> tuple[int, ...]:
    """The channel of each lane, numbered from 0 on."""
    derived = accesses(schedule, range(schedule.world_size), schedule.steps)
    steps = len(schedule.steps) + 1
    arrives = np.flatnonzero(derived.parts.operation < derived.first_call)
    parts = Uses(*(column[arrives] for column in derived.parts))
    read, arrived = (
        (each.rank * len(schedule.blocks) + each.block) * steps + each.step for each in (derived.reads, parts)
    )
    later = np.append(np.sort(read), -1)[np.searchsorted(np.sort(read), arrived, side="right")]
    used = later // steps == arrived // steps
    soonest: IntArray = np.full(schedule.lanes, steps)
    np.minimum.at(soonest, derived.transfers.lane[parts.operation[used]], (later - arrived)[used])
    found: tuple[int, ...] = tuple(np.unique(soonest, return_inverse=True)[1].tolist())
    return found
