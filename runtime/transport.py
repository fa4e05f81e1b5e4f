"""How blocks are sent: a choice of the transport, never of the schedule.

A `Transport` posts messages and returns a wait per message. Two properties tell the executor how to drive it:
`receives_ahead` is by how many steps receives may be posted before their turn, and `whole_steps` says that the
receives and then the sends of a step must be posted together, by every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from tasp_lab.errors import RunError


@dataclass(frozen=True, slots=True)
class Message:
    """One block on its way: `peer` is the other rank, `tag` tells messages between the same two ranks apart."""

    peer: int
    tag: int
    data: torch.Tensor


Wait = Callable[[], None]
"""Returns when the message has been received (or may be overwritten, for a send); raises what went wrong."""


class Transport(Protocol):
    """What the executor needs. Both calls raise `RuntimeError` when a peer is gone."""

    @property
    def receives_ahead(self) -> int: ...
    @property
    def whole_steps(self) -> bool: ...
    def receive(self, messages: Sequence[Message]) -> list[Wait]: ...
    def send(self, messages: Sequence[Message]) -> list[Wait]: ...


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
        return lambda: wait_for(work, self._timeout)


class Batched:
    """One batch_isend_irecv per step, as NCCL and RCCL need it."""

    receives_ahead = 0
    whole_steps = True

    def __init__(self, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._receives: list[dist.P2POp] = []
        self._step = _Once()

    def receive(self, messages: Sequence[Message]) -> list[Wait]:
        self._step = _Once()
        self._receives = [dist.P2POp(dist.irecv, m.data, m.peer, tag=m.tag) for m in messages]
        return [self._step.wait] * len(messages)

    def send(self, messages: Sequence[Message]) -> list[Wait]:
        operations = self._receives + [dist.P2POp(dist.isend, m.data, m.peer, tag=m.tag) for m in messages]
        works = dist.batch_isend_irecv(operations) if operations else []

        def finish() -> None:
            for work in works:
                wait_for(work, self._timeout)

        self._step.finish = finish
        return [self._step.wait] * len(messages)


class AllToAll:
    """One all_to_all_single per step, as TASP's reference sends a step. Every rank takes part in every step."""

    receives_ahead = 0
    whole_steps = True

    def __init__(self, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._incoming: list[Message] = []
        self._step = _Once()

    def receive(self, messages: Sequence[Message]) -> list[Wait]:
        self._step = _Once()
        self._incoming = _in_order(messages)
        return [self._step.wait] * len(messages)

    def send(self, messages: Sequence[Message]) -> list[Wait]:
        incoming, outgoing = self._incoming, _in_order(messages)
        packed = torch.cat([_nothing(), *(m.data for m in outgoing)])
        arrived = torch.empty(sum(m.data.numel() for m in incoming), dtype=torch.uint8, device=packed.device)
        work = dist.all_to_all_single(arrived, packed, _splits(incoming), _splits(outgoing), async_op=True)
        assert work is not None, "this process is not part of the group"

        def finish() -> None:
            wait_for(work, self._timeout)
            _unpack(arrived, incoming)

        self._step.finish = finish
        return [self._step.wait] * len(messages)


class _Once:
    """A wait that many messages share: the first caller does the work."""

    def __init__(self) -> None:
        self.finish: Callable[[], object] | None = None

    def wait(self) -> None:
        if self.finish is not None:
            finish, self.finish = self.finish, None
            finish()


def _in_order(messages: Sequence[Message]) -> list[Message]:
    """The order in which both ends pack messages: by peer, then by tag."""
    return sorted(messages, key=lambda m: (m.peer, m.tag))


def _nothing() -> torch.Tensor:
    """No bytes, where this rank's blocks live."""
    return torch.empty(0, dtype=torch.uint8, device=device())


def _splits(messages: Sequence[Message]) -> list[int]:
    """How many bytes go to, or come from, each rank."""
    sizes = [0] * dist.get_world_size()
    for message in messages:
        sizes[message.peer] += message.data.numel()
    return sizes


def _unpack(arrived: torch.Tensor, messages: Sequence[Message]) -> None:
    start = 0
    for message in messages:
        size = message.data.numel()
        message.data.copy_(arrived[start : start + size])
        start += size


def device() -> str:
    """Where this rank's blocks live: its GPU for NCCL and RCCL, else the host."""
    return f"cuda:{torch.cuda.current_device()}" if dist.get_backend() == "nccl" else "cpu"


def wait_for(work: dist.Work, timeout: timedelta) -> None:
    """Return when the work is done, on the GPU too; raises `RuntimeError` when it failed or took too long."""
    work.wait(timeout)
    if dist.get_backend() == "nccl":
        torch.cuda.current_stream().synchronize()


TRANSPORTS: dict[str, Callable[[float], Transport]] = {
    "p2p": PointToPoint,
    "batched": Batched,
    "all-to-all": AllToAll,
}
"""Ways of sending over a process group by name; each is built with a timeout in seconds."""


def make_transport(name: str, timeout_s: float) -> Transport:
    """A transport by name; ``auto`` is ``p2p`` for gloo and ``batched`` for NCCL.

    Raises `RunError` for ``p2p`` on NCCL, where a receive that is posted ahead would block the sends behind it.
    """
    nccl = dist.get_backend() == "nccl"
    if nccl and name == "p2p":
        raise RunError("the transport p2p is for gloo; NCCL needs batched or all-to-all")
    return TRANSPORTS[("batched" if nccl else "p2p") if name == "auto" else name](timeout_s)
