"""Transports: how the messages of a schedule are sent, independently of the schedule.

A `runtime.executor.messages.Transport` posts messages and returns a wait for each.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from functools import partial
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from runtime.executor.messages import (
    Group,
    Message,
    Post,
    Transport,
    Wait,
    call_peers,
    group_of,
    lost_peer,
)
from runtime.executor.streams import Streams
from runtime.executor.symmetric_memory import symmetric_memory_of
from tasp_lab.core.errors import RunError

AGREEMENT_TAG = 1 << 30
"""The tag of messages by which ranks agree before data move; those of data are smaller."""

_CALLS, _FIRST_BIT = 1024, 20
"""How many calls in a row have different tags, and above how many bits of the tag of a message."""


class PointToPoint(Transport):
    """One isend or irecv per message, receives posted several steps ahead. For gloo.

    Gloo acknowledges a posted receive over the connection that carries data in the other direction. If receives are
    posted early, the acknowledgement precedes the send and does not queue behind data, which would halve the
    throughput of a full-duplex link.

    `call` numbers the call of a layer whose messages are sent: those of another one do not meet them.
    """

    receives_ahead = 4
    whole_steps = False
    short_bytes = 4096
    """A thread hands over to another one in some 10 us, in which a link of 400 MB/s carries a page."""

    def __init__(self, timeout_s: float, group: Group, device: torch.device, call: int = 0) -> None:
        self._timeout, self._on_gpu = timedelta(seconds=timeout_s), device.type == "cuda"
        self._group, self._of_call = group_of(group), [call % _CALLS << _FIRST_BIT]

    @property
    def key(self) -> Hashable:
        return type(self), self._group, self._timeout

    def use(self, connections: dist.ProcessGroup) -> None:
        self._group = connections

    def renew(self, other: Transport) -> None:
        assert isinstance(other, PointToPoint), "transports of one key are of one type"
        self._of_call[:] = other._of_call

    def receive(self, messages: Sequence[Message]) -> Sequence[Wait]:
        return self.bind(messages, ())()

    def send(self, messages: Sequence[Message]) -> Sequence[Wait]:
        return self.bind((), messages)()

    def bind(self, receives: Sequence[Message], sends: Sequence[Message]) -> Post:
        return partial(_post_each, _ends(self._group, receives, sends), self._timeout, self._on_gpu, self._of_call)


_End = tuple[Callable[[list[torch.Tensor], int, int], dist.Work], list[torch.Tensor], int, int]
"""A call of a process group and its arguments, which `dist.isend` and `dist.irecv` check anew in every call."""


def _ends(group: dist.ProcessGroup, receives: Sequence[Message], sends: Sequence[Message]) -> list[_End]:
    return [
        (post, [each.data], each.peer, each.tag)
        for post, messages in ((group.recv, receives), (group.send, sends)) for each in messages
    ]  # fmt: skip


def _post_each(
    ends: Sequence[_End], timeout: timedelta, on_gpu: bool = False, of_call: Sequence[int] = (0,)
) -> Sequence[Wait]:
    """Post messages one by one; `of_call` are the bits of their tags that differ between calls, which may change."""
    (bits,), waits = of_call, list[Wait]()
    try:
        for call, data, peer, tag in ends:  # tags of one call stay different, also those of more bits
            waits.append(partial(call(data, peer, tag ^ bits).wait, timeout))
    except RuntimeError as error:
        if lost := lost_peer(error, on_gpu, len(waits)):
            raise lost from None
        raise
    return waits


class Batched(Transport):
    """One batch of sends and receives per step and channel, as NCCL and RCCL require.

    The batches of one communicator run one after another, so every channel has a communicator of its own. Several
    communicators are safe on a GPU only if their kernels begin in the same order on all ranks (`orders_launches`); if
    that is not so, all lanes are one channel.
    """

    def __init__(self, timeout_s: float, group: Group, device: torch.device) -> None:
        self._device, self._on_gpu = device, device.type == "cuda"
        self.waits_once = self._on_gpu
        self.channels = not self._on_gpu or (orders_launches() and not _is_split_from_others(group))
        self._timeout, self._group = _timeout(timeout_s, device), group
        self.waited_on_gpu = group_of(group) if self._on_gpu else None
        self._groups: list[Group] = [group]
        self._connections: dist.ProcessGroup | None = None
        self._open = 0

    @property
    def key(self) -> Hashable:
        return type(self), self._connections or group_of(self._group), self._timeout, self.channels

    def use(self, connections: dist.ProcessGroup) -> None:
        self._connections = connections

    def open(self, channels: int, memory: torch.Tensor, streams: Streams) -> None:
        """Make the communicators of channels. The first one is that of the group; further ones are made once."""
        if channels <= self._open:
            return
        self._open = channels
        if self._connections is not None:
            self._groups = [self._connections] * channels  # gloo matches messages by their tags
            return
        if channels > len(self._groups):
            self._groups = [self._group, *_further_groups(self._group, channels - 1)]
        for group in self._groups:
            _connect(group, self._device)

    def bind(self, receives: Sequence[Message], sends: Sequence[Message]) -> Post:
        messages = (*receives, *sends)
        if not messages:
            return list
        group = group_of(self._groups[messages[0].channel])
        ends = _ends(group, receives, sends)
        if self._timeout is not None:  # gloo has no batches
            return partial(_post_each, ends, self._timeout)

        def post() -> Sequence[Wait]:
            works = call_peers(True, self._together, group, ends)
            return [lambda: [work.wait() for work in works]]

        return post

    def _together(self, group: dist.ProcessGroup, ends: Sequence[_End]) -> Sequence[dist.Work]:
        """NCCL makes one kernel of what is posted within a coalescing."""
        with _coalescing_manager(group, self._device, async_ops=True) as batch:
            for post, data, peer, tag in ends:
                post(data, peer, tag)
        works: list[dist.Work] = batch.works
        return works


def orders_launches() -> bool:
    """Whether NCCL begins the kernels of several communicators in the order in which the host issues them.

    Without this order two ranks may each wait for a kernel that the other one has not begun ("Using multiple NCCL
    communicators concurrently" in NVIDIA's NCCL user guide). No record shows that RCCL keeps this order.
    """
    if torch.version.hip is not None:
        return False
    found: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return os.environ.get(LAUNCH_ORDER) == "1" and found >= (2, 26)


def gpu_libraries() -> dict[str, object]:
    """What torch was built for, CUDA or ROCm, and the version of NCCL or RCCL; None without."""
    runtime = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    has_gpus, has_nccl = bool(torch.version.cuda or torch.version.hip), dist.is_nccl_available()
    version = torch.cuda.nccl.version() if has_nccl else ()  # type: ignore[no-untyped-call]
    return {"runtime": runtime if has_gpus else None, "nccl": ".".join(map(str, version)) or None}


LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
"""NCCL's variable for it, since version 2.26; from CUDA 12.3 on, kernels in this order still run side by side."""

_FURTHER: WeakKeyDictionary[dist.ProcessGroup, list[Group]] = WeakKeyDictionary()
"""Further groups of the same ranks, by group."""


def _further_groups(group: Group, count: int) -> list[Group]:
    """Further groups of the same ranks, made by the first call that needs them, of all ranks of the group."""
    found = _FURTHER.setdefault(group_of(group), [])
    while len(found) < count:
        found.append(_beside(group))
    return found[:count]


def _beside(group: Group) -> dist.ProcessGroup:
    """A new group of the same ranks, made by a call of all of them.

    Only ranks of the group call it, so torch gives it a name from how many groups a rank is in, and ranks that are in
    different numbers of groups would wait for each other. A group of all ranks is named by how many groups were made.
    """
    ranks = dist.get_process_group_ranks(group)
    made = dist.new_group(ranks, use_local_synchronization=len(ranks) < dist.get_world_size())
    assert isinstance(made, dist.ProcessGroup), "this process is part of the group"
    return made


_CONNECTED: WeakSet[dist.ProcessGroup] = WeakSet()
"""The groups whose communicator exists."""


def _connect(group: Group, device: torch.device) -> None:
    """Make the communicator of a group, in a first collective call of all of its ranks.

    torch makes communicators of NCCL with the first call, in which all ranks must take part; a batch of a step may be
    empty on some (https://github.com/pytorch/pytorch/pull/74701).
    """
    found = group_of(group)
    if found not in _CONNECTED:
        call_peers(device.type == "cuda", dist.all_reduce, torch.zeros(1, device=device), group=group)
        _CONNECTED.add(found)


def _is_split_from_others(group: Group) -> bool:
    """Whether further groups of the ranks of a group would be split from a larger communicator.

    If the group of all ranks is bound to a GPU, torch splits new communicators from it, which all of its ranks must
    call (`_new_process_group_helper`), not only those of the group.
    """
    everybody = dist.group.WORLD
    is_bound = everybody is not None and getattr(everybody, "bound_device_id", None) is not None
    return is_bound and dist.get_world_size(group) < dist.get_world_size()


class AllToAll(Transport):
    """One all_to_all_single per step, as in TASP's reference implementation. Every rank takes part in every step."""

    waits_once = True

    def __init__(self, timeout_s: float, group: Group, device: torch.device) -> None:
        self._timeout, self._group, self._on_gpu = _timeout(timeout_s, device), group, device.type == "cuda"
        self.waited_on_gpu = group_of(group) if self._on_gpu else None
        self._world_size, self._device = dist.get_world_size(group), device

    @property
    def key(self) -> Hashable:
        return type(self), group_of(self._group), self._timeout

    def use(self, connections: dist.ProcessGroup) -> None:
        self._group = connections

    def bind(self, receives: Sequence[Message], sends: Sequence[Message]) -> Post:
        """Only several messages are packed, or unpacked."""
        incoming, outgoing = ([each.data for each in _in_order(messages)] for messages in (receives, sends))
        sizes = [each.numel() for each in incoming]
        call = partial(group_of(self._group).alltoall_base, opts=dist.AllToAllOptions())
        splits, total = (self._splits(receives), self._splits(sends)), sum(sizes)
        new = partial(torch.empty, dtype=torch.uint8, device=self._device)
        nothing, limit, on_gpu = new(0), () if self._timeout is None else (self._timeout,), self._on_gpu

        def post() -> Sequence[Wait]:
            packed = torch.cat(outgoing) if len(outgoing) > 1 else outgoing[0] if outgoing else nothing
            arrived = incoming[0] if len(incoming) == 1 else new(total)
            wait = partial(call_peers(on_gpu, call, arrived, packed, *splits).wait, *limit)
            return [wait if len(incoming) < 2 else partial(_unpack, wait, incoming, arrived, sizes)]

        return post

    def _splits(self, messages: Sequence[Message]) -> list[int]:
        """Bytes to or from each rank."""
        sizes = [0] * self._world_size
        for message in messages:
            sizes[message.peer] += message.data.numel()
        return sizes


def _unpack(wait: Wait, places: Sequence[torch.Tensor], arrived: torch.Tensor, sizes: Sequence[int]) -> None:
    wait()
    for place, part in zip(places, arrived.split_with_sizes(sizes), strict=True):
        place.copy_(part)


def _in_order(messages: Sequence[Message]) -> list[Message]:
    """Messages in the order in which both ends pack them: by peer, then by tag."""
    return sorted(messages, key=lambda m: (m.peer, m.tag))


def default_device() -> str:
    """The device of this rank's blocks: its GPU for NCCL and RCCL, else ``cpu``."""
    return f"cuda:{torch.cuda.current_device()}" if dist.get_backend() == "nccl" else "cpu"


def _timeout(timeout_s: float, device: torch.device) -> timedelta | None:
    """The timeout of a wait; None on a GPU, where a timeout would block the host and the group's timeout applies."""
    return timedelta(seconds=timeout_s) if device.type == "cpu" else None


TRANSPORTS: dict[str, Callable[[float, Group, torch.device], Transport]] = {
    "p2p": PointToPoint,
    "batched": Batched,
    "all-to-all": AllToAll,
    "symmetric-memory": symmetric_memory_of,
}
"""Transports by name; each is constructed with a timeout in seconds, a process group and the device of the blocks."""


def make_transport(
    name: str, timeout_s: float, group: Group = None, device: torch.device | None = None, call: int = 0
) -> Transport:
    """A transport by name; ``auto`` is ``p2p`` on a host (gloo) and ``batched`` on a GPU (NCCL).

    The choice depends on the device of the blocks (None: `default_device`): a group may have several backends.
    `call` is part of the tags of ``p2p``; the others match messages by their order.

    Raises `RunError` for an unknown name, for a group whose backend does not support the device, for ``p2p`` on a GPU,
    where a receive posted early would block the sends queued behind it, and for ``symmetric-memory`` on a host.
    """
    if name != "auto" and name not in TRANSPORTS:
        raise RunError(f"unknown transport {name!r}, expected auto, {', '.join(TRANSPORTS)}")
    device = device or torch.device(default_device())
    backend, on_gpu = dist.get_backend(group), device.type == "cuda"
    if backend == ("gloo" if on_gpu else "nccl"):
        raise RunError(f"a group of backend {backend} cannot send tensors on {device}")
    if on_gpu and name == "p2p":
        raise RunError("the transport p2p is for gloo; NCCL needs batched or all-to-all")
    if name == "symmetric-memory" and not on_gpu:
        raise RunError(f"the transport symmetric-memory copies between GPUs, but data are on {device}: "
                       "expected p2p, batched or all-to-all")  # fmt: skip
    chosen = ("batched" if on_gpu else "p2p") if name == "auto" else name
    if chosen == "p2p":
        return PointToPoint(timeout_s, group, device, call)
    return TRANSPORTS[chosen](timeout_s, group, device)
