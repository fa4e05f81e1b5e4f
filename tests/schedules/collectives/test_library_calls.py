"""Collectives as libraries run them: sizes as nccl-tests counts them, rings as their channels go."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.event.engine import simulate
from sim.library_calls import library_call
from sim.simulate import simulate as simulate_by
from tasp_lab.core.errors import ScheduleError
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.machine import Machine
from tasp_lab.measure.readers.table import COLLECTIVES
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.collectives.library_rings import AROUND_RINGS, library_rings, library_schedule
from tasp_lab.schedules.collectives.tree_all_reduce import (
    double_binary_trees,
    library_nvls_tree_all_reduce,
    library_tree_all_reduce,
)
from tasp_lab.schedules.registry import COLLECTIVES as BY_NAME
from tasp_lab.topology.builders import full_mesh, nodes, switch
from tasp_lab.topology.graph import Topology


def sent_by_a_rank(schedule: Schedule) -> float:
    return float(schedule.bytes_sent().sum()) / schedule.world_size


TOPOLOGIES = [switch(8), full_mesh(5), nodes(2, 4, "switch"), nodes(3, 2), nodes(4, 1)]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda topology: topology.name)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_sizes_are_those_of_nccl_tests(collective: str, topology: Topology) -> None:
    """Bytes that a rank sends, by the bus bandwidth factors of nccl-tests (doc/PERFORMANCE.md)."""
    n, size = topology.world_size, 2**12 * topology.world_size
    factor = {"all_reduce": 2 * (n - 1) / n, "sendrecv": 1}.get(collective, (n - 1) / n)
    schedule = library_schedule(collective, topology, size)  # type: ignore[arg-type]
    assert sent_by_a_rank(schedule) == pytest.approx(factor * size)
    assert schedule.fused == (collective in AROUND_RINGS)


@pytest.mark.parametrize(
    ("topology", "rings"),
    [(switch(8), 1), (nodes(10, 1), 1), (nodes(10, 8, "switch"), 8), (nodes(2, 8), 8), (full_mesh(8), 7),
     (nodes(4, 2, "switch", "rails"), 2)],
    ids=lambda value: getattr(value, "name", value),
)  # fmt: skip
def test_as_many_rings_as_nics_or_as_links_of_a_rank(topology: Topology, rings: int) -> None:
    found = library_rings(topology)
    assert found.shape == (rings, topology.world_size)
    assert (np.sort(found, axis=1) == np.arange(topology.world_size)).all()


def test_every_ring_uses_other_nics() -> None:
    u, m = 3, 4
    rings = library_rings(nodes(u, m, "switch"))
    leaving = [
        (int(a), node) for ring in rings for a, b in zip(ring, np.roll(ring, -1), strict=True)
        if (node := int(a) // m) != int(b) // m
    ]  # fmt: skip
    assert sorted(rank for rank, _ in leaving) == list(range(u * m))


@given(st.integers(1, 6), st.sampled_from(sorted(AROUND_RINGS)))
def test_pieces_change_nothing_where_nothing_is_waited_for(chunks: int, collective: str) -> None:
    mesh = switch(4, 1e9, 0.0)
    times = [
        float(simulate(library_schedule(collective, mesh, 2**16, chunks=count), Machine(mesh)).time_s)  # type: ignore[arg-type]
        for count in (1, chunks)
    ]
    assert times[1] == pytest.approx(times[0])


@given(st.integers(2, 8))
def test_pieces_hide_latency(chunks: int) -> None:
    """The next chunk is under way while one arrives, so latency is waited for once, not at every step."""
    mesh = switch(4, 1e9, 1e-6)
    whole_s, cut_s = (
        float(simulate(library_schedule("all_gather", mesh, 2**20, chunks=count), Machine(mesh)).time_s)
        for count in (1, chunks)
    )
    assert whole_s - cut_s == pytest.approx(2e-6)


@pytest.mark.parametrize("collective", [name for name in COLLECTIVES if name != "sendrecv"])
def test_fewer_bytes_than_ranks(collective: str) -> None:
    with pytest.raises(ScheduleError, match=f"{collective} of 7 bytes, expected at least one per rank: 8"):
        library_schedule(collective, switch(8), 7)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "collective"), [(n, s.library_call) for n, s in BY_NAME.items() if s.library_call])
def test_the_names_of_the_command_line_are_the_same_schedules(name: str, collective: str) -> None:
    topology = switch(4) if name == "library-switch-all-reduce" else nodes(2, 2, "switch")
    found = BY_NAME[name].builder(topology, 64)
    known = library_schedule(collective, topology, 256, algorithm=found.algorithm)  # type: ignore[arg-type]
    assert found.name == name
    assert found.fused
    assert [step.rows() for step in found.steps] == [step.rows() for step in known.steps]


def test_one_rank_has_nobody_to_send_to() -> None:
    with pytest.raises(ScheduleError, match="all_gather of one rank sends nothing"):
        library_schedule("all_gather", switch(1), 64)


@given(st.integers(2, 200))
def test_two_trees_use_every_node_and_share_the_work(count: int) -> None:
    """Each has one root and at most two children per node; with an even number no node has children in both."""
    trees = double_binary_trees(count)
    inner = []
    for parent in trees:
        assert (parent < 0).sum() == 1
        assert np.bincount(parent[parent >= 0], minlength=count).max() <= 2
        reached = np.arange(count)
        for _ in range(2 * count.bit_length()):
            reached = np.where(parent[reached] >= 0, parent[reached], reached)
        assert len(set(reached.tolist())) == 1  # all ways lead to the root
        inner.append(set(parent[parent >= 0].tolist()))
    assert len(inner[0] & inner[1]) <= count % 2


TREES = [library_tree_all_reduce, library_nvls_tree_all_reduce]


@pytest.mark.parametrize("tree", TREES)
@given(count=st.integers(1, 5), ranks=st.integers(1, 4), shard=st.integers(2, 2**22))
@settings(max_examples=25)
def test_a_tree_sends_each_byte_up_and_down_once_per_hop(
    tree: Callable[..., Schedule], count: int, ranks: int, shard: int
) -> None:
    """Each rank but the root gives every chunk once and receives its sum once: 2 (n - 1) messages of bytes."""
    if count * ranks < 2:
        return
    found = tree(nodes(count, ranks, "switch"), shard)
    n = count * ranks
    assert found.bytes_sent().sum() == 2 * (n - 1) * n * shard
    given_bytes = sum(found.block_bytes[step.block[step.gives]].sum() for step in found.steps)
    assert given_bytes == (n - 1) * n * shard


@pytest.mark.parametrize("tree", TREES)
@given(count=st.integers(2, 9), ranks=st.integers(1, 4), shard=st.integers(2**10, 2**22))
@settings(max_examples=25)
def test_a_rank_sends_to_all_its_children_at_once(
    tree: Callable[..., Schedule], count: int, ranks: int, shard: int
) -> None:
    """Messages of a lane follow each other, so those of one step have a lane each."""
    for step in tree(nodes(count, ranks, "switch"), shard).steps:
        lanes = list(zip(step.source.tolist(), step.lane.tolist(), strict=True))
        assert len(set(lanes)) == len(lanes)


@given(st.sampled_from(["h100", "h200", "b200", "a100"]), st.integers(2, 8), st.integers(20, 33))
@settings(max_examples=25)
def test_no_all_reduce_over_nodes_is_faster_than_inside_one(name: str, count: int, doublings: int) -> None:
    """At equal bytes; more nodes add hops, and no rank has fewer bytes to send.

    NCCL cuts a call of 512 MiB in one node into smaller chunks than over nodes; it is predicted 5 to 6 % too slow.
    """
    one, many = (
        float(simulate_by(library_call("all_reduce", machine, 2**doublings), machine).time_s)
        for machine in (load_machine(f"{name}-8"), load_machine(f"{name}-{count}x8"))
    )
    assert many >= (0.94 if doublings == 29 else 1) * one


@pytest.mark.parametrize("name", ["h100-4", "gh200-2x4", "h100-2x4"])
def test_both_engines_time_calls_by_switches_and_trees_alike(name: str) -> None:
    machine = load_machine(name)
    for size in (2**16, 2**26):
        schedule = library_call("all_reduce", machine, size)
        times_s = [float(simulate_by(schedule, machine, engine).time_s) for engine in ("simpy", "array")]
        assert times_s[0] == pytest.approx(times_s[1], rel=1e-9)
