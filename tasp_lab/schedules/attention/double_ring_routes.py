"""The routes of keys around the inner rings of a double ring and between them, see
`tasp_lab.schedules.attention.double_ring`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from tasp_lab.core.arrays import IntArray
from tasp_lab.core.errors import NoDecompositionError, ScheduleError, TopologyError
from tasp_lab.rings.decompose import decompose
from tasp_lab.rings.rings import over_lanes
from tasp_lab.topology.derived import equal_parts
from tasp_lab.topology.graph import Topology


@dataclass(frozen=True, eq=False)
class Routes:
    """The inner ring and the direction of the outer ring of each part of a rank's keys.

    Parameters
    ----------
    inner : int array (lanes, window): inner rings of the first group.
    groups : the number of groups.
    shares : the share of each part.
    lane : int array (parts,), the inner ring of each part.
    direction : int array (parts,), 1 or -1.
    """

    inner: IntArray
    groups: int
    shares: tuple[Fraction, ...]
    lane: IntArray
    direction: IntArray

    @property
    def window(self) -> int:
        """The ranks of an inner ring."""
        return int(self.inner.shape[1])

    @property
    def outer_lane(self) -> IntArray:
        """The lane of each part between inner rings: one per direction."""
        lane: IntArray = len(self.inner) + np.searchsorted(np.unique(self.direction), self.direction)
        return lane

    @property
    def lanes(self) -> int:
        """The inner rings, then the directions of the outer ring."""
        return 1 + int(self.outer_lane.max())

    def paths(self, hops: IntArray | None = None) -> IntArray:
        """The ranks at which the parts of all ranks are at these hops, int array (hops,), by default hop by hop at all.

        An int array (parts * world_size, hops); row ``part * world_size + rank`` is that of a rank's part.
        """
        ranks = np.arange(self.groups * self.window)
        group, place = np.divmod(ranks, self.window)
        windows, places = np.divmod(ranks if hops is None else hops, self.window)
        first = np.argsort(self.inner, axis=1)[:, place]
        around = np.take_along_axis(self.inner[:, None], (first[:, :, None] + places) % self.window, axis=2)
        between = (group[:, None] + self.direction[:, None, None] * windows) % self.groups
        paths: IntArray = (between * self.window + around[self.lane]).reshape(-1, len(places))
        return paths

    def has_links(self, topology: Topology) -> bool:
        """Whether the topology has links for all hops: each follows the ring of the first hop, or that of a window."""
        paths = self.paths(np.array([0, 1, self.window]))
        return bool(topology.have_routes(paths[:, [0, 0]], paths[:, 1:]).all())


def routes_of(name: str, topology: Topology, split: tuple[int, int], variant: str) -> list[Routes]:
    """The routes to choose from: those that the topology has links for; if it has for none, the first ones."""
    window, groups = split
    upward = np.arange(window)
    inner = [(ring[None], [Fraction(1)]) for ring in (upward, upward[::-1])[: window - 1]]
    outer: list[tuple[int, ...]] = [(1,), (-1,)]
    if variant:
        inner, outer = [_tasp_rings(name, topology, groups)], [*outer, (1, -1)]
    found = [_around(*rings, groups, each) for rings in inner for each in outer[: None if groups > 2 else 1]]
    return [each for each in found if each.has_links(topology)] or found[:1]


def _tasp_rings(name: str, topology: Topology, groups: int) -> tuple[IntArray, list[Fraction]]:
    """The rings of a group and their shares."""
    try:
        found = decompose(equal_parts(topology, np.arange(topology.world_size).reshape(groups, -1)))
    except (NoDecompositionError, TopologyError) as error:
        raise ScheduleError(f"schedule {name!r}: {error}") from None
    return over_lanes(found.rings, found.shares)


def _around(rings: IntArray, shares: Sequence[Fraction], groups: int, directions: tuple[int, ...]) -> Routes:
    """Around inner rings with these shares, and between them an equal part in each of these directions."""
    count = len(directions)
    lane, direction = np.tile(np.arange(len(rings)), count), np.repeat(directions, len(rings))
    return Routes(rings, groups, tuple(share / count for share in shares) * count, lane, direction)
