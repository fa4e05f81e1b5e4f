"""Message I/O of one rank: posts messages, waits for them, makes kernel calls and joins, and records times.

It is shared by the per-lane and the per-step executor. When a transfer fails, its peer is reported as the lost rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from runtime.executor.copies import Copies
from runtime.executor.streams import HostStreams, Mark, Streams
from runtime.executor.transports import Message, Transport, Wait
from runtime.protocol.heartbeat import WORKING
from runtime.protocol.records import Computed, Received, Sent
from tasp_lab.errors import RunError, first_line
from tasp_lab.schedule.rank_part import CallRow, Join, RankPart, Row

Progress = Callable[[int], None]
"""Called when a rank progresses or begins to wait, with the awaited rank or a state of `runtime.protocol.heartbeat`."""


class Strategy(Protocol):
    """An order in which one rank executes its part: `prepare` before the common start of all ranks, then `run`."""

    def prepare(self) -> None: ...
    def run(self) -> None: ...


class MessageIO:
    """Posts messages, waits for them, makes kernel calls, records their times, and reports lost ranks."""

    def __init__(
        self,
        part: RankPart,
        transport: Transport,
        lanes: int,
        copies: Copies,
        progress: Progress,
        streams: Streams | None = None,
    ) -> None:
        self.part, self._lanes, self._copies = part, lanes, copies
        self.streams = streams or HostStreams()
        self._transport, self._progress = transport, progress
        self._sent: list[tuple[Row, Mark]] = []
        self._received: list[tuple[Row, Mark]] = []
        self._computed: list[tuple[CallRow, Mark, Mark]] = []
        self._in_flight: dict[int, Message] = {}
        self._waiting_for: dict[tuple[str, int], int] = {}
        self._computing = False

    def post_receives(self, rows: Sequence[Row]) -> list[Wait]:
        try:
            return self._transport.receive([self._message(row) for row in rows])
        except RuntimeError as error:
            raise self._lost(rows[0], f"posting the receive of block {rows[0].block} from it", error) from None

    def post_sends(self, rows: Sequence[Row]) -> list[Wait]:
        posted = self.streams.mark()
        messages = [self._message(row) for row in rows]
        self._in_flight |= zip((row.operation for row in rows), messages, strict=True)
        try:
            waits = self._transport.send(messages)
        except RuntimeError as error:
            if not rows:
                raise RunError(f"rank {self.part.rank}: lost a rank ({first_line(error)})") from None
            raise self._lost(rows[0], f"sending it block {rows[0].block}", error) from None
        self._sent += [(row, posted) for row in rows]
        return waits

    def receive(self, row: Row, wait: Wait) -> None:
        """Wait until a block has arrived."""
        self._wait_for("in", row, f"waiting for block {row.block} from it", wait)
        self._received.append((row, self.streams.mark()))

    def finish_send(self, row: Row, wait: Wait) -> None:
        """Wait until a sent block may be overwritten."""
        self._wait_for("out", row, f"waiting until it takes block {row.block}", wait)
        del self._in_flight[row.operation]  # what was gathered for it
        self._copies.given(row)

    def join(self, each: Join) -> None:
        """Join what came to a copy at a step."""
        self._copies.join(each)

    def compute(self, row: CallRow) -> None:
        began = self.streams.mark()
        self._computing = True
        self._report()
        self._copies.compute(row)
        self._computing = False
        self._report()
        self._computed.append((row, began, self.streams.mark()))

    def sent(self) -> tuple[Sent, ...]:
        return tuple(Sent(row.step, row.lane, row.peer, row.block, posted()) for row, posted in self._sent)

    def received(self) -> tuple[Received, ...]:
        return tuple(Received(row.step, row.lane, row.peer, row.block, noticed()) for row, noticed in self._received)

    def computed(self) -> tuple[Computed, ...]:
        return tuple(
            Computed(row.step, row.kernel, row.block, row.flops, began(), ended())
            for row, began, ended in self._computed
        )

    def _message(self, row: Row) -> Message:
        return Message(row.peer, row.step * self._lanes + row.lane, self._copies.message(row))

    def _wait_for(self, direction: str, row: Row, what: str, wait: Wait) -> None:
        self._waiting_for[direction, row.lane] = row.peer
        self._report()
        try:
            wait()
        except RuntimeError as error:
            raise self._lost(row, what, error) from None
        del self._waiting_for[direction, row.lane]
        self._report()

    def _report(self) -> None:
        """Report progress. A rank that computes is reported as working, even if its lanes wait for a peer."""
        waiting_for = list(self._waiting_for.values())
        self._progress(WORKING if self._computing or not waiting_for else waiting_for[0])

    def _lost(self, row: Row, what: str, error: RuntimeError) -> RunError:
        return RunError(f"rank {self.part.rank}, step {row.step}: lost rank {row.peer} {what} ({first_line(error)})")
