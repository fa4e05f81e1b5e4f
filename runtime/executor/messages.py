"""What transports and executors have in common: messages, waits for them, lost peers, and the interface of a transport.

A transport is bound to messages, and then posts them in each run. Posting returns a wait for each message, which blocks
until that message has arrived or has been sent::

    post = transport.bind(receives=[Message(peer=1, tag=0, data=memory)], sends=[])
    for wait in post():
        wait()
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from runtime.executor.plans import PlannedMessage
from runtime.executor.streams import Streams
from tasp_lab.core.errors import RunError, first_line
from tasp_lab.schedule.rank_part import RankPart
from tasp_lab.schedule.schedule import Schedule

Result = TypeVar("Result")


@dataclass(eq=False, slots=True)
class Message:
    """Data in transit: `peer` is the other rank, `tag` distinguishes messages between the same two ranks.

    `planned` is the entry of the plan that it was made from.
    """

    peer: int
    tag: int
    data: torch.Tensor
    channel: int = 0
    planned: PlannedMessage | None = None


Group = dist.ProcessGroup | None
"""A process group; None is the group of all ranks. Peers are ranks within it."""


def group_of(group: Group) -> dist.ProcessGroup:
    """The group, that of all ranks for None."""
    found = group or dist.group.WORLD
    assert found is not None, "there is a process group"
    return found


Wait = Callable[[], object]
"""Blocks until the message has been received (or, for a send, may be overwritten). Raises `LostPeer` or torch's error.

Executors keep waits until the next run. They hold the works of torch, and to free one of gloo's right after it has
ended contends with gloo's own thread for its lock: a message then costs twice the processor time.
"""


Post = Callable[[], Sequence[Wait]]
"""Posts the messages that it is bound to; returns a wait for each, those of receives first, or one for all of them
(`Transport.waits_once`). Raises `LostPeer`."""


def no_wait() -> None:
    """A wait that is over: the stream itself waits for the message."""


class LostPeer(Exception):  # noqa: N818
    """A call of `torch.distributed` failed because a peer is lost, or does not answer in time.

    `number` is that of the message, among those that were to be posted together.
    """

    def __init__(self, reason: str, number: int = 0) -> None:
        super().__init__(reason)
        self.number = number

    @property
    def is_late(self) -> bool:
        """Whether the peer may still be there. Gloo has words for it but no type, NCCL ends the process."""
        return "timed out" in str(self).lower() or "application timeout" in str(self).lower()


class LostRankError(RunError):
    """A rank is lost; or it `is_late`, and has not sent or received a message in time."""

    def __init__(self, message: str, is_late: bool = False) -> None:
        super().__init__(message)
        self.is_late = is_late


def lost_peer(error: Exception, on_gpu: bool, number: int = 0) -> LostPeer | None:
    """The error of a peer that a call of `torch.distributed` has raised, None for an error of this rank.

    torch raises `DistError` for what NCCL and RCCL report; for gloo it raises a plain `RuntimeError`. Memory that is
    exhausted and kernels that fail (`torch.OutOfMemoryError`, `torch.AcceleratorError`, on a GPU also a plain
    `RuntimeError`) are errors of this rank.
    """
    if isinstance(error, LostPeer):
        return error
    is_lost = isinstance(error, dist.DistError) or (type(error) is RuntimeError and not on_gpu)
    return LostPeer(reason_of(error), number) if is_lost else None


def call_peers(on_gpu: bool, function: Callable[..., Result], *arguments: object, **options: object) -> Result:
    """The result of a call of `torch.distributed`. Raises `LostPeer` as `lost_peer` tells errors apart."""
    try:
        return function(*arguments, **options)
    except RuntimeError as error:
        if lost := lost_peer(error, on_gpu):
            raise lost from None
        raise


def call_all(when: str, function: Callable[..., Result], *arguments: object, **options: object) -> Result:
    """The result of a collective call of all ranks. Raises `RunError` if one is lost; `when` says in words when."""
    try:
        return call_peers(dist.get_backend() == "nccl", function, *arguments, **options)
    except LostPeer as error:
        raise RunError(f"rank {dist.get_rank()}: lost a rank {when} ({error})") from None


def reason_of(error: Exception) -> str:
    """The first line of an error, and the last error that NCCL or RCCL append to theirs.

    >>> reason_of(ValueError("NCCL error in: x.cpp:94\\nncclInvalidUsage: ...\\nLast error:\\nDuplicate GPU detected"))
    'NCCL error in: x.cpp:94: Duplicate GPU detected'
    """
    _, _, last = str(error).partition("Last error:")
    return ": ".join([first_line(error), *last.split("\n")[1:2]])


class Transport:
    """How the messages of a schedule are sent; by default one batch per step, in memory that may lie anywhere.

    `receives_ahead` is the number of steps by which receives may be posted early. With `whole_steps` every rank posts
    the receives and then the sends of a step together, and with `channels` those of each channel of a step
    (`tasp_lab.schedule.dependencies`), where it has messages. Messages of `short_bytes` and less take no longer than to
    hand over to another thread; with 0 that takes no time, so every lane has a thread. With `waits_once` messages that
    are posted together have one wait. `waited_on_gpu` is the group whose messages GPUs wait for; None if hosts do,
    which see that a rank is lost.
    """

    receives_ahead = 0
    whole_steps = True
    channels = False
    short_bytes = 0
    waits_once = False
    waited_on_gpu: dist.ProcessGroup | None = None

    @property
    def key(self) -> Hashable:
        """Equal for transports that an executor can use one after the other."""
        return id(self)

    def use(self, connections: dist.ProcessGroup) -> None:
        """Send over these connections of the hosts of the group from now on."""

    def take(self, schedule: Schedule, part: RankPart, device: torch.device) -> torch.Tensor:
        """The memory of a run, bytes of arbitrary content, for work in the current stream; a collective call."""
        return torch.empty(part.memory_bytes, dtype=torch.uint8, device=device)

    def give_back(self, memory: torch.Tensor) -> None:
        """End the use of a memory, when all that reads or writes it is queued in the current stream."""

    def open(self, channels: int, memory: torch.Tensor, streams: Streams) -> None:
        """Make what each channel needs; a collective call, made before the messages of a run, which has a memory."""

    def renew(self, other: Transport) -> None:
        """Send for the call of another transport of the same `key` from now on."""

    def bind(self, receives: Sequence[Message], sends: Sequence[Message]) -> Post:
        """What posts messages together in each run: here by `receive` and `send`, which make everything anew.

        With `whole_steps` both ends may be empty on a rank that takes part in a step without messages.
        """

        def post() -> Sequence[Wait]:
            waits = self.receive(receives)
            try:
                return [*waits, *self.send(sends)]
            except LostPeer as error:
                error.number += len(receives)
                raise

        return post

    def receive(self, messages: Sequence[Message]) -> Sequence[Wait]:
        """Post receives once. Raises `LostPeer`, as `send` does."""
        raise NotImplementedError

    def send(self, messages: Sequence[Message]) -> Sequence[Wait]:
        """Post sends once, and with `whole_steps` the receives before them."""
        raise NotImplementedError
