"""What the kernel calls of a step add, once it is checked that they may run (P2, P3 of `tasp_lab.schedule.proof`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tasp_lab.core.arrays import IntArray
from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedule.calls import TILES_AT_ONCE, Calls, Effects
from tasp_lab.schedule.copies import Copies
from tasp_lab.schedule.copy_stores import WORD, WordArray, bit_of

if TYPE_CHECKING:
    from tasp_lab.schedule.schedule import Schedule

_WORD_BITS = WORD.bit_length() - 1


class AddedParts(NamedTuple):
    """Parts that calls add: `bits` of word `word` of a block at a rank; no word of a copy comes twice."""

    rank: IntArray
    block: IntArray
    word: IntArray
    bits: WordArray


def added_parts(schedule: Schedule, copies: Copies, calls: tuple[Calls, ...]) -> AddedParts:
    """The parts that calls add to copies, by rank and block.

    Raises `ScheduleError` for calls without a task or that the task does not require, for operands that are not
    complete, and for parts that are out of range or that several calls yield.
    """
    blocks, shift = len(schedule.blocks), max(int(schedule.blocks.parts.max(initial=1)).bit_length(), _WORD_BITS)
    codes, words = [np.zeros(0, dtype=np.int64)], _Words()
    for each in calls:
        if schedule.task is None:
            raise ScheduleError(f"rank {each.rank[0]} computes, but there is no task to compute")
        _check_operands(schedule, copies, each)
        for _, batch in each.batches():
            effects = schedule.task.effects(batch)
            _check_parts(schedule, batch, effects)
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
        if differs.any():
            at = int(differs.argmax())
            seen, again = 0, 0
            for each in bits[word == word[first[at]]].tolist():
                again |= seen & each
                seen |= each
            twice = int(word[first[at]]) * WORD + (again & -again).bit_length() - 1
        return word[first], joined, twice


def part_name(schedule: Schedule, block: int | np.int64, part: int | np.int64) -> str:
    """A part of a block in messages; of data, the block."""
    name = schedule.blocks.name(int(block))
    return f"part {part} of {name}" if schedule.blocks.kind_of(int(block)).join else name


def _check_operands(schedule: Schedule, copies: Copies, calls: Calls) -> None:
    """Check that operands are blocks that are complete at the rank of their call."""
    n, blocks = schedule.world_size, len(schedule.blocks)
    unknown = (calls.rank < 0) | (calls.rank >= n)
    if unknown.any():
        raise ScheduleError(f"rank {calls.rank[unknown.argmax()]} computes, there are {n} ranks")
    for operand in calls.operands:
        rank, block = calls.rank[operand.owner], operand.block
        unknown = (block < 0) | (block >= blocks)
        if unknown.any():
            at = int(unknown.argmax())
            raise ScheduleError(f"rank {rank[at]} computes with block {block[at]}, there are {blocks} blocks")
        incomplete = ~copies.complete(rank, block)
        if incomplete.any():
            at = int(incomplete.argmax())
            lacking = "which it does not hold"
            if schedule.blocks.kind_of(int(block[at])).join:
                lacking = f"of which it lacks part {copies.parts(int(rank[at]), int(block[at]))[1][0]}"
            raise ScheduleError(
                f"rank {rank[at]} computes with {schedule.blocks.name(int(block[at]))}, {lacking} when the step begins"
            )


def _check_parts(schedule: Schedule, calls: Calls, effects: Effects) -> None:
    """Check that a task yields parts of blocks that there are."""
    unknown = (effects.block < 0) | (effects.block >= len(schedule.blocks)) | (effects.part < 0)
    unknown[~unknown] = effects.part[~unknown] >= schedule.blocks.parts[effects.block[~unknown]]
    if unknown.any():
        at = int(unknown.argmax())
        raise ScheduleError(
            f"rank {calls.rank[effects.call[at]]} computes part {effects.part[at]} of block {effects.block[at]}, "
            "which does not exist"
        )
