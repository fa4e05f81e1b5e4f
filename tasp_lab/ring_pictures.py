"""Pictures of a decomposition: the way of each ring over the graph, and the table of what it uses.

A *hop* is one step of a ring, from a rank to the next. Over a link of its own it is an arrow along that link; through
switches it is an arrow from rank to rank that bends towards them.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import matplotlib
import networkx as nx
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PatchCollection, PathCollection, PolyCollection
from matplotlib.colors import ListedColormap, to_hex
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Circle, Rectangle
from matplotlib.textpath import TextPath
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Affine2D
from scipy.spatial import KDTree

from tasp_lab.decomposition import Decomposition
from tasp_lab.hamiltonian import IntArray
from tasp_lab.pictures import (
    _IDLE,
    _INK,
    _QUIET,
    _WIDTH_INCHES,
    FloatArray,
    _lines_height_inches,
    _new_figure,
    _quieten,
    _rectangles,
    _wrapped,
)
from tasp_lab.topology import Topology, Vertex

MOST_HOPS_TOGETHER = 150
"""With more hops than this in all rings together, several rings are no longer drawn into one graph."""

MOST_RINGS_APART = 12
"""As many rings, at most, get a graph of their own."""

MOST_LINK_COLUMNS = 120
"""With more links than this, the table says which rank comes next instead of which links are used."""

_MOST_SPRINGS = 100
"""Laying out a graph as if its links were springs takes time with the square of its vertices, or more."""

_MOST_VECTORS = 100
"""With more ranks than this, an SVG holds their circles and hops as images, which are smaller than as many shapes."""

_NAME_INCHES = 0.25
_LEAST_ARROW_INCHES = 0.15
"""Arrow heads need so much room between neighbouring vertices."""

_LEAST_POINTS = 4.5
_DIGIT_EM = 0.64
"""The width of a digit as a part of the font size."""

_WIRE = "#d5d8dd"
_COLORS = (
    "#1f77b4", "#d62728", "#2ca02c", "#ff7f0e", "#9467bd", "#17becf",
    "#8c564b", "#e377c2", "#bcbd22", "#1b2a6b", "#7fcf7f", "#000000",
)  # fmt: skip


def draw_decomposition(decomposition: Decomposition, title: str) -> Figure:
    """Draw the rings over the graph of their topology, and below them the routing table.

    One graph shows all rings, and each of the first `MOST_RINGS_APART` has a small one of its own. With more than
    `MOST_HOPS_TOGETHER` hops only the latter are drawn. If the rings' shares of the data differ, lines are as wide as
    those. Grey links are used by no ring.

    The table has a row per ring and a column per link, and says which links the ring uses. If there are more than
    `MOST_LINK_COLUMNS` links, or if all rings use the same ones, as they do on a switch, it has a column per rank
    instead and says where that rank sends.

    >>> from tasp_lab.builders import full_mesh
    >>> from tasp_lab.hamiltonian import hamiltonian_cycles
    >>> decomposition = Decomposition(full_mesh(5), hamiltonian_cycles(5), 1, "steps of 1, 2, 3 and 4")
    >>> figure = draw_decomposition(decomposition, "Four rings of five ranks")
    >>> [axes.get_title() for axes in figure.axes]
    ['all rings', 'ring 0', 'ring 1', 'ring 2', 'ring 3', '']
    """
    scene = _Scene(decomposition)
    graphs_inches, table_inches = _graphs_height_inches(scene), _table_height_inches(scene)
    figure = _new_figure(title, graphs_inches + table_inches)
    rows = figure.add_gridspec(2, 1, height_ratios=[graphs_inches, table_inches])
    _draw_graphs(figure.add_subfigure(rows[0]), scene)
    _draw_table(figure.add_subfigure(rows[1]), scene)
    return figure


@dataclass(frozen=True)
class _Scene:
    """A decomposition and what the panels say of it."""

    decomposition: Decomposition

    @property
    def topology(self) -> Topology:
        return self.decomposition.topology

    @property
    def rings(self) -> IntArray:
        return self.decomposition.rings

    @property
    def shares(self) -> tuple[Fraction, ...]:
        return self.decomposition.shares

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Each ring's number, with its share where shares differ."""
        unequal = len(set(self.shares)) > 1
        return tuple(f"ring {ring}" + f": {_say_share(s)}" * unequal for ring, s in enumerate(self.shares))

    @property
    def together(self) -> bool:
        """Whether one graph shows all rings."""
        return len(self.rings) < 2 or self.rings.size <= MOST_HOPS_TOGETHER

    @property
    def apart(self) -> int:
        """How many rings have a graph of their own."""
        return min(len(self.rings), MOST_RINGS_APART) if len(self.rings) > 1 else 0

    @cached_property
    def colors(self) -> tuple[str, ...]:
        """A colour for each ring that a graph shows."""
        count = len(self.rings) if self.together else self.apart
        if count <= len(_COLORS):
            return _COLORS[:count]
        return tuple(to_hex(shade) for shade in matplotlib.colormaps["turbo"](np.linspace(0.02, 0.98, count)))

    @cached_property
    def onward(self) -> IntArray:
        """Int array (rings, world_size): where rank `column` sends on ring `row`."""
        onward = np.empty_like(self.rings)
        np.put_along_axis(onward, self.rings, np.roll(self.rings, -1, axis=1), axis=1)
        return onward

    @cached_property
    def uses(self) -> tuple[Counter[int], ...]:
        """For each ring how often it uses each link, by index."""
        return tuple(
            Counter(link for hop in enumerate(row) for link in self.topology.route(*hop).links)
            for row in self.onward.tolist()
        )

    @cached_property
    def unused(self) -> tuple[int, ...]:
        """The links that no ring uses."""
        return tuple(sorted(set(range(len(self.topology.links))).difference(*self.uses)))

    @cached_property
    def layout(self) -> _Layout:
        return _Layout(self.topology, _positions(self.topology, self.rings))

    @cached_property
    def curves(self) -> tuple[list[FloatArray], ...]:
        """For each ring that a graph shows the curves of its hops, those of one pair of ranks side by side."""
        used: Counter[tuple[int, int]] = Counter()
        curves = []
        for row in self.onward[: len(self.colors)].tolist():
            curves.append([self.layout.curve(*hop, used[hop]) for hop in enumerate(row)])
            used.update(enumerate(row))
        return tuple(curves)

    @cached_property
    def window(self) -> tuple[FloatArray, FloatArray]:
        """The lower left and the upper right corner of what a graph shows."""
        points = np.vstack([self.layout.points, *itertools.chain(*self.curves)])
        margin = min(0.22 * self.layout.nearest, 0.09 * self.layout.span)
        return points.min(axis=0) - margin, points.max(axis=0) + margin


