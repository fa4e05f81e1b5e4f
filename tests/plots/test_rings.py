"""Pictures of decompositions show every hop once, as a graph or a matrix; structure alone decides where ranks stand."""

from __future__ import annotations

import functools
import itertools
import struct
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch
from scipy.spatial.distance import pdist

from tasp_lab.plots.rings import draw_decomposition, positions_of
from tasp_lab.plots.timelines import render
from tasp_lab.rings.complete_digraph import hamiltonian_cycles, two_fold_hamiltonian_cycles
from tasp_lab.rings.rings import Decomposition
from tasp_lab.topology.builders import circulant, full_mesh, hypercube, nodes, ring, switch, torus
from tasp_lab.topology.graph import Link, Topology


def rings_on(
    topology: Topology, rings: Sequence[Sequence[int]], shares: tuple[Fraction, ...] = (), reason: str = "because"
) -> Decomposition:
    order = np.array(rings, dtype=np.int32).reshape(-1, topology.world_size)
    pairs = Counter(itertools.chain(*(zip(row, row[1:] + row[:1], strict=True) for row in order.tolist())))
    return Decomposition(topology, order, max(pairs.values(), default=1), reason, shares)


def all_rings_on(topology: Topology) -> Decomposition:
    """As many rings as there are ways out of a rank, if every rank reaches every other."""
    return rings_on(topology, hamiltonian_cycles(topology.world_size).tolist())


def both_ways(order: Sequence[int]) -> list[list[int]]:
    return [list(order), list(order)[::-1]]


GRAPHS = {
    "K5": all_rings_on(full_mesh(5)),
    "K8": all_rings_on(full_mesh(8)),
    "K4 two-fold": rings_on(full_mesh(4), two_fold_hamiltonian_cycles(4).tolist()),
    "ring": rings_on(ring(5), [range(5)]),
    "switch": all_rings_on(switch(8)),
    "rails": all_rings_on(nodes(2, 4, "switch", "rails")),
    "nodes": rings_on(nodes(2, 4), [[0, 1, 2, 3, 4, 5, 6, 7], [3, 2, 1, 0, 7, 6, 5, 4], [1, 3, 0, 2, 5, 7, 4, 6]]),
    "unused links": rings_on(nodes(2, 2, "switch", "rails"), [[0, 1, 3, 2]]),
    "torus": rings_on(torus((3, 3)), both_ways([0, 1, 2, 5, 3, 4, 7, 8, 6]) + both_ways([0, 3, 6, 7, 1, 4, 5, 8, 2])),
    "cube": rings_on(hypercube(3), both_ways([0, 1, 3, 2, 6, 7, 5, 4])),
    "two ranks": all_rings_on(full_mesh(2)),
}
MATRICES = {
    "K16": all_rings_on(full_mesh(16)),
    "14 rings": rings_on(full_mesh(3), both_ways(range(3)) * 7),
    "switch of 72": all_rings_on(switch(72)),
    "100 ranks": rings_on(ring(100), [range(100)]),
}


@functools.cache
def drawn(name: str) -> Figure:
    return draw_decomposition((GRAPHS | MATRICES)[name], name)


def graphs(figure: Figure) -> list[Axes]:
    return [axes for axes in figure.axes if axes.patches]


def heading(figure: Figure) -> str:
    return figure.subfigs[0].get_suptitle()


def hops(decomposition: Decomposition, number: int) -> list[tuple[int, int]]:
    order = decomposition.rings[number].tolist()
    return sorted(zip(order, order[1:] + order[:1], strict=True))


def arrows(graph: Axes) -> list[FancyArrowPatch]:
    return [patch for patch in graph.patches if isinstance(patch, FancyArrowPatch)]


@pytest.mark.parametrize("name", GRAPHS)
def test_each_hop_is_one_arrow_in_the_graph_of_all_and_in_that_of_its_ring(name: str) -> None:
    decomposition, shown = GRAPHS[name], graphs(drawn(name))
    rings = range(len(decomposition.rings))
    assert [axes.get_title() for axes in shown[1:]] == [f"ring {one}" for one in rings if len(rings) > 1]
    for graph, wanted in zip(shown, [list(rings), *([one] for one in rings if len(rings) > 1)], strict=True):
        labels = [str(arrow.get_label()) for arrow in arrows(graph)]
        expected = [f"ring {one}: {a}->{b}" for one in wanted for a, b in hops(decomposition, one)]
        assert sorted(labels) == sorted(expected)


@pytest.mark.parametrize("name", GRAPHS)
def test_arrows_lead_from_rank_to_rank_past_all_others(name: str) -> None:
    figure = drawn(name)
    figure.draw_without_rendering()
    for graph in graphs(figure):
        circles = [patch for patch in graph.patches if isinstance(patch, Circle)]
        at, radius = np.array([circle.center for circle in circles]), circles[0].radius
        for arrow in arrows(graph):
            source, destination = map(int, str(arrow.get_label()).split(": ")[1].split("->"))
            points = np.array(arrow.get_path().vertices, dtype=np.float64)
            gaps = np.hypot(*(points[:, None] - at).transpose(2, 0, 1)).min(axis=0)
            assert gaps[source] == pytest.approx(radius, rel=0.3)
            assert gaps[destination] < 1.5 * radius
            assert (np.delete(gaps, [source, destination]) > 0.5 * radius).all()


