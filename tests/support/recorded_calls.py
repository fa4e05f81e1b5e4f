"""The library calls that the per-step executor makes with the product's transports, recorded without a network.

Each rank executes its whole part alone. Every call ends at once, as for the host of a GPU, which only queues calls;
kernel calls compute nothing. The order of the calls does not depend on what arrives, so this is their order in
every run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from runtime.executor import transports
from runtime.executor.executor import Executor
from runtime.executor.messages import Group as ProcessGroup
from runtime.executor.messages import Message, Post, Transport, Wait
from runtime.trials.patterns import PatternWork
from tasp_lab.schedule.schedule import Schedule
from tests.support.simulated_nccl import AllToAllCall, Group, NcclError, Operation

MakeTransport = Callable[[float, ProcessGroup, torch.device], Transport]


def recorded_groups(schedule: Schedule, make_transport: MakeTransport = transports.Batched) -> list[list[Group]]:
    """The groups of sends and receives that each rank issues."""
    return [_record(schedule, rank, make_transport).groups() for rank in range(schedule.world_size)]


def recorded_communicators(schedule: Schedule, make_transport: MakeTransport = transports.Batched) -> list[list[int]]:
    """The communicator of each call that each rank makes, also of those that only connect all ranks."""
    return [_record(schedule, rank, make_transport).communicators() for rank in range(schedule.world_size)]


def recorded_all_to_alls(
    schedule: Schedule, make_transport: MakeTransport = transports.AllToAll
) -> list[list[AllToAllCall]]:
    """The all-to-all calls that each rank makes."""
    return [_record(schedule, rank, make_transport).all_to_alls() for rank in range(schedule.world_size)]


class _End(NamedTuple):
    """One end of a message that is posted, and the number of its communicator."""

    sends: bool
    message: Message
    communicator: int


class _Communicator:
    """A process group of all ranks, numbered in the order in which they are made; it keeps what is posted."""

    def __init__(self, number: int, library: _Library) -> None:
        self.number, self._library = number, library

    def send(self, data: list[torch.Tensor], peer: int, tag: int) -> _Done:
        return self._post(True, data[0], peer, tag)

    def recv(self, data: list[torch.Tensor], peer: int, tag: int) -> _Done:
        return self._post(False, data[0], peer, tag)

    def _post(self, sends: bool, data: torch.Tensor, peer: int, tag: int) -> _Done:
        self._library.posted.append(_End(sends, Message(peer, tag, data, self.number), self.number))
        return _Done()

    def alltoall_base(
        self, output: torch.Tensor, data: torch.Tensor, receive_splits: Sequence[int], send_splits: Sequence[int],
        opts: object,
    ) -> _Done:  # fmt: skip
        if (sum(receive_splits), sum(send_splits)) != (output.numel(), data.numel()):
            raise NcclError(f"splits {receive_splits} and {send_splits} differ from the sizes of the tensors")
        self._library.all_to_alls.append(_Splits(tuple(receive_splits), tuple(send_splits)))
        return _Done()


class _Splits(NamedTuple):
    """The bytes from and to each rank of an all-to-all."""

    receives: tuple[int, ...]
    sends: tuple[int, ...]


class _Done:
    """A call that has ended."""

    def wait(self, timeout: object = None) -> None:
        """No-op."""


class _Library:
    """Stands in for `torch.distributed` in `runtime.executor.transports` and records the calls."""

    ProcessGroup = _Communicator

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.posted: list[_End] = []
        self.batches: list[Sequence[_End]] = []
        self.connected: list[tuple[int, int]] = []  # before how many batches, and which communicator
        self.all_to_alls: list[_Splits] = []
        self.group = SimpleNamespace(WORLD=_Communicator(0, self))
        self._communicators = 1

    def get_process_group_ranks(self, group: ProcessGroup) -> list[int]:
        return list(range(self._world_size))

    def new_group(self, ranks: Sequence[int], use_local_synchronization: bool) -> _Communicator:
        assert list(ranks) == list(range(self._world_size))
        assert not use_local_synchronization  # all ranks call it, so its name is the same everywhere
        self._communicators += 1
        return _Communicator(self._communicators - 1, self)

    def get_world_size(self, group: ProcessGroup = None) -> int:
        return self._world_size

    def all_reduce(self, data: torch.Tensor, group: _Communicator | None) -> None:
        self.connected.append((len(self.batches), 0 if group is None else group.number))

    def post_each(self, *arguments: Any) -> Sequence[Wait]:
        """Post messages of a transport; they are a batch."""
        waits = _POST_EACH(*arguments)
        self.batches.append(list(self.posted))
        self.posted.clear()
        return waits

    def AllToAllOptions(self) -> None:  # noqa: N802
        """No options."""


_POST_EACH = transports._post_each


class _Recorder(Transport):
    """Passes the messages of a rank on to a transport, and keeps those that it passed on before each all-to-all."""

    receives_ahead = 0
    whole_steps = True

    def __init__(self, transport: Transport, library: _Library) -> None:
        self._transport, self._library = transport, library
        self.channels, self.waits_once, self.open = transport.channels, transport.waits_once, transport.open
        self.packed: list[tuple[Sequence[Message], Sequence[Message]]] = []

    def bind(self, receives: Sequence[Message], sends: Sequence[Message]) -> Post:
        bound = self._transport.bind(receives, sends)

        def post() -> Sequence[Wait]:
            waits = bound()
            if len(self._library.all_to_alls) > len(self.packed):
                self.packed.append((receives, sends))
            return waits

        return post


class _Record:
    """The recorded calls of one rank. The blocks of a message are found by their place in the rank's memory."""

    def __init__(self, executor: Executor, recorder: _Recorder, library: _Library) -> None:
        self._recorder, self._library = recorder, library
        part, lanes = executor.part, executor.schedule.lanes
        size = executor.schedule.block_bytes
        self._blocks = {
            (sends, row.peer, row.step * lanes + row.lane, row.offset): (row.block, int(size[row.block]))
            for sends, rows in ((True, part.sends), (False, part.receives))
            for row in rows
        }

    def groups(self) -> list[Group]:
        """The groups of sends and receives."""
        return [
            Group(
                self._operations(False, (each.message for each in batch if not each.sends)),
                self._operations(True, (each.message for each in batch if each.sends)),
                batch[0].communicator,
            )
            for batch in self._library.batches
        ]

    def communicators(self) -> list[int]:
        """The communicator of each call of the host, groups and those that connect all ranks, in their order."""
        found = [group.communicator for group in self.groups()]
        for before, number in reversed(self._library.connected):
            found.insert(before, number)
        return found

    def all_to_alls(self) -> list[AllToAllCall]:
        """The all-to-all calls."""
        return [
            AllToAllCall(Group(self._packed(False, receives), self._packed(True, sends)), *splits)
            for (receives, sends), splits in zip(self._recorder.packed, self._library.all_to_alls, strict=True)
        ]

    def _packed(self, sends: bool, messages: Iterable[Message]) -> tuple[Operation, ...]:
        """The operations in the order in which `AllToAll` packs them: by peer, then by tag."""
        return self._operations(sends, sorted(messages, key=lambda message: (message.peer, message.tag)))

    def _operations(self, sends: bool, messages: Iterable[Message]) -> tuple[Operation, ...]:
        return tuple(self._operation(sends, message) for message in messages)

    def _operation(self, sends: bool, message: Message) -> Operation:
        peer, tag, data = message.peer, message.tag, message.data
        at, size_bytes, blocks = int(data.storage_offset()), data.numel(), list[int]()
        end = at + size_bytes
        while at < end:
            place = sends, peer, tag, at
            if place not in self._blocks:
                raise NcclError(f"tag {tag}: no block of a message with rank {peer} lies at byte {at}")
            block, block_bytes = self._blocks[place]
            blocks.append(block)
            at += block_bytes
        return Operation(peer, tag, tuple(blocks), size_bytes)


def _record(schedule: Schedule, rank: int, make_transport: MakeTransport) -> _Record:
    library = _Library(schedule.world_size)
    with (
        patch.object(transports, "dist", library),
        patch.object(transports, "_post_each", library.post_each),
        patch.object(transports, "group_of", lambda group: group or library.group.WORLD),
    ):
        recorder = _Recorder(make_transport(1.0, None, torch.device("cpu")), library)
        executor = Executor(schedule, rank, recorder, PatternWork(schedule, rank, checked=False), as_bytes=True)
        executor.prepare()
        executor.run()
    return _Record(executor, recorder, library)
