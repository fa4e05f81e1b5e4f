"""How the communication library carries out each message of a schedule."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tasp_lab.core.arrays import IntArray, distinct, numbered
from tasp_lab.machines.libraries.library import CallFacts, CommLibrary, Message
from tasp_lab.machines.libraries.nccl_tuning import Collective
from tasp_lab.schedule.schedule import Schedule


def call_facts(schedule: Schedule) -> CallFacts:
    """What a communication library can see of a schedule."""
    return CallFacts(
        schedule.world_size,
        len(schedule.steps),
        schedule.lanes,
        int(schedule.block_bytes.sum()),
        fused=schedule.fused,
        computes=schedule.task is not None,
        collective=_collective(schedule) if schedule.fused else "",
        algorithm=schedule.algorithm,
        own_bytes=schedule.own_bytes,
    )


def _collective(schedule: Schedule) -> Collective:
    """What a fused call does: copies, or sums that stay with their owners or go to all."""
    if schedule.initial_part is None:
        return "all_gather"
    return "all_reduce" if schedule.final[0].all() else "reduce_scatter"


class LibraryMessages:
    """Looks up messages, cached by kind: place, size, peers of the sender, whether in the first step."""

    def __init__(self, schedule: Schedule, comm_library: CommLibrary) -> None:
        self._schedule = schedule
        self._comm_library = comm_library.bind(call_facts(schedule))
        self._known: dict[tuple[int, int, int, bool], Message] = {}

    def kinds(
        self, step: IntArray | int, source: IntArray, destination: IntArray, size_bytes: IntArray
    ) -> tuple[Sequence[Message], IntArray]:
        """The distinct messages of steps, and for each message between these ranks the index of its own."""
        step = np.broadcast_to(step, source.shape)
        places = self._comm_library.places(source, destination)
        columns = (places, size_bytes, self._peers(step, source, destination), step == 0)
        firsts, kind = numbered(*columns)
        rows = zip(*(column[firsts].tolist() for column in columns), strict=True)
        return [self._message(*row) for row in rows], kind

    def _peers(self, step: IntArray, source: IntArray, destination: IntArray) -> IntArray:
        """For each message, the number of ranks to which its sender sends at its step."""
        n = self._schedule.world_size
        _, sender = numbered(step * n + source)
        peers: IntArray = np.bincount(distinct(sender * n + destination) // n)[sender]
        return peers

    def _message(self, place: int, size_bytes: int, peers: int, first: bool) -> Message:
        key = (place, size_bytes, peers, first)
        if key not in self._known:
            self._known[key] = self._comm_library.message(place, size_bytes, peers, first=first)
        return self._known[key]
