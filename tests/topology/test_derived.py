"""Links that fail or become slow: only what is named changes, in any order, and what cannot be is refused in a line."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from fractions import Fraction
from itertools import permutations

import networkx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tasp_lab.core.errors import TaspLabError, TopologyError
from tasp_lab.topology.builders import circulant, full_mesh, nodes, ring, switch, torus
from tasp_lab.topology.derived import between_groups, equal_parts, induced, renumbered
from tasp_lab.topology.graph import Route, SharedCapacity, Topology, Vertex, both_ways
from tasp_lab.topology.links import MeshLinks
from tests.support.links import with_links, without_links
from tests.support.routes import direct
from tests.support.strategies import complete_topologies

GB = 10**9


def awkward() -> Topology:
    """Switches with '-', '>' and '=' in their names, some of which are parts of others, and capacities over links."""
    cables: list[tuple[Vertex, Vertex]] = [
        (0, "a"), (1, "a"), (2, "a-b"), ("a", "a-b"), ("a-b", "a-b-c"), (0, "a-b-c"), (1, "x>y"), (2, "x>y"), (0, 1),
        (2, "x=y"),
    ]  # fmt: skip
    links = tuple(link for a, b in cables for link in both_ways(a, b, 50.0 * GB, 1e-6))
    shared = (
        SharedCapacity("bus", 60.0 * GB, ("0->a", "a->0", "0->1")),
        SharedCapacity("port", 70.0 * GB, ("a->a-b",)),
    )
    return Topology("awkward", 3, links, shared)


few_topologies = st.sampled_from([
    full_mesh(4), switch(3), ring(5), torus((3, 3)), circulant(7, (1, 2)), nodes(2, 3), nodes(2, 2, "switch", "rails"),
    awkward(),
])  # fmt: skip

TopologyAndNames = tuple[Topology, list[str]]


@st.composite
def named_links(draw: st.DrawFn) -> TopologyAndNames:
    """A topology and some of its links by name, one way or both."""
    topology = draw(few_topologies)
    links = draw(st.lists(st.sampled_from(tuple(topology.links)), min_size=1, max_size=4, unique=True))
    return topology, [f"{link.source}{draw(st.sampled_from('->'))}{link.destination}" for link in links]


def meant(topology: Topology, name: str) -> set[str]:
    """The links that a name may mean, by trying all pairs of vertices: ``A>B`` one way, ``A-B`` both."""
    found = set()
    for a, b in permutations(topology.vertices, 2):
        found |= {f"{a}->{b}"} if name == f"{a}>{b}" else {f"{a}->{b}", f"{b}->{a}"} if name == f"{a}-{b}" else set()
    return found & {link.name for link in topology.links}


def content(topology: Topology) -> tuple[object, ...]:
    """All of a topology but its name."""
    return topology.world_size, tuple(topology.links), topology.shared


# Links left out


@given(named_links())
def test_only_the_named_links_are_left_out(case: TopologyAndNames) -> None:
    topology, names = case
    gone = set().union(*(meant(topology, name) for name in names))
    try:
        changed = without_links(topology, names)
    except TopologyError as error:
        told = str(error)
        assert "is not connected" in told or "expected each part once" in told
        assert len(told.splitlines()) == 1
        return
    assert tuple(changed.links) == tuple(link for link in topology.links if link.name not in gone)
    assert changed.name == f"{topology.name} without {', '.join(f'link.{name}' for name in names)}"
    assert set(changed.vertices) <= set(topology.vertices)


@given(named_links())
def test_shared_capacities_shrink_to_the_links_that_are_left(case: TopologyAndNames) -> None:
    """They keep their names, bandwidths and order, and go when none of their links is left."""
    topology, names = case
    gone = set().union(*(meant(topology, name) for name in names))
    with contextlib.suppress(TopologyError):
        left = [(each, tuple(name for name in each.links if name not in gone)) for each in topology.shared]
        expected = tuple(replace(each, links=links) for each, links in left if links)
        assert without_links(topology, names).shared == expected


def test_a_switch_without_links_is_gone() -> None:
    assert without_links(awkward(), ["1-x>y", "2-x>y"]).vertices == (0, 1, 2, "a", "a-b", "a-b-c", "x=y")


def test_names_of_switches_may_contain_the_marks() -> None:
    def left_out(name: str) -> set[str]:
        return {link.name for link in awkward().links} - {link.name for link in without_links(awkward(), [name]).links}

    assert left_out("a-a-b") == {"a->a-b", "a-b->a"}
    assert left_out("a-b-a-b-c") == {"a-b->a-b-c", "a-b-c->a-b"}
    assert left_out("0-a-b-c") == {"0->a-b-c", "a-b-c->0"}
    assert left_out("1-x>y") == {"1->x>y", "x>y->1"}
    assert left_out("0-a") == {"0->a", "a->0"}


@given(few_topologies)
def test_no_changes_change_nothing(topology: Topology) -> None:
    assert without_links(topology, []) is topology


# Order


@given(named_links())
def test_the_order_of_links_left_out_does_not_matter(case: TopologyAndNames) -> None:
    topology, names = case
    try:
        changed = content(without_links(topology, names))
    except TopologyError:
        changed = ()
    for other in permutations(names):
        if changed:
            assert content(without_links(topology, other)) == changed
        else:
            with pytest.raises(TopologyError):
                without_links(topology, other)


# What is refused


@pytest.mark.parametrize(
    "name",
    [
        "0-9",
        "0>9",
        "9>0",
        "0-0",
        "0",
        "",
        "-",
        ">",
        "0-",
        ">1",
        "0--1",
        "0->1",
        "0 - 1",
        "00-1",
        "0-1-2",
        "a-b",
        "0\n-1",
        "0,1",
    ],
)
def test_a_link_that_does_not_exist_is_named(name: str) -> None:
    expected = r"^(full-mesh:4 has no link .*, expected two of its ranks|without 'link\..*expected a part such as)"
    with pytest.raises(TopologyError, match=expected) as error:
        without_links(full_mesh(4), [name])
    assert len(str(error.value).splitlines()) == 1


def test_one_way_where_the_link_goes_the_other_way() -> None:
    with pytest.raises(TopologyError, match="ring:4 has no link '1>0'"):
        without_links(ring(4), ["1>0"])


@pytest.mark.parametrize(
    ("topology", "names", "telling"),
    [
        (ring(4), ["0>1"], r"no way from rank 0 to rank 1 and back"),
        (full_mesh(3), ["0-1", "0-2"], r"no way from rank 0 to rank 1 and back"),
        (switch(3), ["2>switch"], r"no way from rank 0 to rank 2 and back"),
        (nodes(2, 2), ["0-network", "1-network"], r"no way from rank 0 to rank 2 and back"),
        (awkward(), ["2>x>y", "1>x>y"], r"no way from rank 0 to switch 'x>y' and back"),
    ],
)
def test_changes_that_cut_off_a_vertex(topology: Topology, names: list[str], telling: str) -> None:
    with pytest.raises(TopologyError, match=telling) as error:
        without_links(topology, names)
    assert f"{topology.name} without {', '.join(f'link.{name}' for name in names)}" in str(error.value)


@given(st.text(max_size=8), st.sampled_from([full_mesh(3), awkward()]))
def test_any_text_is_a_link_or_refused_in_a_line(text: str, topology: Topology) -> None:
    try:
        changed = without_links(topology, [text])
    except TaspLabError as error:
        told = str(error)
        assert len(told.splitlines()) == 1
    else:
        assert len(changed.name.splitlines()) == 1


# Parts of a topology: the routes among some ranks are those of the whole, and nothing else is left.


topologies = st.sampled_from([
    full_mesh(5), switch(4), ring(4), torus((3, 3)), circulant(7, (1, 2)), nodes(2, 3), nodes(2, 2, "switch", "rails"),
    with_links(full_mesh(4), ["0>3=10GB/s"]), awkward(),
])  # fmt: skip


@st.composite
def parts(draw: st.DrawFn) -> tuple[Topology, list[int], Topology]:
    """A topology, some of its ranks in any order, and their part."""
    topology = draw(topologies)
    ranks = draw(st.permutations(range(topology.world_size)))[: draw(st.integers(1, topology.world_size))]
    try:
        return topology, ranks, induced(topology, ranks)
    except TopologyError:
        assume(False)
        raise


def numbers_of(topology: Topology, route: Route) -> tuple[float, list[float]]:
    """The latency of a route and the bandwidths of its constraints."""
    bandwidths = [float(topology.constraints[each].bandwidth_bytes_per_s) for each in route.constraints]
    return float(route.latency_s), bandwidths


@given(parts())
def test_routes_are_those_of_the_whole(case: tuple[Topology, list[int], Topology]) -> None:
    topology, ranks, part = case
    for a, b in permutations(range(len(ranks)), 2):
        assert part.has_route(a, b) == topology.has_route(ranks[a], ranks[b])
        if topology.linked_pairs[ranks[a], ranks[b]]:
            expected = numbers_of(topology, topology.route(ranks[a], ranks[b]))
            assert numbers_of(part, part.route(a, b)) == expected


@given(parts())
def test_every_link_is_on_a_route_and_nodes_are_kept(case: tuple[Topology, list[int], Topology]) -> None:
    topology, ranks, part = case
    used = {each for a, b in part.rank_pairs() for each in part.route(a, b).constraints}
    linked = topology.linked_pairs[np.ix_(ranks, ranks)]
    assume(networkx.is_strongly_connected(networkx.from_numpy_array(linked, create_using=networkx.DiGraph)))
    assert used == set(range(len(part.links) + len(part.shared)))
    for a, b in permutations(range(len(ranks)), 2):
        together = topology.node_of_rank[ranks[a]] == topology.node_of_rank[ranks[b]]
        assert (part.node_of_rank[a] == part.node_of_rank[b]) == together
    whole, left = set(topology.switch_kinds.values()), set(part.switch_kinds.values())
    assert left <= whole


def test_ranks_that_forward_for_a_part_are_its_switches() -> None:
    """From 0 over 4 to 5, and from 5 over 1 to 0."""
    part = induced(torus((4, 4), 50, 1), [0, 5])
    assert [link.name for link in part.links] == ["0->switch0", "switch1->0", "switch0->1", "1->switch1"]
    assert part.route(0, 1).latency_s == 2


def test_all_ranks_of_a_mesh_are_the_mesh() -> None:
    assert induced(full_mesh(6), range(6)).links == full_mesh(6).links
    assert set(induced(full_mesh(6), [5, 1, 2]).links) == set(full_mesh(3).links)


@pytest.mark.parametrize(
    ("topology", "groups"),
    [
        (full_mesh(6), [[0, 1, 2], [3, 4, 5]]),
        (nodes(3, 2, "switch"), [[0, 1], [2, 3], [4, 5]]),
        (nodes(2, 3, "switch", "rails"), [[0, 3], [1, 4], [2, 5]]),
        (torus((3, 4)), [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]),
        (torus((3, 4)), [[0, 4, 8], [3, 7, 11]]),
    ],
)
def test_equal_groups_have_one_part(topology: Topology, groups: list[list[int]]) -> None:
    part = equal_parts(topology, np.array(groups))
    assert all(part == induced(topology, group) for group in groups)


@pytest.mark.parametrize(
    ("topology", "groups", "telling"),
    [
        (direct(without_links(full_mesh(4), ["2>3"])), [[0, 1], [2, 3]], "not connected: no way from rank 0 to rank 1"),
        (without_links(full_mesh(6), ["3>4"]), [[0, 1, 2], [3, 4, 5]],
         "ranks 3, 4, 5 have other links among them than ranks 0, 1, 2, expected the same in each group"),
        (with_links(nodes(2, 2), ["2-3=1GB/s"]), [[0, 1], [2, 3]], "ranks 2, 3 have other links"),
        (nodes(2, 6), [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 11]], "ranks 0, 1, 2, ..., 11 have other links"),
    ],
)  # fmt: skip
def test_groups_with_other_links_are_refused(topology: Topology, groups: list[list[int]], telling: str) -> None:
    with pytest.raises(TopologyError, match=telling):
        equal_parts(topology, np.array(groups))


# Other numbers of ranks: the same links, routes, shared capacities and nodes between the ranks they stand for.


@st.composite
def cases(draw: st.DrawFn) -> tuple[Topology, list[int]]:
    """A topology, with capacities shared by some of its links, and an order of its ranks."""
    topology = draw(complete_topologies(6))
    names = [link.name for link in topology.listed_links()]
    if names and draw(st.booleans()):
        covered = draw(st.lists(st.sampled_from(names), min_size=1, max_size=4, unique=True))
        topology = replace(topology, shared=(SharedCapacity("bus", 7, tuple(covered)),))
    return topology, draw(st.permutations(range(topology.world_size)))


@settings(max_examples=60, deadline=None)
@given(cases())
def test_routes_are_those_of_the_ranks_that_the_numbers_stand_for(case: tuple[Topology, list[int]]) -> None:
    topology, order = case
    found = renumbered(topology, np.array(order))
    assert found.name == topology.name
    for a in range(found.world_size):
        assert found.node_of_rank[a] == topology.node_of_rank[order[a]] or not topology.nodes
        for b in range(found.world_size):
            if a == b:
                continue
            here, there = found.route(a, b), topology.route(order[a], order[b])
            bandwidths = [
                [each.constraints[index].bandwidth_bytes_per_s for index in route.constraints]
                for each, route in ((found, here), (topology, there))
            ]
            assert bandwidths[0] == bandwidths[1]
            assert here.latency_s == there.latency_s
    back = renumbered(found, np.argsort(order))
    assert (back.links, back.shared, back.nodes) == (topology.links, topology.shared, topology.nodes)


def test_a_mesh_remains_one_and_needs_no_list_of_its_links() -> None:
    found = renumbered(full_mesh(4096), np.arange(4096)[::-1])
    assert isinstance(found.links, MeshLinks)


def test_the_order_that_ranks_have_changes_nothing() -> None:
    topology = full_mesh(4)
    assert renumbered(topology, np.arange(4)) is topology


# A topology between groups: transfers of groups take as long as those of all equal members at once.


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
        between_groups(direct(ring(4)), 2)
    forwarded = between_groups(ring(4), 2)  # 0 and 1 forward what 1 sends to 3 and 0 to 2: all links, but once each
    assert [link.name for link in forwarded.links] == ["0->1", "1->0"]
    mesh = full_mesh(6)
    lacking = tuple(link for link in mesh.listed_links() if link.name != "3->1")
    names = [link.name for link in between_groups(Topology("lacking", 6, lacking), 2).links]
    assert names == [f"{a}->{b}" for a in range(3) for b in range(3) if a != b and (a, b) != (1, 0)]


def test_latency_is_that_of_the_slowest_member() -> None:
    rails = nodes(2, 2, network="rails", nic_latency_s=Fraction(3))
    slower = rails.map_links(lambda _, link: link)
    assert np.unique([link.latency_s for link in between_groups(slower, 2).links]).tolist() == [3.0]
