"""A topology: ranks and switches, joined by directed links that have a bandwidth and a latency.

Vertices are ranks (``0 .. world_size-1``) and switches (strings). Ranks hold data, switches forward it and hold
nothing. A *transfer* goes from one rank to another along a *route* through switches only: the route with the
fewest links, among those the one with the least latency, among those the one listed first.

Shared capacity has one form, the *constraint*: a name and a bandwidth that a set of transfers share. Each link is
a constraint over the transfers that pass it; a `SharedCapacity` is one over the transfers that pass any of its
links. A switch port is the link between a rank and the switch, a NIC is the link between a rank and the network.

A `Topology` that exists is valid: construction checks every number and that every rank can reach every other.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from tasp_lab.errors import NoRouteError, TopologyError
from tasp_lab.quantities import Number

Vertex = int | str
"""A rank (int) or a switch (str)."""


@dataclass(frozen=True, slots=True)
class Link:
    """One directed physical connection: bandwidth in bytes/s one way, latency in seconds."""

    source: Vertex
    destination: Vertex
    bandwidth_bytes_per_s: Number
    latency_s: Number

    @property
    def name(self) -> str:
        """The link as it appears in messages and explanations.

        >>> Link(0, "switch", 50e9, 0.0).name
        '0->switch'
        """
        return f"{self.source}->{self.destination}"


@dataclass(frozen=True, slots=True)
class SharedCapacity:
    """A bandwidth in bytes/s that all transfers over any of the named links share."""

    name: str
    bandwidth_bytes_per_s: Number
    links: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Constraint:
    """A name and the bandwidth in bytes/s that the transfers under it share."""

    name: str
    bandwidth_bytes_per_s: Number


@dataclass(frozen=True, slots=True)
class Route:
    """The way from one rank to another: indices into `Topology.links` and `Topology.constraints`, and the latency."""

    links: tuple[int, ...]
    constraints: tuple[int, ...]
    latency_s: Number


@dataclass(frozen=True)
class Topology:
    """Ranks, switches and links. Raises `TopologyError` when it is not a machine that can exist.

    >>> two = Topology("pair", 2, (Link(0, 1, 50e9, 1e-6), Link(1, 0, 50e9, 1e-6)))
    >>> two.route(0, 1).latency_s
    1e-06
    >>> [constraint.name for constraint in two.constraints]
    ['0->1', '1->0']
    """

    name: str
    world_size: int
    links: tuple[Link, ...]
    shared: tuple[SharedCapacity, ...] = ()
    _routes: dict[int, dict[int, Route]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise TopologyError(f"topology {self.name!r}: world_size is {self.world_size}, expected 1 or more")
        seen: set[tuple[Vertex, Vertex]] = set()
        for link in self.links:
            self._check_link(link)
            if (link.source, link.destination) in seen:
                raise TopologyError(f"topology {self.name!r}: link {link.name} is listed twice")
            seen.add((link.source, link.destination))
        names = {link.name for link in self.links} if self.shared else set()
        for shared in self.shared:
            self._check_shared(shared, names)
        self._check_connected()

    def _check_link(self, link: Link) -> None:
        where = f"topology {self.name!r}: link {link.name}"
        for end in (link.source, link.destination):
            if isinstance(end, int) and not 0 <= end < self.world_size:
                raise TopologyError(f"{where}: there is no rank {end}, expected 0 to {self.world_size - 1}")
        if link.source == link.destination:
            raise TopologyError(f"{where} joins a vertex to itself")
        _check_number(where, "bandwidth_bytes_per_s", link.bandwidth_bytes_per_s, positive=True)
        _check_number(where, "latency_s", link.latency_s, positive=False)

    def _check_shared(self, shared: SharedCapacity, names: set[str]) -> None:
        where = f"topology {self.name!r}: shared capacity {shared.name!r}"
        _check_number(where, "bandwidth_bytes_per_s", shared.bandwidth_bytes_per_s, positive=True)
        if not shared.links:
            raise TopologyError(f"{where} covers no link")
        for name in shared.links:
            if name not in names:
                raise TopologyError(f"{where} covers link {name}, which does not exist")

    def _check_connected(self) -> None:
        """Every rank must reach every other, and every switch must have a way in and a way out."""
        vertices = self.vertices
        index = {vertex: position for position, vertex in enumerate(vertices)}
        ends = np.array([(index[link.source], index[link.destination]) for link in self.links], dtype=np.int64)
        ends = ends.reshape(-1, 2)
        shape = (len(vertices), len(vertices))
        graph = coo_array((np.ones(len(ends), dtype=np.int8), (ends[:, 0], ends[:, 1])), shape=shape)
        _, component = connected_components(graph.tocsr(), directed=True, connection="strong")
        for vertex, label in zip(vertices, component, strict=True):
            if label != component[0]:
                raise TopologyError(
                    f"topology {self.name!r} is not connected: "
                    f"no way from {_say(vertices[0])} to {_say(vertex)} and back"
                )

    @cached_property
    def vertices(self) -> tuple[Vertex, ...]:
        """All ranks, then the switches in the order in which links name them."""
        ends = (end for link in self.links for end in (link.source, link.destination))
        return (*range(self.world_size), *dict.fromkeys(end for end in ends if isinstance(end, str)))

    @cached_property
    def constraints(self) -> tuple[Constraint, ...]:
        """Everything transfers share: one constraint per link in order, then the shared capacities."""
        of_links = (Constraint(link.name, link.bandwidth_bytes_per_s) for link in self.links)
        of_groups = (Constraint(shared.name, shared.bandwidth_bytes_per_s) for shared in self.shared)
        return (*of_links, *of_groups)

    def route(self, source: int, destination: int) -> Route:
        """The way from one rank to another. Raises `NoRouteError` when only a rank could forward."""
        for rank in (source, destination):
            if not 0 <= rank < self.world_size:
                raise NoRouteError(f"topology {self.name!r} has no rank {rank}, expected 0 to {self.world_size - 1}")
        if source not in self._routes:
            self._routes[source] = {} if self._switchless else self._routes_from(source)
        routes = self._routes[source]
        if destination not in routes and (link := self._links_from[source].get(destination)) is not None:
            routes[destination] = self._as_route((link,))
        if destination not in routes:
            raise NoRouteError(
                f"topology {self.name!r}: no link and no switch leads from rank {source} to {destination}"
            )
        return routes[destination]

    def has_route(self, source: int, destination: int) -> bool:
        """Whether a transfer from one rank to the other is possible."""
        try:
            self.route(source, destination)
        except NoRouteError:
            return False
        return True

    def rank_pairs(self) -> Iterator[tuple[int, int]]:
        """All ordered pairs of ranks between which a transfer is possible, in order."""
        for source in range(self.world_size):
            for destination in range(self.world_size):
                if source != destination and self.has_route(source, destination):
                    yield source, destination

    @cached_property
    def _switchless(self) -> bool:
        return len(self.vertices) == self.world_size

    @cached_property
    def _links_from(self) -> dict[Vertex, dict[Vertex, int]]:
        found: dict[Vertex, dict[Vertex, int]] = defaultdict(dict)
        for index, link in enumerate(self.links):
            found[link.source][link.destination] = index
        return found

    @cached_property
    def _shared_of_link(self) -> dict[int, tuple[int, ...]]:
        index_of = {link.name: index for index, link in enumerate(self.links)} if self.shared else {}
        found: dict[int, tuple[int, ...]] = defaultdict(tuple)
        for position, shared in enumerate(self.shared, start=len(self.links)):
            for name in shared.links:
                found[index_of[name]] += (position,)
        return found

    def _routes_from(self, source: int) -> dict[int, Route]:
        """Dijkstra over (links, latency, order of listing), never onward from another rank."""
        order = 0
        queue: list[tuple[int, Number, int, Vertex, tuple[int, ...]]] = [(0, 0, order, source, ())]
        settled: dict[Vertex, tuple[int, ...]] = {}
        while queue:
            hops, latency, _, vertex, path = heapq.heappop(queue)
            if vertex in settled:
                continue
            settled[vertex] = path
            if isinstance(vertex, int) and vertex != source:
                continue
            for onward, link in self._links_from[vertex].items():
                if onward not in settled:
                    order += 1
                    entry = (hops + 1, latency + self.links[link].latency_s, order, onward, (*path, link))
                    heapq.heappush(queue, entry)
        return {vertex: self._as_route(path) for vertex, path in settled.items() if isinstance(vertex, int) and path}

    def _as_route(self, path: tuple[int, ...]) -> Route:
        groups = {group for link in path for group in self._shared_of_link[link]} if self.shared else ()
        latency: Number = sum((self.links[link].latency_s for link in path[1:]), self.links[path[0]].latency_s)
        return Route(path, (*path, *sorted(groups)), latency)

    def map_links(self, change: Callable[[int, Link], Link], name: str | None = None) -> Topology:
        """The same graph with every link (given with its index) replaced by what `change` makes of it."""
        links = tuple(change(index, link) for index, link in enumerate(self.links))
        return replace(self, name=self.name if name is None else name, links=links)

    def scaled(self, scale: Number) -> Topology:
        """The same machine in slow motion: every bandwidth times `scale`, every latency divided by it.

        >>> pair = Topology("pair", 2, (Link(0, 1, 50e9, 1e-6), Link(1, 0, 50e9, 1e-6)))
        >>> pair.scaled(0.5).links[0]
        Link(source=0, destination=1, bandwidth_bytes_per_s=25000000000.0, latency_s=2e-06)
        """
        slower = self.map_links(
            lambda _, link: replace(
                link,
                bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * scale,
                latency_s=link.latency_s / scale,
            )
        )
        shared = tuple(replace(s, bandwidth_bytes_per_s=s.bandwidth_bytes_per_s * scale) for s in self.shared)
        return replace(slower, shared=shared)


def both_ways(a: Vertex, b: Vertex, bandwidth_bytes_per_s: Number, latency_s: Number) -> Iterable[Link]:
    """The two directed links of one full-duplex cable."""
    return (Link(a, b, bandwidth_bytes_per_s, latency_s), Link(b, a, bandwidth_bytes_per_s, latency_s))


def _check_number(where: str, what: str, value: Number, *, positive: bool) -> None:
    if not math.isfinite(value):
        raise TopologyError(f"{where}: {what} is {value}, expected a finite number")
    if value < 0 or (positive and value == 0):
        raise TopologyError(f"{where}: {what} is {value}, expected {'more than 0' if positive else '0 or more'}")


def _say(vertex: Vertex) -> str:
    return f"rank {vertex}" if isinstance(vertex, int) else f"switch {vertex!r}"