def _say_share(share: Fraction) -> str:
    """
    >>> _say_share(Fraction(1, 7)), _say_share(Fraction(12345, 67891))
    ('1/7', '18.2%')
    """
    return str(share) if share.denominator < 1000 else f"{100 * float(share):.3g}%"


# ------------------------------------------------------------------------------------------------------- layout


def _positions(topology: Topology, rings: IntArray) -> dict[Vertex, FloatArray]:
    """Where each vertex is drawn: nodes as circles around a circle, tori as grids, complete graphs as a circle.

    Any other graph is laid out as if its links were springs, unless that puts vertices upon each other.
    """
    ranks, links_out = topology.world_size, topology.linked_pairs.sum(axis=1)
    if per_node := _ranks_per_node(topology):
        # A quarter of a step turns inner ranks out of the way of hops to other nodes.
        inside = min(0.42, 0.6 * math.sin(math.pi * per_node / ranks)) * _circle(per_node, 0.25 / per_node)
        return _with_switches(topology, (_circle(ranks // per_node)[:, None] + inside).reshape(-1, 2))
    if (grid := _grid(topology)) is not None:
        return _with_switches(topology, grid)
    if len(rings) and (links_out == 1).all():
        return _with_switches(topology, _circle(ranks)[np.argsort(rings[0])])
    if ranks <= _MOST_SPRINGS and (links_out < ranks - 1).any():
        found = nx.kamada_kawai_layout(_graph(topology))
        springs = _Layout(topology, {vertex: np.array(found[vertex]) for vertex in topology.vertices})
        if springs.nearest > 0.03 * springs.span:
            return springs.positions
    return _with_switches(topology, _circle(ranks))


def _circle(count: int, first_turns: float = 0.0) -> FloatArray:
    """Points on a circle of radius 1, clockwise, the first so many turns from the top; two lie side by side."""
    angle = 2 * np.pi * (np.arange(count) / count + first_turns - 0.25 * (count == 2))
    return np.column_stack([np.sin(angle), np.cos(angle)])


def _ranks_per_node(topology: Topology) -> int:
    """The size of nodes if links and switches of their own join ranks to several blocks of equal size, else 0."""
    ranks, graph = topology.world_size, _graph(topology)
    inside = graph.subgraph(range(ranks)).copy()
    for switch in topology.vertices[ranks:]:
        joined = sorted(vertex for vertex in graph[switch] if isinstance(vertex, int))
        if joined and len(joined) < ranks and joined == list(range(joined[0], joined[-1] + 1)):
            nx.add_path(inside, joined)
    blocks = sorted(sorted(map(int, block)) for block in nx.connected_components(inside))
    size = len(blocks[0])
    regular = blocks == [list(range(first, first + size)) for first in range(0, ranks, size)]
    return size if regular and 1 < size < ranks else 0


def _grid(topology: Topology) -> FloatArray | None:
    """Positions (world_size, 2) if the name gives dimensions, as torus:4x4, and each link runs along one of them.

    Ranks are numbered along the last dimension first. The third dimension from the end goes to the back, the fourth
    stands beside.
    """
    ranks, shape = topology.world_size, _dimensions(topology)
    if not 1 < len(shape) < 5 or math.prod(shape) != ranks:
        return None
    place = np.column_stack(np.unravel_index(np.arange(ranks), shape))
    ends = np.array(_graph(topology).subgraph(range(ranks)).edges, dtype=np.int64).reshape(-1, 2)
    if (np.count_nonzero(place[ends[:, 0]] != place[ends[:, 1]], axis=1) != 1).any():
        return None
    back = 0.8 / shape[max(len(shape) - 3, 0)]
    axes = np.array([(shape[-1] + 0.8, -0.3), (back, back), (0.0, -1.0), (1.0, 0.0)])
    return np.asarray(place @ axes[-len(shape) :], dtype=np.float64)


def _dimensions(topology: Topology) -> tuple[int, ...]:
    if topology.name.startswith("hypercube"):
        return (2,) * (topology.world_size.bit_length() - 1)
    named = re.search(r"\b(?:torus|grid):(\d+(?:x\d+)+)\b", topology.name)
    return tuple(map(int, named[1].split("x"))) if named else ()


def _graph(topology: Topology) -> nx.Graph[Vertex]:
    graph: nx.Graph[Vertex] = nx.Graph()
    graph.add_nodes_from(topology.vertices)
    graph.add_edges_from((link.source, link.destination) for link in topology.links)
    return graph


def _with_switches(topology: Topology, ranks: FloatArray) -> dict[Vertex, FloatArray]:
    """Each switch amid what it joins; several that would lie on one point around it."""
    graph, placed = _graph(topology), dict[Vertex, FloatArray](enumerate(ranks))
    switches = waiting = topology.vertices[topology.world_size :]
    while waiting:
        ends = {switch: [placed[end] for end in graph[switch] if end in placed] for switch in waiting}
        placed |= {switch: np.mean(points, axis=0) for switch, points in ends.items() if points}
        waiting = tuple(switch for switch in waiting if switch not in placed)
    stacks: dict[tuple[float, ...], list[Vertex]] = defaultdict(list)
    for switch in switches:
        stacks[tuple((placed[switch].round(6) + 0.0).tolist())].append(switch)
    for stack in stacks.values():
        if len(stack) > 1:
            around = 0.3 * _circle(len(stack))
            placed |= {switch: placed[switch] + offset for switch, offset in zip(stack, around, strict=True)}
    return placed


@dataclass(frozen=True)
class _Layout:
    """Vertices in the plane, and the curves of hops between them."""

    topology: Topology
    positions: dict[Vertex, FloatArray]

    @cached_property
    def points(self) -> FloatArray:
        """Array (vertices, 2) in the topology's order."""
        return np.array([self.positions[vertex] for vertex in self.topology.vertices])

    @cached_property
    def nearest(self) -> float:
        """The distance of the two vertices that are closest to each other."""
        if len(self.points) < 2:
            return 1.0
        distances, _ = KDTree(self.points).query(self.points, k=[2])
        return float(np.min(distances))

    @cached_property
    def span(self) -> float:
        """The longer side of the box around all vertices."""
        return float(np.ptp(self.points, axis=0).max()) or 1.0

    def curve(self, source: int, destination: int, use: int) -> FloatArray:
        """Points from one rank to another; the more a pair has been used before, the wider the curve.

        Every curve bends to the left, which separates it from the way back.
        """
        start, end = self.positions[source], self.positions[destination]
        along, length = end - start, float(np.hypot(*(end - start)))
        left = np.array([-along[1], along[0]]) / length
        aside = (0.03 + 0.06 * use) * min(self.span, 4 * length) * left
        links = self.topology.route(source, destination).links
        if len(links) > 1:
            switches = [self.positions[self.topology.links[link].destination] for link in links[:-1]]
            bends = [0.6 * (start + end) / 2 + 0.4 * np.mean(switches, axis=0) + aside]
        elif self._passes_another(start, end):
            around = (0.28 + 0.1 * use) * self.nearest * left
            ahead = min(0.25, 0.5 * self.nearest / length) * along
            bends = [start + ahead + around, end - ahead + around]
        else:
            bends = [(start + end) / 2 + aside]
        return _smooth(np.array([start, *bends, end]))

    def _passes_another(self, start: FloatArray, end: FloatArray) -> bool:
        """Whether the straight way from start to end touches a vertex in between."""
        along = end - start
        place = (self.points - start) @ along / (along @ along)
        distance = np.abs((self.points - start) @ np.array([-along[1], along[0]])) / np.hypot(*along)
        between = (place > 1e-6) & (place < 1 - 1e-6)
        return bool((distance[between] < 0.3 * self.nearest).any())


def _smooth(corners: FloatArray) -> FloatArray:
    """Points of a curve from the first to the last corner that bends towards those between: a quadratic B-spline."""
    bends = corners[1:-1]
    joints = np.vstack([corners[:1], (bends[:-1] + bends[1:]) / 2, corners[-1:]])
    t = np.linspace(0, 1, 25)[:, None]
    pieces = [
        (1 - t) ** 2 * start + 2 * t * (1 - t) * bend + t**2 * end
        for start, bend, end in zip(joints[:-1], bends, joints[1:], strict=True)
    ]
    return np.vstack(pieces)


# ------------------------------------------------------------------------------------------------------- graphs


def _graphs_height_inches(scene: _Scene) -> float:
    return _lines_height_inches(_graphs_heading(scene)) + _drawing_height_inches(scene)


def _graphs_heading(scene: _Scene) -> str:
    count, links = len(scene.rings), len(scene.topology.links)
    rings = "1 ring" if count == 1 else f"{count} rings"
    lines = [f"{rings} on {scene.topology.name}; {links - len(scene.unused)} of {links} links used"]
    lines[0] += "; grey: unused" if scene.unused else ""
    used = set[int]().union(*scene.uses)
    if any(isinstance(scene.topology.links[link].destination, str) for link in used):
        lines[0] += "; hops through switches bend towards them"
    lines.append(scene.decomposition.reason)
    if not scene.together:
        some = "each ring" if scene.apart == count else f"the first {scene.apart} of {count} rings"
        width_inches, height_inches = _apart_inches(scene)
        roomy = _has_arrow_heads(scene, _unit_inches(scene, width_inches, height_inches))
        lines.append(f"shown: {some}" + ("" if roomy else ", without arrow heads"))
    return _wrapped("\n".join(lines), 130)


def _drawing_height_inches(scene: _Scene) -> float:
    """The height of all graphs: the common one is as wide as half the figure, others stand in a grid."""
    width, height = scene.window[1] - scene.window[0]
    if scene.together:
        most_inches = min(1 + 0.8 * scene.topology.world_size, 5)
        least_inches = min(1.5 + 0.25 * scene.apart, 3.5)
        return _NAME_INCHES + float(np.clip(_WIDTH_INCHES / 2 * height / width, least_inches, most_inches))
    columns = _columns_apart(scene)
    rows = -(-scene.apart // columns)
    return float(rows * (_NAME_INCHES + _WIDTH_INCHES / columns * min(height / width, 1.2)))


def _columns_apart(scene: _Scene) -> int:
    """In how many columns graphs of single rings stand: beside the common graph as many as let them be largest."""
    if not scene.together:
        return min(scene.apart, 4)
    (width, height), room_inches = scene.window[1] - scene.window[0], _drawing_height_inches(scene)

    def scale(columns: int) -> float:
        rows = -(-scene.apart // columns)
        return float(min(_WIDTH_INCHES / 2 / columns / width, (room_inches / rows - _NAME_INCHES) / height))

    return max(range(1, scene.apart + 1), key=scale)


def _apart_inches(scene: _Scene) -> tuple[float, float]:
    """Width and height of the graph of a single ring, its name included."""
    columns = _columns_apart(scene)
    width = _WIDTH_INCHES / 2 if scene.together else _WIDTH_INCHES
    return width / columns, _drawing_height_inches(scene) / -(-scene.apart // columns)


def _unit_inches(scene: _Scene, width_inches: float, height_inches: float) -> float:
    """How long 1 is in a graph of this size, its name included."""
    room_inches = np.array([width_inches, height_inches - _NAME_INCHES])
    return 0.95 * float((room_inches / (scene.window[1] - scene.window[0])).min())


def _has_arrow_heads(scene: _Scene, unit_inches: float) -> bool:
    return scene.layout.nearest * unit_inches > _LEAST_ARROW_INCHES


def _draw_graphs(figure: SubFigure, scene: _Scene) -> None:
    figure.suptitle(_graphs_heading(scene), x=0.01, ha="left", fontsize=9, color=_INK, parse_math=False)
    height, every = _drawing_height_inches(scene), range(len(scene.rings))
    if not scene.together:
        _draw_apart(figure, scene)
    elif not scene.apart:
        _draw_graph(figure.add_subplot(), scene, every, _WIDTH_INCHES, height)
    else:
        halves = figure.add_gridspec(1, 2)
        panel = figure.add_subfigure(halves[0]).add_subplot()
        panel.set_title("all rings", fontsize=9, color=_INK)
        _draw_graph(panel, scene, every, _WIDTH_INCHES / 2, height)
        _draw_apart(figure.add_subfigure(halves[1]), scene)


def _draw_apart(figure: SubFigure, scene: _Scene) -> None:
    columns = _columns_apart(scene)
    width_inches, height_inches = _apart_inches(scene)
    cells = figure.add_gridspec(-(-scene.apart // columns), columns)
    for ring in range(scene.apart):
        panel = figure.add_subplot(cells[ring // columns, ring % columns])
        panel.set_title(scene.names[ring], fontsize=8, color=scene.colors[ring])
        _draw_graph(panel, scene, [ring], width_inches, height_inches)


def _draw_graph(panel: Axes, scene: _Scene, rings: Sequence[int], width_inches: float, height_inches: float) -> None:
    """Some rings over the graph, in a panel of this size."""
    low, high = scene.window
    panel.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), aspect="equal")
    panel.set_axis_off()
    unit_inches = _unit_inches(scene, width_inches, height_inches)
    _draw_unused(panel, scene)
    for ring in rings:
        _draw_ring(panel, scene, ring, unit_inches)
    beside_common = scene.together and len(rings) < len(scene.rings)
    _draw_switches(panel, scene, unit_inches, named=not beside_common)
    _draw_ranks(panel, scene, unit_inches, named=not beside_common)


def _draw_unused(panel: Axes, scene: _Scene) -> None:
    ends = [(link.source, link.destination) for link in (scene.topology.links[index] for index in scene.unused)]
    cables = {frozenset(pair): pair for pair in ends}.values()
    lines = [np.array([scene.layout.positions[end] for end in cable]) for cable in cables]
    panel.add_collection(LineCollection(lines, colors=_WIRE, linewidths=0.6, zorder=1, label="unused"), autolim=False)


def _draw_ring(panel: Axes, scene: _Scene, ring: int, unit_inches: float) -> None:
    """The hops of a ring as curves, with arrow heads where there is room."""
    roomy = _has_arrow_heads(scene, unit_inches)
    relative_share = float(scene.shares[ring] * len(scene.shares))
    points = (1.3 if roomy else 0.6) * float(np.clip(relative_share, 0.4, 3))
    head = (0.045 + 0.025 * points) / unit_inches if roomy else 0.0
    arrows = [_arrow(curve, _radius(scene, unit_inches), head) for curve in scene.curves[ring]]
    color, name = scene.colors[ring], f"ring {ring}"
    lines = LineCollection([line for line, _ in arrows], colors=color, linewidths=points, zorder=2, label=name)
    lines.set_rasterized(len(arrows) > _MOST_VECTORS)
    panel.add_collection(lines, autolim=False)
    if roomy:
        heads = PolyCollection([triangle for _, triangle in arrows], facecolors=color, linewidths=0, zorder=3)
        panel.add_collection(heads, autolim=False)


def _arrow(curve: FloatArray, radius: float, head: float) -> tuple[FloatArray, FloatArray]:
    """The line of an arrow, and its head: a triangle that touches the circle around the end of the curve."""
    distances = np.hypot(*(curve - curve[-1]).T)
    tip, base = _at_distance(curve, distances, radius), _at_distance(curve, distances, radius + head)
    across = np.array([base[1] - tip[1], tip[0] - base[0]]) * 0.4
    line = np.vstack([curve[:1], curve[1:][distances[1:] > radius + head], base])
    return line, np.array([tip, base + across, base - across])


def _at_distance(curve: FloatArray, distances: FloatArray, distance: float) -> FloatArray:
    """Where a curve comes this near to its end, given the distance of each of its points."""
    last = int(np.flatnonzero(distances > distance).max(initial=0))
    part = (distances[last] - distance) / (distances[last] - distances[last + 1])
    return np.asarray(curve[last] + np.clip(part, 0, 1) * (curve[last + 1] - curve[last]))


def _radius(scene: _Scene, unit_inches: float) -> float:
    """Of the circles that stand for ranks."""
    return min(0.2 * scene.layout.nearest, 0.08 * scene.layout.span, 0.15 / unit_inches)


def _draw_ranks(panel: Axes, scene: _Scene, unit_inches: float, named: bool) -> None:
    """Circles with their numbers; where these do not fit in, a number for every second, fourth, ... if asked for."""
    ranks, radius = scene.topology.world_size, _radius(scene, unit_inches)
    places = scene.layout.points[:ranks]
    points = min(9.0, 72 * unit_inches * 1.6 * radius / max(_DIGIT_EM * len(str(ranks - 1)), 0.9))
    fit = points >= _LEAST_POINTS
    numbered = range(0, ranks if fit or named else 0, 1 if fit else _every(places, 0.28 / unit_inches))
    around = [Circle((x, y), radius) for rank, (x, y) in enumerate(places) if fit or rank not in numbered]
    circles = PatchCollection(around, zorder=5)
    circles.set(facecolor="white", edgecolor=_INK, linewidth=0.8 if fit else 0.4, rasterized=ranks > _MOST_VECTORS)
    panel.add_collection(circles, autolim=False)
    for rank in numbered:
        x, y = places[rank]
        number = panel.text(x, y, str(rank), ha="center", va="center_baseline", color=_INK, zorder=6)
        number.set_fontsize(points if fit else 6)
        if not fit:
            number.set_bbox({"facecolor": "white", "linewidth": 0, "pad": 0.5})


def _every(places: FloatArray, distance: float) -> int:
    """The least power of two such that points that many apart in order are at least this far apart in the plane."""
    step = 1
    while step < len(places) and KDTree(places[::step]).query_pairs(distance):
        step *= 2
    return step


def _draw_switches(panel: Axes, scene: _Scene, unit_inches: float, named: bool) -> None:
    """Squares, with names below them if asked for."""
    half = 0.7 * _radius(scene, unit_inches)
    switches = scene.topology.vertices[scene.topology.world_size :]
    corners = [scene.layout.positions[switch] - half for switch in switches]
    squares = PatchCollection([Rectangle((x, y), 2 * half, 2 * half) for x, y in corners], zorder=4)
    squares.set(facecolor=_QUIET, edgecolor="white")
    panel.add_collection(squares, autolim=False)
    for switch, (x, y) in zip(switches if named else (), corners, strict=False):
        name = panel.text(x + half, y - 0.3 * half, _cut(str(switch)), ha="center", va="top", fontsize=7)
        name.set_parse_math(False)
        name.set(color=_INK, zorder=4, bbox={"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 0.5})


def _cut(name: str) -> str:
    """
    >>> _cut("spine"), _cut("the switch between all of them")
    ('spine', 'the switch betw…')
    """
    name = " ".join(name.split())
    return name if len(name) <= 16 else name[:15] + "…"


# -------------------------------------------------------------------------------------------------------- table


def _table_height_inches(scene: _Scene) -> float:
    return _rows_height_inches(scene) + 0.9


def _rows_height_inches(scene: _Scene) -> float:
    return min(0.2 * len(scene.rings), 6.5)


def _shows_links(scene: _Scene) -> bool:
    """Whether a column per link fits, and rows differ."""
    few = len(scene.topology.links) <= MOST_LINK_COLUMNS
    return few and (len(scene.rings) < 2 or any(uses != scene.uses[0] for uses in scene.uses))


def _draw_table(figure: SubFigure, scene: _Scene) -> None:
    ranks = scene.topology.world_size
    panel = figure.add_subplot()
    _quieten(panel)
    if not len(scene.rings):
        heading = "there are no rings"
        panel.set_axis_off()
    elif _shows_links(scene):
        several = any(count > 1 for uses in scene.uses for count in uses.values())
        heading = "the links that each ring uses" + (", and how often if more than once" if several else "")
        heading += "; hollow: unused" if scene.unused else ""
        _draw_links(panel, scene)
    else:
        heading = f"where each rank sends on each ring; the darker, the further on (modulo {ranks})"
        _draw_onward(panel, scene)
    figure.suptitle(f"routing table: {heading}", x=0.01, ha="left", fontsize=9, color=_INK)
    _label_rings(panel, scene)


def _label_rings(panel: Axes, scene: _Scene) -> None:
    """Name the rows, and repeat the colours of the rings that graphs show."""
    count = len(scene.rings)
    panel.set_ylim(max(count, 1) - 0.5, -0.5)
    if _rows_height_inches(scene) < 0.1 * count:
        panel.yaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 4, 8, 10]))
        panel.set_ylabel("ring", fontsize=9, color=_INK)
    else:
        panel.set_yticks(range(count), scene.names, fontsize=8)
    left, right = panel.get_xlim()
    width = 0.012 * (right - left)
    chips = np.array([(row - 0.42, 0.84, left - 2 * width, left - width) for row in range(len(scene.colors))])
    panel.add_collection(_rectangles(chips, facecolors=scene.colors, label="colours"), autolim=False)
    panel.set_xlim(left - 2 * width, right)


def _draw_links(panel: Axes, scene: _Scene) -> None:
    """A column per link, grouped by where links start; a cell filled where a ring uses the link."""
    links, rings = scene.topology.links, range(len(scene.rings))
    column = _link_columns(scene.topology)
    last = max(column.values(), default=0)
    used = [link for link in column if link not in scene.unused]

    def draw_cells(chosen: Iterable[int], rows: Iterable[int], **style: Any) -> None:
        cells = [(row - 0.42, 0.84, column[link] - 0.45, column[link] + 0.45) for row in rows for link in chosen]
        panel.add_collection(_rectangles(np.array(cells), **style), autolim=False)

    draw_cells(scene.unused, rings, facecolors="none", edgecolors=_WIRE, linewidths=0.5, label="unused")
    draw_cells(used, rings, facecolors=_IDLE, linewidths=0, label="used")
    for ring, uses in enumerate(scene.uses):
        color = scene.colors[ring] if ring < len(scene.colors) else _QUIET
        draw_cells(uses, [ring], facecolors=color, linewidths=0, label=f"ring {ring}")
        for link in (link for link, count in uses.items() if count > 1):
            text = panel.text(column[link], ring, str(uses[link]), ha="center", va="center_baseline", fontsize=7)
            text.set_color("white")
    panel.set_xlim(-0.6, last + 0.6)
    names = ["->".join(_cut(str(end)) for end in (links[link].source, links[link].destination)) for link in column]
    upright = max(map(len, names), default=0) * 0.06 > 0.88 * _WIDTH_INCHES / (last + 1)
    points = min(8.0, 72 * 0.8 * _WIDTH_INCHES / (last + 1))
    panel.set_xticks(list(column.values()), names, fontsize=points, rotation=90 * upright, parse_math=False)


def _link_columns(topology: Topology) -> dict[int, float]:
    """Where the column of each link stands: those that start at one vertex side by side, then a gap."""
    sources = [topology.vertices.index(link.source) for link in topology.links]
    order = sorted(range(len(sources)), key=sources.__getitem__)
    group = list(dict.fromkeys(sources[link] for link in order))
    return {link: place + 0.5 * group.index(sources[link]) for place, link in enumerate(order)}


def _draw_onward(panel: Axes, scene: _Scene) -> None:
    """A column per rank: the number of the rank it sends to, if numbers fit, shaded by how far on that is."""
    count, ranks = scene.onward.shape
    distance = (scene.onward - np.arange(ranks)) % ranks
    shades = ListedColormap(matplotlib.colormaps["YlGnBu"](np.linspace(0.0, 0.45, 256)))
    panel.imshow(distance, cmap=shades, vmin=1, vmax=max(ranks - 1, 2), aspect="auto", interpolation="nearest")
    panel.set_xlabel("rank", fontsize=9, color=_INK)
    panel.set_xticks(range(0, ranks, 2 ** max(0, math.ceil(math.log2(ranks / 40)))))
    column_inches, row_inches = 0.85 * _WIDTH_INCHES / ranks, _rows_height_inches(scene) / count
    points = 72 * min(0.9 * column_inches / (_DIGIT_EM * len(str(ranks - 1))), 0.8 * row_inches, 8 / 72)
    if points >= _LEAST_POINTS:
        _write_numbers(panel, scene.onward, points)


def _write_numbers(panel: Axes, numbers: IntArray, points: float) -> None:
    """Write (rows, columns) of numbers into cells; as shapes, since thousands of texts take seconds."""
    points_to_dots = Affine2D().scale(1 / 72) + panel.figure.dpi_scale_trans
    for number in np.unique(numbers).tolist():
        shape = TextPath((0, 0), str(number), size=points)
        centred = Affine2D().translate(*-shape.get_extents().get_points().mean(axis=0)).transform_path(shape)
        cells = np.argwhere(numbers == number)[:, ::-1]
        written = PathCollection([centred], offsets=cells, offset_transform=panel.transData, label=str(number))
        written.set(facecolor=_INK, linewidth=0)
        written.set_transform(points_to_dots)
        panel.add_collection(written, autolim=False)
