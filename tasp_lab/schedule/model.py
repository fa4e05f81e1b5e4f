"""What a schedule consists of: steps, whose transfers and kernel calls are arrays, and the copies that ranks have.

>>> print(Step.of([(0, 1, 0, 5), (1, 0, 0, 6)]))
0->1 lane 0 block 5
1->0 lane 0 block 6

Nothing is proven here: `tasp_lab.schedule.schedule.Schedule` is a `ScheduleModel` that proves itself.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple, overload

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray, freeze, frozen, lock, stable_order
from tasp_lab.core.errors import ScheduleError, of_type
from tasp_lab.core.tables import brief
from tasp_lab.schedule.blocks import Blocks
from tasp_lab.schedule.calls import Calls, Task

_NO_CALLS: tuple[Calls, ...] = ()


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Step:
    """One step: its transfers as int arrays (transfers,), and its kernel calls.

    A transfer *gives* if its source keeps nothing of the block (`gives`, a bool array; by default none does). A rank's
    arrivals are placed into its buffers in the order of these arrays.

    >>> print(Step.of([(0, 1, 0, 5), (1, 0, 0, 6, True)]))
    0->1 lane 0 block 5
    1->0 lane 0 block 6 given
    """

    source: IntArray
    destination: IntArray
    lane: IntArray
    block: IntArray
    gives: BoolArray = field(default_factory=lambda: np.zeros(0, dtype=bool))
    calls: tuple[Calls, ...] = _NO_CALLS

    def __post_init__(self) -> None:
        expected = "an array of shape (transfers,); Step.of takes rows"
        freeze(self, ("source", "destination", "lane", "block"), "a step's ", np.int64, 1, expected)
        gives = frozen("a step's gives", self.gives, np.bool_, 1, expected)
        none = np.ndarray(len(self.source), np.bool_, bytes(len(self.source)))
        object.__setattr__(self, "gives", gives if len(gives) else none)
        if not isinstance(self.calls, tuple) or not all(type(each) is Calls for each in self.calls):
            raise ScheduleError(of_type("a step's calls", self.calls, "a tuple of Calls"))
        lengths = {len(column) for column in (self.source, self.destination, self.lane, self.block, self.gives)}
        if len(lengths) != 1:
            raise ScheduleError(f"a step's arrays have lengths {sorted(lengths)}, expected one length")

    @classmethod
    def of(cls, transfers: Iterable[Sequence[int]], calls: Iterable[Calls] = ()) -> Step:
        """A step from (source, destination, lane, block) rows; a fifth column is whether the source gives.

        Raises `ScheduleError` for the first row of another form.
        """
        if not isinstance(transfers, Iterable):
            raise ScheduleError(of_type("a step's transfers", transfers, "rows (source, destination, lane, block)"))
        rows = list(transfers)
        for number, row in enumerate(rows):
            if not isinstance(row, Sequence | np.ndarray) or not 4 <= len(row) <= 5 or not _is_transfer(row):
                what = "whole numbers (source, destination, lane, block), and as a fifth whether the source gives"
                raise ScheduleError(of_type(f"a step's transfer {number}", row, what))
        if not isinstance(calls, Iterable):
            raise ScheduleError(of_type("a step's calls", calls, "a list of Calls"))
        table = np.array([(*row, 0)[:5] for row in rows], dtype=np.int64).reshape(-1, 5)
        source, destination, lane, block, gives = table.T
        return cls(source, destination, lane, block, gives.astype(bool), tuple(calls))

    def content(self) -> Iterator[bytes]:
        """All that distinguishes steps, for a digest."""
        yield repr((len(self), len(self.calls))).encode()
        for values in (self.source, self.destination, self.lane, self.block, self.gives):
            yield values.tobytes()
        for calls in self.calls:
            yield repr((calls.kernel, calls.lane, calls.params.shape)).encode()
            lists = (array for operand in calls.operands for array in (operand.offset, operand.block))
            for values in (calls.rank, calls.params, *lists):
                yield values.tobytes()

    def __repr__(self) -> str:
        return brief(
            self, f"{len(self)} transfers", f"calls of {', '.join(each.kernel for each in self.calls) or 'nothing'}"
        )

    def __len__(self) -> int:
        return len(self.source)

    def rows(self) -> list[tuple[int, int, int, int]]:
        """The transfers as (source, destination, lane, block) rows."""
        columns = (self.source.tolist(), self.destination.tolist(), self.lane.tolist(), self.block.tolist())
        return list(zip(*columns, strict=True))

    def __str__(self) -> str:
        rows = zip(self.rows(), self.gives.tolist(), strict=True)
        return "\n".join(f"{s}->{d} lane {lane} block {b}{' given' * given}" for (s, d, lane, b), given in rows)


class Traffic(NamedTuple):
    """What a schedule sends in all, for each two ranks and lane on which it sends anything: int arrays (entries,).

    `bytes` are those of all steps, `most_bytes` those of the step with most.
    """

    source: IntArray
    destination: IntArray
    lane: IntArray
    bytes: IntArray
    most_bytes: IntArray


def _is_transfer(row: Sequence[object]) -> bool:
    flags = [isinstance(value, bool | np.bool_) for value in row]
    numbers = (isinstance(value, int | np.integer | np.bool_) and -(2**63) <= int(value) < 2**63 for value in row)
    return not any(flags[:4]) and all(numbers)


class LazySteps(Sequence[Step]):
    """Steps generated on access. A subclass implements `__len__` and `step`.

    The rest are shortcuts, which only the classes of this package may take: those with the argument `trusted` of their
    class statement, whose tests compare what the shortcuts tell with the steps. They read nothing that a caller can
    change, so a step is the same whenever it is made. A subclass of theirs makes other steps and inherits no trust. In
    a `Schedule`, `checked` takes the place of all other steps.
    """

    is_trusted: ClassVar[bool] = False

    hops_repeat: ClassVar[bool] = False
    """Whether every step has the same sources and destinations as the first one."""

    reordered: ClassVar[tuple[ScheduleModel, IntArray] | None] = None
    """Another schedule, and an order of ranks, an int array (ranks,): rank ``order[i]`` does what rank i does there.

    That it is so follows where these steps `prove` a schedule.
    """

    _kept: dict[int, Step] | None = None

    def __init_subclass__(cls, trusted: bool = False) -> None:
        cls.is_trusted = trusted

    @abstractmethod
    def step(self, index: int) -> Step:
        """Step `index`, which is in range."""

    def sends(self, index: int) -> Step:
        """The transfers of step `index`; it may have calls, where these take no time to find."""
        return self.step(index)

    def keep(self) -> None:
        """Keep each step from when it is first made, for a schedule that is walked several times."""
        if self._kept is None:
            object.__setattr__(self, "_kept", {})  # subclasses may be frozen

    def forget(self) -> None:
        """Make each step anew whenever it is needed, from now on."""
        object.__setattr__(self, "_kept", None)

    def __getstate__(self) -> dict[str, object]:
        """All but the steps that are kept, which are faster made than read."""
        return {name: {} if name == "_kept" and value else value for name, value in vars(self).items()}

    def prove(self, schedule: ScheduleModel) -> int | None:
        """The number of transfers, if the form of the steps proves the schedule valid; else None: it is replayed."""
        return None

    def calls(self, index: int) -> tuple[Calls, ...]:
        """The kernel calls of step `index`."""
        return self[index].calls

    def traffic(self, size_bytes: IntArray) -> Traffic | None:
        """What is sent in all, if the form of the steps tells it; `size_bytes` by block."""
        return None

    @overload
    def __getitem__(self, index: int) -> Step: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Step]: ...
    def __getitem__(self, index: int | slice) -> Step | Sequence[Step]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"step {index} of {len(self)}")
        number, kept = index % len(self), self._kept
        if kept is None:
            return self.step(number)
        if number not in kept:
            kept[number] = self.step(number)
        return kept[number]

    def __iter__(self) -> Iterator[Step]:
        return (self[index] for index in range(len(self)))


class CheckedSteps(LazySteps, trusted=True):
    """The steps of someone else's sequence, each compared with what it was when it was first made.

    Raises `ScheduleError` for what is no step, for one that is missing, and for one that is another one by now.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps, self._length = steps, len(steps)
        self._digests: dict[int, bytes] = {}

    def __len__(self) -> int:
        return self._length

    def step(self, index: int) -> Step:
        try:
            step = _checked_step(index, self._steps[index])
        except IndexError:
            raise ScheduleError(f"step {index} is missing, expected {self._length} steps") from None
        digest = hashlib.blake2b(digest_size=16)
        for content in step.content():
            digest.update(content)
        if self._digests.setdefault(index, digest.digest()) != digest.digest():
            raise ScheduleError(f"step {index} is another one than when the schedule was proved, expected the same")
        return step


