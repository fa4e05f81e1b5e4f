"""The copies of all blocks during a replay, and the stores that hold them.

`DataCopies` are there or not: an integer for each rank and block. `SumCopies` are rows of 64-bit words with a bit for
each part, one row for each copy that exists, found through a table. What a transfer carries or a call adds is a
*content*: an array (copies, words) of such words; one word for data.

All methods take the rank of several copies and the place of their block in the store, int arrays of equal length. A
copy is *born* at the step at which something comes to where nothing is; initial copies at step -1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tasp_lab.core.arrays import BoolArray, IntArray
from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedule.model import ScheduleModel

WordArray = npt.NDArray[np.uint64]
"""Sets of parts, (sets, words): part p is bit p mod 64 of word p div 64."""

WORD = 64
"""Bits of a word."""

MAX_WORDS = 2**27
"""Maximum words of all copies of a store, 1 GiB."""

_BYTE = 8


class Joined(NamedTuple):
    """What is found when contents come to copies: an entry per content.

    `there`: what of it was there before; `doubled`: what others before it bring to the same copy at the same time, both
    arrays (contents, words); `older`: whether the copy is a sum that was born at an earlier step.
    """

    there: WordArray
    doubled: WordArray
    older: BoolArray


class DataCopies:
    """Copies of data: 0 for one that is not there, else 1 + the step of its birth, modulo `cycle`, 255 or more.

    The methods are those of `SumCopies`.
    """

    def __init__(self, initial: BoolArray, cycle: int) -> None:
        self._cycle = cycle
        self._tag = initial.astype(np.min_scalar_type(cycle))

    def holds(self, rank: IntArray, place: IntArray) -> BoolArray:
        held: BoolArray = self._tag[rank, place] > 0
        return held

    complete = holds

    def born_at(self, rank: IntArray, place: IntArray, index: int) -> BoolArray:
        born: BoolArray = self._tag[rank, place] == 1 + index % self._cycle
        return born

    def exist(self, place: IntArray, word: IntArray) -> WordArray:
        return np.ones(len(place), dtype=np.uint64)

    def take(self, rank: IntArray, place: IntArray) -> WordArray:
        return self.holds(rank, place).astype(np.uint64)[:, None]

    def drop(self, rank: IntArray, place: IntArray) -> None:
        self._tag[rank, place] = 0

    def create(self, rank: IntArray, place: IntArray, word: IntArray, bits: WordArray, index: int) -> Joined:
        return self.join(rank, place, bits[:, None], index)

    def join(self, rank: IntArray, place: IntArray, content: WordArray, index: int) -> Joined:
        there = self.take(rank, place)
        doubled = np.zeros(len(rank), dtype=np.uint64)
        number = np.arange(len(rank))
        # Each content writes its number where it comes, digit by digit, as tags may have a byte only. Of two that come
        # to one place the last one wins, and the other one reads another number than its own in some digit.
        for digit in range(0, len(rank).bit_length(), _BYTE):
            marks = (number >> digit & 255).astype(self._tag.dtype)
            self._tag[rank, place] = marks
            doubled |= self._tag[rank, place] != marks
        self._tag[rank, place] = 1 + index % self._cycle
        return Joined(there, doubled[:, None], np.zeros(len(rank), dtype=bool))

    def parts(self, rank: int, place: int) -> tuple[IntArray, IntArray]:
        there = self._tag[rank, place : place + 1] > 0
        return np.flatnonzero(there), np.flatnonzero(~there)


class SumCopies:
    """Copies of sums. `existing` is an array (blocks, words): the parts that exist.

    Raises `ScheduleError` if copies need too many words.
    """

    def __init__(self, ranks: int, existing: WordArray) -> None:
        self._existing = existing
        self._row = np.full((ranks, len(existing)), -1, dtype=np.int32)
        self._content = np.zeros((0, existing.shape[1]), dtype=np.uint64)
        self._born = np.zeros(0, dtype=np.int64)
        self._used = np.zeros(0, dtype=bool)

    def holds(self, rank: IntArray, place: IntArray) -> BoolArray:
        """Which copies have any part."""
        held: BoolArray = self._row[rank, place] >= 0
        return held

    def complete(self, rank: IntArray, place: IntArray) -> BoolArray:
        """Which copies have all parts that exist."""
        complete: BoolArray = (self.take(rank, place) == self._existing[place]).all(axis=1)
        return complete

    def born_at(self, rank: IntArray, place: IntArray, index: int) -> BoolArray:
        """Which copies were born at step `index`, given that they are younger than their pools have buffers."""
        row = self._row[rank, place]
        born: BoolArray = row >= 0
        born[born] = self._born[row[born]] == index
        return born

    def exist(self, place: IntArray, word: IntArray) -> WordArray:
        """The parts of one word of each block that exist."""
        existing: WordArray = self._existing[place, word]
        return existing

    def take(self, rank: IntArray, place: IntArray) -> WordArray:
        """The contents of copies, nothing where no copy is."""
        check_words(len(rank) * self._existing.shape[1])
        row = self._row[rank, place]
        if not len(self._content):
            return np.zeros((len(row), self._existing.shape[1]), dtype=np.uint64)
        content: WordArray = self._content[row]
        if len(row) and row.min() < 0:
            content[row < 0] = 0
        return content

    def drop(self, rank: IntArray, place: IntArray) -> None:
        """Remove copies."""
        row = self._row[rank, place]
        self._used[row[row >= 0]] = False
        self._row[rank, place] = -1

    def create(self, rank: IntArray, place: IntArray, word: IntArray, bits: WordArray, index: int) -> Joined:
        """Add the parts `bits` of one word of each at step `index`; no word of a copy comes twice."""
        row = self._rows(rank, place, index)
        before = self._content[row, word]
        self._content[row, word] = before | bits
        return Joined((before & bits)[:, None], np.zeros((len(row), 1), dtype=np.uint64), self._born[row] != index)

    def join(self, rank: IntArray, place: IntArray, content: WordArray, index: int) -> Joined:
        """Add contents at step `index`."""
        row = self._rows(rank, place, index)
        before, doubled = self._content[row], np.zeros_like(content)
        number, last = np.arange(len(row), dtype=np.int32), np.zeros(len(self._used), dtype=np.int32)
        last[row] = number
        if (last[row] == number).all():
            self._content[row] = before | content
        else:
            doubled = self._join_in_turns(row, content)
        return Joined(before & content, doubled, self._born[row] != index)

    def _join_in_turns(self, row: IntArray, content: WordArray) -> WordArray:
        """Add contents of which several may come to one row; returns of each what those before it bring, too."""
        doubled, came = np.zeros_like(content), np.zeros_like(content)
        order = np.argsort(row, kind="stable")
        starts = np.flatnonzero(np.diff(row[order], prepend=-1))
        ends = np.append(starts[1:], len(order))
        first = np.repeat(order[starts], ends - starts)
        for turn in count():  # what comes to a row is collected where its first content is
            starts, ends = starts[starts + turn < ends], ends[starts + turn < ends]
            if not len(starts):
                self._content[row[first]] |= came[first]
                return doubled
            now = order[starts + turn]
            doubled[now] = came[order[starts]] & content[now]
            came[order[starts]] |= content[now]
        raise AssertionError("turns end")

    def _rows(self, rank: IntArray, place: IntArray, index: int) -> IntArray:
        """The rows of these copies, new ones for copies that are not there."""
        row = self._row[rank, place]
        absent = np.flatnonzero(row < 0)
        if len(absent):
            at = rank[absent], place[absent]
            # Several contents may come to one new copy: all write their number, and the one that is left takes a row.
            marks = np.arange(len(absent), dtype=np.int32)
            self._row[at] = marks
            once = np.flatnonzero(self._row[at] == marks)
            new = self._unused(len(once))
            self._content[new], self._born[new], self._used[new] = 0, index, True
            self._row[at[0][once], at[1][once]] = new
            row = self._row[rank, place]
        return row.astype(np.int64)

    def _unused(self, wanted: int) -> IntArray:
        """Rows that no copy uses."""
        unused = np.flatnonzero(~self._used)
        if len(unused) < wanted:
            # By half, so that each row is copied about twice in all; by no more than asked once that is too much.
            size, width = self._content.shape
            grown = max(size + wanted - len(unused), min(size + size // 2, MAX_WORDS // width))
            check_words(grown * width)
            more = np.zeros((grown - size, width), dtype=np.uint64)
            self._content = np.concatenate([self._content, more])
            self._born = np.concatenate([self._born, np.zeros(grown - size, dtype=np.int64)])
            self._used = np.concatenate([self._used, np.zeros(grown - size, dtype=bool)])
            unused = np.flatnonzero(~self._used)
        return unused[:wanted]

    def parts(self, rank: int, place: int) -> tuple[IntArray, IntArray]:
        """The parts that a copy has, and those that it lacks."""
        content = self.take(np.array([rank]), np.array([place]))[0]
        return _parts_of(content), _parts_of(self._existing[place] & ~content)


Store = DataCopies | SumCopies


def check_words(words: int) -> None:
    """Raise `ScheduleError` if sets of so many words would take too much memory."""
    if words > MAX_WORDS:
        raise ScheduleError(
            f"sets of {words * WORD} parts in all are too many to replay, expected at most {MAX_WORDS * WORD}"
        )


def sets_of(parts: BoolArray, words: int) -> WordArray:
    """Sets from a bool array (sets, parts).

    >>> sets_of(np.array([[True, False, True]]), 1)
    array([[5]], dtype=uint64)
    """
    bits = np.zeros((len(parts), words * WORD), dtype=bool)
    bits[:, : parts.shape[1]] = parts
    packed: WordArray = np.packbits(bits, axis=1, bitorder="little").view(np.uint64)
    return packed


def _parts_of(content: WordArray) -> IntArray:
    """The parts of one set, a row of words."""
    return np.flatnonzero(np.unpackbits(content.view(np.uint8), bitorder="little"))


def bit_of(part: IntArray) -> WordArray:
    """The bit of each part in its word."""
    bits: WordArray = np.uint64(1) << (part % WORD).astype(np.uint64)
    return bits


def first_parts(content: WordArray) -> IntArray:
    """The first part of each set, -1 of an empty one.

    >>> first_parts(np.array([[0, 4], [0, 0]], dtype=np.uint64))
    array([66, -1])
    """
    parts = np.full(len(content), -1, dtype=np.int64)
    some = np.flatnonzero(content[:, 0] if content.shape[1] == 1 else content.any(axis=1))
    if not len(some):
        return parts
    word = (content[some] != 0).argmax(axis=1)
    bits = content[some, word]
    parts[some] = word * WORD + np.log2(bits & (~bits + np.uint64(1))).astype(np.int64)
    return parts


MAX_PARTS = 2**24
"""Maximum parts of a block in a replay."""

_BATCH = 2**20
"""Parts whose existence is looked up at once."""


class Came(NamedTuple):
    """What is found when something comes to copies: an entry of each array for each of them.

    `unknown`, `there`, `doubled`: a part that comes and does not exist, that was there already, or that comes with
    another one, too; -1 for none. `older`: whether the copy is that of a sum and was there at an earlier step.
    """

    unknown: IntArray
    there: IntArray
    doubled: IntArray
    older: BoolArray

    @classmethod
    def of(cls, count: int) -> Came:
        unknown, there, doubled = np.full((3, count), -1, dtype=np.int64)
        return cls(unknown, there, doubled, np.zeros(count, dtype=bool))


class Copies:
    """Which parts of each block each rank has; at first those of the start of a schedule.

    There is a store for data and one for each width of sums in words, widths being powers of two. Methods take the
    ranks and the blocks of several copies, int arrays of equal length.

    Raises `ScheduleError` for initial parts that do not exist, and if sets take too much memory.
    """

    def __init__(self, schedule: ScheduleModel) -> None:
        blocks = schedule.blocks
        if blocks.parts.max(initial=1) > MAX_PARTS:
            block = int(blocks.parts.argmax())
            raise ScheduleError(
                f"{blocks.name(block)} has {blocks.parts[block]} parts, too many to replay, "
                f"expected at most {MAX_PARTS}"
            )
        words = np.where(blocks.are_sums, 1 << np.ceil(np.log2(-(-blocks.parts // WORD))).astype(np.int64), 0)
        self._store_of, self._place = np.zeros((2, len(blocks)), dtype=np.int64)
        self._stores: list[Store] = []
        for width in sorted(set(words.tolist())):
            members = np.flatnonzero(words == width)
            self._store_of[members], self._place[members] = len(self._stores), np.arange(len(members))
            initial = schedule.initial if len(members) == len(blocks) else schedule.initial[:, members]
            if width:
                check_words(max(int(np.count_nonzero(initial)), len(members)) * width)
                existing = _existing(schedule, members, width)
                self._stores.append(SumCopies(schedule.world_size, existing))
                rank, place = np.nonzero(initial)
                self._start(schedule, rank, members[place], existing[place])
            else:
                cycle = max(int(blocks.buffers.max(initial=0)) + 1, np.iinfo(np.uint8).max)
                self._stores.append(DataCopies(initial, cycle))

    def _start(self, schedule: ScheduleModel, rank: IntArray, block: IntArray, content: WordArray) -> None:
        """Add initial copies of sums, whose existing parts are `content`."""
        if schedule.initial_part is not None:
            part = np.broadcast_to(schedule.initial_part, schedule.initial.shape)[rank, block]
            single = np.flatnonzero(part >= 0)
            one = np.zeros((len(single), content.shape[1]), dtype=np.uint64)
            one[np.arange(len(single)), part[single] // WORD] = bit_of(part[single])
            unknown = ~(one & content[single]).any(axis=1)
            if unknown.any():
                at = single[unknown.argmax()]
                raise ScheduleError(
                    f"rank {rank[at]} starts with part {part[at]} of {schedule.blocks.name(block[at])}, "
                    "which does not exist"
                )
            content[single] = one
        some = content.any(axis=1)
        if some.any():
            self.join(rank[some], block[some], [content[some]], -1)

    def _by_store(self, block: IntArray) -> Iterator[tuple[Store, IntArray | slice]]:
        """The stores of these blocks, each with the indices of its blocks."""
        store_of = self._store_of[block]
        if len(block) and (store_of == store_of[0]).all():  # as most often
            yield self._stores[store_of[0]], slice(None)
            return
        for number in np.flatnonzero(np.bincount(store_of)).tolist():
            yield self._stores[number], np.flatnonzero(store_of == number)

    def _ask(self, rank: IntArray, block: IntArray, ask: Callable[[Store, IntArray, IntArray], BoolArray]) -> BoolArray:
        answer = np.zeros(len(block), dtype=bool)
        for store, chosen in self._by_store(block):
            answer[chosen] = ask(store, rank[chosen], self._place[block[chosen]])
        return answer

    def holds(self, rank: IntArray, block: IntArray) -> BoolArray:
        """Which copies have any part."""
        return self._ask(rank, block, lambda store, *at: store.holds(*at))

    def complete(self, rank: IntArray, block: IntArray) -> BoolArray:
        """Which copies have all parts that exist."""
        return self._ask(rank, block, lambda store, *at: store.complete(*at))

    def born_at(self, rank: IntArray, block: IntArray, index: int) -> BoolArray:
        """Which copies came at step `index` to where nothing was; only of copies in buffers."""
        return self._ask(rank, block, lambda store, *at: store.born_at(*at, index))

    def take(self, rank: IntArray, block: IntArray) -> list[WordArray]:
        """What these copies have, for `join`: one array for each store."""
        return [store.take(rank[chosen], self._place[block[chosen]]) for store, chosen in self._by_store(block)]

    def are_empty(self, block: IntArray, contents: list[WordArray]) -> BoolArray:
        """Of which blocks `take` found nothing."""
        empty = np.zeros(len(block), dtype=bool)
        for (_, chosen), content in zip(self._by_store(block), contents, strict=True):
            empty[chosen] = content[:, 0] == 0 if content.shape[1] == 1 else ~content.any(axis=1)
        return empty

    def drop(self, rank: IntArray, block: IntArray) -> None:
        """Remove copies."""
        for store, chosen in self._by_store(block):
            store.drop(rank[chosen], self._place[block[chosen]])

    def join(self, rank: IntArray, block: IntArray, contents: list[WordArray], index: int) -> Came:
        """Add what `take` found of these blocks to copies, at step `index`."""
        came = Came.of(len(block))
        for (store, chosen), content in zip(self._by_store(block), contents, strict=True):
            joined = store.join(rank[chosen], self._place[block[chosen]], content, index)
            came.there[chosen], came.doubled[chosen] = first_parts(joined.there), first_parts(joined.doubled)
            came.older[chosen] = joined.older
        return came

    def create(self, rank: IntArray, block: IntArray, word: IntArray, bits: WordArray, index: int) -> Came:
        """Add the parts `bits` of one word of each copy, at step `index`; no word of a copy comes twice."""
        came = Came.of(len(block))
        for store, chosen in self._by_store(block):
            at, words, added = (rank[chosen], self._place[block[chosen]]), word[chosen], bits[chosen]
            came.unknown[chosen] = _first_of_word(added & ~store.exist(at[1], words), words)
            joined = store.create(*at, words, added, index)
            came.there[chosen], came.older[chosen] = _first_of_word(joined.there[:, 0], words), joined.older
        return came

    def parts(self, rank: int, block: int) -> tuple[IntArray, IntArray]:
        """The parts that a copy has, and those that it lacks."""
        store = self._stores[self._store_of[block]]
        held_and_lacking: tuple[IntArray, IntArray] = store.parts(rank, int(self._place[block]))
        return held_and_lacking


def _first_of_word(bits: WordArray, word: IntArray) -> IntArray:
    """The first part of each set within one word of each; -1 of an empty one."""
    part = first_parts(bits[:, None])
    return np.where(part < 0, -1, part + word * WORD)


def _existing(schedule: ScheduleModel, blocks: IntArray, words: int) -> WordArray:
    """The parts of blocks of sums that exist, an array (blocks, words); all parts if the schedule has no task."""
    parts, task = schedule.blocks.parts[blocks], schedule.task
    existing = np.zeros((len(blocks), words), dtype=np.uint64)
    batch = max(_BATCH // (words * WORD), 1)
    for first in range(0, len(blocks), batch):
        these = slice(first, first + batch)
        within = np.arange(words * WORD) < parts[these, None]
        existing[these] = sets_of(within if task is None else task.existing_parts(blocks[these]), words)
    return existing
