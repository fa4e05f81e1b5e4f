"""Executes a world with real numbers, whatever is wrong with it, and says whether every promised block ends up right.

It shares no code with the proof or with what the engines derive: it knows only what `tasp_lab.schedule.schedule` says.

**Truth.** What is right is that of an unchanged world: a rank has at the start what it has there, with the parts that
it has there, and anything else that a changed world lists is garbage. In the end all that the unchanged world promises
must be right, and all that the changed one promises. Parts are joined as the changed world says, and a kind that lacks
a tensor of the unchanged one loses the content of its blocks.

Memory is that of real ranks. A resident copy has a place of its own. Any other copy of a pool with b buffers lies, from
the step s at which it comes, in buffer s mod b, which is emptied at step s + b. Nothing is ever checked on the way: a
transfer or call takes what it finds, NaN where there is nothing.

**Order.** Every transfer and call begins to read, ends reading, and later writes. Without a barrier these events may
come in any order that respects what has to wait: reads of step s wait for the writes of earlier steps to the copies
that they read; a write to a resident copy waits for the reads of it at earlier steps, that of a transfer also for those
at the same step; a write to a buffer waits for the reads of what lay there before. `is_right` executes step by step;
given a random generator, in a random order, where each read happens at its begin or at its end.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

import numpy as np

from tasp_lab.core.arrays import FloatArray
from tasp_lab.schedule.blocks import Pool
from tests.support.world import KernelCall, Transfer, World

Copy = tuple[int, int]
"""Rank and block."""

Place = tuple[int, ...]
"""Rank and block of a resident copy; rank, pool and buffer."""

Kernel = Callable[[list[list[FloatArray]]], list[FloatArray]]
"""From the contents of all operands to what each target gets."""

EVENTS = BEGIN, READ, WRITE = range(3)
"""Events of an operation: it begins to read, has read, and writes."""

TOLERANCE = 1e-8


class CannotExecuteError(Exception):
    """A world that no memory and no kernel can execute, such as queries in the place of keys."""


class Numbers(Protocol):
    """What the blocks of a schedule contain, and what its kernels compute."""

    def content(self, block: int, part: int = -1) -> FloatArray:
        """What a block contains in the end, or one part of it."""

    def kernel(self, call: KernelCall) -> tuple[list[int], Kernel]:
        """The blocks that a call adds to, and what it computes. Raises `CannotExecuteError`."""

    def joined(self, block: int, how: str, first: FloatArray, second: FloatArray) -> FloatArray:
        """Two contents of a block, joined by ``add`` or ``merge``. Raises `CannotExecuteError`."""

    def may_be_saved(self, block: int) -> bool:
        """Whether a pass before may have left a block at any rank."""


class Sums:
    """The numbers of blocks whose parts are added up, and that no pass before has left anywhere."""

    def joined(self, block: int, how: str, first: FloatArray, second: FloatArray) -> FloatArray:
        if how != "add":
            raise CannotExecuteError(f"block {block} has no log-sum-exp to {how} by")
        return first + second

    def may_be_saved(self, block: int) -> bool:
        return False


def _initial_part(world: World, rank: int, block: int) -> int:
    """The part that a rank is said to have of a block at the start, -1 for all; data have one part, which is all."""
    if world.initial_part is None or world.blocks.parts[block] == 1:
        return -1
    return int(np.broadcast_to(world.initial_part, world.initial.shape)[rank, block])


def part_of(parts: FloatArray, part: int) -> FloatArray:
    """One of the parts along the first axis, their sum for -1, NaN if there is no such part."""
    total: FloatArray = parts.sum(axis=0)
    return total if part < 0 else parts[part] if part < len(parts) else np.full_like(total, np.nan)


def is_right(world: World, numbers: Numbers, order: random.Random | None = None, truth: World | None = None) -> bool:
    """Whether every promised block is right after all steps, executed one after another or in a random order.

    `truth` is the unchanged world, by default the world itself.
    """
    try:
        return Execution(world, numbers, truth).run(order)
    except CannotExecuteError:
        return False


@dataclass(eq=False)
class Operation:
    """A transfer or call: the copies that it reads, by operand, and those that it writes."""

    step: int
    reads: list[list[Copy]]
    writes: list[Copy]
    compute: Kernel
    is_call: bool
    reads_at: int = READ
    """The event at which it reads: `BEGIN` or `READ`."""
    operands: list[list[FloatArray]] = field(default_factory=list)


class Execution:
    """The memory of all ranks. Contents have a generation, so that what was given or overwritten is never mistaken for
    what came later: the number of gives before of a resident copy, the step at which it came of one in a buffer."""

    def __init__(self, world: World, numbers: Numbers, truth: World | None = None) -> None:
        self.world, self.numbers, self.truth = world, numbers, world if truth is None else truth
        truth = self.truth
        self.lost = [self._is_lost(block) for block in range(len(truth.blocks))]
        self.resident = world.residents.tolist()
        self.pools = [kind.pool for kind in world.blocks.kinds]
        self.kind = world.blocks.kind.tolist()
        self.gives: dict[Copy, set[int]] = defaultdict(set)
        self.lands: dict[Copy, list[int]] = defaultdict(list)
        self.memory: dict[Place, tuple[int, dict[int, FloatArray]]] = {}
        rows = list(enumerate(world.rows))
        self.operations = [self._transfer(step, each) for step, row in rows for each in row.transfers]
        self.operations += [self._call(step, each) for step, row in rows for group in row.groups for each in group]
        for each in self.operations:
            for copy in each.writes:
                self.lands[copy].append(each.step)
        for rank, block in np.argwhere(world.initial).tolist():
            self.memory[rank, block] = (0, {block: self._given_at_start(rank, block)})

    def _is_lost(self, block: int) -> bool:
        """Whether the kind of a block lacks one of the tensors that the block consists of."""
        here, there = (
            {field.name for field in each.blocks.kind_of(block).fields} if block < len(each.blocks) else set()
            for each in (self.world, self.truth)
        )
        return not there <= here

    def _given_at_start(self, rank: int, block: int) -> FloatArray:
        """What a rank has of a block before the first step; garbage, NaN, unless it has it in the unchanged world."""
        part, true_part = _initial_part(self.world, rank, block), _initial_part(self.truth, rank, block)
        is_left = self.numbers.may_be_saved(block) and self.truth.initial[:, block].any()
        value = self.numbers.content(block, part)
        if self.lost[block] or part != true_part or not (self.truth.initial[rank, block] or is_left):
            return np.full_like(value, np.nan)
        return value

    def _transfer(self, step: int, sent: Transfer) -> Operation:
        source, target = (sent.source, sent.block), (sent.destination, sent.block)
        self._check(source)
        self._check(target)
        if sent.gives:
            self.gives[source].add(step)
        return Operation(step, [[source]], [target], lambda operands: operands[0], False)

    def _call(self, step: int, call: KernelCall) -> Operation:
        reads = [[(call.rank, block) for block in each] for each in call.operands]
        for copy in chain(*reads):
            self._check(copy)
        targets, compute = self.numbers.kernel(call)
        writes = [(call.rank, block) for block in targets]
        for copy in writes:
            self._check(copy)
        return Operation(step, reads, writes, compute, True)

    def _check(self, copy: Copy) -> None:
        if not (0 <= copy[0] < self.world.world_size and 0 <= copy[1] < len(self.world.blocks)):
            raise CannotExecuteError(f"rank {copy[0]}, block {copy[1]}")

    def run(self, order: random.Random | None) -> bool:
        for operation, event in self._steps() if order is None else self._shuffled(order):
            self.happens(operation, event)
        end, final = len(self.world.rows), self.truth.final.copy()
        if self.world.final.shape == final.shape:
            final |= self.world.final
        return all(
            np.allclose(self._read((rank, block), end), self.numbers.content(block), atol=TOLERANCE)
            for rank, block in np.argwhere(final).tolist()
        )

    def happens(self, operation: Operation, event: int) -> None:
        if event == operation.reads_at:
            operation.operands = [[self._read(copy, operation.step) for copy in each] for each in operation.reads]
        if event == WRITE:
            added = operation.compute(operation.operands)
            for copy, value in zip(operation.writes, added, strict=True):
                if value.shape != self.numbers.content(copy[1]).shape:
                    raise CannotExecuteError(f"what is computed does not fit block {copy[1]}")
                self.write(operation, copy, value)

    # -- memory -------------------------------------------------------------------------------------------------------
    def _given(self, copy: Copy, before: int) -> int:
        """How often a copy was given at steps before this one: joins do not see what was there before a give."""
        return sum(step < before for step in self.gives[copy])

    def _place(self, copy: Copy, step: int) -> Place:
        """Where what comes at a step comes to."""
        if self.resident[copy[0]][copy[1]]:
            return copy
        pool = self._pool(copy[1])
        return copy[0], self.pools.index(pool), step % pool.buffers

    def _pool(self, block: int) -> Pool:
        pool = self.pools[self.kind[block]]
        assert pool is not None, "what is not resident has a pool"
        return pool

    def _source(self, copy: Copy, step: int) -> tuple[Place, int] | None:
        """Where a copy lies that is read at a step, and which generation of it; None if it is nowhere by then."""
        if self.resident[copy[0]][copy[1]]:
            return copy, self._given(copy, step)
        came = max((each for each in self.lands[copy] if each < step), default=step)
        is_gone = step - came >= self._pool(copy[1]).buffers or any(came < each < step for each in self.gives[copy])
        if came == step or is_gone:
            return None
        return self._place(copy, came), came

    def _read(self, copy: Copy, step: int) -> FloatArray:
        found = self._source(copy, step)
        if found is not None:
            generation, values = self.memory.get(found[0], (-1, {}))
            if generation == found[1] and copy[1] in values:
                return values[copy[1]]
        return np.full_like(self.numbers.content(copy[1]), np.nan)

    def write(self, operation: Operation, copy: Copy, value: FloatArray) -> None:
        step, block = operation.step, copy[1]
        place = self._place(copy, step)
        generation = self._given(copy, step + 1) if place == copy else step
        there, values = self.memory.get(place, (generation, {}))
        if there != generation:
            values = {}
        how = self.world.blocks.kinds[self.kind[block]].join
        if self.lost[block]:
            value = np.full_like(value, np.nan)
        elif block in values and how:
            value = self.numbers.joined(block, how, values[block], value)
        self.memory[place] = (generation, values | {block: value})

    # -- order --------------------------------------------------------------------------------------------------------
    def _steps(self) -> list[tuple[Operation, int]]:
        """Step by step: all reads, then what calls add, then arrivals."""
        events = [(each.step, 0, at, each, READ) for at, each in enumerate(self.operations)]
        events += [(each.step, 2 - each.is_call, at, each, WRITE) for at, each in enumerate(self.operations)]
        return [(each, event) for *_, each, event in sorted(events, key=lambda row: row[:3])]

    def _shuffled(self, order: random.Random) -> list[tuple[Operation, int]]:
        """A random order of all events that waits for what has to be waited for."""
        waits = self.waits()
        pending = [len(each) for each in waits]
        after: list[list[int]] = [[] for _ in waits]
        for event, each in enumerate(waits):
            for earlier in each:
                after[earlier].append(event)
        ready = [(order.random(), event) for event, left in enumerate(pending) if not left]
        heapq.heapify(ready)
        done = []
        while ready:
            _, event = heapq.heappop(ready)
            done.append(event)
            for later in after[event]:
                pending[later] -= 1
                if not pending[later]:
                    heapq.heappush(ready, (order.random(), later))
        assert len(done) == len(waits), "what waits for earlier steps never waits for itself"
        for each in self.operations:
            each.reads_at = order.choice((BEGIN, READ))
        last = 3 * len(self.operations)
        return [(self.operations[event // 3], event % 3) for event in done if event < last]

    def waits(self) -> list[set[int]]:
        """The events that each event waits for; event e of operation i has the number 3 i + e."""
        waits = [{*range(3 * at, 3 * at + event)} for at in range(len(self.operations)) for event in EVENTS]
        readers: dict[Place, list[tuple[int, int]]] = defaultdict(list)
        writers: dict[Copy, list[tuple[int, int]]] = defaultdict(list)
        landing: dict[Place, list[tuple[int, int]]] = defaultdict(list)
        for at, each in enumerate(self.operations):
            for copy in chain(*each.reads):
                found = self._source(copy, each.step)
                if found is not None:
                    readers[found[0]].append((each.step if found[0] == copy else found[1], at))
            for copy in each.writes:
                writers[copy].append((each.step, at))
                landing[self._place(copy, each.step)].append((each.step, at))
        for at, each in enumerate(self.operations):
            for copy in chain(*each.reads):
                waits[3 * at + BEGIN] |= {3 * other + WRITE for step, other in writers[copy] if step < each.step}
            for copy in each.writes:
                place = self._place(copy, each.step)
                if place == copy:
                    last = each.step - each.is_call
                    waits[3 * at + WRITE] |= {3 * other + READ for step, other in readers[place] if step <= last}
                else:
                    waits[3 * at + WRITE] |= {3 * other + READ for came, other in readers[place] if came < each.step}
                    waits[3 * at + WRITE] |= {3 * other + WRITE for step, other in landing[place] if step < each.step}
        return waits
