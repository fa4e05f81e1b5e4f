"""The per-lane executor, for transports of single messages.

One thread per lane waits for its messages, in the order of steps. Receives are posted several steps ahead, sends in
turn, as soon as the previous message of the lane is posted and what they wait for has happened. Lanes do not wait for
each other. Kernel calls of all compute lanes are made by the calling thread, in the order of the schedule.

What a message or a call of one step waits for belongs to earlier steps of any rank, so there is no deadlock.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from runtime.executor.message_io import MessageIO
from runtime.executor.progress import Progress
from runtime.executor.transports import Wait
from tasp_lab.schedule.dependencies import ARRIVED, SENT
from tasp_lab.schedule.rank_part import Row
from tasp_lab.schedule.rank_waits import Condition

LaneWait = Callable[[int], None]
"""Waits for the next message of a lane."""

Posted = queue.SimpleQueue[tuple[Row, Wait]]
"""Posted messages in their order, each with its wait."""


class PerLane:
    """One thread per lane waits for arrivals; each arrival may release messages of any lane.

    If anything waits for sends, which use memory that is reused, the threads wait for those, too; else all sends are
    waited for at the end.
    """

    def __init__(self, message_io: MessageIO, steps_ahead: int) -> None:
        part = message_io.part
        self._message_io, self._ahead = message_io, steps_ahead
        self._outgoing, self._incoming = _by_lane(part.sends), _by_lane(part.receives)
        self._happened = Progress(part)
        self._joins = {each.operation: each for each in part.joins}
        self._sends_are_awaited = any((row.operation, SENT) in part.awaited for row in part.sends)
        self._post_until = dict.fromkeys(self._incoming, steps_ahead)
        self._posted: dict[int, Posted] = {lane: queue.SimpleQueue() for lane in self._incoming}
        self._outstanding_sends: dict[int, Posted] = {lane: queue.SimpleQueue() for lane in self._outgoing}
        self._unreceived = Counter(dict.fromkeys(self._incoming, 0))
        self._changed = threading.Condition()
        self._next_call: int | None = None
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
        if len(lanes) == 1 and not self._message_io.part.calls:
            lanes.pop()()
        for run_lane in lanes:
            threading.Thread(target=self._guarded, args=(run_lane,), daemon=True).start()
        self._compute()
        for _ in lanes:
            if (error := self._ended.get()) is not None:
                raise error
        if not self._sends_are_awaited:
            for row in self._message_io.part.sends:
                self._finish_send(row.lane)

    def _waits(self) -> dict[int, list[tuple[LaneWait, int]]]:
        """The waits of each lane's thread in the order of steps; each is a method and the lane."""
        part = self._message_io.part
        events = [(row.step, row.lane, self._receive_next) for row in part.receives]
        if self._sends_are_awaited:
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
        with self._changed:
            self._unreceived[lane] -= 1
            self._post_until[lane] = row.step + 1 + self._ahead
        self._record((row.operation, ARRIVED))

    def _finish_send(self, lane: int) -> None:
        """Wait until the block of a lane's next outstanding send may be overwritten."""
        row, wait = self._outstanding_sends[lane].get()
        self._message_io.finish_send(row, wait)
        self._record((row.operation, SENT))

    def _compute(self) -> None:
        """Make the kernel calls in order; stop when a lane has failed."""
        for row in self._message_io.part.calls:
            with self._changed:
                self._next_call = row.operation
                self._changed.wait_for(lambda row=row: self._failed or self._happened.may(row.operation))  # type: ignore[misc]
                self._next_call = None
                if self._failed:
                    return
            self._message_io.compute(row)
            self._record((row.operation, ARRIVED))

    def _record(self, condition: Condition) -> None:
        """Record that something has happened; post and join whatever has waited for it."""
        happened = deque([condition])
        while happened:
            with self._changed:
                joins = self._happened.record(*happened.popleft())
                self._post_ready()
            for each in joins:
                self._message_io.join(self._joins[each])
                happened.append((each, ARRIVED))

    def _post_ready(self) -> None:
        """Post all messages that are ready; the caller holds the lock."""
        for lane, rows in self._outgoing.items():
            while rows and self._happened.may(rows[0].operation):
                row = rows.popleft()
                self._outstanding_sends[lane].put((row, self._message_io.post_sends([row])[0]))
        self._post_receives()
        if self._next_call is not None and self._happened.may(self._next_call):
            self._changed.notify_all()

    def _post_receives(self) -> None:
        """Post each lane's receives up to `steps_ahead` steps ahead, at least one, while their memory is free."""
        for lane, rows in self._incoming.items():
            while (
                rows
                and (rows[0].step <= self._post_until[lane] or not self._unreceived[lane])
                and self._happened.may(rows[0].operation)
            ):
                row = rows.popleft()
                self._unreceived[lane] += 1
                self._posted[lane].put((row, self._message_io.post_receives([row])[0]))


def _by_lane(rows: Iterable[Row]) -> dict[int, deque[Row]]:
    found: dict[int, deque[Row]] = defaultdict(deque)
    for row in rows:
        found[row.lane].append(row)
    return found
