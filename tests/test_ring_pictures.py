"""Pictures of decompositions show each hop and each use of a link once, stay legible, and are drawn the same again."""

from __future__ import annotations

import copy
import functools
import itertools
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import matplotlib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import Collection, LineCollection, PatchCollection, PathCollection, PolyCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from tasp_lab import ring_layout, ring_pictures
from tasp_lab.arrays import FloatArray
from tasp_lab.builders import circulant, full_mesh, hypercube, nodes, ring, switch, torus
from tasp_lab.changes import without_links
from tasp_lab.decomposition import Decomposition
from tasp_lab.hamiltonian import hamiltonian_cycles, two_fold_hamiltonian_cycles
from tasp_lab.pictures import render
from tasp_lab.ring_layout import Layout, arrow, lay_out, smooth
from tasp_lab.ring_pictures import (
    MOST_HOPS_TOGETHER,
    MOST_LINK_COLUMNS,
    MOST_RINGS_DRAWN,
    MOST_WIRES,
    draw_decomposition,
)
from tasp_lab.topology import Link, Topology
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


def linked(name: str, ranks: int, ends: Sequence[tuple[int, int]]) -> Topology:
    return Topology(name, ranks, tuple(Link(a, b, 50e9, 1e-6) for a, b in ends))


def both_ways(order: Sequence[int]) -> list[list[int]]:
    return [list(order), list(order)[::-1]]


NODES = rings_on(nodes(2, 4), [[0, 1, 2, 3, 4, 5, 6, 7], [3, 2, 1, 0, 7, 6, 5, 4], [1, 3, 0, 2, 5, 7, 4, 6]])
TORUS = rings_on(torus((3, 3)), both_ways([0, 1, 2, 5, 3, 4, 7, 8, 6]) + both_ways([0, 3, 6, 7, 1, 4, 5, 8, 2]))
CUSTOM = rings_on(circulant(8, (1, 2, -1)), both_ways(range(8)))
CUBE = rings_on(hypercube(3), both_ways([0, 1, 3, 2, 6, 7, 5, 4]))
FEW = rings_on(nodes(2, 2, "switch", "rails"), [[0, 1, 3, 2]])
EXAMPLES = {
    "K5": all_rings_on(full_mesh(5)),
    "K8": all_rings_on(full_mesh(8)),
    "K4 two-fold": rings_on(full_mesh(4), two_fold_hamiltonian_cycles(4).tolist()),
    "ring": rings_on(ring(5), [range(5)]),
    "switch": all_rings_on(switch(8)),
    "rails": all_rings_on(nodes(2, 4, "switch", "rails")),
    "nodes": NODES,
    "few": FEW,
    "torus": TORUS,
    "cube": CUBE,
    "custom": CUSTOM,
    "two ranks": all_rings_on(full_mesh(2)),
    "many rings": rings_on(full_mesh(3), both_ways(range(3)) * 7),
}
examples = pytest.mark.parametrize("name", EXAMPLES)


@functools.cache
def drawn(name: str) -> Figure:
    return draw_decomposition(EXAMPLES[name], "")


@functools.cache
def many() -> Figure:
    """More rings and ranks than can be drawn well."""
    return draw_decomposition(all_rings_on(full_mesh(101)), "many")


def graphs(figure: Figure) -> list[Axes]:
    return [axes for axes in figure.axes if axes.get_aspect() == 1]


def table(figure: Figure) -> Axes:
    (found,) = [axes for axes in figure.axes if axes.get_aspect() != 1]
    return found


def labelled(axes: Axes, label: str) -> Collection | None:
    """The collection with this label that is no arrow head."""
    found = [child for child in axes.collections if child.get_label() == label]
    return found[0] if found else None


def lines_of(graph: Axes) -> dict[int, LineCollection]:
    """The curves of each ring."""
    lines = [child for child in graph.collections if isinstance(child, LineCollection)]
    return {int(str(one.get_label())[5:]): one for one in lines if str(one.get_label()).startswith("ring ")}


def points_of(collection: Collection) -> list[FloatArray]:
    return [np.asarray(path.vertices, dtype=np.float64) for path in collection.get_paths()]


