"""A simulated NCCL: pairs the sends and receives of all ranks as NCCL does, and finds deadlocks.

`tests.support.recorded_calls` records the calls that the per-step executor makes.

What is modelled:

- Operations of one communicator execute in the order in which they were issued, as they share a stream. A group of
  sends and receives therefore begins when the previous group of its rank has ended.
- Operations of one group progress independently, except those with the same peer, which execute in order; the group
  ends when all have ended.
- There are no tags: the k-th send of a rank to a peer meets the k-th receive of that peer from it. Both must have the
  same size.
- A send ends when its receive is posted (rendezvous). NCCL may buffer small messages, which lets groups end earlier
  only: calls that complete here complete with any buffering.
- Every rank makes every collective call, in the same order: the k-th calls of all ranks are one collective. What one
  rank expects from another is what that one sends.

Source: NVIDIA, NCCL user guide, "Point-to-point communication" and "CUDA Stream Semantics",
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/p2p.html; for collectives the documentation of
`torch.distributed`, whose all-to-all is called by every rank of the group.

Not modelled: times, what is in the messages, several communicators, the limit of operations per group.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class NcclError(Exception):
    """Calls that do not match between ranks, or that never end."""


class Operation(NamedTuple):
    """One end of a message. The tag and the block are not known to NCCL; they tell whether it pairs the right ends."""

    peer: int
    tag: int
    block: int
    size_bytes: int


class Group(NamedTuple):
    """The operations of one rank that are issued together, in their order."""

    receives: tuple[Operation, ...]
    sends: tuple[Operation, ...]


class AllToAllCall(NamedTuple):
    """One rank's call of an all-to-all: its messages in packing order, and the bytes from and to each rank."""

    messages: Group
    receive_splits: tuple[int, ...]
    send_splits: tuple[int, ...]


class Delivered(NamedTuple):
    """A message that arrived."""

    source: int
    destination: int
    tag: int
    block: int
    size_bytes: int


def run_groups(groups_of_ranks: Sequence[Sequence[Group]]) -> list[Delivered]:
    """Execute the groups of all ranks.

    Raises `NcclError` for two paired ends that differ, for an end without the other one, and for a deadlock.
    """
    run = _Run(groups_of_ranks)
    run.advance_all()
    run.check_ended()
    return run.delivered


def run_all_to_alls(calls_of_ranks: Sequence[Sequence[AllToAllCall]]) -> list[Delivered]:
    """Execute the all-to-all calls of all ranks.

    Raises `NcclError` if ranks differ in their number of calls, and for splits or messages that differ between ends.
    """
    counts = [len(calls) for calls in calls_of_ranks]
    if len(set(counts)) > 1:
        raise NcclError(f"ranks make {counts} all-to-all calls, expected the same number")
    return [
        delivered
        for index, calls in enumerate(zip(*calls_of_ranks, strict=True))
        for source in range(len(calls))
        for destination in range(len(calls))
        for delivered in _exchange(index, calls, source, destination)
    ]


class _Run:
    """The execution of groups: the group of each rank that is under way, and the ends that wait for the other one."""

    def __init__(self, groups_of_ranks: Sequence[Sequence[Group]]) -> None:
        self.delivered: list[Delivered] = []
        self._later = [deque(groups) for groups in groups_of_ranks]
        self._open = [0] * len(groups_of_ranks)
        self._sends: defaultdict[tuple[int, int], deque[Operation]] = defaultdict(deque)
        self._receives: defaultdict[tuple[int, int], deque[Operation]] = defaultdict(deque)

    def advance_all(self) -> None:
        """Begin groups until no rank can begin another one."""
        while able := [rank for rank, later in enumerate(self._later) if later and not self._open[rank]]:
            for rank in able:
                self._begin(rank, self._later[rank].popleft())

    def _begin(self, rank: int, group: Group) -> None:
        """Post the operations of a group and pair them with those that are posted."""
        self._open[rank] = len(group.sends) + len(group.receives)
        for send in group.sends:
            self._sends[rank, send.peer].append(send)
        for receive in group.receives:
            self._receives[receive.peer, rank].append(receive)
        pairs = [(rank, send.peer) for send in group.sends] + [(receive.peer, rank) for receive in group.receives]
        for source, destination in dict.fromkeys(pairs):
            self._pair(source, destination)

    def _pair(self, source: int, destination: int) -> None:
        sends, receives = self._sends[source, destination], self._receives[source, destination]
        while sends and receives:
            self.delivered.append(_delivery(source, destination, sends.popleft(), receives.popleft()))
            self._open[source] -= 1
            self._open[destination] -= 1

    def check_ended(self) -> None:
        """Raise `NcclError` if an operation waits for the other end."""
        self._check_counterparts()
        waiting = [rank for rank, operations in enumerate(self._open) if operations]
        if waiting:
            raise NcclError(f"deadlock: ranks {waiting} each wait for a group that another one has not begun")

    def _check_counterparts(self) -> None:
        """Raise `NcclError` unless as many receives as sends of each pair are left, issued or not."""
        surplus: defaultdict[tuple[int, int], int] = defaultdict(int)
        for source, destination, sign in self._left():
            surplus[source, destination] += sign
        for (source, destination), count in surplus.items():
            if count:
                missing = "receives" if count > 0 else "sends"
                raise NcclError(f"{abs(count)} {missing} missing of the messages from rank {source} to {destination}")

    def _left(self) -> Iterator[tuple[int, int, int]]:
        """Source, destination and sign (1 for a send, -1 for a receive) of each operation that has not ended."""
        for sign, queues in ((1, self._sends), (-1, self._receives)):
            for (source, destination), queue in queues.items():
                yield from [(source, destination, sign)] * len(queue)
        for rank, groups in enumerate(self._later):
            for group in groups:
                yield from ((rank, send.peer, 1) for send in group.sends)
                yield from ((receive.peer, rank, -1) for receive in group.receives)


def _exchange(index: int, calls: Sequence[AllToAllCall], source: int, destination: int) -> list[Delivered]:
    """The messages from one rank to another in one collective."""
    sent, expected = calls[source].send_splits[destination], calls[destination].receive_splits[source]
    if sent != expected:
        raise NcclError(
            f"call {index}: rank {source} sends {sent} bytes to rank {destination}, which expects {expected}"
        )
    sends = [each for each in calls[source].messages.sends if each.peer == destination]
    receives = [each for each in calls[destination].messages.receives if each.peer == source]
    if len(sends) != len(receives):
        raise NcclError(
            f"call {index}: rank {source} packs {len(sends)} messages for rank {destination}, "
            f"which unpacks {len(receives)}"
        )
    return [_delivery(source, destination, *ends) for ends in zip(sends, receives, strict=True)]


def _delivery(source: int, destination: int, send: Operation, receive: Operation) -> Delivered:
    """The message of two paired ends. Raises `NcclError` if they differ in size, block or tag."""
    for name in ("size_bytes", "block", "tag"):
        sent, expected = getattr(send, name), getattr(receive, name)
        if sent != expected:
            raise NcclError(
                f"rank {source} sends {name} {sent} to rank {destination}, paired with a receive of {expected}"
            )
    return Delivered(source, destination, send.tag, send.block, send.size_bytes)