def _checked_step(index: int, step: Step) -> Step:
    if type(step) is not Step:  # a subclass could be another step each time it is read
        raise ScheduleError(of_type(f"step {index}", step, "a Step"))
    return step


def checked(steps: Sequence[Step]) -> Sequence[Step]:
    """Steps that cannot change: those of a list as a tuple, trusted ones as they are, others as `CheckedSteps`.

    Raises `ScheduleError` as these do.
    """
    if isinstance(steps, LazySteps) and steps.is_trusted:
        lock(steps)
        return steps
    if isinstance(steps, list | tuple):
        return tuple(_checked_step(index, step) for index, step in enumerate(steps))
    return CheckedSteps(steps)


@dataclass(frozen=True, eq=False, repr=False)
class ScheduleModel:
    """The fields of a schedule, unchecked: what the proof works on.

    Users construct `tasp_lab.schedule.schedule.Schedule`, which checks and proves itself.

    Parameters
    ----------
    name : the schedule's name, as on the command line.
    world_size : number of ranks.
    lanes : number of lanes.
    blocks : the blocks.
    initial : bool array (world_size, blocks), the copies that ranks have at the start.
    final : bool array (world_size, blocks), the copies that ranks must have complete at the end.
    steps : the steps, possibly lazy; any sequence of `Step`.
    task : what the kernel calls compute; None for a schedule without kernel calls.
    fused : whether all steps are one call of the communication library, as its own collectives are; else one per step.
    algorithm : how the library carries out a fused call; ``nvls`` lets the switch merge messages.
    own_bytes : what each rank copies to itself beside the transfers, as an all-to-all of separate buffers does.
    initial_part : int array that broadcasts to (world_size, blocks), the one part that an initial copy has, or -1 for
        all parts; None if all initial copies are complete.
    kept : bool array (world_size, blocks), further copies that stay where they arrive; None for none.
    """

    name: str
    world_size: int
    lanes: int
    blocks: Blocks
    initial: BoolArray
    final: BoolArray
    steps: Sequence[Step]
    task: Task | None = None
    fused: bool = False
    initial_part: IntArray | None = None
    kept: BoolArray | None = None
    algorithm: Literal["ring", "tree", "nvls", "nvls-tree"] = "ring"
    own_bytes: int = 0

    @property
    def block_bytes(self) -> IntArray:
        """The size of each block on the wire, int array (blocks,)."""
        return self.blocks.bytes

    @property
    def left(self) -> BoolArray:
        """Copies that are left in the end: bool array (world_size, blocks), those promised, and those in `kept`."""
        return self.final if self.kept is None else self.final | self.kept

    def is_resident(self, rank: IntArray, block: IntArray) -> BoolArray:
        """Whether copies of these blocks stay at these ranks."""
        resident: BoolArray = self.blocks.buffers[block] == 0
        for holder in self._holders:
            resident |= holder[block] == rank
        return resident

    @cached_property
    def _holders(self) -> list[IntArray]:
        """The ranks at which copies of each block stay that is of a kind with a pool, arrays (blocks,); -1 for none.

        These are few, where a table of ranks and blocks would be larger than any cache.
        """
        stays = (self.initial | self.left) & (self.blocks.buffers > 0)
        block, rank = np.nonzero(stays.T)
        counts = np.bincount(block, minlength=len(self.blocks))
        number = np.arange(len(block)) - np.repeat(np.cumsum(counts) - counts, counts)
        holders = np.full((int(counts.max(initial=0)), len(self.blocks)), -1)
        holders[number, block] = rank
        return list(holders)

    def bytes_sent(self) -> IntArray:
        """The bytes that each rank sends on each lane at each step, as an int array (steps, world_size, lanes)."""
        ledger = np.zeros((len(self.steps), self.world_size, self.lanes), dtype=np.int64)
        for index, step in enumerate(self.steps):
            np.add.at(ledger[index], (step.source, step.lane), self.block_bytes[step.block])
        return ledger

    def bytes_by_rank(self) -> IntArray:
        """The bytes that each rank sends, int array (world_size,)."""
        found = np.zeros(self.world_size, dtype=np.int64)
        np.add.at(found, self.traffic.source, self.traffic.bytes)
        return found

    @cached_property
    def traffic(self) -> Traffic:
        """Between which ranks the schedule sends on which lane, and how much, in the order of lanes and ranks."""
        steps, ranks, parts = self.steps, self.world_size, []
        known = steps.traffic(self.block_bytes) if isinstance(steps, LazySteps) else None
        if known is not None:
            return known
        for index in range(len(steps)):
            step = steps.sends(index) if isinstance(steps, LazySteps) else steps[index]
            if len(step):
                key = (step.lane.astype(np.int64) * ranks + step.source) * ranks + step.destination
                keys, sizes, starts = _grouped(key, self.block_bytes[step.block])
                parts.append((keys, np.add.reduceat(sizes, starts)))
        if not parts:
            return Traffic(*np.zeros((5, 0), dtype=np.int64))
        keys, sizes, starts = _grouped(*map(np.concatenate, zip(*parts, strict=True)))
        lane, pair = np.divmod(keys, ranks * ranks)
        return Traffic(
            *np.divmod(pair, ranks), lane, np.add.reduceat(sizes, starts), np.maximum.reduceat(sizes, starts)
        )

    def flops(self) -> IntArray:
        """The FLOPs that each rank computes at each step, as an int array (steps, world_size)."""
        ledger = np.zeros((len(self.steps), self.world_size), dtype=np.int64)
        for index, step in enumerate(self.steps):
            for calls in step.calls:
                assert self.task is not None, "a schedule with calls has a task"
                np.add.at(ledger[index], calls.rank, self.task.flops(calls))
        return ledger


def _grouped(key: IntArray, values: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """The distinct keys, one or more, the values in the order of keys, and where those of each key begin."""
    order = stable_order(key)
    ordered = key[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=-1))
    return ordered[starts], values[order], starts
