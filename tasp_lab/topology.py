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
from fractions import Fraction
from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from tasp_lab.arrays import BoolArray, FloatArray, IntArray
from tasp_lab.errors import NoRouteError, TopologyError
from tasp_lab.hops import Hops
from tasp_lab.links import Link as Link
from tasp_lab.links import MeshLinks
from tasp_lab.links import Vertex as Vertex
from tasp_lab.quantities import Number

LEAST_BANDWIDTH_BYTES_PER_S, MOST_BANDWIDTH_BYTES_PER_S = 1e-9, 1e18
"""Far slower than any link in slow motion, and far faster than any link there is; so that no result is infinite."""

MOST_LATENCY_S = 1e9
"""Thirty years."""

MOST_LISTED_LINKS = 1024 * 1023
"""So many links, those of a full mesh of 1024 ranks, can be looked at one by one in seconds."""


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


@dataclass(frozen=True, slots=True)
class _Way:
    """The best way from a rank to a switch; `place` counts how many vertices are better reached than this one."""

    hops: int
    latency_s: Number
    place: int
    links: tuple[int, ...]


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
    links: tuple[Link, ...] | MeshLinks
    shared: tuple[SharedCapacity, ...] = ()
    _routes: dict[tuple[int, int], Route] = field(default_factory=dict, init=False, repr=False, compare=False)
    _ways: dict[int, dict[Vertex, _Way]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise TopologyError(f"topology {self.name!r}: world_size is {self.world_size}, expected 1 or more")
        for switch in self.vertices[self.world_size :]:
            self._check_switch(str(switch))
        seen: set[tuple[Vertex, Vertex]] = set()
        for link in self.links[:1] if isinstance(self.links, MeshLinks) else self.links:
            self._check_link(link)
            if (link.source, link.destination) in seen:
                raise TopologyError(f"topology {self.name!r}: link {link.name} is listed twice")
            seen.add((link.source, link.destination))
        links = {link.name for link in self.links} if self.shared else set()
        taken = set(links)
        for shared in self.shared:
            self._check_shared(shared, links)
            if shared.name in taken:
                raise TopologyError(
                    f"topology {self.name!r}: shared capacity {shared.name!r} has the name of another constraint"
                )
            taken.add(shared.name)
        self._check_connected()

    def _check_switch(self, switch: str) -> None:
        where = f"topology {self.name!r}: switch {switch!r}"
        if not switch.strip():
            raise TopologyError(f"topology {self.name!r}: a switch has no name")
        if switch.strip().lstrip("+-").isdecimal():
            raise TopologyError(f"{where} could be taken for a rank, expected a name that is no number")
        if "->" in switch:
            raise TopologyError(f"{where} could be taken for a link, expected a name without '->'")

    def _check_link(self, link: Link) -> None:
        where = f"topology {self.name!r}: link {link.name}"
        for end in (link.source, link.destination):
            if isinstance(end, int) and not 0 <= end < self.world_size:
                raise TopologyError(f"{where}: there is no rank {end}, expected 0 to {self.world_size - 1}")
        if link.source == link.destination:
            raise TopologyError(f"{where} joins a vertex to itself")
        _check_bandwidth(where, link.bandwidth_bytes_per_s)
        _check_latency(where, link.latency_s)

    def _check_shared(self, shared: SharedCapacity, names: set[str]) -> None:
        where = f"topology {self.name!r}: shared capacity {shared.name!r}"
        _check_bandwidth(where, shared.bandwidth_bytes_per_s)
        if not shared.links:
            raise TopologyError(f"{where} covers no link")
        for name in shared.links:
            if name not in names:
                raise TopologyError(f"{where} covers link {name}, which does not exist")

    def _check_connected(self) -> None:
        """Every rank must reach every other, and every switch must have a way in and a way out."""
        if isinstance(self.links, MeshLinks):
            return
        component = self._components(self.link_ends)
        for vertex, label in zip(self.vertices, component.tolist(), strict=True):
            if label != component[0]:
                raise TopologyError(
                    f"topology {self.name!r} is not connected: "
                    f"no way from {_say(self.vertices[0])} to {_say(vertex)} and back"
                )

    @cached_property
    def vertices(self) -> tuple[Vertex, ...]:
        """All ranks, then the switches in the order in which links name them."""
        if isinstance(self.links, MeshLinks):
            return tuple(range(self.world_size))
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
        pair = (source, destination)
        if pair not in self._routes:
            self._routes[pair] = self._as_route(self._path(source, destination))
        return self._routes[pair]

    def routes(
        self, sources: npt.NDArray[np.integer], destinations: npt.NDArray[np.integer]
    ) -> tuple[IntArray, FloatArray]:
        """The ways of many hops at once, from each of `sources` to the one of `destinations`, int arrays (hops,).

        Returns the constraints of each route as `route` has them, an int array (hops, most constraints of a route)
        padded with -1, and the latencies in seconds, a float array (hops,). Raises `NoRouteError` as `route` does.

        >>> two = Topology("pair", 2, (Link(0, 1, 50e9, 1e-6), Link(1, 0, 50e9, 2e-6)))
        >>> two.routes(np.array([0, 1, 1]), np.array([1, 0, 0]))[0].tolist()
        [[0], [1], [1]]
        """
        hops = np.stack([sources, destinations]).astype(np.int64)
        wrong = (hops < 0).any(axis=0) | (hops >= self.world_size).any(axis=0) | (hops[0] == hops[1])
        for source, destination in hops[:, wrong].T[:1].tolist():
            self.route(source, destination)
        return self._hops.routes(*hops)

    @cached_property
    def _hops(self) -> Hops:
        return Hops(self)

    def has_route(self, source: int, destination: int) -> bool:
        """Whether a transfer from one rank to the other is possible."""
        n = self.world_size
        return 0 <= source < n and 0 <= destination < n and bool(self.have_routes(*np.array([[source], [destination]])))

    def have_routes(self, sources: npt.NDArray[np.integer], destinations: npt.NDArray[np.integer]) -> BoolArray:
        """Whether a transfer is possible from each of `sources` to the one of `destinations`, ranks all of them.

        Both are int arrays of one shape, which is that of the answer.
        """
        flat = self._hops.linked(sources.ravel().astype(np.int64), destinations.ravel().astype(np.int64))
        return flat.reshape(sources.shape)

    def rank_pairs(self) -> Iterator[tuple[int, int]]:
        """All ordered pairs of ranks between which a transfer is possible, in order."""
        for source, row in enumerate(self.linked_pairs):
            for destination in row.nonzero()[0].tolist():
                yield source, destination

    @cached_property
    def is_complete(self) -> bool:
        """Whether a transfer is possible between any two ranks."""
        if isinstance(self.links, MeshLinks):
            return True
        pairs, sizes = self.world_size * (self.world_size - 1), [(len(a), len(b)) for a, b in self.crossings()]
        if (self.world_size, self.world_size) in sizes:
            return True
        most = len(self.links) + sum(entries * exits for entries, exits in sizes)
        return most >= pairs and int(self.linked_pairs.sum()) == pairs

    @cached_property
    def linked_pairs(self) -> BoolArray:
        """Bool array (world_size, world_size): whether a transfer from rank `row` to rank `column` is possible."""
        linked = self.joined_pairs()
        for entries, exits in self.crossings():
            linked[np.ix_(entries, exits)] = True
        np.fill_diagonal(linked, False)
        linked.setflags(write=False)
        return linked

    def joined_pairs(self) -> BoolArray:
        """Bool array (world_size, world_size): whether there is a link from rank `row` to rank `column`."""
        n = self.world_size
        if isinstance(self.links, MeshLinks):
            return ~np.eye(n, dtype=bool)
        joined = np.zeros((n, n), dtype=bool)
        direct = (self.link_ends < n).all(axis=1)
        joined[tuple(self.link_ends[direct].T)] = True
        return joined

    def listed_links(self) -> tuple[Link, ...]:
        """The links one by one; `TopologyError` for a full mesh that has too many."""
        if len(self.links) > MOST_LISTED_LINKS:
            raise TopologyError(
                f"topology {self.name!r} has {len(self.links)} links, expected at most {MOST_LISTED_LINKS} for this"
            )
        return tuple(self.links)

    @cached_property
    def link_bandwidths_bytes_per_s(self) -> npt.NDArray[np.float64]:
        """The bandwidth of each link, an array (links,); rounded where the numbers are exact."""
        if isinstance(self.links, MeshLinks):
            return np.full(len(self.links), float(self.links.bandwidth_bytes_per_s))
        return np.array([float(link.bandwidth_bytes_per_s) for link in self.links])

    @cached_property
    def bandwidths_into_ranks_bytes_per_s(self) -> tuple[Fraction, ...]:
        """The bandwidth of all links into each rank, exact."""
        if isinstance(self.links, MeshLinks):
            return ((self.world_size - 1) * Fraction(self.links.bandwidth_bytes_per_s),) * self.world_size
        exact = {number: Fraction(number) for number in {link.bandwidth_bytes_per_s for link in self.links}}
        into = [Fraction(0)] * self.world_size
        for link in self.links:
            if isinstance(link.destination, int):
                into[link.destination] += exact[link.bandwidth_bytes_per_s]
        return tuple(into)

    @cached_property
    def link_between(self) -> npt.NDArray[np.int64]:
        """Int array (world_size, world_size): the index of the link from rank `row` to rank `column`; -1: none."""
        n = self.world_size
        found = np.full((n, n), -1, dtype=np.int64)
        if isinstance(self.links, MeshLinks):
            found[~np.eye(n, dtype=bool)] = np.arange(len(self.links))
            found.setflags(write=False)
            return found
        direct = (self.link_ends < n).all(axis=1)
        found[self.link_ends[direct, 0], self.link_ends[direct, 1]] = np.flatnonzero(direct)
        found.setflags(write=False)
        return found

    def crossings(self) -> Iterator[tuple[list[int], list[int]]]:
        """Ranks that have a link to some switches, and the ranks that these switches lead to.

        Switches that reach each other lead to the same ranks, so one of them is followed for all.
        """
        if len(self.vertices) == self.world_size:
            return
        sources, destinations = self.link_ends.T
        between = (sources >= self.world_size) & (destinations >= self.world_size)
        component = self._components(self.link_ends[between])
        entering: dict[int, set[int]] = defaultdict(set)
        into_switches = (sources < self.world_size) & (destinations >= self.world_size)
        for source, destination in self.link_ends[into_switches].tolist():
            entering[destination].add(source)
        together: dict[int, list[int]] = defaultdict(list)
        for switch in entering:
            together[int(component[switch])].append(switch)
        for switches in together.values():
            exits = self._ranks_behind(self.vertices[switches[0]])
            yield sorted(set().union(*(entering[switch] for switch in switches))), exits

    def _ranks_behind(self, switch: Vertex) -> list[int]:
        """The ranks that a switch leads to, without passing one."""
        reached, waiting = {switch}, [switch]
        while waiting:
            onward = self._links_from[waiting.pop()].keys() - reached
            reached |= onward
            waiting += [vertex for vertex in onward if isinstance(vertex, str)]
        return sorted(vertex for vertex in reached if isinstance(vertex, int))

    def _components(self, ends: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """A label per vertex; vertices that reach each other over links with these ends have the same one."""
        size = len(self.vertices)
        graph = coo_array((np.ones(len(ends), dtype=np.int8), (ends[:, 0], ends[:, 1])), shape=(size, size))
        return connected_components(graph.tocsr(), directed=True, connection="strong")[1]

    @cached_property
    def link_ends(self) -> npt.NDArray[np.int64]:
        """Positions in `vertices` of source and destination of each link, as an array (links, 2)."""
        switches = self.vertices[self.world_size :]
        position: dict[Vertex, int] = {switch: index for index, switch in enumerate(switches, start=self.world_size)}
        ends = [(position.get(a, a), position.get(b, b)) for a, b in ((x.source, x.destination) for x in self.links)]
        return np.array(ends, dtype=np.int64).reshape(-1, 2)

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

    @cached_property
    def _links_to_switches(self) -> dict[Vertex, dict[Vertex, int]]:
        """For each vertex the switches that it has a link to, and that link."""
        found: dict[Vertex, dict[Vertex, int]] = defaultdict(dict)
        for index, link in enumerate(self.links):
            if isinstance(link.destination, str):
                found[link.source][link.destination] = index
        return found

    @cached_property
    def _links_out_of_switches(self) -> dict[Vertex, dict[Vertex, int]]:
        """For each rank the switches that have a link to it, and that link."""
        found: dict[Vertex, dict[Vertex, int]] = defaultdict(dict)
        for index, link in enumerate(self.links):
            if isinstance(link.source, str) and isinstance(link.destination, int):
                found[link.destination][link.source] = index
        return found

    def _path(self, source: int, destination: int) -> tuple[int, ...]:
        """The links of the route: of all ways in the order of `_ways_from`, the one that is best at its end."""
        for rank in (source, destination):
            if not 0 <= rank < self.world_size:
                raise NoRouteError(f"topology {self.name!r} has no rank {rank}, expected 0 to {self.world_size - 1}")
        if (direct := self._link(source, destination)) >= 0:
            return (direct,)
        if source not in self._ways:
            self._ways[source] = self._ways_from(source)
        ways, last = self._ways[source], self._links_out_of_switches[destination]
        ends = [
            (way.hops, way.latency_s + self.links[link].latency_s, way.place, (*way.links, link))
            for switch, link in last.items()
            if (way := ways.get(switch)) is not None and source != destination
        ]
        if not ends:
            raise NoRouteError(
                f"topology {self.name!r}: no link and no switch leads from rank {source} to {destination}"
            )
        return min(ends)[-1]

    def _link(self, source: int, destination: int) -> int:
        """The index of the link from one rank to another; -1: none."""
        if isinstance(self.links, MeshLinks):
            return -1 if source == destination else self.links.between(source, destination)
        return self._links_from[source].get(destination, -1)

    def _ways_from(self, source: int) -> dict[Vertex, _Way]:
        """The best way from a rank to each switch: Dijkstra over (links, latency, order of listing)."""
        order = 0
        queue: list[tuple[int, Number, int, Vertex, tuple[int, ...]]] = [(0, 0, order, source, ())]
        settled: dict[Vertex, _Way] = {}
        while queue:
            hops, latency, _, vertex, path = heapq.heappop(queue)
            if vertex in settled:
                continue
            settled[vertex] = _Way(hops, latency, len(settled), path)
            for onward, link in self._links_to_switches[vertex].items():
                if onward not in settled:
                    order += 1
                    entry = (hops + 1, latency + self.links[link].latency_s, order, onward, (*path, link))
                    heapq.heappush(queue, entry)
        return settled

    def _as_route(self, path: tuple[int, ...]) -> Route:
        latency: Number = sum((self.links[link].latency_s for link in path[1:]), self.links[path[0]].latency_s)
        return Route(path, self.constraints_of(path), latency)

    def constraints_of(self, path: tuple[int, ...]) -> tuple[int, ...]:
        """The constraints of a route over these links: the links, and the shared capacities over any of them."""
        groups = {group for link in path for group in self._shared_of_link[link]} if self.shared else ()
        return (*path, *sorted(groups))

    def map_links(self, change: Callable[[int, Link], Link], name: str | None = None) -> Topology:
        """The same graph with every link (given with its index) replaced by what `change` makes of it."""
        links = tuple(change(index, link) for index, link in enumerate(self.listed_links()))
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


def _check_bandwidth(where: str, value: Number) -> None:
    if not LEAST_BANDWIDTH_BYTES_PER_S <= value <= MOST_BANDWIDTH_BYTES_PER_S:
        limits = f"{LEAST_BANDWIDTH_BYTES_PER_S:g} to {MOST_BANDWIDTH_BYTES_PER_S:g}"
        expected = _finite(value) or ("more than 0" if value <= 0 else limits)
        raise TopologyError(f"{where}: bandwidth_bytes_per_s is {value}, expected {expected}")


def _check_latency(where: str, value: Number) -> None:
    if not 0 <= value <= MOST_LATENCY_S:
        expected = _finite(value) or ("0 or more" if value < 0 else f"at most {MOST_LATENCY_S:g}")
        raise TopologyError(f"{where}: latency_s is {value}, expected {expected}")


def _finite(value: Number) -> str:
    """What was expected instead of infinity or no number; nothing if the value is finite."""
    return "a finite number" if isinstance(value, float) and not math.isfinite(value) else ""


def _say(vertex: Vertex) -> str:
    return f"rank {vertex}" if isinstance(vertex, int) else f"switch {vertex!r}"
