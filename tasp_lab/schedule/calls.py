"""Kernel calls of a step as arrays, and the task that defines what calls compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray, first_true, freeze, whole, whole_numbers
from tasp_lab.core.errors import ScheduleError, of_type
from tasp_lab.core.tables import brief
from tasp_lab.schedule.blocks import Blocks, Field
from tasp_lab.workload.kernel_shapes import ShapeRows

Passing = Literal["forward", "backward"]
"""A pass of a layer."""

TILES_AT_ONCE = 2**19
"""Pairs of operands whose effects are derived at once: their arrays take about 100 MB."""


@dataclass(frozen=True, eq=False, slots=True)
class BlockLists:
    """Lists of blocks: list i is ``block[offset[i] : offset[i + 1]]``.

    >>> lists = BlockLists.of([[4, 5], [], [6]])
    >>> lists.sizes, lists.owner
    (array([2, 0, 1]), array([0, 0, 2]))
    """

    offset: IntArray
    block: IntArray

    def __post_init__(self) -> None:
        freeze(self, ("offset", "block"), "lists of blocks: ", np.int64, 1, "an int array of one dimension")

    @classmethod
    def of(cls, lists: Iterable[Sequence[int] | IntArray]) -> BlockLists:
        columns = [_listed(each) for each in lists]
        sizes = np.array([len(each) for each in columns], dtype=np.int64)
        return cls.of_sizes(sizes, np.concatenate([np.zeros(0, dtype=np.int64), *columns]))

    @classmethod
    def of_sizes(cls, sizes: IntArray, block: IntArray) -> BlockLists:
        """Lists of these sizes, one after another."""
        sizes = whole_numbers("sizes of lists", sizes)
        offset = np.zeros(len(sizes) + 1, dtype=np.int64)
        sizes.cumsum(out=offset[1:])
        return cls(offset, block)

    @classmethod
    def joined(cls, parts: Sequence[BlockLists]) -> BlockLists:
        """The lists of all parts, in this order."""
        return cls.of_sizes(*(np.concatenate([getattr(each, name) for each in parts]) for name in ("sizes", "block")))

    def __len__(self) -> int:
        return len(self.offset) - 1

    def __getitem__(self, index: int) -> IntArray:
        return self.block[self.offset[index] : self.offset[index + 1]]

    @property
    def sizes(self) -> IntArray:
        return self.offset[1:] - self.offset[:-1]  # np.diff takes five times as long on lists of a few calls

    @property
    def owner(self) -> IntArray:
        """The list of each entry of `block`."""
        return np.repeat(np.arange(len(self)), self.sizes)

    @property
    def first(self) -> IntArray:
        """The first block of each list, -1 of empty ones."""
        if not len(self.block):
            return np.full(len(self), -1)
        return np.where(self.sizes > 0, self.block[np.minimum(self.offset[:-1], len(self.block) - 1)], -1)

    def lists(self) -> Iterator[list[int]]:
        """The lists, one after another."""
        blocks, ends = self.block.tolist(), self.offset.tolist()
        return (blocks[first:end] for first, end in pairwise(ends))

    def select(self, chosen: IntArray) -> BlockLists:
        """The lists with these numbers, in this order."""
        first, end = self.offset[chosen], self.offset[chosen + 1]
        return BlockLists.of_sizes(end - first, self.block[ranges(first, end)[1]])


def _listed(numbers: Sequence[int] | IntArray) -> IntArray:
    """Whole numbers as an array; without any, NumPy would make one of floats."""
    return whole_numbers("lists of blocks", np.array(numbers) if len(numbers) else np.zeros(0, dtype=np.int64))


def ranges(first: IntArray, end: IntArray) -> tuple[IntArray, IntArray]:
    """The concatenated ranges from each `first` to its `end`: for each position its range, and the position.

    >>> ranges(np.array([3, 7]), np.array([5, 8]))
    (array([0, 0, 1]), array([3, 4, 7]))
    """
    sizes = end - first
    which = np.arange(len(first)).repeat(sizes)
    return which, np.arange(len(which)) + (end - sizes.cumsum())[which]


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Calls:
    """Calls of one kernel at a step; those of a rank on one compute lane run one after another, in this order.

    Parameters
    ----------
    kernel : name of the kernel.
    rank : int array (calls,).
    operands : the blocks that each call reads, one list per operand; the blocks of a list form one tensor.
    params : int array (calls, parameters), whatever else the kernel takes.
    lane : compute lane.

    Raises `ScheduleError` if the columns have different lengths or are no whole numbers, for lists that do not follow
    each other, and for a negative lane.
    """

    kernel: str
    rank: IntArray
    operands: tuple[BlockLists, ...]
    params: IntArray
    lane: int = 0

    def __post_init__(self) -> None:
        operands = self.operands
        if not isinstance(operands, list | tuple) or not all(type(each) is BlockLists for each in operands):
            raise ScheduleError(of_type(f"calls of {self.kernel}: operands", operands, "a tuple of BlockLists"))
        object.__setattr__(self, "operands", tuple(operands))
        object.__setattr__(self, "lane", whole(f"calls of {self.kernel}: lane", self.lane))
        freeze(self, ("rank",), f"calls of {self.kernel}: ", np.int64, 1, "an int array of shape (calls,)")
        freeze(self, ("params",), f"calls of {self.kernel}: ", np.int64, 2, "an int array of shape (calls, parameters)")
        lengths = {len(self.rank), len(self.params), *(len(each) for each in self.operands)}
        if len(lengths) != 1:
            raise ScheduleError(
                f"calls of {self.kernel} have columns of lengths {sorted(lengths)}, expected one length"
            )
        for number, operand in enumerate(self.operands):
            offset, ends = operand.offset, (int(operand.offset[0]), int(operand.offset[-1]))
            if ends != (0, len(operand.block)) or (offset[1:] < offset[:-1]).any():
                raise ScheduleError(f"calls of {self.kernel}: lists of operand {number} from {ends[0]} to {ends[1]}, "
                                    f"expected lists one after another, from 0 to {len(operand.block)}")  # fmt: skip
        if self.lane < 0:
            raise ScheduleError(f"calls of {self.kernel} on compute lane {self.lane}, expected 0 or more")

    @classmethod
    def of(
        cls, kernel: str, rows: Sequence[tuple[int, Sequence[Sequence[int]], Sequence[int]]], lane: int = 0
    ) -> Calls:
        """Calls from (rank, operands, parameters) rows, one or more.

        >>> Calls.of("attend", [(0, [[0], [4, 5]], [-3, 3])]).operands[1].block
        array([4, 5])
        """
        operands = tuple(BlockLists.of(each) for each in zip(*(row[1] for row in rows), strict=True))
        params = _listed([value for row in rows for value in row[2]]).reshape(len(rows), -1)
        return cls(kernel, _listed([row[0] for row in rows]), operands, params, lane)

    @classmethod
    def joined(cls, parts: Sequence[Calls]) -> Calls:
        """The calls of one or more parts, all of one kernel and lane, in this order."""
        first, *others = parts
        if not others:
            return first
        operands = tuple(map(BlockLists.joined, zip(*(each.operands for each in parts), strict=True)))
        columns = ([each.rank for each in parts], [each.params for each in parts])
        rank, params = map(np.concatenate, columns)
        return cls(first.kernel, rank, operands, params, first.lane)

    def __repr__(self) -> str:
        return brief(self, f"{len(self)} of {self.kernel}")

    def __len__(self) -> int:
        return len(self.rank)

    def rows(self) -> list[tuple[int, list[list[int]], list[int]]]:
        """The calls as (rank, operands, parameters) rows."""
        return [
            (int(self.rank[index]), [each[index].tolist() for each in self.operands], self.params[index].tolist())
            for index in range(len(self))
        ]

    def select(self, chosen: IntArray) -> Calls:
        """The calls with these numbers, in this order."""
        operands = tuple(each.select(chosen) for each in self.operands)
        return Calls(self.kernel, self.rank[chosen], operands, self.params[chosen], self.lane)

    def batches(self) -> Iterator[tuple[int, Calls]]:
        """The calls in order, `TILES_AT_ONCE` tiles and at most one call more at once, and the number of the first.

        A call over q blocks of queries and k blocks of keys has q k tiles, each of which adds a part: the calls of
        Ulysses on 512 ranks have 134 million, which would take 20 GB at once.
        """
        most = sorted(len(each.block) for each in self.operands)[-2:]
        if prod(most) < TILES_AT_ONCE:  # as of most calls
            yield 0, self
            return
        sizes = np.sort([each.sizes for each in self.operands], axis=0)[-2:]
        number = np.cumsum(np.prod(sizes, axis=0)) // TILES_AT_ONCE if len(sizes) else np.zeros(len(self))
        starts = np.flatnonzero(np.diff(number, prepend=-1)).tolist()
        if len(starts) < 2:
            yield 0, self
            return
        for first, end in zip(starts, [*starts[1:], len(self)], strict=True):
            yield first, self.select(np.arange(first, end))


class Effects(NamedTuple):
    """What calls yield: call `call` adds part `part` to block `block`. Int arrays of equal length."""

    call: IntArray
    block: IntArray
    part: IntArray


class Contract(NamedTuple):
    """What a task fixes before there is a schedule: where each block is at the start, and where it must be in the end.

    Everything else starts empty, whatever a schedule lists among its initial copies.

    Parameters
    ----------
    owner : int array (blocks,), the rank whose shard a block is of: there it is a tensor of the caller. -1 for none.
    starts_at : int array (blocks,), the rank that has a block at the start, complete; -1 for none.
    ends_at : int array (blocks,), the rank that must have a block in the end; -1 for none.
    saved : bool array (blocks,), data that an earlier pass may have left at further ranks.
    """

    owner: IntArray
    starts_at: IntArray
    ends_at: IntArray
    saved: BoolArray

    @classmethod
    def of(cls, owner: IntArray, inputs: BoolArray, outputs: BoolArray, saved: BoolArray | None = None) -> Contract:
        """Inputs start at their owners, outputs end there.

        >>> Contract.of(np.array([0, 0]), np.array([True, False]), np.array([False, True])).ends_at
        array([-1,  0])
        """
        nowhere = np.full_like(owner, -1)
        return cls(
            owner,
            np.where(inputs, owner, nowhere),
            np.where(outputs, owner, nowhere),
            np.zeros_like(inputs) if saved is None else saved,
        )

    def inputs(self, world_size: int) -> BoolArray:
        """What each rank has to be given for this pass alone: bool array (world_size, blocks)."""
        inputs: BoolArray = (self.starts_at == np.arange(world_size)[:, None]) & ~self.saved
        return inputs

    def check(self, blocks: Blocks, initial: BoolArray, final: BoolArray) -> None:
        """Raise `ScheduleError` for a copy at the start, or a missing promise, that the task does not allow.

        `initial` and `final` are bool arrays (world_size, blocks).
        """
        for name in ("owner", "starts_at", "ends_at"):
            ranks = whole_numbers(f"{name} of a task", getattr(self, name))
            if len(ranks) != len(blocks) or ranks.min(initial=-1) < -1 or ranks.max(initial=-1) >= len(initial):
                raise ScheduleError(
                    f"{name} of a task is from {ranks.min(initial=-1)} to {ranks.max(initial=-1)} for {len(ranks)} "
                    f"blocks, expected ranks below {len(initial)}, or -1, for {len(blocks)}"
                )
        rank, block = np.nonzero(initial)
        if (at := first_true((self.starts_at[block] != rank) & ~self.saved[block])) is not None:
            owner = int(self.starts_at[block[at]])
            why = "which is empty until it is computed" if owner < 0 else f"which only rank {owner} has then"
            raise ScheduleError(f"rank {rank[at]} starts with {blocks.name(block[at])}, {why}")
        block = np.flatnonzero(self.ends_at >= 0)
        missing = ~final[self.ends_at[block], block]
        if missing.any():
            at = int(block[missing.argmax()])
            raise ScheduleError(f"rank {self.ends_at[at]} does not promise {blocks.name(at)}, which the task asks for")


class Task(Protocol):
    """What the calls of a schedule are to compute.

    `content` is all that distinguishes tasks.
    """

    @property
    def dtype(self) -> str: ...
    @property
    def passing(self) -> Passing: ...
    @property
    def kernels(self) -> Mapping[str, Passing]:
        """The pass of each kernel, by its name."""

    @property
    def content(self) -> tuple[object, ...]: ...

    @property
    def contract(self) -> Contract:
        """Where blocks are at the start, and where they must be in the end."""

    def check(self, blocks: Blocks) -> None:
        """Raise `ScheduleError` unless blocks have the sizes, parts, joins and fields that the kernels yield."""

    def effects(self, calls: Calls) -> Effects:
        """The parts that calls yield. Raises `ScheduleError` for a call that the layer does not require."""

    def existing_parts(self, blocks: IntArray) -> BoolArray:
        """Which parts of these blocks exist: bool array (blocks, the largest number of parts of any of them)."""

    def flops(self, calls: Calls) -> IntArray:
        """The FLOPs of each call, int array (calls,)."""

    def shapes(self, calls: Calls) -> ShapeRows:
        """The shape of each call, by which its time is known."""


class NoCalls:
    """What tasks have in common whose blocks are only moved, gathered or added up."""

    @property
    def kernels(self) -> Mapping[str, Passing]:
        return {}

    def effects(self, calls: Calls) -> Effects:
        """Raises `ScheduleError`: there are no calls."""
        raise ScheduleError(f"{calls.kernel} of a {type(self).__name__}, which computes nothing")

    def flops(self, calls: Calls) -> IntArray:
        return np.zeros(len(calls), dtype=np.int64)

    def shapes(self, calls: Calls) -> ShapeRows:
        return ShapeRows.of("dense", self.flops(calls))


def check_blocks(blocks: Blocks, expected: Blocks, bound: bool = False) -> None:
    """Raise `ScheduleError` for the first block that differs from what a task expects.

    Sizes, numbers of parts, and of the kind its name, how parts are joined, and the fields: these follow from what the
    kernels yield. Pools are the choice of the schedule, and so is what is bound, unless `bound` is checked too.
    """
    if len(blocks) != len(expected):
        raise ScheduleError(f"{len(blocks)} blocks, expected {len(expected)} for the task")
    for what in ("bytes", "parts"):
        has, wanted = getattr(blocks, what), getattr(expected, what)
        if len(at := np.flatnonzero(has != wanted)):
            raise ScheduleError(f"block {at[0]} has {has[at[0]]} {what}, expected {wanted[at[0]]} for the task")
    pairs, first = np.unique(blocks.kind * len(expected.kinds) + expected.kind, return_index=True)
    for pair, block in zip(pairs.tolist(), first.tolist(), strict=True):
        kinds = blocks.kinds[pair // len(expected.kinds)], expected.kinds[pair % len(expected.kinds)]
        for what, describe in _DESCRIBE_KIND.items():
            has, wanted = (getattr(kind, what) for kind in kinds)
            if has != wanted and (bound or what != "bound"):
                raise ScheduleError(f"block {block} {describe(has)}, expected that it {describe(wanted)}")


_DESCRIBE_KIND: Mapping[str, Callable[[Any], str]] = {
    "name": lambda name: f"is of the kind {name!r}",
    "join": lambda join: f"is a sum joined by {join!r}" if join else "is data",
    "bound": lambda bound: f"is {'' if bound else 'not '}bound to the caller's tensors",
    "fields": lambda fields: f"has the fields {', '.join(map(_describe_field, fields)) or 'of plain bytes'}",
}


def _describe_field(field: Field) -> str:
    at_home = "" if field.home_dtype is None else f", {field.home_dtype} at home"
    return f"{field.name} ({field.dtype}{at_home}, {'x'.join(map(str, field.shape))})"
