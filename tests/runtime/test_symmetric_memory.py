"""Copies and signals over symmetric memory, on a model of streams; no GPU, so `CudaWindow` only by its calls.

A copy takes time: what it writes at the peer is garbage until it ends, and what it reads must be the same when it
begins and when it ends. A signal is set only where it is not set, and waited for until it is. Streams advance in any
order that events and signals allow (`tests.runtime.test_streams`), or are one queue per rank, as where they share one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.executor import symmetric_memory
from runtime.executor.executor import Executor
from runtime.executor.messages import Message
from runtime.executor.streams import Streams
from runtime.executor.symmetric_memory import (
    DONE,
    READY,
    SMALLEST_BYTES,
    CudaWindow,
    Heap,
    Reach,
    SymmetricMemory,
    check_reach,
)
from runtime.executor.transports import make_transport
from runtime.trials.patterns import PatternWork, fill, verify
from tasp_lab.core.errors import RunError
from tasp_lab.schedule.rank_part import CallRow, rank_part
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.backward import DATAFLOWS
from tasp_lab.schedules.attention.forward import CIRCULATIONS, attention
from tasp_lab.schedules.build import collective
from tasp_lab.schedules.registry import COLLECTIVES
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tests.runtime.test_streams import BETWEEN_CHANNELS, Device, DrawnStreams, SlowCopies, ring_of_rings
from tests.schedules.attention.test_backward import Case, cases_of
from tests.support.ranks import on_ranks
from tests.support.selection import fifth

CPU = torch.device("cpu")

Fault = str
"""``no ready``: nothing is set or waited for before a copy; ``no done``: after it; ``done first``: set before it.

``nobody ready``: receivers set nothing.
"""


class Memories:
    """The memories and signals of all ranks."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.windows: list[list[torch.Tensor]] = []
        self.signals: set[tuple[int, int, int, int]] = set()
        self.copied = 0


class ModelWindow:
    """A window of one rank: its calls are operations in the current stream of the rank."""

    slots = 64

    def __init__(self, memories: Memories, number: int, streams: DrawnStreams, fault: Fault, size: int) -> None:
        if number == len(memories.windows):
            memories.windows.append([torch.full((size,), 7, dtype=torch.uint8) for _ in range(memories.world_size)])
        self._memories, self._number, self._streams, self._fault = memories, number, streams, fault
        self._of_ranks = memories.windows[number]
        assert all(each.numel() == size for each in self._of_ranks), "all ranks make windows of one size"

    @property
    def memory(self) -> torch.Tensor:
        return self._of_ranks[self._streams.rank]

    def copy(self, peer: int, offset: int, data: torch.Tensor) -> None:
        place, found = self._of_ranks[peer][offset : offset + data.numel()], list[torch.Tensor]()
        assert place.numel() == data.numel()

        def begin() -> None:
            found.append(data.clone())
            place.fill_(255)

        def end() -> None:
            if not torch.equal(data, found[0]):
                raise RunError("what was being sent has changed")
            place.copy_(found[0])
            self._memories.copied += data.numel()

        self._streams.queue(begin)
        self._streams.queue(end)

    def put(self, peer: int, slot: int, timeout_ms: int) -> None:
        if self._fault not in _NOT_SET[slot % 2]:
            self._set(peer, slot)

    def _set(self, peer: int, slot: int) -> None:
        signals, key = self._memories.signals, (self._number, peer, slot, self._streams.rank)
        self._streams.queue(lambda: signals.add(key), lambda: key not in signals)

    def wait(self, peer: int, slot: int, timeout_ms: int) -> None:
        signals, key = self._memories.signals, (self._number, self._streams.rank, slot, peer)
        if self._fault not in _NOT_AWAITED[slot % 2]:
            self._streams.queue(lambda: signals.remove(key), lambda: key in signals)
        if self._fault == "done first" and slot % 2 == READY:
            self._set(peer, slot - READY + DONE)


_NOT_SET = {READY: ["no ready", "nobody ready"], DONE: ["no done", "done first"]}
_NOT_AWAITED = {READY: ["no ready"], DONE: ["no done"]}


