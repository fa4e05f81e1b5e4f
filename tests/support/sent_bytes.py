"""The bytes that this process sends by single messages."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.executor.transports import Message, PointToPoint, Wait


class SentBytes:
    """Counts them from now on; `count` may be set."""

    def __init__(self) -> None:
        self.count = 0
        send = PointToPoint.send

        def counting(transport: PointToPoint, messages: Sequence[Message]) -> list[Wait]:
            self.count += sum(each.data.numel() for each in messages)
            return send(transport, messages)

        PointToPoint.send = counting  # type: ignore[method-assign]
