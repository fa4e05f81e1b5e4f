"""Which transfers of a step the executor sends as one message. Both ends derive it from the schedule alone.

Transfers of one step from one rank to another on one lane are one message if their blocks lie side by side in the
memories of both ends, in the same order, and become ready together: what comes last to their copies at the source is
the same kernel call, or came from the same rank on the same lane, or nothing does. So none of them waits for a kernel
call or a rank for which it would not wait alone. What is gathered before it is sent is a message by itself.

Both ends belong to one step, and what a message waits for belongs to earlier steps of any rank, so a message of
several blocks cannot cause a deadlock either.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tasp_lab.arrays import IntArray
from tasp_lab.schedule.buffer_layout import OUTSIDE, Layouts
from tasp_lab.schedule.dependencies import Accesses, Transfers, Uses, accesses, steps_of
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedule.step import Step


def joint_messages(schedule: Schedule, rank: int, steps: Sequence[Step]) -> IntArray:
    """The message of each transfer of a rank, the number of the first one in it; `steps` are `steps_of` the rank.

    Int array (transfers of the rank,), in the order of steps. Blocks of a message lie in the order of these numbers.
    """
    peers = _peers(steps, rank)
    if not peers:
        return np.arange(sum(len(step) for step in steps))
    ranks = [rank, *peers]
    steps = steps_of(schedule, *ranks)
    derived = accesses(schedule, ranks, steps)
    layouts = Layouts(schedule, ranks, steps, derived)
    own = np.flatnonzero((derived.transfers.source == rank) | (derived.transfers.destination == rank))
    return _messages(schedule, derived, layouts, own)


def _peers(steps: Sequence[Step], rank: int) -> list[int]:
    """The ranks with which a rank exchanges several blocks on one lane of one step in one direction."""
    found: set[int] = set()
    for step in steps:
        pairs = np.stack([step.source, step.destination, step.lane], axis=1)
        if len(pairs) > 1:
            rows, count = np.unique(pairs, axis=0, return_counts=True)
            found |= set(rows[count > 1, :2].ravel().tolist())
    return sorted(found - {rank})


def _messages(schedule: Schedule, derived: Accesses, layouts: Layouts, own: IntArray) -> IntArray:
    """The message of each of the transfers `own`, which have both ends at ranks of the layouts, as in `own`."""
    received, sent, ready = _ends(derived, layouts, own)
    transfers = Transfers(*(column[own] for column in derived.transfers))
    size = schedule.block_bytes[transfers.block]
    same = (transfers.step, transfers.source, transfers.destination, transfers.lane)
    order = np.lexsort((received, *same))
    before, after = order[:-1], order[1:]
    joins = (received[before] != OUTSIDE) & (sent[before] != OUTSIDE)
    for offset in (received, sent):
        joins &= offset[after] == offset[before] + size[before]
    for column in (*same, *ready):
        joins &= column[after] == column[before]
    starts = np.flatnonzero(np.concatenate([[True], ~joins])[: len(order)])
    sizes = np.diff(np.append(starts, len(order)))
    first = np.minimum.reduceat(order, starts) if len(order) else order
    found = np.empty_like(order)
    found[order] = np.repeat(first, sizes)
    return found


def _ends(
    derived: Accesses, layouts: Layouts, transfers: IntArray
) -> tuple[IntArray, IntArray, tuple[IntArray, IntArray, IntArray]]:
    """Where the data of transfers lie at their destinations and sources, and what comes last to them there."""
    arrives = np.flatnonzero(derived.parts.operation < derived.first_call)
    leaves = np.flatnonzero(derived.reads.operation < derived.first_call)
    received = np.full(derived.first_call, OUTSIDE)
    received[derived.parts.operation[arrives]] = layouts.received[arrives]
    reads = Uses(*(column[leaves] for column in derived.reads))
    sent = np.full(derived.first_call, OUTSIDE)
    sent[reads.operation] = layouts.sent(reads)
    ready = []
    for column in layouts.ready_after(reads):
        found = np.full(derived.first_call, OUTSIDE)
        found[reads.operation] = column
        ready.append(found[transfers])
    return received[transfers], sent[transfers], (ready[0], ready[1], ready[2])
