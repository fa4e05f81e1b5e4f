"""A transport by copy engines, over symmetric memory: messages take no multiprocessors from kernels.

**Never executed on a GPU by us.** What is tested, on a model of streams and signals: order, addresses, and that no
signal can be missed or left over. What follows from reading torch's source alone: everything in `CudaWindow`.

The memory of a run is a *window*: symmetric memory that every rank of the group maps. A message is a copy from the
sender's memory into the receiver's, in the sender's stream, which the driver hands to a copy engine. Two signals per
batch and pair of ranks keep order: *ready*, from the receiver, when its memory is free; *done*, from the sender, when
its copies have ended. A batch ends, in its stream, when all its sends are copied and all its receives are done. So
*ready* of one batch follows *done* of the batch before, and *done* follows *ready*: between two ranks one slot of each
kind is enough per channel, and it is empty whenever it is set. All *ready* of a batch precede its first wait, so ranks
that issue their batches in one order cannot wait for each other in a circle, even where streams share a queue.

Signals are kernels of one warp. A signal that a kernel must wait for still needs room for one warp on the GPU.
"""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from runtime.executor.messages import Group, Message, Transport, Wait, group_of, no_wait
from runtime.executor.streams import Streams
from tasp_lab.core.errors import RunError, first_line
from tasp_lab.schedule.buffer_layout import OUTSIDE
from tasp_lab.schedule.rank_part import RankPart, rank_part
from tasp_lab.schedule.schedule import Schedule

READY, DONE = range(2)
"""The kinds of signals; those of channel c have the slots ``2 * c + kind``."""

SMALLEST_BYTES = 2**21
"""Of a window: drivers map memory in pages of 2 MiB."""


class Heap:
    """The windows of a group. All ranks take them and give them back in the same order, so they agree on each.

    Sizes are powers of two, and windows are kept for the life of the process: freed memory would be mapped anew by all
    ranks together. A window that is given back is taken again by work in the same stream.
    """

    def __init__(self, world_size: int, make: Callable[[int], CudaWindow], stream: Callable[[], int]) -> None:
        self.world_size, self._make, self._stream = world_size, make, stream
        self._free: defaultdict[int, list[CudaWindow]] = defaultdict(list)
        self._taken: dict[int, CudaWindow] = {}
        self.addresses: dict[int, Mapping[tuple[int, int], Sequence[int]]] = {}

    def take(self, size_bytes: int) -> CudaWindow:
        """The smallest free window of at least this size, or a new one, which all ranks make together."""
        free = self._free[self._stream()]
        fitting = [each for each in free if each.memory.numel() >= size_bytes]
        if fitting:
            window = min(fitting, key=lambda each: each.memory.numel())
            free[:] = [each for each in free if each is not window]
        else:
            window = self._make(max(SMALLEST_BYTES, 1 << (size_bytes - 1).bit_length()))
        self._taken[_place(window.memory)] = window
        return window

    def window_of(self, memory: torch.Tensor) -> CudaWindow:
        """The taken window in which a memory lies."""
        return self._taken[_place(memory)]

    def give_back(self, memory: torch.Tensor) -> None:
        """Free a window, when all that reads or writes it is queued in the current stream."""
        self._free[self._stream()].append(self._taken.pop(_place(memory)))


def _place(memory: torch.Tensor) -> int:
    return memory.untyped_storage().data_ptr()


