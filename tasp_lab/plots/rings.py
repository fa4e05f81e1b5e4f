"""Pictures of a decomposition: its rings as graphs of ranks, or all of them in one matrix of ranks::

draw_decomposition(decompose("full-mesh:8"), "rings of a full mesh").savefig("rings.png")
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch
from matplotlib.ticker import MaxNLocator
from scipy.spatial.distance import pdist

from tasp_lab.core.arrays import FloatArray
from tasp_lab.plots.timelines import IDLE, INK, MUTED, WIDTH_INCHES, hide_frame, lines_inches, new_figure, wrapped
from tasp_lab.rings.rings import Decomposition, constraint_loads
from tasp_lab.topology.graph import Topology

MAX_RINGS_DRAWN = 12
MAX_RANKS_DRAWN = 32
"""With more rings or ranks a matrix is drawn instead of graphs."""

_MATRIX_INCHES = 8.6
_UNUSED_LINK = "#c9cdd4"
_COLORS = (
    "#1f77b4", "#d62728", "#2ca02c", "#ff7f0e", "#9467bd", "#17becf",
    "#8c564b", "#e377c2", "#bcbd22", "#1b2a6b", "#7fcf7f", "#000000",
)  # fmt: skip


def draw_decomposition(decomposition: Decomposition, title: str) -> Figure:
    """Draw all rings of a decomposition.

    All together and one by one over the ranks, with widths proportional to their shares and unused links in grey; more
    than `MAX_RINGS_DRAWN` rings or `MAX_RANKS_DRAWN` ranks as one matrix of sending by receiving rank.

    >>> from tasp_lab.topology.builders import full_mesh
    >>> from tasp_lab.rings.complete_digraph import hamiltonian_cycles
    >>> decomposition = Decomposition(full_mesh(5), hamiltonian_cycles(5), 1, "steps of 1, 2, 3 and 4")
    >>> figure = draw_decomposition(decomposition, "Four rings of five ranks")
    >>> [axes.get_title() for axes in figure.axes]
    ['all rings', 'ring 0', 'ring 1', 'ring 2', 'ring 3']
    """
    rings, topology, shares = decomposition.rings, decomposition.topology, decomposition.shares
    loads = constraint_loads(topology, rings, [1] * len(rings))[: len(topology.links)]
    counted = f"{len(rings)} ring{'s' * (len(rings) != 1)}"
    line = f"{counted} on {topology.name}; {np.count_nonzero(loads)} of {len(topology.links)} links used"
    as_matrix = len(rings) > MAX_RINGS_DRAWN or topology.world_size > MAX_RANKS_DRAWN
    line += f"; all {counted} shown" if as_matrix else "; grey: unused" * bool((loads == 0).any())
    heading = wrapped(f"{line}\n{decomposition.reason}", 130)
    names = [f"ring {number}" + f": {share}" * (len(set(shares)) > 1) for number, share in enumerate(shares)]
    panels = ["all rings", *names] if len(rings) > 1 else [""]
    columns = min(len(panels), 4)
    rows = -(-len(panels) // columns)
    inches = _MATRIX_INCHES if as_matrix else rows * min(WIDTH_INCHES / columns, WIDTH_INCHES / 2)
    figure = new_figure(title, lines_inches(heading) + inches)
    head, body = figure.subfigures(2, 1, squeeze=False, height_ratios=[lines_inches(heading), inches])[:, 0]
    head.suptitle(heading, x=0.01, ha="left", fontsize=9, color=INK, parse_math=False)
    if as_matrix:
        _draw_matrix(body.add_subplot(), decomposition)
        return figure
    unused = [link for link, load in zip(topology.links, loads, strict=True) if not load]
    ends = ((link.source, link.destination) for link in unused)
    idle = sorted((a, b) for a, b in ends if isinstance(a, int) and isinstance(b, int))  # not those of switches
    at = positions_of(topology)
    for place, name in enumerate(panels):
        axes = body.add_subplot(rows, columns, place + 1)
        axes.set_title(name, fontsize=8, color=_COLORS[place - 1] if place else INK)
        _draw_graph(axes, at, decomposition, [place - 1] if place else range(len(rings)), idle)
    return figure


def _draw_graph(
    axes: Axes,
    at: FloatArray,
    decomposition: Decomposition,
    rings: Iterable[int],
    unused: Iterable[tuple[int, int]],
) -> None:
    nearest, span = float(min(pdist(at), default=1.0)), float(np.ptp(at, axis=0).max()) or 1.0
    margin = 0.15 * span + 0.3 * nearest  # room for circles at the edge, and for hops that bend around them
    low, high = at.min(axis=0) - margin, at.max(axis=0) + margin
    axes.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), aspect="equal")
    axes.set_axis_off()
    for source, destination in unused:
        ends = at[[source, destination]]
        axes.plot(*ends.T, color=_UNUSED_LINK, linewidth=0.6, zorder=1, label=f"unused {source}->{destination}")
    circles = [Circle((x, y), min(0.25 * nearest, 0.08 * span), facecolor="white", edgecolor=INK) for x, y in at]
    for rank, circle in enumerate(circles):
        circle.set(linewidth=0.8, zorder=5)
        axes.add_patch(circle)
        points = 8 if len(at) <= 16 else 5
        axes.text(
            at[rank, 0], at[rank, 1], str(rank), ha="center", va="center_baseline", fontsize=points, color=INK, zorder=6
        )
    used = Counter[tuple[int, int]]()
    for ring in rings:
        order = decomposition.rings[ring].tolist()
        for source, destination in zip(order, order[1:] + order[:1], strict=True):
            if source != destination:
                bend = _bend(at, source, destination, 0.2 * nearest) + 0.12 * used[source, destination]
                used[source, destination] += 1
                axes.add_patch(FancyArrowPatch(
                    at[source], at[destination], patchA=circles[source], patchB=circles[destination], shrinkA=0,
                    shrinkB=0, connectionstyle=f"arc3,rad={bend}", arrowstyle="-|>", mutation_scale=7, zorder=3,
                    color=_COLORS[ring], label=f"ring {ring}: {source}->{destination}",
                    linewidth=1.3 * len(decomposition.rings) * float(decomposition.shares[ring]),
                ))  # fmt: skip


def _bend(at: FloatArray, source: int, destination: int, clear: float) -> float:
    """How far a hop bends, as a share of its length: slightly, to keep both directions apart, or around ranks."""
    along = at[destination] - at[source]
    others = np.delete(at, [source, destination], axis=0) - at[source]
    share = others @ along / (along @ along)
    gap = np.abs(others @ np.array([-along[1], along[0]])) / np.hypot(*along)
    return 0.3 if bool(((share > 0) & (share < 1) & (gap < clear)).any()) else 0.08


def _draw_matrix(panel: Axes, decomposition: Decomposition) -> None:
    """A row per sending rank and a column per receiving rank; cells of several rings are divided."""
    rings, ranks = decomposition.rings.astype(np.int64), decomposition.topology.world_size
    count, hop = len(rings), (rings * ranks + np.roll(rings, -1, axis=1)).ravel()
    order = np.argsort(hop, kind="stable")  # rings of one cell stay in order
    place = np.arange(len(hop)) - np.searchsorted(hop[order], hop[order])
    cells = np.full((ranks * ranks, int(place.max(initial=0)) + 1), np.nan)
    cells[hop[order], place] = order // ranks
    colors = _COLORS[:count] if count <= len(_COLORS) else matplotlib.colormaps["turbo"](np.linspace(0.03, 0.97, count))
    image = panel.imshow(
        np.ma.masked_invalid(cells.reshape(ranks, -1)),
        cmap=ListedColormap(colors) if count else None,
        norm=BoundaryNorm(np.arange(count + 1) - 0.5, max(count, 1)) if count else None,
        extent=(-0.5, ranks - 0.5, ranks - 0.5, -0.5),
        interpolation="nearest",
    )
    panel.set_xlabel("receiving rank", fontsize=9, color=INK)
    panel.set_ylabel("sending rank", fontsize=9, color=INK)
    panel.set_facecolor(IDLE)
    hide_frame(panel)
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_locator(MaxNLocator(10, integer=True, steps=[1, 2, 4, 8, 10]))
    if count:
        ticks = list(range(0, count, -(-count // 12)))
        bar = panel.figure.colorbar(image, ax=panel, ticks=ticks, fraction=0.04, pad=0.02)
        bar.ax.minorticks_off()
        bar.ax.tick_params(length=0, labelsize=8, colors=MUTED)
        bar.set_label("ring", fontsize=9, color=INK)


def positions_of(topology: Topology) -> FloatArray:
    """Where ranks stand, an array (world_size, 2): those of a torus as a grid, others on a circle in their order.

    >>> from tasp_lab.topology.builders import torus
    >>> positions_of(torus((2, 3)))[4].tolist()  # row 1, column 1
    [1.0, -1.0]
    """
    count, (source, destination) = topology.world_size, np.nonzero(topology.table.joined)
    sides = [side for side in range(2, count) if count % side == 0] if len(topology.vertices) == count else []
    for side in sides:  # a grid if each link stays in its row or in its column
        if ((source // side == destination // side) | (source % side == destination % side)).all():
            return np.column_stack([np.arange(count) % side, -(np.arange(count) // side)]).astype(np.float64)
    angle = 2 * np.pi * (np.arange(count) / count - 0.25 * (count == 2))
    return np.column_stack([np.sin(angle), np.cos(angle)])
