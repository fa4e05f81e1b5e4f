"""Pictures of decompositions show every hop once, as a graph or a matrix; structure alone decides where ranks stand."""

from __future__ import annotations

import functools
import itertools
import os
import struct
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.collections import Collection
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch
from matplotlib.path import Path

from tasp_lab.core.arrays import FloatArray
from tasp_lab.plots.ring_layout import Layout, lay_out
from tasp_lab.plots.rings import draw_decomposition
from tasp_lab.plots.timelines import render
from tasp_lab.rings.complete_digraph import hamiltonian_cycles, two_fold_hamiltonian_cycles
from tasp_lab.rings.rings import Decomposition
from tasp_lab.topology.builders import circulant, full_mesh, hypercube, nodes, ring, switch, torus
from tasp_lab.topology.graph import Link, Topology
from tests.conftest import ROOT


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


def table(figure: Figure) -> Axes:
    return figure.axes[-1]


def heading(figure: Figure) -> str:
    return figure.subfigs[0].get_suptitle()


def hops(decomposition: Decomposition, number: int) -> list[tuple[int, int]]:
    order = decomposition.rings[number].tolist()
    return sorted(zip(order, order[1:] + order[:1], strict=True))


def arrows(graph: Axes) -> list[FancyArrowPatch]:
    return [patch for patch in graph.patches if isinstance(patch, FancyArrowPatch)]


class TestGraphs:
    @pytest.mark.parametrize("name", GRAPHS)
    def test_each_hop_is_one_arrow_in_the_graph_of_all_and_in_that_of_its_ring(self, name: str) -> None:
        decomposition, shown = GRAPHS[name], graphs(drawn(name))
        rings = range(len(decomposition.rings))
        assert [axes.get_title() for axes in shown[1:]] == [f"ring {one}" for one in rings if len(rings) > 1]
        for graph, wanted in zip(shown, [list(rings), *([one] for one in rings if len(rings) > 1)], strict=True):
            labels = [str(arrow.get_label()) for arrow in arrows(graph)]
            expected = [f"ring {one}: {a}->{b}" for one in wanted for a, b in hops(decomposition, one)]
            assert sorted(labels) == sorted(expected)

    @pytest.mark.parametrize("name", GRAPHS)
    def test_arrows_lead_from_rank_to_rank_inside_the_axes(self, name: str) -> None:
        figure = drawn(name)
        figure.draw_without_rendering()
        for graph in graphs(figure):
            circles = [patch for patch in graph.patches if isinstance(patch, Circle)]
            at = np.array([circle.center for circle in circles])
            for arrow in arrows(graph):
                source, destination = map(int, str(arrow.get_label()).split(": ")[1].split("->"))
                path = arrow.get_path()
                points = np.asarray(path.vertices, dtype=np.float64)[np.asarray(path.codes) != Path.CLOSEPOLY]
                assert points[0] == pytest.approx(at[source], abs=0.01)
                gaps = np.hypot(*(points - at[destination]).T)
                assert gaps.min() == pytest.approx(circles[0].radius, rel=0.35)
                box = path.get_extents()
                assert graph.get_xlim()[0] <= box.x0 <= box.x1 <= graph.get_xlim()[1]
                assert graph.get_ylim()[0] <= box.y0 <= box.y1 <= graph.get_ylim()[1]

    @pytest.mark.parametrize("name", GRAPHS)
    def test_hops_between_the_same_ranks_do_not_cover_each_other(self, name: str) -> None:
        decomposition = GRAPHS[name]
        layout, used = lay_out(decomposition.topology, decomposition.rings), Counter[tuple[int, int]]()
        middles: dict[frozenset[int], list[FloatArray]] = {}
        for number in range(len(decomposition.rings)):
            for hop in hops(decomposition, number):
                middles.setdefault(frozenset(hop), []).append(points_on(layout, *hop, used[hop])[10])
                used[hop] += 1
        for several in middles.values():
            for one, other in itertools.combinations(several, 2):
                assert np.hypot(*(one - other)) > 0.01 * layout.span

    def test_rings_have_colours_of_their_own_and_lines_as_wide_as_their_shares(self) -> None:
        shares = (Fraction(1, 2), Fraction(1, 3), Fraction(1, 6))
        figure = draw_decomposition(rings_on(full_mesh(8), hamiltonian_cycles(8)[:3].tolist(), shares), "")
        everything = arrows(graphs(figure)[0])
        assert len({arrow.get_edgecolor() for arrow in everything}) == 3
        for arrow in everything:
            assert arrow.get_linewidth() == pytest.approx(1.3 * 3 * float(shares[int(str(arrow.get_label())[5])]))
        names = ["ring 0: 1/2", "ring 1: 1/3", "ring 2: 1/6"]
        assert [graph.get_title() for graph in graphs(figure)[1:]] == names
        assert [tick.get_text() for tick in table(figure).get_yticklabels()] == names

    @pytest.mark.parametrize(("name", "unused"), [("cube", 8), ("unused links", 12), ("torus", 0)])
    def test_links_that_no_ring_uses_are_grey(self, name: str, unused: int) -> None:
        for graph in graphs(drawn(name)):
            assert len([line for line in graph.lines if str(line.get_label()).startswith("unused ")]) == unused
        assert ("grey: unused" in heading(drawn(name))) == (unused > 0)

    @pytest.mark.parametrize("name", ["K5", "K8", "rails", "nodes", "torus", "cube"])
    def test_the_table_fills_the_cells_of_the_links_that_a_ring_uses(self, name: str) -> None:
        decomposition, panel = GRAPHS[name], table(drawn(name))
        topology = decomposition.topology
        ticks = {
            round(x, 6): text.get_text() for x, text in zip(panel.get_xticks(), panel.get_xticklabels(), strict=True)
        }
        for number in range(len(decomposition.rings)):
            (cells,) = [each for each in panel.collections if each.get_label() == f"ring {number}"]
            routes = (topology.route(*hop).links for hop in hops(decomposition, number))
            expected = {(number, topology.links[link].name) for links in routes for link in links}
            assert {(round(y), ticks[round(x, 6)]) for x, y in centres(cells)} == expected

    def test_the_table_says_where_ranks_send_if_all_rings_use_the_same_links(self) -> None:
        decomposition, panel = GRAPHS["switch"], table(drawn("switch"))
        written = {(round(y), round(x)): int(text.get_text()) for text in panel.texts for x, y in [text.get_position()]}
        assert written == {(row, a): b for row in range(7) for a, b in hops(decomposition, row)}


