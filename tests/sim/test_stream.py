"""The time of a layer step by step is that of the SimPy engine, or it is not given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.array import engine, stream, stream_loop
from sim.array.stream import stream_time_s
from sim.event.engine import simulate
from tasp_lab.core.compiled import call
from tasp_lab.machines.contention import NONE, Contention
from tasp_lab.machines.host import INSTANT_HOST
from tasp_lab.machines.machine import INSTANT, ComputeRate, Machine
from tasp_lab.schedule.dependencies import shapes_by_rank
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.backward import DATAFLOWS, Dataflow, attention_passes
from tasp_lab.schedules.attention.forward import CIRCULATIONS
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import attention_schedules
from tasp_lab.topology.builders import full_mesh, nodes, switch
from tasp_lab.workload.layer import Workload
from tests.support.contention import ChannelsByPair
from tests.support.simulations import Simulation, launches, simulations


class Apart(ChannelsByPair):
    """A library whose launches are independent, as those of NCCL."""

    serial_launch = False


def assert_streams_right(schedule: Schedule, machine: Machine) -> bool:
    """Whether there is a time; it is that of the SimPy engine then."""
    found_s = stream_time_s(schedule, machine, fast=False)
    if found_s is None:
        return False
    assert found_s == pytest.approx(float(simulate(schedule, machine).time_s), rel=1e-9, abs=0)
    return True


@settings(max_examples=100, deadline=None)
@given(simulations(), launches, st.booleans())
def test_any_schedule_on_any_machine(case: Simulation, launch_s: Fraction, issues: bool) -> None:
    host = case.machine.host if issues else INSTANT_HOST
    assert_streams_right(case.schedule, replace(case.machine, comm_library=Apart("apart", launch_s), host=host))


FABRICS = {
    "mesh": full_mesh(5, Fraction(5), Fraction(1, 7)),
    "wide switch": switch(6, Fraction(5), Fraction(1, 7)),
    "nodes": nodes(2, 4, link_bandwidth_bytes_per_s=Fraction(50), link_latency_s=Fraction(1, 9),
                   nic_bandwidth_bytes_per_s=Fraction(5), nic_latency_s=Fraction(1, 3)),
}  # fmt: skip


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("dataflow", DATAFLOWS)
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("slowed", [NONE, Contention(Fraction(12), 1, 4)], ids=["", "contention"])
def test_single_rings_stream_both_ways(fabric: str, dataflow: Dataflow, mask: str, slowed: Contention) -> None:
    """Each hop has links of its own; gradients may return over links that carry other messages."""
    topology = FABRICS[fabric]
    layer = Workload(96, heads=2, kv_heads=1, head_dim=2, mask=mask)
    machine = Machine(topology, Apart("apart", Fraction(1, 3)), ComputeRate(200), contention=slowed)
    for schedule in attention_passes("zigzag-ring-attention", topology, layer, dataflow=dataflow):
        assert assert_streams_right(schedule, machine)


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("dataflow", DATAFLOWS)
def test_rings_over_a_mesh_stream_both_ways(mask: str, dataflow: Dataflow) -> None:
    topology, slowed = full_mesh(5, Fraction(5), Fraction(1, 7)), Contention(Fraction(12), 1, 4)
    layer = Workload(80, heads=2, kv_heads=1, head_dim=2, mask=mask)
    machine = Machine(topology, Apart("apart", Fraction(1, 3)), ComputeRate(200), contention=slowed)
    for schedule in attention_passes("tasp", topology, layer, dataflow=dataflow):
        assert assert_streams_right(schedule, machine)


@pytest.mark.parametrize("launch_s", [Fraction(0), Fraction(1, 3)])
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("slowed", [NONE, Contention(Fraction(12), 1, 4)], ids=["", "contention"])
@pytest.mark.parametrize("name", ["tasp", "half-each-way", "direct-attention"])
def test_messages_share_ports(name: str, slowed: Contention, mask: str, launch_s: Fraction) -> None:
    """Each rank sends to several others through one port at once; without launches, ends and begins coincide."""
    topology = FABRICS["wide switch"]
    layer = Workload(144, heads=6, kv_heads=6, head_dim=2, mask=mask)
    machine = Machine(topology, Apart("apart", launch_s), ComputeRate(200), contention=slowed)
    options = AttentionOptions("forward" if name == "direct-attention" else "both")
    for schedule in attention_schedules(name, topology, layer, options=options):
        assert assert_streams_right(schedule, machine)


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("slowed", [NONE, Contention(Fraction(12), 1, 4)], ids=["", "contention"])
@pytest.mark.parametrize(("name", "options"), [
    ("token-ring", AttentionOptions("both")),
    ("kv-and-q-rings", AttentionOptions("both", travels="both")),
    ("direct-attention", AttentionOptions("both", stages=4)),
])  # fmt: skip
def test_queries_or_keys_and_sums_lie_in_buffers_of_two_pools(
    fabric: str, mask: str, slowed: Contention, name: str, options: AttentionOptions
) -> None:
    topology = FABRICS[fabric]
    layer = Workload(96, heads=2, kv_heads=1, head_dim=2, mask=mask)
    machine = Machine(topology, Apart("apart", Fraction(1, 3)), ComputeRate(200), contention=slowed)
    passes = attention_schedules(name, topology, layer, options=options)
    assert {len(each.blocks.pools) for each in passes} >= {2}
    for schedule in passes:
        assert assert_streams_right(schedule, machine)


@pytest.mark.parametrize("name", ["tasp", "zigzag-ring-attention"])
def test_a_message_that_starts_before_what_has_ended_is_tracked_further_ahead(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once everything of the steps that are tracked has ended, messages of the next one come too late."""
    seen: list[int] = []
    check = stream._Stream._check

    def noted(self: stream._Stream, status: int) -> None:
        seen.append(status)
        check(self, status)

    begin = stream._Stream

    def too_late(schedule: Schedule, machine: Machine, *numbers: Any) -> stream._Stream:
        *others, ahead, batch, fast = numbers
        return begin(
            schedule, machine, *others, ahead - 4 if ahead == schedule.blocks.pools[0].buffers else ahead, batch, fast
        )

    monkeypatch.setattr(begin, "_check", noted)
    monkeypatch.setattr(stream, "_Stream", too_late)
    topology = FABRICS["wide switch"]
    layer = Workload(144, heads=6, kv_heads=6, head_dim=2, mask="causal")
    machine = Machine(topology, Apart("apart"), ComputeRate(200), contention=Contention(Fraction(12), 1, 4))
    for schedule in attention_schedules(name, topology, layer, options=AttentionOptions("both")):
        assert assert_streams_right(schedule, machine)
    assert stream.LATE in seen


