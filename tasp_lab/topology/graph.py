"""A topology: ranks and switches, joined by directed links that have a bandwidth and a latency.

Vertices are ranks (``0 .. world_size-1``) and switches (strings). Ranks hold data, switches forward it and hold
nothing. A *transfer* goes from one rank to another along a *route*. Ranks with a link take it; else a route goes
through switches only, that with the fewest links; ties are broken by latency, then by the order in which links are
listed. Where no switch leads there either, other ranks forward (`tasp_lab.topology.routing`), at the rate of the
slowest link, unless `Topology.forwarding` says that their software does not.

Shared capacity has one form, the *constraint*: a name and a bandwidth shared by a set of transfers. Each link is a
constraint on the transfers that pass it; a `SharedCapacity` is one on the transfers that pass any of its links. A
switch port is the link between a rank and the switch, a NIC is the link between a rank and the network.

A `Topology` is valid by construction: all numbers are checked, and every rank can reach every other.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import numpy.typing as npt

from tasp_lab.core.arrays import BoolArray, FloatArray, IntArray
from tasp_lab.core.errors import QuantityError, TopologyError
from tasp_lab.core.tables import brief
from tasp_lab.core.units import Number, parse_bandwidth_bytes_per_s, parse_time_s
from tasp_lab.topology.components import components
from tasp_lab.topology.links import Constraint as Constraint
from tasp_lab.topology.links import Constraints, ListedLinks, MeshLinks, SwitchKind
from tasp_lab.topology.links import Link as Link
from tasp_lab.topology.links import SharedCapacity as SharedCapacity
from tasp_lab.topology.links import Switch as Switch
from tasp_lab.topology.links import Vertex as Vertex
from tasp_lab.topology.routing import ANY_ROUTE, Grid, Paths
from tasp_lab.topology.routing import Forwarding as Forwarding
from tasp_lab.topology.routing import Route as Route

if TYPE_CHECKING:
    import networkx

MAX_LISTED_LINKS = 1024 * 1023
"""The links of a full mesh of 1024 ranks, which can be listed one by one in seconds."""


@dataclass(frozen=True, repr=False)
class Topology:
    """Ranks, switches and links. Raises `TopologyError` if it is invalid.

    Parameters
    ----------
    links : the directed links; ends that are strings are switches.
    shared : capacities shared by several links.
    switches : switches of known kind; other kinds are derived from the graph (see `switch_kinds`).
    nodes : the node of each rank, numbered from 0; if empty, derived from the graph (see `node_of_rank`).
    labels : the name of each rank where some of a machine are missing (`tasp_lab.topology.missing`), which constraints
        have in theirs; if empty, its number.
    forwarding : how ranks send to ranks that they are not linked to.
    grid : the grid that the links are those of; None for other links.

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
    labels: tuple[int, ...] = ()
    forwarding: Forwarding = ANY_ROUTE
    grid: Grid | None = None
    _routes: dict[tuple[int, int], Route] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_topology(self)

    def __repr__(self) -> str:
        return brief(self, self.name, f"{self.world_size} ranks", f"{len(self.links)} links")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Hashes one link only: topologies that differ only in others are rare, and ``==`` distinguishes them."""
        return hash((self.name, self.world_size, len(self.links), *self.links[:1], self.shared))

    @cached_property
    def vertices(self) -> tuple[Vertex, ...]:
        """All ranks, then the switches in order of first occurrence in the links."""
        return (*range(self.world_size), *self.table.switches)

    @property
    def rank_names(self) -> Sequence[int]:
        """The name of each rank: its number in the machine of which it is a part."""
        return self.labels or range(self.world_size)

    @cached_property
    def table(self) -> ListedLinks | MeshLinks:
        """The links as arrays."""
        return self.links if isinstance(self.links, MeshLinks) else ListedLinks(tuple(self.links), self.world_size)

    @property
    def link_ends(self) -> IntArray:
        """Positions in `vertices` of source and destination of each link, as an array (links, 2)."""
        return self.table.ends

    @cached_property
    def switch_kinds(self) -> dict[str, SwitchKind]:
        """The kind of every switch: that of `switches`, else derived from the graph.

        A switch without a kind is a network if it, together with the switches linked to it, holds nodes together:
        without them the ranks would fall apart, but not into single ranks. Else it is inside a node. Here the switch
        of two pairs is the network:

        >>> ends = [(0, "x"), (1, "x"), (2, "y"), (3, "y"), (0, "z"), (1, "z"), (2, "z"), (3, "z")]
        >>> pairs = Topology("pairs", 4, tuple(link for a, b in ends for link in both_ways(a, b, 1, 0)))
        >>> pairs.switch_kinds
        {'x': 'node', 'y': 'node', 'z': 'network'}
        """
        kinds: dict[str, SwitchKind] = {switch.name: switch.kind for switch in self.switches}
        missing = [at for at, name in enumerate(self.table.switches, self.world_size) if name not in kinds]
        if missing:
            # Switches that are linked to each other are of one kind: decide for each such group.
            group = self._components(np.all(self.link_ends >= self.world_size, axis=1))
            for number in {int(group[at]) for at in missing}:
                without = self._components(~np.any((group == number)[self.link_ends], axis=1))[: self.world_size]
                splits = 1 < len(np.unique(without)) < self.world_size  # into groups that are not all of one rank
                kind: SwitchKind = "network" if splits else "node"
                kinds |= {str(self.vertices[at]): kind for at in missing if group[at] == number}
        return {name: kinds[name] for name in self.table.switches}

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
        node = self._components(~np.any(network[self.link_ends], axis=1))[: self.world_size].tolist()
        numbers = {label: number for number, label in enumerate(dict.fromkeys(node))}
        return tuple(numbers[label] for label in node)

    @cached_property
    def structure(self) -> str:
        """The hash of which vertices are linked, nodes, what shares capacities, and whether all links are equally fast.

        Not of names, bandwidths and latencies.
        """
        ends = b"" if self.table.is_mesh else self.link_ends.tobytes()
        kinds, shared = tuple(self.switch_kinds.values()), [each.links for each in self.shared]
        facts = (
            *(self.world_size, kinds, self.node_of_rank, shared, self.table.is_uniform, len(self.vertices)),
            self.forwarding,
        )
        return hashlib.sha256(repr(facts).encode() + ends).hexdigest()

    def _components(self, links: BoolArray) -> IntArray:
        """The connected component of each vertex over the chosen links, a bool array (links,), in either direction."""
        return components(self.link_ends[links], len(self.vertices))

    @property
    def is_exact(self) -> bool:
        """Whether bandwidths are fractions, judged by the first link; without links nothing is inexact."""
        return all(isinstance(link.bandwidth_bytes_per_s, Fraction) for link in self.links[:1])

    @cached_property
    def constraints(self) -> Sequence[Constraint]:
        """All constraints: one per link in order, then the shared capacities."""
        return Constraints(self.links, self.shared, self.labels)

    def route(self, source: int, destination: int) -> Route:
        """The route from one rank to another. Raises `NoRouteError` if ranks may not forward as often as it takes."""
        pair = (source, destination)
        if pair not in self._routes:
            self._routes[pair] = self._paths.route(self._paths.path(source, destination))
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
        return self._paths.routes(*hops)

    def has_route(self, source: int, destination: int) -> bool:
        """Whether a route from one rank to the other exists."""
        n = self.world_size
        return 0 <= source < n and 0 <= destination < n and bool(self.have_routes(*np.array([[source], [destination]])))

    def have_routes(self, sources: npt.NDArray[np.integer], destinations: npt.NDArray[np.integer]) -> BoolArray:
        """Whether a route exists from each of `sources` to the respective `destinations`, if need be through ranks.

        Both are int arrays of one shape, which is that of the answer.
        """
        flat = self._paths.can_send(sources.ravel().astype(np.int64), destinations.ravel().astype(np.int64))
        return flat.reshape(sources.shape)

    def are_linked(self, sources: npt.NDArray[np.integer], destinations: npt.NDArray[np.integer]) -> BoolArray:
        """Whether a link or switches lead from each of `sources` to the respective `destinations`, as `have_routes`."""
        flat = self._paths.linked(sources.ravel().astype(np.int64), destinations.ravel().astype(np.int64))
        return flat.reshape(sources.shape)

    def rank_pairs(self) -> Iterator[tuple[int, int]]:
        """All ordered pairs of linked ranks, in order."""
        for source, row in enumerate(self.linked_pairs):
            for destination in row.nonzero()[0].tolist():
                yield source, destination

    @property
    def reaches_all(self) -> bool:
        """Whether each rank surely has a route to every other: all are linked, or forward as often as it takes."""
        return self.forwarding.most_ranks is None or self.is_complete

    @cached_property
    def is_complete(self) -> bool:
        """Whether any two ranks are linked, so that none need forward."""
        if self.table.is_mesh:
            return True
        pairs, sizes = self.world_size * (self.world_size - 1), [(len(a), len(b)) for a, b in self.crossings()]
        if (self.world_size, self.world_size) in sizes:
            return True
        most = len(self.links) + sum(entries * exits for entries, exits in sizes)
        return most >= pairs and int(self.linked_pairs.sum()) == pairs

    @cached_property
    def linked_pairs(self) -> BoolArray:
        """Bool array (world_size, world_size): whether a link or switches lead from rank `row` to rank `column`."""
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

    def crossings(self) -> Iterator[tuple[list[int], list[int]]]:
        """Ranks that have a link to some switches, and the ranks that these switches lead to.

        Switches that reach each other lead to the same ranks, so one of them is followed for all.
        """
        return self._paths.crossings()

    @cached_property
    def _paths(self) -> Paths:
        return Paths(self)

    @cached_property
    def min_latencies_into_ranks_s(self) -> tuple[Number, ...]:
        """The lowest latency of a route into each rank."""
        return self._paths.min_latencies_into_ranks_s()

    def is_nic(self, link: Link) -> bool:
        """Whether a link leads into or out of a network between nodes."""
        return "network" in {self.switch_kinds.get(str(end)) for end in (link.source, link.destination)}

    def map_links(self, change: Callable[[int, Link], Link], name: str | None = None) -> Topology:
        """The same graph with every link replaced by `change(index, link)`."""
        links = tuple(change(index, link) for index, link in enumerate(self.listed_links()))
        return replace(self, name=self.name if name is None else name, links=links)

    @classmethod
    def from_networkx(
        cls, graph: networkx.Graph[Any], name: str = "", *, bandwidth: str = "", latency: str = ""
    ) -> Topology:
        """The topology of a networkx graph; an undirected edge is a link each way.

        Parameters
        ----------
        graph : nodes that are texts are switches, all others ranks: in order of their numbers, or as the graph lists
            them where they are none. Edges have a `bandwidth` and a `latency`: a text with a unit, or a number in
            bytes/s and seconds.
        name : that of the topology; without it, that of the graph.
        bandwidth, latency : of edges that have none, like ``"25GB/s"`` and ``"1us"``.

        >>> import networkx as nx
        >>> Topology.from_networkx(nx.petersen_graph(), bandwidth="25GB/s", latency="1us")
        <Topology: Petersen Graph, 10 ranks, 30 links>

        Raises `TopologyError` for edges without numbers, parallel edges, and a graph that is no topology.
        """
        ranks = [node for node in graph if not isinstance(node, str)]
        if all(isinstance(node, int) for node in ranks):
            ranks.sort()
        vertex: dict[Any, Vertex] = {node: at for at, node in enumerate(ranks)}
        links: list[Link] = []
        for source, destination, given in graph.edges(data=True):
            ends = vertex.get(source, source), vertex.get(destination, destination)
            where = f"edge {source!r} to {destination!r}"
            numbers = (
                _number_of(where, "bandwidth", given, bandwidth, parse_bandwidth_bytes_per_s, "25GB/s"),
                _number_of(where, "latency", given, latency, parse_time_s, "1us"),
            )
            links += [Link(*ends, *numbers)] if graph.is_directed() else both_ways(*ends, *numbers)
        return cls(name or graph.name or "graph", len(ranks), tuple(links))

    def scaled(self, scale: Number) -> Topology:
        """The same machine in slow motion: every bandwidth times `scale`, every latency divided by it.

        >>> pair = Topology("pair", 2, (Link(0, 1, 50e9, 1e-6), Link(1, 0, 50e9, 1e-6)))
        >>> pair.scaled(0.5).links[0]
        Link(source=0, destination=1, bandwidth_bytes_per_s=25000000000.0, latency_s=2e-06)
        """
        slower = self.map_links(
            lambda _, link: replace(
                link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * scale, latency_s=link.latency_s / scale
            )
        )
        shared = tuple(replace(s, bandwidth_bytes_per_s=s.bandwidth_bytes_per_s * scale) for s in self.shared)
        return replace(slower, shared=shared)


def _number_of(
    where: str, what: str, given: Mapping[str, Any], default: str, parse: Callable[[str], Number], example: str
) -> Number:
    """The bandwidth or the latency of an edge."""
    value = given.get(what, default)
    if value == "":
        raise TopologyError(
            f"{where} has no {what}, expected an attribute like {what}={example!r}, or one for all edges"
        )
    try:
        return parse(value) if isinstance(value, str) else value
    except QuantityError as error:
        raise TopologyError(f"{where}: {error}") from error


def both_ways(a: Vertex, b: Vertex, bandwidth_bytes_per_s: Number, latency_s: Number) -> tuple[Link, Link]:
    """The two directed links of one full-duplex cable."""
    return (Link(a, b, bandwidth_bytes_per_s, latency_s), Link(b, a, bandwidth_bytes_per_s, latency_s))


# ------------------------------------------------------------------------------------ when a topology is valid

MIN_BANDWIDTH_BYTES_PER_S, MAX_BANDWIDTH_BYTES_PER_S = 1e-9, 1e18
"""Far below any scaled-down link and far above any real link, so that all results are finite."""

MAX_LATENCY_S = 1e9
"""Thirty years: more than the latency of any real link, and finite."""


def check_topology(topology: Topology) -> None:
    """Raise `TopologyError` unless all numbers and names are valid, and every rank can reach every other."""
    if topology.world_size < 1:
        raise TopologyError(f"topology {topology.name!r}: world_size is {topology.world_size}, expected 1 or more")
    for switch in topology.table.switches:
        _check_switch(topology, switch)
    seen: set[tuple[Vertex, Vertex]] = set()
    for link in topology.table.samples:
        _check_link(topology, link)
        if (link.source, link.destination) in seen:
            raise TopologyError(f"topology {topology.name!r}: link {link.name} is listed twice")
        seen.add((link.source, link.destination))
    links = {link.name for link in topology.links} if topology.shared else set()
    taken = set(links)
    for shared in topology.shared:
        _check_shared(topology, shared, links)
        if shared.name in taken:
            raise TopologyError(
                f"topology {topology.name!r}: shared capacity {shared.name!r} has the name of another constraint"
            )
        taken.add(shared.name)
    _check_connected(topology)
    _check_places(topology)


def _check_places(topology: Topology) -> None:
    """Check that the kinds of switches and the nodes of ranks match the graph."""
    described = [switch.name for switch in topology.switches]
    for name in described:
        if name not in topology.table.switches:
            raise TopologyError(f"topology {topology.name!r}: switch {name!r} has a kind, but no link")
        if described.count(name) > 1:
            raise TopologyError(f"topology {topology.name!r}: switch {name!r} has several kinds, expected one")
    for switch in topology.switches:
        if switch.kind not in get_args(SwitchKind):
            expected = ", ".join(get_args(SwitchKind))
            raise TopologyError(f"topology {topology.name!r}: switch {switch.name!r} is of kind {switch.kind!r}, "
                                f"expected one of {expected}")  # fmt: skip
    size, nodes = topology.world_size, topology.nodes
    if nodes and (len(nodes) != size or {*nodes} != {*range(max(nodes) + 1)}):
        raise TopologyError(
            f"topology {topology.name!r}: nodes are {list(nodes)}, expected for each of {size} ranks its node, "
            "numbered from 0 without gaps"
        )
    if topology.labels and len({*topology.labels}) != size:
        raise TopologyError(
            f"topology {topology.name!r}: labels are {list(topology.labels)}, expected {size} different numbers"
        )


def _check_switch(topology: Topology, switch: str) -> None:
    where = f"topology {topology.name!r}: switch {switch!r}"
    if not switch.strip():
        raise TopologyError(f"topology {topology.name!r}: a switch has no name")
    if switch.strip().lstrip("+-").isdecimal():
        raise TopologyError(f"{where} could be taken for a rank, expected a name that is no number")
    if "->" in switch:
        raise TopologyError(f"{where} could be taken for a link, expected a name without '->'")


def _check_link(topology: Topology, link: Link) -> None:
    where = f"topology {topology.name!r}: link {link.name}"
    for end in (link.source, link.destination):
        if isinstance(end, int) and not 0 <= end < topology.world_size:
            raise TopologyError(f"{where}: there is no rank {end}, expected 0 to {topology.world_size - 1}")
    if link.source == link.destination:
        raise TopologyError(f"{where} connects a vertex with itself")
    _check_bandwidth(where, link.bandwidth_bytes_per_s)
    _check_latency(where, link.latency_s)


def _check_shared(topology: Topology, shared: SharedCapacity, names: set[str]) -> None:
    where = f"topology {topology.name!r}: shared capacity {shared.name!r}"
    _check_bandwidth(where, shared.bandwidth_bytes_per_s)
    if not shared.links:
        raise TopologyError(f"{where} covers no link")
    for name in shared.links:
        if name not in names:
            raise TopologyError(f"{where} covers link {name}, which does not exist")


def _check_connected(topology: Topology) -> None:
    """Check that every rank reaches every other, and that every switch has incoming and outgoing links."""
    component = topology.table.components
    for vertex, label in zip(topology.vertices, component.tolist(), strict=True):
        if label != component[0]:
            name = f"rank {topology.rank_names[vertex]}" if isinstance(vertex, int) else f"switch {vertex!r}"
            first = topology.rank_names[0]
            raise TopologyError(
                f"topology {topology.name!r} is not connected: no way from rank {first} to {name} and back"
            )


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