def places(graph: Axes) -> FloatArray:
    """The centre of each rank's circle; in order, if all are drawn."""
    circles = [child for child in graph.collections if isinstance(child, PatchCollection) and child.get_zorder() == 5]
    return np.array([(points.min(axis=0) + points.max(axis=0)) / 2 for points in points_of(circles[0])])


def radius(graph: Axes) -> float:
    circles = [child for child in graph.collections if isinstance(child, PatchCollection) and child.get_zorder() == 5]
    return float(np.ptp(points_of(circles[0])[0], axis=0).mean() / 2)


def hops(decomposition: Decomposition, number: int) -> list[tuple[int, int]]:
    order = decomposition.rings[number].tolist()
    return sorted(zip(order, order[1:] + order[:1], strict=True))


def is_png(content: bytes) -> bool:
    return content.startswith(b"\x89PNG\r\n\x1a\n") and content.endswith(b"IEND\xaeB`\x82")


# ------------------------------------------------------------------------------------------------------- graphs


@examples
def test_each_hop_is_one_curve_from_its_source_to_its_destination(name: str) -> None:
    decomposition = EXAMPLES[name]
    figure = drawn(name)
    for graph in graphs(figure):
        at = places(graph)
        for number, lines in lines_of(graph).items():
            ends = [[int(np.hypot(*(at - end).T).argmin()) for end in curve[[0, -1]]] for curve in points_of(lines)]
            assert sorted(map(tuple, ends)) == hops(decomposition, number)


@examples
def test_every_ring_is_shown_with_all_others_and_by_itself(name: str) -> None:
    decomposition = EXAMPLES[name]
    rings = len(decomposition.rings)
    figure = drawn(name)
    apart = [[number] for number in range(min(rings, MOST_RINGS_DRAWN))] if rings > 1 else []
    few = rings <= MOST_RINGS_DRAWN and decomposition.rings.size <= MOST_HOPS_TOGETHER
    together = [list(range(rings))] if rings < 2 or few else []
    assert [sorted(lines_of(graph)) for graph in graphs(figure)] == together + apart
    names = [graph.get_title() for graph in graphs(figure)]
    assert names == (["all rings"] if together and apart else [""] if together else []) + [
        f"ring {number}" for (number,) in apart
    ]


@pytest.mark.parametrize(
    ("decomposition", "said"),
    [
        (all_rings_on(full_mesh(16)), "shown: the first 12 of 15 rings"),
        (EXAMPLES["many rings"], "shown: the first 12 of 14 rings"),
        (rings_on(ring(76), [range(76)] * 2), "shown: each ring"),
        (EXAMPLES["K8"], ""),
    ],
)
def test_small_graphs_alone_say_what_they_leave_out(decomposition: Decomposition, said: str) -> None:
    figure = draw_decomposition(decomposition, "")
    assert [line for line in suptitles(figure)[0].splitlines() if "shown" in line] == [said] * bool(said)


@pytest.mark.parametrize(("ranks", "roomy"), [(30, True), (90, False)])
def test_arrows_have_heads_where_there_is_room(ranks: int, roomy: bool) -> None:
    graph = graphs(draw_decomposition(rings_on(ring(ranks), [range(ranks)] * 6), ""))[0]
    assert bool([child for child in graph.collections if isinstance(child, PolyCollection)]) == roomy


def suptitles(figure: Figure) -> list[str]:
    return [text.get_text() for part in figure.subfigs for text in part.texts]


@examples
def test_a_ring_has_one_colour_of_its_own_everywhere(name: str) -> None:
    figure = drawn(name)
    colors: dict[int, set[str]] = {}
    for graph in graphs(figure):
        for number, lines in lines_of(graph).items():
            colors.setdefault(number, set()).add(to_hex(lines.get_color()[0]))
            colors[number] |= (
                {to_hex(graph.title.get_color())} if len(lines_of(graph)) == 1 < len(graphs(figure)) else set()
            )
    for number, name in enumerate(table(figure).get_yticklabels()[: len(colors)]):
        colors[number].add(to_hex(name.get_color()))
        cells = labelled(table(figure), f"ring {number}")
        colors[number] |= {to_hex(cells.get_facecolor()[0])} if cells is not None else set()
    assert all(len(seen) == 1 for seen in colors.values())
    assert len(set.union(*colors.values())) == len(colors)


