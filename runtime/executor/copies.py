"""The copies of blocks at one rank during a run: their tensors, and how parts are joined to them.

Calls and joins are made into functions once, with the tensors in the memory. New in every run are only the caller's
tensors, what is gathered from them, and what kernel calls return.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import groupby

import numpy as np
import torch

from runtime.executor.plans import PlannedMessage
from runtime.executor.sums import Parts, Sum, Sums, Term
from runtime.executor.views import Format, Views, store, views
from runtime.kernels import fused
from tasp_lab.core.errors import RunError
from tasp_lab.schedule.buffer_layout import OUTSIDE
from tasp_lab.schedule.dependencies import RESIDENT
from tasp_lab.schedule.rank_part import SCATTERED, CallRow, Join, Operand, RankPart
from tasp_lab.schedule.schedule import Schedule

Action = Callable[[], object]
"""One thing that a rank does in every run."""


class Work:
    """What a rank computes in a run; by default nothing, for schedules without kernel calls and bound kinds.

    It must not refer to the executor: a cycle would delay freeing the memory.
    """

    def compute(self, row: CallRow, operands: Sequence[Views]) -> Sequence[Parts]:
        """Make a kernel call; returns what it adds to `row.adds`, and to other blocks, alike in every run.

        On a GPU the call is only queued.
        """
        raise RunError(f"step {row.step}: kernel {row.kernel} is to be called, but no work was given")

    def load(self, copies: Copies) -> None:
        """Set what the memory has at the start of a run; here nothing."""

    def arranged(self, fields: Views) -> Views:
        """The fields of an operand as `compute` takes them; those in the memory are arranged once for all runs."""
        return fields

    def bound(self, blocks: Sequence[int]) -> Views:
        """The caller's tensors of resident copies of a bound kind, which are contiguous there.

        Those of one block are the same in all runs; of several they may be gathered.
        """
        raise RunError(f"block {blocks[0]} is bound to a tensor of the caller, but no work was given")

    def sent(self, block: int) -> Views:
        """The fields of the resident copy of a bound kind that is sent."""
        return self.bound([block])


class Copies:
    """The copies of one run. Calls and joins of different copies may run in different threads.

    With `as_bytes`, blocks of all kinds are bytes, and sums are added modulo 256.
    """

    def __init__(self, schedule: Schedule, part: RankPart, memory: torch.Tensor, work: Work, as_bytes: bool) -> None:
        self.part, self.memory, self._as_bytes = part, memory, as_bytes
        self._kinds = schedule.blocks.kinds
        self._sizes, self._home_sizes, self._kind, initial = _facts(schedule, part.rank)
        self._initial_sums = initial & _added_to(part)
        wire = [Format(memory, () if as_bytes else kind.fields) for kind in self._kinds]
        home = [Format(memory, kind.home_fields) if kind.is_wide_at_home and not as_bytes else each
                for kind, each in zip(self._kinds, wire, strict=True)]  # fmt: skip
        self._formats = wire, home
        how = ["add" if as_bytes and kind.join else kind.join for kind in self._kinds]
        self._sums = Sums(self._kind, self._sizes, how, wire, home)
        self._resident: dict[tuple[int, ...], tuple[Views, torch.Tensor | None] | None] = {}
        self._lock = threading.Lock()
        self.work = work
        self._has_parts = set[int]()
        self._computed: dict[tuple[int, int], Sequence[Parts]] = {}  # by call and block, until it is joined
        self.begin()

    def begin(self) -> None:
        """Begin a run: resident copies are those of the start."""
        self._has_parts.clear()
        self._has_parts.update(self._initial_sums)
        self._computed.clear()

    def data(self, block: int, offset: int) -> torch.Tensor:
        """The bytes of a block at an offset in the memory, as on the wire."""
        return self.memory[offset : offset + self._sizes[block]]

    def resident(self, blocks: Sequence[int]) -> Views:
        """Resident copies that are adjacent in the memory."""
        return views(self._adjacent(blocks), self._format(blocks[0], at_home=True).fields)

    def store(self, blocks: Sequence[int], values: Views) -> None:
        """Set resident copies that are adjacent in the memory."""
        store(self._adjacent(blocks), self._format(blocks[0], at_home=True).fields, values)

    def load(self, blocks: tuple[int, ...], values: Views) -> None:
        """Set resident copies, wherever they are in the memory; their rows in `values` follow one another."""
        found = self._resident_rows(blocks)
        if found is None:
            for block, rows in self._by_block(blocks, values):
                self.store([block], rows)
        else:
            fused.add(found[0], values, found[1], empty=True)

    def read(self, blocks: tuple[int, ...], into: Views) -> None:
        """Copy resident copies, whose rows in `into` follow one another."""
        found = self._resident_rows(blocks)
        if found is None:
            for block, rows in self._by_block(blocks, into):
                fused.add(rows, self.resident([block]), empty=True)
        else:
            fused.add(into, found[0], None, found[1], empty=True)

    def _resident_rows(self, blocks: tuple[int, ...]) -> tuple[Views, torch.Tensor | None] | None:
        if blocks not in self._resident:
            self._resident[blocks] = self._sums.resident(blocks, [self.part.resident[block] for block in blocks])
        return self._resident[blocks]

    def _by_block(self, blocks: Sequence[int], values: Views) -> Iterator[tuple[int, Views]]:
        counts = [self._sums.rows(block) for block in blocks]
        return zip(blocks, zip(*(torch.split(each, counts) for each in values), strict=True), strict=True)

    def load_bytes(self, blocks: Sequence[int], data: torch.Tensor) -> None:
        """Set resident copies to the bytes of blocks, one after the other."""
        for _, of_kind in groupby(blocks, key=self._kind.__getitem__):
            alike = tuple(of_kind)
            size = sum(self._sizes[block] for block in alike)
            self.load(alike, views(data[:size], self._format(alike[0]).fields))
            data = data[size:]

    def left_behind(self, block: int) -> torch.Tensor:
        """The bytes of a block that the run has left at the rank, resident or in a buffer."""
        if block in self.part.resident:
            return self.data(block, self.part.resident[block])
        return self.data(block, self._last_received[block])

    @cached_property
    def _last_received(self) -> Mapping[int, int]:
        return {row.block: row.offset for row in self.part.receives}

    def _adjacent(self, blocks: Sequence[int]) -> torch.Tensor:
        first, last = self.part.resident[blocks[0]], self.part.resident[blocks[-1]]
        return self.memory[first : last + self._home_sizes[blocks[-1]]]

    def message(self, message: PlannedMessage) -> torch.Tensor:
        """The bytes of a message: where it is received, or what is sent.

        The copy of a bound kind, or of one that is wider at home, is gathered into bytes of its own first. All others
        are views.
        """
        if not message.is_gathered:
            return self.memory[message.offset : message.offset + message.size_bytes]
        (row,) = message.rows
        data = self.memory.new_empty(message.size_bytes)
        place = self.part.resident.get(row.block)
        found = (
            self.work.sent(row.block)
            if place is None
            else self._format(row.block, at_home=True).views(place, self._size(row.block, at_home=True))[0]
        )
        store(data, self._format(row.block).fields, found)
        return data

    def call(self, row: CallRow) -> Action:
        """A kernel call, and the joins of what it adds to resident copies; the rest waits for its join."""
        places = [place for place in row.adds if place.since == RESIDENT]
        later = [(row.operation, place.block) for place in row.adds if place.since != RESIDENT]
        operands = [self._operand(each) for each in row.operands]
        fixed = [() if callable(each) else self.work.arranged(each) for each in operands]
        fresh = [(at, each) for at, each in enumerate(operands) if callable(each)]
        joins: list[Callable[[Sequence[Parts]], None]] | None = None

        def compute() -> None:
            nonlocal joins
            given = fixed
            if fresh:
                given = fixed.copy()
                for at, operand in fresh:
                    given[at] = self.work.arranged(operand())
            found = self.work.compute(row, given)
            if joins is None:
                sums = self._sums.plan(self._sums.of_call(places, row.operation, found, at_home=True))
                joins = [self._add_to_resident(each, found) for each in sums]
            for key in later:
                self._computed[key] = found
            for join in joins:
                join(found)

        return compute

    def join(self, joins: Sequence[Join]) -> Action:
        """The join of all that came to some copies: to each its arrivals in their order, then what calls added."""
        computed, first_call = self._computed, self.part.first_call
        keys = [(each, join.place.block) for join in joins for each in join.operations if each >= first_call]
        steps: list[tuple[Sum, Callable[[Sequence[Parts]], None]]] | None = None

        def run() -> None:
            nonlocal steps
            if steps is None:
                steps = [(each, self._joined(each)) for each in self._sums.plan(self._terms_of(joins))]
            for sum_, join in steps:
                found: Sequence[Parts] = ()
                if sum_.call is not None:
                    found = computed[sum_.call, sum_.blocks[0]]
                    for field in found[sum_.output].fields:  # not reused before the current stream has read it
                        if field.is_cuda:
                            field.record_stream(torch.cuda.current_stream(field.device))
                join(found)
            for each in keys:
                del computed[each]

        return run

    def _joined(self, sum_: Sum) -> Callable[[Sequence[Parts]], None]:
        found = () if sum_.call is None else self._computed[sum_.call, sum_.blocks[0]]
        if sum_.at_home:
            return self._add_to_resident(sum_, found)
        return self._sums.joiner(sum_, sum_.is_first, found, self._bound)

    def _terms_of(self, joins: Sequence[Join]) -> list[Term]:
        """What is joined: the first that comes to each copy, then the second of each, and so on."""
        turns: list[list[Term]] = []
        for join in joins:
            place, at_home = join.place, join.place.since == RESIDENT
            terms = [Term(place.block, place.offset, at_home, None, 0, offset, False) for offset in join.received]
            for call in join.operations:
                if call >= self.part.first_call:
                    terms += self._sums.of_call([place], call, self._computed[call, place.block], at_home)
            for turn, term in enumerate(terms):
                if turn == len(turns):
                    turns.append([])
                turns[turn].append(term._replace(is_first=not (turn or at_home or join.begun)))
        return [term for turn in turns for term in turn]

    def given(self, blocks: Sequence[int]) -> None:
        """Note that what was sent is no more there, as its sender gave it."""
        with self._lock:
            self._has_parts.difference_update(blocks)

    def _add_to_resident(self, sum_: Sum, found: Sequence[Parts]) -> Callable[[Sequence[Parts]], None]:
        """Joins to copies some of which may be empty, as nothing has come yet, or as what came was given away."""
        blocks, there, lock = sum_.blocks, self._has_parts, self._lock
        join = self._sums.joiner(sum_, False, found, self._bound)

        def add(found: Sequence[Parts]) -> None:
            with lock:
                if there.issuperset(blocks):
                    join(found)
                    return
                for each, is_empty in self._sums.split(sum_, [block not in there for block in blocks]):
                    self._sums.join(each, is_empty, found, self._bound)
                there.update(blocks)

        return add

    def _bound(self, blocks: Sequence[int]) -> Views:
        return self.work.bound(blocks)

    def operand(self, operand: Operand) -> Views:
        """The fields of an operand of a kernel call."""
        found = self._operand(operand)
        return found() if callable(found) else found

    def _operand(self, operand: Operand) -> Views | Callable[[], Views]:
        """The fields of an operand: the copies themselves, or what makes them in each run."""
        if not operand.blocks:
            return ()
        if operand.offset == SCATTERED:
            return lambda: self._gathered(operand)
        if operand.offset == OUTSIDE:
            return lambda: self.work.bound(operand.blocks)
        at_home = operand.since[0] == RESIDENT
        if self._as_bytes and at_home:
            return self._bytes_on_the_wire(operand)
        format_ = self._format(operand.blocks[0], at_home)
        found, is_copy = format_.views(operand.offset, operand.size_bytes)
        return found if is_copy else lambda: format_.views(operand.offset, operand.size_bytes)[0]

    def _gathered(self, operand: Operand) -> Views:
        """The fields of an operand whose blocks do not lie side by side, in new tensors.

        The caller's tensors are taken as they are sent, as the others are.
        """
        found = []
        for piece in operand.pieces:
            if piece.offset == OUTSIDE:
                found += [self.work.sent(block) for block in piece.blocks]
            else:
                found.append(self.operand(piece))
        return tuple(torch.cat(list(fields)) for fields in zip(*found, strict=True))

    def _bytes_on_the_wire(self, operand: Operand) -> Views | Callable[[], Views]:
        """Resident copies as bytes, without the room that is left where they are wider at home."""
        data = self.memory[operand.offset : operand.offset + operand.size_bytes]
        sizes = [self._sizes[block] for block in operand.blocks]
        if operand.size_bytes == sum(sizes):
            return (data,)
        places = torch.split(data, [self._home_sizes[block] for block in operand.blocks])
        return lambda: (torch.cat([place[:size] for place, size in zip(places, sizes, strict=True)]),)

    def _size(self, block: int, at_home: bool) -> int:
        return (self._home_sizes if at_home and not self._as_bytes else self._sizes)[block]

    def _format(self, block: int, at_home: bool = False) -> Format:
        return self._formats[at_home][self._kind[block]]


@lru_cache(maxsize=16)
def _facts(schedule: Schedule, rank: int) -> tuple[list[int], list[int], list[int], frozenset[int]]:
    """The sizes of blocks on the wire and at home, their kinds, and the blocks that a rank has at the start."""
    blocks, initial = schedule.blocks, frozenset(np.flatnonzero(schedule.initial[rank]).tolist())
    return blocks.bytes.tolist(), blocks.home_bytes.tolist(), blocks.kind.tolist(), initial


@lru_cache(maxsize=16)
def _added_to(part: RankPart) -> frozenset[int]:
    """The blocks to whose resident copies something is added."""
    places = [place for row in part.calls for place in row.adds] + [each.place for each in part.joins]
    return frozenset(place.block for place in places if place.since == RESIDENT)
