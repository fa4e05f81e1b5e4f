"""The per-step executor, for transports of whole steps.

The messages of a step are posted together, those of each channel as one batch, when all that they wait for has
happened. Its kernel calls are made while its messages are in flight. On a GPU nothing is waited for by the host: what
happens is queued on streams, one per channel and one per lane of calls, which wait for each other (`step_plans`). On a
host all is done by the calling thread, lane after lane.
"""

from __future__ import annotations

from typing import Any

from runtime.executor.message_io import MessageIO
from runtime.executor.plans import PlannedMessage
from runtime.executor.step_plans import CALLS, COMPUTING, FINISHES, POST, RECEIVES, Batch, StepPlan
from runtime.executor.streams import Mark
from runtime.executor.transports import Wait
from tasp_lab.schedule.rank_part import CallRow


class PerStep:
    """Posts the receives and sends of a step together. Waits are kept until the next run (`transports.Wait`)."""

    def __init__(self, message_io: MessageIO, plan: StepPlan) -> None:
        self._message_io, self._plan = message_io, plan
        self._waits: dict[int, Wait] = {}
        self._marks: list[Mark | None] = [None] * plan.marks

    def prepare(self) -> None:
        """No-op: the receives of a step are posted with its sends."""

    def run(self) -> None:
        self._streams = self._message_io.streams
        (self._run_on_streams if self._streams.queues else self._run_on_host)()

    def _run_on_host(self) -> None:
        io, waits = self._message_io, self._waits
        for kind, what in self._plan.on_host:
            if kind == RECEIVES:
                io.receive_all(what, waits)
            elif kind == POST:
                self._post(what)
            elif kind == CALLS:
                self._compute(what)
            elif kind == FINISHES:
                io.finish_all(what, waits)
            else:
                io.join(what)

    def _run_on_streams(self) -> None:
        do: tuple[Any, ...] = (
            self._post, self._receive, self._finish_send, self._message_io.join, self._compute, self._mark, self._after,
        )  # fmt: skip
        for stream, actions in self._plan.runs:
            streams = self._streams
            with streams.communicating(stream) if stream > COMPUTING else streams.computing(COMPUTING - stream):
                for kind, what in actions:
                    do[kind](what)

    def _post(self, batch: Batch) -> None:
        io = self._message_io
        received = io.post_receives(batch.receives, batch.channel)
        sent = io.post_sends(batch.sends, batch.channel)
        self._waits.update(zip(batch.nodes, (*received, *sent), strict=True))

    def _receive(self, message: PlannedMessage) -> None:
        self._message_io.receive(message, self._waits[message.node])

    def _finish_send(self, message: PlannedMessage) -> None:
        self._message_io.finish_send(message, self._waits[message.node])

    def _compute(self, calls: tuple[CallRow, ...]) -> None:
        for row in calls:
            self._message_io.compute(row)

    def _mark(self, number: int) -> None:
        self._marks[number] = self._streams.mark()

    def _after(self, number: int) -> None:
        mark = self._marks[number]
        assert mark is not None, "marks are set before they are waited for"
        self._streams.wait(mark)
