"""Pictures of a decomposition: the way of each ring over the graph, and the table of what it uses."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PatchCollection, PathCollection, PolyCollection
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Circle, Rectangle
from matplotlib.textpath import TextPath
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Affine2D
from scipy.spatial import KDTree

from tasp_lab.arrays import FloatArray, Int32Array
from tasp_lab.decomposition import Decomposition
from tasp_lab.pictures import (
    _IDLE,
    _INK,
    _QUIET,
    _WIDTH_INCHES,
    _lines_height_inches,
    _new_figure,
    _quieten,
    _rectangles,
    _wrapped,
)
from tasp_lab.ring_layout import Layout, arrow, lay_out
from tasp_lab.ring_load import constraint_loads
from tasp_lab.topology import Topology

MOST_HOPS_TOGETHER = 150
"""With more hops than this in all rings together, several rings are no longer drawn into one graph."""

MOST_RINGS_DRAWN = 12
"""As many rings, at most, get a graph of their own. With more, there is no graph of all rings."""

MOST_LINK_COLUMNS = 120
"""With more links than this, the table says which rank comes next instead of which links are used."""

MOST_WIRES = 1000
"""With more unused links than this, which would be one grey area, none of them is drawn."""

_MOST_VECTORS = 100
"""With more ranks than this, an SVG holds their circles and hops as images, which are smaller than as many shapes."""

_NAME_INCHES = 0.25
_LEAST_ARROW_INCHES = 0.15
"""Arrow heads need so much room between neighbouring vertices."""

_LEAST_POINTS = 4.5
_DIGIT_EM = 0.64
"""The width of a digit as a part of the font size."""

_WIRE = "#c9cdd4"
_BEHIND_TEXT = {"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 0.5}
_COLORS = (
    "#1f77b4", "#d62728", "#2ca02c", "#ff7f0e", "#9467bd", "#17becf",
    "#8c564b", "#e377c2", "#bcbd22", "#1b2a6b", "#7fcf7f", "#000000",
)  # fmt: skip


def draw_decomposition(decomposition: Decomposition, title: str) -> Figure:
    """Draw the rings over the graph of their topology, and below them the routing table.

    One graph shows all rings, and each of the first `MOST_RINGS_DRAWN` has a small one of its own. With more rings, or
    more than `MOST_HOPS_TOGETHER` hops, only the latter are drawn. Lines are as wide as the rings' shares of the data.
    Grey links are used by no ring; they are left out if there are more than `MOST_WIRES`.

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
    heading = _heading(scene)
    graphs_inches = _lines_height_inches(heading) + _graphs_height_inches(scene)
    table_inches = 0.6 + _rows_height_inches(scene) + max(0.3, _upright_inches(scene))
    figure = _new_figure(title, graphs_inches + table_inches)
    graphs, table = figure.subfigures(2, 1, squeeze=False, height_ratios=[graphs_inches, table_inches])[:, 0]
    graphs.suptitle(heading, x=0.01, ha="left", fontsize=9, color=_INK, parse_math=False)
    _draw_graphs(graphs, scene)
    _draw_table(table, scene)
    return figure


@dataclass(frozen=True)
class _Scene:
    """A decomposition and what the panels say of it."""

    decomposition: Decomposition

    @property
    def topology(self) -> Topology:
        return self.decomposition.topology

    @property
    def rings(self) -> Int32Array:
        return self.decomposition.rings

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Each ring's number, with its share where shares differ."""
        shares = self.decomposition.shares
        unequal = len(set(shares)) > 1
        return tuple(f"ring {ring}" + f": {_say_share(share)}" * unequal for ring, share in enumerate(shares))

    @property
    def together(self) -> bool:
        """Whether one graph shows all rings."""
        few = len(self.rings) <= MOST_RINGS_DRAWN and self.rings.size <= MOST_HOPS_TOGETHER
        return few or len(self.rings) == 1

    @property
    def apart(self) -> int:
        """How many rings have a graph of their own."""
        return min(len(self.rings), MOST_RINGS_DRAWN) if len(self.rings) > 1 else 0

    @property
    def colors(self) -> tuple[str, ...]:
        """A colour for each ring that a graph shows."""
        return _COLORS[: len(self.rings)]

    @cached_property
    def onward(self) -> Int32Array:
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
    def loads(self) -> Int32Array:
        """Int array (links): how many hops of all rings pass each link."""
        loads = constraint_loads(self.topology, self.rings, [1] * len(self.rings))
        return loads[: len(self.topology.links)].astype(np.int32)

    @cached_property
    def link_names(self) -> list[str]:
        """Each link by its ends, long names cut."""
        return [f"{_cut(str(link.source))}->{_cut(str(link.destination))}" for link in self.topology.links]

    @cached_property
    def layout(self) -> Layout:
        return lay_out(self.topology, self.rings)

    @cached_property
    def curves(self) -> list[list[FloatArray]]:
        """For each ring that a graph shows the curves of its hops."""
        return self.layout.curves(self.onward[: len(self.colors)])

    @cached_property
    def wires(self) -> list[FloatArray]:
        """The links that no ring uses, if these are not too many to be drawn."""
        unused: list[int] = np.flatnonzero(self.loads == 0)[: MOST_WIRES + 1].tolist()
        links = (self.topology.links[index] for index in unused)
        return [self.layout.wire(link.source, link.destination) for link in links] if len(unused) <= MOST_WIRES else []

    @cached_property
    def window(self) -> tuple[FloatArray, FloatArray]:
        """The lower left and the upper right corner of what a graph shows."""
        points = np.vstack([self.layout.points, *itertools.chain(self.wires, *self.curves)])
        margin = min(0.22 * self.layout.nearest, 0.09 * self.layout.span)
        return points.min(axis=0) - margin, points.max(axis=0) + margin


