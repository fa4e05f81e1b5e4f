"""Topologies by builder and by expression: their degrees and symmetries, and what is refused before it is built."""

from __future__ import annotations

import math
import re
import tracemalloc
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasp_lab.core.errors import TaspLabError, TopologyError
from tasp_lab.core.units import Number
from tasp_lab.topology import builders
from tasp_lab.topology.builders import (
    bidirectional_ring,
    circulant,
    dragonfly,
    fat_tree,
    full_mesh,
    hypercube,
    multipartite,
    nodes,
    ring,
    switch,
    torus,
)
from tasp_lab.topology.expressions import (
    EXPRESSION_DEFAULTS,
    MAX_WORLD_SIZE,
    ExpressionDefaults,
    expression_forms,
    parse_expression,
)
from tasp_lab.topology.graph import MAX_LISTED_LINKS, Topology

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).filter(lambda sides: math.prod(sides) <= 200)


def ends(topology: Topology) -> set[tuple[int, int]]:
    """The links as pairs of ranks; checks that there are no switches, that no pair occurs twice and all are alike."""
    pairs = [(link.source, link.destination) for link in topology.links]
    assert len(set(pairs)) == len(pairs)
    assert topology.vertices == tuple(range(topology.world_size))
    assert len({(link.bandwidth_bytes_per_s, link.latency_s) for link in topology.links}) <= 1
    return {(a, b) for a, b in pairs if isinstance(a, int) and isinstance(b, int)}


def degrees(topology: Topology) -> set[int]:
    """How many links leave a rank and enter it: one number where the network is regular."""
    linked = np.zeros((topology.world_size, topology.world_size), dtype=int)
    for pair in ends(topology):
        linked[pair] = 1
    return {int(degree) for axis in (0, 1) for degree in linked.sum(axis=axis)}


def goes_both_ways(topology: Topology) -> bool:
    return {(b, a) for a, b in ends(topology)} == ends(topology)


# Builders


@given(shapes)
def test_a_torus_joins_neighbours_in_every_dimension(shape: list[int]) -> None:
    """Two links each way along a side of 3 or more, one along a side of 2, none along a side of 1."""
    topology = torus(shape)
    places = list(product(*(range(side) for side in shape)))
    assert topology.world_size == len(places) == math.prod(shape)
    expected = {
        (a, b)
        for (a, one), (b, other) in product(enumerate(places), repeat=2)
        if sum(i != j for i, j in zip(one, other, strict=True)) == 1
        and all((i - j) % side in (0, 1, side - 1) for i, j, side in zip(one, other, shape, strict=True))
    }
    assert ends(topology) == expected
    assert goes_both_ways(topology)
    assert degrees(topology) == {sum(min(side - 1, 2) for side in shape)}


@given(shapes, st.data())
def test_a_torus_looks_the_same_from_everywhere(shape: list[int], data: st.DataObject) -> None:
    """Shifting all ranks along every dimension maps links to links."""
    ranks = np.arange(math.prod(shape)).reshape(shape)
    steps = [data.draw(st.integers(0, side - 1)) for side in shape]
    moved = np.roll(ranks, steps, axis=tuple(range(len(shape)))).ravel().tolist()
    links = ends(torus(shape))
    assert {(moved[a], moved[b]) for a, b in links} == links


@given(st.integers(0, 8))
def test_a_hypercube_joins_ranks_that_differ_in_one_digit(dimensions: int) -> None:
    topology = hypercube(dimensions)
    assert topology.world_size == 2**dimensions
    assert ends(topology) == {(a, a ^ 1 << digit) for a in range(2**dimensions) for digit in range(dimensions)}
    assert degrees(topology) == {dimensions}
    if dimensions:
        assert topology.links == torus((2,) * dimensions).links


offsets_of = st.lists(st.integers(-50, 50), min_size=1, max_size=5)


@given(st.integers(1, 40), offsets_of)
def test_a_circulant_has_each_offset_once(n: int, offsets: list[int]) -> None:
    """Offsets count modulo n, 0 for nothing; there is a way to every rank if they have no divisor in common with n."""
    different = {offset % n for offset in offsets} - {0}
    if math.gcd(n, *different) > 1:
        with pytest.raises(TopologyError, match="is not connected"):
            circulant(n, offsets)
        return
    topology = circulant(n, offsets)
    assert ends(topology) == {(rank, (rank + offset) % n) for rank in range(n) for offset in different}
    assert degrees(topology) == {len(different)}
    assert goes_both_ways(topology) == (different == {n - offset for offset in different})


