"""No simulation of a schedule takes less than its bound, which is close where one lane sends all the time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.bounds.schedules import least_of_schedule_s
from sim.simulate import simulate
from tasp_lab.core.choices import Pass
from tasp_lab.prediction import evaluate
from tasp_lab.prediction.evaluate import Built, build
from tasp_lab.prediction.question import Question, prepare
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.registry import NOT_APPLICABLE, attention_names_on, options_for
from tasp_lab.workload.layer import Workload

MACHINES = {"h100-8": "auto", "h100-2x4": "auto", "h100-4x2": "auto", "mi300x-8": "auto", "full-mesh:8": "gloo",
            "torus:2x4": "ideal", "l20-8-pcie": "auto", "switch:8": "auto"}  # fmt: skip
NAMES = attention_names_on(8, variants=True)


def built_on(machine: str, name: str, layer: Workload, passes: Pass = "both") -> Built | None:
    """The schedules; None if they do not apply."""
    question = Question(machine, name, layer, options_for(name, AttentionOptions(passes)), library=MACHINES[machine])
    on = prepare(question)
    try:
        return build(question, on)
    except NOT_APPLICABLE:
        return None


def traffic_by_transfers(schedule: Schedule) -> dict[tuple[int, int, int], tuple[int, int]]:
    """All bytes between two ranks on a lane, and the most at one step, transfer by transfer."""
    total, most = Counter[tuple[int, int, int]](), Counter[tuple[int, int, int]]()
    for step in schedule.steps:
        here = Counter[tuple[int, int, int]]()
        for source, destination, lane, block in step.rows():
            here[source, destination, lane] += int(schedule.block_bytes[block])
        total.update(here)
        most |= here
    return {key: (total[key], most[key]) for key in total}


@given(
    st.sampled_from(sorted(MACHINES)), st.sampled_from(NAMES), st.integers(7, 20), st.sampled_from([(8, 8), (32, 4)]),
    st.sampled_from(["full", "causal"]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_no_simulation_takes_less_than_the_bound(
    machine: str, name: str, length: int, heads: tuple[int, int], mask: str
) -> None:
    layer = Workload(2**length, heads=heads[0], kv_heads=heads[1], mask=mask)  # type: ignore[arg-type]
    found = built_on(machine, name, layer)
    for candidate in () if found is None else found.candidates:
        for schedule in candidate.passes:
            traffic = schedule.traffic
            rows = zip(*(each.tolist() for each in traffic), strict=True)
            assert {row[:3]: row[3:] for row in rows} == traffic_by_transfers(schedule)
            sent = np.bincount(traffic.source, traffic.bytes, schedule.world_size)
            assert sent.tolist() == schedule.bytes_by_rank().tolist()
            time_s = float(simulate(schedule, candidate.machine, events=False).time_s)
            assert 0 < least_of_schedule_s(schedule, candidate.machine) <= time_s * (1 + 1e-9)


@given(
    st.sampled_from(sorted(MACHINES)), st.sampled_from(["ring-attention", "zigzag-ring-attention", "tasp", "usp:2x4"]),
    st.integers(7, 20), st.sampled_from([(8, 8), (32, 4)]), st.sampled_from(["full", "causal"]), st.booleans(),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_the_choice_is_that_of_all_simulations(
    machine: str, name: str, length: int, heads: tuple[int, int], mask: str, by_messages: bool
) -> None:
    """Also where the bound of messages alone decides which dataflows are simulated, as with many transfers."""
    layer = Workload(2**length, heads=heads[0], kv_heads=heads[1], mask=mask)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        if by_messages:
            patch.setattr(evaluate, "MANY_KEPT", 0)
        found = built_on(machine, name, layer)
        if found is None:
            return
        chosen = found.answer()
        alone = [replace(found, candidates=(one,)).answer() for one in found.candidates]
    assert all(one.quick_bound_s <= one.least_s for one in found.candidates)
    assert chosen.time_s == min(one.time_s for one in alone)
    passes = [one.schedule for one in chosen.passes]
    fastest = [one for one, answer in zip(found.candidates, alone, strict=True) if answer.time_s == chosen.time_s]
    assert passes in [[*one.passes] for one in fastest]


@pytest.mark.parametrize("name", ["zigzag-ring-attention", "burst", "kv-all-gather", "half-each-way"])
def test_the_bound_of_rings_between_nodes_is_close(name: str) -> None:
    """Messages of a few channels are far from filling a NIC: the bytes on the busiest one take half as long or less."""
    found = built_on("h100-4x2", name, Workload(2**19, heads=32, kv_heads=8, mask="causal"))
    assert found is not None
    time_s = float(found.answer().time_s)
    assert 0.7 * time_s < found.least_s <= time_s
