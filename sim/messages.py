"""The messages of a schedule: how the communication library carries out each transfer of a step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tasp_lab.arrays import IntArray, numbered
from tasp_lab.libraries.library import CommLibrary, Message
from tasp_lab.schedule.dependencies import Transfers
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedule.step import Step


class Messages:
    """Looks up messages, cached by kind of transfer: place, size, peers of the sender, whether in the first step."""

    def __init__(self, schedule: Schedule, comm_library: CommLibrary, per_block: IntArray | None = None) -> None:
        """`per_block`, int array (blocks,): how many messages of equal size each block is; None for one each."""
        self._schedule = schedule
        self._sizes = schedule.block_bytes if per_block is None else schedule.block_bytes // per_block
        self._comm_library = comm_library.bind(schedule)
        self._known: dict[tuple[int, int, int, bool], Message] = {}

    def kinds(self, index: int, step: Step | Transfers) -> tuple[list[Message], IntArray]:
        """The distinct messages of a step, and for each transfer the index of its message."""
        sizes = self._sizes[step.block]
        places = self._comm_library.places(step.source, step.destination)
        columns = (places, sizes, self._peers(step))
        firsts, kind = numbered(*columns)
        rows = zip(*(column[firsts].tolist() for column in columns), strict=True)
        return [self._message(place, size, peers, index == 0) for place, size, peers in rows], kind

    def of_all(self, transfers: Transfers) -> Iterator[Message]:
        """The message of each transfer, in the order of steps."""
        ends = np.searchsorted(transfers.step, np.arange(len(self._schedule.steps)), side="right").tolist()
        for index, (first, end) in enumerate(zip([0, *ends], ends, strict=False)):
            messages, kind = self.kinds(index, Transfers(*(column[first:end] for column in transfers)))
            yield from (messages[which] for which in kind.tolist())

    def _peers(self, step: Step | Transfers) -> IntArray:
        """For each transfer, the number of ranks to which its sender sends at this step."""
        n = self._schedule.world_size
        pairs = np.sort(step.source * n + step.destination)
        different = pairs[np.flatnonzero(np.diff(pairs, prepend=-1))]
        peers: IntArray = np.bincount(different // n, minlength=n)[step.source]
        return peers

    def _message(self, place: int, size_bytes: int, peers: int, first: bool) -> Message:
        key = (place, size_bytes, peers, first)
        if key not in self._known:
            self._known[key] = self._comm_library.message(place, size_bytes, peers, first=first)
        return self._known[key]
