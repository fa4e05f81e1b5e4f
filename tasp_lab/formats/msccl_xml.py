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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate, chain
from pathlib import Path
from typing import Literal, NamedTuple

import networkx
import numpy as np
import numpy.typing as npt

from tasp_lab.core.arrays import BoolArray
from tasp_lab.core.errors import ScheduleError, unknown
from tasp_lab.formats.programs import COLLECTIVES, MAX_CHUNKS, Place, ThreadBlock, communication, rank_programs
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

_TYPES = {
    "s": "read send", "r": "receive store", "cpy": "read store", "re": "read store", "nop": "",
    "rcs": "receive store send", "rrs": "receive read send", "rrc": "receive read store",
    "rrcs": "receive read store send",
}  # fmt: skip
"""What a step of each type does with a chunk; an ``re`` reads the destination, too, and adds."""

_WRITTEN = {"send": "s", "receive": "r", "add": "re", "copy": "cpy"}


_Verb = Literal["receive", "read", "store", "send"]


class _Step(NamedTuple):
    """A step of a thread block, as it is written and read; `waits` are a thread block and a step of it, or -1."""

    type: str
    source: Place
    destination: Place
    chunks: int
    waits: tuple[int, int]
    signals: bool

    def does(self, what: _Verb) -> bool:
        return what in _TYPES[self.type]

    def tag(self, number: int) -> str:
        (source, at), (destination, to), (block, step) = self.source, self.destination, self.waits
        return _tag(
            "      <step", "/>", s=number, type=self.type, srcbuf=source, srcoff=at, dstbuf=destination, dstoff=to,
            cnt=self.chunks, depid=block, deps=step, hasdep=int(self.signals),
        )  # fmt: skip


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
    in_place, total = programs.kind != "AllToAll", programs.shard_chunks * programs.world_size
    name = "".join(letter if letter.isalnum() else "_" for letter in programs.name)
    lines = [
        _tag("<algo", name=f"tasp_lab_{name}", proto="Simple", nchannels=programs.channels, nchunksperloop=total,
             ngpus=programs.world_size, coll=COLLECTIVES[programs.kind], inplace=int(in_place),
             outofplace=int(not in_place), minBytes=0, maxBytes=0)
    ]  # fmt: skip
    for rank, blocks in enumerate(programs.ranks):
        where = f"schedule {schedule.name!r}, rank {rank}"
        body = list(_written_blocks(where, blocks))
        if len(body) > MAX_ELEMENTS:
            raise ScheduleError(f"{where}: {len(body)} XML elements, expected at most {MAX_ELEMENTS}")
        inputs, outputs = (total, 0) if programs.kind == "ReduceScatter" else (0 if in_place else total, total)
        gpu = _tag("  <gpu", id=rank, i_chunks=inputs, o_chunks=outputs, s_chunks=programs.scratch[rank])
        lines += [gpu, *body, "  </gpu>"]
    return "\n".join([*lines, "</algo>", ""])


def _tag(begin: str, end: str = ">", **attributes: str | int) -> str:
    """One element, on a line of its own as the parser of RCCL wants it."""
    return " ".join([begin, *(f'{name}="{value}"' for name, value in attributes.items())]) + end


def _written_blocks(where: str, blocks: list[ThreadBlock]) -> Iterator[str]:
    if len(blocks) > MAX_THREAD_BLOCKS:
        raise ScheduleError(f"{where}: {len(blocks)} thread blocks, expected at most {MAX_THREAD_BLOCKS} in MSCCL XML")
    # Every wait but the last of an operation is a step of its own before it.
    number = [[end - 1 for end in accumulate(max(len(op.waits), 1) for op in block.ops)] for block in blocks]
    for block, steps in enumerate(number):
        if steps and steps[-1] >= MAX_STEPS:
            raise ScheduleError(
                f"{where}: thread block {block} has {steps[-1] + 1} steps, expected at most {MAX_STEPS} in MSCCL XML; "
                "fewer ranks, rings or chunks need fewer"
            )
    awaited = {wait for block in blocks for op in block.ops for wait in op.waits}
    for block, ops in enumerate(blocks):
        yield _tag("    <tb", id=block, send=ops.send, recv=ops.receive, chan=ops.channel)
        for index, op in enumerate(ops.ops):
            waits = [(other, number[other][before]) for other, before in op.waits] or [(-1, -1)]
            parts = [_Step("nop", Place("o", 0), Place("o", 0), 0, wait, signals=False) for wait in waits]
            signals = (block, index) in awaited
            parts[-1] = _Step(_WRITTEN[op.kind], op.source, op.destination, op.chunks, waits[-1], signals)
            first = number[block][index] + 1 - len(waits)
            yield from (part.tag(at) for at, part in enumerate(parts, first))
        yield "    </tb>"


