"""MSCCL XML, the language of msccl-executor-nccl, RCCL up to ROCm 7.2 and of the synthesizers, both ways.

    write(schedule)                           # a file for any size
    read(Path("taccl.xml"), 2**20)            # an AllGather of 1 MiB per rank

The grammar is that of the parser of RCCL (src/misc/msccl/msccl_parser.cc at 0cbce2a). RCCL has no kernels of fused
operations, so only ``s``, ``r``, ``re``, ``cpy`` and ``nop`` are written; all types are read.

**What a file means.** Steps of a thread block run one after another. A step with ``depid`` and ``deps`` begins when
that step has ended; a ``nop`` does nothing else. The k-th receive on a connection (source, destination and channel)
takes what the k-th send put there, and begins after that send has ended; a send waits while the connection is full.
Nothing else has an order, so a file is right only if all these orders give the same result. That is proved by
happens-before: of two steps that use one chunk of memory, one to write it, the one must have ended before the other
begins, by a path of program order, waits and messages (vector clocks: C. J. Fidge, Timestamps in message-passing
systems that preserve the partial ordering, 1988). What a full connection holds back is no such path, as engines choose
what it holds; but no step may wait for ever with the slots of the protocol. Buffers are one memory where ``inplace``
makes them so; with ``outofplace`` as well, both ways are proved.

A file that is right in every order is executed in one, and the schedule that it becomes is proved as any other. Its
steps are levels: a transfer is a step later than those that brought what it sends, and no earlier than the sends before
it in its thread block, which is its lane. Waits of a thread block for others without data are left out, and so are the
slices in which engines pipeline a message.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import networkx
import numpy as np
import numpy.typing as npt

from tasp_lab.core.errors import ScheduleError, unknown
from tasp_lab.formats.programs import (
    COLLECTIVES,
    MAX_CHUNKS,
    Op,
    Place,
    Programs,
    ThreadBlock,
    communication,
    rank_programs,
)
from tasp_lab.rings.rings import split_bytes
from tasp_lab.schedule.blocks import Blocks
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.collectives.kinds import CollectiveKind
from tasp_lab.schedules.registry import ScheduleSpec
from tasp_lab.topology.graph import Topology

MAX_STEPS = 64
"""Steps of a thread block; msccl-executor-nccl has as many unless built with another MSCCL_MAX_NUM_STEPS."""

MAX_THREAD_BLOCKS, MAX_CHANNELS, MAX_ELEMENTS, MAX_COUNT = 64, 32, 4096, 71
"""Thread blocks of a rank, channels, elements of a rank in a file, chunks of a step."""

MAX_FILE_BYTES = 8 * 2**20

SLOTS = {"Simple": 2, "LL": 8, "LL128": 8}
"""Messages that a connection holds, by protocol: of its 8 steps (NCCL_STEPS) a message takes 4 with Simple, else one
(MSCCL_CHUNKSTEPS in msccl_struct.h, msccl_kernel.cu, prims_ll.h of msccl-executor-nccl at c6f6b36)."""

_TYPES = {"send": "s", "receive": "r", "add": "re", "copy": "cpy"}


# -- out ---------------------------------------------------------------------------------------------------------------
def write(schedule: Schedule) -> str:
    """The file of a collective, or of the data that a layer moves.

    Raises `ScheduleError` for what is no collective, and for more than the parsers take.

    >>> from tasp_lab.schedules.collectives.all_gather import ring_all_gather
    >>> from tasp_lab.topology.builders import full_mesh
    >>> print(write(ring_all_gather(full_mesh(2), 64)).splitlines()[3])
          <step s="0" type="s" srcbuf="o" srcoff="0" dstbuf="o" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
    """
    programs = rank_programs(communication(schedule), MAX_COUNT)
    if programs.channels > MAX_CHANNELS:
        raise ScheduleError(
            f"schedule {schedule.name!r} needs {programs.channels} channels, expected at most {MAX_CHANNELS} in "
            "MSCCL XML"
        )
    lines = [_head(programs)]
    in_place = programs.kind != "AllToAll"
    total = programs.shard_chunks * programs.world_size
    for rank, blocks in enumerate(programs.ranks):
        inputs, outputs = (total, 0) if programs.kind == "ReduceScatter" else (0 if in_place else total, total)
        lines.append(
            f'  <gpu id="{rank}" i_chunks="{inputs}" o_chunks="{outputs}" s_chunks="{programs.scratch[rank]}">'
        )
        body = list(_gpu(schedule.name, rank, blocks))
        if len(body) > MAX_ELEMENTS:
            raise ScheduleError(
                f"schedule {schedule.name!r}, rank {rank}: {len(body)} XML elements, expected at most {MAX_ELEMENTS}"
            )
        lines += [*body, "  </gpu>"]
    return "\n".join([*lines, "</algo>", ""])


def _head(programs: Programs) -> str:
    name = "".join(letter if letter.isalnum() else "_" for letter in programs.name)
    in_place, coll = int(programs.kind != "AllToAll"), COLLECTIVES[programs.kind]
    return (
        f'<algo name="tasp_lab_{name}" proto="Simple" nchannels="{programs.channels}" '
        f'nchunksperloop="{programs.shard_chunks * programs.world_size}" ngpus="{programs.world_size}" coll="{coll}" '
        f'inplace="{in_place}" outofplace="{1 - in_place}" minBytes="0" maxBytes="0">'
    )


def _gpu(name: str, rank: int, blocks: list[ThreadBlock]) -> Iterator[str]:
    where = f"schedule {name!r}, rank {rank}"
    if len(blocks) > MAX_THREAD_BLOCKS:
        raise ScheduleError(f"{where}: {len(blocks)} thread blocks, expected at most {MAX_THREAD_BLOCKS} in MSCCL XML")
    # Every wait but the last of an operation is a step of its own before it.
    number = [[0] * len(block.ops) for block in blocks]
    for block, ops in enumerate(blocks):
        step = -1
        for index, op in enumerate(ops.ops):
            step += max(len(op.waits), 1)
            number[block][index] = step
        if step >= MAX_STEPS:
            raise ScheduleError(
                f"{where}: thread block {block} has {step + 1} steps, expected at most {MAX_STEPS} in MSCCL XML; "
                "fewer ranks, rings or chunks need fewer"
            )
    awaited = {(each, index) for block in blocks for op in block.ops for each, index in op.waits}
    for block, ops in enumerate(blocks):
        yield f'    <tb id="{block}" send="{ops.send}" recv="{ops.receive}" chan="{ops.channel}">'
        for index, op in enumerate(ops.ops):
            at = number[block][index] - max(len(op.waits) - 1, 0)
            for each, before in op.waits[:-1]:
                yield _step(at, "nop", Op("copy", -1, Place("o", 0), Place("o", 0), 0), (each, number[each][before]), 0)
                at += 1
            last = (op.waits[-1][0], number[op.waits[-1][0]][op.waits[-1][1]]) if op.waits else (-1, -1)
            yield _step(at, _TYPES[op.kind], op, last, int((block, index) in awaited))
        yield "    </tb>"


def _step(number: int, kind: str, op: Op, waits: tuple[int, int], awaited: int) -> str:
    source, destination = op.source, op.destination
    return (
        f'      <step s="{number}" type="{kind}" srcbuf="{source.buffer}" srcoff="{source.offset}" '
        f'dstbuf="{destination.buffer}" dstoff="{destination.offset}" cnt="{op.chunks}" '
        f'depid="{waits[0]}" deps="{waits[1]}" hasdep="{awaited}"/>'
    )


# -- in ----------------------------------------------------------------------------------------------------------------
class _Step(NamedTuple):
    type: str
    source: Place
    destination: Place
    chunks: int
    waits: tuple[int, int]
    signals: bool


@dataclass(eq=False)
class _Block:
    """A thread block of a file: the ranks it sends to and receives from, its channel and steps.

    While the file runs, `done` steps have ended, and `clock` has of each thread block of the file, by its `index`, how
    many steps have ended before the next one here begins, in every order. Clocks are shared, so never changed.
    """

    rank: int
    number: int
    send: int
    receive: int
    channel: int
    steps: list[_Step]
    index: int = 0
    done: int = 0
    clock: _Clock = field(default_factory=lambda: np.zeros(0, dtype=np.int32))

    def at(self, step: int) -> str:
        return f"GPU {self.rank}, thread block {self.number}, step {step}"

    def follow(self, other: _Block, step: int, clock: _Clock) -> None:
        """The next step here begins after a step of another thread block, which began at `clock`."""
        if self.clock[other.index] <= step:
            self.clock = np.maximum(self.clock, clock)
            self.clock[other.index] = step + 1


class _Access(NamedTuple):
    """A step that reads or writes a chunk of memory by one of its names."""

    block: _Block
    step: int
    verb: str
    place: Place

    def __str__(self) -> str:
        return f"{self.block.at(self.step)} {self.verb} {self.place}"


class _Value(NamedTuple):
    """What a chunk of memory has: the ranks, as bits, whose parts of a block it is the sum of.

    `pending` are transfers that brought it and have not joined the rank's own parts yet.
    """

    block: int
    parts: int
    pending: tuple[int, ...] = ()


_Clock = npt.NDArray[np.int32]

_Connection = tuple[int, int, int]
"""Source, destination and channel."""


@dataclass
class _Transfer:
    source: int
    destination: int
    lane: int
    value: _Value
    gives: bool = False
    after: list[tuple[int, int]] = field(default_factory=list)
    """Transfers that cannot be at a later step, and 1 where they have to be at an earlier one, else 0."""


def read(path: Path, shard_bytes: int) -> Schedule:
    """The schedule of a file, for `shard_bytes` per rank as `tasp_lab.schedules.collectives.kinds` counts them.

    Raises `ScheduleError`, with file, GPU, thread block and step, for what is no MSCCL XML, for a collective that is
    not known, for steps that wait for each other or for what is never sent, for two that use a chunk of memory in no
    fixed order, and for a wrong result.
    """
    try:
        root = _parse(path)
        if root.get("inplace") == root.get("outofplace") == "1":
            _Reader(path.name, root, shard_bytes, in_place=True).schedule()
        in_place = root.get("inplace") == "1" and root.get("outofplace") != "1"
        return _Reader(path.name, root, shard_bytes, in_place).schedule()
    except _FileError as error:
        raise ScheduleError(f"{path}: {error}") from None


def spec(name: str) -> ScheduleSpec:
    """The file of a name as a schedule of the registry. Raises `ScheduleError` as `read` does."""

    def build(topology: Topology, shard_bytes: int) -> Schedule:
        schedule = read(Path(name), shard_bytes).renamed(name)
        schedule.check_routes(topology)
        return schedule

    try:
        return ScheduleSpec(_kind(_parse(Path(name))), build)
    except _FileError as error:
        raise ScheduleError(f"{name}: {error}") from None


_ONE_COPY = "steps of a schedule cannot do that, as a GPU has one copy of a chunk, which what comes joins at once"
"""Why a plan that is right may not be read: memory of plans has room for several sums of a chunk."""


class _FileError(Exception):
    """An error in the file; the message has the place."""


def _parse(path: Path) -> ElementTree.Element:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise _FileError(f"{path.stat().st_size:,} bytes, expected at most {MAX_FILE_BYTES:,}")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise _FileError(f"{error.strerror or error}, expected MSCCL XML") from None
    except UnicodeDecodeError:
        raise _FileError("no text in UTF-8, expected MSCCL XML") from None
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise _FileError("declares a document type or entities, expected plain MSCCL XML")
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise _FileError(f"no XML, {error}") from None
    if root.tag != "algo":
        raise _FileError(f"the element is <{root.tag}>, expected <algo> of MSCCL XML")
    return root


def _kind(root: ElementTree.Element) -> CollectiveKind:
    text = (root.get("coll") or "").replace("_", "").casefold()
    kinds = {name: kind for kind, name in COLLECTIVES.items()}
    if text not in kinds:
        raise _FileError(unknown("collective", root.get("coll") or "", kinds))
    return kinds[text]


def _number(element: ElementTree.Element, name: str, where: str, low: int, high: int) -> int:
    text = element.get(name)
    if text is None:
        raise _FileError(f"{where} has no attribute {name!r}")
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise _FileError(f"{where}: {name} is {text!r}, expected a whole number from {low} to {high}")
    return value


_READS, _SENDS, _RECEIVES = (
    {"s", "re", "cpy", "rrs", "rrc", "rrcs"},
    {"s", "rcs", "rrs", "rrcs"},
    {"r", "rcs", "rrs", "rrc", "rrcs"},
)
_STORES = {"r", "re", "cpy", "rcs", "rrc", "rrcs"}
_STEP_TYPES = ("s", "r", "cpy", "re", "nop", "rcs", "rrs", "rrc", "rrcs")
_BUFFERS = {"i": "i", "o": "o", "s": "s", "input": "i", "output": "o", "scratch": "s"}


class _Reader:
    def __init__(self, name: str, root: ElementTree.Element, shard_bytes: int, in_place: bool) -> None:
        self.name, self.shard_bytes, self.in_place = name, shard_bytes, in_place
        self.kind = _kind(root)
        protocol = root.get("proto") or ""
        if protocol not in SLOTS:
            raise _FileError(unknown("protocol", protocol, SLOTS))
        self.slots = SLOTS[protocol]
        self.n = _number(root, "ngpus", "<algo>", 1, 1024)
        chunks = _number(root, "nchunksperloop", "<algo>", 1, MAX_CHUNKS)
        if self.kind != "AllReduce" and chunks % self.n:
            raise _FileError(f"<algo>: nchunksperloop is {chunks}, expected a multiple of {self.n} GPUs")
        self.chunks = chunks
        self.shard = chunks // self.n
        # Without any hasdep="1" a file is meant for readers that take waits from depid alone, as simulators do.
        self.has_signals = any(step.get("hasdep") == "1" for step in root.iter("step"))
        gpus = {_number(gpu, "id", "<gpu>", 0, self.n - 1): gpu for gpu in root.iter("gpu")}
        if len(gpus) != self.n:
            missing = next(rank for rank in range(self.n) if rank not in gpus)
            raise _FileError(f"GPU {missing} is missing, expected {self.n} GPUs")
        self.blocks = [self._thread_blocks(gpus[rank], rank) for rank in range(self.n)]
        for index, block in enumerate(chain.from_iterable(self.blocks)):
            block.index = index
        self.memory: list[dict[Place, _Value]] = [{} for _ in range(self.n)]
        self.transfers: list[_Transfer] = []
        self.events: dict[tuple[int, int], list[tuple[bool, int]]] = defaultdict(list)
        """Of each rank and block: whether a transfer is an arrival or is sent, in the order in which it counts."""

    def _thread_blocks(self, gpu: ElementTree.Element, rank: int) -> list[_Block]:
        found: list[_Block] = []
        connections: set[tuple[str, int, int]] = set()
        sizes = {"i": self.shard if self.kind == "AllGather" else self.chunks}
        sizes["o"] = self.shard if self.kind == "ReduceScatter" else self.chunks
        sizes["s"] = _number(gpu, "s_chunks", f"GPU {rank}", 0, 2**31)
        for number, tb in enumerate(
            sorted(gpu.iter("tb"), key=lambda each: int(each.get("id") or 0) if (each.get("id") or "").isdigit() else 0)
        ):
            where = f"GPU {rank}, thread block {number}"
            if _number(tb, "id", f"GPU {rank}, <tb>", 0, 2**15) != number:
                raise _FileError(f"{where} is missing, found {tb.get('id')}")
            peers = [_number(tb, side, where, -1, self.n - 1) for side in ("send", "recv")]
            channel = _number(tb, "chan", where, 0, 1023)
            for side, peer in zip(("send", "recv"), peers, strict=True):
                if peer == rank:
                    raise _FileError(f"{where}: {side} is {peer}, its own GPU")
                if peer >= 0 and (side, peer, channel) in connections:
                    raise _FileError(f"{where}: another one has the connection with GPU {peer} on channel {channel}")
                connections.add((side, peer, channel))
            steps = [
                self._step(step, index, f"{where}, step {index}", sizes) for index, step in enumerate(tb.iter("step"))
            ]
            for index, step in enumerate(steps):
                for kinds, peer, side in ((_SENDS, peers[0], "send"), (_RECEIVES, peers[1], "recv")):
                    if step.type in kinds and peer < 0:
                        raise _FileError(
                            f"{where}, step {index}: type {step.type!r}, but {side} of its thread block is -1"
                        )
            found.append(_Block(rank, number, peers[0], peers[1], channel, steps))
        for block in found:
            for index, step in enumerate(block.steps):
                other, at = step.waits
                waits = f"{block.at(index)} waits for thread block {other}, step {at}"
                if other >= 0 and not (other < len(found) and 0 <= at < len(found[other].steps)):
                    raise _FileError(f"{waits}, which is missing")
                if other >= 0 and self.has_signals and not found[other].steps[at].signals:
                    raise _FileError(f'{waits}, which has no hasdep="1": engines do not signal its end')
        return found

    def _step(self, step: ElementTree.Element, index: int, where: str, sizes: Mapping[str, int]) -> _Step:
        if _number(step, "s", where, 0, 2**20) != index:
            raise _FileError(f"{where} is missing, found s={step.get('s')!r}")
        kind = step.get("type") or ""
        if kind not in _STEP_TYPES:
            raise _FileError(f"{where}: {unknown('type', kind, _STEP_TYPES)}")
        places = []
        for side, used in (("src", kind in _READS), ("dst", kind in _STORES)):
            buffer = _BUFFERS.get(step.get(f"{side}buf") or "", "")
            if used and not buffer:
                raise _FileError(f"{where}: {side}buf is {step.get(f'{side}buf')!r}, expected i, o or s")
            places.append(Place(buffer, _number(step, f"{side}off", where, 0 if used else -1, MAX_CHUNKS)))
        waits = tuple(_number(step, name, where, -1, 2**20) for name in ("depid", "deps"))
        count = _number(step, "cnt", where, 0 if kind == "nop" else 1, MAX_CHUNKS)
        for place, used in zip(places, (kind in _READS, kind in _STORES), strict=True):
            if used and place.offset + count > sizes[place.buffer]:
                last = place.after(count - 1)
                raise _FileError(
                    f"{where}: no {last}, expected chunks of the {sizes[place.buffer]} of buffer {place.buffer}"
                )
        return _Step(kind, places[0], places[1], count, (waits[0], waits[1]), step.get("hasdep") == "1")

    def schedule(self) -> Schedule:
        n, initial = self.n, self._start()
        self._run()
        final = np.zeros_like(initial)
        for rank in range(n):
            for number, block in enumerate(self._blocks(rank)[1]):
                place = Place("o", number)
                value = self.memory[rank].get(self._real(rank, place))
                if value is None or (value.block, value.parts) != (block, self._all_parts(block)):
                    has = "nothing" if value is None else self._text(value)
                    raise _FileError(f"GPU {rank} ends with {has} in {place}, expected all of chunk {block}")
                self._register(rank, value)
                final[rank, block] = True
        is_sum = self.kind in ("AllReduce", "ReduceScatter")
        left = self._gives(initial, final)
        sizes = self._sizes()
        if not is_sum:
            final |= initial
        return Schedule(
            name=self.name,
            world_size=n,
            lanes=max((transfer.lane for transfer in self.transfers), default=0) + 1,
            blocks=Blocks.of_sums(sizes, n) if is_sum else Blocks.of_data(sizes),
            initial=initial,
            final=final,
            steps=self._steps(),
            initial_part=np.arange(n)[:, None] if is_sum else None,
            kept=left if left.any() else None,
        )

    def _blocks(self, rank: int) -> tuple[Sequence[int], Sequence[int]]:
        """The blocks of a rank's input and output, in the order of their chunks.

        They have the numbers of chunks of all shards; of an AllToAll those of all inputs, one rank's after the other.
        """
        shard, chunks = self.shard, self.chunks
        if self.kind == "AllToAll":
            first = [source * chunks + rank * shard for source in range(self.n)]
            return range(rank * chunks, (rank + 1) * chunks), [at + number for at in first for number in range(shard)]
        own, every = range(rank * shard, (rank + 1) * shard), range(chunks)
        return own if self.kind == "AllGather" else every, own if self.kind == "ReduceScatter" else every

    def _start(self) -> np.ndarray:
        """Fill the inputs; returns which rank has which block."""
        count = self.chunks * (self.n if self.kind == "AllToAll" else 1)
        initial = np.zeros((self.n, count), dtype=bool)
        for rank in range(self.n):
            for number, block in enumerate(self._blocks(rank)[0]):
                initial[rank, block] = True
                place = self._real(rank, Place("i", number))
                self.memory[rank][place] = _Value(block, 1 << rank if self._is_sum else 1)
        return initial

    @property
    def _is_sum(self) -> bool:
        return self.kind in ("AllReduce", "ReduceScatter")

    def _all_parts(self, block: int) -> int:
        return (1 << self.n) - 1 if self._is_sum else 1

    def _real(self, rank: int, place: Place) -> Place:
        """The one place of two names: in place, a shard lies inside the buffer of all shards."""
        if not self.in_place or place.buffer == "s":
            return place
        if self.kind == "AllGather":
            return Place("o", place.offset + rank * self.shard) if place.buffer == "i" else place
        if self.kind == "ReduceScatter":
            return Place("i", place.offset + rank * self.shard) if place.buffer == "o" else place
        return Place("i", place.offset)

    def _text(self, value: _Value) -> str:
        parts = [rank for rank in range(self.n) if value.parts >> rank & 1]
        return f"chunk {value.block}" + (f" of GPUs {parts}" if self._is_sum else "")

    def _sizes(self) -> np.ndarray:
        count = self.chunks if self.kind == "AllReduce" else self.shard
        total = self.shard_bytes * (self.n if self.kind == "AllReduce" else 1)
        if total < count:
            raise _FileError(f"{total} bytes in {count} chunks, expected a byte each or more")
        sizes = split_bytes(total, [Fraction(1, count)] * count)
        repeat = {"AllReduce": 1, "AllToAll": self.n * self.n}.get(self.kind, self.n)
        return np.tile(np.array(sizes, dtype=np.int64), repeat)

    # -- execution -----------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        """Prove that all orders of steps have one result, and execute one of them."""
        # Whether steps race or wait for ever does not depend on what they move. So that comes first: what a step finds
        # in memory is an error of the file only if every order has it.
        order = self._order()
        lanes: dict[_Block, int] = {}
        for blocks in self.blocks:
            lanes |= {block: lane for lane, block in enumerate(block for block in blocks if block.send >= 0)}
        messages: dict[_Connection, deque[list[tuple[int, _Value]]]] = defaultdict(deque)
        for block, step in order:
            self._execute(block, step, lanes.get(block, 0), messages)

    def _order(self) -> list[tuple[_Block, int]]:
        """The steps in one of their orders, after the proof that they do not race nor wait for each other."""
        blocks = list(chain.from_iterable(self.blocks))
        start = np.zeros(len(blocks), dtype=np.int32)
        for block in blocks:
            block.clock = start
        awaited = {(b.rank, *step.waits) for b in blocks for step in b.steps}
        ended: dict[tuple[int, int, int], _Clock] = {}  # the clocks of awaited steps
        messages: dict[_Connection, deque[tuple[_Block, int, _Clock]]] = defaultdict(deque)
        writer: dict[tuple[int, Place], _Access] = {}
        readers: dict[tuple[int, Place], list[_Access]] = defaultdict(list)
        order: list[tuple[_Block, int]] = []
        before = -1
        while before < len(order):
            before = len(order)
            for block in blocks:
                arriving = messages[block.receive, block.rank, block.channel]
                leaving = messages[block.rank, block.send, block.channel]
                while block.done < len(block.steps):
                    index, step = block.done, block.steps[block.done]
                    other = self.blocks[block.rank][step.waits[0]] if step.waits[0] >= 0 else None
                    if (
                        (other and other.done <= step.waits[1])
                        or (step.type in _RECEIVES and not arriving)
                        or (step.type in _SENDS and len(leaving) >= self.slots)
                    ):
                        break
                    if other and other is not block:
                        block.follow(other, step.waits[1], ended[block.rank, *step.waits])
                    if step.type in _RECEIVES:
                        block.follow(*arriving.popleft())
                    for access in self._accesses(block, step):
                        memory = (block.rank, self._real(block.rank, access.place))
                        earlier = [writer[memory]] if memory in writer else []
                        if access.verb == "writes":
                            earlier += readers.pop(memory, [])
                            writer[memory] = access
                        else:
                            readers[memory].append(access)
                        for one in earlier:
                            if one.block is not block and block.clock[one.block.index] <= one.step:
                                raise _FileError(f"{one} and {access} in no fixed order: neither waits for the other")
                    if step.type in _SENDS:
                        leaving.append((block, index, block.clock))
                    if (block.rank, block.number, index) in awaited:
                        ended[block.rank, block.number, index] = block.clock
                    order.append((block, index))
                    block.done += 1
        for block in blocks:
            if block.done < len(block.steps):
                raise self._stuck(block, lambda *connection: bool(messages[connection]))
        for (source, destination, channel), left in messages.items():
            if left:
                raise _FileError(f"{len(left)} messages from GPU {source} to {destination} on channel {channel} "
                             "are never received")  # fmt: skip
        return order

    def _accesses(self, block: _Block, step: _Step) -> Iterator[_Access]:
        """The chunks of memory that the next step of a thread block reads, then those that it writes."""
        reads = [step.source] if step.type in _READS else []
        writes = [step.destination] if step.type in _STORES else []
        for source in reads:
            for destination in writes:
                first, second = self._real(block.rank, source), self._real(block.rank, destination)
                if first.buffer == second.buffer and 0 < abs(first.offset - second.offset) < step.chunks:
                    where = block.at(block.done)
                    raise _FileError(f"{where} writes some of the {step.chunks} chunks from {source} on that it reads")
        for verb, places in (("reads", reads + (writes if step.type == "re" else [])), ("writes", writes)):
            for place in places:
                for number in range(step.chunks):
                    yield _Access(block, block.done, verb, place.after(number))

    def _stuck(self, block: _Block, has_message: Callable[[int, int, int], bool]) -> _FileError:
        """The error of steps that wait for ever: from one to what it waits for, up to the cause or around a cycle."""
        passed: set[_Block] = set()
        while True:
            step = block.steps[block.done]
            other, at = step.waits
            cause: _Block | None
            if other >= 0 and self.blocks[block.rank][other].done <= at:
                what, cause = f"thread block {other}, step {at}", self.blocks[block.rank][other]
            elif step.type in _RECEIVES and not has_message(block.receive, block.rank, block.channel):
                what = f"a message of GPU {block.receive} on channel {block.channel}"
                cause = self._end("send", block.receive, block.rank, block.channel)
            else:
                what = f"room for more than {self.slots} messages to GPU {block.send} on channel {block.channel}"
                cause = self._end("receive", block.send, block.rank, block.channel)
            if cause is None or cause.done == len(cause.steps) or block in passed:
                return _FileError(
                    f"{block.at(block.done)} waits for ever for {what}: steps wait for each other, or one is missing"
                )
            passed.add(block)
            block = cause

    def _end(self, side: str, rank: int, peer: int, channel: int) -> _Block | None:
        """The thread block at the other end of a connection."""
        ends = (block for block in self.blocks[rank] if getattr(block, side) == peer and block.channel == channel)
        return next(ends, None)

    def _execute(
        self, block: _Block, index: int, lane: int, messages: dict[_Connection, deque[list[tuple[int, _Value]]]]
    ) -> None:
        rank, step, where = block.rank, block.steps[index], block.at(index)
        memory = self.memory[rank]
        if step.type == "nop":
            return
        message = messages[block.receive, rank, block.channel].popleft() if step.type in _RECEIVES else []
        if step.type in _RECEIVES and len(message) != step.chunks:
            raise _FileError(f"{where} receives {step.chunks} chunks, sent are {len(message)}")
        sent = []
        for number in range(step.chunks):
            source, destination = (self._real(rank, place.after(number)) for place in (step.source, step.destination))
            operands = []
            if message:
                transfer, value = message[number]
                operands.append(value._replace(pending=(transfer,)))
            read = [source] if step.type in _READS else []
            for place in [*read, destination] if step.type == "re" else read:
                if place not in memory:
                    raise _FileError(f"{where} reads {place}, where nothing is")
                operands.append(memory[place])
            value = operands[0] if len(operands) == 1 else self._sum(rank, operands[0], operands[1], where)
            if step.type in _SENDS:
                value = self._register(rank, value)
                self.transfers.append(_Transfer(rank, block.send, lane, value))
                self._place_send(rank, len(self.transfers) - 1)
                sent.append((len(self.transfers) - 1, value))
            if step.type in _STORES:
                memory[destination] = value
        if sent:
            messages[rank, block.send, block.channel].append(sent)

    def _sum(self, rank: int, first: _Value, second: _Value, where: str) -> _Value:
        if first.block != second.block or not self._is_sum:
            raise _FileError(f"{where} adds {self._text(first)} to {self._text(second)}")
        if first.parts & second.parts:
            raise _FileError(f"{where} adds {self._text(first)} to {self._text(second)}: a part twice")
        total = _Value(first.block, first.parts | second.parts, first.pending + second.pending)
        brought = sum(self.transfers[number].value.parts for number in total.pending)
        return total if brought == total.parts else self._register(rank, total)

    def _register(self, rank: int, value: _Value) -> _Value:
        """The value once what brought it has joined the rank's own copy of the block."""
        for number in value.pending:
            event = (True, number)
            if event not in self.events[rank, value.block][-8:] and event not in self.events[rank, value.block]:
                self.events[rank, value.block].append(event)
        return value._replace(pending=())

    def _place_send(self, rank: int, number: int) -> None:
        """A send counts after what it contains has come, and before what else came to other memory in the meantime."""
        value = self.transfers[number].value
        events = self.events[rank, value.block]
        at = len(events)
        while at and self.transfers[events[at - 1][1]].value.parts & ~value.parts:
            at -= 1
        events.insert(at, (False, number))

    # -- steps ---------------------------------------------------------------------------------------------------------
    def _gives(self, initial: np.ndarray, final: np.ndarray) -> np.ndarray:
        """Decide which transfers give, and what must be at an earlier step; returns the copies that are left over.

        A sum that is sent stays if the next thing sent, or the end, has it too; else the source gives it.
        """
        arrived = {number for events in self.events.values() for is_arrival, number in events if is_arrival}
        unused = [number for number in range(len(self.transfers)) if number not in arrived]
        if unused:
            transfer = self.transfers[unused[0]]
            ends = f"from GPU {transfer.source} to {transfer.destination}"
            raise _FileError(f"{self._text(transfer.value)} goes {ends}, which never uses it")
        left = np.zeros_like(initial)
        for (rank, block), events in self.events.items():
            copy = (1 << rank if self._is_sum else 1) if initial[rank, block] else 0
            whole = self._all_parts(block)
            arrivals: list[int] = []
            sends: list[int] = []
            for position, (is_arrival, number) in enumerate(events):
                transfer = self.transfers[number]
                if is_arrival:
                    if copy & transfer.value.parts:
                        ends = f"from GPU {transfer.source} to {rank}"
                        raise _FileError(f"{self._text(transfer.value)} comes {ends}, which has some of it")
                    copy |= transfer.value.parts
                    transfer.after += [(each, 0) for each in sends]
                    arrivals.append(number)
                    continue
                if copy != transfer.value.parts:
                    own = self._text(_Value(block, copy & ~transfer.value.parts))
                    raise _FileError(f"GPU {rank} sends {self._text(transfer.value)}, but also has {own}; {_ONE_COPY}")
                transfer.after += [(each, 1) for each in arrivals]
                coming, wanted = 0, whole if final[rank, block] else None
                for later_arrival, later in events[position + 1 :]:
                    if not later_arrival:
                        wanted = self.transfers[later].value.parts
                        break
                    coming |= self.transfers[later].value.parts
                stays = copy == whole if wanted is None else coming & copy == 0 and wanted == coming | copy
                if wanted is None and copy == whole and not initial[rank, block] and not final[rank, block]:
                    stays = False  # only passed on
                if not stays:
                    transfer.gives, copy = True, 0
                    transfer.after += [(each, 0) for each in sends]
                    arrivals = []
                sends.append(number)
            if final[rank, block] and copy != whole:
                raise _FileError(f"GPU {rank} adds chunk {block} up from what it had sent before; {_ONE_COPY}")
            left[rank, block] = copy != 0 and not final[rank, block]
        if self._is_sum and left.any():
            rank, block = (int(each[0]) for each in np.nonzero(left))
            raise _FileError(f"GPU {rank} ends with a sum of chunk {block} that nobody asks for")
        return left

    def _steps(self) -> list[Step]:
        """The steps: a transfer is at the earliest one that `after` and the order of its lane allow."""
        after: list[list[tuple[int, int]]] = [transfer.after for transfer in self.transfers]
        last: dict[tuple[int, int], int] = {}
        for number, transfer in enumerate(self.transfers):
            lane = (transfer.source, transfer.lane)
            if lane in last:
                after[number].append((last[lane], 0))
            last[lane] = number
        # Ranks that exchange sums have transfers of which none may be later than the others: they are one component, at
        # one step. Only a cycle of which some transfer has to be later than another one has no steps.
        graph: networkx.DiGraph[int] = networkx.DiGraph()
        graph.add_nodes_from(range(len(after)))
        graph.add_edges_from((before, number) for number, befores in enumerate(after) for before, _ in befores)
        components = networkx.condensation(graph)
        of = components.graph["mapping"]
        level = [0] * len(after)
        for component in networkx.topological_sort(components):
            members = components.nodes[component]["members"]
            earliest = 0
            for number in members:
                for before, later in after[number]:
                    if of[before] != component:
                        earliest = max(earliest, level[before] + later)
                    elif later:
                        transfer = self.transfers[number]
                        ends = f"from GPU {transfer.source} to {transfer.destination}"
                        raise _FileError(
                            f"{self._text(transfer.value)} goes {ends} no later than what brings it; {_ONE_COPY}"
                        )
            for number in members:
                level[number] = earliest
        rows: list[list[tuple[int, int, int, int, bool]]] = [[] for _ in range(max(level, default=-1) + 1)]
        for number, transfer in sorted(enumerate(self.transfers), key=lambda each: (each[1].source, each[1].lane)):
            row = (transfer.source, transfer.destination, transfer.lane, transfer.value.block, transfer.gives)
            rows[level[number]].append(row)
        return [Step.of(each) for each in rows]
