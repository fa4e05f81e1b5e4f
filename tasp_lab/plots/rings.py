"""Plots of a decomposition: the rings over the graph of the topology, or all rings in one matrix of ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Circle, FancyArrowPatch, Rectangle
from matplotlib.ticker import MaxNLocator

from tasp_lab.core.arrays import FloatArray, Int32Array
from tasp_lab.plots.ring_layout import Layout, lay_out
from tasp_lab.plots.timelines import (
    IDLE,
    INK,
    MUTED,
    WIDTH_INCHES,
    hide_frame,
    lines_inches,
    new_figure,
    rectangles,
    wrapped,
)
from tasp_lab.rings.rings import Decomposition, constraint_loads
from tasp_lab.topology.graph import Topology

MAX_HOPS_TOGETHER = 150
"""Maximum number of hops of all rings drawn into one graph."""

MAX_RINGS_DRAWN = 12
"""Maximum number of rings drawn as graphs; more are drawn as a matrix."""

MAX_RANKS_DRAWN = 64
"""Maximum number of ranks drawn as graphs; more are drawn as a matrix."""

MAX_LINK_COLUMNS = 120
"""Maximum number of links in the routing table; with more it lists the next rank instead."""

_NAME_INCHES = 0.25
_MIN_POINTS = 4.5
_DIGIT_EM = 0.64
"""The width of a digit relative to the font size."""

_UNUSED_LINK = "#c9cdd4"
_BEHIND_TEXT = {"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 0.5}
_COLORS = (
    "#1f77b4", "#d62728", "#2ca02c", "#ff7f0e", "#9467bd", "#17becf",
    "#8c564b", "#e377c2", "#bcbd22", "#1b2a6b", "#7fcf7f", "#000000",
)  # fmt: skip


def draw_decomposition(decomposition: Decomposition, title: str) -> Figure:
    """Draw all rings of a decomposition.

    Up to `MAX_RINGS_DRAWN` rings of legible ranks are drawn over the graph of their topology: together in one graph, up
    to `MAX_HOPS_TOGETHER` hops, and each in a separate graph. Line widths are proportional to the shares of the rings;
    unused links are grey. The routing table below has a row per ring and a column per link, which marks the links that
    the ring uses. If there are more than `MAX_LINK_COLUMNS` links, or if all rings use the same links, as on a switch,
    it has a column per rank, which holds the next rank.

    More rings, or more ranks, are drawn as one matrix of sending rank by receiving rank, coloured by ring.

    >>> from tasp_lab.topology.builders import full_mesh
    >>> from tasp_lab.rings.complete_digraph import hamiltonian_cycles
    >>> decomposition = Decomposition(full_mesh(5), hamiltonian_cycles(5), 1, "steps of 1, 2, 3 and 4")
    >>> figure = draw_decomposition(decomposition, "Four rings of five ranks")
    >>> [axes.get_title() for axes in figure.axes]
    ['all rings', 'ring 0', 'ring 1', 'ring 2', 'ring 3', '']
    """
    scene = _Scene(decomposition)
    heading = _heading(scene)
    if scene.as_matrix:
        figure = new_figure(title, lines_inches(heading) + 8.6)
        graphs, table = figure.subfigures(2, 1, squeeze=False, height_ratios=[lines_inches(heading), 8.6])[:, 0]
        _draw_matrix(table, scene)
    else:
        graphs_inches = lines_inches(heading) + _graphs_inches(scene)
        table_inches = 0.6 + 0.2 * len(scene.rings) + max(0.3, _vertical_names_inches(scene))
        figure = new_figure(title, graphs_inches + table_inches)
        graphs, table = figure.subfigures(2, 1, squeeze=False, height_ratios=[graphs_inches, table_inches])[:, 0]
        _draw_graphs(graphs, scene)
        _draw_table(table, scene)
    graphs.suptitle(heading, x=0.01, ha="left", fontsize=9, color=INK, parse_math=False)
    return figure


@dataclass(frozen=True)
class _Scene:
    """A decomposition and derived data for the panels."""

    decomposition: Decomposition

    @property
    def topology(self) -> Topology:
        return self.decomposition.topology

    @property
    def rings(self) -> Int32Array:
        return self.decomposition.rings

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The number of each ring, with its share if shares differ."""
        shares = self.decomposition.shares
        unequal = len(set(shares)) > 1
        return tuple(f"ring {ring}" + f": {_format_share(share)}" * unequal for ring, share in enumerate(shares))

    @cached_property
    def as_matrix(self) -> bool:
        """Whether there are too many rings or ranks for graphs."""
        if len(self.rings) > MAX_RINGS_DRAWN or self.topology.world_size > MAX_RANKS_DRAWN:
            return True
        columns, rows = (1, 1) if self.has_combined_graph else _single_graph_grid(self)
        graph = _Graph(
            self,
            WIDTH_INCHES / (2 if self.single_graphs and self.has_combined_graph else columns),
            _graphs_inches(self) / rows,
        )
        return graph.number_points < _MIN_POINTS

    @property
    def has_combined_graph(self) -> bool:
        """Whether one graph shows all rings."""
        return self.rings.size <= MAX_HOPS_TOGETHER or len(self.rings) == 1

    @property
    def single_graphs(self) -> int:
        """Number of graphs of single rings."""
        return len(self.rings) if len(self.rings) > 1 else 0

    @cached_property
    def successors(self) -> Int32Array:
        """Int array (rings, world_size): the successor of rank `column` on ring `row`."""
        successors = np.empty_like(self.rings)
        np.put_along_axis(successors, self.rings, np.roll(self.rings, -1, axis=1), axis=1)
        return successors

    @cached_property
    def uses(self) -> tuple[Counter[int], ...]:
        """For each ring the number of uses of each link, by index."""
        return tuple(
            Counter(link for hop in enumerate(row) for link in self.topology.route(*hop).links)
            for row in self.successors.tolist()
        )

    @cached_property
    def loads(self) -> Int32Array:
        """Int array (links): the number of hops of all rings over each link."""
        loads = constraint_loads(self.topology, self.rings, [1] * len(self.rings))
        return loads[: len(self.topology.links)].astype(np.int32)

    @cached_property
    def link_names(self) -> list[str]:
        """Each link by its ends, with long names truncated."""
        return [f"{_truncated(str(link.source))}->{_truncated(str(link.destination))}" for link in self.topology.links]

    @cached_property
    def layout(self) -> Layout:
        return lay_out(self.topology, self.rings)

    @cached_property
    def bends(self) -> list[list[float]]:
        """The bend of each hop, (rings, world_size); hops between the same ranks are drawn side by side."""
        used: Counter[tuple[int, int]] = Counter()
        bends = []
        for row in self.successors.tolist():
            bends.append([self.layout.bend(*hop, used[hop]) if hop[0] != hop[1] else 0.0 for hop in enumerate(row)])
            used.update(enumerate(row))
        return bends

    @cached_property
    def window(self) -> tuple[FloatArray, FloatArray]:
        """The lower left and upper right corners of the visible area of a graph."""
        layout, points = self.layout, [self.layout.points]
        for row, bends in zip(self.successors.tolist(), self.bends, strict=True):
            for (source, destination), bend in zip(enumerate(row), bends, strict=True):
                start, end = layout.positions[source], layout.positions[destination]
                across = np.array([start[1] - end[1], end[0] - start[0]])
                points.append((start + end + bend * across)[None] / 2)  # furthest from the straight line
        margin = min(0.25 * layout.nearest, 0.09 * layout.span)
        stacked = np.vstack(points)
        return stacked.min(axis=0) - margin, stacked.max(axis=0) + margin


