"""Traffic: what every walk through a schedule does. It posts messages, waits, computes, and notes when that was.

When a transfer fails, the rank at its other end is the one that was lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from runtime.pulse import WORKING
from runtime.records import Computed, Received, Sent
from runtime.streams import HostStreams, Mark, Streams
from runtime.transport import Message, Transport, Wait
from tasp_lab.errors import RunError, first_line
from tasp_lab.rooms import CallRow, RankPart, Row, Sum

Progress = Callable[[int], None]
"""Called whenever a rank got on or begins to wait, with the rank that it waits for or a state of `runtime.pulse`."""

Compute = Callable[[CallRow], None]
"""Makes a kernel call, or what stands for it; on a GPU it only queues it."""


Join = Callable[[Sum], None]
"""Adds up what has come together of a gradient."""


class Walk(Protocol):
    """One rank's way through a schedule: `prepare` before all ranks start together, then `run`."""

    def prepare(self) -> None: ...
    def run(self) -> None: ...


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
