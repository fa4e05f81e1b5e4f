"""Circulations are proved by a theorem. Here each is replayed, too: its calls and transfers are those of its paths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedule.proof import prove
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.backward import DATAFLOWS, attention_passes
from tasp_lab.schedules.attention.forward import CIRCULATIONS
from tasp_lab.schedules.attention.travel import TravelSteps
from tasp_lab.topology.builders import full_mesh
from tests.support.strategies import attention_layers


@st.composite
def circulations(draw: st.DrawFn) -> Schedule:
    """The forward or the backward pass of any schedule and dataflow."""
    passes = attention_passes(
        draw(st.sampled_from(sorted({*CIRCULATIONS} - {"half-each-way"}))),
        full_mesh(draw(st.integers(1, 5))),
        draw(attention_layers()),
        dataflow=draw(st.sampled_from(DATAFLOWS)),
        trim=draw(st.booleans()),
        buffers=draw(st.integers(2, 4)),
    )
    return passes.backward if draw(st.booleans()) else passes.forward


@settings(max_examples=100, deadline=None)
@given(circulations())
def test_what_is_proved_is_what_a_replay_finds(schedule: Schedule) -> None:
    assert isinstance(schedule.steps, TravelSteps)
    assert schedule.steps.prove(schedule) == prove(schedule) == schedule.transfers


def is_accepted(schedule: Schedule, **changes: Any) -> bool:
    try:
        replace(schedule, **changes)
    except ScheduleError:
        return False
    return True


@settings(max_examples=100, deadline=None)
@given(circulations(), st.data())
def test_the_theorem_accepts_only_what_the_replay_accepts(schedule: Schedule, data: st.DataObject) -> None:
    """With copies more or less at the start, promised or not, other parts and lanes."""
    changes: dict[str, Any] = {}
    what = data.draw(st.sampled_from(["initial", "final", "parts", "lanes"]))
    if what in ("initial", "final"):
        values = getattr(schedule, what).copy()
        values.flat[data.draw(st.integers(0, values.size - 1))] ^= True
        changes[what] = values
    elif what == "parts":
        parts = schedule.blocks.parts.copy()
        sums = np.flatnonzero([bool(schedule.blocks.kind_of(block).join) for block in range(len(parts))])
        parts[data.draw(st.sampled_from(sums.tolist()))] += data.draw(st.sampled_from([-1, 1]))
        if parts.min() < 1:
            return
        changes["blocks"] = replace(schedule.blocks, parts=parts)
    else:
        changes["lanes"] = schedule.lanes + data.draw(st.sampled_from([-1, 1]))
    by_replay = is_accepted(schedule, **changes, steps=list(schedule.steps))
    by_either = is_accepted(schedule, **changes)
    assert by_either == by_replay