def _say_share(share: Fraction) -> str:
    """
    >>> _say_share(Fraction(1, 7)), _say_share(Fraction(12345, 67891))
    ('1/7', '18.2%')
    """
    return str(share) if share.denominator < 1000 else f"{100 * float(share):.3g}%"


def _heading(scene: _Scene) -> str:
    count, topology = len(scene.rings), scene.topology
    line = f"{'1 ring' if count == 1 else f'{count} rings'} on {topology.name}; "
    line += f"{np.count_nonzero(scene.loads)} of {len(topology.links)} links used"
    line += "; grey: unused" if scene.wires else ""
    if len(topology.vertices) > topology.world_size:
        line += "; squares: switches; hops through them bend towards them"
    lines = [line, scene.decomposition.reason]
    if not scene.together:
        lines.append("shown: " + ("each ring" if scene.apart == count else f"the first {scene.apart} of {count} rings"))
    return _wrapped("\n".join(lines), 130)


# ------------------------------------------------------------------------------------------------------- graphs


def _graphs_height_inches(scene: _Scene) -> float:
    """The common graph is at most as wide as half the figure; without it, others stand in rows of four."""
    width, height = scene.window[1] - scene.window[0]
    if scene.together:
        return _NAME_INCHES + float(np.clip(_WIDTH_INCHES / 2 * height / width, min(2 + 0.25 * scene.apart, 5), 5))
    columns = _columns_apart(scene)
    return -(-scene.apart // columns) * (_NAME_INCHES + _WIDTH_INCHES / columns * float(min(height / width, 1.2)))


def _columns_apart(scene: _Scene) -> int:
    """How many graphs of single rings stand side by side: so many that their room has the shape of what they show."""
    if not scene.together:
        return min(scene.apart, 4)
    width, height = scene.window[1] - scene.window[0]
    wanted = math.sqrt(scene.apart * height / width * _WIDTH_INCHES / 2 / _graphs_height_inches(scene))
    return min(math.ceil(wanted), scene.apart)


def _draw_graphs(figure: SubFigure, scene: _Scene) -> None:
    """All rings on the left, single ones on the right; or only one of the two."""
    drawn = [draw for draw, wanted in ((_draw_together, scene.together), (_draw_apart, scene.apart > 0)) if wanted]
    parts = figure.subfigures(1, len(drawn), squeeze=False)[0]
    for part, draw in zip(parts, drawn, strict=True):
        draw(part, scene, _WIDTH_INCHES / len(drawn), _graphs_height_inches(scene))


def _draw_together(figure: SubFigure, scene: _Scene, width_inches: float, height_inches: float) -> None:
    axes = figure.add_subplot()
    axes.set_title("all rings" if scene.apart else "", fontsize=9, color=_INK)
    _Graph(scene, axes, width_inches, height_inches).draw(range(len(scene.rings)), named=True)


def _draw_apart(figure: SubFigure, scene: _Scene, width_inches: float, height_inches: float) -> None:
    columns = _columns_apart(scene)
    rows = -(-scene.apart // columns)
    for ring in range(scene.apart):
        axes = figure.add_subplot(rows, columns, ring + 1)
        axes.set_title(scene.names[ring], fontsize=8, color=scene.colors[ring])
        _Graph(scene, axes, width_inches / columns, height_inches / rows).draw([ring], named=not scene.together)


@dataclass(frozen=True)
class _Graph:
    """The topology in a panel of about this size, its title included."""

    scene: _Scene
    axes: Axes
    width_inches: float
    height_inches: float

    @cached_property
    def unit_inches(self) -> float:
        """How long 1 is."""
        width, height = self.scene.window[1] - self.scene.window[0]
        return 0.95 * float(min(self.width_inches / width, (self.height_inches - _NAME_INCHES) / height))

    @property
    def roomy(self) -> bool:
        """Whether there is room for the heads of arrows."""
        return self.scene.layout.nearest * self.unit_inches > _LEAST_ARROW_INCHES

    @cached_property
    def radius(self) -> float:
        """Of the circles that stand for ranks."""
        layout = self.scene.layout
        return min(0.2 * layout.nearest, 0.08 * layout.span, 0.15 / self.unit_inches)

    def draw(self, rings: Sequence[int], *, named: bool) -> None:
        """Some rings over the graph; `named`: with switches named, and ranks numbered even where it is tight."""
        low, high = self.scene.window
        self.axes.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), aspect="equal")
        self.axes.set_axis_off()
        self._draw_unused()
        for ring in rings:
            self._draw_ring(ring)
        self._draw_switches(named)
        self._draw_ranks(named)

    def _draw_unused(self) -> None:
        wires = LineCollection(self.scene.wires, colors=_WIRE, linewidths=0.6, zorder=1, label="unused")
        self.axes.add_collection(wires, autolim=False)

    def _draw_ring(self, ring: int) -> None:
        """The hops of a ring as curves, with arrow heads where there is room."""
        shares, color = self.scene.decomposition.shares, self.scene.colors[ring]
        points = (1.3 if self.roomy else 0.6) * float(np.clip(float(shares[ring] * len(shares)), 0.4, 3))
        head = (0.045 + 0.025 * points) / self.unit_inches if self.roomy else 0.0
        lines, heads = zip(*(arrow(curve, self.radius, head) for curve in self.scene.curves[ring]), strict=True)
        hops = LineCollection(lines, colors=color, linewidths=points, zorder=2, label=f"ring {ring}")
        hops.set_rasterized(len(lines) > _MOST_VECTORS)
        self.axes.add_collection(hops, autolim=False)
        if self.roomy:
            self.axes.add_collection(PolyCollection(heads, facecolors=color, linewidths=0, zorder=3), autolim=False)

    def _draw_ranks(self, named: bool) -> None:
        """Circles with numbers; where these do not fit in, a number for every second, fourth, ... if asked for."""
        ranks, layout = self.scene.topology.world_size, self.scene.layout
        points = min(9.0, 72 * self.unit_inches * 1.6 * self.radius / max(_DIGIT_EM * len(str(ranks - 1)), 0.9))
        fit = points >= _LEAST_POINTS
        every = 1 if fit else _every(layout.points[:ranks], 0.28 / self.unit_inches)
        numbered = range(0, ranks if fit or named else 0, every)
        circled = [rank for rank in range(ranks) if fit or rank not in numbered]
        circles = PatchCollection([Circle(tuple(layout.positions[rank]), self.radius) for rank in circled], zorder=5)
        circles.set(facecolor="white", edgecolor=_INK, linewidth=0.8 if fit else 0.4, rasterized=ranks > _MOST_VECTORS)
        self.axes.add_collection(circles, autolim=False)
        style: dict[str, Any] = {"fontsize": points} if fit else {"fontsize": 6, "bbox": _BEHIND_TEXT}
        for rank in numbered:
            x, y = layout.positions[rank]
            self.axes.text(x, y, str(rank), ha="center", va="center_baseline", color=_INK, zorder=6, **style)

    def _draw_switches(self, named: bool) -> None:
        """Squares, with names below them if asked for."""
        half = 0.7 * self.radius
        switches = self.scene.topology.vertices[self.scene.topology.world_size :]
        centres = [tuple(self.scene.layout.positions[switch]) for switch in switches]
        squares = PatchCollection([Rectangle((x - half, y - half), 2 * half, 2 * half) for x, y in centres], zorder=4)
        squares.set(facecolor=_QUIET, edgecolor="white")
        self.axes.add_collection(squares, autolim=False)
        for switch, (x, y) in zip(switches if named else (), centres, strict=False):
            name = self.axes.text(x, y - 1.3 * half, _cut(str(switch)), ha="center", va="top", fontsize=7, zorder=4)
            name.set(color=_INK, parse_math=False, bbox=_BEHIND_TEXT)


