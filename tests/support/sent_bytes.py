"""The bytes of data that this process sends by single messages; those by which ranks agree are no data."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.executor.kept import release_memory
from runtime.executor.messages import Message, Post, Wait
from runtime.executor.transports import AGREEMENT_TAG, PointToPoint


class SentBytes:
    """Counts them from now on; `count` may be set."""

    def __init__(self) -> None:
        self.count = 0
        bind = PointToPoint.bind

        def counting(transport: PointToPoint, receives: Sequence[Message], sends: Sequence[Message]) -> Post:
            post = bind(transport, receives, sends)
            size_bytes = sum(each.data.numel() for each in sends if each.tag != AGREEMENT_TAG)

            def count() -> Sequence[Wait]:
                self.count += size_bytes
                return post()

            return count

        PointToPoint.bind = counting  # type: ignore[method-assign]
        release_memory()  # executors of earlier runs are bound already
