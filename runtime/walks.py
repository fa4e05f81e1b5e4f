"""Two ways to walk the steps of one rank, chosen by what its transport needs.

*By lanes*, for transports of single messages: a thread per lane waits for what arrives on it; receives are posted
steps ahead; a block is sent the moment it has arrived and the lane's message before it is posted. No lane waits for
another. *By steps*, for transports of whole steps: a step is posted when all blocks that it sends have arrived.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from runtime.pulse import WORKING
from runtime.records import Received, Sent
from runtime.transport import Message, Transport, Wait
from tasp_lab.errors import RunError, first_line

Progress = Callable[[int], None]
"""Called whenever a rank got on or begins to wait, with the rank that it waits for or a state of `runtime.pulse`."""


class Row(NamedTuple):
    """One message of this rank, in or out."""

    step: int
    lane: int
    peer: int
    block: int


class Traffic:
    """What both walks do with messages: post them, wait for them, note when that was and who is to blame."""

    def __init__(self, rank: int, transport: Transport, message: Callable[[Row], Message], progress: Progress) -> None:
        self.rank = rank
        self.sent: list[Sent] = []
        self.received: list[Received] = []
        self._transport, self._message, self._progress = transport, message, progress
        self._leaving: list[tuple[Row, Wait]] = []
        self._waiting_for: dict[int, int] = {}
        self._began = 0.0

    def begin(self) -> None:
        """All times count from here."""
        self._began = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._began

    def post_receives(self, rows: Sequence[Row]) -> list[Wait]:
        try:
            return self._transport.receive([self._message(row) for row in rows])
        except RuntimeError as error:
            raise self._lost(rows[0], f"posting the receive of block {rows[0].block} from it", error) from None

    def post_sends(self, rows: Sequence[Row]) -> None:
        posted_s = self.now()
        try:
            waits = self._transport.send([self._message(row) for row in rows])
        except RuntimeError as error:
            if not rows:
                raise RunError(f"rank {self.rank}: lost a rank ({first_line(error)})") from None
            raise self._lost(rows[0], f"sending it block {rows[0].block}", error) from None
        self.sent += [Sent(row.step, row.lane, row.peer, row.block, posted_s) for row in rows]
        self._leaving += zip(rows, waits, strict=True)

    def receive(self, row: Row, wait: Wait) -> None:
        """Return when a block has arrived."""
        self._wait_for(row, f"waiting for block {row.block} from it", wait)
        self.received.append(Received(row.step, row.lane, row.peer, row.block, self.now()))

    def finish_sends(self) -> None:
        """Return when everything that was sent may be overwritten."""
        for row, wait in self._leaving:
            self._wait_for(row, f"waiting until it takes block {row.block}", wait)

    def _wait_for(self, row: Row, what: str, wait: Wait) -> None:
        self._waiting_for[row.lane] = row.peer
        self._progress(row.peer)
        try:
            wait()
        except RuntimeError as error:
            raise self._lost(row, what, error) from None
        del self._waiting_for[row.lane]
        self._progress(next(iter(list(self._waiting_for.values())), WORKING))

    def _lost(self, row: Row, what: str, error: RuntimeError) -> RunError:
        return RunError(f"rank {self.rank}, step {row.step}: lost rank {row.peer} {what} ({first_line(error)})")


class Walk(Protocol):
    """One rank's way through a schedule: `prepare` before all ranks start together, then `run`."""

    def prepare(self) -> None: ...
    def run(self) -> None: ...


class WalkByLanes:
    """A thread per lane on which something arrives."""

    def __init__(
        self, traffic: Traffic, sends: Iterable[Row], receives: Iterable[Row], held: set[int], steps_ahead: int
    ) -> None:
        self._traffic, self._held, self._ahead = traffic, held, steps_ahead
        self._outgoing = _by_lane(sends)
        self._incoming = _by_lane(receives)
        self._posted: dict[int, deque[tuple[Row, Wait]]] = {lane: deque() for lane in self._incoming}
        self._sending = threading.Lock()
        self._ended: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def prepare(self) -> None:
        for lane in self._incoming:
            self._post_receives(lane, up_to=self._ahead)

    def run(self) -> None:
        self._send_what_is_there()
        for lane in self._posted:
            threading.Thread(target=self._follow, args=(lane,), daemon=True, name=f"lane {lane}").start()
        for _ in self._posted:
            if (error := self._ended.get()) is not None:
                raise error

    def _follow(self, lane: int) -> None:
        """Take what arrives on a lane, in order, and send on what that makes possible."""
        posted = self._posted[lane]
        try:
            while posted:
                row, wait = posted.popleft()
                self._traffic.receive(row, wait)
                self._held.add(row.block)
                self._send_what_is_there()
                self._post_receives(lane, up_to=row.step + 1 + self._ahead)
        except Exception as error:
            self._ended.put(error)
        else:
            self._ended.put(None)

    def _post_receives(self, lane: int, up_to: int) -> None:
        """Post a lane's receives up to a step, and at least one."""
        incoming, posted = self._incoming[lane], self._posted[lane]
        while incoming and (incoming[0].step <= up_to or not posted):
            row = incoming.popleft()
            posted.append((row, self._traffic.post_receives([row])[0]))

    def _send_what_is_there(self) -> None:
        with self._sending:
            for rows in self._outgoing.values():
                while rows and rows[0].block in self._held:
                    self._traffic.post_sends([rows.popleft()])


class WalkBySteps:
    """Receives and sends of a step are posted together, when every block that it sends is there."""

    def __init__(self, traffic: Traffic, sends: Iterable[Row], receives: Iterable[Row], steps: int) -> None:
        self._traffic = traffic
        self._sends, self._receives = _by_step(sends, steps), _by_step(receives, steps)
        self._pending: dict[int, tuple[Row, Wait]] = {}

    def prepare(self) -> None:
        """Nothing: the receives of a step are posted with its sends."""

    def run(self) -> None:
        for sends, receives in zip(self._sends, self._receives, strict=True):
            for row in sends:
                self._await(row.block)
            waits = self._traffic.post_receives(receives)
            self._pending |= {row.block: (row, wait) for row, wait in zip(receives, waits, strict=True)}
            self._traffic.post_sends(sends)
        for block in list(self._pending):
            self._await(block)

    def _await(self, block: int) -> None:
        if block in self._pending:
            self._traffic.receive(*self._pending.pop(block))


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
