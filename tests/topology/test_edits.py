"""Links that fail or become slow: only what is named changes, in any order, and what cannot be is refused in a line."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tasp_lab.core.errors import QuantityError, TaspLabError, TopologyError
from tasp_lab.topology.builders import circulant, full_mesh, nodes, ring, switch, torus
from tasp_lab.topology.edits import with_links, without_links
from tasp_lab.topology.graph import Link, SharedCapacity, Topology, Vertex, both_ways

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
        assert "is not connected" in told
        assert len(told.splitlines()) == 1
        return
    assert tuple(changed.links) == tuple(link for link in topology.links if link.name not in gone)
    assert changed.name == f"{topology.name} without {', '.join(names)}"
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


def test_a_capacity_without_links_is_gone() -> None:
    assert [each.name for each in without_links(awkward(), ["0-a", "0>1"]).shared] == ["port"]
    assert [each.links for each in without_links(awkward(), ["a>a-b", "0>a"]).shared] == [("a->0", "0->1")]


def test_a_switch_without_links_is_gone() -> None:
    assert without_links(awkward(), ["1-x>y", "2-x>y"]).vertices == (0, 1, 2, "a", "a-b", "a-b-c", "x=y")


def test_one_direction_and_both() -> None:
    left = {link.name for link in full_mesh(4).links}
    assert {link.name for link in without_links(full_mesh(4), ["3>0"]).links} == left - {"3->0"}
    assert {link.name for link in without_links(full_mesh(4), ["3-0"]).links} == left - {"3->0", "0->3"}
    one_way = circulant(5, (1, 2))
    assert without_links(one_way, ["0-1"]).links == without_links(one_way, ["0>1"]).links


def test_names_of_switches_may_contain_the_marks() -> None:
    def left_out(name: str) -> set[str]:
        return {link.name for link in awkward().links} - {link.name for link in without_links(awkward(), [name]).links}

    assert left_out("a-a-b") == {"a->a-b", "a-b->a"}
    assert left_out("a-b-a-b-c") == {"a-b->a-b-c", "a-b-c->a-b"}
    assert left_out("0-a-b-c") == {"0->a-b-c", "a-b-c->0"}
    assert left_out("1-x>y") == {"1->x>y", "x>y->1"}
    assert left_out("0-a") == {"0->a", "a->0"}


# Other bandwidths


@given(named_links(), st.sampled_from(["10GB/s", "0.5GB/s", "400Gbit/s"]))
def test_only_the_named_links_change_and_only_in_bandwidth(case: TopologyAndNames, text: str) -> None:
    topology, names = case
    bandwidth = {"10GB/s": 10e9, "0.5GB/s": 0.5e9, "400Gbit/s": 50e9}[text]
    changed = with_links(topology, [f"{name}={text}" for name in names])
    named = set().union(*(meant(topology, name) for name in names))
    assert tuple(changed.links) == tuple(
        replace(link, bandwidth_bytes_per_s=bandwidth) if link.name in named else link for link in topology.links
    )
    assert changed.shared == topology.shared
    assert changed.name == f"{topology.name} with {', '.join(f'{name}={text}' for name in names)}"


@given(few_topologies)
def test_no_changes_change_nothing(topology: Topology) -> None:
    assert without_links(topology, []) is topology
    assert with_links(topology, []) is topology


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


@given(named_links(), st.data())
def test_the_order_of_bandwidths_does_not_matter(case: TopologyAndNames, data: st.DataObject) -> None:
    """Also where two options mean the same link: with different bandwidths they are refused, whichever comes first."""
    topology, names = case
    changes = [f"{name}={data.draw(st.sampled_from(['10GB/s', '20GB/s']))}" for name in names]
    results = set()
    for order in permutations(changes):
        try:
            results.add(content(with_links(topology, order)))
        except TopologyError as error:
            told = str(error)
            assert len(told.splitlines()) == 1
            results.add(())
    assert len(results) == 1


@given(named_links())
def test_leaving_out_and_slowing_down_commute(case: TopologyAndNames) -> None:
    topology, names = case
    slow = [f"{link.source}>{link.destination}=3GB/s" for link in tuple(topology.links)[::3]]
    kept = [
        change for change in slow if not any(meant(topology, name) & meant(topology, change[:-6]) for name in names)
    ]
    try:
        without = without_links(topology, names)
    except TopologyError:
        assume(False)
        raise
    assert content(with_links(without, kept)) == content(without_links(with_links(topology, kept), names))


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
    for change, text in ((without_links, name), (with_links, f"{name}=1GB/s")):
        with pytest.raises(TopologyError, match=r"^full-mesh:4 has no link .*, expected two of its ranks") as error:
            change(full_mesh(4), [text])
        assert len(str(error.value).splitlines()) == 1


def test_one_way_where_the_link_goes_the_other_way() -> None:
    with pytest.raises(TopologyError, match="ring:4 has no link '1>0'"):
        without_links(ring(4), ["1>0"])


@pytest.mark.parametrize("change", ["0-3", "", "0-3 10GB/s"])
def test_a_change_without_a_bandwidth(change: str) -> None:
    with pytest.raises(TopologyError, match="expected a link and its bandwidth, like 0-3=10GB/s"):
        with_links(full_mesh(4), [change])


@pytest.mark.parametrize(
    "bandwidth",
    ["", "10", "GB/s", "-1GB/s", "0GB/s", "10GB", "10 GB/s/s", "nanGB/s", "infGB/s", "1e30GB/s", "1e-30B/s", "=1GB/s"],
)
def test_a_bandwidth_that_is_none(bandwidth: str) -> None:
    with pytest.raises((QuantityError, TopologyError)) as error:
        with_links(full_mesh(4), [f"0-3={bandwidth}"])
    assert len(str(error.value).splitlines()) == 1


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
    assert f"{topology.name} without {', '.join(names)}" in str(error.value)


def test_a_link_that_is_gone_cannot_be_slow() -> None:
    with pytest.raises(TopologyError, match="full-mesh:4 without 0-3 has no link '0-3'"):
        with_links(without_links(full_mesh(4), ["0-3"]), ["0-3=10GB/s"])


@given(st.text(max_size=8), st.sampled_from([full_mesh(3), awkward()]))
def test_any_text_is_a_link_or_refused_in_a_line(text: str, topology: Topology) -> None:
    for change in (without_links, with_links):
        try:
            changed = change(topology, [text])
        except TaspLabError as error:
            told = str(error)
            assert len(told.splitlines()) == 1
        else:
            assert len(changed.name.splitlines()) == 1


def test_a_name_is_one_line_whatever_surrounds_the_bandwidth() -> None:
    """It is part of later messages, each of which is one line."""
    assert with_links(full_mesh(4), ["0-3= 10GB/s\n"]).name.isprintable()


def test_a_link_between_switches_of_every_vertex_type() -> None:
    ends: list[tuple[Vertex, Vertex]] = [(0, "left"), (1, "right"), ("left", "right")]
    links = tuple(link for a, b in ends for link in both_ways(a, b, 1.0 * GB, 0.0))
    changed = with_links(Topology("pair", 2, links), ["left-right=0.5GB/s"])
    slow = [link for link in changed.links if link.bandwidth_bytes_per_s == 0.5e9]
    assert slow == [Link("left", "right", 0.5e9, 0.0), Link("right", "left", 0.5e9, 0.0)]