def centres(cells: Collection) -> list[FloatArray]:
    corners = [np.asarray(path.vertices, dtype=np.float64) for path in cells.get_paths()]
    return [(points.min(axis=0) + points.max(axis=0)) / 2 for points in corners]


class TestMatrix:
    @pytest.mark.parametrize("name", MATRICES)
    def test_each_hop_is_one_cell_coloured_by_its_ring(self, name: str) -> None:
        decomposition, figure = MATRICES[name], drawn(name)
        ranks, rings = decomposition.topology.world_size, len(decomposition.rings)
        assert not graphs(figure)
        cells = np.ma.getdata(figure.axes[0].images[0].get_array()).reshape(ranks, ranks, -1)
        shown = [(int(cells[place]), *place[:2]) for place in map(tuple, np.argwhere(~np.isnan(cells)))]
        assert sorted(shown) == sorted((one, *hop) for one in range(rings) for hop in hops(decomposition, one))

    @pytest.mark.parametrize("name", MATRICES)
    def test_it_says_that_all_rings_are_there_and_names_its_axes(self, name: str) -> None:
        figure, rings = drawn(name), len(MATRICES[name].rings)
        assert f"all {rings} rings shown" in heading(figure) if rings > 1 else "1 ring shown" in heading(figure)
        panel, bar = figure.axes
        assert (panel.get_xlabel(), panel.get_ylabel()) == ("receiving rank", "sending rank")
        assert bar.get_ylabel() == "ring"


# ------------------------------------------------------------------------------------------------------- layout


def points_on(layout: Layout, source: int, destination: int, use: int = 0) -> FloatArray:
    """A hop as matplotlib's ``arc3`` draws it: a quadratic curve, 21 points."""
    start, end = layout.positions[source], layout.positions[destination]
    left = np.array([start[1] - end[1], end[0] - start[0]])
    bend = (start + end) / 2 + layout.bend(source, destination, use) * left
    t = np.linspace(0, 1, 21)[:, None]
    return np.asarray((1 - t) ** 2 * start + 2 * t * (1 - t) * bend + t**2 * end)


def without_rings(topology: Topology) -> Layout:
    return lay_out(topology, np.empty((0, topology.world_size), dtype=np.int32))


sizes = st.integers(1, 6)
insides, networks = st.sampled_from(["full-mesh", "switch"]), st.sampled_from(["fabric", "rails"])
topologies = st.one_of(
    *(st.builds(builder, st.integers(1, 60)) for builder in (full_mesh, switch, ring)),
    st.builds(torus, st.lists(sizes, min_size=1, max_size=3)),
    st.builds(nodes, sizes, sizes, insides, networks),
)