# -- in ----------------------------------------------------------------------------------------------------------------
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

    @property
    def into(self) -> _Connection:
        return self.receive, self.rank, self.channel

    @property
    def out(self) -> _Connection:
        return self.rank, self.send, self.channel

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

_Messages = dict[_Connection, deque[tuple[_Block, int, _Clock]]]
"""What connections hold: the thread block and step that sent it, and its clock then."""


@dataclass
class _Transfer:
    """`after` are transfers that cannot be at a later step, and 1 where they have to be at an earlier one, else 0."""

    source: int
    destination: int
    lane: int
    value: _Value
    gives: bool = False
    after: list[tuple[int, int]] = field(default_factory=list)

    @property
    def ends(self) -> str:
        return f"from GPU {self.source} to {self.destination}"


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


_BUFFERS = {"i": "i", "o": "o", "s": "s", "input": "i", "output": "o", "scratch": "s"}
_VERBS: Mapping[str, _Verb] = {"send": "send", "recv": "receive"}


def _step(element: ElementTree.Element, index: int, where: str, sizes: Mapping[str, int]) -> _Step:
    """A step of a thread block; `sizes` are the chunks of the buffers of its rank."""
    if _number(element, "s", where, 0, 2**20) != index:
        raise _FileError(f"{where} is missing, found s={element.get('s')!r}")
    kind = element.get("type") or ""
    if kind not in _TYPES:
        raise _FileError(f"{where}: {unknown('type', kind, _TYPES)}")
    used = {"src": "read" in _TYPES[kind], "dst": "store" in _TYPES[kind]}
    places = []
    for side in used:
        buffer = _BUFFERS.get(element.get(f"{side}buf") or "", "")
        if used[side] and not buffer:
            raise _FileError(f"{where}: {side}buf is {element.get(f'{side}buf')!r}, expected i, o or s")
        places.append(Place(buffer, _number(element, f"{side}off", where, 0 if used[side] else -1, MAX_CHUNKS)))
    waits = _number(element, "depid", where, -1, 2**20), _number(element, "deps", where, -1, 2**20)
    count = _number(element, "cnt", where, 0 if kind == "nop" else 1, MAX_CHUNKS)
    for place, is_used in zip(places, used.values(), strict=True):
        if is_used and place.offset + count > sizes[place.buffer]:
            raise _FileError(
                f"{where}: no {place.after(count - 1)}, expected chunks of the {sizes[place.buffer]} of buffer "
                f"{place.buffer}"
            )
    return _Step(kind, places[0], places[1], count, waits, element.get("hasdep") == "1")


