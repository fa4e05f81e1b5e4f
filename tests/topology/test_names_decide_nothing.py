"""Whatever switches, topologies and schedules are called, predictions and explanations are the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.simulate import simulate
from tasp_lab.core.errors import TopologyError
from tasp_lab.core.files import write_whole
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.importers.survey import Branch, pcie_parts
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.machine_file import topology_document
from tasp_lab.machines.profile import member
from tasp_lab.schedules.build import collective
from tasp_lab.schedules.collectives.library_rings import library_rings
from tasp_lab.timeline.critical_path import critical_path, kind_of
from tasp_lab.topology.builders import nodes, switch
from tasp_lab.topology.graph import Topology, Vertex, both_ways
from tasp_lab.topology.links import Switch

TOPOLOGIES = [
    switch(4),
    nodes(2, 4, "switch"),
    nodes(2, 4),
    nodes(2, 3, "switch", "rails"),
    nodes(3, 2, "full-mesh", "rails"),
    load_machine("a10-4-pcie").topology,
]
NAMES = st.lists(st.sampled_from([*"abcdefgh", "network", "node0", "rail7", "spine", "ib0", "channel", "torus:2x3"]),
                 min_size=8, max_size=8, unique=True)  # fmt: skip


def renamed(topology: Topology, names: list[str], kinds: bool = True) -> Topology:
    """The same graph with other names, and with or without the kinds of switches and the nodes of ranks."""
    new: dict[Vertex, str] = dict(zip(topology.table.switches, names, strict=False))
    links = tuple(replace(x, source=new.get(x.source, x.source), destination=new.get(x.destination, x.destination))
                  for x in topology.links)  # fmt: skip
    switches = tuple(Switch(new[each.name], each.kind) for each in topology.switches) if kinds else ()
    return Topology(names[-1], topology.world_size, links, (), switches, topology.nodes if kinds else ())


def seen(topology: Topology, name: str) -> tuple[object, ...]:
    """A predicted time, and what it went to by kinds."""
    transport = load_machine("h100-2x4").comm_library
    machine = Machine(topology, transport)
    schedule = replace(collective(name, topology, 2**20), name="any")
    timeline = simulate(schedule, machine, explain=True)
    path = [(kind_of(what, topology), float(seconds)) for what, seconds in critical_path(timeline)]
    return timeline.time_s, path, schedule.steps[0].rows()


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(TOPOLOGIES), NAMES, st.sampled_from(["ring", "library-ring", "library-ring-all-reduce"]),
       st.booleans())  # fmt: skip
def test_names_change_no_prediction(topology: Topology, names: list[str], schedule: str, kinds: bool) -> None:
    assert seen(renamed(topology, names, kinds), schedule) == seen(topology, schedule)


@pytest.mark.parametrize("topology", TOPOLOGIES[:-1], ids=lambda each: each.name)
def test_kinds_and_nodes_follow_from_the_graph(topology: Topology) -> None:
    bare = replace(topology, switches=(), nodes=())
    assert bare.switch_kinds == topology.switch_kinds
    assert bare.node_of_rank == topology.node_of_rank


def test_a_given_kind_counts_more_than_the_graph() -> None:
    pairs = tuple(link for a, b in ((0, 1), (2, 3)) for link in both_ways(a, b, 100e9, 0.0))
    gpus = [Branch("gpu", (), 1e9, rank) for rank in range(4)]
    tree = [Branch("cpu", (Branch("pcie", tuple(gpus[:2]), 1e9), Branch("pcie", tuple(gpus[2:]), 1e9)))]
    links, switches = pcie_parts(tree, 1e9, 0.0)
    topology = Topology("pairs", 4, (*pairs, *links), switches=tuple(switches))
    assert topology.switch_kinds == {"pcie0": "pcie", "pcie1": "pcie", "cpu0": "cpu"}
    assert topology.node_of_rank == (0, 0, 0, 0)
    assert replace(topology, switches=()).node_of_rank == (0, 0, 1, 1)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda each: each.name)
def test_files_carry_kinds_and_nodes(topology: Topology, tmp_path_factory: pytest.TempPathFactory) -> None:
    import json

    path = tmp_path_factory.mktemp("files") / "machine.json"
    write_whole(path, json.dumps(topology_document(Machine(topology))).encode())
    assert load_machine(str(path)).topology == topology


@pytest.mark.parametrize(
    ("switches", "ranks_nodes", "telling"),
    [
        ((Switch("b", "node"),), (), "switch 'b' has a kind, but no link"),
        ((Switch("a", "node"), Switch("a", "pcie")), (), "switch 'a' has several kinds"),
        ((Switch("a", "cable"),), (), "switch 'a' is of kind 'cable', expected one of node, network, pcie, cpu"),  # type: ignore[arg-type]
        ((), (0,), "nodes are"),
        ((), (0, 2), "nodes are"),
        ((), (0, -1), "nodes are"),
    ],
)
def test_kinds_and_nodes_that_cannot_be(
    switches: tuple[Switch, ...], ranks_nodes: tuple[int, ...], telling: str
) -> None:
    links = tuple(link for rank in (0, 1) for link in both_ways(rank, "a", 1.0, 0.0))
    with pytest.raises(TopologyError, match=telling):
        Topology("pair", 2, links, (), switches, ranks_nodes)


def test_nodes_of_unequal_sizes_are_no_nodes_of_the_library() -> None:
    inside = [(0, "x"), (1, "x"), (2, "x"), (3, "y"), (4, "y")]
    links = [link for a, b in (*inside, *((rank, "z") for rank in range(5))) for link in both_ways(a, b, 1e9, 0.0)]
    topology = Topology("uneven", 5, tuple(links))
    assert topology.node_of_rank == (0, 0, 0, 1, 1)
    assert (np.sort(library_rings(topology), axis=1) == np.arange(5)).all()


def test_profiles_know_their_nodes() -> None:
    hopper = member("h100-2x8")
    assert hopper is not None
    assert hopper.topology.node_of_rank == (0,) * 8 + (1,) * 8
