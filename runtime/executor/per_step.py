"""The per-step executor, for transports of whole steps.

The messages of a step are posted together, those of each channel as one batch, when all that they wait for has
happened. Its kernel calls are made while its messages are in flight. On a GPU nothing is waited for by the host: what
happens is queued on streams, one per channel and one per lane of calls, which wait for each other (`step_plans`). On a
host all calls are made by the calling thread, lane after lane.
"""

from __future__ import annotations

from typing import Any

from runtime.executor.message_io import MessageIO
from runtime.executor.plans import PlannedMessage
from runtime.executor.step_plans import COMPUTING, Batch, StepPlan
from runtime.executor.streams import Mark
from runtime.executor.transports import Wait
from tasp_lab.schedule.rank_part import CallRow


class PerStep:
    """Posts the receives and sends of a step together."""

    def __init__(self, message_io: MessageIO, plan: StepPlan) -> None:
        self._message_io, self._plan, self._streams = message_io, plan, message_io.streams
        self._waits: dict[int, Wait] = {}
        self._marks: list[Mark | None] = [None] * plan.marks

    def prepare(self) -> None:
        """No-op: the receives of a step are posted with its sends."""

    def run(self) -> None:
        do: tuple[Any, ...] = (
            self._post, self._receive, self._finish_send, self._message_io.join, self._compute, self._mark, self._after,
        )  # fmt: skip
        for stream, actions in self._plan.runs:
            streams = self._streams
            with streams.communicating(stream) if stream > COMPUTING else streams.computing(COMPUTING - stream):
                for kind, what in actions:
                    do[kind](what)

    def _post(self, batch: Batch) -> None:
        receives = self._message_io.post_receives(batch.receives, batch.channel)
        sends = self._message_io.post_sends(batch.sends, batch.channel)
        for message, wait in zip((*batch.receives, *batch.sends), (*receives, *sends), strict=True):
            self._waits[message.node] = wait

    def _receive(self, message: PlannedMessage) -> None:
        self._message_io.receive(message, self._waits.pop(message.node))

    def _finish_send(self, message: PlannedMessage) -> None:
        self._message_io.finish_send(message, self._waits.pop(message.node))

    def _compute(self, calls: tuple[CallRow, ...]) -> None:
        for row in calls:
            self._message_io.compute(row)

    def _mark(self, number: int) -> None:
        self._marks[number] = self._streams.mark()

    def _after(self, number: int) -> None:
        mark = self._marks[number]
        assert mark is not None, "marks are set before they are waited for"
        self._streams.wait(mark)
