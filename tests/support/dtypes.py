"""Schedules whose arrays have other dtypes and lie in other memory, judged against the same numbers in int64."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from sim.simulate import simulate
from tasp_lab.core.errors import TaspLabError
from tasp_lab.machines.machine import ComputeRate, Machine
from tasp_lab.schedule.calls import BlockLists, Calls
from tasp_lab.schedule.dependencies import dependencies
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.layer_blocks import LayerBlocks
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import build_schedules
from tasp_lab.schedules.registry import COLLECTIVES, LINEAR, attention_names_on
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload

DTYPES = ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", ">i2", ">u4", ">i8", ">u8")
WRONG_DTYPES = ("?", "f8", "O", "M8[s]", "c16")
RIGHT, REFUSED, WRONG, TRACEBACK = "accepted, right", "refused in one line", "accepted, wrong", "traceback"
VERDICTS = (RIGHT, REFUSED, WRONG, TRACEBACK)

NAMES = (*COLLECTIVES, *attention_names_on(4), *LINEAR)

Array = npt.NDArray[Any]


def built(name: str, n: int) -> tuple[Schedule, ...]:
    """The passes of a registered schedule of a small message or layer on `n` ranks."""
    if name in COLLECTIVES:
        return build_schedules(name, full_mesh(n), 48 * n)
    kind: Any = "linear" if name in LINEAR else "softmax"
    layer = Workload(6 * n, heads=n, kv_heads=n, head_dim=2, mask="causal", kind=kind)
    return build_schedules(name, full_mesh(n), layer, options=AttentionOptions("both"))


def placed(values: Array, draw: random.Random) -> Array:
    """The same values in memory of their own, in every second row of other memory, or in reverse order."""
    form = draw.choice(("own", "alternate", "reversed"))
    if form == "alternate":
        return np.repeat(values, 2, axis=0)[::2]
    return values[::-1].copy()[::-1] if form == "reversed" else values.copy()


def cast(values: Array, draw: random.Random) -> Array:
    """The same numbers in a dtype that has room for them, in any memory."""
    dtypes = [each for each in DTYPES if not values.size or np.array_equal(values.astype(each), values)]
    return placed(values.astype(draw.choice(dtypes)), draw)


def rebuilt(
    schedule: Schedule, steps: Sequence[Step], draw: random.Random, cast: Callable[..., Array] = cast
) -> Schedule:
    """A schedule with these steps, all of whose arrays are made anew by `cast`, those of bools by `placed`."""
    column, flags = partial(cast, draw=draw), partial(placed, draw=draw)

    def calls_of(calls: Calls) -> Calls:
        operands = (BlockLists(column(each.offset), column(each.block)) for each in calls.operands)
        return Calls(calls.kernel, column(calls.rank), tuple(operands), column(calls.params), calls.lane)

    def step_of(step: Step) -> Step:
        columns = map(column, (step.source, step.destination, step.lane, step.block))
        return Step(*columns, flags(step.gives), tuple(map(calls_of, step.calls)))

    old, task, part = schedule.blocks, schedule.task, schedule.initial_part
    if isinstance(task, LayerBlocks):
        names = "tensor", "owner", "start", "count", "first_head", "heads"
        task = replace(task, **{name: column(getattr(task, name)) for name in names})
    return replace(
        schedule,
        blocks=replace(old, kind=column(old.kind), bytes=column(old.bytes), parts=column(old.parts)),
        initial=flags(schedule.initial),
        final=flags(schedule.final),
        kept=None if schedule.kept is None else flags(schedule.kept),
        initial_part=None if part is None else column(part),
        task=task,
        steps=[step_of(step) for step in steps],
    )


def facts(schedule: Schedule) -> tuple[object, ...]:
    """What is proved and predicted: the digest, the traffic, what waits for what, and the time."""
    machine = Machine(full_mesh(schedule.world_size, Fraction(7), Fraction(1, 3)), compute=ComputeRate(Fraction(1000)))
    tables = schedule.traffic, dependencies(schedule).edges
    columns = [values.tolist() for table in tables for values in table]
    sent = schedule.bytes_by_rank().tolist()
    return schedule.digest, schedule.transfers, sent, columns, simulate(schedule, machine).time_s


def judge(
    schedule: Schedule, steps: Sequence[Step], draw: random.Random, cast: Callable[..., Array] = cast
) -> tuple[bool, str]:
    """Whether a schedule with these steps is accepted in int64; the verdict on it in other dtypes."""
    try:
        expected = facts(replace(schedule, steps=list(steps)))
    except TaspLabError:
        expected = None
    try:
        found = facts(rebuilt(schedule, steps, draw, cast))
    except TaspLabError as error:
        return expected is not None, TRACEBACK if "\n" in str(error) else REFUSED
    except Exception:  # whatever a user would see as a traceback
        return expected is not None, TRACEBACK
    return expected is not None, RIGHT if found == expected else WRONG


def mutated(schedule: Schedule, draw: random.Random) -> list[Step]:
    """The steps with one change: a transfer less, once more or earlier, another number in it, or calls moved."""
    steps = list(schedule.steps)
    at = draw.choice([index for index, step in enumerate(steps) if len(step) or step.calls] or [0])
    if not steps:
        return steps
    step, before = steps[at], max(at - 1, 0)
    kinds = ["drop", "repeat", "earlier", "number", "gives"] if len(step) else []
    kind = draw.choice(kinds + ["calls"] * bool(step.calls))
    if kind == "calls":
        steps[at] = replace(step, calls=())
        steps[before] = replace(steps[before], calls=steps[before].calls + step.calls * draw.choice((0, 1, 2)))
        return steps
    columns = [step.source.copy(), step.destination.copy(), step.lane.copy(), step.block.copy(), step.gives.copy()]
    row = draw.randrange(len(step))
    if kind == "number":
        limits = schedule.world_size, schedule.world_size, schedule.lanes, len(schedule.blocks)
        column = draw.randrange(4)
        columns[column][row] = draw.randrange(limits[column])
    elif kind == "gives":
        columns[4][row] ^= True
    elif kind == "repeat":
        columns = [np.append(values, values[row]) for values in columns]
    else:
        moved = [values[row : row + 1] for values in columns]
        columns = [np.delete(values, row) for values in columns]
        if kind == "earlier":
            old = steps[before] if before != at else Step(*columns, step.calls)
            names = old.source, old.destination, old.lane, old.block, old.gives
            joined = [np.concatenate(pair) for pair in zip(names, moved, strict=True)]
            steps[at] = Step(*columns, step.calls)
            steps[before] = Step(*joined, old.calls)
            return steps
    steps[at] = Step(*columns, step.calls)
    return steps