def test_all_rings_that_are_drawn_have_different_colours() -> None:
    assert len(set(ring_pictures._COLORS)) == MOST_RINGS_DRAWN


@examples
def test_hops_between_the_same_ranks_do_not_cover_each_other(name: str) -> None:
    graph = graphs(drawn(name))[0]
    at = places(graph)
    between: dict[frozenset[int], list[FloatArray]] = {}
    for lines in lines_of(graph).values():
        for points in points_of(lines):
            ends = frozenset(int(np.hypot(*(at - end).T).argmin()) for end in (points[0], points[-1]))
            between.setdefault(ends, []).append(points[len(points) // 2])
    wide = float(np.ptp(at, axis=0).max())
    for middles in between.values():
        for one, other in itertools.combinations(middles, 2):
            assert np.hypot(*(one - other)) > 0.01 * wide


@pytest.mark.parametrize("shape", [(3, 3), (2, 5), (4, 4), (6, 6), (3, 3, 3), (4, 4, 4)])
def test_no_hop_of_a_torus_runs_through_a_rank(shape: tuple[int, ...]) -> None:
    """Links around the end pass all ranks of their row, or curve around them."""
    layout = without_rings(torus(shape))
    for source, destination in layout.topology.rank_pairs():
        curve = layout.curve(source, destination, 0)
        others = np.delete(layout.points, [source, destination], axis=0)
        gap = np.hypot(*(curve[:, None] - others).transpose(2, 0, 1)).min()
        assert gap > 0.19 * layout.nearest


@given(
    st.lists(st.tuples(st.floats(-1, 1), st.floats(-1, 1)), min_size=1, max_size=3),
    st.floats(0.01, 0.2),
    st.floats(0.0, 0.2),
)
def test_an_arrow_touches_the_circle_it_points_at(bends: list[tuple[float, float]], size: float, head: float) -> None:
    curve = smooth(np.array([(-1.0, 0.0), *bends, (1.0, 0.0)]))
    line, triangle = arrow(curve, size, head)
    to_end = [float(np.hypot(*(point - (1.0, 0.0)))) for point in (triangle[0], line[-1])]
    assert to_end[0] == pytest.approx(size, abs=0.02)
    assert to_end[1] == pytest.approx(size + head, abs=0.02)
    assert line[0].tolist() == [-1.0, 0.0]
    assert (triangle[1] + triangle[2]) / 2 == pytest.approx(line[-1])


@pytest.mark.parametrize(("name", "unused"), [("custom", 8), ("cube", 8), ("few", 12), ("torus", 0)])
def test_unused_links_are_grey_and_used_ones_are_not(name: str, unused: int) -> None:
    for graph in graphs(drawn(name)):
        grey = labelled(graph, "unused")
        assert grey is not None
        assert len(grey.get_paths()) == unused


def test_too_many_unused_links_are_left_out() -> None:
    for ranks in (32, 33):
        graph = graphs(draw_decomposition(rings_on(full_mesh(ranks), [range(ranks)]), ""))[0]
        grey = labelled(graph, "unused")
        assert grey is not None
        unused = ranks * (ranks - 2)
        assert len(grey.get_paths()) == (unused if unused <= MOST_WIRES else 0)


def test_lines_are_as_wide_as_shares() -> None:
    shares = (Fraction(1, 2), Fraction(1, 3), Fraction(1, 6))
    figure = draw_decomposition(rings_on(full_mesh(8), hamiltonian_cycles(8)[:3].tolist(), shares), "")
    for graph in graphs(figure):
        for number, lines in lines_of(graph).items():
            assert lines.get_linewidth()[0] == pytest.approx(1.3 * 3 * float(shares[number]))
    assert [graph.get_title() for graph in graphs(figure)[1:]] == ["ring 0: 1/2", "ring 1: 1/3", "ring 2: 1/6"]
    assert [tick.get_text() for tick in table(figure).get_yticklabels()] == [
        "ring 0: 1/2",
        "ring 1: 1/3",
        "ring 2: 1/6",
    ]


# ------------------------------------------------------------------------------------------------------- layout


sizes = st.integers(1, 6)
insides, networks = st.sampled_from(["full-mesh", "switch"]), st.sampled_from(["fabric", "rails"])
many_ranks = st.one_of(*(st.builds(builder, st.integers(1, 60)) for builder in (full_mesh, switch, ring)))
topologies = st.one_of(
    many_ranks,
    st.builds(torus, st.lists(sizes, min_size=1, max_size=3)),
    st.builds(nodes, sizes, sizes, insides, networks),
)


def without_rings(topology: Topology) -> Layout:
    return lay_out(topology, np.empty((0, topology.world_size), dtype=np.int32))


@settings(max_examples=30)
@given(topologies)
def test_no_two_vertices_share_a_place(topology: Topology) -> None:
    layout = without_rings(topology)
    assert layout.positions.keys() == set(topology.vertices)
    assert len(layout.points) < 2 or layout.nearest > 0.01 * layout.span


@pytest.mark.parametrize("copies", [1, 2, 4])
def test_switches_that_join_the_same_ranks_stand_beside_each_other(copies: int) -> None:
    ends = [(rank, f"plane{copy}") for copy in range(copies) for rank in range(4)]
    links = [Link(*pair, 50e9, 1e-6) for a, b in ends for pair in ((a, b), (b, a))]
    found = without_rings(Topology("planes", 4, tuple(links))).positions
    planes = np.array([found[f"plane{copy}"] for copy in range(copies)])
    assert planes.mean(axis=0) == pytest.approx([0, 0], abs=1e-9)
    assert len(np.unique(planes.round(6), axis=0)) == copies


def around(at: FloatArray) -> list[int]:
    """Points on a circle clockwise, from the top."""
    return [int(point) for point in np.argsort(np.arctan2(at[:, 0], at[:, 1]) % (2 * np.pi - 1e-9))]


@pytest.mark.parametrize(
    "topology", [full_mesh(7), switch(7), ring(7), circulant(7, (1, 3)), without_links(full_mesh(7), ["0-1"])]
)
def test_ranks_stand_on_a_circle_in_their_order(topology: Topology) -> None:
    layout = lay_out(topology, np.array([[0, 2, 4, 6, 1, 3, 5]], dtype=np.int32))
    assert around(layout.points[:7]) == list(range(7))


@given(st.permutations(range(7)))
def test_ranks_with_few_links_stand_in_the_order_of_their_ring(order: list[int]) -> None:
    topology = linked("mixed", 7, list(zip(order, order[1:] + order[:1], strict=True)))
    layout = lay_out(topology, np.array([order], dtype=np.int32))
    start = order.index(0)
    assert around(layout.points) == order[start:] + order[:start]


def test_a_torus_is_a_grid() -> None:
    at = places(graphs(draw_decomposition(TORUS, ""))[0]).reshape(3, 3, 2)
    assert np.ptp(at[:, :, 1], axis=1) == pytest.approx([0, 0, 0], abs=1e-9)
    assert np.ptp(at[:, :, 0], axis=0) == pytest.approx([0, 0, 0], abs=1e-9)
    assert (np.diff(at[:, :, 0], axis=1) > 0).all()
    assert (np.diff(at[:, :, 1], axis=0) < 0).all()


def test_a_name_alone_makes_no_grid() -> None:
    for name in ("torus:2x4", "torus:3x3", "torus:0x8", "torus:2x2x2x2x2"):
        topology = linked(name, 8, [(a, (a + step) % 8) for a in range(8) for step in (1, 3)])
        assert ring_layout._grid_shape(topology) is None


@pytest.mark.parametrize("inside", ["full-mesh", "switch"])
@pytest.mark.parametrize("network", ["fabric", "rails"])
@pytest.mark.parametrize(("node_count", "per_node"), [(2, 2), (2, 4), (3, 3), (4, 8), (8, 4)])
def test_ranks_of_a_node_stand_together(node_count: int, per_node: int, inside: str, network: str) -> None:
    topology = nodes(node_count, per_node, inside, network)  # type: ignore[arg-type]
    layout = without_rings(topology)
    at = layout.points[: topology.world_size].reshape(node_count, per_node, 2)
    width = max(float(np.hypot(*(a - b))) for node in at for a, b in itertools.combinations(node, 2))
    next_to_each_other = float(np.hypot(*(at[0, 0] - at[0, 1])))
    assert layout.nearest > 0.3 * next_to_each_other
    centres = at.mean(axis=1)
    assert all(np.hypot(*(a - b)) > width for a, b in itertools.combinations(centres, 2))


# -------------------------------------------------------------------------------------------------------- table


def uses(decomposition: Decomposition, number: int) -> Counter[str]:
    topology = decomposition.topology
    return Counter(
        topology.links[link].name for hop in hops(decomposition, number) for link in topology.route(*hop).links
    )


def cells(panel: Axes, label: str) -> list[tuple[int, str]]:
    """The row and the link of each rectangle in a collection."""
    names = {
        round(tick, 6): text.get_text() for tick, text in zip(panel.get_xticks(), panel.get_xticklabels(), strict=True)
    }
    collection = labelled(panel, label)
    assert collection is not None
    middles = [(points.min(axis=0) + points.max(axis=0)) / 2 for points in points_of(collection)]
    return sorted((round(y), names[round(x, 6)]) for x, y in middles)


def is_link_table(panel: Axes) -> bool:
    return panel.get_xlabel() != "rank"


@examples
def test_a_table_of_links_fills_the_cells_that_rings_use(name: str) -> None:
    decomposition = EXAMPLES[name]
    panel = table(drawn(name))
    rings = range(len(decomposition.rings))
    distinct = len(rings) < 2 or len({tuple(sorted(uses(decomposition, number).items())) for number in rings}) > 1
    assert is_link_table(panel) == (distinct and len(decomposition.topology.links) <= MOST_LINK_COLUMNS)
    if not is_link_table(panel):
        return
    for number in rings:
        assert cells(panel, f"ring {number}") == sorted((number, name) for name in uses(decomposition, number))
    ever = set().union(*(uses(decomposition, number) for number in rings))
    never = {link.name for link in decomposition.topology.links} - ever
    assert cells(panel, "unused") == sorted((number, name) for number in rings for name in never)
    again = [count for number in rings for count in uses(decomposition, number).values() if count > 1]
    assert sorted(text.get_text() for text in panel.texts) == sorted(map(str, again))


@examples
def test_columns_are_grouped_by_where_links_start(name: str) -> None:
    panel = table(drawn(name))
    if is_link_table(panel):
        sources = [text.get_text().split("->")[0] for text in panel.get_xticklabels()]
        groups = [source for source, _ in itertools.groupby(sources)]
        assert len(groups) == len(set(groups))
        gaps = np.diff(panel.get_xticks())
        assert gaps.tolist() == [1.0 if a == b else 1.5 for a, b in itertools.pairwise(sources)]


@pytest.mark.parametrize("topology", [switch(8), full_mesh(13)], ids=lambda topology: topology.name)
def test_a_table_of_ranks_says_where_each_sends(topology: Topology) -> None:
    decomposition = all_rings_on(topology)
    panel = table(draw_decomposition(decomposition, ""))
    assert not is_link_table(panel)
    written = {
        (round(row), round(rank)): int(str(number.get_label()))
        for number in panel.collections
        if isinstance(number, PathCollection)
        for rank, row in np.asarray(number.get_offsets())
    }
    expected = {(row, a): b for row in range(len(decomposition.rings)) for a, b in hops(decomposition, row)}
    assert written == expected
    (image,) = panel.images
    shade = image.get_array()
    assert shade is not None
    assert all(shade[row, a] == (b - a) % topology.world_size for (row, a), b in expected.items())


def test_numbers_are_left_out_where_they_do_not_fit() -> None:
    panel = table(many())
    assert panel.images
    assert not [child for child in panel.collections if isinstance(child, PathCollection)]


# --------------------------------------------------------------------------------------------------- legibility


@examples
def test_numbers_of_ranks_do_not_overlap_and_lie_in_their_circles(name: str) -> None:
    decomposition = EXAMPLES[name]
    figure = drawn(name)
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    ranks = decomposition.topology.world_size
    for graph in graphs(figure):
        numbers = [text for text in graph.texts if text.get_text().isdecimal()]
        assert [int(text.get_text()) for text in numbers] in (list(range(ranks)), [])
        boxes = [text.get_window_extent(renderer) for text in numbers]
        assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
        if numbers:
            size = radius(graph) * np.hypot(*(graph.transData.transform((1, 0)) - graph.transData.transform((0, 0))))
            assert all(np.hypot(box.width, box.height * 0.7) / 2 < size * 1.05 for box in boxes)
    assert [int(text.get_text()) for text in graphs(figure)[0].texts if text.get_text().isdecimal()] == list(
        range(ranks)
    )


@pytest.mark.parametrize("ranks", [64, 100, 255])
def test_of_many_ranks_some_have_numbers_that_do_not_overlap(ranks: int) -> None:
    figure = draw_decomposition(rings_on(ring(ranks), [range(ranks)]), "")
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    graph = graphs(figure)[0]
    boxes = [text.get_window_extent(renderer) for text in graph.texts]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    assert len(boxes) >= 8
    assert len(places(graph)) + len(boxes) == ranks


@examples
def test_all_that_is_drawn_lies_inside_its_panel(name: str) -> None:
    for graph in graphs(drawn(name)):
        curves = np.vstack([*itertools.chain(*map(points_of, lines_of(graph).values()))])
        ranks = places(graph)
        for axis, (low, high) in enumerate((graph.get_xlim(), graph.get_ylim())):
            assert low <= min(curves[:, axis].min(), ranks[:, axis].min() - radius(graph))
            assert max(curves[:, axis].max(), ranks[:, axis].max() + radius(graph)) <= high


# ---------------------------------------------------------------------------------------------------- rendering


@pytest.mark.parametrize(
    "decomposition",
    [
        all_rings_on(full_mesh(1)),
        rings_on(full_mesh(3), []),
        rings_on(full_mesh(2), [[0, 1]] * 255),
        all_rings_on(switch(20)),
    ],
    ids=["one rank", "no rings", "255 rings", "switch of 20"],
)
def test_sizes_stay_bounded(decomposition: Decomposition) -> None:
    figure = draw_decomposition(decomposition, "sizes")
    assert figure.get_figwidth() == 10
    assert figure.get_figheight() < 18
    assert is_png(render(figure, "png"))


def test_pictures_of_many_ranks_are_small_files() -> None:
    svg = render(many(), "svg")
    ElementTree.fromstring(svg)
    assert len(svg) < 2_000_000


def test_the_same_decomposition_gives_the_same_bytes() -> None:
    first, second = (render(draw_decomposition(FEW, "same"), "png") for _ in range(2))
    assert first == second


def test_another_process_draws_the_same() -> None:
    """It orders sets of texts differently."""
    program = """
import numpy as np
from tasp_lab.builders import nodes
from tasp_lab.decomposition import Decomposition
from tasp_lab.pictures import render
from tasp_lab.ring_pictures import draw_decomposition
few = Decomposition(nodes(2, 2, "switch", "rails"), np.array([[0, 1, 3, 2]]), 1, "because")
print(render(draw_decomposition(few, "same"), "svg").decode())
"""
    line = [sys.executable, "-c", program]
    environment = {"PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == render(draw_decomposition(FEW, "same"), "svg").decode().strip()


def test_nothing_global_is_set() -> None:
    before = copy.deepcopy(dict(matplotlib.rcParams))
    render(draw_decomposition(CUBE, "quiet"), "svg")
    assert dict(matplotlib.rcParams) == before
    assert "matplotlib.pyplot" not in vars(ring_pictures)


@pytest.mark.parametrize("text", ["", "$x^", "$\\frac{$", "<&>", "two\nlines", "long " * 60, "l" * 300])
def test_any_text_is_taken_as_it_is(text: str) -> None:
    name = text.strip() or "switch"
    links = [Link(*pair, 50e9, 1e-6) for rank in range(3) for pair in ((rank, name), (name, rank))]
    decomposition = rings_on(Topology(text, 3, tuple(links)), [[0, 1, 2]], reason=text)
    ElementTree.fromstring(render(draw_decomposition(decomposition, text), "svg"))


def test_the_switch_of_a_star_has_its_name_once() -> None:
    written = [text.get_text() for graph in graphs(drawn("switch")) for text in graph.texts]
    assert written.count("switch") == 1
