"""Where the ranks and switches of a topology are drawn, and how the hops of rings run between them.

A *hop* is one step of a ring, from a rank to the next. Over a link of its own it runs along that link, slightly bent to
the left, so that the way back does not cover it. Through switches it bends towards them.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.sparse.csgraph import connected_components
from scipy.spatial import KDTree

from tasp_lab.arrays import FloatArray, Int32Array
from tasp_lab.topology import Topology, Vertex


@dataclass(frozen=True)
class Layout:
    """The vertices of a topology in the plane. The unit of length is arbitrary."""

    topology: Topology
    positions: dict[Vertex, FloatArray]

    @cached_property
    def points(self) -> FloatArray:
        """Array (vertices, 2) in the order of `Topology.vertices`."""
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

    def curves(self, onward: Int32Array) -> list[list[FloatArray]]:
        """Each hop of each ring as an array (points, 2), those between the same ranks side by side.

        `onward` is an int array (rings, world_size): where rank `column` sends on ring `row`.
        """
        used: Counter[tuple[int, int]] = Counter()
        curves = []
        for row in onward.tolist():
            curves.append([self.curve(*hop, used[hop]) for hop in enumerate(row)])
            used.update(enumerate(row))
        return curves

    def curve(self, source: int, destination: int, use: int) -> FloatArray:
        """A hop from one rank to another; the more often, `use` times, the pair was used before, the wider."""
        start, end = self.positions[source], self.positions[destination]
        along, length = end - start, float(np.hypot(*(end - start)))
        left = np.array([-along[1], along[0]]) / length
        aside = (0.03 + 0.06 * use) * min(self.span, 4 * length) * left
        if self.topology.link_between[source, destination] < 0:
            links = self.topology.route(source, destination).links
            switches = [self.positions[self.topology.links[link].destination] for link in links[:-1]]
            bends = [0.6 * (start + end) / 2 + 0.4 * np.mean(switches, axis=0) + aside]
        elif self._passes_another(start, end):
            around = (0.28 + 0.1 * use) * self.nearest * left
            ahead = min(0.25, 0.5 * self.nearest / length) * along
            bends = [start + ahead + around, end - ahead + around]
        else:
            bends = [(start + end) / 2 + aside]
        return smooth(np.array([start, *bends, end]))

    def wire(self, source: Vertex, destination: Vertex) -> FloatArray:
        """A link: where a hop over it would be, or straight from or to a switch."""
        if isinstance(source, int) and isinstance(destination, int):
            return self.curve(source, destination, 0)
        return np.array([self.positions[source], self.positions[destination]])

    def _passes_another(self, start: FloatArray, end: FloatArray) -> bool:
        """Whether the straight way from start to end touches a vertex in between."""
        along = end - start
        place = (self.points - start) @ along / (along @ along)
        distance = np.abs((self.points - start) @ np.array([-along[1], along[0]])) / np.hypot(*along)
        between = (place > 1e-6) & (place < 1 - 1e-6)
        return bool((distance[between] < 0.3 * self.nearest).any())


def smooth(corners: FloatArray) -> FloatArray:
    """A curve from the first to the last of three or more corners that bends towards the others: a quadratic B-spline.

    >>> curve = smooth(np.array([(0.0, 0.0), (1.0, 2.0), (2.0, 0.0)]))
    >>> curve[[0, 6, 12]].tolist()
    [[0.0, 0.0], [1.0, 1.0], [2.0, 0.0]]
    """
    bends = corners[1:-1]
    joints = np.vstack([corners[:1], (bends[:-1] + bends[1:]) / 2, corners[-1:]])
    t = np.linspace(0, 1, 13)[:, None]
    pieces = [
        (1 - t) ** 2 * start + 2 * t * (1 - t) * bend + t**2 * end
        for start, bend, end in zip(joints[:-1], bends, joints[1:], strict=True)
    ]
    return np.vstack(pieces)


def arrow(curve: FloatArray, radius: float, head: float) -> tuple[FloatArray, FloatArray]:
    """A curve as an arrow onto a circle around its end: its line, and its head, a triangle that touches the circle."""
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


def lay_out(topology: Topology, rings: Int32Array) -> Layout:
    """Nodes as circles around a circle, tori and hypercubes as grids, any other topology as one circle.

    Around that circle ranks stand in their order or, if they have few links and no ring in that order, in the order of
    the first of the given rings, an int array (rings, world_size).

    >>> from tasp_lab.builders import torus
    >>> lay_out(torus((2, 3)), np.empty((0, 6), dtype=np.int32)).positions[4].tolist()      # row 1, column 1
    [1.0, -1.0]
    """
    if per_node := _ranks_per_node(topology):
        ranks = _circles_around_a_circle(topology.world_size // per_node, per_node)
    elif (shape := _grid_shape(topology)) is not None:
        ranks = _grid(shape)
    else:
        ranks = _circle(topology.world_size)[np.argsort(_order_around(topology, rings))]
    return Layout(topology, _with_switches(topology, ranks))


def _circle(count: int, first_turns: float = 0.0) -> FloatArray:
    """Points on a circle of radius 1, clockwise, the first so many turns from the top; two lie side by side."""
    angle = 2 * np.pi * (np.arange(count) / count + first_turns - 0.25 * (count == 2))
    return np.column_stack([np.sin(angle), np.cos(angle)])


def _circles_around_a_circle(count: int, size: int) -> FloatArray:
    """So many circles of so many points; a quarter of a step turns inner points out of the way of hops between them."""
    radius = min(0.42, 0.6 * math.sin(math.pi / count))
    return (_circle(count)[:, None] + radius * _circle(size, 0.25 / size)).reshape(-1, 2)


def _grid(shape: tuple[int, ...]) -> FloatArray:
    """Points numbered along the last dimension first.

    The third dimension from the end goes to the back, the fourth stands beside.
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
    """The size of nodes if links and switches of their own join ranks to several blocks of equal size, else 0."""
    ranks = topology.world_size
    joined = topology.link_between >= 0
    for ends in _joined_by_switches(topology).values():
        near = sorted(vertex for vertex in ends if isinstance(vertex, int))
        if near and len(near) < ranks and near == list(range(near[0], near[-1] + 1)):
            joined[np.ix_(near, near)] = True
    count, node = connected_components(joined, directed=False)
    size = ranks // count
    return size if 1 < size < ranks and (node == np.arange(ranks) // size).all() else 0


def _grid_shape(topology: Topology) -> tuple[int, ...] | None:
    """The shape that a name like torus:4x4 or hypercube:3 gives, if each link runs along one of up to 4 dimensions."""
    shape: tuple[int, ...] = ()
    if topology.name.startswith("hypercube"):
        shape = (2,) * (topology.world_size.bit_length() - 1)
    elif named := re.search(r"\b(?:torus|grid):(\d+(?:x\d+)+)\b", topology.name):
        shape = tuple(map(int, named[1].split("x")))
    if not 1 < len(shape) < 5 or math.prod(shape) != topology.world_size:
        return None
    place = np.argwhere(np.ones(shape))
    source, destination = np.nonzero(topology.link_between >= 0)
    steps = np.count_nonzero(place[source] != place[destination], axis=1)
    return shape if (steps == 1).all() else None


def _joined_by_switches(topology: Topology) -> dict[Vertex, set[Vertex]]:
    """The vertices at the other ends of the links of each switch."""
    found: dict[Vertex, set[Vertex]] = {switch: set() for switch in topology.vertices[topology.world_size :]}
    for link in topology.links if found else ():
        for end, other in ((link.source, link.destination), (link.destination, link.source)):
            if end in found:
                found[end].add(other)
    return found


def _with_switches(topology: Topology, ranks: FloatArray) -> dict[Vertex, FloatArray]:
    """Each switch amid what it joins; several that would lie on one point around it."""
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
        placed |= {switch: placed[switch] + aside for switch, aside in zip(stack, around, strict=True)}
    return placed
