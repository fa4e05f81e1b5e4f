"""The copies of all blocks during a replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray
from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedule.copy_stores import (
    WORD,
    DataCopies,
    Store,
    SumCopies,
    WordArray,
    bit_of,
    check_words,
    first_parts,
    sets_of,
)

if TYPE_CHECKING:
    from tasp_lab.schedule.schedule import Schedule

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

    def __init__(self, schedule: Schedule) -> None:
        blocks = schedule.blocks
        if blocks.parts.max(initial=1) > MAX_PARTS:
            block = int(blocks.parts.argmax())
            raise ScheduleError(
                f"{blocks.name(block)} has {blocks.parts[block]} parts, too many to replay, "
                f"expected at most {MAX_PARTS}"
            )
        sums = np.array([bool(kind.join) for kind in blocks.kinds], dtype=bool)[blocks.kind]
        words = np.where(sums, 1 << np.ceil(np.log2(-(-blocks.parts // WORD))).astype(np.int64), 0)
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

    def _start(self, schedule: Schedule, rank: IntArray, block: IntArray, content: WordArray) -> None:
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
        for number in np.flatnonzero(np.bincount(store_of)).tolist():
            chosen = np.flatnonzero(store_of == number)
            yield self._stores[number], slice(None) if len(chosen) == len(block) else chosen

    def _ask(self, rank: IntArray, block: IntArray, ask: Callable[[Store, IntArray, IntArray], BoolArray]) -> BoolArray:
        found = np.zeros(len(block), dtype=bool)
        for store, chosen in self._by_store(block):
            found[chosen] = ask(store, rank[chosen], self._place[block[chosen]])
        return found

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
        found = np.zeros(len(block), dtype=bool)
        for (_, chosen), content in zip(self._by_store(block), contents, strict=True):
            found[chosen] = content[:, 0] == 0 if content.shape[1] == 1 else ~content.any(axis=1)
        return found

    def drop(self, rank: IntArray, block: IntArray) -> None:
        """Remove copies."""
        for store, chosen in self._by_store(block):
            store.drop(rank[chosen], self._place[block[chosen]])

    def join(self, rank: IntArray, block: IntArray, contents: list[WordArray], index: int) -> Came:
        """Add what `take` found of these blocks to copies, at step `index`."""
        found = Came.of(len(block))
        for (store, chosen), content in zip(self._by_store(block), contents, strict=True):
            joined = store.join(rank[chosen], self._place[block[chosen]], content, index)
            found.there[chosen], found.doubled[chosen] = first_parts(joined.there), first_parts(joined.doubled)
            found.older[chosen] = joined.older
        return found

    def create(self, rank: IntArray, block: IntArray, word: IntArray, bits: WordArray, index: int) -> Came:
        """Add the parts `bits` of one word of each copy, at step `index`; no word of a copy comes twice."""
        found = Came.of(len(block))
        for store, chosen in self._by_store(block):
            at, words, added = (rank[chosen], self._place[block[chosen]]), word[chosen], bits[chosen]
            found.unknown[chosen] = _first_of_word(added & ~store.exist(at[1], words), words)
            joined = store.create(*at, words, added, index)
            found.there[chosen], found.older[chosen] = _first_of_word(joined.there[:, 0], words), joined.older
        return found

    def parts(self, rank: int, block: int) -> tuple[IntArray, IntArray]:
        """The parts that a copy has, and those that it lacks."""
        found: tuple[IntArray, IntArray] = self._stores[self._store_of[block]].parts(rank, int(self._place[block]))
        return found


def _first_of_word(bits: WordArray, word: IntArray) -> IntArray:
    """The first part of each set within one word of each; -1 of an empty one."""
    part = first_parts(bits[:, None])
    return np.where(part < 0, -1, part + word * WORD)


def _existing(schedule: Schedule, blocks: IntArray, words: int) -> WordArray:
    """The parts of blocks of sums that exist, an array (blocks, words); all parts if the schedule has no task."""
    parts, task = schedule.blocks.parts[blocks], schedule.task
    found = np.zeros((len(blocks), words), dtype=np.uint64)
    batch = max(_BATCH // (words * WORD), 1)
    for first in range(0, len(blocks), batch):
        these = slice(first, first + batch)
        within = np.arange(words * WORD) < parts[these, None]
        found[these] = sets_of(within if task is None else task.existing_parts(blocks[these]), words)
    return found
