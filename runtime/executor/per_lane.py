"""The per-lane executor, for transports of single messages.

One thread per lane waits for its messages. Receives are posted several steps ahead; a block is sent as soon as it has
arrived and the previous message of the lane is posted. Lanes do not wait for each other. If the schedule reuses
buffers, a receive is posted once the previous content of its buffer has arrived and has no pending uses.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from runtime.executor.message_io import MessageIO
from runtime.executor.transports import Wait
from tasp_lab.schedule.buffer_layout import INITIAL, CallRow, Row

LaneWait = Callable[[int], None]
"""Waits for the next message of a lane."""

Posted = queue.SimpleQueue[tuple[Row, Wait]]
"""Posted messages in their order, each with its wait."""


class PerLane:
    """One thread per lane waits for arrivals; each arrival may release messages of any lane.

    With buffers, the thread also waits for the lane's sends, step by step. A wait at one step then depends only on
    earlier steps of any rank, so there is no deadlock.
    """

    def __init__(self, message_io: MessageIO, buffers: int | None, steps_ahead: int) -> None:
        part = message_io.part
        self._message_io, self._buffers, self._ahead = message_io, buffers, steps_ahead
        self._outgoing, self._incoming = _by_lane(part.sends), _by_lane(part.receives)
        self._arrived: set[tuple[int, int]] = set()
        self._sums = dict(part.sums)
        self._missing = {key: each.parts for key, each in self._sums.items()}
        self._pending_uses = Counter() if buffers is None else Counter(part.pending_uses)
        self._post_until = dict.fromkeys(self._incoming, steps_ahead)
        self._posted: dict[int, Posted] = {lane: queue.SimpleQueue() for lane in self._incoming}
        self._outstanding_sends: dict[int, Posted] = {lane: queue.SimpleQueue() for lane in self._outgoing}
        self._unreceived = Counter(dict.fromkeys(self._incoming, 0))
        self._changed = threading.Condition()
        self._next_call: CallRow | None = None
        self._failed = False
        self._ended: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def prepare(self) -> None:
        with self._changed:
            self._post_receives()

    def run(self) -> None:
        """Execute the part; kernel calls are made by the calling thread."""
        with self._changed:
            self._post_ready()
        lanes = [partial(self._run_lane, events) for events in self._waits().values()]
        if self._buffers is None and len(lanes) == 1:
            lanes.pop()()
        for run_lane in lanes:
            threading.Thread(target=self._guarded, args=(run_lane,), daemon=True).start()
        self._compute()
        for _ in lanes:
            if (error := self._ended.get()) is not None:
                raise error
        if self._buffers is None:
            for row in self._message_io.part.sends:
                self._finish_send(row.lane)

    def _waits(self) -> dict[int, list[tuple[LaneWait, int]]]:
        """The waits of each lane's thread in the order of steps; each is a method and the lane."""
        part = self._message_io.part
        events = [(row.step, row.lane, self._receive_next) for row in part.receives]
        if self._buffers is not None:
            events += [(row.step, row.lane, self._finish_send) for row in part.sends]
        found: dict[int, list[tuple[LaneWait, int]]] = defaultdict(list)
        for _, lane, wait in sorted(events, key=lambda event: event[0]):
            found[lane].append((wait, lane))
        return found

    def _run_lane(self, events: Sequence[tuple[LaneWait, int]]) -> None:
        for wait, lane in events:
            wait(lane)

    def _guarded(self, run_lane: Callable[[], None]) -> None:
        error: Exception | None = None
        try:
            run_lane()
        except Exception as raised:
            error = raised
            with self._changed:
                self._failed = True
                self._changed.notify_all()
        self._ended.put(error)

    def _receive_next(self, lane: int) -> None:
        """Receive the next message of a lane."""
        row, wait = self._posted[lane].get()
        self._message_io.receive(row, wait)
        complete = self._add_part((row.block, row.since))
        with self._changed:
            if complete:
                self._arrived.add((row.block, row.since))
            self._unreceived[lane] -= 1
            self._post_until[lane] = row.step + 1 + self._ahead
            self._release(row.since)
            self._post_ready()

    def _finish_send(self, lane: int) -> None:
        """Wait until the block of a lane's next outstanding send may be overwritten."""
        row, wait = self._outstanding_sends[lane].get()
        self._message_io.finish_send(row, wait)
        if row.since in self._pending_uses:
            with self._changed:
                self._release(row.since)
                self._post_ready()

    def _compute(self) -> None:
        """Make the kernel calls in order; stop when a lane has failed."""
        for row in self._message_io.part.calls:
            with self._changed:
                self._next_call = row
                self._changed.wait_for(lambda row=row: self._failed or self._may_compute(row))  # type: ignore[misc]
                self._next_call = None
                if self._failed:
                    return
            self._message_io.compute(row)
            complete = [place.key for place in row.away if self._add_part(place.key)]
            with self._changed:
                self._arrived.update(complete)
                for since in row.since:
                    self._release(since)
                self._post_ready()

    def _add_part(self, key: tuple[int, int]) -> bool:
        """Count one more part of a sum, and join the sum if it was the last; True if the place is complete."""
        if key not in self._missing:
            return True
        with self._changed:
            self._missing[key] -= 1
            complete = not self._missing[key]
        if complete:
            self._message_io.join(self._sums[key])
        return complete

    def _may_compute(self, row: CallRow) -> bool:
        """Whether all blocks that a call reads have arrived, and the buffer that it writes to is free."""
        return all(each in self._arrived for each in row.reads if each[1] != INITIAL) and (
            not row.away or self._is_free(row.step)
        )

    def _release(self, since: int) -> None:
        if since in self._pending_uses:
            self._pending_uses[since] -= 1

    def _post_ready(self) -> None:
        """Post all messages that are ready; the caller holds the lock."""
        for lane, rows in self._outgoing.items():
            while rows and (rows[0].since == INITIAL or (rows[0].block, rows[0].since) in self._arrived):
                row = rows.popleft()
                self._outstanding_sends[lane].put((row, self._message_io.post_sends([row])[0]))
        self._post_receives()
        if self._next_call is not None and self._may_compute(self._next_call):
            self._changed.notify_all()

    def _post_receives(self) -> None:
        """Post each lane's receives up to `steps_ahead` steps ahead, at least one, while their buffers are free."""
        for lane, rows in self._incoming.items():
            while (
                rows
                and (rows[0].step <= self._post_until[lane] or not self._unreceived[lane])
                and self._is_free(rows[0].step)
            ):
                row = rows.popleft()
                self._unreceived[lane] += 1
                self._posted[lane].put((row, self._message_io.post_receives([row])[0]))

    def _is_free(self, step: int) -> bool:
        """Whether the buffer of a step has no pending uses by earlier steps."""
        if self._buffers is None:
            return True
        return not any(self._pending_uses[before] for before in range(step - self._buffers, -1, -self._buffers))


def _by_lane(rows: Iterable[Row]) -> dict[int, deque[Row]]:
    found: dict[int, deque[Row]] = defaultdict(deque)
    for row in rows:
        found[row.lane].append(row)
    return found
