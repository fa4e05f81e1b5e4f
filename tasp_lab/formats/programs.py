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

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
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
        return (
            self[:3] == other[:3]
            and self.land == other.land
            and self.chunks + other.chunks <= most
            and self.at_source.after(self.chunks) == other.at_source
            and self.at_destination.after(self.chunks) == other.at_destination
        )


class _Builder:
    def __init__(self, schedule: Schedule, most_chunks: int) -> None:
        self.schedule, self.most = schedule, most_chunks
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
        n = schedule.world_size
        if shard_bytes // self.unit * n > MAX_CHUNKS:
            parts = int(schedule.initial[0].sum()) if self.kind == "AllGather" else len(schedule.blocks) // n
            near = -(-shard_bytes // max(parts, 1)) * max(parts, 1)
            raise ScheduleError(
                f"{where}: shards of {format_size(shard_bytes)} have no equal chunks, expected at most {MAX_CHUNKS} "
                f"in all; try a multiple of the {parts} blocks of a shard, such as {near} bytes"
            )
        self.size = (schedule.block_bytes // self.unit).tolist()
        self.shard = shard_bytes // self.unit
        self.place = self._places()
        self.scratch = [0] * n
        self.passing: dict[tuple[int, int], Place] = {}  # where a rank keeps what it only passes on

    def _places(self) -> Callable[[int, int], Place]:
        """Where each block lies at a rank, before and after."""
        schedule, size = self.schedule, np.array(self.size)
        if self.kind != "AllToAll":
            if self.kind == "AllReduce":
                offset = np.cumsum(size) - size
            else:
                owned = schedule.initial if self.kind == "AllGather" else schedule.final
                offset = np.zeros(len(size), dtype=np.int64)
                for rank, row in enumerate(owned):  # one rank's shard after the other, in the order of blocks
                    own = np.flatnonzero(row)
                    offset[own] = rank * self.shard + np.cumsum(size[own]) - size[own]
            buffer = "i" if self.kind == "ReduceScatter" else "o"
            fixed = [Place(buffer, each) for each in offset.tolist()]
            return lambda rank, block: fixed[block]
        starts, ends = schedule.initial, schedule.final & ~schedule.initial
        owner = starts.argmax(axis=0)
        target = np.where(ends.any(axis=0), ends.argmax(axis=0), owner)
        inside: dict[tuple[int, int], int] = defaultdict(int)
        offset_in_pair = []
        for block, pair in enumerate(zip(owner.tolist(), target.tolist(), strict=True)):
            offset_in_pair.append(inside[pair])
            inside[pair] += self.size[block]

        def place(rank: int, block: int) -> Place:
            if rank == owner[block]:
                return Place("i", int(target[block]) * self.shard + offset_in_pair[block])
            if rank == target[block]:
                return Place("o", int(owner[block]) * self.shard + offset_in_pair[block])
            if (rank, block) not in self.passing:
                self.passing[rank, block] = self._scratch(rank, self.size[block])
            return self.passing[rank, block]

        return place

    def _scratch(self, rank: int, chunks: int) -> Place:
        self.scratch[rank] += chunks
        return Place("s", self.scratch[rank] - chunks)

    def programs(self) -> Programs:
        n = self.schedule.world_size
        # of each rank: key, lane, sender
        ops: list[list[tuple[tuple[int, int], int, int, Op]]] = [[] for _ in range(n)]
        held: BoolArray = self.schedule.initial.copy()
        if self.kind == "AllToAll":
            for rank in range(n):
                own = Op("copy", -1, Place("i", rank * self.shard), Place("o", rank * self.shard), self.shard)
                ops[rank].append(((-1, 0), -1, -1, own))
        for index, step in enumerate(self.schedule.steps):
            position: dict[tuple[int, int, int], int] = defaultdict(int)
            for message in self._messages(step, held):
                source, destination, lane = message[:3]
                key = 2 * position[source, destination, lane]
                position[source, destination, lane] += 1
                chunks, arrives = message.chunks, message.at_destination
                if message.land != "store":
                    arrives = self._scratch(destination, chunks)
                    join = Op(message.land, -1, arrives, message.at_destination, chunks)
                    ops[destination].append(((index, 2 * MAX_TRANSFERS), lane, source, join))
                send = Op("send", destination, message.at_source, arrives, chunks)
                receive = Op("receive", source, arrives, arrives, chunks)
                ops[source].append(((index, key), lane, source, send))
                ops[destination].append(((index, key + 1), lane, source, receive))
            held[step.source[step.gives], step.block[step.gives]] = False
            held[step.destination, step.block] = True
        channel = self._channels()
        ranks = [self._rank(rank, sorted(ops[rank], key=lambda row: row[:3]), channel) for rank in range(n)]
        return Programs(self.schedule.name, self.kind, n, self.shard, self.unit, self.scratch, ranks)

    def _messages(self, step: Step, held: BoolArray) -> list[_Message]:
        """The messages of a step, in the order of its transfers on each connection."""
        given = set(zip(step.source[step.gives].tolist(), step.block[step.gives].tolist(), strict=True))
        came: set[tuple[int, int]] = set()
        last: dict[tuple[int, int, int], int] = {}
        found: list[_Message] = []
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
                chunks = min(self.most, self.size[block] - first)
                message = _Message(
                    source, destination, lane, at_source.after(first), at_destination.after(first), chunks, land
                )
                before = last.get(message[:3])
                if before is not None and found[before].joins(message, self.most):
                    found[before] = found[before]._replace(chunks=found[before].chunks + chunks)
                else:
                    last[message[:3]] = len(found)
                    found.append(message)
        return found

    def _channels(self) -> dict[int, int]:
        """The channel of each lane: lanes without a common connection share one, with at most 32 thread blocks."""
        connections: dict[int, set[tuple[int, int]]] = defaultdict(set)
        for step in self.schedule.steps:
            rows = zip(step.lane.tolist(), step.source.tolist(), step.destination.tolist(), strict=True)
            for lane, source, destination in set(rows):
                connections[lane].add((source, destination))
        channels: list[set[tuple[int, int]]] = []
        ends: list[dict[int, int]] = []  # of each channel: how many thread blocks each rank has at most
        found = {}
        for lane in sorted(connections):
            pairs = connections[lane]
            count: dict[int, int] = defaultdict(int)
            for source, destination in pairs:
                count[source] += 1
                count[destination] += 1
            for number, used in enumerate(channels):
                if not used & pairs and all(ends[number].get(rank, 0) + each <= 32 for rank, each in count.items()):
                    break
            else:
                number = len(channels)
                channels.append(set())
                ends.append(defaultdict(int))
            channels[number] |= pairs
            for rank, each in count.items():
                ends[number][rank] += each
            found[lane] = number
        return found

    def _rank(
        self, rank: int, rows: Sequence[tuple[tuple[int, int], int, int, Op]], channel: dict[int, int]
    ) -> list[ThreadBlock]:
        """The thread blocks of a rank. A lane with one peer each way is one; else each connection has its own."""
        sends: dict[int, set[int]] = defaultdict(set)
        receives: dict[int, set[int]] = defaultdict(set)
        for _, lane, _, op in rows:
            if op.peer >= 0:
                (sends if op.kind == "send" else receives)[lane].add(op.peer)
        blocks: list[ThreadBlock] = []
        sending: dict[tuple[int, int], int] = {}
        receiving: dict[tuple[int, int], int] = {}
        for lane in sorted(sends):
            together = len(sends[lane]) == len(receives[lane]) == 1
            for peer in sorted(sends[lane]):
                sending[lane, peer] = len(blocks)
                source = min(receives[lane]) if together else -1
                if together:
                    receiving[lane, source] = len(blocks)
                blocks.append(ThreadBlock(peer, source, channel[lane]))
        for lane in sorted(receives):
            for peer in sorted(receives[lane]):
                if (lane, peer) not in receiving:
                    receiving[lane, peer] = len(blocks)
                    blocks.append(ThreadBlock(-1, peer, channel[lane]))
        local = -1
        writer: dict[Place, tuple[int, int]] = {}
        readers: dict[Place, list[tuple[int, int]]] = defaultdict(list)
        waited: dict[int, dict[int, int]] = defaultdict(dict)
        for order, (_, lane, sender, op) in enumerate(rows):
            op.order = order
            if op.kind == "send":
                number = sending[lane, op.peer]
            elif lane >= 0:
                number = receiving[lane, sender]
            else:
                if local < 0:
                    local = len(blocks)
                    blocks.append(ThreadBlock(-1, -1, 0))
                number = local
            needed: dict[int, int] = {}
            earlier = [writer[place] for place in (*op.reads, *op.writes) if place in writer]
            earlier += [reader for place in op.writes for reader in readers[place]]
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