def test_rings_have_colours_of_their_own_and_lines_as_wide_as_their_shares() -> None:
    shares = (Fraction(1, 2), Fraction(1, 3), Fraction(1, 6))
    figure = draw_decomposition(rings_on(full_mesh(8), hamiltonian_cycles(8)[:3].tolist(), shares), "")
    everything = arrows(graphs(figure)[0])
    assert len({arrow.get_edgecolor() for arrow in everything}) == 3
    for arrow in everything:
        assert arrow.get_linewidth() == pytest.approx(1.3 * 3 * float(shares[int(str(arrow.get_label())[5])]))
    assert [graph.get_title() for graph in graphs(figure)[1:]] == ["ring 0: 1/2", "ring 1: 1/3", "ring 2: 1/6"]


@pytest.mark.parametrize(("name", "unused"), [("cube", 8), ("unused links", 0), ("torus", 0)])
def test_links_between_ranks_that_no_ring_uses_are_grey(name: str, unused: int) -> None:
    for graph in graphs(drawn(name)):
        assert len([line for line in graph.lines if str(line.get_label()).startswith("unused ")]) == unused
    assert ("grey: unused" in heading(drawn(name))) == (name != "torus")


def test_hops_between_the_same_ranks_bend_apart() -> None:
    (graph,) = graphs(draw_decomposition(rings_on(full_mesh(2), [[0, 1]] * 3), ""))[:1]
    bends = [str(arrow.get_connectionstyle().rad) for arrow in arrows(graph)]
    assert Counter(bends).most_common(1)[0][1] == 2  # there and back


@pytest.mark.parametrize("name", MATRICES)
def test_each_hop_is_one_cell_coloured_by_its_ring(name: str) -> None:
    decomposition, figure = MATRICES[name], drawn(name)
    ranks, rings = decomposition.topology.world_size, len(decomposition.rings)
    assert not graphs(figure)
    cells = np.ma.getdata(figure.axes[0].images[0].get_array()).reshape(ranks, ranks, -1)
    shown = [(int(cells[place]), *place[:2]) for place in map(tuple, np.argwhere(~np.isnan(cells)))]
    assert sorted(shown) == sorted((one, *hop) for one in range(rings) for hop in hops(decomposition, one))
    assert f"all {rings} ring{'s' * (rings > 1)} shown" in heading(figure)
    panel, bar = figure.axes
    assert (panel.get_xlabel(), panel.get_ylabel(), bar.get_ylabel()) == ("receiving rank", "sending rank", "ring")


sizes = st.integers(1, 6)
topologies = st.one_of(
    *(st.builds(builder, st.integers(1, 60)) for builder in (full_mesh, switch, ring)),
    st.builds(torus, st.lists(sizes, min_size=1, max_size=3)),
    st.builds(nodes, sizes, sizes, st.sampled_from(["full-mesh", "switch"]), st.sampled_from(["fabric", "rails"])),
)


@settings(max_examples=30, deadline=None)
@given(topologies)
def test_no_two_ranks_share_a_place(topology: Topology) -> None:
    at = positions_of(topology)
    assert at.shape == (topology.world_size, 2)
    assert len(at) < 2 or pdist(at).min() > 0.01 * np.ptp(at, axis=0).max()


@pytest.mark.parametrize("shape", [(3, 3), (2, 5), (4, 6)])
def test_a_torus_is_a_grid(shape: tuple[int, int]) -> None:
    at = positions_of(torus(shape)).reshape(*shape, 2)
    assert np.ptp(at[:, :, 1], axis=1) == pytest.approx(0, abs=1e-9)
    assert np.ptp(at[:, :, 0], axis=0) == pytest.approx(0, abs=1e-9)
    assert (np.diff(at[:, :, 0], axis=1) > 0).all()
    assert (np.diff(at[:, :, 1], axis=0) < 0).all()


@pytest.mark.parametrize("topology", [full_mesh(7), switch(7), ring(7), circulant(7, (1, 3)), nodes(2, 4)])
def test_other_ranks_stand_on_a_circle_in_their_order(topology: Topology) -> None:
    at = positions_of(topology)
    turns = np.arctan2(at[:, 0], at[:, 1]) % (2 * np.pi - 1e-9)
    assert np.hypot(*at.T) == pytest.approx(1)
    assert [int(rank) for rank in np.argsort(turns)] == list(range(topology.world_size))


# ---------------------------------------------------------------------------------------------------- rendering


@pytest.mark.parametrize(
    "decomposition",
    [
        all_rings_on(full_mesh(1)),
        rings_on(full_mesh(3), []),
        rings_on(full_mesh(2), [[0, 1]] * 255),
        all_rings_on(switch(12)),
        all_rings_on(full_mesh(101)),
        rings_on(torus((8, 8)), [], reason="none " * 50),
    ],
    ids=["one rank", "no rings", "255 rings", "switch of 12", "100 rings", "no rings of 64"],
)
def test_sizes_stay_bounded(decomposition: Decomposition) -> None:
    png = render(draw_decomposition(decomposition, "sizes"), "png")
    width, height = struct.unpack(">II", png[16:24])
    assert width == 1500
    assert height < 1600


@pytest.mark.parametrize("text", ["", "$x^", "$\\frac{$", "<&>", "two\nlines", "l" * 300])
def test_any_text_is_taken_as_it_is(text: str) -> None:
    name = text.strip() or "switch"
    links = [Link(*pair, 50e9, 1e-6) for rank in range(3) for pair in ((rank, name), (name, rank))]
    decomposition = rings_on(Topology(text, 3, tuple(links)), [[0, 1, 2]], reason=text)
    ElementTree.fromstring(render(draw_decomposition(decomposition, text), "svg"))
