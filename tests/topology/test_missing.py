"""NICs and GPUs that are missing: who shares what is left, what ranks are called, and what cannot be asked."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.bounds.collectives import all_gather_bound_s
from tasp_lab.core.errors import TopologyError
from tasp_lab.rings.node_rings import rings_through_nics
from tasp_lab.topology.builders import fat_tree, full_mesh, nodes, ring, switch, torus
from tasp_lab.topology.derived import renumbered
from tasp_lab.topology.graph import Topology, both_ways
from tasp_lab.topology.missing import nics_of, notes, with_nics, without

MANY_NODES = [
    nodes(2, 4), nodes(3, 2), nodes(2, 4, "switch", "rails"), nodes(2, 6, ranks_per_nic=2), nodes(2, 4, "switch"),
]  # fmt: skip


def content(topology: Topology) -> tuple[object, ...]:
    shared = frozenset((each.name, each.bandwidth_bytes_per_s, frozenset(each.links)) for each in topology.shared)
    return topology.world_size, frozenset(topology.links), shared, topology.labels, topology.node_of_rank


@st.composite
def parts_of(draw: st.DrawFn, kinds: str = "link nic gpu") -> tuple[Topology, list[str]]:
    """A topology, and some of its parts by name."""
    topology = draw(st.sampled_from([*MANY_NODES, full_mesh(5), torus((3, 3)), switch(4)]))
    links = [f"link.{a.source}{draw(st.sampled_from('->'))}{a.destination}" for a in topology.links]
    nics, gpus = len(nics_of(topology)), topology.world_size
    known = {"link": links, "nic": [f"nic.{k}" for k in range(nics)], "gpu": [f"gpu.{k}" for k in range(gpus)]}
    names = [name for kind in kinds.split() for name in known[kind]]
    return topology, draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True)) if names else []


@given(parts_of())
def test_the_order_of_parts_does_not_matter(case: tuple[Topology, list[str]]) -> None:
    topology, parts = case
    found = set[object]()
    for order in permutations(parts):
        try:
            found.add(content(without(topology, order)))
        except TopologyError as error:
            told = str(error)
            assert len(told.splitlines()) == 1
            found.add("refused")
    assert len(found) == 1


@given(parts_of("link nic"))
def test_the_bound_of_an_all_gather_never_falls(case: tuple[Topology, list[str]]) -> None:
    topology, parts = case
    try:
        broken = without(topology, parts)
    except TopologyError:
        return
    assert all_gather_bound_s(broken, 2**20) >= all_gather_bound_s(topology, 2**20) * (1 - 1e-12)


@given(st.sampled_from(MANY_NODES), st.sets(st.integers(0, 7), min_size=1, max_size=3))
def test_ranks_use_the_nearest_nic_that_is_left(topology: Topology, gone: set[int]) -> None:
    """Beside the rule in words, tried for each rank: no NIC that is left in its node is nearer."""
    before = nics_of(topology)
    gone = {at for at in gone if at < len(before)}
    nodes_left = {nic.node for at, nic in enumerate(before) if at not in gone}
    parts = [f"nic.{at}" for at in gone]
    if nodes_left != {nic.node for nic in before}:
        with pytest.raises(TopologyError, match="has no other NIC, so the machine would be in two parts"):
            without(topology, parts)
        return
    after = nics_of(without(topology, parts))
    number = {min(nic.links): at for at, nic in enumerate(before)}
    assert sorted(rank for nic in after for rank in nic.links) == list(range(topology.world_size))
    for nic in after:
        (used,) = {number[rank] for rank in nic.links if rank in number and number[rank] not in gone}
        for rank in nic.links:
            (own,) = (at for at, each in enumerate(before) if rank in each.links)
            left = [at for at, each in enumerate(before) if each.node == nic.node and at not in gone]
            assert used == (own if own not in gone else min(left, key=lambda at: (abs(at - own), at)))


@pytest.mark.parametrize("missing", [0, 1, 2, 3])
def test_what_enters_a_node_passes_the_nics_that_are_left(missing: int) -> None:
    """An AllGather on two nodes of 4 brings 4 shards into each, through 4 - k NICs; links inside are much faster."""
    topology = nodes(
        2, 4, "switch",
        link_bandwidth_bytes_per_s=Fraction(10**6), link_latency_s=0,
        nic_bandwidth_bytes_per_s=Fraction(10), nic_latency_s=0,
    )  # fmt: skip
    broken = without(topology, [f"nic.{4 + at}" for at in range(missing)])
    assert all_gather_bound_s(broken, 60) == Fraction(4 * 60, (4 - missing) * 10)


def test_shared_nics_are_those_that_a_machine_may_have() -> None:
    """With every second NIC missing; its links are copies, and with rails lead to the rail of the other NIC."""
    for network in ("fabric", "rails"):
        made = nodes(2, 4, "switch", ranks_per_nic=2)
        found = without(nodes(2, 4, "switch", network), ["nic.1", "nic.3", "nic.5", "nic.7"])
        assert [each.bandwidth_bytes_per_s for each in found.shared] == [50e9] * 8
        assert [len(each.links) for each in found.shared] == [2] * 8
        if network == "fabric":
            assert [each.links for each in found.shared] == [each.links for each in made.shared]
            assert found.links == made.links
        else:
            assert {link.destination for link in found.links if link.source in (0, 1)} == {"node0", "rail0"}
    assert with_nics(nodes(2, 4), lambda known: known // 2).shared == nodes(2, 4, ranks_per_nic=2).shared
    assert with_nics(nodes(2, 4, ranks_per_nic=2), lambda _: 1).shared == nodes(2, 4, ranks_per_nic=4).shared


def test_a_nic_that_is_already_shared_takes_the_ranks_of_another() -> None:
    found = without(nodes(2, 6, ranks_per_nic=2), ["nic.1"])
    assert [tuple(nic.links) for nic in nics_of(found)][:2] == [(0, 1, 2, 3), (4, 5)]
    assert [each.links for each in found.shared if each.name == "nic 0 of node 0, out"] == [
        ("0->network", "1->network", "2->network", "3->network")
    ]


def test_constraints_have_the_names_of_the_whole_machine() -> None:
    whole = nodes(2, 4, "switch")
    found = without(whole, ["gpu.1", "nic.3"])
    assert found.labels == (0, 2, 3, 4, 5, 6, 7)
    assert {each.name for each in found.constraints} - {each.name for each in found.shared} <= {
        each.name for each in whole.constraints
    }
    assert [each.name for each in found.shared] == ["nic 2 of node 0, out", "nic 2 of node 0, in"]
    assert without(found, ["gpu.3"]).labels == (0, 2, 4, 5, 6, 7)
    assert without(found, ["link.4>node1", "link.node1>4"]).name.endswith("link.node1>4")
    turned = renumbered(full_mesh(4), np.arange(4))
    assert renumbered(without(turned, ["gpu.0"]), np.array([2, 0, 1])).labels == (3, 1, 2)


def test_a_mesh_without_gpus_is_a_smaller_mesh() -> None:
    for missing in range(5):
        found = without(full_mesh(5), [f"gpu.{missing}"])
        assert found.links == full_mesh(4).links
        assert found.table.is_mesh


def test_nodes_stay_as_they_were() -> None:
    """Also where the graph alone would tell nodes otherwise: of a pair of pairs without a rank one is a node alone."""
    ends = [(0, "x"), (1, "x"), (2, "y"), (3, "y"), (0, "z"), (1, "z"), (2, "z"), (3, "z")]
    pairs = Topology("pairs", 4, tuple(link for a, b in ends for link in both_ways(a, b, 1, 0)))
    assert without(pairs, ["gpu.3"]).node_of_rank == (0, 0, 1)
    assert without(pairs, ["gpu.0", "gpu.1"]).node_of_rank == (0, 0)


@pytest.mark.parametrize(
    ("topology", "parts", "message"),
    [
        (nodes(2, 4), ["nic.8"], "without nic.8: nodes:2x4 has NICs 0 to 7"),
        (nodes(2, 4, ranks_per_nic=2), ["nic.4"], "has NICs 0 to 3"),
        (torus((4, 4)), ["nic.0"], "torus:4x4 has no NICs$"),
        (fat_tree((2, 4)), ["nic.0"], "fat-tree:2x4 has no NICs at its ranks"),
        (full_mesh(4), ["gpu.4"], "without gpu.4: full-mesh:4 has GPUs 0 to 3"),
        (full_mesh(2), ["gpu.0", "gpu.1"], "full-mesh:2 has no other GPU"),
        (nodes(2, 2), ["nic.0", "nic.1"], "without nic.0, nic.1: node 0 of nodes:2x2 has no other NIC"),
        (full_mesh(4), ["gpu.1", "gpu.1"], "gpu.1 removes the same, expected each part once"),
        (full_mesh(4), ["link.0-3", "link.0>3"], "link.0-3 removes the same, expected each part once"),
        (nodes(2, 4), ["nic.3", "link.3>network"], "link.3>network is a link of it, expected one of them"),
        (switch(3), ["link.0-switch"], "not connected: .*, expected gpu.0 for a whole GPU"),
        (ring(4), ["gpu.2"], "no way from rank 0 to rank 1 and back$"),
        (full_mesh(4), ["0-3"], "did you mean link.0-3"),
        (full_mesh(4), ["rank.3"], "expected a part such as link.0-3, link.0>3, nic.3 or gpu.5"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_what_cannot_be_missing_is_named(topology: Topology, parts: list[str], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        without(topology, parts)


def test_notes_say_who_shares_and_which_gpus_ranks_are() -> None:
    found = notes(nodes(2, 4), without(nodes(2, 4), ["gpu.0", "nic.2", "gpu.6"]))
    assert found[0] == "NICs: rank 2 uses that of rank 1; assumed: the nearest, as NCCL takes the shortest path"
    assert found[1:] == ["ranks 0 to 4 are GPUs 1 to 5", "rank 5 is GPU 7"]
    shared = nodes(2, 4, ranks_per_nic=2)
    assert notes(shared, without(shared, ["gpu.4"])) == ["ranks 4 to 6 are GPUs 5 to 7"]
    assert notes(full_mesh(4), without(full_mesh(4), ["gpu.3", "link.0-1"])) == []


@given(
    st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=8), min_size=2, max_size=3),
)
def test_rings_pass_each_nic_once_each_way(sizes: list[list[int]]) -> None:
    """As many rings as the node with the fewest NICs has, each through all ranks, node by node."""
    first, in_nodes = 0, []
    for node in sizes:
        in_nodes.append([list(range(first + sum(node[:at]), first + sum(node[: at + 1]))) for at in range(len(node))])
        first += sum(node)
    of_rank = {rank: (at, nic[0]) for at, node in enumerate(in_nodes) for nic in node for rank in nic}
    rings = rings_through_nics(in_nodes, min(map(len, sizes)))
    assert rings.shape == (min(map(len, sizes)), first)
    hops = Counter[tuple[object, str]]()
    for each in rings.tolist():
        assert sorted(each) == list(range(first))
        between = [(a, b) for a, b in pairwise([*each, each[0]]) if of_rank[a][0] != of_rank[b][0]]
        assert len(between) == len(sizes)
        for a, b in between:
            hops.update([(of_rank[a], "out"), (of_rank[b], "in")])
    assert set(hops.values()) == {1}