class OneQueue(DrawnStreams):
    """All streams of a rank in one queue, in the order in which the host issues."""

    def queue(self, run: Callable[[], None], ready: Callable[[], bool] = lambda: True) -> None:
        self.device.streams[self.rank, "all"].append((ready, run))


def run(
    schedule: Schedule, seed: int, fault: Fault = "", runs: int = 1, streams_of: type[DrawnStreams] = DrawnStreams,
    ignored: Collection[tuple[str, str]] = (),
) -> Memories:  # fmt: skip
    """Run a schedule on all ranks, several times in the same windows. Raises `RunError`."""
    device, memories = Device(seed), Memories(schedule.world_size)
    for rank in range(schedule.world_size):
        streams = streams_of(device, rank, ignored)
        made: list[int] = []

        def make(size: int, streams: DrawnStreams = streams, made: list[int] = made) -> ModelWindow:
            made.append(size)
            return ModelWindow(memories, len(made) - 1, streams, fault, size)

        transport = SymmetricMemory(Heap(schedule.world_size, make, lambda: 0), 1.0)
        for _ in range(runs):
            work, checked = PatternWork(schedule, rank), list[CallRow]()
            executor = Executor(schedule, rank, transport, work, as_bytes=True)
            executor.copies = SlowCopies(executor, work, streams, checked)
            fill(executor, work)  # what is sent from outside of the memory is gathered by the host
            streams.queue(partial(fill, executor, work))
            executor.prepare(streams)
            executor.run()
            streams.queue(partial(verify, executor, work))
            transport.give_back(executor.memory)
        assert len(made) == 1, "the next run takes the window of the one before"
    device.run()
    assert not memories.signals, "every signal is waited for, so the next run finds none"
    return memories


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric_memory, "SMALLEST_BYTES", 16)


@settings(max_examples=50)
@given(st.sampled_from(sorted(COLLECTIVES)), st.integers(1, 5), st.integers(1, 40), st.integers(0, 2**32))
def test_every_collective_delivers_every_bit(name: str, n: int, size: int, seed: int) -> None:
    schedule = collective(name, full_mesh(n), size)
    sizes = schedule.block_bytes
    sent = sum(int(sizes[block]) for step in schedule.steps for *_, block in step.rows())
    assert run(schedule, seed, runs=2).copied == 2 * sent


@settings(max_examples=25)
@given(
    cases_of(st.sampled_from(DATAFLOWS), max_positions=20), st.integers(0, 2**32), st.sampled_from(
        [DrawnStreams, OneQueue]),
)  # fmt: skip
def test_every_gradient_is_complete(case: Case, seed: int, streams_of: type[DrawnStreams]) -> None:
    run(case.backward, seed, runs=2, streams_of=streams_of)


@pytest.mark.parametrize("name", sorted(CIRCULATIONS))
def test_attention_forward_and_backward(name: str) -> None:
    case = Case(name, "full-mesh:4", Workload(24, head_dim=2, mask="causal", heads=1), "rotate-kv")
    for seed in range(fifth(5)):
        run(attention(name, full_mesh(4), case.workload), seed, runs=2)
        run(case.backward, seed, streams_of=OneQueue)


@pytest.mark.parametrize("inner_first", [False, True])
@pytest.mark.parametrize("name", ["ring", "ring-reduce-scatter"])
def test_channels_have_signals_of_their_own(name: str, inner_first: bool) -> None:
    for seed in range(fifth(6)):
        run(ring_of_rings(name, inner_first), seed, runs=2)


FAULTS = Case("tasp", "full-mesh:4", Workload(24, head_dim=2, heads=1, mask="full"), "rotate-kv")


@pytest.mark.parametrize("fault", ["no ready", "no done", "done first"])
def test_no_signal_can_be_left_out(fault: Fault) -> None:
    def run_often() -> None:
        for seed in range(20):
            run(FAULTS.backward, seed, fault, runs=2)

    with pytest.raises(RunError):
        run_often()


