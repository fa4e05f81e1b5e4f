"""What is alike is found and proved: classes are equitable, few where a machine is symmetric, and change no time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sim.array import engine as array_engine
from sim.array.event_loop import Record, Run
from sim.array.operations import CALL, TRANSFER, Operations
from sim.array.quotient import program_of
from sim.array.symmetry import Classes, classes_of, coarse_classes, is_equitable, resource_use_of
from tasp_lab.core.units import Number
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.machine import CommLibrary, ComputeRate, Machine
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.forward import attention
from tasp_lab.schedules.build import attention_schedules, collective
from tasp_lab.schedules.collectives.all_gather import multi_ring_all_gather, ring_all_gather
from tasp_lab.topology.builders import full_mesh, nodes, ring, switch, torus
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload
from tests.support.links import with_links
from tests.support.simulations import assert_agree, libraries, uneven_topologies
from tests.support.strategies import complete_topologies

some = settings(max_examples=40)


def operations_of(schedule: Schedule, machine: Machine) -> Operations:
    return array_engine.operations_of(schedule, machine)[0]


def one_by_one(operations: Operations) -> Classes:
    """A class for each operation."""
    resources = len(resource_use_of(operations).label)
    return Classes(np.arange(len(operations.label)), np.arange(resources))


def counted_by_hand(operations: Operations, classes: Classes) -> bool:
    """The premises of the theorem, one member after the other."""
    resource_use, edges = resource_use_of(operations), operations.edges
    of_operation, of_resource = classes.of_operation.tolist(), classes.of_resource.tolist()
    seen: list[Counter[Hashable]] = [Counter() for _ in of_operation]
    seen_by_holder: list[Counter[Hashable]] = [Counter() for _ in of_resource]
    for before, after, *kind in np.stack([*edges, operations.delay]).T.tolist():
        seen[after][(*kind, of_operation[before])] += 1
    for operation, resource, role in np.stack(resource_use[:3]).T.tolist():
        seen[operation][of_resource[resource], role] += 1
        seen_by_holder[resource][of_operation[operation], role] += 1
    return _are_alike(of_operation, zip(operations.label.tolist(), seen, strict=True)) and _are_alike(
        of_resource, zip(resource_use.label.tolist(), seen_by_holder, strict=True)
    )


def _are_alike(classes: list[int], members: Iterable[tuple[int, Counter[Hashable]]]) -> bool:
    first: dict[int, object] = {}
    return all(first.setdefault(each, member) == member for each, member in zip(classes, members, strict=True))


# ---------------------------------------------------------------------------------------------------- equitability


@some
@given(complete_topologies(5).filter(lambda topology: topology.world_size > 1), st.data())
def test_what_is_not_equitable_is_noticed(topology: Topology, data: st.DataObject) -> None:
    """Two classes of the coarsest partition, or of the finest, are taken for one; or nothing is."""
    operations = operations_of(collective("ring", topology, 60), Machine(topology))
    found = data.draw(st.sampled_from([classes_of(operations), one_by_one(operations)]))
    pair = st.tuples(*(st.integers(0, int(found.of_operation.max())) for _ in range(2)))
    kept, lost = data.draw(pair)
    merged = found._replace(of_operation=np.where(found.of_operation == lost, kept, found.of_operation))
    numbered = Classes(np.unique(merged.of_operation, return_inverse=True)[1], merged.of_resource)
    assert is_equitable(operations, resource_use_of(operations), numbered) == counted_by_hand(operations, numbered)


@some
@given(uneven_topologies(("full-mesh", "switch"), max_ranks=4) | complete_topologies(4), libraries, st.integers(1, 60))
def test_refinement_alone_would_do(topology: Topology, library: CommLibrary, shard: int) -> None:
    """Random numbers that collide are the only reason to count; here none does."""
    operations = operations_of(ring_all_gather(topology, shard), Machine(topology, library))
    resource_use = resource_use_of(operations)
    found = coarse_classes(operations, resource_use)
    assert found is None or is_equitable(operations, resource_use, found)


# ------------------------------------------------------------------------------------------- what classes stand for


def assert_same_record(found: Record, expected: Record, number: Iterable[tuple[int, int]]) -> None:
    """Both say the same of operations, given by their numbers in each."""
    for mine, other in number:
        assert found.waited_for[mine] == expected.waited_for[other]
        for times, others in zip(found.times(), expected.times(), strict=True):
            assert times[mine] == pytest.approx(others[other], rel=1e-9)


@some
@given(complete_topologies(6), st.sampled_from(["ring", "multi-ring", "direct"]), libraries, st.integers(1, 400))
def test_members_do_what_their_class_does(topology: Topology, name: str, library: CommLibrary, shard: int) -> None:
    schedule = collective(name, topology, shard)
    operations = operations_of(schedule, Machine(topology, library))
    assume(len(operations.label) * operations.repeats <= 1000)
    classes = classes_of(operations)
    together, alone = (Run(program_of(operations, each)).run() for each in (classes, one_by_one(operations)))
    count, all_of_them = int(classes.of_operation.max(initial=-1)) + 1, len(operations.label)
    pairs = [
        (repeat * count + each, repeat * all_of_them + operation)
        for repeat in range(operations.repeats)
        for operation, each in enumerate(classes.of_operation.tolist())
    ]
    assert_same_record(together, alone, pairs)


# ---------------------------------------------------------------------------------------------- how many classes


def classes(schedule: Schedule, topology: Topology, launch_s: Number = 0) -> int:
    return array_engine.run(schedule, Machine(topology, CommLibrary("t", launch_s))).classes


@pytest.mark.parametrize("n", [2, 5, 8, 33])
def test_equal_hops_are_one_class(n: int) -> None:
    for topology in (full_mesh(n), switch(n), ring(n)):
        assert classes(collective("ring", topology, 60), topology) == 1
    for topology in (full_mesh(n), switch(n)):
        assert classes(collective("direct", topology, 60), topology) == 1
    assert classes(multi_ring_all_gather(full_mesh(n), 2**5 * 31 * 7 * 4 * 16), full_mesh(n)) == 1


def test_rings_whose_pieces_are_not_equal_are_two_classes() -> None:
    """8 bytes over 7 rings: one carries 2 of them."""
    assert classes(collective("multi-ring", full_mesh(8), 8), full_mesh(8)) == 2


def test_classes_do_not_grow_with_nodes() -> None:
    """They are those of a node: at most its 8 ranks times 8 rings."""
    found = []
    for count in (2, 3, 5, 12):
        topology = nodes(count, 8)
        found.append(classes(collective("multi-ring", topology, 8 * 60), topology))
    assert len(set(found)) == 1
    assert found[0] <= 64


def test_one_slow_link_makes_more_classes() -> None:
    mesh = full_mesh(6, Fraction(5), Fraction(1))
    slow = with_links(mesh, ["0>1=1B/s"])
    schedule = collective("ring", mesh, 60)
    assert classes(schedule, mesh) == 1
    assert classes(schedule, slow) > 1
    for topology in (mesh, slow):
        assert_agree(schedule, Machine(topology))


def test_lanes_are_told_apart_where_a_host_launches_them() -> None:
    mesh = full_mesh(6)
    schedule = collective("direct", mesh, 60)
    assert classes(schedule, mesh) == 1
    assert classes(schedule, mesh, 1e-6) == 5


def test_unequal_work_is_noticed_before_edges_are_visited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The halves of a causal mask are calls of two shapes, at steps that differ from rank to rank."""
    monkeypatch.setattr("sim.array.symmetry._Refinement.by_edges", None)
    machine = load_machine("h100-8")
    layer = Workload(2**16, heads=8, mask="causal")
    schedule = attention_schedules("tasp", machine.topology, layer)[0]
    operations, _ = array_engine.operations_of(schedule, machine)
    assert coarse_classes(operations, resource_use_of(operations)) is None


def test_ranks_with_equal_work_are_alike() -> None:
    """The calls and the transfers of one rank at each step, wherever the rank is."""
    n = 8
    topology, layer = torus((n,)), Workload(64 * n, head_dim=8, heads=1, mask="full")
    schedule = attention("ring-attention", topology, layer, buffers=2)
    found = array_engine.run(schedule, Machine(topology, compute=ComputeRate(1e9)))
    kinds = Counter(found.program.kinds)
    assert (kinds[TRANSFER], kinds[CALL]) == (n - 1, n)
    assert found.operations == n * found.classes


def test_large_worlds_are_few_classes() -> None:
    """134 million transfers between 512 ranks."""
    mesh = full_mesh(512)
    found = array_engine.run(collective("multi-ring", mesh, 511 * 2**10), Machine(mesh))
    assert (found.classes, found.operations) == (1, 512 * 511**2)
