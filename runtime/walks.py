"""Two ways to walk the steps of one rank, chosen by what its transport needs.

*By lanes*, for transports of single messages: a thread per lane waits for what arrives on it; receives are posted
steps ahead; a block is sent the moment it has arrived and the lane's message before it is posted. No lane waits for
another. *By steps*, for transports of whole steps: a step is posted when all
blocks that it sends have arrived, then its kernel calls are made, while it is under way.

Where the schedule has rooms, a receive is posted when everything that lay in its room has arrived and has been used.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

from runtime.pulse import WORKING
from runtime.records import Computed, Received, Sent
from runtime.streams import HostStreams, Mark, Streams
from runtime.transport import Message, Transport, Wait
from tasp_lab.errors import RunError, first_line
from tasp_lab.rooms import HOME, CallRow, RankPart, Row, Sum

Progress = Callable[[int], None]
"""Called whenever a rank got on or begins to wait, with the rank that it waits for or a state of `runtime.pulse`."""

Compute = Callable[[CallRow], None]
"""Makes a kernel call, or what stands for it; on a GPU it only queues it."""


Join = Callable[[Sum], None]
"""Adds up what has come together of a gradient."""

Lane = Callable[[int], None]
"""Waits for the next thing on a lane."""

Posted = queue.SimpleQueue[tuple[Row, Wait]]
"""Messages that were posted, in their order, each with its wait."""


class Traffic:
    """What both walks do: post messages, wait for them, compute, note when that was and who is to blame."""

    def __init__(
        self,
        part: RankPart,
        transport: Transport,
        message: Callable[[Row], Message],
        compute: Compute,
        join: Join,
        progress: Progress,
        streams: Streams | None = None,
    ) -> None:
        self.part, self.join = part, join
        self.streams = streams or HostStreams()
        self._transport, self._message, self._compute, self._progress = transport, message, compute, progress
        self._sent: list[tuple[Row, Mark]] = []
        self._received: list[tuple[Row, Mark]] = []
        self._computed: list[tuple[CallRow, Mark, Mark]] = []
        self._waiting_for: dict[tuple[str, int], int] = {}
        self._computing = False

    def post_receives(self, rows: Sequence[Row]) -> list[Wait]:
        try:
            return self._transport.receive([self._message(row) for row in rows])
        except RuntimeError as error:
            raise self._lost(rows[0], f"posting the receive of block {rows[0].block} from it", error) from None

    def post_sends(self, rows: Sequence[Row]) -> list[Wait]:
        posted = self.streams.mark()
        try:
            waits = self._transport.send([self._message(row) for row in rows])
        except RuntimeError as error:
            if not rows:
                raise RunError(f"rank {self.part.rank}: lost a rank ({first_line(error)})") from None
            raise self._lost(rows[0], f"sending it block {rows[0].block}", error) from None
        self._sent += [(row, posted) for row in rows]
        return waits

    def receive(self, row: Row, wait: Wait) -> None:
        """Return when a block has arrived."""
        self._wait_for("in", row, f"waiting for block {row.block} from it", wait)
        self._received.append((row, self.streams.mark()))

    def finish_send(self, row: Row, wait: Wait) -> None:
        """Return when what was sent may be overwritten."""
        self._wait_for("out", row, f"waiting until it takes block {row.block}", wait)

    def compute(self, row: CallRow) -> None:
        began = self.streams.mark()
        self._computing = True
        self._report()
        self._compute(row)
        self._computing = False
        self._report()
        self._computed.append((row, began, self.streams.mark()))

    def sent(self) -> tuple[Sent, ...]:
        return tuple(Sent(row.step, row.lane, row.peer, row.block, posted()) for row, posted in self._sent)

    def received(self) -> tuple[Received, ...]:
        return tuple(Received(row.step, row.lane, row.peer, row.block, noticed()) for row, noticed in self._received)

    def computed(self) -> tuple[Computed, ...]:
        return tuple(
            Computed(row.step, row.reads[0][0], row.flops, began(), ended()) for row, began, ended in self._computed
        )

    def _wait_for(self, way: str, row: Row, what: str, wait: Wait) -> None:
        self._waiting_for[way, row.lane] = row.peer
        self._report()
        try:
            wait()
        except RuntimeError as error:
            raise self._lost(row, what, error) from None
        del self._waiting_for[way, row.lane]
        self._report()

    def _report(self) -> None:
        """A rank that computes waits for nobody, whatever its lanes wait for."""
        waiting_for = list(self._waiting_for.values())
        self._progress(WORKING if self._computing or not waiting_for else waiting_for[0])

    def _lost(self, row: Row, what: str, error: RuntimeError) -> RunError:
        return RunError(f"rank {self.part.rank}, step {row.step}: lost rank {row.peer} {what} ({first_line(error)})")


class Walk(Protocol):
    """One rank's way through a schedule: `prepare` before all ranks start together, then `run`."""

    def prepare(self) -> None: ...
    def run(self) -> None: ...


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
        self._occupants = Counter() if rooms is None else part.occupants
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