def test_a_receiver_that_is_never_ready_stops_its_sender() -> None:
    with pytest.raises(AssertionError, match="a deadlock"):
        run(collective("ring", full_mesh(3), 8), 0, "nobody ready")


def test_streams_of_copies_and_of_their_channel_wait_for_each_other() -> None:
    def run_often() -> None:
        for seed in range(20):
            run(FAULTS.backward, seed, runs=2, ignored=[BETWEEN_CHANNELS])

    with pytest.raises((RunError, AssertionError)):
        run_often()


# ---------------------------------------------------------------------------------------------- addresses and windows


@settings(max_examples=25)
@given(st.sampled_from(sorted(CIRCULATIONS)), st.integers(2, 6), st.integers(1, 40))
def test_a_rank_derives_where_its_peers_receive(name: str, n: int, positions: int) -> None:
    schedule = attention(name, full_mesh(n), Workload(positions, head_dim=2, mask="causal", heads=1))
    parts = [rank_part(schedule, rank) for rank in range(n)]
    for part in parts:
        largest, of_messages = symmetric_memory.addresses(schedule, part.rank)
        assert largest == max(each.memory_bytes for each in parts)
        sent = [(rows[0].peer, rows[0].step * schedule.lanes + rows[0].lane) for rows in part.messages_out]
        assert {key: len(places) for key, places in of_messages.items()} == {key: sent.count(key) for key in sent}


class PlainWindow:
    """Memory of one rank."""

    slots = 2

    def __init__(self, size_bytes: int) -> None:
        self.memory = torch.empty(size_bytes, dtype=torch.uint8)

    def copy(self, peer: int, offset: int, data: torch.Tensor) -> None: ...
    def put(self, peer: int, slot: int, timeout_ms: int) -> None: ...
    def wait(self, peer: int, slot: int, timeout_ms: int) -> None: ...


def test_windows_are_taken_again_in_the_same_stream() -> None:
    stream = [0]
    heap = Heap(2, PlainWindow, lambda: stream[0])
    first, second = heap.take(100), heap.take(300)
    assert [first.memory.numel(), second.memory.numel()] == [128, 512]
    heap.give_back(second.memory[:300])
    heap.give_back(first.memory[:0])
    assert heap.take(120) is first, "the smallest that fits"
    assert heap.take(120) is second
    heap.give_back(first.memory)
    stream[0] = 1
    assert heap.take(120) is not first


def test_sizes_are_those_of_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric_memory, "SMALLEST_BYTES", SMALLEST_BYTES)
    assert Heap(2, PlainWindow, lambda: 0).take(1).memory.numel() == SMALLEST_BYTES == 2 * 2**20


def test_too_few_signals_are_refused() -> None:
    schedule = ring_of_rings()
    transport = SymmetricMemory(Heap(8, PlainWindow, lambda: 0), 1.0)
    memory = transport.take(schedule, rank_part(schedule, 0), CPU)
    transport.open(1, memory, Streams())
    with pytest.raises(RunError, match=r"2 channels need 4 signals .* has 2: call set_signal_pad_size"):
        transport.open(2, memory, Streams())


# ------------------------------------------------------------------------------------------------ torch, and refusals


class Handle:
    """As torch's `_SymmetricMemory`; the names of parameters are compared with it below."""

    signal_pad_size = 9216

    def __init__(self, calls: list[tuple[object, ...]]) -> None:
        self._calls, self.peer = calls, torch.zeros(32, dtype=torch.uint8)

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self._calls.append(("buffer", rank, sizes, dtype))
        return self.peer

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        self._calls.append(("put", dst_rank, channel, timeout_ms))

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        self._calls.append(("wait", src_rank, channel, timeout_ms))


