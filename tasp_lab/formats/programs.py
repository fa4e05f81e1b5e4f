"""A collective as programs of ranks: thread blocks that send, receive, add and copy chunks, as MSCCL and MSCCL++ do.

>>> from tasp_lab.schedules.collectives.all_gather import ring_all_gather
>>> from tasp_lab.topology.builders import full_mesh
>>> programs = rank_programs(ring_all_gather(full_mesh(3), 64))
>>> for op in programs.ranks[0][0].ops:
...     print(op.kind, op.peer, op.source, op.destination)
send 1 o0 o0
receive 2 o2 o2
send 1 o2 o2
receive 2 o1 o1

A *chunk* is the greatest common divisor of all blocks and of a shard; every block has one place at a rank, in the
input (``i``), the output (``o``) or the scratch buffer (``s``). A block that arrives where parts of its sum are goes to
the scratch buffer and is added from there.

**No deadlock, with connections that hold one message.** All operations have one order: by step; within a step by their
number on their connection, a send before its receive; additions at the end of the step. Thread blocks follow it, and an
operation waits only for earlier ones: for what it reads and overwrites, and a send for the receive of the message
before it on its connection. So the first operation that has not ended can always run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import gcd
from typing import Literal, NamedTuple

import numpy as np

from tasp_lab.core.arrays import BoolArray
from tasp_lab.core.errors import ScheduleError
from tasp_lab.core.units import format_size
from tasp_lab.schedule.blocks import Blocks
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.collectives.conditions import collectives_of
from tasp_lab.schedules.collectives.kinds import CollectiveKind

MAX_TRANSFERS = 2**18
"""Plans of more transfers exceed every limit of the formats."""

MAX_CHUNKS = 2**15 - 1
"""The largest offset of a chunk: formats have 16 bits with a sign."""

COLLECTIVES: dict[CollectiveKind, str] = {
    "AllGather": "allgather", "AllReduce": "allreduce", "ReduceScatter": "reducescatter", "AllToAll": "alltoall",
}  # fmt: skip
"""The collectives that plans have, by their names in files.