@given(st.integers(1, 8), st.integers(1, 8))
def test_a_multipartite_network_joins_all_but_equals(parts: int, each: int) -> None:
    if parts == 1 and each > 1:
        with pytest.raises(TopologyError, match="is not connected"):
            multipartite(parts, each)
        return
    topology = multipartite(parts, each)
    assert topology.world_size == parts * each
    assert degrees(topology) == {(parts - 1) * each}
    assert goes_both_ways(topology)
    assert all(a // each != b // each for a, b in ends(topology))
    if each == 1:
        assert ends(topology) == ends(full_mesh(parts))


def bandwidths_up(topology: Topology, vertex: object) -> list[Number]:
    """The bandwidths of the links from a vertex to switches of the network."""
    kinds = topology.switch_kinds
    return [each.bandwidth_bytes_per_s for each in topology.links
            if each.source == vertex and kinds.get(str(each.destination)) == "network"]  # fmt: skip


@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.integers(1, 4))
def test_a_fat_tree_is_as_wide_above_as_below(sides: list[int], over: int) -> None:
    """A leaf switch has its ranks' bandwidth over the oversubscription up; routes climb to the common switch only."""
    topology = fat_tree(sides, Fraction(12), Fraction(1), over)
    ranks = sides[-1]
    assert topology.world_size == math.prod(sides)
    assert topology.node_of_rank == tuple(rank // ranks for rank in range(topology.world_size))
    leaves = {link.destination for link in topology.links if isinstance(link.source, int)}
    assert len(leaves) == topology.world_size // ranks
    for leaf in leaves:
        assert bandwidths_up(topology, leaf) == [Fraction(12 * ranks, over)]
    for a, b in product(range(min(topology.world_size, 8)), range(topology.world_size)):
        if a != b:
            height = next(h for h in range(1, len(sides) + 1)
                          if a // math.prod(sides[-h:]) == b // math.prod(sides[-h:]))  # fmt: skip
            route = topology.route(a, b)
            assert (len(route.links), route.latency_s) == (2 * height, height)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 3))