def test_serial_launches_are_left_to_the_event_loop() -> None:
    topology = FABRICS["mesh"]
    schedule = attention_schedules("tasp", topology, Workload(60, heads=1, head_dim=1, mask="full"))[0]
    machine = Machine(topology, ChannelsByPair("serial", Fraction(1)))
    assert stream_time_s(schedule, machine, fast=False) is None


@pytest.mark.parametrize("name", CIRCULATIONS)
def test_machine_code_gives_the_same_times_and_windows_grow(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for a part of a step, the window grows until it has what is tracked; nothing begins again."""
    monkeypatch.setattr(stream, "_BATCH", stream._SMALL_BATCH)  # else sums of channels may differ in the last bit
    topology = full_mesh(24, Fraction(5), Fraction(1, 7))
    schedule = attention_schedules(name, topology, Workload(480, heads=2, head_dim=2, mask="causal"))[0]
    machine = Machine(topology, Apart("apart"), ComputeRate(200), contention=Contention(Fraction(12), 1, 4))
    plain_s = stream_time_s(schedule, machine, fast=False)
    assert plain_s is not None
    assert stream_time_s(schedule, machine) == plain_s
    begun: list[stream.Window] = []
    sizes: list[int] = []
    begin, grow = stream.Window.of, stream.Window.with_room

    def noted(*numbers: Any) -> stream.Window:
        begun.append(begin(*numbers))
        return begun[-1]

    def grown(window: stream.Window) -> stream.Window:
        sizes.append(2 * len(window.operations))
        return grow(window)

    monkeypatch.setattr(stream.Window, "of", noted)
    monkeypatch.setattr(stream.Window, "with_room", grown)
    monkeypatch.setattr(stream, "_STEPS_KEPT", Fraction(1, 16))
    assert stream_time_s(schedule, machine) == plain_s
    assert len(begun) == 1
    assert sizes == sorted(set(sizes))
    assert len(sizes) > 2


@pytest.mark.parametrize("slowed", [NONE, Contention(Fraction(12), 1, 4)], ids=["", "contention"])
@pytest.mark.parametrize("name", ["tasp", "zigzag-ring-attention"])
def test_operations_that_nothing_waits_for_give_their_rows_back(
    name: str, slowed: Contention, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the end all operations have ended, and no row of edges is in use."""
    windows: list[stream.Window] = []

    def noted(function: Callable[..., Any], *arguments: Any, fast: bool) -> Any:
        windows.append(arguments[-1])
        return call(function, *arguments, fast=fast)

    monkeypatch.setattr(stream, "call", noted)
    monkeypatch.setattr(stream, "_FEW_STEPS_KEPT", 1)
    machine = Machine(FABRICS["mesh"], Apart("apart"), ComputeRate(200), contention=slowed)
    layer = Workload(240, heads=2, head_dim=2, mask="causal")
    for schedule in attention_schedules(name, machine.topology, layer, options=AttentionOptions("both")):
        assert stream_time_s(schedule, machine, fast=False) is not None
        last = windows[-1]
        assert last.operations["is_done"][
            np.arange(last.sizes[stream_loop.OLDEST], last.sizes[stream_loop.COUNT]) & last.mask
        ].all()
        assert last.sizes[stream_loop.EDGES] == 0


def test_large_layers_are_streamed_without_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop makes all operations at once; the stream keeps the shapes of calls that other columns count."""
    topology = FABRICS["mesh"]
    schedule = attention_schedules("tasp", topology, Workload(240, heads=2, head_dim=2, mask="causal"))[0]
    again = attention_schedules("tasp", topology, Workload(240, heads=2, head_dim=2, mask="causal"))[0]
    machine = Machine(topology, Apart("apart"), ComputeRate(200))
    monkeypatch.setattr(engine, "MANY", 10)
    with monkeypatch.context() as patch:
        patch.delattr(engine, "step_operations")
        time_s = engine.time_s(schedule, machine)
    assert time_s == pytest.approx(float(simulate(again, machine).time_s), rel=1e-9)
    assert shapes_by_rank(schedule) == shapes_by_rank(again)
    assert engine.time_s(again, Machine(topology, compute=INSTANT)) > 0


def test_progress_is_reported_in_stages() -> None:
    schedule = attention_schedules("ring-attention", full_mesh(30), Workload(60, heads=1, head_dim=1, mask="full"))[0]
    shares: list[float] = []
    assert stream_time_s(schedule, Machine(full_mesh(30)), shares.append, fast=False) is not None
    assert shares == sorted(shares)
    assert 0 < len(shares) < 20
    assert 0 < shares[0] < shares[-1] < 1
