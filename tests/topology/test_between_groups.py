"""A topology between groups: transfers of groups take as long as those of all equal members at once."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasp_lab.core.errors import TopologyError
from tasp_lab.topology.between_groups import between_groups
from tasp_lab.topology.builders import full_mesh, nodes, ring, switch
from tasp_lab.topology.graph import SharedCapacity, Topology
from tests.support.strategies import complete_topologies


def busiest_s(topology: Topology, transfers: list[tuple[int, int, int]]) -> Fraction:
    """The time that the busiest link, port or shared capacity takes for these bytes from rank to rank, exact."""
    used = [Fraction(0)] * len(topology.constraints)
    for source, destination, size_bytes in transfers:
        for index in topology.route(source, destination).constraints:
            used[index] += size_bytes
    rates = [Fraction(each.bandwidth_bytes_per_s) for each in topology.constraints]
    return max((x / rate for x, rate in zip(used, rates, strict=True)), default=Fraction(0))


@settings(max_examples=60, deadline=None)
@given(complete_topologies(), st.data())
def test_transfers_between_groups_take_as_long_as_those_of_all_members(topology: Topology, data: st.DataObject) -> None:
    n = topology.world_size
    members = data.draw(st.sampled_from([each for each in range(1, n + 1) if n % each == 0]))
    found = between_groups(topology, members)
    pairs = [(a, b) for a in range(n // members) for b in range(n // members) if a != b]
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=len(pairs), max_size=len(pairs)))
    groups = [(a, b, size) for (a, b), size in zip(pairs, sizes, strict=True)]
    ranks = [(a * members + m, b * members + m, size) for a, b, size in groups for m in range(members)]
    expected = busiest_s(topology, ranks)
    assert busiest_s(found, groups) >= expected
    per_node = topology.node_of_rank.count(0)
    if per_node % members == 0 or members % per_node == 0:  # else groups reach over nodes, not all alike
        assert busiest_s(found, groups) == expected


def test_members_have_an_equal_part_of_what_they_share() -> None:
    """One NIC of 6 B/s for the two ranks of a node: 3 B/s for each."""
    two = nodes(2, 2, nic_bandwidth_bytes_per_s=Fraction(100))
    nic = SharedCapacity("nic", Fraction(6), ("0->network", "1->network"))
    found = between_groups(Topology("one NIC", 4, two.links, (nic,)), 2)
    assert [link.bandwidth_bytes_per_s for link in found.links] == [3, 100]


def test_one_member_has_all_of_a_mesh_and_a_switch_becomes_ports() -> None:
    assert between_groups(full_mesh(6), 2).links == full_mesh(3).links
    found = between_groups(switch(6), 2)
    assert sorted(each.links for each in found.shared) == sorted(
        tuple(f"{a}->{b}" for a in range(3) for b in range(3) if a != b and g == (a, b)[side])
        for g in range(3) for side in (0, 1)
    )  # fmt: skip


def test_links_are_those_that_all_members_have() -> None:
    assert [link.name for link in between_groups(ring(4), 1).links] == ["0->1", "1->2", "2->3", "3->0"]
    with pytest.raises(TopologyError, match="is not connected"):
        between_groups(ring(4), 2)
    mesh = full_mesh(6)
    lacking = tuple(link for link in mesh.listed_links() if link.name != "3->1")
    names = [link.name for link in between_groups(Topology("lacking", 6, lacking), 2).links]
    assert names == [f"{a}->{b}" for a in range(3) for b in range(3) if a != b and (a, b) != (1, 0)]


def test_latency_is_that_of_the_slowest_member() -> None:
    rails = nodes(2, 2, network="rails", nic_latency_s=Fraction(3))
    slower = rails.map_links(lambda _, link: link)
    assert np.unique([link.latency_s for link in between_groups(slower, 2).links]).tolist() == [3.0]