def test_what_is_called_of_torch() -> None:
    import torch.distributed._symmetric_memory as torchs

    calls: list[tuple[object, ...]] = []
    handle, group = Handle(calls), object()
    with (
        patch.object(torchs, "empty", lambda size, dtype, device: torch.empty(size, dtype=dtype, device=device)),
        patch.object(torchs, "rendezvous", lambda memory, of: handle if of is group else None),
        patch.object(symmetric_memory.dist, "get_world_size", lambda of: 8),
    ):
        window = CudaWindow(32, group, CPU)  # type: ignore[arg-type]
    assert window.slots == 9216 // 4 // 8
    for _ in range(2):
        window.copy(3, 5, torch.arange(1, 5, dtype=torch.uint8))
    window.put(3, 1, 500)
    window.wait(2, 0, 500)
    assert calls == [("buffer", 3, (32,), torch.uint8), ("put", 3, 1, 500), ("wait", 2, 0, 500)]
    assert handle.peer.tolist() == [0] * 5 + [1, 2, 3, 4] + [0] * 23


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("put_signal", ["dst_rank", "channel", "timeout_ms"]),
        ("wait_signal", ["src_rank", "channel", "timeout_ms"]),
        ("get_buffer", ["rank", "sizes", "dtype"]),
    ],
)
def test_torch_has_these_calls(name: str, parameters: list[str]) -> None:
    from torch._C._distributed_c10d import _SymmetricMemory

    signature: Any = getattr(_SymmetricMemory, name).__doc__
    places = [signature.index(f"{each}:") for each in parameters]
    assert places == sorted(places)


def test_memory_that_torch_refuses() -> None:
    with pytest.raises(RunError, match="no symmetric memory of 32 bytes"):
        CudaWindow(32, None, CPU)  # type: ignore[arg-type]


GOOD = [Reach("a", 0, (1, 2)), Reach("a", 1, (0, 2)), Reach("a", 2, (0, 1))]


def test_gpus_of_one_host_that_reach_each_other() -> None:
    check_reach(GOOD)


@pytest.mark.parametrize(
    ("wrong", "seen"),
    [
        (Reach("b", 2, (0, 1)), "all ranks on one host, but ranks 0 and 2 are on two: expected batched"),
        (Reach("a", 1, (0, 2)), "a GPU per rank, but ranks 1 and 2 share GPU 1"),
        (Reach("a", 2, (1,)), "peer access, but GPU 2 cannot reach GPU 0: expected batched"),
        (Reach("a", 2, (0, 1), "NVSHMEM"), "backend CUDA of symmetric memory, but rank 2 has NVSHMEM"),
        (Reach("a", 2, (0, 1), None), "backend CUDA of symmetric memory, but rank 2 has None"),
    ],
)
def test_where_it_cannot_run(wrong: Reach, seen: str) -> None:
    with pytest.raises(RunError, match=f"the transport symmetric-memory needs .*{seen}"):
        check_reach([*GOOD[:2], wrong])


@pytest.mark.distributed
def test_a_host_is_refused() -> None:
    told = on_ranks(refusal_on_rank, 1)
    assert told == ["the transport symmetric-memory copies between GPUs, but data are on cpu: "
                    "expected p2p, batched or all-to-all"]  # fmt: skip


def refusal_on_rank() -> str:
    try:
        make_transport("symmetric-memory", 1.0)
    except RunError as error:
        return str(error)
    return ""


def test_a_message_is_copied_to_where_its_peer_receives_it() -> None:
    """Both messages of one tag, in their order."""
    schedule = collective("ring", full_mesh(2), 8)
    window = PlainWindow(64)
    copies: list[tuple[int, int, int]] = []
    window.copy = lambda peer, offset, data: copies.append((peer, offset, data.numel()))  # type: ignore[method-assign]
    transport = SymmetricMemory(Heap(2, lambda _: window, lambda: 0), 1.0)
    memory = transport.take(schedule, rank_part(schedule, 0), CPU)
    (place,) = transport._heap.addresses
    transport._heap.addresses[place] = {(1, 0): (40, 8)}
    transport.open(1, memory, Streams())
    transport.receive([])
    transport.send([Message(1, 0, memory[:3]), Message(1, 0, memory[3:8])])
    assert copies == [(1, 40, 3), (1, 8, 5)]