class SymmetricMemory(Transport):
    """One batch of copies and signals per step and channel; signals have a timeout."""

    channels = True

    def __init__(self, heap: Heap, timeout_s: float) -> None:
        self._heap, self._timeout_ms = heap, round(timeout_s * 1e3)
        self._receives: Sequence[Message] = ()

    @property
    def key(self) -> Hashable:
        return type(self), self._heap, self._timeout_ms

    def take(self, schedule: Schedule, part: RankPart, device: torch.device) -> torch.Tensor:
        """The memory of a run: a window as large as the largest rank's; a collective call."""
        largest, of_messages = addresses(schedule, part.rank)
        window = self._heap.take(max(1, largest))
        self._heap.addresses[_place(window.memory)] = of_messages
        return window.memory[: part.memory_bytes]

    def give_back(self, memory: torch.Tensor) -> None:
        """See `Heap.give_back`."""
        del self._heap.addresses[_place(memory)]
        self._heap.give_back(memory)

    def open(self, channels: int, memory: torch.Tensor, streams: Streams) -> None:
        """Choose the window of a run and the streams of copies."""
        self._window, self._offsets = self._heap.window_of(memory), self._heap.addresses[_place(memory)]
        self._channels, self._streams = channels, streams
        if 2 * channels > self._window.slots:
            raise RunError(f"{channels} channels need {2 * channels} signals between two ranks, symmetric memory has "
                           f"{self._window.slots}: call set_signal_pad_size before the first run")  # fmt: skip

    def receive(self, messages: Sequence[Message]) -> list[Wait]:
        """Note the receives of a batch; they are done when its sends are."""
        self._receives = messages
        return [no_wait] * len(messages)

    def send(self, messages: Sequence[Message]) -> list[Wait]:
        """Queue the signals and copies of a batch; later work of the current stream waits for all of them."""
        window, receives, timeout_ms = self._window, self._receives, self._timeout_ms
        channel = next((message.channel for message in (*receives, *messages)), 0)
        ready, done = 2 * channel + READY, 2 * channel + DONE
        sources = sorted({message.peer for message in receives})
        for peer in sources:
            window.put(peer, ready, timeout_ms)
        self._copy_beside(self._by_peer(messages), channel, ready, done)
        for peer in sources:
            window.wait(peer, done, timeout_ms)
        return [no_wait] * len(messages)

    def _copy_beside(
        self, copies: Mapping[int, Sequence[tuple[int, torch.Tensor]]], channel: int, ready: int, done: int
    ) -> None:
        """Copy to each peer in a stream of its own: no peer waits for another, and copies share links."""
        window, streams, timeout_ms = self._window, self._streams, self._timeout_ms
        if not copies:
            return
        posted, ended = streams.mark(), []
        for peer in sorted(copies):
            with streams.communicating(self._channels + channel * self._heap.world_size + peer):
                streams.wait(posted)
                window.wait(peer, ready, timeout_ms)
                for offset, data in copies[peer]:
                    window.copy(peer, offset, data)
                window.put(peer, done, timeout_ms)
                ended.append(streams.mark())
        for mark in ended:
            streams.wait(mark)

    def _by_peer(self, messages: Sequence[Message]) -> _Copies:
        """The offset and bytes of each copy. Messages of one peer and tag are in the same order at both ends."""
        found: defaultdict[int, list[tuple[int, torch.Tensor]]] = defaultdict(list)
        count: defaultdict[tuple[int, int], int] = defaultdict(int)
        for message in messages:
            key = message.peer, message.tag
            found[message.peer].append((self._offsets[key][count[key]], message.data))
            count[key] += 1
        return found


_Copies = Mapping[int, Sequence[tuple[int, torch.Tensor]]]
"""By peer: bytes, and where the peer receives them in its memory."""


@lru_cache(maxsize=16)
def addresses(schedule: Schedule, rank: int) -> tuple[int, Mapping[tuple[int, int], Sequence[int]]]:
    """The bytes of the largest memory of all ranks; and where messages of this rank lie at their peers, by peer, tag.

    All ranks derive them from the schedule alone.
    """
    found: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    largest = 0
    for peer in range(schedule.world_size):
        part = rank_part(schedule, peer)
        largest = max(largest, part.memory_bytes)
        for rows in part.messages_in:
            if rows[0].peer == rank:
                assert rows[0].offset != OUTSIDE, "messages are received in the memory"
                found[peer, rows[0].step * schedule.lanes + rows[0].lane].append(rows[0].offset)
    return largest, found


