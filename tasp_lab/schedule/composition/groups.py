"""Schedules in groups of ranks, and on two levels: within groups and between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from tasp_lab.core.arrays import BoolArray, IntArray, frozen
from tasp_lab.core.errors import ScheduleError
from tasp_lab.rings.rings import split_bytes
from tasp_lab.schedule.blocks import DATA, Blocks, Kind
from tasp_lab.schedule.composition.sequence import check_no_calls, check_size, in_sequence, joined, moved, tables_joined
from tasp_lab.schedule.model import LazySteps, Step
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedule.stacked_task import StackedTask

T = TypeVar("T", bound=np.generic)


def replicated(schedule: Schedule, groups: IntArray) -> Schedule:
    """A schedule in several groups of ranks at once, e.g. for data parallelism.

    `groups` is an int array (groups, world_size of the schedule): its row j has the ranks that act as rank 0, 1, ... of
    the schedule in group j. The blocks of group j are those of group 0, shifted by j times their number.

    Raises `ScheduleError` unless the groups have each of the ranks 0, 1, ... once.

    >>> from tasp_lab.schedules.collectives.all_gather import ring_all_gather
    >>> from tasp_lab.topology.builders import full_mesh
    >>> print(replicated(ring_all_gather(full_mesh(2), 8), np.array([[0, 2], [1, 3]])).steps[0])
    0->2 lane 0 block 0
    2->0 lane 0 block 1
    1->3 lane 0 block 2
    3->1 lane 0 block 3
    """
    if groups.ndim != 2 or groups.shape[1] != schedule.world_size:
        raise ScheduleError(
            f"schedule {schedule.name!r} in groups of shape {groups.shape}, expected (groups, {schedule.world_size})"
        )
    if not len(groups):
        raise ScheduleError(f"schedule {schedule.name!r} in no groups, expected one or more")
    groups = frozen(f"schedule {schedule.name!r}: groups", groups, np.int64, 2, "an int array (groups, ranks)")
    check_size(f"{len(groups)} x {schedule.name}", groups.size, len(groups) * len(schedule.blocks))
    if not np.array_equal(np.sort(groups, axis=None), np.arange(groups.size)):
        raise ScheduleError(
            f"schedule {schedule.name!r}: the groups have not each of the ranks 0 to {groups.size - 1} once"
        )
    count, task, part = len(groups), schedule.task, schedule.initial_part
    return Schedule(
        name=f"{count} x {schedule.name}",
        world_size=groups.size,
        lanes=schedule.lanes,
        blocks=tables_joined([schedule.blocks] * count),
        initial=_placed(schedule.initial, groups),
        final=_placed(schedule.final, groups),
        steps=ReplicatedSteps(schedule.steps, groups, len(schedule.blocks)),
        task=None if task is None else StackedTask((task,) * count, (len(schedule.blocks),) * count, ranks=groups),
        fused=schedule.fused,
        initial_part=None if part is None else _placed(np.broadcast_to(part, schedule.initial.shape), groups),
        kept=None if schedule.kept is None else _placed(schedule.kept, groups),
    )


def _placed(table: npt.NDArray[T], groups: IntArray) -> npt.NDArray[T]:
    """An array (world_size, blocks) of one group, repeated for the ranks and blocks of each group; 0 elsewhere."""
    blocks = table.shape[1]
    placed = np.zeros((groups.size, len(groups) * blocks), dtype=table.dtype)
    for group, ranks in enumerate(groups):
        placed[ranks, group * blocks : (group + 1) * blocks] = table
    return placed


@dataclass(frozen=True, eq=False)
class ReplicatedSteps(LazySteps):
    """The steps of a schedule of `blocks` blocks in each of the groups."""

    one: Sequence[Step]
    groups: IntArray
    blocks: int

    def __len__(self) -> int:
        return len(self.one)

    def step(self, index: int) -> Step:
        step = self.one[index]
        return joined([moved(step, group * self.blocks, ranks) for group, ranks in enumerate(self.groups)])


def over_groups(inner: Schedule, outer: Schedule, *, inner_first: bool = False) -> Schedule:
    """A collective on two levels: `inner` among the ranks of each group, `outer` between the groups.

    Rank ``j * inner.world_size + i`` is member i of group j. Each block x of `outer` is cut into pieces, one per block
    of `inner` and in proportion to their sizes. Piece y is block ``x * inner_blocks + y``; it is at member i of group j
    at the start, or promised to it, if x is at j and y is at i.

    Every member runs `outer` among its peers in the other groups, with the pieces that it starts with. When a block of
    `outer` has come to a group, `inner` runs in this group with its pieces, while further blocks are on their way: one
    step of `outer` beside all steps of `inner`, as in Double-Ring Attention (arXiv:2406.18485). With `inner_first` it
    is the other way round, as suits sums: `inner` runs with a block before the group sends it. The lanes of `outer`
    follow those of `inner`.

    Two AllGathers make a hierarchical AllGather, that of two ReduceScatters with `inner_first` a ReduceScatter. Two
    AllReduces make an AllReduce: the first level reduces and scatters, the second one runs with the pieces of each
    rank, and the first level gathers, so that no level moves what the other one has to.

    Raises `ScheduleError` for kernel calls, for buffers, for pieces without a byte, if one schedule moves data and the
    other one sums, and if the level that begins copies complete sums before it has given away all others.

    >>> from tasp_lab.schedules.collectives.all_gather import ring_all_gather
    >>> from tasp_lab.topology.builders import full_mesh
    >>> inner, outer = ring_all_gather(full_mesh(4), 100), ring_all_gather(full_mesh(2), 400)
    >>> [int(step_bytes.sum()) for step_bytes in over_groups(inner, outer).bytes_sent()]
    [1600, 800, 800, 800, 800, 800]
    """
    for schedule in (inner, outer):
        check_no_calls(schedule, "expected a collective on each level")
        if schedule.blocks.pools:
            raise ScheduleError(f"schedule {schedule.name!r} receives into buffers, expected copies that stay")
    ranks, blocks = inner.world_size * outer.world_size, len(inner.blocks) * len(outer.blocks)
    check_size(f"{inner.name} over {outer.name}", ranks, blocks)
    first, second = (inner, outer) if inner_first else (outer, inner)

    def levels(of_first: Schedule, of_second: Schedule) -> Schedule:
        return _two_levels(*((of_first, of_second) if inner_first else (of_second, of_first)), inner_first)

    if not _copies_sums(first):
        return levels(first, second)
    scatter, gather = reduce_scatter_and_all_gather(first)
    whole = in_sequence(levels(scatter, second), levels(gather, _nothing_more(second)))
    return replace(whole, name=f"{inner.name} over {outer.name}")


def reduce_scatter_and_all_gather(all_reduce: Schedule) -> tuple[Schedule, Schedule]:
    """The two halves of an AllReduce: the steps until each block is at one rank only, and those that copy it.

    Raises `ScheduleError` if there is no such step, as in recursive doubling, or if blocks are not complete there.

    >>> from tasp_lab.schedules.collectives.ring_reductions import ring_all_reduce
    >>> from tasp_lab.topology.builders import full_mesh
    >>> [len(half.steps) for half in reduce_scatter_and_all_gather(ring_all_reduce(full_mesh(4), 8))]
    [3, 3]
    """
    owned, count = all_reduce.initial.copy(), 0
    for step in all_reduce.steps:
        if (owned.sum(axis=0) == 1).all() or not step.gives.all():
            break
        owned[step.source, step.block] = False
        owned[step.destination, step.block] = True
        count += 1
    if not (owned.sum(axis=0) == 1).all():
        raise ScheduleError(
            f"schedule {all_reduce.name!r} copies sums at step {count} that are at several ranks, expected a "
            "ReduceScatter followed by an AllGather"
        )
    steps, data = all_reduce.steps, Blocks.of_data(all_reduce.blocks.bytes)
    scatter = replace(all_reduce, final=owned, steps=steps[:count], kept=None)
    gather = replace(all_reduce, blocks=data, initial=owned, steps=steps[count:], initial_part=None)
    return scatter, gather


def _copies_sums(schedule: Schedule) -> bool:
    """Whether several ranks end with the same sum, as after an AllReduce."""
    return bool(schedule.blocks.kinds[0].join) and schedule.final.sum(axis=0).max(initial=0) > 1


def _nothing_more(schedule: Schedule) -> Schedule:
    """No step, on what a schedule promises, as data."""
    data = Blocks.of_data(schedule.blocks.bytes)
    return replace(schedule, blocks=data, initial=schedule.final, steps=[], initial_part=None, kept=None)


def _two_levels(inner: Schedule, outer: Schedule, inner_first: bool) -> Schedule:
    name = f"{inner.name} over {outer.name}"
    first, second = (inner, outer) if inner_first else (outer, inner)

    def product(of_first: BoolArray, of_second: BoolArray) -> BoolArray:
        table: BoolArray = np.kron(of_second, of_first) if inner_first else np.kron(of_first, of_second)
        return table

    kept = product(first.left, second.initial) | product(first.final, second.left)
    return Schedule(
        name=name,
        world_size=inner.world_size * outer.world_size,
        lanes=inner.lanes + outer.lanes,
        blocks=_product_blocks(name, inner.blocks, outer.blocks),
        initial=product(first.initial, second.initial),
        final=product(first.final, second.final),
        steps=TwoLevelSteps(inner, outer, inner_first),
        initial_part=_product_part(name, inner, outer),
        kept=kept,
    )


def _product_blocks(name: str, inner: Blocks, outer: Blocks) -> Blocks:
    joins = {kind.join for blocks in (inner, outer) for kind in blocks.kinds}
    if len(joins) > 1:
        raise ScheduleError(f"{name}: one moves data, one adds up parts, expected the same of both")
    kinds: tuple[Kind, ...] = (DATA,) if joins == {""} else (Kind("sum", joins.pop()),)
    shares = [Fraction(size, int(inner.bytes.sum())) for size in inner.bytes.tolist()]
    pieces = {size: _pieces(size, shares) for size in np.unique(outer.bytes).tolist()}
    sizes = np.array([pieces[size] for size in outer.bytes.tolist()], dtype=np.int64)
    if (sizes < 1).any():
        block = int((sizes < 1).any(axis=1).argmax())
        raise ScheduleError(
            f"{name}: block {block} of {outer.bytes[block]} bytes in {len(inner)} pieces, expected a byte or more"
        )
    return Blocks(kinds, np.zeros(sizes.size, dtype=np.int64), sizes.ravel(), np.kron(outer.parts, inner.parts))


def _pieces(size_bytes: int, shares: Sequence[Fraction]) -> list[int]:
    """The sizes of pieces, exactly in proportion where that is possible: each level then has the blocks of its own."""
    exact = [size_bytes * share for share in shares]
    return [*map(int, exact)] if all(each.denominator == 1 for each in exact) else split_bytes(size_bytes, shares)


def _product_part(name: str, inner: Schedule, outer: Schedule) -> IntArray | None:
    """The part of each initial copy: the outer part times the parts of an inner block, plus the inner part."""
    if inner.initial_part is None and outer.initial_part is None:
        return None
    parts = []
    for schedule in (outer, inner):
        part = np.broadcast_to(-1 if schedule.initial_part is None else schedule.initial_part, schedule.initial.shape)
        parts.append(np.where(schedule.blocks.parts == 1, 0, part))
        if (parts[-1][schedule.initial] < 0).any():
            raise ScheduleError(f"{name}: {schedule.name!r} starts with complete sums and the other one with parts")
    outer_part, inner_part = parts
    combined: IntArray = outer_part[:, None, :, None] * inner.blocks.parts + inner_part[:, None, :]
    return combined.reshape(inner.world_size * outer.world_size, -1)


class TwoLevelSteps(LazySteps):
    """The steps of `over_groups`."""

    def __init__(self, inner: Schedule, outer: Schedule, inner_first: bool) -> None:
        self._inner, self._outer, self._inner_first = inner, outer, inner_first
        self._period = max(len(inner.steps), 1)
        turns, self._present = (_departures if inner_first else _arrivals)(outer)
        self._begin = turns * self._period

    def __len__(self) -> int:
        steps = len(self._outer.steps)
        outer_end = (steps - 1 + self._inner_first) * self._period + 1 if steps else 0
        return max(outer_end, int(self._begin[self._present].max(initial=0)) + len(self._inner.steps))

    def step(self, index: int) -> Step:
        steps = []
        turn, rest = divmod(index, self._period)
        turn -= self._inner_first
        if not rest and 0 <= turn < len(self._outer.steps):
            member, piece = np.nonzero(self._inner.final if self._inner_first else self._inner.initial)
            ranks, blocks = (self._inner.world_size, member), (len(self._inner.blocks), piece)
            steps.append(_product(self._outer.steps[turn], ranks, blocks, self._inner.lanes))
        since = np.where(self._present, index - self._begin, -1)
        for inner_index in np.unique(since[(since >= 0) & (since < len(self._inner.steps))]).tolist():
            group, block = np.nonzero(since == inner_index)
            ranks, blocks = (1, group * self._inner.world_size), (1, block * len(self._inner.blocks))
            steps.append(_product(self._inner.steps[inner_index], ranks, blocks, 0))
        return joined(steps)


def _arrivals(outer: Schedule) -> tuple[IntArray, BoolArray]:
    """The step after the last arrival of each block at each rank, 0 for initial copies; where they are in the end."""
    arrival = np.zeros(outer.initial.shape, dtype=np.int64)
    for index, step in enumerate(outer.steps):
        arrival[step.destination, step.block] = index + 1
    return arrival, outer.final


def _departures(outer: Schedule) -> tuple[IntArray, BoolArray]:
    """The first step at which each rank sends each block, or the number of steps; where they are at the start."""
    departure = np.full(outer.initial.shape, len(outer.steps))
    for index in reversed(range(len(outer.steps))):
        departure[outer.steps[index].source, outer.steps[index].block] = index
    return departure, outer.initial


def _product(step: Step, ranks: tuple[int, IntArray], blocks: tuple[int, IntArray], first_lane: int) -> Step:
    """Each transfer of a step once per pair of a rank and a block, which are added to multiples of its own."""
    (rank_factor, rank), (block_factor, block) = ranks, blocks
    source, destination = (np.add.outer(each * rank_factor, rank).ravel() for each in (step.source, step.destination))
    lane, gives = (step.lane + first_lane).repeat(len(rank)), step.gives.repeat(len(rank))
    return Step(source, destination, lane, np.add.outer(step.block * block_factor, block).ravel(), gives)
