"""A simulated NCCL: pairs the sends and receives of all ranks as NCCL does, and finds deadlocks.

`tests.support.recorded_calls` records the calls that the per-step executor makes.

What is modelled:

- Operations of one communicator execute in the order in which they were issued, as they share a stream. A group of
  sends and receives therefore begins when the previous group of its rank and communicator has ended.
- Groups of different communicators begin on a rank in the order in which they were issued, and may run side by side,
  or one after another: CUDA does not promise that kernels of two streams run at the same time
  (https://github.com/NVIDIA/nccl/issues/783). Both are tried: calls must complete either way.
- Operations of one group progress independently, except those with the same peer, which execute in order; the group
  ends when all have ended.
- There are no tags: the k-th send of a rank to a peer on a communicator meets the k-th receive of that peer from it.
  Both must have the same size.
- A send ends when its receive is posted (rendezvous). NCCL may buffer small messages, which lets groups end earlier
  only: calls that complete here complete with any buffering.
- Every rank makes every collective call, in the same order: the k-th calls of all ranks are one collective. What one
  rank expects from another is what that one sends.

Source: NVIDIA, NCCL user guide, "Point-to-point communication" and "CUDA Stream Semantics",
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/p2p.html; for collectives the documentation of
`torch.distributed`, whose all-to-all is called by every rank of the group.

Not modelled: times, what is in the messages, the limit of operations per group.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple


class NcclError(Exception):
    """Calls that do not match between ranks, or that never end."""


class Operation(NamedTuple):
    """One end of a message. Tag and blocks are not known to NCCL; they tell whether it pairs the right ends."""

    peer: int
    tag: int
    blocks: tuple[int, ...]
    size_bytes: int


class Group(NamedTuple):
    """The operations of one rank that are issued together, in their order."""

    receives: tuple[Operation, ...]
    sends: tuple[Operation, ...]
    communicator: int = 0


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
    blocks: tuple[int, ...]
    size_bytes: int


def run_groups(groups_of_ranks: Sequence[Sequence[Group]]) -> list[Delivered]:
    """Execute the groups of all ranks, those of different communicators side by side, and one after another.

    Raises `NcclError` for two paired ends that differ, for an end without the other one, and for a deadlock.
    """
    for side_by_side in (True, False):
        run = _Run(groups_of_ranks, side_by_side)
        run.advance_all()
        run.check_ended()
    return run.delivered


def begun_side_by_side(groups_of_ranks: Sequence[Sequence[Group]], held: Callable[[int, Operation], bool]) -> list[int]:
    """How many groups each rank begins, with communicators side by side, while sends that are `held` never end.

    `held` is called with the source and the send.
    """
    run = _Run(groups_of_ranks, side_by_side=True, held=held)
    run.advance_all()
    return run.begun


def make_communicators(calls_of_ranks: Sequence[Sequence[int]]) -> None:
    """Let the hosts of all ranks issue calls on communicators, which torch makes with the first call of each.

    A host then waits until all ranks have come to their first call on it; else it only queues calls. Raises `NcclError`
    if a rank never comes.
    """
    made = set[int]()
    while True:
        waiting = [next((number for number in calls if number not in made), -1) for calls in calls_of_ranks]
        if set(waiting) == {-1}:
            return
        number = max(waiting)
        missing = [rank for rank, each in enumerate(waiting) if each != number]
        if missing:
            raise NcclError(f"deadlock: communicator {number} is made by all ranks, and ranks {missing} do not come")
        made.add(number)


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


Pair = tuple[int, int, int]
"""A communicator, a source and a destination."""


class _Run:
    """The execution of groups: those of each rank that are under way, and the ends that wait for the other one."""

    def __init__(
        self,
        groups_of_ranks: Sequence[Sequence[Group]],
        side_by_side: bool,
        held: Callable[[int, Operation], bool] = lambda source, send: False,
    ) -> None:
        self.delivered: list[Delivered] = []
        self.begun = [0] * len(groups_of_ranks)
        self._side_by_side, self._held = side_by_side, held
        self._later = [deque(groups) for groups in groups_of_ranks]
        self._open: list[defaultdict[int, int]] = [defaultdict(int) for _ in groups_of_ranks]
        self._sends: defaultdict[Pair, deque[Operation]] = defaultdict(deque)
        self._receives: defaultdict[Pair, deque[Operation]] = defaultdict(deque)

    def advance_all(self) -> None:
        """Begin groups until no rank can begin another one."""
        while able := [rank for rank in range(len(self._later)) if self._may_begin(rank)]:
            for rank in able:
                self._begin(rank, self._later[rank].popleft())

    def _may_begin(self, rank: int) -> bool:
        if not self._later[rank]:
            return False
        under_way = self._open[rank]
        if self._side_by_side:
            return not under_way[self._later[rank][0].communicator]
        return not any(under_way.values())

    def _begin(self, rank: int, group: Group) -> None:
        """Post the operations of a group and pair them with those that are posted."""
        number = group.communicator
        self.begun[rank] += 1
        self._open[rank][number] = len(group.sends) + len(group.receives)
        for send in group.sends:
            self._sends[number, rank, send.peer].append(send)
        for receive in group.receives:
            self._receives[number, receive.peer, rank].append(receive)
        pairs = [(rank, send.peer) for send in group.sends] + [(receive.peer, rank) for receive in group.receives]
        for source, destination in dict.fromkeys(pairs):
            self._pair(number, source, destination)

    def _pair(self, number: int, source: int, destination: int) -> None:
        sends, receives = self._sends[number, source, destination], self._receives[number, source, destination]
        while sends and receives and not self._held(source, sends[0]):
            self.delivered.append(_delivery(source, destination, sends.popleft(), receives.popleft()))
            self._open[source][number] -= 1
            self._open[destination][number] -= 1

    def check_ended(self) -> None:
        """Raise `NcclError` if an operation waits for the other end."""
        self._check_counterparts()
        waiting = [rank for rank, operations in enumerate(self._open) if any(operations.values())]
        if waiting:
            raise NcclError(f"deadlock: ranks {waiting} each wait for a group that another one has not begun")

    def _check_counterparts(self) -> None:
        """Raise `NcclError` unless as many receives as sends of each pair are left, issued or not."""
        surplus: defaultdict[Pair, int] = defaultdict(int)
        for pair, sign in self._left():
            surplus[pair] += sign
        for (number, source, destination), count in surplus.items():
            if count:
                missing, where = "receives" if count > 0 else "sends", f" on communicator {number}" * (number > 0)
                raise NcclError(
                    f"{abs(count)} {missing} missing of the messages from rank {source} to {destination}{where}"
                )

    def _left(self) -> Iterator[tuple[Pair, int]]:
        """The pair and the sign (1 for a send, -1 for a receive) of each operation that has not ended."""
        for sign, queues in ((1, self._sends), (-1, self._receives)):
            for pair, queue in queues.items():
                yield from [(pair, sign)] * len(queue)
        for rank, groups in enumerate(self._later):
            for group in groups:
                yield from (((group.communicator, rank, send.peer), 1) for send in group.sends)
                yield from (((group.communicator, receive.peer, rank), -1) for receive in group.receives)


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
    """The message of two paired ends. Raises `NcclError` if they differ in size, blocks or tag."""
    for name in ("size_bytes", "blocks", "tag"):
        sent, expected = getattr(send, name), getattr(receive, name)
        if sent != expected:
            raise NcclError(
                f"rank {source} sends {name} {sent} to rank {destination}, paired with a receive of {expected}"
            )
    return Delivered(source, destination, send.tag, send.blocks, send.size_bytes)