class _Reader:
    def __init__(self, name: str, root: ElementTree.Element, shard_bytes: int, in_place: bool) -> None:
        self.name, self.shard_bytes, self.in_place, self.kind = name, shard_bytes, in_place, _kind(root)
        self.is_sum = self.kind in ("AllReduce", "ReduceScatter")
        protocol = root.get("proto") or ""
        if protocol not in SLOTS:
            raise _FileError(unknown("protocol", protocol, SLOTS))
        self.slots = SLOTS[protocol]
        self.n = _number(root, "ngpus", "<algo>", 1, 1024)
        self.chunks = _number(root, "nchunksperloop", "<algo>", 1, MAX_CHUNKS)
        self.shard = self.chunks // self.n
        self.whole = (1 << self.n) - 1 if self.is_sum else 1
        """The parts of a chunk that is complete."""
        if self.kind != "AllReduce" and self.chunks % self.n:
            raise _FileError(f"<algo>: nchunksperloop is {self.chunks}, expected a multiple of {self.n} GPUs")
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
        self.arrived: set[int] = set()
        """The transfers whose data were used."""
        self.events: dict[tuple[int, int], list[tuple[bool, int]]] = defaultdict(list)
        """Of each rank and block: whether a transfer is an arrival or is sent, in the order in which it counts."""

    def _thread_blocks(self, gpu: ElementTree.Element, rank: int) -> list[_Block]:
        blocks: list[_Block] = []
        connections: set[tuple[str, int, int]] = set()
        sizes = {"i": self.shard if self.kind == "AllGather" else self.chunks}
        sizes["o"] = self.shard if self.kind == "ReduceScatter" else self.chunks
        sizes["s"] = _number(gpu, "s_chunks", f"GPU {rank}", 0, 2**31)
        elements = sorted(gpu.iter("tb"), key=lambda tb: int(text) if (text := tb.get("id") or "").isdigit() else 0)
        for number, tb in enumerate(elements):
            where = f"GPU {rank}, thread block {number}"
            if _number(tb, "id", f"GPU {rank}, <tb>", 0, 2**15) != number:
                raise _FileError(f"{where} is missing, found {tb.get('id')}")
            peers = {side: _number(tb, side, where, -1, self.n - 1) for side in ("send", "recv")}
            channel = _number(tb, "chan", where, 0, 1023)
            for side, peer in peers.items():
                if peer == rank:
                    raise _FileError(f"{where}: {side} is {peer}, its own GPU")
                if peer >= 0 and (side, peer, channel) in connections:
                    raise _FileError(f"{where}: another one has the connection with GPU {peer} on channel {channel}")
                connections.add((side, peer, channel))
            steps = [_step(step, index, f"{where}, step {index}", sizes) for index, step in enumerate(tb.iter("step"))]
            for index, step in enumerate(steps):
                idle = [side for side, peer in peers.items() if peer < 0 and step.does(_VERBS[side])]
                if idle:
                    raise _FileError(
                        f"{where}, step {index}: type {step.type!r}, but {idle[0]} of its thread block is -1"
                    )
            blocks.append(_Block(rank, number, peers["send"], peers["recv"], channel, steps))
        for block in blocks:
            for index, step in enumerate(block.steps):
                other, at = step.waits
                waits = f"{block.at(index)} waits for thread block {other}, step {at}"
                if other >= 0 and not (other < len(blocks) and 0 <= at < len(blocks[other].steps)):
                    raise _FileError(f"{waits}, which is missing")
                if other >= 0 and self.has_signals and not blocks[other].steps[at].signals:
                    raise _FileError(f'{waits}, which has no hasdep="1": engines do not signal its end')
        return blocks

    def schedule(self) -> Schedule:
        n, initial = self.n, self._start()
        # Whether steps race or wait for ever does not depend on what they move. So that comes first: what a step finds
        # in memory is an error of the file only if every order has it.
        order = self._order()
        lanes = {
            block: lane
            for blocks in self.blocks
            for lane, block in enumerate(block for block in blocks if block.send >= 0)
        }
        messages: dict[_Connection, deque[list[tuple[int, _Value]]]] = defaultdict(deque)
        for block, step in order:
            self._execute(block, step, lanes.get(block, 0), messages)
        final = np.zeros_like(initial)
        for rank in range(n):
            for number, chunk in enumerate(self._inputs_and_outputs(rank)[1]):
                place = Place("o", number)
                value = self.memory[rank].get(self._real(rank, place))
                if value is None or (value.block, value.parts) != (chunk, self.whole):
                    has = "nothing" if value is None else self._text(value)
                    raise _FileError(f"GPU {rank} ends with {has} in {place}, expected all of chunk {chunk}")
                self._register(rank, value)
                final[rank, chunk] = True
        left = self._gives(initial, final)
        count = self.chunks if self.kind == "AllReduce" else self.shard
        total = self.shard_bytes * (n if self.kind == "AllReduce" else 1)
        if total < count:
            raise _FileError(f"{total} bytes in {count} chunks, expected a byte each or more")
        of_shard = np.array(split_bytes(total, [Fraction(1, count)] * count), dtype=np.int64)
        sizes = np.tile(of_shard, {"AllReduce": 1, "AllToAll": n * n}.get(self.kind, n))
        return Schedule(
            name=self.name,
            world_size=n,
            lanes=max((transfer.lane for transfer in self.transfers), default=0) + 1,
            blocks=Blocks.of_sums(sizes, n) if self.is_sum else Blocks.of_data(sizes),
            initial=initial,
            final=final if self.is_sum else final | initial,
            steps=self._steps(),
            initial_part=np.arange(n)[:, None] if self.is_sum else None,
            kept=left if left.any() else None,
        )

    def _inputs_and_outputs(self, rank: int) -> tuple[Sequence[int], Sequence[int]]:
        """The blocks of a rank's input and output, in the order of their chunks.

        They have the numbers of chunks of all shards; of an AllToAll those of all inputs, one rank's after the other.
        """
        shard, chunks = self.shard, self.chunks
        if self.kind == "AllToAll":
            first = [source * chunks + rank * shard for source in range(self.n)]
            return range(rank * chunks, (rank + 1) * chunks), [at + number for at in first for number in range(shard)]
        own, every = range(rank * shard, (rank + 1) * shard), range(chunks)
        return own if self.kind == "AllGather" else every, own if self.kind == "ReduceScatter" else every

    def _start(self) -> BoolArray:
        """Fill the inputs; returns which rank has which block."""
        initial = np.zeros((self.n, self.chunks * (self.n if self.kind == "AllToAll" else 1)), dtype=bool)
        for rank in range(self.n):
            for number, block in enumerate(self._inputs_and_outputs(rank)[0]):
                initial[rank, block] = True
                self.memory[rank][self._real(rank, Place("i", number))] = _Value(block, self._own_part(rank))
        return initial

    def _own_part(self, rank: int) -> int:
        return 1 << rank if self.is_sum else 1

    def _real(self, rank: int, place: Place) -> Place:
        """The one place of two names: in place, a shard lies inside the buffer of all shards."""
        if not self.in_place or place.buffer == "s":
            return place
        if self.kind == "AllGather":
            return place if place.buffer == "o" else Place("o", place.offset + rank * self.shard)
        is_shard = self.kind == "ReduceScatter" and place.buffer == "o"
        return Place("i", place.offset + rank * self.shard * is_shard)

    def _text(self, value: _Value) -> str:
        parts = [rank for rank in range(self.n) if value.parts >> rank & 1]
        return f"chunk {value.block}" + (f" of GPUs {parts}" if self.is_sum else "")

    # -- execution -----------------------------------------------------------------------------------------------------
    def _order(self) -> list[tuple[_Block, int]]:
        """The steps in one of their orders, after the proof that they do not race nor wait for each other."""
        blocks = list(chain.from_iterable(self.blocks))
        start = np.zeros(len(blocks), dtype=np.int32)
        for block in blocks:
            block.clock = start
        awaited = {(block.rank, *step.waits) for block in blocks for step in block.steps}
        ended: dict[tuple[int, int, int], _Clock] = {}  # the clocks of awaited steps
        messages: _Messages = defaultdict(deque)
        writer: dict[tuple[int, Place], _Access] = {}
        readers: dict[tuple[int, Place], list[_Access]] = defaultdict(list)
        order: list[tuple[_Block, int]] = []
        before = -1
        while before < len(order):
            before = len(order)
            for block in blocks:
                while block.done < len(block.steps) and self._awaits(block, messages) is None:
                    index, step = block.done, block.steps[block.done]
                    other = self.blocks[block.rank][step.waits[0]] if step.waits[0] >= 0 else None
                    if other and other is not block:
                        block.follow(other, step.waits[1], ended[block.rank, *step.waits])
                    if step.does("receive"):
                        block.follow(*messages[block.into].popleft())
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
                    if step.does("send"):
                        messages[block.out].append((block, index, block.clock))
                    if (block.rank, block.number, index) in awaited:
                        ended[block.rank, block.number, index] = block.clock
                    order.append((block, index))
                    block.done += 1
        if stuck := [block for block in blocks if block.done < len(block.steps)]:
            raise self._deadlock(stuck[0], messages)
        for (source, destination, channel), left in messages.items():
            if left:
                raise _FileError(
                    f"{len(left)} messages from GPU {source} to {destination} on channel {channel} are never received"
                )
        return order

    def _accesses(self, block: _Block, step: _Step) -> Iterator[_Access]:
        """The chunks of memory that the next step of a thread block reads, then those that it writes."""
        reads = [step.source] if step.does("read") else []
        writes = [step.destination] if step.does("store") else []
        for first, second in ((self._real(block.rank, a), self._real(block.rank, b)) for a in reads for b in writes):
            if first.buffer == second.buffer and 0 < abs(first.offset - second.offset) < step.chunks:
                where = block.at(block.done)
                raise _FileError(f"{where} writes some of the {step.chunks} chunks from {step.source} on that it reads")
        for verb, places in (("reads", reads + (writes if step.type == "re" else [])), ("writes", writes)):
            for place in places:
                for number in range(step.chunks):
                    yield _Access(block, block.done, verb, place.after(number))

    def _awaits(self, block: _Block, messages: _Messages) -> tuple[str, _Block | None] | None:
        """What the next step of a thread block waits for, and the thread block that has to go on; None for nothing."""
        step = block.steps[block.done]
        other, at = step.waits
        if other >= 0 and self.blocks[block.rank][other].done <= at:
            return f"thread block {other}, step {at}", self.blocks[block.rank][other]
        if step.does("receive") and not messages[block.into]:
            ends = (each for each in self.blocks[block.receive] if each.out == block.into)
            return f"a message of GPU {block.receive} on channel {block.channel}", next(ends, None)
        if step.does("send") and len(messages[block.out]) >= self.slots:
            ends = (each for each in self.blocks[block.send] if each.into == block.out)
            what = f"room for more than {self.slots} messages to GPU {block.send} on channel {block.channel}"
            return what, next(ends, None)
        return None

    def _deadlock(self, block: _Block, messages: _Messages) -> _FileError:
        """The error of steps that wait for ever: from one to what it waits for, up to the cause or around a cycle."""
        passed: set[_Block] = set()
        while True:
            awaited = self._awaits(block, messages)
            assert awaited is not None, "what waits for nothing has run"
            what, cause = awaited
            if cause is None or cause.done == len(cause.steps) or block in passed:
                return _FileError(
                    f"{block.at(block.done)} waits for ever for {what}: steps wait for each other, or one is missing"
                )
            passed.add(block)
            block = cause

    def _execute(
        self, block: _Block, index: int, lane: int, messages: dict[_Connection, deque[list[tuple[int, _Value]]]]
    ) -> None:
        rank, step, where, memory = block.rank, block.steps[index], block.at(index), self.memory[block.rank]
        message = messages[block.into].popleft() if step.does("receive") else []
        if step.does("receive") and len(message) != step.chunks:
            raise _FileError(f"{where} receives {step.chunks} chunks, sent are {len(message)}")
        sent = []
        for number in range(step.chunks if step.type != "nop" else 0):
            source, destination = (self._real(rank, place.after(number)) for place in (step.source, step.destination))
            operands = [value._replace(pending=(transfer,)) for transfer, value in message[number : number + 1]]
            for place in [source] * step.does("read") + [destination] * (step.type == "re"):
                if place not in memory:
                    raise _FileError(f"{where} reads {place}, where nothing is")
                operands.append(memory[place])
            value = operands[0] if len(operands) == 1 else self._sum(rank, operands[0], operands[1], where)
            if step.does("send"):
                value = self._register(rank, value)
                sent.append((len(self.transfers), value))
                self.transfers.append(_Transfer(rank, block.send, lane, value))
                # A send counts after what it contains has come, and before what else came to other memory meanwhile.
                events = self.events[rank, value.block]
                at = len(events)
                while at and self.transfers[events[at - 1][1]].value.parts & ~value.parts:
                    at -= 1
                events.insert(at, (False, sent[-1][0]))
            if step.does("store"):
                memory[destination] = value
        if sent:
            messages[block.out].append(sent)

    def _sum(self, rank: int, first: _Value, second: _Value, where: str) -> _Value:
        is_twice = bool(first.parts & second.parts)
        if first.block != second.block or not self.is_sum or is_twice:
            twice = ": a part twice" if first.block == second.block and self.is_sum else ""
            raise _FileError(f"{where} adds {self._text(first)} to {self._text(second)}{twice}")
        total = _Value(first.block, first.parts | second.parts, first.pending + second.pending)
        brought = sum(self.transfers[number].value.parts for number in total.pending)
        return total if brought == total.parts else self._register(rank, total)

    def _register(self, rank: int, value: _Value) -> _Value:
        """The value once what brought it has joined the rank's own copy of the block."""
        for number in value.pending:
            if number not in self.arrived:
                self.arrived.add(number)
                self.events[rank, value.block].append((True, number))
        return value._replace(pending=())

    # -- steps ---------------------------------------------------------------------------------------------------------
    def _gives(self, initial: BoolArray, final: BoolArray) -> BoolArray:
        """Decide which transfers give, and what must be at an earlier step; returns the copies that are left over.

        A sum that is sent stays if the next thing sent, or the end, has it too; else the source gives it.
        """
        for number, transfer in enumerate(self.transfers):
            if number not in self.arrived:
                raise _FileError(f"{self._text(transfer.value)} goes {transfer.ends}, which never uses it")
        left = np.zeros_like(initial)
        for (rank, block), events in self.events.items():
            is_first, is_final, whole = bool(initial[rank, block]), bool(final[rank, block]), self.whole
            copy = self._own_part(rank) if is_first else 0
            arrivals: list[int] = []
            sends: list[int] = []
            for position, (is_arrival, number) in enumerate(events):
                transfer = self.transfers[number]
                parts = transfer.value.parts
                if is_arrival:
                    if copy & parts:
                        raise _FileError(f"{self._text(transfer.value)} comes {transfer.ends}, which has some of it")
                    copy |= parts
                    transfer.after += [(each, 0) for each in sends]
                    arrivals.append(number)
                    continue
                if copy != parts:
                    own = self._text(_Value(block, copy & ~parts))
                    raise _FileError(f"GPU {rank} sends {self._text(transfer.value)}, but also has {own}; {_ONE_COPY}")
                transfer.after += [(each, 1) for each in arrivals]
                coming, wanted = 0, whole if is_final else None
                for later_arrival, later in events[position + 1 :]:
                    if not later_arrival:
                        wanted = self.transfers[later].value.parts
                        break
                    coming |= self.transfers[later].value.parts
                stays = is_first and copy == whole  # what a rank only passed on does not
                if wanted is not None:
                    stays = coming & copy == 0 and wanted == coming | copy
                if not stays:
                    transfer.gives, copy = True, 0
                    transfer.after += [(each, 0) for each in sends]
                    arrivals = []
                sends.append(number)
            if is_final and copy != whole:
                raise _FileError(f"GPU {rank} adds chunk {block} up from what it had sent before; {_ONE_COPY}")
            left[rank, block] = copy != 0 and not is_final
        if self.is_sum and left.any():
            rank, block = (int(each[0]) for each in np.nonzero(left))
            raise _FileError(f"GPU {rank} ends with a sum of chunk {block} that nobody asks for")
        return left

    def _steps(self) -> list[Step]:
        """The steps: a transfer is at the earliest one that `after` and the order of its lane allow."""
        last: dict[tuple[int, int], int] = {}
        for number, transfer in enumerate(self.transfers):
            lane = (transfer.source, transfer.lane)
            if lane in last:
                transfer.after.append((last[lane], 0))
            last[lane] = number
        # Ranks that exchange sums have transfers of which none may be later than the others: they are one component, at
        # one step. Only a cycle of which some transfer has to be later than another one has no steps.
        graph: networkx.DiGraph[int] = networkx.DiGraph()
        graph.add_nodes_from(range(len(self.transfers)))
        graph.add_edges_from((before, number) for number, each in enumerate(self.transfers) for before, _ in each.after)
        components = networkx.condensation(graph)
        of = components.graph["mapping"]
        level = [0] * len(self.transfers)
        for component in networkx.topological_sort(components):
            members, earliest = components.nodes[component]["members"], 0
            for transfer in (self.transfers[number] for number in members):
                for before, later in transfer.after:
                    if of[before] != component:
                        earliest = max(earliest, level[before] + later)
                    elif later:
                        raise _FileError(
                            f"{self._text(transfer.value)} goes {transfer.ends} no later than what brings it; "
                            f"{_ONE_COPY}"
                        )
            for number in members:
                level[number] = earliest
        rows: list[list[tuple[int, int, int, int, bool]]] = [[] for _ in range(max(level, default=-1) + 1)]
        for number, transfer in sorted(enumerate(self.transfers), key=lambda each: (each[1].source, each[1].lane)):
            row = (transfer.source, transfer.destination, transfer.lane, transfer.value.block, transfer.gives)
            rows[level[number]].append(row)
        return [Step.of(each) for each in rows]
