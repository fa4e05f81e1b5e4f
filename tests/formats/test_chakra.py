"""Laws of Chakra traces: an independent reader finds all bytes, and every rank ends with all parts, in any order."""

from __future__ import annotations

from collections import defaultdict

import pytest

from experiments.tables import astra_sim
from sim.simulate import simulate
from tasp_lab.core.errors import ScheduleError
from tasp_lab.formats import chakra
from tasp_lab.machines.machine import Machine
from tasp_lab.schedules.build import attention_schedules, collective
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tests.formats.chakra_reader import execute, nodes
from tests.formats.worlds import schedules

WORLDS = schedules(3 * 2**20)


@pytest.mark.parametrize("name", WORLDS)
def test_a_trace_runs_to_its_end_and_moves_all_bytes(name: str) -> None:
    """Whichever node goes first; and what is sent is what was there at the start or came before."""
    schedule = WORLDS[name]
    traces = [nodes(trace) for trace in chakra.write(schedule)]
    moved: dict[tuple[int, int], int] = defaultdict(int)
    wanted: dict[tuple[int, int], int] = defaultdict(int)
    for seed in (0, 1):
        for source, destination, size_bytes in execute(traces, seed):
            moved[source, destination] += size_bytes
    for step in schedule.steps:
        for source, destination, _, block in step.rows():
            wanted[source, destination] += 2 * int(schedule.block_bytes[block])
    assert moved == wanted


def test_ids_are_unique_and_waits_are_of_the_same_trace() -> None:
    for trace in chakra.write(WORLDS["ring:4 ring-all-reduce"]):
        found = nodes(trace)
        ids = [node["id"] for node in found]
        assert len(ids) == len(set(ids))
        assert all(set(node["data_deps"]) <= set(ids) for node in found)


def test_a_hop_waits_for_the_one_before() -> None:
    """A ring of n ranks: n - 1 sends of each, and each but the first waits for exactly one receive."""
    for trace in chakra.write(collective("ring", full_mesh(5), 64)):
        sends = [node for node in nodes(trace) if node["type"] == 5]
        assert [len(node["data_deps"]) for node in sends] == [0, 1, 1, 1]


def test_a_layer_has_its_kernel_calls_as_nodes() -> None:
    layer = Workload(64, heads=1, head_dim=1, mask="full")
    (schedule,) = attention_schedules("ring-attention", full_mesh(4), layer)
    traces = [nodes(trace) for trace in chakra.write(schedule)]
    assert all(sum(node["type"] == 4 for node in trace) == 4 for trace in traces)
    assert len(list(execute(traces, 0))) > 0


def test_a_workload_is_one_collective() -> None:
    (node,) = nodes(chakra.workload(collective("ring-all-reduce", full_mesh(4), 64)))
    assert (node["type"], node["comm_type"], node["comm_size"]) == (7, 0, 256)
    with pytest.raises(ScheduleError, match="is no collective of ASTRA-sim"):
        chakra.workload(collective("send-recv", full_mesh(4), 64))


@pytest.mark.skipif(astra_sim.program() is None, reason="needs ASTRA-sim")
def test_astra_sim_agrees_where_messages_share_no_link() -> None:
    binary = astra_sim.program()
    assert binary is not None
    for name in ("ring", "multi-ring", "direct", "ring-all-reduce", "all-to-all"):
        topology = astra_sim.topologies()["FullyConnected"]
        schedule = collective(name, topology, 2**20)
        own_s = float(simulate(schedule, Machine(topology)).time_s)
        assert astra_sim.run(binary, "FullyConnected", schedule) == pytest.approx(own_s, rel=0.01)
