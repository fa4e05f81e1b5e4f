"""What the kernel calls of a step add, once it is checked that they may run (P2, P3 of `tasp_lab.schedule.proof`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tasp_lab.arrays import IntArray
from tasp_lab.errors import ScheduleError
from tasp_lab.schedule.calls import Calls, Effects
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
    codes = [np.zeros(0, dtype=np.int64)]
    for each in calls:
        if schedule.task is None:
            raise ScheduleError(f"rank {each.rank[0]} computes, but there is no task to compute")
        _check_operands(schedule, copies, each)
        effects = schedule.task.effects(each)
        _check_parts(schedule, each, effects)
        codes.append((each.rank[effects.call] * blocks + effects.block << shift) + effects.part)
    code = np.sort(np.concatenate(codes))
    rank, block = np.divmod(code >> shift, max(blocks, 1))
    part = code & (1 << shift) - 1
    again = np.flatnonzero(code[1:] == code[:-1])
    if len(again):
        at = again[0]
        raise ScheduleError(f"rank {rank[at]} computes {part_name(schedule, block[at], part[at])} twice in this step")
    first = np.flatnonzero(np.diff(code >> _WORD_BITS, prepend=-1))
    bits = np.bitwise_or.reduceat(bit_of(part), first) if len(first) else bit_of(part)
    return AddedParts(rank[first], block[first], part[first] >> _WORD_BITS, bits)


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
