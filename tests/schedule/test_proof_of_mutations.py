"""Right schedules with one or two changes: what the proof accepts is right, by a replay that shares no code with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedule.blocks import Blocks, Kind, Pool
from tasp_lab.schedule.calls import Calls
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.collectives.all_gather import RingSteps
from tasp_lab.schedules.collectives.ring_reductions import RingSumSteps
from tests.support.set_replay import SmallTask, adding, ends_right


@st.composite
def gathered(draw: st.DrawFn) -> Schedule:
    """Something that is right: rings, trees and chains of data and sums, received into buffers or not, or computed."""
    ranks, buffers = draw(st.integers(2, 4)), draw(st.integers(2, 4))
    around, chunks = np.array([draw(st.permutations(range(ranks)))]), draw(st.integers(1, 2))
    kind = draw(st.sampled_from(["all-gather", "all-reduce", "reduce-scatter", "doubling", "chain", "circulation"]))
    if kind == "all-gather":
        own = np.repeat(np.eye(ranks, dtype=bool), chunks, axis=1)
        sizes = np.ones(ranks * chunks, dtype=np.int64)
        steps = list(RingSteps(around, chunks))
        return Schedule(kind, ranks, 1, Blocks.of_data(sizes), own, np.ones_like(own), steps)
    if kind in ("all-reduce", "reduce-scatter"):
        copies = kind == "all-reduce"
        held = np.ones((ranks, ranks * chunks), dtype=bool)
        own = np.repeat(np.eye(ranks, dtype=bool), chunks, axis=1)
        blocks = Blocks.of_sums(np.ones(ranks * chunks, dtype=np.int64), ranks)
        part, steps = np.arange(ranks)[:, None], list(RingSumSteps(around, chunks, copies))
        return Schedule(kind, ranks, 1, blocks, held, held if copies else own, steps, initial_part=part)
    if kind == "doubling":
        everything = np.ones((4, 1), dtype=bool)
        steps = [Step.of([(r, r ^ distance, 0, 0) for r in range(4)]) for distance in (1, 2)]
        blocks, part = Blocks.of_sums(np.array([1]), 4), np.arange(4)[:, None]
        return Schedule(kind, 4, 1, blocks, everything, everything, steps, initial_part=part)
    return _computed(kind, ranks, buffers)


def _computed(kind: str, ranks: int, buffers: int) -> Schedule:
    """Blocks 0, 1, ... go around and are received into buffers: sums that every rank adds to, or data.

    Of data each rank makes a part of its own sum: block `ranks` is that of rank 0.
    """
    chain, rank = kind == "chain", np.arange(ranks)
    kinds = Kind("moving", "add" if chain else "", Pool("arrivals", buffers)), Kind("result", "add")
    parts = np.repeat([ranks if chain else 1, ranks], ranks)
    blocks = Blocks(kinds, np.repeat([0, 1], ranks), np.ones(2 * ranks, dtype=np.int64), parts)
    initial, final = np.zeros((2, ranks, 2 * ranks), dtype=bool)
    steps = []
    for s in range(ranks):
        moving = [(r, (r + 1) % ranks, 0, (r - s + chain) % ranks, int(chain)) for r in range(ranks)]
        here = [(r - s) % ranks for r in range(ranks)]
        calls = adding(*((r, [], b, r) if chain else (r, [b], ranks + r, b) for r, b in enumerate(here)))
        steps.append(Step.of(moving if (s if chain else s < ranks - 1) else [], [calls]))
    if chain:
        final[rank, (rank + 1) % ranks] = True
    else:
        initial[rank, rank] = final[rank, ranks + rank] = True
    return Schedule(kind, ranks, 1, blocks, initial, final, steps, SmallTask(np.arange(ranks) < parts[:, None]))


@given(gathered())
def test_rings_and_chains_are_right(schedule: Schedule) -> None:
    assert ends_right(schedule)


@st.composite
def spoilt(draw: st.DrawFn) -> tuple[Schedule, dict[str, Any]]:
    """A right schedule and one or two changes, which may or may not make it wrong."""
    schedule = draw(gathered())
    rows = [[[*row, int(given)] for row, given in zip(step.rows(), step.gives, strict=True)] for step in schedule.steps]
    calls = [[row for each in step.calls for row in each.rows()] for step in schedule.steps]
    changes: dict[str, Any] = {}
    for _ in range(draw(st.integers(1, 2))):
        index = draw(st.integers(0, len(rows) - 1))
        what = draw(st.sampled_from(["transfer", "transfer", "transfer", "call", "initial", "final", "part"]))
        if what == "transfer" and rows[index]:
            at = draw(st.integers(0, len(rows[index]) - 1))
            changed = list(rows[index][at])
            column = draw(st.sampled_from([None, 0, 1, 3, 4]))
            if column is not None:
                limit = {0: schedule.world_size, 1: schedule.world_size, 3: len(schedule.blocks), 4: 2}[column]
                changed[column] = draw(st.integers(0, limit - 1))
            if draw(st.booleans()):
                del rows[index][at]
            if draw(st.booleans()):
                rows[draw(st.integers(0, len(rows) - 1))].append(changed)
        elif what == "call" and calls[index]:
            rank, operands, params = calls[index].pop(draw(st.integers(0, len(calls[index]) - 1)))
            if draw(st.booleans()):
                rank = draw(st.integers(0, schedule.world_size - 1))
            if draw(st.booleans()):
                params = [params[0], draw(st.integers(0, schedule.world_size - 1))]
            if draw(st.booleans()):
                calls[draw(st.integers(0, len(calls) - 1))].append((rank, operands, params))
        elif what in ("initial", "final"):
            values = changes.get(what, getattr(schedule, what)).copy()
            values[draw(st.integers(0, values.shape[0] - 1)), draw(st.integers(0, values.shape[1] - 1))] ^= True
            changes[what] = values
        elif what == "part" and schedule.initial_part is not None:
            part = schedule.initial_part.copy()
            part[draw(st.integers(0, len(part) - 1))] = draw(st.integers(-1, len(part) - 1))
            changes["initial_part"] = part
    changes["steps"] = [
        Step.of(step, [Calls.of("add", each)] if each else []) for step, each in zip(rows, calls, strict=True)
    ]
    return schedule, changes


@settings(max_examples=400)
@given(spoilt())
def test_what_is_accepted_is_right(case: tuple[Schedule, dict[str, Any]]) -> None:
    """Whatever is dropped, doubled, moved, given or computed elsewhere: it is refused, or it makes no difference."""
    schedule, changes = case
    try:
        found = replace(schedule, **changes)
    except ScheduleError:
        return
    assert ends_right(found)