class WalkBySteps:
    """Receives and sends of a step are posted together, when every block that it sends is there."""

    def __init__(self, traffic: Traffic, rooms: int | None, steps: int) -> None:
        part = traffic.part
        self._traffic, self._streams, self._rooms = traffic, traffic.streams, rooms
        self._sends, self._receives = _by_step(part.sends, steps), _by_step(part.receives, steps)
        self._calls: list[list[CallRow]] = [[] for _ in range(steps)]
        for call in part.calls:
            self._calls[call.step].append(call)
        self._pending: dict[tuple[int, int], tuple[Row, Wait]] = {}
        self._leaving: list[tuple[Row, Wait]] = []
        self._read_until: dict[int, Mark] = {}
        self._computed: dict[int, Mark] = {}  # the calls of a step, or with HOME those that add to gradients there
        self._joined: Mark | None = None  # what has come home
        self._unjoined = dict(part.sums)

    def prepare(self) -> None:
        """Nothing: the receives of a step are posted with its sends."""

    def run(self) -> None:
        for step in range(len(self._sends)):
            with self._streams.communicating():
                self._post(step)
            if self._calls[step]:
                self._compute(step)
        with self._streams.communicating():
            for key in [*self._pending, *self._unjoined]:
                self._await(key)
            self._finish_sends(lambda row: True)

    def _post(self, step: int) -> None:
        for row in self._sends[step]:
            self._await((row.block, row.since))
        if self._rooms is not None:
            for since in range(step - self._rooms, -1, -self._rooms):
                self._clear_room(since)
        receives = self._receives[step]
        waits = self._traffic.post_receives(receives)
        self._pending |= {(row.block, row.since): (row, wait) for row, wait in zip(receives, waits, strict=True)}
        self._leaving += zip(self._sends[step], self._traffic.post_sends(self._sends[step]), strict=True)

    def _clear_room(self, since: int) -> None:
        """Wait for all that has to do with what arrived at a step: its arrival, its sends, its kernel calls."""
        for key in [key for key in self._pending if key[1] == since]:
            self._await(key)
        self._finish_sends(lambda row: row.since == since)
        if since in self._read_until:
            self._streams.wait(self._read_until.pop(since))

    def _finish_sends(self, concerned: Callable[[Row], bool]) -> None:
        leaving, self._leaving = self._leaving, []
        for row, wait in leaving:
            if concerned(row):
                self._traffic.finish_send(row, wait)
            else:
                self._leaving.append((row, wait))

    def _compute(self, step: int) -> None:
        with self._streams.communicating():
            for call in self._calls[step]:
                for key in call.reads:
                    self._await(key)
            arrived = self._streams.mark()
        self._streams.wait(arrived)
        adds_at_home = any(place.since == HOME for call in self._calls[step] for place in call.adds)
        if adds_at_home and self._joined is not None:
            self._streams.wait(self._joined)
        for call in self._calls[step]:
            self._traffic.compute(call)
        self._computed[step] = read = self._streams.mark()
        if adds_at_home:
            self._computed[HOME] = read
        for call in self._calls[step]:
            self._read_until |= dict.fromkeys(call.since, read)

    def _await(self, key: tuple[int, int]) -> None:
        """Wait until a block is there; of a gradient, add up all that came together."""
        if key in self._pending:
            self._traffic.receive(*self._pending.pop(key))
        if key in self._unjoined:
            for added in (key[1], HOME):  # what comes home is added to what calls of any step may add to
                if added in self._computed:
                    self._streams.wait(self._computed[added])
            self._traffic.join(self._unjoined.pop(key))
            self._joined = self._streams.mark()


def _by_lane(rows: Iterable[Row]) -> dict[int, deque[Row]]:
    found: dict[int, deque[Row]] = defaultdict(deque)
    for row in rows:
        found[row.lane].append(row)
    return found


def _by_step(rows: Iterable[Row], steps: int) -> list[list[Row]]:
    found: list[list[Row]] = [[] for _ in range(steps)]
    for row in rows:
        found[row.step].append(row)
    return found
