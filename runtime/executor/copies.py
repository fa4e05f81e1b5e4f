"""The copies of blocks at one rank during a run: their tensors, and how parts are joined to them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Protocol

import numpy as np
import torch

from runtime.executor.joins import join
from runtime.executor.views import Views, store, views
from tasp_lab.schedule.blocks import Field, Kind
from tasp_lab.schedule.buffer_layout import OUTSIDE
from tasp_lab.schedule.dependencies import RESIDENT
from tasp_lab.schedule.rank_part import CallRow, Join, Operand, Place, RankPart, Row
from tasp_lab.schedule.schedule import Schedule


class Work(Protocol):
    """What a rank computes in a run. It must not refer to the executor: a cycle would delay freeing the memory."""

    def compute(self, row: CallRow, operands: Sequence[Views]) -> Sequence[Views]:
        """Make a kernel call; returns what it adds to each of `row.adds`. On a GPU it is only queued."""
        ...

    def bound(self, blocks: Sequence[int]) -> Views:
        """The caller's tensors of resident copies of a bound kind, which are contiguous there."""
        ...

    def sent(self, block: int) -> Views:
        """The fields of the resident copy of a bound kind that is sent."""
        ...


class Copies:
    """The copies of one run. Calls and joins of different copies may run in different threads.

    With `as_bytes`, blocks of all kinds are bytes, and sums are added modulo 256.
    """

    def __init__(self, schedule: Schedule, part: RankPart, memory: torch.Tensor, work: Work, as_bytes: bool) -> None:
        self.part, self.memory, self._work, self._as_bytes = part, memory, work, as_bytes
        self._sizes: list[int] = schedule.block_bytes.tolist()
        self._kinds: list[Kind] = [schedule.blocks.kinds[each] for each in schedule.blocks.kind.tolist()]
        self._initial: frozenset[int] = frozenset(np.flatnonzero(schedule.initial[part.rank]).tolist())
        self._lock = threading.Lock()
        self.begin()

    def begin(self) -> None:
        """Begin a run: resident copies are those of the start."""
        self._has_parts = set(self._initial)
        self._computed: dict[tuple[int, int], Views] = {}

    def data(self, block: int, offset: int) -> torch.Tensor:
        """The bytes of a block at an offset in the memory."""
        return self.memory[offset : offset + self._sizes[block]]

    def resident(self, blocks: Sequence[int]) -> Views:
        """Resident copies that are adjacent in the memory."""
        return views(self._adjacent(blocks), self._fields(blocks[0]))

    def store(self, blocks: Sequence[int], values: Views) -> None:
        """Set resident copies that are adjacent in the memory."""
        store(self._adjacent(blocks), self._fields(blocks[0]), values)

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
        return self.memory[first : last + self._sizes[blocks[-1]]]

    def message(self, row: Row) -> torch.Tensor:
        """The bytes of a message: where it is received, or what is sent.

        The copy of a bound kind is gathered into bytes of its own first.
        """
        if row.offset != OUTSIDE:
            return self.data(row.block, row.offset)
        data = self.memory.new_empty(self._sizes[row.block])
        store(data, self._fields(row.block), self._work.sent(row.block))
        return data

    def compute(self, row: CallRow) -> None:
        """Make a kernel call, and join what it adds to resident copies; the rest waits for its join."""
        found = self._work.compute(row, [self._operand(each) for each in row.operands])
        for place, values in zip(row.adds, found, strict=True):
            if place.since == RESIDENT:
                self._add_to_resident(place, [values])
            else:
                self._computed[row.operation, place.block] = values

    def join(self, each: Join) -> None:
        """Join all that came to a copy at a step: arrivals in their order, then what calls added."""
        place = each.place
        found = [self._views(place.block, offset) for offset in each.received]
        keys = [(operation, place.block) for operation in each.operations]
        found += [_on_current_stream(self._computed.pop(key)) for key in keys if key in self._computed]
        if place.since == RESIDENT:
            self._add_to_resident(place, found)
        else:
            self._join(place, found, empty=not each.begun)

    def given(self, row: Row) -> None:
        """Note that what was sent is no more there, if its sender gave it."""
        if row.gives and row.since == RESIDENT:
            with self._lock:
                self._has_parts.discard(row.block)

    def _add_to_resident(self, place: Place, found: Sequence[Views]) -> None:
        with self._lock:
            self._join(place, found, place.block not in self._has_parts)
            self._has_parts.add(place.block)

    def _join(self, place: Place, found: Sequence[Views], empty: bool) -> None:
        into, kind = self._views(place.block, place.offset), self._kinds[place.block]
        how = "add" if self._as_bytes and kind.join else kind.join
        for part in found:
            join(how, into, part, empty, rounded=place.since == RESIDENT)
            empty = False
        if place.offset != OUTSIDE:
            store(self.data(place.block, place.offset), self._fields(place.block), into)

    def _operand(self, operand: Operand) -> Views:
        if not operand.blocks:
            return ()
        if operand.offset == OUTSIDE:
            return self._work.bound(operand.blocks)
        data = self.memory[operand.offset : operand.offset + operand.size_bytes]
        return views(data, self._fields(operand.blocks[0]))

    def _views(self, block: int, offset: int) -> Views:
        if offset == OUTSIDE:
            return self._work.bound([block])
        return views(self.data(block, offset), self._fields(block))

    def _fields(self, block: int) -> Sequence[Field]:
        return () if self._as_bytes else self._kinds[block].fields


def _on_current_stream(values: Views) -> Views:
    """The values, whose memory is not reused before the current stream has read it."""
    for each in values:
        if each.is_cuda:
            each.record_stream(torch.cuda.current_stream(each.device))
    return values