def _format_share(share: Fraction) -> str:
    """
    >>> _format_share(Fraction(1, 7)), _format_share(Fraction(12345, 67891))
    ('1/7', '18.2%')
    """
    return str(share) if share.denominator < 1000 else f"{100 * float(share):.3g}%"


def _heading(scene: _Scene) -> str:
    count, topology = len(scene.rings), scene.topology
    rings = "1 ring" if count == 1 else f"{count} rings"
    line = f"{rings} on {topology.name}; {np.count_nonzero(scene.loads)} of {len(topology.links)} links used"
    if scene.as_matrix:
        line += f"; all {rings} shown: rank by rank, coloured by ring"
    else:
        line += "; grey: unused" if not scene.loads.all() else ""
        if len(topology.vertices) > topology.world_size:
            line += "; squares: switches; hops through them bend towards them"
    return wrapped(f"{line}\n{scene.decomposition.reason}", 130)


# ------------------------------------------------------------------------------------------------------- matrix


def _draw_matrix(figure: SubFigure, scene: _Scene) -> None:
    """A row per sending rank and a column per receiving rank; cells of several rings are divided."""
    ranks, rings = scene.topology.world_size, len(scene.rings)
    used = np.zeros((ranks, ranks), dtype=np.int32)
    np.add.at(used, (np.arange(ranks), scene.successors), 1)
    parts = max(int(used.max(initial=1)), 1)
    cells = np.full((ranks, ranks, parts), np.nan)
    used[:] = 0
    for ring, successors in enumerate(scene.successors):
        hop = np.arange(ranks), successors
        cells[(*hop, used[hop])] = ring
        used[hop] += 1
    panel = figure.add_subplot()
    colors = _COLORS[:rings] if rings <= len(_COLORS) else matplotlib.colormaps["turbo"](np.linspace(0.03, 0.97, rings))
    norm = BoundaryNorm(np.arange(rings + 1) - 0.5, max(rings, 1)) if rings else None
    image = panel.imshow(
        np.ma.masked_invalid(cells.reshape(ranks, ranks * parts)),
        cmap=ListedColormap(colors) if rings else None,
        norm=norm,
        extent=(-0.5, ranks - 0.5, ranks - 0.5, -0.5),
        interpolation="nearest",
    )
    panel.set_xlabel("receiving rank", fontsize=9, color=INK)
    panel.set_ylabel("sending rank", fontsize=9, color=INK)
    panel.set_facecolor(IDLE)
    hide_frame(panel)
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_locator(MaxNLocator(10, integer=True, steps=[1, 2, 4, 8, 10]))
    if rings:
        bar = figure.colorbar(image, ax=panel, ticks=list(range(0, rings, -(-rings // 12))), fraction=0.04, pad=0.02)
        bar.ax.minorticks_off()
        bar.ax.tick_params(length=0, labelsize=8, colors=MUTED)
        bar.set_label("ring", fontsize=9, color=INK)


# ------------------------------------------------------------------------------------------------------- graphs


def _graphs_inches(scene: _Scene) -> float:
    """The height of the graphs. The combined graph takes half the width; without it, graphs are in rows of four."""
    width, height = scene.window[1] - scene.window[0]
    if scene.has_combined_graph:
        return _NAME_INCHES + float(
            np.clip(WIDTH_INCHES / 2 * height / width, min(2 + 0.25 * scene.single_graphs, 5), 5)
        )
    columns, rows = _single_graph_grid(scene)
    return rows * (_NAME_INCHES + WIDTH_INCHES / columns * float(min(height / width, 1.2)))


def _single_graph_grid(scene: _Scene) -> tuple[int, int]:
    """Columns and rows of the grid of single-ring graphs that makes them large."""
    columns = min(scene.single_graphs, 4)
    if scene.has_combined_graph and scene.single_graphs:
        width, height = scene.window[1] - scene.window[0]
        wanted = math.sqrt(scene.single_graphs * height / width * WIDTH_INCHES / 2 / _graphs_inches(scene))
        columns = min(math.ceil(wanted), scene.single_graphs)
    return columns, -(-scene.single_graphs // columns)


def _draw_graphs(figure: SubFigure, scene: _Scene) -> None:
    """All rings on the left and single rings on the right, or only one of the two."""
    parts = list(figure.subfigures(1, scene.has_combined_graph + (scene.single_graphs > 0), squeeze=False)[0])
    width_inches, height_inches = WIDTH_INCHES / len(parts), _graphs_inches(scene)
    if scene.has_combined_graph:
        axes = parts.pop(0).add_subplot()
        axes.set_title("all rings" if scene.single_graphs else "", fontsize=9, color=INK)
        _Graph(scene, width_inches, height_inches).draw(axes, range(len(scene.rings)), named=True)
    if scene.single_graphs:
        columns, rows = _single_graph_grid(scene)
        graph = _Graph(scene, width_inches / columns, height_inches / rows)
        for ring in range(scene.single_graphs):
            axes = parts[0].add_subplot(rows, columns, ring + 1)
            axes.set_title(scene.names[ring], fontsize=8, color=_COLORS[ring])
            graph.draw(axes, [ring], named=not scene.has_combined_graph)


@dataclass(frozen=True)
class _Graph:
    """A drawing of the topology in a panel of about this size, including its title."""

    scene: _Scene
    width_inches: float
    height_inches: float

    @cached_property
    def unit_inches(self) -> float:
        """Inches per unit of the layout."""
        width, height = self.scene.window[1] - self.scene.window[0]
        return 0.95 * float(min(self.width_inches / width, (self.height_inches - _NAME_INCHES) / height))

    @cached_property
    def radius(self) -> float:
        """Radius of the circles of ranks."""
        layout = self.scene.layout
        return min(0.22 * layout.nearest, 0.08 * layout.span, 0.15 / self.unit_inches)

    @property
    def number_points(self) -> float:
        """The font size that fits the number of a rank into its circle."""
        digits = len(str(self.scene.topology.world_size - 1))
        return min(9.0, 72 * self.unit_inches * 1.6 * self.radius / max(_DIGIT_EM * digits, 0.9))

    def draw(self, axes: Axes, rings: Iterable[int], *, named: bool) -> None:
        """Draw rings over the graph, with names of switches if `named`."""
        low, high = self.scene.window
        axes.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), aspect="equal")
        axes.set_axis_off()
        positions, topology = self.scene.layout.positions, self.scene.topology
        for index in np.flatnonzero(self.scene.loads == 0).tolist():
            link = topology.links[index]
            (x, y), (to_x, to_y) = positions[link.source], positions[link.destination]
            axes.plot([x, to_x], [y, to_y], color=_UNUSED_LINK, linewidth=0.6, zorder=1, label=f"unused {link.name}")
        for ring in rings:
            self._draw_ring(axes, ring)
        for switch in topology.vertices[topology.world_size :]:
            self._draw_switch(axes, str(switch), named)
        for rank in range(topology.world_size):
            x, y = positions[rank]
            circle = Circle((x, y), self.radius, facecolor="white", edgecolor=INK, zorder=5)
            circle.set_linewidth(0.8)
            axes.add_patch(circle)
            if self.number_points >= _MIN_POINTS:
                number = axes.text(x, y, str(rank), ha="center", va="center_baseline", zorder=6)
                number.set(color=INK, fontsize=self.number_points)

    def _draw_ring(self, axes: Axes, ring: int) -> None:
        """The hops of a ring as arrows."""
        shares, positions = self.scene.decomposition.shares, self.scene.layout.positions
        width = 1.3 * float(np.clip(float(shares[ring] * len(shares)), 0.4, 3))
        for source, destination in enumerate(self.scene.successors[ring].tolist()):
            if source == destination:
                continue
            arrow = FancyArrowPatch(
                tuple(positions[source]),
                tuple(positions[destination]),
                connectionstyle=f"arc3,rad={-self.scene.bends[ring][source]:.4f}",
                arrowstyle="-|>",
                mutation_scale=4 + 3 * width,
                shrinkA=0,
                shrinkB=72 * self.radius * self.unit_inches,
                linewidth=width,
                color=_COLORS[ring],
                zorder=2,
                label=f"ring {ring}: {source}->{destination}",
            )
            axes.add_patch(arrow)

    def _draw_switch(self, axes: Axes, switch: str, named: bool) -> None:
        """A square, with its name below if `named`."""
        (x, y), half = self.scene.layout.positions[switch], 0.7 * self.radius
        square = Rectangle((x - half, y - half), 2 * half, 2 * half, facecolor=MUTED, edgecolor="white", zorder=4)
        axes.add_patch(square)
        if named:
            name = axes.text(x, y - 1.3 * half, _truncated(switch), ha="center", va="top", fontsize=7, zorder=4)
            name.set(color=INK, parse_math=False, bbox=_BEHIND_TEXT)


def _truncated(name: str) -> str:
    """
    >>> _truncated("spine"), _truncated("the switch between all of them")
    ('spine', 'the switch betw…')
    """
    name = " ".join(name.split())
    return name if len(name) <= 16 else name[:15] + "…"


# -------------------------------------------------------------------------------------------------------- table


def _draw_table(figure: SubFigure, scene: _Scene) -> None:
    panel, count = figure.add_subplot(), len(scene.rings)
    hide_frame(panel)
    panel.set_ylim(max(count, 1) - 0.5, -0.5)
    panel.set_yticks(range(count), scene.names, fontsize=8)
    for name, color in zip(panel.get_yticklabels(), _COLORS, strict=False):
        name.set(color=color, fontweight="bold")
    if not count:
        heading = "there are no rings"
        panel.set_axis_off()
    elif _shows_links(scene):
        several = any(times > 1 for uses in scene.uses for times in uses.values())
        heading = "the links that each ring uses" + (", and how often if more than once" if several else "")
        heading += "; hollow: unused" if not scene.loads.all() else ""
        _draw_links(panel, scene)
    else:
        ranks = scene.topology.world_size
        heading = f"where each rank sends on each ring; the darker, the further on (modulo {ranks})"
        _draw_successors(panel, scene)
    figure.suptitle(f"routing table: {heading}", x=0.01, ha="left", fontsize=9, color=INK)


def _shows_links(scene: _Scene) -> bool:
    """Whether columns per link fit, and rows differ."""
    few = len(scene.topology.links) <= MAX_LINK_COLUMNS
    return few and (len(scene.rings) == 1 or any(uses != scene.uses[0] for uses in scene.uses))


def _draw_links(panel: Axes, scene: _Scene) -> None:
    """A column per link, grouped by source; cells are filled where a ring uses the link."""
    column = _link_columns(scene.topology)
    for ring, uses in enumerate(scene.uses):
        unused = [link for link in column if not scene.loads[link]]
        idle = [link for link in column if scene.loads[link] and link not in uses]
        _draw_cells(panel, ring, [column[link] for link in unused], "none", _UNUSED_LINK)
        _draw_cells(panel, ring, [column[link] for link in idle], IDLE, "none")
        _draw_cells(panel, ring, [column[link] for link in uses], _COLORS[ring], "none").set_label(f"ring {ring}")
        for link in (link for link, count in uses.items() if count > 1):
            times = panel.text(column[link], ring, str(uses[link]), ha="center", va="center_baseline")
            times.set(fontsize=7, color="white")
    panel.set_xlim(-0.6, max(column.values(), default=0) + 0.6)
    points = min(8.0, 72 * 0.9 * _column_inches(scene))
    names = [scene.link_names[link] for link in column]
    panel.set_xticks(list(column.values()), names, fontsize=points, parse_math=False)
    panel.tick_params(axis="x", rotation=90 if _vertical_names_inches(scene) else 0)


def _draw_cells(panel: Axes, row: int, columns: Sequence[float], face: str, edge: str) -> PolyCollection:
    cells = np.array([(row - 0.42, 0.84, column - 0.45, column + 0.45) for column in columns])
    drawn = rectangles(cells, facecolors=face, edgecolors=edge, linewidths=0.5)
    panel.add_collection(drawn, autolim=False)
    return drawn


def _link_columns(topology: Topology) -> dict[int, float]:
    """The position of the column of each link; links are grouped by source, with gaps between groups."""
    sources = [topology.vertices.index(link.source) for link in topology.links]
    order = sorted(range(len(sources)), key=sources.__getitem__)
    group = list(dict.fromkeys(sources[link] for link in order))
    return {link: place + 0.5 * group.index(sources[link]) for place, link in enumerate(order)}


def _column_inches(scene: _Scene) -> float:
    """The width of a link column."""
    return 0.88 * WIDTH_INCHES / (max(_link_columns(scene.topology).values(), default=0) + 1)


def _vertical_names_inches(scene: _Scene) -> float:
    """The height of vertical link names, or 0 if horizontal names fit their columns."""
    if not len(scene.rings) or not _shows_links(scene):
        return 0.0
    inches = 0.07 * max(map(len, scene.link_names), default=0)
    return inches if inches > _column_inches(scene) else 0.0


def _draw_successors(panel: Axes, scene: _Scene) -> None:
    """A column per rank: its successor, shaded by the distance to it."""
    ranks = scene.topology.world_size
    distance = (scene.successors - np.arange(ranks)) % ranks
    shades = ListedColormap(matplotlib.colormaps["YlGnBu"](np.linspace(0.0, 0.45, 256)))
    panel.imshow(distance, cmap=shades, vmin=1, vmax=max(ranks - 1, 2), aspect="auto", interpolation="nearest")
    panel.set_xlabel("rank", fontsize=9, color=INK)
    panel.set_xticks(range(0, ranks, 1 if ranks <= 40 else 2))
    points = min(8.0, 72 * 0.85 * WIDTH_INCHES / ranks * 0.9 / (_DIGIT_EM * len(str(ranks - 1))))
    for ring, rank in np.ndindex(scene.successors.shape):
        number = panel.text(rank, ring, str(scene.successors[ring, rank]), ha="center", va="center_baseline", color=INK)
        number.set_fontsize(points)
