"""Laws of NCCL's files, read by readers of their own."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import Counter

import pytest

from tasp_lab.core.errors import ScheduleError
from tasp_lab.formats import nccl
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.machine import Machine
from tasp_lab.rings.decompose import decompose
from tasp_lab.schedules.build import collective
from tasp_lab.schedules.collectives.all_gather import multi_ring_all_gather
from tasp_lab.topology.builders import full_mesh, nodes
from tests.formats.worlds import SHARD_BYTES

MACHINES = ("dgx-1v", "mi300x-8", "full-mesh:5", "torus:3x3", "hypercube:3", "ring:6")


@pytest.mark.parametrize("name", MACHINES)
def test_channels_are_rings_whose_links_exist_and_are_not_overloaded(name: str) -> None:
    """Speeds are of a channel: no link carries more than its bandwidth, and some link carries all of it."""
    topology = load_machine(name).topology
    schedule = multi_ring_all_gather(topology, SHARD_BYTES, decompose(topology))
    (graph,) = ElementTree.fromstring(nccl.graph(schedule, topology))
    channels = [[int(gpu.get("dev") or "", 16) for gpu in channel] for channel in graph]
    assert (graph.get("pattern"), int(graph.get("nchannels") or "")) == ("4", len(channels))
    load: Counter[int] = Counter()
    for ring in channels:
        assert sorted(ring) == list(range(topology.world_size))
        for source, destination in zip(ring, [*ring[1:], ring[0]], strict=True):
            load.update(topology.route(source, destination).constraints)
    speed = float(graph.get("speedintra") or "") * 1e9
    shares = [
        count * speed / float(topology.constraints[number].bandwidth_bytes_per_s) for number, count in load.items()
    ]
    assert max(shares) == pytest.approx(1, rel=1e-5)


def test_what_a_graph_cannot_have_is_refused() -> None:
    with pytest.raises(ScheduleError, match="does not go around rings"):
        nccl.graph(collective("direct", full_mesh(4), 64), full_mesh(4))
    with pytest.raises(ScheduleError, match="has several nodes, expected one"):
        nccl.graph(collective("ring", nodes(2, 2), 64), nodes(2, 2))
    with pytest.raises(ScheduleError, match="has 39 rings, expected at most 32"):
        nccl.graph(collective("multi-ring", full_mesh(40), 40 * 39 * 4096), full_mesh(40))


def test_rules_cover_all_collectives_and_sizes() -> None:
    """As the plug-in reads them: by commas, comments in the first column, the first rule that matches."""
    machine = load_machine("h100-2x8")
    for name, algorithm in (("library-tree-all-reduce", "tree"), ("library-ring-all-reduce", "ring")):
        text = nccl.tuner_rules(collective(name, machine.topology, 2**20), machine)
        rules = [line.split(",") for line in text.splitlines() if not line.startswith("#")]
        assert {rule[0] for rule in rules} == {"broadcast", "reduce", "allgather", "reducescatter", "allreduce"}
        assert all((int(rule[1]), int(rule[2])) == (0, 2**64 - 1) and int(rule[5]) > 0 for rule in rules)
        assert all(rule[6:] == ["2", "16"] for rule in rules)
        assert all(len(line) < 256 for line in text.splitlines())
        (chosen,) = (rule[3] for rule in rules if rule[0] == "allreduce")
        assert chosen == algorithm


def test_schedules_of_others_have_no_rule() -> None:
    with pytest.raises(ScheduleError, match="is not an algorithm of NCCL, expected library-"):
        nccl.tuner_rules(collective("multi-ring", full_mesh(4), 64), Machine(full_mesh(4)))
    with pytest.raises(ScheduleError, match="is not an algorithm of NCCL"):
        nccl.tuner_rules(collective("all-to-all", full_mesh(4), 64), Machine(full_mesh(4)))
