"""The walk by lanes, for transports of single messages.

A thread per lane waits for what arrives on it; receives are posted steps ahead; a block is sent the moment it has
arrived and the lane's message before it is posted. No lane waits for another. Where the schedule has rooms, a receive
is posted when everything that lay in its room has arrived and has been used.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from runtime.traffic import Traffic
from runtime.transport import Wait
from tasp_lab.rooms import HOME, CallRow, Row

Lane = Callable[[int], None]
"""Waits for the next thing on a lane."""

Posted = queue.SimpleQueue[tuple[Row, Wait]]
"""Messages that were posted, in their order, each with its wait."""


class WalkByLanes:
    """A thread per lane waits for what arrives on it; what it notices lets all lanes get on.

    With rooms it also sees off what the lane sends, step by step. So whatever a thread waits for at a step depends on
    earlier steps only, of any rank, and no ranks can wait for each other in a circle.
    """

    def __init__(self, traffic: Traffic, rooms: int | None, steps_ahead: int) -> None:
        part = traffic.part
        self._traffic, self._rooms, self._ahead = traffic, rooms, steps_ahead
        self._outgoing, self._incoming = _by_lane(part.sends), _by_lane(part.receives)
        self._arrived: set[tuple[int, int]] = set()
        self._sums = dict(part.sums)
        self._missing = {key: each.parts for key, each in self._sums.items()}
        self._occupants = Counter() if rooms is None else Counter(part.occupants)
        self._up_to = dict.fromkeys(self._incoming, steps_ahead)
        self._posted: dict[int, Posted] = {lane: queue.SimpleQueue() for lane in self._incoming}
        self._leaving: dict[int, Posted] = {lane: queue.SimpleQueue() for lane in self._outgoing}
        self._unnoticed = Counter(dict.fromkeys(self._incoming, 0))
        self._changed = threading.Condition()
        self._awaited: CallRow | None = None
        self._failed = False
        self._ended: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def prepare(self) -> None:
        with self._changed:
            self._post_receives()

    def run(self) -> None:
        """Kernel calls are made by the caller's thread."""
        with self._changed:
            self._get_on()
        lanes = [partial(self._follow, events) for events in self._waits().values()]
        if self._rooms is None and len(lanes) == 1:
            lanes.pop()()
        for follow in lanes:
            threading.Thread(target=self._guarded, args=(follow,), daemon=True).start()
        self._compute()
        for _ in lanes:
            if (error := self._ended.get()) is not None:
                raise error
        if self._rooms is None:
            for row in self._traffic.part.sends:
                self._see_off(row.lane)

    def _waits(self) -> dict[int, list[tuple[Lane, int]]]:
        """What the thread of each lane waits for, in the order of steps; each is a method and the lane."""
        part = self._traffic.part
        events = [(row.step, row.lane, self._take) for row in part.receives]
        if self._rooms is not None:
            events += [(row.step, row.lane, self._see_off) for row in part.sends]
        found: dict[int, list[tuple[Lane, int]]] = defaultdict(list)
        for _, lane, wait in sorted(events, key=lambda event: event[0]):
            found[lane].append((wait, lane))
        return found

    def _follow(self, events: Sequence[tuple[Lane, int]]) -> None:
        for wait, lane in events:
            wait(lane)

    def _guarded(self, what: Callable[[], None]) -> None:
        error: Exception | None = None
        try:
            what()
        except Exception as raised:
            error = raised
            with self._changed:
                self._failed = True
                self._changed.notify_all()
        self._ended.put(error)

    def _take(self, lane: int) -> None:
        """Take what arrives next on a lane."""
        row, wait = self._posted[lane].get()
        self._traffic.receive(row, wait)
        complete = self._add_part((row.block, row.since))
        with self._changed:
            if complete:
                self._arrived.add((row.block, row.since))
            self._unnoticed[lane] -= 1
            self._up_to[lane] = row.step + 1 + self._ahead
            self._vacate(row.since)
            self._get_on()

    def _see_off(self, lane: int) -> None:
        """Wait until what a lane sent next may be overwritten."""
        row, wait = self._leaving[lane].get()
        self._traffic.finish_send(row, wait)
        if row.since in self._occupants:
            with self._changed:
                self._vacate(row.since)
                self._get_on()

    def _compute(self) -> None:
        """Make the kernel calls, in order, until something has failed."""
        for row in self._traffic.part.calls:
            with self._changed:
                self._awaited = row
                self._changed.wait_for(lambda row=row: self._failed or self._may_compute(row))  # type: ignore[misc]
                self._awaited = None
                if self._failed:
                    return
            self._traffic.compute(row)
            complete = [place.key for place in row.away if self._add_part(place.key)]
            with self._changed:
                self._arrived.update(complete)
                for since in row.since:
                    self._vacate(since)
                self._get_on()

    def _add_part(self, key: tuple[int, int]) -> bool:
        """Of what is added up at a place one more part is there; add it up if that was the last one."""
        if key not in self._missing:
            return True
        with self._changed:
            self._missing[key] -= 1
            complete = not self._missing[key]
        if complete:
            self._traffic.join(self._sums[key])
        return complete

    def _may_compute(self, row: CallRow) -> bool:
        """Whether all that a call reads is there, and the room of what it adds to is free."""
        return all(each in self._arrived for each in row.reads if each[1] != HOME) and (
            not row.away or self._is_free(row.step)
        )

    def _vacate(self, since: int) -> None:
        if since in self._occupants:
            self._occupants[since] -= 1

    def _get_on(self) -> None:
        """Post all that may be posted now; the caller has the lock."""
        for lane, rows in self._outgoing.items():
            while rows and (rows[0].since == HOME or (rows[0].block, rows[0].since) in self._arrived):
                row = rows.popleft()
                self._leaving[lane].put((row, self._traffic.post_sends([row])[0]))
        self._post_receives()
        if self._awaited is not None and self._may_compute(self._awaited):
            self._changed.notify_all()

    def _post_receives(self) -> None:
        """Post each lane's receives for so many steps ahead, and at least one, as far as their rooms are free."""
        for lane, rows in self._incoming.items():
            while (
                rows
                and (rows[0].step <= self._up_to[lane] or not self._unnoticed[lane])
                and self._is_free(rows[0].step)
            ):
                row = rows.popleft()
                self._unnoticed[lane] += 1
                self._posted[lane].put((row, self._traffic.post_receives([row])[0]))

    def _is_free(self, step: int) -> bool:
        """Whether all that lay in the room of a step before has arrived and has been used."""
        if self._rooms is None:
            return True
        return not any(self._occupants[before] for before in range(step - self._rooms, -1, -self._rooms))


def _by_lane(rows: Iterable[Row]) -> dict[int, deque[Row]]:
    found: dict[int, deque[Row]] = defaultdict(deque)
    for row in rows:
        found[row.lane].append(row)
    return found