def _every(places: FloatArray, distance: float) -> int:
    """The least power of two such that points that many apart in order are at least this far apart in the plane."""
    step = 1
    while step < len(places) and KDTree(places[::step]).query_pairs(distance):
        step *= 2
    return step


def _cut(name: str) -> str:
    """
    >>> _cut("spine"), _cut("the switch between all of them")
    ('spine', 'the switch betw…')
    """
    name = " ".join(name.split())
    return name if len(name) <= 16 else name[:15] + "…"


# -------------------------------------------------------------------------------------------------------- table


def _rows_height_inches(scene: _Scene) -> float:
    return min(0.2 * len(scene.rings), 6.5)


def _draw_table(figure: SubFigure, scene: _Scene) -> None:
    panel = figure.add_subplot()
    _quieten(panel)
    if not len(scene.rings):
        heading = "there are no rings"
        panel.set_axis_off()
    elif _shows_links(scene):
        several = any(count > 1 for uses in scene.uses for count in uses.values())
        heading = "the links that each ring uses" + (", and how often if more than once" if several else "")
        heading += "; hollow: unused" if not scene.loads.all() else ""
        _draw_links(panel, scene)
    else:
        ranks = scene.topology.world_size
        heading = f"where each rank sends on each ring; the darker, the further on (modulo {ranks})"
        _draw_onward(panel, scene)
    figure.suptitle(f"routing table: {heading}", x=0.01, ha="left", fontsize=9, color=_INK)
    _label_rings(panel, scene)