class TestLayout:
    @settings(max_examples=30, deadline=None)
    @given(topologies)
    def test_no_two_vertices_share_a_place(self, topology: Topology) -> None:
        layout = without_rings(topology)
        assert layout.positions.keys() == set(topology.vertices)
        assert len(layout.points) < 2 or layout.nearest > 0.01 * layout.span

    @settings(max_examples=30, deadline=None)
    @given(topologies)
    def test_names_do_not_matter(self, topology: Topology) -> None:
        names = {vertex: f"x{index}" for index, vertex in enumerate(topology.vertices[topology.world_size :])}
        links = tuple(
            replace(
                link,
                source=names.get(link.source, link.source),
                destination=names.get(link.destination, link.destination),
            )
            for link in topology.links
        )
        renamed = without_rings(Topology("another", topology.world_size, links))
        assert np.array_equal(renamed.points, without_rings(topology).points)

    @pytest.mark.parametrize("shape", [(3, 3), (2, 5), (4, 4), (6, 6), (3, 3, 3), (4, 4, 4)])
    def test_no_hop_of_a_torus_runs_through_a_rank(self, shape: tuple[int, ...]) -> None:
        """Links around the end curve around the ranks of their row."""
        layout = without_rings(torus(shape))
        for source, destination in layout.topology.rank_pairs():
            curve = points_on(layout, source, destination)
            others = np.delete(layout.points, [source, destination], axis=0)
            gap = np.hypot(*(curve[:, None] - others).transpose(2, 0, 1)).min()
            assert gap > 0.19 * layout.nearest

    @pytest.mark.parametrize("shape", [(3, 3), (2, 5), (4, 6)])
    def test_a_torus_is_a_grid(self, shape: tuple[int, int]) -> None:
        at = without_rings(torus(shape)).points.reshape(*shape, 2)
        assert np.ptp(at[:, :, 1], axis=1) == pytest.approx(0, abs=1e-9)
        assert np.ptp(at[:, :, 0], axis=0) == pytest.approx(0, abs=1e-9)
        assert (np.diff(at[:, :, 0], axis=1) > 0).all()
        assert (np.diff(at[:, :, 1], axis=0) < 0).all()

    @given(st.permutations(range(7)))
    def test_ranks_with_few_links_stand_in_the_order_of_their_ring(self, order: list[int]) -> None:
        links = [Link(a, b, 50e9, 1e-6) for a, b in zip(order, order[1:] + order[:1], strict=True)]
        layout = lay_out(Topology("mixed", 7, tuple(links)), np.array([order], dtype=np.int32))
        start = order.index(0)
        assert around(layout.points) == order[start:] + order[:start]

    @pytest.mark.parametrize("topology", [full_mesh(7), switch(7), ring(7), circulant(7, (1, 3))])
    def test_other_ranks_stand_on_a_circle_in_their_order(self, topology: Topology) -> None:
        layout = lay_out(topology, np.array([[0, 2, 4, 6, 1, 3, 5]], dtype=np.int32))
        assert around(layout.points[:7]) == list(range(7))

    @pytest.mark.parametrize("inside", ["full-mesh", "switch"])
    @pytest.mark.parametrize("network", ["fabric", "rails"])
    @pytest.mark.parametrize(("node_count", "per_node"), [(2, 2), (3, 3), (4, 8), (8, 4)])
    def test_ranks_of_a_node_stand_together(self, node_count: int, per_node: int, inside: str, network: str) -> None:
        topology = nodes(node_count, per_node, inside, network)  # type: ignore[arg-type]
        at = without_rings(topology).points[: topology.world_size].reshape(node_count, per_node, 2)
        width = max(float(np.hypot(*(a - b))) for node in at for a, b in itertools.combinations(node, 2))
        assert all(np.hypot(*(a - b)) > width for a, b in itertools.combinations(at.mean(axis=1), 2))


def around(at: FloatArray) -> list[int]:
    """Points on a circle clockwise, from the top."""
    return [int(point) for point in np.argsort(np.arctan2(at[:, 0], at[:, 1]) % (2 * np.pi - 1e-9))]


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


def test_another_process_draws_the_same() -> None:
    """It orders sets of texts differently."""
    program = """
import numpy as np
from tasp_lab.topology.builders import nodes
from tasp_lab.rings.rings import Decomposition
from tasp_lab.plots.timelines import render
from tasp_lab.plots.rings import draw_decomposition
few = Decomposition(nodes(2, 2, "switch", "rails"), np.array([[0, 1, 3, 2]]), 1, "because")
print(render(draw_decomposition(few, "same"), "svg").decode())
"""
    environment = os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-c", program]
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    own = render(draw_decomposition(GRAPHS["unused links"], "same"), "svg").decode()
    assert done.stdout.strip() == own.strip()


@pytest.mark.parametrize("text", ["", "$x^", "$\\frac{$", "<&>", "two\nlines", "l" * 300])
def test_any_text_is_taken_as_it_is(text: str) -> None:
    name = text.strip() or "switch"
    links = [Link(*pair, 50e9, 1e-6) for rank in range(3) for pair in ((rank, name), (name, rank))]
    decomposition = rings_on(Topology(text, 3, tuple(links)), [[0, 1, 2]], reason=text)
    ElementTree.fromstring(render(draw_decomposition(decomposition, text), "svg"))
