"""Kernel calls of a step as arrays, and the task that defines what calls compute."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np

from tasp_lab.arrays import BoolArray, IntArray
from tasp_lab.errors import ScheduleError
from tasp_lab.tables import brief
from tasp_lab.workload.kernel_shapes import ShapeRows

Passing = Literal["forward", "backward"]
"""A pass of a layer."""


@dataclass(frozen=True, eq=False, slots=True)
class BlockLists:
    """Lists of blocks: list i is ``block[offset[i] : offset[i + 1]]``.

    >>> lists = BlockLists.of([[4, 5], [], [6]])
    >>> lists.sizes, lists.owner
    (array([2, 0, 1]), array([0, 0, 2]))
    """

    offset: IntArray
    block: IntArray

    @classmethod
    def of(cls, lists: Iterable[Sequence[int] | IntArray]) -> BlockLists:
        columns = [np.asarray(each, dtype=np.int64) for each in lists]
        sizes = np.array([len(each) for each in columns], dtype=np.int64)
        return cls.of_sizes(sizes, np.concatenate([np.zeros(0, dtype=np.int64), *columns]))

    @classmethod
    def of_sizes(cls, sizes: IntArray, block: IntArray) -> BlockLists:
        """Lists of these sizes, one after another."""
        return cls(np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)]), block)

    def __len__(self) -> int:
        return len(self.offset) - 1

    def __getitem__(self, index: int) -> IntArray:
        return self.block[self.offset[index] : self.offset[index + 1]]

    @property
    def sizes(self) -> IntArray:
        return np.diff(self.offset)

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

    def select(self, chosen: IntArray) -> BlockLists:
        """The lists with these numbers, in this order."""
        _, position = ranges(self.offset[chosen], self.offset[chosen + 1])
        return BlockLists.of_sizes(self.sizes[chosen], self.block[position])


def ranges(first: IntArray, end: IntArray) -> tuple[IntArray, IntArray]:
    """The concatenated ranges from each `first` to its `end`: for each position its range, and the position.

    >>> ranges(np.array([3, 7]), np.array([5, 8]))
    (array([0, 0, 1]), array([3, 4, 7]))
    """
    sizes = end - first
    which = np.repeat(np.arange(len(first)), sizes)
    return which, np.arange(len(which)) - np.repeat(np.cumsum(sizes) - sizes - first, sizes)


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
        lengths = {len(self.rank), len(self.params), *(len(each) for each in self.operands)}
        if len(lengths) != 1 or self.params.ndim != 2:
            raise ScheduleError(
                f"calls of {self.kernel} have columns of lengths {sorted(lengths)}, expected one length"
            )
        for values in (self.rank, self.params, *(each.block for each in self.operands)):
            if not np.issubdtype(values.dtype, np.integer):
                raise ScheduleError(f"calls of {self.kernel} have columns of {values.dtype}, expected whole numbers")
            values.flags.writeable = False
        for number, each in enumerate(self.operands):
            ends = each.offset[[0, -1]].tolist()
            if ends != [0, len(each.block)] or (np.diff(each.offset) < 0).any():
                raise ScheduleError(f"calls of {self.kernel}: lists of operand {number} from {ends[0]} to {ends[1]}, "
                                    f"expected lists one after another, from 0 to {len(each.block)}")  # fmt: skip
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
        rank = np.array([row[0] for row in rows], dtype=np.int64)
        operands = tuple(BlockLists.of(each) for each in zip(*(row[1] for row in rows), strict=True))
        params = np.array([list(row[2]) for row in rows], dtype=np.int64).reshape(len(rows), -1)
        return cls(kernel, rank, operands, params, lane)

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


class Effects(NamedTuple):
    """What calls yield: call `call` adds part `part` to block `block`. Int arrays of equal length."""

    call: IntArray
    block: IntArray
    part: IntArray


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

    def check(self, sizes_bytes: IntArray, parts: IntArray) -> None:
        """Raise `ScheduleError` unless the blocks of the task have these sizes and numbers of parts."""

    def effects(self, calls: Calls) -> Effects:
        """The parts that calls yield. Raises `ScheduleError` for a call that the layer does not require."""

    def existing_parts(self, blocks: IntArray) -> BoolArray:
        """Which parts of these blocks exist: bool array (blocks, the largest number of parts of any of them)."""

    def flops(self, calls: Calls) -> IntArray:
        """The FLOPs of each call, int array (calls,)."""

    def shapes(self, calls: Calls) -> ShapeRows:
        """The shape of each call, by which its time is known."""


def check_blocks(sizes_bytes: IntArray, parts: IntArray, expected_bytes: IntArray, expected_parts: IntArray) -> None:
    """Raise `ScheduleError` for the first block whose size or number of parts differs from what a task expects."""
    if len(sizes_bytes) != len(expected_bytes):
        raise ScheduleError(f"{len(sizes_bytes)} blocks, expected {len(expected_bytes)} for the task")
    for what, found, expected in (("bytes", sizes_bytes, expected_bytes), ("parts", parts, expected_parts)):
        wrong = found != expected
        if wrong.any():
            at = int(wrong.argmax())
            raise ScheduleError(f"block {at} has {found[at]} {what}, expected {expected[at]} for the task")
