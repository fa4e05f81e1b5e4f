"""The critical path of classes of operations is that of the timeline."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sim.array import engine
from sim.array.path import critical_parts
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.machine import CommLibrary, Machine
from tasp_lab.schedules.build import collective
from tasp_lab.schedules.collectives.kinds import NcclTestsName
from tasp_lab.schedules.collectives.library_rings import library_schedule
from tasp_lab.timeline.critical_path import critical_path, kind_of
from tasp_lab.topology.graph import Topology
from tests.support.simulations import launches, shards
from tests.support.strategies import topologies_and_schedules

some = settings(max_examples=60)


@some
@given(topologies_and_schedules(max_ranks=6), shards, launches)
def test_its_parts_add_up_to_the_time(case: tuple[Topology, str], shard: int, launch_s: float) -> None:
    topology, name = case
    schedule = collective(name, topology, shard)
    assume(schedule.transfers <= 400)
    run = engine.run(schedule, Machine(topology, CommLibrary("plain", launch_s)))
    assert sum(seconds for _, seconds in critical_parts(run)) == pytest.approx(run.time_s, rel=1e-9)


@some
@given(
    st.sampled_from(["h100-2x4", "h100-8", "mi300x-4", "b200-8"]),
    st.sampled_from(["all_gather", "all_reduce", "reduce_scatter", "alltoall", "sendrecv"]),
    st.integers(10, 30),
)
def test_it_is_that_of_the_events(name: str, what: NcclTestsName, power: int) -> None:
    """By kind: members of a class pass links of one kind."""
    machine = load_machine(name)
    run = engine.run(library_schedule(what, machine.topology, 2**power), machine, explain=True)
    found: list[dict[str, float]] = []
    for parts in (critical_parts(run), critical_path(run.timeline())):
        spent: dict[str, float] = {}
        for part, seconds in parts:
            kind = kind_of(part, machine.topology)
            spent[kind] = spent.get(kind, 0.0) + float(seconds)
        found.append(spent)
    assert found[0] == pytest.approx(found[1], rel=1e-9, abs=1e-15)
