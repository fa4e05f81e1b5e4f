"""Every single change of a world, and the campaign that judges changed worlds by the proof and by real numbers."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray
from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedule.blocks import Blocks, Field, Kind, Pool
from tasp_lab.schedules.attention.task import AttentionTask
from tasp_lab.schedules.hybrid.relayout import RelayoutTask
from tasp_lab.schedules.linear.task import LinearTask
from tasp_lab.workload.sequence_layout import contiguous, striped, zigzag
from tests.support.numeric_executor import Numbers, is_right
from tests.support.numeric_tasks import numbers_of
from tests.support.world import KernelCall, Row, Transfer, World

Mutant = tuple[str, Callable[[], World]]
"""What is changed, and the changed world."""


def mutants(world: World) -> Iterator[Mutant]:
    """All single changes of a world."""
    return chain.from_iterable(_by_origin(world))


def pairs(world: World, count: int) -> Iterator[Mutant]:
    """Worlds with two random changes."""
    choose = random.Random(world.name)
    for _ in range(count):
        first, change = _any_change(world, choose)
        try:
            second, both = _any_change(change(), choose)
        except ScheduleError:  # the first one alone is refused already
            yield first, change
        else:
            yield f"{first}, {second}", both


def _any_change(world: World, choose: random.Random) -> Mutant:
    """A random change of a random origin, of those that have any: there may be no steps left."""
    origins = list(_by_origin(world))
    choose.shuffle(origins)
    return next(choose.choice(changes) for changes in map(list, origins) if changes)


def _by_origin(world: World) -> Iterator[Iterator[Mutant]]:
    """The changes of each transfer, each call, of steps, of pools, kinds, owners and layouts, and of what is where."""
    for step, row in enumerate(world.rows):
        yield from (_transfer_changes(world, step, at) for at in range(len(row.transfers)))
        yield from (_call_changes(world, step, at) for at in range(len(row.calls)))
    yield _step_changes(world)
    yield _pool_changes(world)
    yield _kind_changes(world)
    yield _owner_changes(world)
    yield _layout_changes(world)
    yield _table_changes(world)


# -- transfers --------------------------------------------------------------------------------------------------------
def _transfer_changes(world: World, step: int, at: int) -> Iterator[Mutant]:
    transfer = world.rows[step].transfers[at]
    for what, changed in _instead_of_transfer(world, step, transfer):
        yield f"transfer {what}", partial(_with_transfers, world, step, at, changed)


def _instead_of_transfer(
    world: World, step: int, transfer: Transfer
) -> Iterator[tuple[str, tuple[tuple[int, Transfer], ...]]]:
    """What takes the place of a transfer: steps and transfers."""
    source, destination, lane, block, gives = transfer
    same = (step, transfer)
    yield "dropped", ()
    yield "doubled", (same, same)
    yield (
        "copies instead of gives" if gives else "gives instead of copies",
        ((step, transfer._replace(gives=not gives)),),
    )
    yield "reversed", ((step, Transfer(destination, source, lane, block, gives)),)
    for rank in range(world.world_size + 1):
        if rank != destination:
            other = (step, transfer._replace(destination=rank))
            yield "to another rank", (other,)
            yield "also to another rank", (same, other)
        if rank not in (source, destination):
            yield "from another rank", ((step, transfer._replace(source=rank)),)
    for other_block in range(len(world.blocks) + 1):
        if other_block != block:
            yield "of another block", ((step, transfer._replace(block=other_block)),)
    for other_lane in range(world.lanes + 1):
        if other_lane != lane:
            yield "on another lane", ((step, transfer._replace(lane=other_lane)),)
    for other_step in range(len(world.rows)):
        if other_step != step:
            yield "earlier" if other_step < step else "later", ((other_step, transfer),)
            yield "repeated", (same, (other_step, transfer))


def _with_transfers(world: World, step: int, at: int, changed: Iterable[tuple[int, Transfer]]) -> World:
    rows = list(world.rows)
    rows[step] = rows[step]._replace(transfers=rows[step].transfers[:at] + rows[step].transfers[at + 1 :])
    for number, transfer in changed:
        rows[number] = rows[number]._replace(transfers=(*rows[number].transfers, transfer))
    return replace(world, rows=tuple(rows))


# -- calls ------------------------------------------------------------------------------------------------------------
def _call_changes(world: World, step: int, at: int) -> Iterator[Mutant]:
    for what, changed in _instead_of_call(world, step, world.rows[step].calls[at]):
        yield f"call {what}", partial(_with_calls, world, step, at, changed)


def _instead_of_call(
    world: World, step: int, call: KernelCall
) -> Iterator[tuple[str, tuple[tuple[int, KernelCall], ...]]]:
    """What takes the place of a call: steps and calls."""
    same = (step, call)
    yield "dropped", ()
    yield "doubled", (same, same)
    for rank in range(world.world_size + 1):
        if rank != call.rank:
            yield "on another rank", ((step, call._replace(rank=rank)),)
    for other_step in range(len(world.rows)):
        if other_step != step:
            yield "earlier" if other_step < step else "later", ((other_step, call),)
            yield "repeated", (same, (other_step, call))
    for at, value in enumerate(call.params):
        for other in (value - 1, value + 1):
            params = (*call.params[:at], other, *call.params[at + 1 :])
            yield "with another parameter", ((step, call._replace(params=params)),)
    kernels = {each.kernel for row in world.rows for each in row.calls}
    for kernel in [*sorted(kernels - {call.kernel}), "nothing"]:
        yield "of another kernel", ((step, call._replace(kernel=kernel)),)
    yield "with operands swapped", ((step, call._replace(operands=call.operands[::-1])),)
    for at, blocks in enumerate(call.operands):
        for what, others in _operand_changes(blocks, len(world.blocks)):
            operands = (*call.operands[:at], others, *call.operands[at + 1 :])
            yield what, ((step, call._replace(operands=operands)),)


def _operand_changes(blocks: tuple[int, ...], count: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    if len(blocks) > 1:
        yield "with blocks in another order", blocks[::-1]
    for at, block in enumerate(blocks):
        yield "without a block", blocks[:at] + blocks[at + 1 :]
        yield "with a block twice", (*blocks, block)
        for other in range(count + 1):
            if other != block:
                yield "with another block", (*blocks[:at], other, *blocks[at + 1 :])


def _with_calls(world: World, step: int, at: int, changed: Iterable[tuple[int, KernelCall]]) -> World:
    rows = list(world.rows)
    rows[step] = rows[step]._replace(calls=rows[step].calls[:at] + rows[step].calls[at + 1 :])
    for number, call in changed:
        rows[number] = rows[number]._replace(calls=(*rows[number].calls, call))
    return replace(world, rows=tuple(rows))


# -- steps, pools, tables ---------------------------------------------------------------------------------------------
def _step_changes(world: World) -> Iterator[Mutant]:
    rows = world.rows
    for at, row in enumerate(rows):
        yield "step dropped", partial(replace, world, rows=rows[:at] + rows[at + 1 :])
        yield "step twice", partial(replace, world, rows=rows[: at + 1] + rows[at:])
        yield "step inserted", partial(replace, world, rows=(*rows[:at], Row(), *rows[at:]))
        if at:
            yield "steps swapped", partial(replace, world, rows=(*rows[: at - 1], row, rows[at - 1], *rows[at + 1 :]))
            joined = Row(rows[at - 1].transfers + row.transfers, rows[at - 1].calls + row.calls)
            yield "steps joined", partial(replace, world, rows=(*rows[: at - 1], joined, *rows[at + 1 :]))


def _pool_changes(world: World) -> Iterator[Mutant]:
    kinds = world.blocks.kinds
    for at, kind in enumerate(kinds):
        buffers = 0 if kind.pool is None else kind.pool.buffers
        for what, pool in (
            ("kept", None),
            ("with two buffers", Pool("two", 2)),
            ("with fewer buffers", Pool("fewer", max(buffers - 1, 2))),
            ("with more buffers", Pool("more", buffers + 1 if buffers else 4)),
            ("in the pool of another", kinds[at - 1].pool),
        ):
            if pool is None or kind.pool is None or pool.buffers != buffers or "another" in what:
                yield f"kind {what}", partial(_with_kind, world, at, replace(kind, pool=pool))


def _kind_changes(world: World) -> Iterator[Mutant]:
    """Kinds that are joined in another way, that lack a tensor or have others, and blocks of another kind."""
    kinds, old = world.blocks.kinds, world.blocks
    for at, kind in enumerate(kinds):
        for join in ("", "add", "merge"):
            if join != kind.join and (join or not kind.is_wide_at_home):
                yield f"kind joined by {join or 'nothing'}", partial(_with_kind, world, at, replace(kind, join=join))
        for number in range(len(kind.fields)):
            fewer = kind.fields[:number] + kind.fields[number + 1 :]
            yield "kind without a field", partial(_with_kind, world, at, replace(kind, fields=fewer))
        if kind.fields:
            more = (*kind.fields, Field("more", "fp32", (1,)))
            yield "kind with a further field", partial(_with_kind, world, at, replace(kind, fields=more))
            other = tuple(replace(each, dtype="bf16", home_dtype=None) for each in kind.fields)
            yield "kind of another dtype", partial(_with_kind, world, at, replace(kind, fields=other))
        yield "kind bound or not", partial(_with_kind, world, at, replace(kind, bound=not kind.bound))
    for block in range(len(old)):
        for kind_number in range(len(kinds)):
            if kind_number != old.kind[block]:
                column = old.kind.copy()
                column[block] = kind_number
                yield "block of another kind", partial(_with_kind_column, world, column)


def _with_kind_column(world: World, column: IntArray) -> World:
    old = world.blocks
    return replace(world, blocks=Blocks(old.kinds, column, old.bytes, old.parts))


def _owner_changes(world: World) -> Iterator[Mutant]:
    """What one rank has at the start, or is promised, belongs to another one; also to the task, if it has owners."""
    for name, table in (("initial", world.initial), ("final", world.final)):
        for rank, block in np.argwhere(table).tolist():
            for other in range(world.world_size):
                if not table[other, block]:
                    moved = table.copy()
                    moved[rank, block], moved[other, block] = False, True
                    what = "owner of an input moved" if name == "initial" else "owner of an output moved"
                    yield what, partial(replace, world, **{name: moved})  # type: ignore[arg-type]
    task = world.task
    if isinstance(task, AttentionTask):
        for block in range(len(task.owner)):
            owner = task.owner.copy()
            owner[block] = (owner[block] + 1) % world.world_size
            yield "owner in the task", lambda owner=owner: replace(world, task=replace(task, owner=owner))  # type: ignore[misc]


def _layout_changes(world: World) -> Iterator[Mutant]:
    """The positions of the layer lie at other ranks."""
    if not isinstance(task := world.task, AttentionTask | LinearTask | RelayoutTask):
        return
    old = task.layout
    for make in (contiguous, striped, zigzag):
        for layout in (found := make(old.sequence, world.world_size, task.workload.documents), found.on_ranks(
            np.roll(np.arange(world.world_size), 1)
        )):  # fmt: skip
            if layout.spans != old.spans:
                yield "layout of the task", lambda layout=layout: replace(world, task=replace(task, layout=layout))  # type: ignore[misc]


def _with_kind(world: World, at: int, kind: Kind) -> World:
    old = world.blocks
    kinds = [*old.kinds[:at], kind, *old.kinds[at + 1 :]]
    return replace(world, blocks=Blocks(kinds, old.kind, old.bytes, old.parts))


def _table_changes(world: World) -> Iterator[Mutant]:
    whole = np.full_like(world.initial, -1, dtype=np.int64)
    for rows in (world.rows, ()):
        for table in (world.initial | world.final, world.final):
            what = "promises are initial copies" + ("" if rows else ", without steps")
            yield what, partial(replace, world, rows=rows, initial=table)
            yield what, partial(replace, world, rows=rows, initial=table, initial_part=whole)
    everywhere = [(rank, block) for rank in range(world.world_size) for block in range(len(world.blocks))]
    for copy in everywhere:
        initial = bool(world.initial[copy])
        yield (
            f"initial copy {'removed' if initial else 'added'}",
            partial(_flipped, world, "initial", world.initial, copy),
        )
        promised = bool(world.final[copy])
        yield f"promise {'removed' if promised else 'added'}", partial(_flipped, world, "final", world.final, copy)
        keeps = bool(world.kept[copy])
        yield f"copy {'not kept' if keeps else 'kept'}", partial(_flipped, world, "kept", world.kept, copy)
        if initial:
            for part in range(-1, int(world.blocks.parts[copy[1]]) + 1):
                yield "initial part changed", partial(_with_part, world, copy, part)


def _flipped(world: World, name: str, table: BoolArray, copy: tuple[int, int]) -> World:
    found = table.copy()
    found[copy] = not found[copy]
    return replace(world, **{name: found})  # type: ignore[arg-type]


def _with_part(world: World, copy: tuple[int, int], part: int) -> World:
    parts = np.broadcast_to(-1 if world.initial_part is None else world.initial_part, world.initial.shape).copy()
    parts[copy] = part
    return replace(world, initial_part=parts)


# -- the campaign -----------------------------------------------------------------------------------------------------
@dataclass
class Findings:
    """The verdicts on changed worlds: counts by kind of change, whether numbers are right, whether it is accepted."""

    count: Counter[tuple[str, bool, bool]] = field(default_factory=Counter)
    survivors: list[str] = field(default_factory=list)
    """The changes that are wrong and accepted, in words."""

    @property
    def kinds(self) -> list[str]:
        return sorted({kind for kind, *_ in self.count})

    def of(self, *, right: bool, accepted: bool | None = None, kind: str | None = None) -> int:
        """The number of worlds with these verdicts."""
        return sum(
            number
            for (each, is_right, is_accepted), number in self.count.items()
            if right == is_right and accepted in (None, is_accepted) and kind in (None, each)
        )

    def verdicts(self, kind: str | None = None) -> str:
        """The counts in words."""
        wrong, survived = (self.of(right=False, accepted=accepted, kind=kind) for accepted in (None, True))
        right, refused = (self.of(right=True, accepted=accepted, kind=kind) for accepted in (None, False))
        return f"{wrong:6} wrong, {survived} of them accepted; {right:6} harmless, {refused:6} of them refused"


def campaign(world: World, max_per_kind: int | None = None, double: int = 0, orders: int = 1) -> Findings:
    """Judge single changes of a world, all or a sample of each kind, and some double ones.

    What is right step by step is also executed in a number of random orders.
    """
    by_kind: dict[str, list[Callable[[], World]]] = defaultdict(list)
    for kind, change in mutants(world):
        by_kind[kind].append(change)
    chosen = [
        (kind, kind, change) for kind, changes in by_kind.items() for change in _sample(kind, changes, max_per_kind)
    ]
    chosen += [("two changes", kinds, change) for kinds, change in pairs(world, double)]
    numbers, found = numbers_of(world), Findings()
    for kind, what, change in chosen:
        try:
            mutant = change()
        except ScheduleError:  # blocks or a task that cannot be: refused before there is a schedule
            found.count[kind, False, False] += 1
            continue
        accepted, right = is_accepted(mutant), is_right_in_orders(mutant, numbers, orders, world)
        found.count[kind, right, accepted] += 1
        if accepted and not right:
            found.survivors.append(f"{what}: {differences(world, mutant)}")
    return found


def _sample(kind: str, changes: list[Callable[[], World]], size: int | None) -> list[Callable[[], World]]:
    return changes if size is None or len(changes) <= size else random.Random(kind).sample(changes, size)


def valid(change: Callable[[], World]) -> World | None:
    """The changed world, if the proof accepts it; None also if there are no such blocks, or no such task."""
    try:
        world = change()
    except ScheduleError:
        return None
    return world if is_accepted(world) else None


def is_accepted(world: World) -> bool:
    """Whether the proof accepts a world. Any error but a `ScheduleError` is an error of the proof."""
    try:
        world.schedule()
    except ScheduleError:
        return False
    return True


def is_right_in_orders(world: World, numbers: Numbers, orders: int, truth: World | None = None) -> bool:
    """Whether the numbers are right step by step, and in random orders; `truth` is the unchanged world."""
    shuffled = (random.Random(seed) for seed in range(orders))
    return all(is_right(world, numbers, order, truth) for order in (None, *shuffled))


def differences(world: World, mutant: World) -> str:
    """In words, what one of two worlds says and the other does not."""
    found = []
    for sign, one, other in (("-", world, mutant), ("+", mutant, world)):
        for step, row in enumerate(one.rows):
            others = other.rows[step] if step < len(other.rows) else Row()
            for each in chain(
                Counter(row.transfers) - Counter(others.transfers), Counter(row.calls) - Counter(others.calls)
            ):
                found.append(f"{sign} step {step} {each}")
    for name in ("initial", "final", "kept", "initial_part"):
        before, after = getattr(world, name), getattr(mutant, name)
        if after is not before:
            before = np.zeros_like(after) if before is None else np.broadcast_to(before, after.shape)
            found.append(f"another {name} at {np.argwhere(after != before)[:4].tolist()}")
    if mutant.blocks is not world.blocks:
        found.append(f"kinds {mutant.blocks.kinds} of {mutant.blocks.kind.tolist()}")
    if mutant.task is not world.task:
        found.append(f"task {mutant.task}")
    return "; ".join(found)
