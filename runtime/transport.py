"""How blocks are sent: a choice of the transport, never of the schedule.

A `Transport` posts messages and returns a wait per message. Two properties tell the executor how to drive it:
`receives_ahead` is by how many steps receives may be posted before their turn, and `whole_steps` says that the
receives and then the sends of a step must be posted together, by every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from tasp_lab.errors import RunError


class Message(NamedTuple):
    """One block on its way: `peer` is the other rank, `tag` tells messages between the same two ranks apart."""

    peer: int
    tag: int
    data: torch.Tensor


Group = dist.ProcessGroup | None
"""A process group, None for that of all ranks. Peers are ranks within it."""

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

    def __init__(self, timeout_s: float, group: Group, place: torch.device) -> None:
        self._timeout, self._group = _timeout(timeout_s, place), group

    def receive(self, messages: Sequence[Message]) -> list[Wait]:
        return [self._wait(dist.irecv(m.data, group=self._group, group_src=m.peer, tag=m.tag)) for m in messages]

    def send(self, messages: Sequence[Message]) -> list[Wait]:
        return [self._wait(dist.isend(m.data, group=self._group, group_dst=m.peer, tag=m.tag)) for m in messages]

    def _wait(self, work: dist.Work | None) -> Wait:
        assert work is not None, "this process is not part of the group"
        return lambda: wait_for(work, self._timeout)


class Batched:
    """One batch_isend_irecv per step, as NCCL and RCCL need it."""

    receives_ahead = 0
    whole_steps = True

    def __init__(self, timeout_s: float, group: Group, place: torch.device) -> None:
        self._timeout, self._group = _timeout(timeout_s, place), group
        self._receives: list[dist.P2POp] = []
        self._step = _Once()

    def receive(self, messages: Sequence[Message]) -> list[Wait]:
        self._step = _Once()
        self._receives = [
            dist.P2POp(dist.irecv, m.data, group=self._group, group_peer=m.peer, tag=m.tag) for m in messages
        ]
        return [self._step.wait] * len(messages)

    def send(self, messages: Sequence[Message]) -> list[Wait]:
        operations = self._receives + [self._operation(dist.isend, message) for message in messages]
        works = dist.batch_isend_irecv(operations) if operations else []

        def finish() -> None:
            for work in works:
                wait_for(work, self._timeout)

        self._step.finish = finish
        return [self._step.wait] * len(messages)

    def _operation(self, call: Callable[..., object], message: Message) -> dist.P2POp:
        return dist.P2POp(call, message.data, group=self._group, group_peer=message.peer, tag=message.tag)


class AllToAll:
    """One all_to_all_single per step, as TASP's reference sends a step. Every rank takes part in every step."""

    receives_ahead = 0
    whole_steps = True

    def __init__(self, timeout_s: float, group: Group, place: torch.device) -> None:
        self._timeout, self._group = _timeout(timeout_s, place), group
        self._world_size = dist.get_world_size(group)
        self._nothing = torch.empty(0, dtype=torch.uint8, device=place)
        self._incoming: list[Message] = []
        self._step = _Once()

    def receive(self, messages: Sequence[Message]) -> list[Wait]:
        self._step = _Once()
        self._incoming = _in_order(messages)
        return [self._step.wait] * len(messages)

    def send(self, messages: Sequence[Message]) -> list[Wait]:
        incoming, outgoing = self._incoming, _in_order(messages)
        packed = torch.cat([self._nothing, *(m.data for m in outgoing)])
        arrived = torch.empty(sum(m.data.numel() for m in incoming), dtype=torch.uint8, device=packed.device)
        splits = self._splits(incoming), self._splits(outgoing)
        work = dist.all_to_all_single(arrived, packed, *splits, group=self._group, async_op=True)
        assert work is not None, "this process is not part of the group"

        def finish() -> None:
            wait_for(work, self._timeout)
            _unpack(arrived, incoming)

        self._step.finish = finish
        return [self._step.wait] * len(messages)

    def _splits(self, messages: Sequence[Message]) -> list[int]:
        """How many bytes go to, or come from, each rank."""
        sizes = [0] * self._world_size
        for message in messages:
            sizes[message.peer] += message.data.numel()
        return sizes


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


def _unpack(arrived: torch.Tensor, messages: Sequence[Message]) -> None:
    start = 0
    for message in messages:
        size = message.data.numel()
        message.data.copy_(arrived[start : start + size])
        start += size


def device() -> str:
    """Where this rank's blocks live: its GPU for NCCL and RCCL, else the host."""
    return f"cuda:{torch.cuda.current_device()}" if dist.get_backend() == "nccl" else "cpu"


def _timeout(timeout_s: float, place: torch.device) -> timedelta | None:
    """None on a GPU: given a timeout, NCCL's `wait` blocks the host; without, the group's own timeout applies."""
    return timedelta(seconds=timeout_s) if place.type == "cpu" else None


def wait_for(work: dist.Work, timeout: timedelta | None) -> None:
    """On a host, return when the work is done; on a GPU (no timeout), let the current stream wait for it.

    Raises `RuntimeError` when it failed or took too long.
    """
    if timeout is None:
        work.wait()
    else:
        work.wait(timeout)


TRANSPORTS: dict[str, Callable[[float, Group, torch.device], Transport]] = {
    "p2p": PointToPoint,
    "batched": Batched,
    "all-to-all": AllToAll,
}
"""Ways of sending over a process group by name, built with a timeout in seconds, the group, and where blocks are."""


def make_transport(name: str, timeout_s: float, group: Group = None, place: torch.device | None = None) -> Transport:
    """A transport by name; ``auto`` is ``p2p`` on a host (gloo) and ``batched`` on a GPU (NCCL).

    What decides is where the blocks are, `device` if not given: a group may have a backend for each kind of device.

    Raises `RunError` for a name there is none of, for a group that cannot send from there, and for ``p2p`` on a GPU,
    where a receive that is posted ahead would block the sends behind it.
    """
    if name != "auto" and name not in TRANSPORTS:
        raise RunError(f"unknown transport {name!r}, expected auto, {', '.join(TRANSPORTS)}")
    place = place or torch.device(device())
    backend, on_gpu = dist.get_backend(group), place.type == "cuda"
    if backend == ("gloo" if on_gpu else "nccl"):
        raise RunError(f"a group of backend {backend} cannot send tensors on {place}")
    if on_gpu and name == "p2p":
        raise RunError("the transport p2p is for gloo; NCCL needs batched or all-to-all")
    return TRANSPORTS[("batched" if on_gpu else "p2p") if name == "auto" else name](timeout_s, group, place)
