"""How blocks are sent: a choice of the transport, never of the schedule.

A `Transport` posts what its rank receives and sends at a step and returns a handle per message. Two properties
tell the executor how to drive it: `receives_ahead` is by how many steps receives may be posted before the sends of
their step, and `whole_steps` says that the sends of a step must be posted together with its receives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Message:
    """One block on its way: `peer` is the other rank, `tag` tells messages between the same two ranks apart."""

    peer: int
    tag: int
    data: torch.Tensor


Wait = Callable[[], None]
"""Returns when the message has been received (or may be overwritten, for a send); raises what went wrong."""


class Transport(Protocol):
    """What the executor needs."""

    @property
    def receives_ahead(self) -> int: ...
    @property
    def whole_steps(self) -> bool: ...
    def receive(self, messages: Sequence[Message]) -> list[Wait]:
        """Post receives; for a transport of whole steps nothing moves before `send` of the same step."""
        ...

    def send(self, messages: Sequence[Message]) -> list[Wait]:
        """Post sends."""
        ...


class PointToPoint:
    """One isend or irecv per message, receives posted steps ahead. For gloo.

    Gloo answers a send with "ready to receive" over the connection that carries data the other way. Posted ahead,
    that answer is there before the send and does not queue behind data, which would halve a full-duplex link.
    """

    receives_ahead = 4
    whole_steps = False

    def __init__(self, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)

    def receive(self, messages: Sequence[Message]) -> list[Wait]:
        return [self._wait(dist.irecv(m.data, m.peer, tag=m.tag)) for m in messages]

    def send(self, messages: Sequence[Message]) -> list[Wait]:
        return [self._wait(dist.isend(m.data, m.peer, tag=m.tag)) for m in messages]

    def _wait(self, work: dist.Work | None) -> Wait:
        assert work is not None, "this process is not part of the group"
        return lambda: _wait_for(work, self._timeout)


class Batched:
    """One batch_isend_irecv per step, as NCCL and RCCL need it."""

    receives_ahead = 0
    whole_steps = True

    def __init__(self, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._operations: list[dist.P2POp] = []
        self._works: list[dist.Work] = []

    def receive(self, messages: Sequence[Message]) -> list[Wait]:
        self._works = []
        self._operations = [dist.P2POp(dist.irecv, m.data, m.peer, tag=m.tag) for m in messages]
        works = self._works
        return [lambda: _wait_for_all(works, self._timeout) for _ in messages]

    def send(self, messages: Sequence[Message]) -> list[Wait]:
        operations = self._operations + [dist.P2POp(dist.isend, m.data, m.peer, tag=m.tag) for m in messages]
        works, self._operations = self._works, []
        works.extend(dist.batch_isend_irecv(operations) if operations else ())
        return [lambda: _wait_for_all(works, self._timeout) for _ in messages]


class AllToAll:
    """One all_to_all_single per step, as TASP's reference sends a step. Every rank takes part in every step."""

    receives_ahead = 0
    whole_steps = True

    def __init__(self, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._incoming: Sequence[Message] = ()
        self._finish: list[Wait] = []

    def receive(self, messages: Sequence[Message]) -> list[Wait]:
        self._incoming, self._finish = sorted(messages, key=lambda m: (m.peer, m.tag)), []
        finish = self._finish
        return [lambda: finish[0]() for _ in messages]

    def send(self, messages: Sequence[Message]) -> list[Wait]:
        incoming, finish = self._incoming, self._finish
        outgoing = sorted(messages, key=lambda m: (m.peer, m.tag))
        packed = _pack(outgoing)
        arrived = torch.empty(sum(m.data.numel() for m in incoming), dtype=torch.uint8, device=packed.device)
        work = dist.all_to_all_single(arrived, packed, _splits(incoming), _splits(outgoing), async_op=True)
        assert work is not None
        unpacked: list[bool] = []

        def wait() -> None:
            if not unpacked:
                _wait_for(work, self._timeout)
                unpacked.append(True)
                _unpack(arrived, incoming)

        finish.append(wait)
        return [wait for _ in messages]


def _pack(messages: Sequence[Message]) -> torch.Tensor:
    return torch.cat([m.data for m in messages]) if messages else torch.empty(0, dtype=torch.uint8)


def _unpack(arrived: torch.Tensor, messages: Sequence[Message]) -> None:
    start = 0
    for message in messages:
        size = message.data.numel()
        message.data.copy_(arrived[start : start + size])
        start += size


def _splits(messages: Sequence[Message]) -> list[int]:
    sizes = [0] * dist.get_world_size()
    for message in messages:
        sizes[message.peer] += message.data.numel()
    return sizes


def _wait_for(work: dist.Work, timeout: timedelta) -> None:
    work.wait(timeout)
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


def _wait_for_all(works: list[dist.Work], timeout: timedelta) -> None:
    while works:
        _wait_for(works[-1], timeout)
        works.pop()


TRANSPORTS: dict[str, Callable[[float], Transport]] = {
    "p2p": PointToPoint,
    "batched": Batched,
    "all-to-all": AllToAll,
}
"""Ways of sending over a process group by name; each is built with a timeout in seconds."""
