"""A topology: ranks and switches, joined by directed links that have a bandwidth and a latency.

Vertices are ranks (``0 .. world_size-1``) and switches (strings). Ranks hold data, switches forward it and hold
nothing. A *transfer* goes from one rank to another along a *route* through switches only: the route with the
fewest links; ties are broken by latency, then by the order in which links are listed.

Shared capacity has one form, the *constraint*: a name and a bandwidth shared by a set of transfers. Each link is a
constraint on the transfers that pass it; a `SharedCapacity` is one on the transfers that pass any of its links. A
switch port is the link between a rank and the switch, a NIC is the link between a rank and the network.

A `Topology` is valid by construction: all numbers are checked, and every rank can reach every other.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import get_args, overload

import numpy as np
import numpy.typing as npt
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from tasp_lab.arrays import BoolArray, FloatArray, IntArray
from tasp_lab.errors import NoRouteError, TopologyError
from tasp_lab.topology.links import Link as Link
from tasp_lab.topology.links import LinkTable, MeshLinks, SwitchKind, link_table, strong_components
from tasp_lab.topology.links import Switch as Switch
from tasp_lab.topology.links import Vertex as Vertex
from tasp_lab.topology.route_table import RouteTable
from tasp_lab.units import Number

MIN_BANDWIDTH_BYTES_PER_S, MAX_BANDWIDTH_BYTES_PER_S = 1e-9, 1e18
"""Far below any scaled-down link and far above any real link, so that all results are finite."""

MAX_LATENCY_S = 1e9
"""Thirty years."""

MAX_LISTED_LINKS = 1024 * 1023
"""The links of a full mesh of 1024 ranks, which can be listed one by one in seconds."""


@dataclass(frozen=True, slots=True)
class SharedCapacity:
    """A bandwidth in bytes/s shared by all transfers over any of the named links."""

    name: str
    bandwidth_bytes_per_s: Number
    links: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Constraint:
    """A named bandwidth in bytes/s shared by the transfers under it."""

    name: str
    bandwidth_bytes_per_s: Number


class _Constraints(Sequence[Constraint]):
    """Lazily created constraints."""

    def __init__(self, links: Sequence[Link], shared: Sequence[SharedCapacity]) -> None:
        self._links, self._shared, self._made = links, shared, dict[int, Constraint]()

    def __len__(self) -> int:
        return len(self._links) + len(self._shared)

    @overload
    def __getitem__(self, index: int) -> Constraint: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Constraint]: ...
    def __getitem__(self, index: int | slice) -> Constraint | Sequence[Constraint]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        if at not in self._made:
            part = self._links[at] if at < len(self._links) else self._shared[at - len(self._links)]
            self._made[at] = Constraint(part.name, part.bandwidth_bytes_per_s)
        return self._made[at]


@dataclass(frozen=True, slots=True)
class Route:
    """The route from one rank to another: indices into `Topology.links` and `Topology.constraints`, and the latency."""

    links: tuple[int, ...]
    constraints: tuple[int, ...]
    latency_s: Number


@dataclass(frozen=True, slots=True)
class _Path:
    """The best path from a rank to a switch; `place` is its rank among all vertices, best first."""

    hops: int
    latency_s: Number
    place: int
    links: tuple[int, ...]


@dataclass(frozen=True)
class Topology:
    """Ranks, switches and links. Raises `TopologyError` if it is invalid.

    Parameters
    ----------
    links : the directed links; ends that are strings are switches.
    shared : capacities shared by several links.
    switches : switches of known kind; other kinds are derived from the graph (see `switch_kinds`).
    nodes : the node of each rank, numbered from 0; if empty, derived from the graph (see `node_of_rank`).

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
    switches: tuple[Switch, ...] = ()
    nodes: tuple[int, ...] = ()
    _routes: dict[tuple[int, int], Route] = field(default_factory=dict, init=False, repr=False, compare=False)
    _paths: dict[int, dict[Vertex, _Path]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise TopologyError(f"topology {self.name!r}: world_size is {self.world_size}, expected 1 or more")
        for switch in self.table.switches:
            self._check_switch(switch)
        seen: set[tuple[Vertex, Vertex]] = set()
        for link in self.table.samples:
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
        self._check_places()

    def _check_places(self) -> None:
        """Check that the kinds of switches and the nodes of ranks match the graph."""
        described = [switch.name for switch in self.switches]
        for name in described:
            if name not in self.table.switches:
                raise TopologyError(f"topology {self.name!r}: switch {name!r} has a kind, but no link")
            if described.count(name) > 1:
                raise TopologyError(f"topology {self.name!r}: switch {name!r} has several kinds, expected one")
        for switch in self.switches:
            if switch.kind not in get_args(SwitchKind):
                expected = ", ".join(get_args(SwitchKind))
                raise TopologyError(f"topology {self.name!r}: switch {switch.name!r} is of kind {switch.kind!r}, "
                                    f"expected one of {expected}")  # fmt: skip
        if self.nodes and (len(self.nodes) != self.world_size or {*self.nodes} != {*range(max(self.nodes) + 1)}):
            raise TopologyError(
                f"topology {self.name!r}: nodes are {list(self.nodes)}, expected for each of {self.world_size} ranks "
                "its node, numbered from 0 without gaps"
            )

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
        """Check that every rank reaches every other, and that every switch has incoming and outgoing links."""
        component = self.table.components
        for vertex, label in zip(self.vertices, component.tolist(), strict=True):
            if label != component[0]:
                raise TopologyError(
                    f"topology {self.name!r} is not connected: "
                    f"no way from {_name(self.vertices[0])} to {_name(vertex)} and back"
                )

    @cached_property
    def vertices(self) -> tuple[Vertex, ...]:
        """All ranks, then the switches in order of first occurrence in the links."""
        return (*range(self.world_size), *self.table.switches)

    @cached_property
    def table(self) -> LinkTable:
        """The links as arrays."""
        return link_table(self.links, self.world_size)

    @cached_property
    def switch_kinds(self) -> dict[str, SwitchKind]:
        """The kind of every switch.

        One that `switches` does not name is taken for a network if it, with the switches that it is linked to, holds
        nodes together: without them the ranks would fall apart, but not into single ranks. Else it is inside a node.

        >>> ends = [(0, "x"), (1, "x"), (2, "y"), (3, "y"), (0, "z"), (1, "z"), (2, "z"), (3, "z")]
        >>> pairs = Topology("pairs", 4, tuple(link for a, b in ends for link in both_ways(a, b, 1, 0)))
        >>> pairs.switch_kinds
        {'x': 'node', 'y': 'node', 'z': 'network'}
        """
        found: dict[str, SwitchKind] = {switch.name: switch.kind for switch in self.switches}
        missing = [at for at, name in enumerate(self.table.switches, self.world_size) if name not in found]
        if missing:
            group = self._joined(np.all(self.link_ends >= self.world_size, axis=1))
            for number in {int(group[at]) for at in missing}:
                kind: SwitchKind = "network" if self._holds_nodes_together(group == number) else "node"
                found |= {str(self.vertices[at]): kind for at in missing if group[at] == number}
        return {name: found[name] for name in self.table.switches}

    def _holds_nodes_together(self, switches: BoolArray) -> bool:
        """Whether removing these vertices splits the ranks into several groups, not all of one rank."""
        node = self._joined(~np.any(switches[self.link_ends], axis=1))[: self.world_size]
        return 1 < len(np.unique(node)) < self.world_size

    def _joined(self, links: BoolArray) -> IntArray:
        """The connected component of each vertex over the chosen links, a bool array (links,), in either direction."""
        ends, size = self.link_ends[links], len(self.vertices)
        graph = coo_array((np.ones(len(ends), dtype=np.int8), (ends[:, 0], ends[:, 1])), shape=(size, size))
        return connected_components(graph, directed=False)[1].astype(np.int64)

    @cached_property
    def node_of_rank(self) -> tuple[int, ...]:
        """The node of each rank: `nodes` if given, else the components of the graph without the network.

        >>> pair = both_ways(0, "switch", 1, 0), both_ways(1, "switch", 1, 0)
        >>> Topology("pair", 2, tuple(link for both in pair for link in both)).node_of_rank
        (0, 0)
        """
        if self.nodes or "network" not in self.switch_kinds.values():
            return self.nodes or (0,) * self.world_size
        network = np.array([self.switch_kinds.get(str(vertex)) == "network" for vertex in self.vertices])
        node = self._joined(~np.any(network[self.link_ends], axis=1))[: self.world_size].tolist()
        numbers = {label: number for number, label in enumerate(dict.fromkeys(node))}
        return tuple(numbers[label] for label in node)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Hashes one link only: topologies that differ only in others are rare, and ``==`` distinguishes them."""
        return hash((self.name, self.world_size, len(self.links), *self.links[:1], self.shared))

    @property
    def is_exact(self) -> bool:
        """Whether bandwidths are fractions, judged by the first link."""
        return any(isinstance(link.bandwidth_bytes_per_s, Fraction) for link in self.links[:1])

    @cached_property
    def constraints(self) -> Sequence[Constraint]:
        """All constraints: one per link in order, then the shared capacities."""
        return _Constraints(self.links, self.shared)

    def route(self, source: int, destination: int) -> Route:
        """The route from one rank to another. Raises `NoRouteError` if there is none without forwarding ranks."""
        pair = (source, destination)
        if pair not in self._routes:
            self._routes[pair] = self._as_route(self._path(source, destination))
        return self._routes[pair]

    def routes(
        self, sources: npt.NDArray[np.integer], destinations: npt.NDArray[np.integer]
    ) -> tuple[IntArray, FloatArray]:
        """The routes of many hops, from each of `sources` to the respective `destinations`, int arrays (hops,).

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
        return self._route_table.routes(*hops)

    @cached_property
    def _route_table(self) -> RouteTable:
        return RouteTable(self)

    def has_route(self, source: int, destination: int) -> bool:
        """Whether a route from one rank to the other exists."""
        n = self.world_size
        return 0 <= source < n and 0 <= destination < n and bool(self.have_routes(*np.array([[source], [destination]])))

    def have_routes(self, sources: npt.NDArray[np.integer], destinations: npt.NDArray[np.integer]) -> BoolArray:
        """Whether a route exists from each of `sources` to the respective `destinations`, int arrays (hops,) of ranks.

        Both are int arrays of one shape, which is that of the answer.
        """
        flat = self._route_table.linked(sources.ravel().astype(np.int64), destinations.ravel().astype(np.int64))
        return flat.reshape(sources.shape)

    def rank_pairs(self) -> Iterator[tuple[int, int]]:
        """All ordered pairs of ranks with a route, in order."""
        for source, row in enumerate(self.linked_pairs):
            for destination in row.nonzero()[0].tolist():
                yield source, destination

    @cached_property
    def is_complete(self) -> bool:
        """Whether there is a route between any two ranks."""
        if self.table.is_mesh:
            return True
        pairs, sizes = self.world_size * (self.world_size - 1), [(len(a), len(b)) for a, b in self.crossings()]
        if (self.world_size, self.world_size) in sizes:
            return True
        most = len(self.links) + sum(entries * exits for entries, exits in sizes)
        return most >= pairs and int(self.linked_pairs.sum()) == pairs

    @cached_property
    def linked_pairs(self) -> BoolArray:
        """Bool array (world_size, world_size): whether there is a route from rank `row` to rank `column`."""
        linked = self.table.joined
        for entries, exits in self.crossings():
            linked[np.ix_(entries, exits)] = True
        np.fill_diagonal(linked, False)
        linked.setflags(write=False)
        return linked

    def listed_links(self) -> tuple[Link, ...]:
        """The links one by one. Raises `TopologyError` for a full mesh with too many."""
        if len(self.links) > MAX_LISTED_LINKS:
            raise TopologyError(
                f"topology {self.name!r} has {len(self.links)} links, expected at most {MAX_LISTED_LINKS} for this"
            )
        return tuple(self.links)

    @property
    def link_bandwidths_bytes_per_s(self) -> npt.NDArray[np.float64]:
        """The bandwidth of each link, a float array (links,); exact numbers are rounded."""
        return self.table.bandwidths_bytes_per_s

    @property
    def bandwidths_into_ranks_bytes_per_s(self) -> tuple[Fraction, ...]:
        """The bandwidth of all links into each rank, exact."""
        return self.table.into_ranks_bytes_per_s

    @cached_property
    def link_between(self) -> npt.NDArray[np.int64]:
        """Int array (world_size, world_size): the index of the link from rank `row` to rank `column`; -1: none."""
        ranks = np.arange(self.world_size)
        found = self.table.between(*np.broadcast_arrays(ranks[:, None], ranks))
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
        component = strong_components(self.link_ends[between], len(self.vertices))
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
        """The ranks reachable from a switch without passing a rank."""
        reached, waiting = {switch}, [switch]
        while waiting:
            onward = self._links_from[waiting.pop()].keys() - reached
            reached |= onward
            waiting += [vertex for vertex in onward if isinstance(vertex, str)]
        return sorted(vertex for vertex in reached if isinstance(vertex, int))

    @property
    def link_ends(self) -> npt.NDArray[np.int64]:
        """Positions in `vertices` of source and destination of each link, as an array (links, 2)."""
        return self.table.ends

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
        """For each vertex, the switches it has a link to, with the link."""
        found: dict[Vertex, dict[Vertex, int]] = defaultdict(dict)
        for index, link in enumerate(self.links):
            if isinstance(link.destination, str):
                found[link.source][link.destination] = index
        return found

    @cached_property
    def _links_out_of_switches(self) -> dict[Vertex, dict[Vertex, int]]:
        """For each rank, the switches that have a link to it, with the link."""
        found: dict[Vertex, dict[Vertex, int]] = defaultdict(dict)
        for index, link in enumerate(self.links):
            if isinstance(link.source, str) and isinstance(link.destination, int):
                found[link.destination][link.source] = index
        return found

    def _path(self, source: int, destination: int) -> tuple[int, ...]:
        """The links of the route: the best path, in the order of `_paths_from`."""
        for rank in (source, destination):
            if not 0 <= rank < self.world_size:
                raise NoRouteError(f"topology {self.name!r} has no rank {rank}, expected 0 to {self.world_size - 1}")
        if (direct := self.table.link(source, destination)) >= 0:
            return (direct,)
        if source not in self._paths:
            self._paths[source] = self._paths_from([source])
        paths, last = self._paths[source], self._links_out_of_switches[destination]
        ends = [
            (path.hops, path.latency_s + self.links[link].latency_s, path.place, (*path.links, link))
            for switch, link in last.items()
            if (path := paths.get(switch)) is not None and source != destination
        ]
        if not ends:
            raise NoRouteError(
                f"topology {self.name!r}: no link and no switch leads from rank {source} to {destination}"
            )
        return min(ends)[-1]

    def _paths_from(self, sources: Iterable[int], hops_per_link: int = 1) -> dict[Vertex, _Path]:
        """The best path from any of these ranks to each switch: Dijkstra over (hops, latency, order of listing)."""
        queue: list[tuple[int, Number, int, Vertex, tuple[int, ...]]] = [
            (0, 0, order, source, ()) for order, source in enumerate(sources)
        ]
        order = len(queue)
        settled: dict[Vertex, _Path] = {}
        while queue:
            hops, latency, _, vertex, path = heapq.heappop(queue)
            if vertex in settled:
                continue
            settled[vertex] = _Path(hops, latency, len(settled), path)
            for onward, link in self._links_to_switches[vertex].items():
                if onward not in settled:
                    order += 1
                    latency_s = latency + self.links[link].latency_s
                    heapq.heappush(queue, (hops + hops_per_link, latency_s, order, onward, (*path, link)))
        return settled

    @cached_property
    def min_latencies_into_ranks_s(self) -> tuple[Number, ...]:
        """The lowest latency of a route into each rank."""
        if not self.table.switches:
            return self.table.latencies_into_ranks_s
        paths = self._paths_from(range(self.world_size), hops_per_link=0)
        least = []
        for rank, direct_s in enumerate(self.table.latencies_into_ranks_s):
            last = self._links_out_of_switches[rank].items()
            through = (paths[switch].latency_s + self.links[link].latency_s for switch, link in last)
            least.append(min([direct_s, *through]))
        return tuple(least)

    def _as_route(self, path: tuple[int, ...]) -> Route:
        latency: Number = sum((self.links[link].latency_s for link in path[1:]), self.links[path[0]].latency_s)
        return Route(path, self.constraints_of(path), latency)

    def constraints_of(self, path: tuple[int, ...]) -> tuple[int, ...]:
        """The constraints of a route over these links: the links, and the shared capacities over any of them."""
        groups = {group for link in path for group in self._shared_of_link[link]} if self.shared else ()
        return (*path, *sorted(groups))

    def map_links(self, change: Callable[[int, Link], Link], name: str | None = None) -> Topology:
        """The same graph with every link replaced by `change(index, link)`."""
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
    if not MIN_BANDWIDTH_BYTES_PER_S <= value <= MAX_BANDWIDTH_BYTES_PER_S:
        limits = f"{MIN_BANDWIDTH_BYTES_PER_S:g} to {MAX_BANDWIDTH_BYTES_PER_S:g}"
        expected = _finite(value) or ("more than 0" if value <= 0 else limits)
        raise TopologyError(f"{where}: bandwidth_bytes_per_s is {value}, expected {expected}")


def _check_latency(where: str, value: Number) -> None:
    if not 0 <= value <= MAX_LATENCY_S:
        expected = _finite(value) or ("0 or more" if value < 0 else f"at most {MAX_LATENCY_S:g}")
        raise TopologyError(f"{where}: latency_s is {value}, expected {expected}")


def _finite(value: Number) -> str:
    """The expectation to report for an infinite value or NaN; empty if the value is finite."""
    return "a finite number" if isinstance(value, float) and not math.isfinite(value) else ""


def _name(vertex: Vertex) -> str:
    return f"rank {vertex}" if isinstance(vertex, int) else f"switch {vertex!r}"