def test_a_dragonfly_joins_any_two_groups_once(groups: int, routers: int, ranks: int) -> None:
    """Links between groups are spread evenly over the routers, and a route takes one of them only to leave a group."""
    topology = dragonfly(groups, routers, ranks, link_latency_s=Fraction(2), nic_latency_s=Fraction(100))
    between: Counter[tuple[int, int]] = Counter()
    ends: Counter[str] = Counter()
    for link in topology.links:
        if isinstance(link.source, str) and isinstance(link.destination, str):
            one, other = (int(end.removeprefix("router").split(".")[0]) for end in (link.source, link.destination))
            if one != other:
                between[one, other] += 1
                ends[link.source] += 1
    assert between == Counter({pair: 1 for pair in product(range(groups), repeat=2) if pair[0] != pair[1]})
    assert max(ends.values(), default=0) <= -(-(groups - 1) // routers)
    of_group = routers * ranks
    for a, b in product(range(min(topology.world_size, 6)), range(topology.world_size)):
        if a != b:
            route = topology.route(a, b)
            assert (route.latency_s >= 100) == (a // of_group != b // of_group)
            assert len(route.links) <= 5


@given(st.integers(1, 40))
def test_rings_one_way_and_both(n: int) -> None:
    assert ends(ring(n)) == {(rank, (rank + 1) % n) for rank in range(n)} - {(0, 0)}
    assert ends(bidirectional_ring(n)) == ends(ring(n)) | {(b, a) for a, b in ends(ring(n))}
    assert degrees(ring(n)) == {min(n - 1, 1)}
    assert degrees(bidirectional_ring(n)) == {min(n - 1, 2)}
    assert ends(torus((n,))) == ends(circulant(n, (1, -1))) == ends(bidirectional_ring(n))


@pytest.mark.parametrize(
    "alone",
    [full_mesh(1), switch(1), ring(1), bidirectional_ring(1), circulant(1, (1, 5)), torus((1, 1)), hypercube(0),
     multipartite(1, 1), nodes(1, 1)],
    ids=lambda topology: topology.name,
)  # fmt: skip
def test_one_rank_needs_no_link(alone: Topology) -> None:
    assert (alone.world_size, len(alone.links)) == (1, 0)


@pytest.mark.parametrize(
    "pair",
    [full_mesh(2), ring(2), bidirectional_ring(2), circulant(2, (1,)), circulant(2, (1, -1)), torus((2,)),
     torus((2, 1)), torus((1, 2, 1)), hypercube(1), multipartite(2, 1)],
    ids=lambda topology: topology.name,
)  # fmt: skip
def test_two_ranks_have_one_link_each_way(pair: Topology) -> None:
    assert ends(pair) == {(0, 1), (1, 0)}


@pytest.mark.parametrize(
    "build",
    [
        lambda: full_mesh(0), lambda: full_mesh(-1), lambda: switch(0), lambda: ring(0), lambda: ring(-3),
        lambda: bidirectional_ring(0), lambda: circulant(0, (1,)), lambda: circulant(5, ()), lambda: torus(()),
        lambda: torus((0, 3)), lambda: torus((3, -1)), lambda: torus((-2, -2)), lambda: hypercube(-1),
        lambda: multipartite(0, 3), lambda: multipartite(3, 0), lambda: multipartite(-1, -4), lambda: nodes(0, 4),
        lambda: nodes(-1, -4),
    ],
)  # fmt: skip
def test_sizes_that_make_no_network(build: Callable[[], Topology]) -> None:
    with pytest.raises(TopologyError) as error:
        build()
    assert len(str(error.value).splitlines()) == 1


# Expressions

Case = tuple[str, Callable[[], Topology]]
sizes = st.integers(1, 12)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """An expression and the builder that it stands for."""
    n, kind = draw(sizes), draw(st.sampled_from(sorted(expression_forms())))
    if kind == "torus":
        shape = draw(st.lists(st.integers(1, 4), min_size=2, max_size=4))
        return "torus:" + "x".join(map(str, shape)), lambda: torus(shape)
    if kind == "hypercube":
        dimensions = draw(st.integers(0, 6))
        return f"hypercube:{dimensions}", lambda: hypercube(dimensions)
    if kind == "circulant":
        offsets = [1, *draw(st.lists(st.integers(-20, 20), max_size=4))]
        return f"circulant:{n}:{','.join(map(str, offsets))}", lambda: circulant(n, offsets)
    if kind == "multipartite":
        parts, each = draw(st.integers(2, 6)), draw(st.integers(1, 5))
        return f"multipartite:{parts}x{each}", lambda: multipartite(parts, each)
    if kind == "fat-tree":
        sides, over = draw(st.lists(st.integers(1, 4), min_size=2, max_size=4)), draw(st.integers(1, 3))
        text = "fat-tree:" + "x".join(map(str, sides)) + (f":{over}" if over > 1 else "")
        return text, lambda: fat_tree(sides, oversubscription=over)
    if kind == "dragonfly":
        groups, routers, each = (draw(st.integers(1, 5)) for _ in range(3))
        return f"dragonfly:{groups}x{routers}x{each}", lambda: dragonfly(groups, routers, each)
    if kind == "nodes":
        per_node, inside, network = draw(sizes), draw(st.booleans()), draw(st.booleans())
        text = f"nodes:{n}x{per_node}" + ":switch" * inside + ":rails" * network
        return text, lambda: nodes(n, per_node, "switch" if inside else "full-mesh", "rails" if network else "fabric")
    build = {"full-mesh": full_mesh, "switch": switch, "ring": ring, "bidirectional-ring": bidirectional_ring}[kind]
    return f"{kind}:{n}", lambda: build(n)


@given(cases())
def test_an_expression_is_what_its_builder_makes(case: Case) -> None:
    text, build = case
    expression, topology = parse_expression(text), build()
    assert expression.build(EXPRESSION_DEFAULTS) == topology
    assert expression.world_size == topology.world_size
    assert topology.name == text
    assert expression.has_links or expression.has_nics or not topology.links


numbers = st.builds(
    ExpressionDefaults, st.just(3e9), st.sampled_from([0.0, 2e-6]), st.just(7e9), st.sampled_from([0.0, 4e-6])
)


@given(cases(), numbers)
def test_an_expression_uses_the_numbers_that_it_says_it_needs(case: Case, numbers: ExpressionDefaults) -> None:
    """Bandwidths are those of links or of NICs, or of the spine, which carries what all NICs of a rail bring."""
    expression = parse_expression(case[0])
    found = {link.bandwidth_bytes_per_s for link in expression.build(numbers).links}
    assert ("link_bandwidth" in expression.constant_names) == (3e9 in found)
    assert ("nic_bandwidth" in expression.constant_names) == (7e9 in found)
    if not case[0].startswith("fat-tree"):
        assert all(bandwidth in (3e9, 7e9) or bandwidth % 7e9 == 0 for bandwidth in found)


@given(cases())
def test_the_count_of_links_is_at_most_too_high_where_links_are_listed(case: Case) -> None:
    """It is what guards against building too much: links inside nodes and of plain networks are all counted."""
    expression = parse_expression(case[0])
    if not case[0].startswith(("full-mesh", "nodes")):
        assert expression.link_count >= len(expression.build(EXPRESSION_DEFAULTS).links)


@pytest.mark.parametrize("form", sorted(expression_forms()))
def test_a_form_names_what_comes_after_the_colon(form: str) -> None:
    for text in (form, f"{form}:", f"{form}:x", f"{form}:8:"):
        with pytest.raises(TopologyError, match=re.escape(expression_forms()[form])):
            parse_expression(text)


REFUSED = [
    "torus:0x3", "torus:3x0", "torus:16385x2", "torus:128x129", "torus:9999x9999x9999x9999x9999x9999", "torus:8",
    "torus:x8", "torus:3x3x3x3x3x3x3", "torus:03x3", "torus:-3x3", "hypercube:15", "hypercube:19", "hypercube:20",
    "hypercube:99", "hypercube:-1", "hypercube:01", "hypercube:3.0", "circulant:0:1", "circulant:16385:1",
    "circulant:5", "circulant:5:", "circulant:5:1,", "circulant:5:,1", "circulant:5:+1", "circulant:5:100000",
    "circulant:5:" + ",".join(["1"] * 65), "multipartite:0x4", "multipartite:4x0", "multipartite:9999x9999",
    "multipartite:16385x1", "multipartite:2", "bidirectional-ring:0", "bidirectional-ring:16385", "bidirectional-ring:",
    "ring:0", "ring:1e3", "switch:16385", "full-mesh:16385", "full-mesh:٣", "full-mesh:8\n", " full-mesh:8",
    "Full-Mesh:8", "nodes:2x8:torus", "nodes:129x128", "dragonfly:4", "dragonfly:4x4", "dragonfly:0x4x4",
    "dragonfly:100x100x2", "fat-tree:8", "fat-tree:4x8:0", "fat-tree:4x8x", "fat-tree:200x200", "tree:4", "", ":",
    "torus",
]  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_no_expression_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(TopologyError, match=f"expected .*{MAX_WORLD_SIZE} ranks in all") as error:
        parse_expression(text)
    assert len(str(error.value).splitlines()) == 1
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    "text", ["circulant:5:0", "circulant:5:5,-5", "circulant:6:2", "circulant:4096:64,-2", "multipartite:1x4"]
)
def test_an_expression_of_ranks_that_do_not_reach_each_other(text: str) -> None:
    with pytest.raises(TopologyError, match="is not connected: no way from rank 0 to rank 1 and back") as error:
        parse_expression(text).build(EXPRESSION_DEFAULTS)
    assert len(str(error.value).splitlines()) == 1


def test_too_many_links_are_refused() -> None:
    with pytest.raises(TopologyError, match=f"12582912 links, expected at most {MAX_LISTED_LINKS}"):
        parse_expression("multipartite:4x1024")


def test_refusing_allocates_next_to_nothing() -> None:
    """What would be 10^24 ranks, and what would be 13 million links, is only counted."""
    tracemalloc.start()
    try:
        for text in (
            "torus:9999x9999x9999x9999x9999x9999",
            "multipartite:4x1024",
            "hypercube:19",
            "multipartite:9999x9999",
        ):
            with pytest.raises(TopologyError):
                parse_expression(text)
        assert tracemalloc.get_traced_memory()[1] < 10**6
    finally:
        tracemalloc.stop()


@given(st.text("torusflmehypcbinagdw-:x,0123456789", max_size=14))
def test_any_text_is_an_expression_or_refused_in_a_line(text: str) -> None:
    try:
        parse_expression(text)
    except TaspLabError as error:
        told = str(error)
        assert len(told.splitlines()) == 1


@given(
    st.sampled_from(["torus", "hypercube", "circulant", "multipartite", "nodes"]), st.text("0123456789x:,-", max_size=9)
)
def test_any_sizes_are_few_ranks_or_refused(kind: str, sizes: str) -> None:
    try:
        expression = parse_expression(f"{kind}:{sizes}")
    except TopologyError:
        return
    assert 1 <= expression.world_size <= MAX_WORLD_SIZE
    assert expression.link_count <= MAX_LISTED_LINKS


def test_the_largest_of_each_kind_is_quick() -> None:
    for text, ranks, links in (("hypercube:12", 4096, 12 * 4096), ("torus:4x4x4x4x4x4", 4096, 12 * 4096)):
        topology = parse_expression(text).build(EXPRESSION_DEFAULTS)
        assert (topology.world_size, len(topology.links)) == (ranks, links)


def test_the_defaults_of_builders_are_those_of_expressions() -> None:
    assert EXPRESSION_DEFAULTS.link_bandwidth_bytes_per_s == builders.LINK_BYTES_PER_S
    assert torus((2, 2)) == parse_expression("torus:2x2").build(EXPRESSION_DEFAULTS)