def _shows_links(scene: _Scene) -> bool:
    """Whether a column per link fits, and rows differ."""
    few = len(scene.topology.links) <= MOST_LINK_COLUMNS
    return few and (len(scene.rings) == 1 or any(uses != scene.uses[0] for uses in scene.uses))


def _label_rings(panel: Axes, scene: _Scene) -> None:
    """Name the rows, in the colours of the rings that graphs show."""
    count = len(scene.rings)
    panel.set_ylim(max(count, 1) - 0.5, -0.5)
    if _rows_height_inches(scene) < 0.1 * count:
        panel.yaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 4, 8, 10]))
        panel.set_ylabel("ring", fontsize=9, color=_INK)
        return
    panel.set_yticks(range(count), scene.names, fontsize=8)
    for name, color in zip(panel.get_yticklabels(), scene.colors, strict=False):
        name.set(color=color, fontweight="bold")


def _draw_links(panel: Axes, scene: _Scene) -> None:
    """A column per link, grouped by where links start; a cell filled where a ring uses the link."""
    rings = range(len(scene.rings))
    column = _link_columns(scene.topology)
    used, unused = ([link for link in column if bool(scene.loads[link]) == wanted] for wanted in (True, False))

    def draw_cells(chosen: Iterable[int], rows: Iterable[int], **style: Any) -> None:
        cells = [(row - 0.42, 0.84, column[link] - 0.45, column[link] + 0.45) for row in rows for link in chosen]
        panel.add_collection(_rectangles(np.array(cells), **style), autolim=False)

    draw_cells(unused, rings, facecolors="none", edgecolors=_WIRE, linewidths=0.5, label="unused")
    draw_cells(used, rings, facecolors=_IDLE, linewidths=0, label="used")
    for ring, uses in enumerate(scene.uses):
        color = scene.colors[ring] if ring < len(scene.colors) else _QUIET
        draw_cells(uses, [ring], facecolors=color, linewidths=0, label=f"ring {ring}")
        for link in (link for link, count in uses.items() if count > 1):
            text = panel.text(column[link], ring, str(uses[link]), ha="center", va="center_baseline", fontsize=7)
            text.set_color("white")
    panel.set_xlim(-0.6, max(column.values()) + 0.6)
    names = [scene.link_names[link] for link in column]
    points = min(8.0, 72 * 0.9 * _column_inches(scene))
    panel.set_xticks(list(column.values()), names, fontsize=points, parse_math=False)
    panel.tick_params(axis="x", rotation=90 if _upright_inches(scene) else 0)


def _link_columns(topology: Topology) -> dict[int, float]:
    """Where the column of each link stands: those that start at one vertex side by side, then a gap."""
    sources = [topology.vertices.index(link.source) for link in topology.links]
    order = sorted(range(len(sources)), key=sources.__getitem__)
    group = list(dict.fromkeys(sources[link] for link in order))
    return {link: place + 0.5 * group.index(sources[link]) for place, link in enumerate(order)}


def _column_inches(scene: _Scene) -> float:
    """The width of the column of a link."""
    return 0.88 * _WIDTH_INCHES / (max(_link_columns(scene.topology).values()) + 1)


def _upright_inches(scene: _Scene) -> float:
    """The height of the names of links if they stand upright, being wider than their columns, else 0."""
    if not _shows_links(scene):
        return 0.0
    inches = 0.07 * max(map(len, scene.link_names))
    return inches if inches > _column_inches(scene) else 0.0


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


def _write_numbers(panel: Axes, numbers: Int32Array, points: float) -> None:
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
