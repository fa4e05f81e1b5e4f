"""Positions of the ranks and switches of a topology in a drawing, derived from its structure only."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.sparse.csgraph import connected_components
from scipy.spatial import KDTree

from tasp_lab.core.arrays import FloatArray, Int32Array
from tasp_lab.topology.graph import Topology, Vertex


@dataclass(frozen=True)
class Layout:
    """Positions of the vertices of a topology in the plane, in an arbitrary unit."""

    topology: Topology
    positions: dict[Vertex, FloatArray]

    @cached_property
    def points(self) -> FloatArray:
        """Array (vertices, 2) in the order of `Topology.vertices`."""
        return np.array([self.positions[vertex] for vertex in self.topology.vertices])

    @cached_property
    def nearest(self) -> float:
        """The smallest distance between two vertices."""
        if len(self.points) < 2:
            return 1.0
        distances, _ = KDTree(self.points).query(self.points, k=[2])
        return float(np.min(distances))

    @cached_property
    def span(self) -> float:
        """The longer side of the bounding box of all vertices."""
        return float(np.ptp(self.points, axis=0).max()) or 1.0

    def bend(self, source: int, destination: int, use: int) -> float:
        """The bend of a hop to the left, relative to its straight length, as defined by matplotlib's ``arc3``.

        Hops over links bend slightly, to keep the two directions apart, and more for each of the `use` earlier uses of
        the pair. They bend around vertices in between; hops through switches bend towards the switches.
        """
        start, end = self.positions[source], self.positions[destination]
        length = float(np.hypot(*(end - start)))
        left = np.array([start[1] - end[1], end[0] - start[0]])
        reach = min(self.span, 4 * length) / length
        offset, again = 0.03 * reach, 0.06 * reach * use
        if self.topology.link_between[source, destination] < 0:
            links = self.topology.route(source, destination).links
            switches = [self.positions[self.topology.links[link].destination] for link in links[:-1]]
            return again + offset + 0.4 * float((np.mean(switches, axis=0) - (start + end) / 2) @ left) / length**2
        wider = offset + 0.02 * np.arange(40)
        bends = np.stack([wider, -wider], axis=1).ravel()
        gaps = self._gaps(start, end, left * bends[:, None])
        clear = np.flatnonzero(gaps > 0.24 * self.nearest)
        return again + float(bends[clear[0] if len(clear) else gaps.argmax()])

    def _gaps(self, start: FloatArray, end: FloatArray, offsets: FloatArray) -> FloatArray:
        """The distance to other vertices of curves from start to end with the given offsets in the middle."""
        t = np.linspace(0, 1, 21)[:, None]
        curves = (1 - t) * start + t * end + 2 * t * (1 - t) * offsets[:, None]
        is_end = (self.points == start).all(axis=1) | (self.points == end).all(axis=1)
        others = self.points[~is_end]
        if not len(others):
            return np.full(len(offsets), np.inf)
        distances, _ = KDTree(others).query(curves)
        return np.asarray(np.min(distances, axis=1))


def lay_out(topology: Topology, rings: Int32Array) -> Layout:
    """Nodes as circles around a circle, tori and hypercubes as grids, any other topology as one circle.

    On the single circle, ranks are in numerical order or, in sparse topologies without that ring, in the order of the
    first of the given rings, an int array (rings, world_size).

    >>> from tasp_lab.topology.builders import torus
    >>> lay_out(torus((2, 3)), np.empty((0, 6), dtype=np.int32)).positions[4].tolist()      # row 1, column 1
    [1.0, -1.0]
    """
    if per_node := _ranks_per_node(topology):
        count = topology.world_size // per_node
        radius = min(0.42, 0.6 * math.sin(math.pi / count))  # a quarter of a step keeps ranks off hops between nodes
        ranks = (_circle(count)[:, None] + radius * _circle(per_node, 0.25 / per_node)).reshape(-1, 2)
    elif shape := _grid_shape(topology):
        ranks = _grid(shape)
    else:
        ranks = _circle(topology.world_size)[np.argsort(_order_around(topology, rings))]
    return Layout(topology, _with_switches(topology, ranks))


def _circle(count: int, first_turns: float = 0.0) -> FloatArray:
    """Points on the unit circle, clockwise, the first at `first_turns` from the top; two points are side by side."""
    angle = 2 * np.pi * (np.arange(count) / count + first_turns - 0.25 * (count == 2))
    return np.column_stack([np.sin(angle), np.cos(angle)])


def _grid(shape: tuple[int, ...]) -> FloatArray:
    """Points numbered along the last dimension first.

    The third dimension from the end extends backwards, the fourth sideways.
    """
    back = 0.8 / shape[max(len(shape) - 3, 0)]
    axes = np.array([(shape[-1] + 0.8, -0.3), (back, back), (0.0, -1.0), (1.0, 0.0)])
    return np.asarray(np.argwhere(np.ones(shape)) @ axes[-len(shape) :], dtype=np.float64)


def _order_around(topology: Topology, rings: Int32Array) -> Int32Array:
    in_order, linked = np.arange(topology.world_size, dtype=np.int32), topology.linked_pairs
    if not len(rings) or linked.mean() > 0.5 or linked[in_order, np.roll(in_order, -1)].all():
        return in_order
    return np.roll(rings[0], -int(rings[0].argmin()))


def _ranks_per_node(topology: Topology) -> int:
    """Ranks per node if local links and switches join the ranks to several equal blocks, else 0."""
    ranks = topology.world_size
    joined = topology.table.joined
    for ends in _joined_by_switches(topology).values():
        near = sorted(vertex for vertex in ends if isinstance(vertex, int))
        if near and len(near) < ranks and near == list(range(near[0], near[-1] + 1)):
            joined[np.ix_(near, near)] = True
    count, node = connected_components(joined, directed=False)
    size = ranks // count
    return size if 1 < size < ranks and (node == np.arange(ranks) // size).all() else 0


def _grid_shape(topology: Topology) -> tuple[int, ...]:
    """The shape of a grid of two to four dimensions, as many as possible, along which all links run; else ().

    Ranks are numbered along the last dimension first, and each link joins ranks that differ in one dimension.
    """
    joined = topology.table.joined
    if connected_components(joined, directed=False)[0] > 1:
        return ()
    ends = np.nonzero(joined)
    for dimensions in (4, 3, 2):
        for shape in _factors(topology.world_size, dimensions):
            source, destination = (np.stack(np.unravel_index(end, shape)) for end in ends)
            if (np.count_nonzero(source != destination, axis=0) == 1).all():
                return shape
    return ()


def _factors(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """All ordered factorisations of a number into `count` factors of at least 2.

    >>> list(_factors(12, 2))
    [(2, 6), (3, 4), (4, 3), (6, 2)]
    """
    if count == 1:
        yield (number,)
        return
    for first in (divisor for divisor in range(2, number // 2 + 1) if number % divisor == 0):
        yield from ((first, *others) for others in _factors(number // first, count - 1))


def _joined_by_switches(topology: Topology) -> dict[Vertex, set[Vertex]]:
    """The neighbours of each switch."""
    joined: dict[Vertex, set[Vertex]] = {switch: set() for switch in topology.vertices[topology.world_size :]}
    for link in topology.links if joined else ():
        for end, other in ((link.source, link.destination), (link.destination, link.source)):
            if end in joined:
                joined[end].add(other)
    return joined


def _with_switches(topology: Topology, ranks: FloatArray) -> dict[Vertex, FloatArray]:
    """Each switch at the centre of its neighbours; switches at the same point are spread around it."""
    joined, placed = _joined_by_switches(topology), dict[Vertex, FloatArray](enumerate(ranks))
    waiting = list(joined)
    while waiting:
        near = {switch: [placed[vertex] for vertex in placed if vertex in joined[switch]] for switch in waiting}
        placed |= {switch: np.mean(points, axis=0) for switch, points in near.items() if points}
        waiting = [switch for switch in waiting if switch not in placed]
    together: dict[tuple[float, ...], list[Vertex]] = defaultdict(list)
    for switch in joined:
        together[tuple((placed[switch].round(6) + 0.0).tolist())].append(switch)
    for stack in (stack for stack in together.values() if len(stack) > 1):
        around = 0.3 * _circle(len(stack))
        placed |= {switch: placed[switch] + offset for switch, offset in zip(stack, around, strict=True)}
    return placed
