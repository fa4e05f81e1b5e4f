"""The proof of a schedule: a replay of which parts of which blocks each rank has. Any broken rule raises an error.

Before the replay a schedule with a task is compared with it: kinds have the joins and fields that its kernels yield
(`tasp_lab.schedule.calls.check_blocks`), what ranks have at the start is no more than the task gives them, and what it
asks for is promised (`tasp_lab.schedule.calls.Contract`). Without a task, start and end are the specification; of a
collective they are checked by `tasp_lab.schedules.collectives.conditions`.

At every step, as `tasp_lab.schedule.schedule` describes it:

- P1: ranks, lanes and blocks are in range; no rank sends to itself; a source has a part of what it sends.
- P2: all operands of a call are complete at its rank when the step begins.
- P3: calls yield the parts that the task defines, which refuses calls that it does not require; these parts exist.
- P4: no part comes or is computed where it is already, or twice in a step; no rank gives a block twice in a step.
- P5: nothing comes to a copy in a buffer that is there since an earlier step.
- P6: no call adds to a resident copy that is sent or read at the same step.
- P7: no buffer with an incomplete copy is overwritten; at the end no incomplete copy is left anywhere, nor one that was
  to stay where it came, but is neither promised nor in `kept`.
- P8: at the end every promised copy is complete.

Theorem. In every execution that waits as the docstring of `tasp_lab.schedule.schedule` demands, a promised copy is the
join of all existing parts of its block, each once and each computed from complete operands.

Proof. By induction over steps the value of a copy is the join of the parts in its set. At the start that is what is
given. What is sent or read at a step came at earlier steps, which is waited for, and is not changed meanwhile: a buffer
is overwritten only b steps after its step (P5), and what calls add to residents at this step is elsewhere (P6). So
transfers carry the join of their set, and calls compute their parts from complete operands (P2, P3). What meets at a
copy are disjoint sets (P4), and joins are associative and commutative, so the order in which they come is of no
interest. A complete copy therefore has each part once, and promised copies are complete (P8). []
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray, distinct, first_true, whole_numbers
from tasp_lab.core.errors import ScheduleError, TooManyBlocksError
from tasp_lab.schedule.calls import TILES_AT_ONCE, Calls, Effects
from tasp_lab.schedule.copies import WORD, Copies, WordArray, bit_of, first_parts
from tasp_lab.schedule.model import ScheduleModel, Step

# What the kernel calls of a step add (P2 and P3).

_WORD_BITS = WORD.bit_length() - 1


class AddedParts(NamedTuple):
    """Parts that calls add: `bits` of word `word` of a block at a rank; no word of a copy comes twice."""

    rank: IntArray
    block: IntArray
    word: IntArray
    bits: WordArray


def added_parts(schedule: ScheduleModel, copies: Copies, calls: tuple[Calls, ...]) -> AddedParts:
    """The parts that calls add to copies, by rank and block.

    Raises `ScheduleError` for calls without a task or that the task does not require, for operands that are not
    complete, and for parts that are out of range or that several calls yield.
    """
    blocks, shift = len(schedule.blocks), max(int(schedule.blocks.parts.max(initial=1)).bit_length(), _WORD_BITS)
    codes, words = [np.zeros(0, dtype=np.int64)], _Words()
    for group in calls:
        if schedule.task is None:
            raise ScheduleError(f"rank {group.rank[0]} computes, but there is no task to compute")
        _check_operands(schedule, copies, group)
        for _, batch in group.batches():
            columns = zip(Effects._fields, schedule.task.effects(batch), strict=True)
            effects = Effects(*(whole_numbers(f"{name} of what calls yield", values) for name, values in columns))
            _check_parts(schedule, batch, effects)
            # One number per part: rank, block and part side by side, so that sorting finds what comes twice.
            codes.append((batch.rank[effects.call] * blocks + effects.block << shift) + effects.part)
            if sum(map(len, codes)) > TILES_AT_ONCE:
                words.add(np.concatenate(codes))
                codes = codes[:1]
    words.add(np.concatenate(codes))
    word, bits, twice = words.joined()
    if twice is not None:
        at, of = divmod(twice >> shift, max(blocks, 1))
        name = part_name(schedule, of, twice & (1 << shift) - 1)
        raise ScheduleError(f"rank {at} computes {name} twice in this step")
    copy, place = np.divmod(word, 1 << shift - _WORD_BITS)
    rank, block = np.divmod(copy, max(blocks, 1))
    return AddedParts(rank, block, place, bits)


class _Words:
    """Sets of numbers, kept as 64-bit words: a batch takes a bit for each number rather than an integer."""

    def __init__(self) -> None:
        self._words: list[tuple[IntArray, WordArray]] = []

    def add(self, numbers: IntArray) -> None:
        """Add a batch of numbers, 0 or more; of one that comes several times, one word for each time."""
        numbers = np.sort(numbers)
        again = np.flatnonzero(numbers[1:] == numbers[:-1]) + 1
        if len(again):
            self._words.append((numbers[again] >> _WORD_BITS, bit_of(numbers[again])))
        word = numbers >> _WORD_BITS
        first = np.flatnonzero(np.diff(word, prepend=-1))
        bits = np.bitwise_or.reduceat(bit_of(numbers), first) if len(first) else bit_of(numbers)
        self._words.append((word[first], bits))

    def joined(self) -> tuple[IntArray, WordArray, int | None]:
        """The words of all batches, ascending, their bits, and the first number that came twice; None: none did."""
        word, bits = (np.concatenate(column) for column in zip(*self._words, strict=True))
        if len(self._words) == 1:
            return word, bits, None
        order = np.argsort(word, kind="stable")
        word, bits = word[order], bits[order]
        first = np.flatnonzero(np.diff(word, prepend=-1))
        if len(first) == len(word):
            return word, bits, None
        joined = np.bitwise_or.reduceat(bits, first)
        count = np.unpackbits(bits.view(np.uint8)).reshape(-1, WORD).sum(axis=1)
        differs = np.add.reduceat(count, first) != np.unpackbits(joined.view(np.uint8)).reshape(-1, WORD).sum(axis=1)
        twice = None
        if (at := first_true(differs)) is not None:
            seen, again = 0, 0
            for word_bits in bits[word == word[first[at]]].tolist():
                again |= seen & word_bits
                seen |= word_bits
            twice = int(word[first[at]]) * WORD + (again & -again).bit_length() - 1
        return word[first], joined, twice


def part_name(schedule: ScheduleModel, block: int | np.int64, part: int | np.int64) -> str:
    """A part of a block in messages; of data, the block."""
    name = schedule.blocks.name(int(block))
    return f"part {part} of {name}" if schedule.blocks.kind_of(int(block)).join else name


def _check_operands(schedule: ScheduleModel, copies: Copies, calls: Calls) -> None:
    """Check that operands are blocks that are complete at the rank of their call."""
    n, blocks = schedule.world_size, len(schedule.blocks)
    unknown = (calls.rank < 0) | (calls.rank >= n)
    if unknown.any():
        raise ScheduleError(f"rank {calls.rank[unknown.argmax()]} computes, there are {n} ranks")
    for operand in calls.operands:
        rank, block = calls.rank[operand.owner], operand.block
        if (at := first_true((block < 0) | (block >= blocks))) is not None:
            raise ScheduleError(f"rank {rank[at]} computes with block {block[at]}, there are {blocks} blocks")
        if (at := first_true(~copies.complete(rank, block))) is not None:
            lacking = "which it does not hold"
            if schedule.blocks.kind_of(int(block[at])).join:
                lacking = f"of which it lacks part {copies.parts(int(rank[at]), int(block[at]))[1][0]}"
            raise ScheduleError(
                f"rank {rank[at]} computes with {schedule.blocks.name(int(block[at]))}, {lacking} when the step begins"
            )


def _check_parts(schedule: ScheduleModel, calls: Calls, effects: Effects) -> None:
    """Check that a task yields parts of blocks that there are."""
    unknown = (effects.block < 0) | (effects.block >= len(schedule.blocks)) | (effects.part < 0)
    unknown[~unknown] = effects.part[~unknown] >= schedule.blocks.parts[effects.block[~unknown]]
    if (at := first_true(unknown)) is not None:
        raise ScheduleError(
            f"rank {calls.rank[effects.call[at]]} computes part {effects.part[at]} of block {effects.block[at]}, "
            "which does not exist"
        )


_COPIES_AT_ONCE = 2**16
"""Copies that are looked at together in the end: a rank may have as few as ten."""

_OLDER = "still has a copy of an earlier step in a buffer"

MAX_HOLDINGS = 2**30
"""Maximum ranks x blocks of a replay: a byte per pair for data, four for sums, and one more for kernel calls."""


def prove(schedule: ScheduleModel) -> int:
    """The number of transfers of a valid schedule. Raises `ScheduleError` for the first rule that it breaks."""
    try:
        replay = _Replay(schedule)
    except ScheduleError as error:
        raise ScheduleError(f"schedule {schedule.name!r}: {error}") from None
    transfers = 0
    for index, step in enumerate(schedule.steps):
        try:
            replay.step(index, step)
        except ScheduleError as error:
            raise ScheduleError(f"step {index}: {error}") from None
        transfers += len(step)
    replay.finish()
    return transfers


def check_holdings(world_size: int, blocks: int) -> None:
    """Raise `TooManyBlocksError` for more pairs of a rank and a block than a replay takes."""
    if world_size * blocks > MAX_HOLDINGS:
        raise TooManyBlocksError(
            f"{world_size} ranks and {blocks} blocks are too many to replay, expected at most {MAX_HOLDINGS} pairs of "
            "them"
        )


def no_copies(world_size: int, blocks: int) -> BoolArray:
    """Bool array (world_size, blocks), all False: a table of copies to fill in.

    Builders make their tables with it, so that a world too large to prove is refused before it takes memory.
    Raises `TooManyBlocksError`.
    """
    check_holdings(world_size, blocks)
    return np.zeros((world_size, blocks), dtype=np.bool_)


class _Replay:
    """The copies of all ranks, step by step. Methods raise `ScheduleError` without the number of the step."""

    def __init__(self, schedule: ScheduleModel) -> None:
        self._schedule, self._count = schedule, len(schedule.blocks)
        check_holdings(schedule.world_size, self._count)
        _check_initial_part(schedule)
        self._copies = Copies(schedule)
        self._is_sum = schedule.blocks.are_sums
        buffers = distinct(schedule.blocks.buffers).tolist()
        self._in_buffers: dict[int, deque[tuple[IntArray, IntArray]]] = {count: deque() for count in buffers if count}
        self._used = np.zeros(0, dtype=bool)

    def step(self, index: int, step: Step) -> None:
        self._empty_buffers(index)
        self._check_range(step)
        contents = self._copies.take(step.source, step.block)
        self._check_sources(step, contents)
        added = added_parts(self._schedule, self._copies, step.calls)
        self._check_not_in_use(step, added)
        self._give(step)
        self._add(index, added)
        self._arrive(index, step, contents)
        self._fill_buffers(np.concatenate([step.destination, added.rank]), np.concatenate([step.block, added.block]))

    def _name(self, block: int | np.int64) -> str:
        return self._schedule.blocks.name(int(block))

    def _refuse(self, step: Step, wrong: BoolArray, reason: Callable[[int], str]) -> None:
        """Raise for the first transfer that is wrong; `reason` takes its number."""
        if (at := first_true(wrong)) is not None:
            raise ScheduleError(
                f"rank {step.source[at]} sends {self._name(step.block[at])} to rank {step.destination[at]} "
                f"on lane {step.lane[at]}: {reason(at)}"
            )

    def _empty_buffers(self, index: int) -> None:
        for buffers, queue in self._in_buffers.items():
            if len(queue) < buffers:
                continue
            rank, block = queue.popleft()
            still = self._copies.born_at(rank, block, index - buffers)
            rank, block = rank[still], block[still]
            incomplete = ~self._copies.complete(rank, block)
            if (at := first_true(incomplete)) is not None:
                raise ScheduleError(
                    f"rank {rank[at]} overwrites the buffer of {self._name(block[at])}, an incomplete sum, "
                    f"and loses part {self._copies.parts(int(rank[at]), int(block[at]))[0][0]}"
                )
            self._copies.drop(rank, block)

    def _fill_buffers(self, rank: IntArray, block: IntArray) -> None:
        if self._in_buffers:
            moving = self._are_in_buffers(np.ones(len(block), dtype=bool), rank, block)
            rank, block = rank[moving], block[moving]
        for buffers, queue in self._in_buffers.items():
            these = self._schedule.blocks.buffers[block] == buffers
            queue.append((rank[these], block[these]))

    def _check_range(self, step: Step) -> None:
        n, lanes = self._schedule.world_size, self._schedule.lanes
        for values, limit in ((step.source, n), (step.destination, n), (step.lane, lanes), (step.block, self._count)):
            if len(values) and (values.min() < 0 or values.max() >= limit):
                at = int(((values < 0) | (values >= limit)).argmax())
                raise ScheduleError(
                    f"rank {step.source[at]} sends block {step.block[at]} to rank {step.destination[at]} "
                    f"on lane {step.lane[at]}: there are {n} ranks, {lanes} lanes and {self._count} blocks"
                )
        self._refuse(step, step.source == step.destination, lambda at: "a rank sends to itself")

    def _check_sources(self, step: Step, contents: list[WordArray]) -> None:
        verbs = "does not hold", "holds no part of"
        self._refuse(
            step,
            self._copies.are_empty(step.block, contents),
            lambda at: (
                f"rank {step.source[at]} {verbs[int(self._is_sum[step.block[at]])]} "
                f"{self._name(step.block[at])} when the step begins"
            ),
        )

    def _check_not_in_use(self, step: Step, added: AddedParts) -> None:
        """Check that calls add to no resident copy that is sent or read at this step (P6)."""
        if not len(added.block):
            return
        if not len(self._used):
            self._used = np.zeros(self._schedule.world_size * self._count, dtype=bool)
        sent = step.source * self._count + step.block
        operands = [(calls.rank[lists.owner], lists.block) for calls in step.calls for lists in calls.operands]
        used = np.concatenate([sent, *(rank * self._count + block for rank, block in operands)])
        self._used[used] = True
        wrong = self._used[added.rank * self._count + added.block]
        self._used[used] = False
        wrong[wrong] = self._schedule.is_resident(added.rank[wrong], added.block[wrong])
        if (at := first_true(wrong)) is not None:
            raise ScheduleError(
                f"rank {added.rank[at]} computes parts of {self._name(added.block[at])}, which stays there and is sent "
                "or read at the same step"
            )

    def _give(self, step: Step) -> None:
        """Remove what is given (P4: once)."""
        transfers = np.flatnonzero(step.gives)
        if not len(transfers):
            return
        copies = step.source[transfers] * self._count + step.block[transfers]
        order = np.argsort(copies, kind="stable")
        again = transfers[order[1:]][np.diff(copies[order]) == 0]
        if len(again):
            wrong = np.zeros(len(step), dtype=bool)
            wrong[again] = True
            self._refuse(step, wrong, lambda at: f"rank {step.source[at]} gives it twice in this step")
        self._copies.drop(step.source[transfers], step.block[transfers])

    def _are_in_buffers(self, chosen: BoolArray, rank: IntArray, block: IntArray) -> BoolArray:
        """Which of the chosen copies are in buffers."""
        buffered: BoolArray = chosen & (self._schedule.blocks.buffers[block] > 0)
        buffered[buffered] = ~self._schedule.is_resident(rank[buffered], block[buffered])
        return buffered

    def _add(self, index: int, added: AddedParts) -> None:
        """Add what calls compute (P3: it exists; P4, P5)."""
        came = self._copies.create(*added, index)
        older = self._are_in_buffers(came.older, added.rank, added.block)
        if (at := first_true(older | (came.unknown >= 0) | (came.there >= 0))) is not None:
            part, why = int(first_parts(added.bits[at, None, None])[0]) + added.word[at] * WORD, f"of which it {_OLDER}"
            if came.unknown[at] >= 0:
                part, why = came.unknown[at], "which does not exist"
            elif not older[at]:
                part, why = came.there[at], "which it already has"
            name = part_name(self._schedule, added.block[at], part)
            raise ScheduleError(f"rank {added.rank[at]} computes {name}, {why}")

    def _arrive(self, index: int, step: Step, contents: list[WordArray]) -> None:
        """Let transfers arrive (P4, P5)."""
        came = self._copies.join(step.destination, step.block, contents, index)
        older = self._are_in_buffers(came.older, step.destination, step.block)
        self._refuse(step, older, lambda at: f"rank {step.destination[at]} {_OLDER}")

        def already(at: int) -> str:
            block, rank = step.block[at], step.destination[at]
            if self._is_sum[block]:
                return f"rank {rank} already has part {came.there[at]} of it"
            return f"rank {rank} already holds {self._name(block)}"

        def twice(at: int) -> str:
            return (
                f"rank {step.destination[at]} receives {part_name(self._schedule, step.block[at], came.doubled[at])} "
                "twice in this step"
            )

        self._refuse(step, came.there >= 0, already)
        self._refuse(step, came.doubled >= 0, twice)

    def finish(self) -> None:
        """Check what each rank has after the last step (P7, P8)."""
        schedule = self._schedule
        pooled = schedule.blocks.buffers > 0
        at_once = 1 + _COPIES_AT_ONCE // max(self._count, 1)
        for first in range(0, schedule.world_size, at_once):
            ranks = slice(first, first + at_once)
            final = schedule.final[ranks]
            rank, block = (each.ravel() for each in np.indices(final.shape))
            held = self._copies.holds(first + rank, block).reshape(final.shape)
            stays = pooled | final | schedule.initial[ranks]
            if schedule.kept is not None:
                stays |= schedule.kept[ranks]
            wrong = held & ~stays
            rank, block = np.nonzero(held | final)  # most ranks have few of the blocks
            wrong[rank, block] |= ~self._copies.complete(first + rank, block)
            if (at := first_true(wrong.ravel())) is not None:
                rank_at, block_at = divmod(at, self._count)
                self._refuse_end(first + rank_at, block_at, bool(final[rank_at, block_at]))

    def _refuse_end(self, rank: int, block: int, promised: bool) -> None:
        if not self._is_sum[block]:
            verb = "never received" if promised else "should not have received"
            steps = len(self._schedule.steps)
            when = f"after step {steps - 1}" if steps else "without any step"
            raise ScheduleError(f"{when}: rank {rank} {verb} {self._name(block)}")
        present, missing = self._copies.parts(rank, block)
        expected = f"all of them, part {missing[0]} is missing" if promised else f"none, part {present[0]} is left"
        raise ScheduleError(
            f"after the last step: rank {rank} has {len(present)} of the {len(present) + len(missing)} parts of "
            f"{self._name(block)}, expected {expected}"
        )


def _check_initial_part(schedule: ScheduleModel) -> None:
    """Check that `initial_part` fits the blocks; whether the parts exist is checked with the copies."""
    if schedule.initial_part is None:
        return
    shape = schedule.initial.shape
    try:
        part = np.broadcast_to(schedule.initial_part, shape)
    except ValueError:
        raise ScheduleError(
            f"initial_part has the shape {schedule.initial_part.shape}, expected one that broadcasts to {shape}"
        ) from None
    for rank in range(schedule.world_size):
        wrong = schedule.initial[rank] & ((part[rank] < -1) | (part[rank] >= schedule.blocks.parts))
        if (block := first_true(wrong)) is not None:
            raise ScheduleError(
                f"rank {rank} starts with part {part[rank, block]} of {schedule.blocks.name(block)}, "
                f"which has {schedule.blocks.parts[block]}"
            )