The first that fits is taken: on two ranks an AllToAll is a SendRecv, too.
"""

OpKind = Literal["send", "receive", "add", "copy"]


class Place(NamedTuple):
    """A chunk of a buffer of a rank: ``i``, ``o`` or ``s``, and its offset in chunks."""

    buffer: str
    offset: int

    def __str__(self) -> str:
        return f"{self.buffer}{self.offset}"

    def after(self, chunks: int) -> Place:
        return Place(self.buffer, self.offset + chunks)


@dataclass(eq=False)
class Op:
    """An operation of a thread block on `chunks` neighbouring chunks.

    A send reads `source` here, and `destination` is the place at the peer; a receive writes `destination` here. An add
    or a copy has both here, and no `peer` (-1). `waits` are operations of other thread blocks of the rank that have to
    end before, each as thread block and index.
    """

    kind: OpKind
    peer: int
    source: Place
    destination: Place
    chunks: int
    waits: list[tuple[int, int]] = field(default_factory=list)
    order: int = 0
    """Its place in the order of all operations of its rank."""

    @property
    def reads(self) -> list[Place]:
        places = [] if self.kind == "receive" else [self.source]
        return _each([*places, self.destination] if self.kind == "add" else places, self.chunks)

    @property
    def writes(self) -> list[Place]:
        return [] if self.kind == "send" else _each([self.destination], self.chunks)


def _each(places: Iterable[Place], chunks: int) -> list[Place]:
    return [place.after(number) for place in places for number in range(chunks)]


@dataclass(frozen=True, eq=False)
class ThreadBlock:
    """Operations that run one after another; one peer to send to and one to receive from at most, else -1."""

    send: int
    receive: int
    channel: int
    ops: list[Op] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Programs:
    """The thread blocks of each rank, and the chunks of its buffers.

    A shard has `shard_chunks` of `chunk_bytes`; `scratch` are the chunks of the scratch buffer of each rank.
    """

    name: str
    kind: CollectiveKind
    world_size: int
    shard_chunks: int
    chunk_bytes: int
    scratch: list[int]
    ranks: list[list[ThreadBlock]]

    @property
    def channels(self) -> int:
        return 1 + max((block.channel for blocks in self.ranks for block in blocks), default=0)


def communication(schedule: Schedule) -> Schedule:
    """The data that a layer moves as a schedule without kernel calls; a collective is returned as it is.

    Keys that go around, the exchange before the attention of Ulysses, and gathered states are an AllGather or an
    AllToAll; sums, which kernel calls make, are left out. Raises `ScheduleError` if no data move.
    """
    if schedule.task is None:
        return schedule
    is_data = np.array([not kind.join for kind in schedule.blocks.kinds])[schedule.blocks.kind]
    arrives = schedule.initial.copy()
    moved = np.zeros(len(schedule.blocks), dtype=bool)
    for step in schedule.steps:
        data = is_data[step.block]
        arrives[step.destination[data], step.block[data]] = True
        moved[step.block[data]] = True
    chosen = np.flatnonzero(moved)
    if not len(chosen):
        raise ScheduleError(f"schedule {schedule.name!r} moves results of kernel calls only, expected data to export")
    number = np.cumsum(moved) - 1
    steps = []
    for step in schedule.steps:
        data = np.flatnonzero(is_data[step.block])
        if len(data):
            steps.append(Step(step.source[data], step.destination[data], step.lane[data], number[step.block[data]]))
    own, all_copies = schedule.initial[:, chosen], arrives[:, chosen]
    blocks = Blocks.of_data(schedule.block_bytes[chosen])
    return Schedule(schedule.name, schedule.world_size, schedule.lanes, blocks, own, all_copies, steps)


def rank_programs(schedule: Schedule, most_chunks: int = 71) -> Programs:
    """The programs of a collective, with at most `most_chunks` chunks in an operation.

    Raises `ScheduleError` for other collectives than `COLLECTIVES`, blocks without a common chunk, and too many
    transfers.
    """
    return _Builder(schedule, most_chunks).programs()


class _Message(NamedTuple):
    """Chunks that go from rank to rank in one operation of each; how they `land` is how the receiver goes on."""

    source: int
    destination: int
    lane: int
    at_source: Place
    at_destination: Place
    chunks: int
    land: Literal["store", "add", "copy"]

    def joins(self, other: _Message, most: int) -> bool:
        """Whether the other is the next one in memory, and both together have at most so many chunks."""
        ends = self.at_source.after(self.chunks), self.at_destination.after(self.chunks)
        same = self[:3] == other[:3] and self.land == other.land
        return same and self.chunks + other.chunks <= most and ends == (other.at_source, other.at_destination)


class _Row(NamedTuple):
    """An operation of a rank: its place in the order of all, its lane, and the sender of what it uses."""

    key: tuple[int, int]
    lane: int
    sender: int
    op: Op


class _Builder:
    def __init__(self, schedule: Schedule, most_chunks: int) -> None:
        self.schedule, self.most, n = schedule, most_chunks, schedule.world_size
        where = f"schedule {schedule.name!r}"
        found = collectives_of(schedule)
        fitting = [kind for kind in COLLECTIVES if kind in found]
        if not fitting:
            what = f"is a {next(iter(found))}" if found else "is no collective of equal shards"
            raise ScheduleError(f"{where} {what}, expected one of {', '.join(COLLECTIVES)} for a plan")
        if schedule.transfers > MAX_TRANSFERS:
            raise ScheduleError(
                f"{where} has {schedule.transfers:,} transfers, expected at most {MAX_TRANSFERS:,} for a plan"
            )
        self.kind = fitting[0]
        shard_bytes = found[self.kind]
        self.unit = gcd(shard_bytes, *schedule.block_bytes.tolist())  # a block of sums may be larger than a shard
        self.shard = shard_bytes // self.unit
        if self.shard * n > MAX_CHUNKS:
            parts = int(schedule.initial[0].sum()) if self.kind == "AllGather" else len(schedule.blocks) // n
            near = -(-shard_bytes // max(parts, 1)) * max(parts, 1)
            raise ScheduleError(
                f"{where}: shards of {format_size(shard_bytes)} have no equal chunks, expected at most {MAX_CHUNKS} "
                f"in all; try a multiple of the {parts} blocks of a shard, such as {near} bytes"
            )
        self.size: list[int] = (schedule.block_bytes // self.unit).tolist()
        self.scratch = [0] * n
        self.place = self._places_of_pairs() if self.kind == "AllToAll" else self._places_of_shards()

    def _places_of_shards(self) -> Callable[[int, int], Place]:
        """Where each block lies at a rank: one rank's shard after the other, in the order of blocks."""
        size = np.array(self.size)
        offset = np.cumsum(size) - size
        if self.kind != "AllReduce":
            for rank, row in enumerate(self.schedule.initial if self.kind == "AllGather" else self.schedule.final):
                own = np.flatnonzero(row)
                offset[own] = rank * self.shard + np.cumsum(size[own]) - size[own]
        places = [Place("i" if self.kind == "ReduceScatter" else "o", each) for each in offset.tolist()]
        return lambda rank, block: places[block]

    def _places_of_pairs(self) -> Callable[[int, int], Place]:
        """Where each block of an AllToAll lies: at its owner, at its target, and where a rank only passes it on."""
        starts, ends = self.schedule.initial, self.schedule.final & ~self.schedule.initial
        owner = starts.argmax(axis=0)
        target = np.where(ends.any(axis=0), ends.argmax(axis=0), owner).tolist()
        inside: dict[tuple[int, int], int] = defaultdict(int)
        places: dict[tuple[int, int], Place] = {}
        for block, pair in enumerate(zip(owner.tolist(), target, strict=True)):
            places[pair[1], block] = Place("o", pair[0] * self.shard + inside[pair])
            places[pair[0], block] = Place("i", pair[1] * self.shard + inside[pair])
            inside[pair] += self.size[block]

        def place(rank: int, block: int) -> Place:
            if (rank, block) not in places:
                places[rank, block] = self._scratch(rank, self.size[block])
            return places[rank, block]

        return place

    def _scratch(self, rank: int, chunks: int) -> Place:
        self.scratch[rank] += chunks
        return Place("s", self.scratch[rank] - chunks)

    def programs(self) -> Programs:
        schedule, n = self.schedule, self.schedule.world_size
        rows: list[list[_Row]] = [[] for _ in range(n)]
        held: BoolArray = schedule.initial.copy()
        if self.kind == "AllToAll":
            for rank in range(n):
                own = Op("copy", -1, Place("i", rank * self.shard), Place("o", rank * self.shard), self.shard)
                rows[rank].append(_Row((-1, 0), -1, -1, own))
        for index, step in enumerate(schedule.steps):
            position: dict[tuple[int, int, int], int] = defaultdict(int)
            for message in self._messages(step, held):
                source, destination, lane, at_source, arrives, chunks, land = message
                key = 2 * position[source, destination, lane]
                position[source, destination, lane] += 1
                if land != "store":
                    arrives = self._scratch(destination, chunks)
                    join = Op(land, -1, arrives, message.at_destination, chunks)
                    rows[destination].append(_Row((index, 2 * MAX_TRANSFERS), lane, source, join))
                send = Op("send", destination, at_source, arrives, chunks)
                receive = Op("receive", source, arrives, arrives, chunks)
                rows[source].append(_Row((index, key), lane, source, send))
                rows[destination].append(_Row((index, key + 1), lane, source, receive))
            held[step.source[step.gives], step.block[step.gives]] = False
            held[step.destination, step.block] = True
        channel = self._channels()
        ranks = [_thread_blocks(sorted(each, key=lambda row: row[:3]), channel) for each in rows]
        return Programs(schedule.name, self.kind, n, self.shard, self.unit, self.scratch, ranks)

    def _messages(self, step: Step, held: BoolArray) -> list[_Message]:
        """The messages of a step, in the order of its transfers on each connection."""
        given = set(zip(step.source[step.gives].tolist(), step.block[step.gives].tolist(), strict=True))
        came: set[tuple[int, int]] = set()
        last: dict[tuple[int, int, int], int] = {}
        messages: list[_Message] = []
        for source, destination, lane, block in step.rows():
            cell = (destination, block)
            was_there = bool(held[cell])
            land: Literal["store", "add", "copy"] = "store"
            if cell in came or (was_there and cell not in given):
                land = "add"
            elif was_there:
                land = "copy"  # over what leaves at this step, so at its end
            came.add(cell)
            at_source, at_destination = self.place(source, block), self.place(destination, block)
            for first in range(0, self.size[block], self.most):
                chunks, here, there = min(self.most, self.size[block] - first), at_source.after(first), at_destination
                message = _Message(source, destination, lane, here, there.after(first), chunks, land)
                before = last.get(message[:3])
                if before is not None and messages[before].joins(message, self.most):
                    messages[before] = messages[before]._replace(chunks=messages[before].chunks + chunks)
                else:
                    last[message[:3]] = len(messages)
                    messages.append(message)
        return messages

    def _channels(self) -> dict[int, int]:
        """The channel of each lane: lanes without a common connection share one, with at most 32 thread blocks."""
        connections: dict[int, set[tuple[int, int]]] = defaultdict(set)
        for step in self.schedule.steps:
            for lane, *pair in zip(step.lane.tolist(), step.source.tolist(), step.destination.tolist(), strict=True):
                connections[lane].add((pair[0], pair[1]))
        channels: list[set[tuple[int, int]]] = []
        channel_of = {}
        for lane, pairs in sorted(connections.items()):
            channels.append(set())  # the first that fits is taken, else a new one
            number = next(
                number
                for number, used in enumerate(channels)
                if not used & pairs and (not used or max(Counter(chain.from_iterable(used | pairs)).values()) <= 32)
            )
            channels[number] |= pairs
            channels = list(filter(None, channels))
            channel_of[lane] = number
        return channel_of