class CudaWindow:
    """Memory of one size on all ranks of a group, by `torch.distributed._symmetric_memory`; calls queue work in the
    current stream. Never executed on a GPU by us.

    That a signal follows the copies before it in its stream, and is seen with them, is what torch's own
    `_low_contention_reduce_scatter` relies on where it pushes chunks to peers.
    """

    def __init__(self, size_bytes: int, group: dist.ProcessGroup, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        try:
            self.memory = symmetric_memory.empty(size_bytes, dtype=torch.uint8, device=device)
            self._handle = symmetric_memory.rendezvous(self.memory, group)
        except RuntimeError as error:
            raise RunError(f"no symmetric memory of {size_bytes} bytes ({first_line(error)})") from None
        self._world_size = dist.get_world_size(group)
        self._of_peer: dict[int, torch.Tensor] = {}

    @property
    def slots(self) -> int:
        """How many signals there may be from each rank to each other one."""
        return int(self._handle.signal_pad_size) // (4 * self._world_size)

    def copy(self, peer: int, offset: int, data: torch.Tensor) -> None:
        """Copy bytes to an offset in the memory of a peer."""
        if peer not in self._of_peer:
            self._of_peer[peer] = self._handle.get_buffer(peer, (self.memory.numel(),), torch.uint8)
        self._of_peer[peer][offset : offset + data.numel()].copy_(data, non_blocking=True)

    def put(self, peer: int, slot: int, timeout_ms: int) -> None:
        """Set a signal at a peer once it is not set."""
        self._handle.put_signal(peer, channel=slot, timeout_ms=timeout_ms)

    def wait(self, peer: int, slot: int, timeout_ms: int) -> None:
        """Wait for a signal from a peer, and clear it."""
        self._handle.wait_signal(peer, channel=slot, timeout_ms=timeout_ms)


_HEAPS: WeakKeyDictionary[dist.ProcessGroup, Heap] = WeakKeyDictionary()


def symmetric_memory_of(timeout_s: float, group: Group, device: torch.device) -> SymmetricMemory:
    """The transport over the heap of a group, whose first call all of its ranks make together.

    Raises `RunError` if its ranks are on several hosts or GPUs cannot reach each other, on all ranks alike.
    """
    found = group_of(group)
    if found not in _HEAPS:
        _HEAPS[found] = _heap(found, device)
    return SymmetricMemory(_HEAPS[found], timeout_s)


def _heap(group: dist.ProcessGroup, device: torch.device) -> Heap:
    def make(size_bytes: int) -> CudaWindow:
        if not made:
            check_reach(_gathered(group, device))
        made.append(CudaWindow(size_bytes, group, device))
        return made[-1]

    made: list[CudaWindow] = []
    return Heap(dist.get_world_size(group), make, lambda: torch.cuda.current_stream(device).cuda_stream)


class Reach(NamedTuple):
    """What a rank runs on: its host, the number of its GPU there, and the numbers of those that it can reach.

    `backend` is that of torch's symmetric memory; only CUDA, on AMD too, has signals and memory at addresses of peers.
    """

    host: str
    gpu: int
    reached: tuple[int, ...]
    backend: str | None = "CUDA"


def check_reach(found: Sequence[Reach]) -> None:
    """Raise `RunError` unless all ranks are on GPUs of one host that reach each other."""
    needs = "the transport symmetric-memory needs"
    for rank, each in enumerate(found):
        if each.host != found[0].host:
            raise RunError(f"{needs} all ranks on one host, but ranks 0 and {rank} are on two: expected batched")
        if each.backend != "CUDA":
            raise RunError(f"{needs} torch's backend CUDA of symmetric memory, but rank {rank} has {each.backend}")
        for other, its in enumerate(found):
            if other != rank and its.gpu == each.gpu:
                raise RunError(f"{needs} a GPU per rank, but ranks {rank} and {other} share GPU {each.gpu}")
            if other != rank and its.gpu not in each.reached:
                raise RunError(f"{needs} peer access, but GPU {each.gpu} cannot reach GPU {its.gpu}: expected batched")


def _gathered(group: dist.ProcessGroup, device: torch.device) -> list[Reach]:
    """Of all ranks of the group, in their order."""
    import torch.distributed._symmetric_memory as symmetric_memory

    own, count = device.index or 0, torch.cuda.device_count()
    reached = tuple(each for each in range(count) if each != own and torch.cuda.can_device_access_peer(own, each))
    mine = Reach(socket.gethostname(), own, reached, symmetric_memory.get_backend(device))
    everyone: list[Reach | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group)
    return [each for each in everyone if each is not None]
