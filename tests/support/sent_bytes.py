"""The bytes of data that this process sends by single messages; those by which ranks agree are no data."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.executor.messages import Message, Wait
from runtime.executor.transports import AGREEMENT_TAG, PointToPoint


class SentBytes:
    """Counts them from now on; `count` may be set."""

    def __init__(self) -> None:
        self.count = 0
        send = PointToPoint.send

        def counting(transport: PointToPoint, messages: Sequence[Message]) -> list[Wait]:
            self.count += sum(each.data.numel() for each in messages if each.tag != AGREEMENT_TAG)
            return send(transport, messages)

        PointToPoint.send = counting  # type: ignore[method-assign]