def _thread_blocks(rows: Sequence[_Row], channel: dict[int, int]) -> list[ThreadBlock]:
    """The thread blocks of a rank. A lane with one peer each way is one; else each connection has its own."""
    peers: dict[tuple[str, int], set[int]] = defaultdict(set)
    for _, lane, _, op in rows:
        if op.peer >= 0:
            peers[op.kind, lane].add(op.peer)
    blocks: list[ThreadBlock] = []
    number_of: dict[tuple[str, int, int], int] = {}
    for kind, lane in sorted(peers, key=lambda each: (each[0] != "send", each[1])):
        together = all(len(peers.get((side, lane), ())) == 1 for side in ("send", "receive"))
        for peer in sorted(peers[kind, lane]):
            if (kind, lane, peer) in number_of:
                continue  # with its sends
            ends = {side: min(peers[side, lane]) if together else -1 for side in ("send", "receive")} | {kind: peer}
            number_of |= {(side, lane, end): len(blocks) for side, end in ends.items() if end >= 0}
            blocks.append(ThreadBlock(ends["send"], ends["receive"], channel[lane]))
    writer: dict[Place, tuple[int, int]] = {}
    readers: dict[Place, list[tuple[int, int]]] = defaultdict(list)
    waited: dict[int, dict[int, int]] = defaultdict(dict)
    for order, (_, lane, sender, op) in enumerate(rows):
        op.order = order
        key = ("send", lane, op.peer) if op.kind == "send" else ("receive", lane, sender)
        if key not in number_of:  # the copy of a rank's own part
            number_of[key] = len(blocks)
            blocks.append(ThreadBlock(-1, -1, 0))
        number = number_of[key]
        earlier = [writer[place] for place in (*op.reads, *op.writes) if place in writer]
        earlier += [reader for place in op.writes for reader in readers[place]]
        needed: dict[int, int] = {}
        for block, index in earlier:
            if block != number and index > waited[number].get(block, -1):
                needed[block] = max(index, needed.get(block, -1))
        waited[number] |= needed
        op.waits.extend(sorted(needed.items()))
        me = (number, len(blocks[number].ops))
        blocks[number].ops.append(op)
        for place in op.reads:
            readers[place].append(me)
        for place in op.writes:
            writer[place], readers[place] = me, []
    return blocks
