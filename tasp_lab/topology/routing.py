"""Routes from rank to rank, through switches and through other ranks: one by a search, those of many hops as arrays.

A hop is a pair of ranks. *Linked* ranks have a link, or a path through switches only. All others send through ranks
that forward, over the fewest hops between linked ranks: dimension by dimension on a grid, by a formula, and elsewhere
each rank sends to the first neighbour, in the order of its links, that is nearer to the destination.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Protocol

import numpy as np

from tasp_lab.core.arrays import BoolArray, FloatArray, IntArray, first_true
from tasp_lab.core.choices import Routes
from tasp_lab.core.errors import NoRouteError
from tasp_lab.core.units import Number
from tasp_lab.topology.components import strong_components
from tasp_lab.topology.links import Link, ListedLinks, MeshLinks, SharedCapacity, Vertex


@dataclass(frozen=True, slots=True)
class Forwarding:
    """How ranks send to ranks that they are not linked to.

    Parameters
    ----------
    most_ranks : through how many other ranks at most; None for any number.
    spread : whether equally short routes are taken in turn, by the number of the sender; else all take the first. On a
        grid, what may go either way around a dimension goes down from odd coordinates. A message is never divided.
    software : what limits the ranks, for messages.
    """

    most_ranks: int | None = None
    spread: bool = True
    software: str = ""

    @property
    def limit(self) -> str:
        """The limit in words; empty without one.

        >>> Forwarding(0, software="RCCL").limit, Forwarding(1, software="NCCL").limit
        ('RCCL forwards through no other rank', 'NCCL forwards through at most 1 other rank')
        """
        if self.most_ranks is None:
            return ""
        most = f"at most {self.most_ranks}" if self.most_ranks else "no"
        return f"{self.software} forwards through {most} other rank{'s' * (self.most_ranks > 1)}"


ANY_ROUTE = Forwarding()
"""Ranks forward as often as it takes."""

CHOICES: Mapping[Routes, Forwarding] = {
    "direct": Forwarding(0, software="routes 'direct'"),
    "one": Forwarding(spread=False),
    "all": ANY_ROUTE,
}
"""What users choose in place of what the library of a machine does."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Ranks in a grid, the last coordinate counting fastest, with links both ways between neighbours.

    `wraps` is whether a dimension has links between its ends, too.
    """

    sides: tuple[int, ...]
    wraps: tuple[bool, ...]

    def paths(self, sources: IntArray, destinations: IntArray, *, spread: bool) -> IntArray:
        """The ranks on the way of each hop, an int array (hops, ranks), in which some ranks stand several times.

        >>> Grid((3, 4), (True, True)).paths(np.array([0]), np.array([7]), spread=False).tolist()
        [[0, 4, 7]]
        """
        here = np.stack(np.unravel_index(sources, self.sides))
        goal = np.stack(np.unravel_index(destinations, self.sides))
        way = [sources]
        for at, (side, wraps) in enumerate(zip(self.sides, self.wraps, strict=True)):
            up, down = goal[at] - here[at], here[at] - goal[at]
            if wraps:
                up, down = up % side, down % side
                rises = (up < down) | ((up == down) & ~(spread & (here[at] % 2 == 1)))
            else:
                rises = up > 0
            left = np.where(rises, up, down)
            while left.any():
                here[at] = (here[at] + np.where(left > 0, np.where(rises, 1, -1), 0)) % side
                left = np.maximum(left - 1, 0)
                way.append(np.ravel_multi_index(tuple(here), self.sides))
        return np.stack(way, axis=1)


class Linked(Protocol):
    """Ranks and switches with links: what routes read of a `tasp_lab.topology.graph.Topology`, which imports them."""

    @property
    def name(self) -> str: ...
    @property
    def world_size(self) -> int: ...
    @property
    def links(self) -> tuple[Link, ...] | MeshLinks: ...
    @property
    def shared(self) -> tuple[SharedCapacity, ...]: ...
    @property
    def vertices(self) -> tuple[Vertex, ...]: ...
    @property
    def table(self) -> ListedLinks | MeshLinks: ...
    @property
    def link_ends(self) -> IntArray: ...
    @property
    def is_complete(self) -> bool: ...
    @property
    def linked_pairs(self) -> BoolArray: ...
    @property
    def forwarding(self) -> Forwarding: ...
    @property
    def grid(self) -> Grid | None: ...


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


_FAR = np.iinfo(np.int16).max


class Paths:
    """The routes of a topology, and what they are found with. Hops with a direct link need no search.

    Arrays `sources` and `destinations`, int (hops,), are ranks in range. Two hops are of the same *kind* if their
    sources have links to the same switches with the same latencies, listed in the same order, and likewise their
    destinations from switches. Hops of a kind pass the same switches: routes are ordered by number of links, latency
    and order of listing, and the search depends on a rank through these links only. So one route is searched per kind,
    and the others differ from it in the first and the last link; no table of all pairs of ranks is made. Of 8 ranks
    behind one switch all 56 hops are of one kind: the route 0 -> switch -> 1 gives all others.
    """

    def __init__(self, topology: Linked) -> None:
        self._topology, self._links, self._world_size = topology, topology.links, topology.world_size
        self._table = topology.table
        self._paths: dict[int, dict[Vertex, _Path]] = {}
        # distances of all ranks to the destinations that were asked for, a row for each, and the row of each rank
        self._rows = np.zeros((0, self._world_size), dtype=np.int16)
        self._row_of = np.full(self._world_size, -1)

    def crossings(self) -> Iterator[tuple[list[int], list[int]]]:
        """Ranks that have a link to some switches, and the ranks that these switches lead to.

        Switches that reach each other lead to the same ranks, so one of them is followed for all.
        """
        if len(self._topology.vertices) == self._world_size:
            return
        sources, destinations = self._topology.link_ends.T
        between = (sources >= self._world_size) & (destinations >= self._world_size)
        component = strong_components(self._topology.link_ends[between], len(self._topology.vertices))
        entering: dict[int, set[int]] = defaultdict(set)
        into_switches = (sources < self._world_size) & (destinations >= self._world_size)
        for source, destination in self._topology.link_ends[into_switches].tolist():
            entering[destination].add(source)
        together: dict[int, list[int]] = defaultdict(list)
        for switch in entering:
            together[int(component[switch])].append(switch)
        for switches in together.values():
            exits = self._ranks_behind(self._topology.vertices[switches[0]])
            yield sorted(set().union(*(entering[switch] for switch in switches))), exits

    def _ranks_behind(self, switch: Vertex) -> list[int]:
        """The ranks reachable from a switch without passing a rank."""
        reached, waiting = {switch}, [switch]
        while waiting:
            onward = self._links_from[waiting.pop()].keys() - reached
            reached |= onward
            waiting += [vertex for vertex in onward if isinstance(vertex, str)]
        return sorted(vertex for vertex in reached if isinstance(vertex, int))

    @cached_property
    def _links_from(self) -> dict[Vertex, dict[Vertex, int]]:
        links: dict[Vertex, dict[Vertex, int]] = defaultdict(dict)
        for index, link in enumerate(self._links):
            links[link.source][link.destination] = index
        return links

    @cached_property
    def _shared_of_link(self) -> dict[int, tuple[int, ...]]:
        index_of = {link.name: index for index, link in enumerate(self._links)} if self._topology.shared else {}
        groups: dict[int, tuple[int, ...]] = defaultdict(tuple)
        for position, shared in enumerate(self._topology.shared, start=len(self._links)):
            for name in shared.links:
                groups[index_of[name]] += (position,)
        return groups

    @cached_property
    def _links_to_switches(self) -> dict[Vertex, dict[Vertex, int]]:
        """For each vertex, the switches it has a link to, with the link."""
        links: dict[Vertex, dict[Vertex, int]] = defaultdict(dict)
        for index, link in enumerate(self._links):
            if isinstance(link.destination, str):
                links[link.source][link.destination] = index
        return links

    @cached_property
    def _links_out_of_switches(self) -> dict[int, dict[Vertex, int]]:
        """For each rank, the switches that have a link to it, with the link."""
        links: dict[int, dict[Vertex, int]] = defaultdict(dict)
        for index, link in enumerate(self._links):
            if isinstance(link.source, str) and isinstance(link.destination, int):
                links[link.destination][link.source] = index
        return links

    def path(self, source: int, destination: int) -> tuple[int, ...]:
        """The links of the route from one rank to another: the best path, in the order of `_paths_from`.

        Raises `NoRouteError` for what is no rank, and if ranks may not forward as often as it takes.
        """
        for rank in (source, destination):
            if not 0 <= rank < self._world_size:
                raise NoRouteError(
                    f"topology {self._topology.name!r} has no rank {rank}, expected 0 to {self._world_size - 1}"
                )
        if (direct := self._table.link(source, destination)) >= 0:
            return (direct,)
        if source not in self._paths:
            self._paths[source] = self._paths_from([source])
        paths, last = self._paths[source], self._links_out_of_switches[destination]
        ends = [
            (path.hops, path.latency_s + self._links[link].latency_s, path.place, (*path.links, link))
            for switch, link in last.items()
            if (path := paths.get(switch)) is not None and source != destination
        ]
        if not ends:
            forwarded = self._forwarded(np.array([source]), np.array([destination]))[0]
            return tuple(forwarded[forwarded >= 0].tolist())
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
                    latency_s = latency + self._links[link].latency_s
                    heapq.heappush(queue, (hops + hops_per_link, latency_s, order, onward, (*path, link)))
        return settled

    def min_latencies_into_ranks_s(self) -> tuple[Number, ...]:
        """The lowest latency of a route into each rank."""
        if not self._table.switches:
            return self._table.latencies_into_ranks_s
        paths = self._paths_from(range(self._world_size), hops_per_link=0)
        least = []
        for rank, direct_s in enumerate(self._table.latencies_into_ranks_s):
            last = self._links_out_of_switches[rank].items()
            through = (paths[switch].latency_s + self._links[link].latency_s for switch, link in last)
            least.append(min([direct_s, *through]))
        return tuple(least)

    def route(self, path: tuple[int, ...]) -> Route:
        """The route over these links."""
        latency: Number = sum((self._links[link].latency_s for link in path[1:]), self._links[path[0]].latency_s)
        return Route(path, self.constraints_of(path), latency)

    def constraints_of(self, path: tuple[int, ...]) -> tuple[int, ...]:
        """The constraints of a route over these links: the links, and the shared capacities over any of them."""
        groups = {group for link in path for group in self._shared_of_link[link]} if self._topology.shared else ()
        return (*path, *sorted(groups))

    @cached_property
    def _leaving(self) -> IntArray:
        """The links of each rank into switches, as given by `_by_rank`."""
        leaving = self._between_ranks_and_switches[0]
        return _by_rank(self._table.ends[leaving, 0], leaving, self._world_size)

    @cached_property
    def _entering(self) -> IntArray:
        """The links into each rank out of switches, as given by `_by_rank`."""
        entering = self._between_ranks_and_switches[1]
        return _by_rank(self._table.ends[entering, 1], entering, self._world_size)

    @cached_property
    def _between_ranks_and_switches(self) -> tuple[IntArray, IntArray]:
        """The links from ranks into switches, and those out of switches into ranks."""
        is_rank = self._table.ends < self._world_size
        return np.flatnonzero(is_rank[:, 0] & ~is_rank[:, 1]), np.flatnonzero(~is_rank[:, 0] & is_rank[:, 1])

    @cached_property
    def _kind_of_source(self) -> IntArray:
        leaving = self._between_ranks_and_switches[0]
        return self._kinds(self._table.ends[leaving, 1], leaving, self._leaving)

    @cached_property
    def _kind_of_destination(self) -> IntArray:
        entering = self._between_ranks_and_switches[1]
        return self._kinds(self._table.ends[entering, 0], entering, self._entering)

    def _kinds(self, switches: IntArray, links: IntArray, of_rank: IntArray) -> IntArray:
        """The kind of each rank: equal for ranks with the same switches and latencies in the same order."""
        described = np.zeros((len(self._topology.links) + 1, 2), dtype=np.int64)  # the last row is of no link, -1
        number: dict[object, int] = {}
        latencies = (self._topology.links[link].latency_s for link in links.tolist())
        described[links, 0] = switches
        described[links, 1] = [number.setdefault(latency_s, len(number)) for latency_s in latencies]
        rows = described[of_rank].reshape(len(of_rank), -1)
        return np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)

    def linked(self, sources: IntArray, destinations: IntArray) -> BoolArray:
        """Whether each hop has a route, by a direct link or through switches."""
        linked = self._table.between(sources, destinations) >= 0
        others = np.flatnonzero(~linked & (sources != destinations))
        if len(others) and len(self._topology.vertices) > self._world_size:
            entries, exits = self._crossings
            # A pair is linked if some crossing has the source among its entries and the destination among its exits.
            for entered, left in product(entries.T, exits.T):
                entry = entered[sources[others]]
                linked[others] |= (entry >= 0) & (entry == left[destinations[others]])
        return linked

    @cached_property
    def _crossings(self) -> tuple[IntArray, IntArray]:
        """The crossings that each rank enters, and those that lead to it; two int arrays as of `_by_rank`."""
        # Planes of switches that join the same ranks count once.
        crossings = {(tuple(entries), tuple(exits)) for entries, exits in self.crossings()}
        entries, exits = zip(*sorted(crossings), strict=True)
        return _memberships(entries, self._world_size), _memberships(exits, self._world_size)

    def routes(self, sources: IntArray, destinations: IntArray) -> tuple[IntArray, FloatArray]:
        """The routes in the form of `Topology.routes`, for hops between different ranks."""
        paths = self._links_of_routes(sources, destinations)
        return self._with_shared(paths), self._table.latencies_s(paths).sum(axis=1)

    def _links_of_routes(self, sources: IntArray, destinations: IntArray) -> IntArray:
        """The links of each route in order, an int array (hops, most links of a route) padded with -1."""
        direct = self._table.between(sources, destinations)
        through = np.flatnonzero(direct < 0)
        if not len(through):
            return direct[:, None]
        linked = np.ones(len(through), dtype=bool)
        if not self._topology.is_complete:
            linked = self.linked(sources[through], destinations[through])
        found = [
            (hops, links(sources[hops], destinations[hops]))
            for hops, links in ((through[linked], self._through_switches), (through[~linked], self._forwarded))
            if len(hops)
        ]
        paths = np.full((len(sources), max(links.shape[1] for _, links in found)), -1)
        paths[:, 0] = direct
        for hops, links in found:
            paths[hops, : links.shape[1]] = links
        return paths

    def can_send(self, sources: IntArray, destinations: IntArray) -> BoolArray:
        """Whether each hop has a route, if need be through ranks that forward."""
        most, others = self._topology.forwarding.most_ranks, sources != destinations
        if most is None:
            return np.asarray(others)
        linked = self.linked(sources, destinations)
        far = np.flatnonzero(~linked & others)
        if most and len(far):
            linked[far] = self._distances(sources[far], destinations[far]) <= most + 1
        return linked

    def _forwarded(self, sources: IntArray, destinations: IntArray) -> IntArray:
        """`_links_of_routes` of hops between ranks that are not linked."""
        forwarding, grid = self._topology.forwarding, self._topology.grid
        missing = first_true(~self.can_send(sources, destinations))
        if missing is not None:
            source, destination = int(sources[missing]), int(destinations[missing])
            why = f", and {forwarding.limit}" if source != destination else ""
            raise NoRouteError(
                f"topology {self._topology.name!r}: no link and no switch leads from rank {source} to {destination}"
                f"{why}"
            )
        ways = self._by_table if grid is None else grid.paths
        ranks = ways(sources, destinations, spread=forwarding.spread)
        hop, step = np.nonzero(ranks[:, :-1] != ranks[:, 1:])
        links = self._links_of_routes(ranks[hop, step], ranks[hop, step + 1])
        hop = np.repeat(hop, links.shape[1])[links.ravel() >= 0]
        found = _by_rank(hop, np.arange(len(hop)), len(sources))
        return np.where(found < 0, -1, links[links >= 0][found])

    def _by_table(self, sources: IntArray, destinations: IntArray, *, spread: bool) -> IntArray:
        """The ranks on the way of each hop, as of `Grid.paths`."""
        ways, at = [sources], sources.copy()
        while (moving := np.flatnonzero(at != destinations)).size:
            goal, onward = destinations[moving], self._neighbours[at[moving]]
            distance = self._distances(onward, np.broadcast_to(goal[:, None], onward.shape))
            nearer = (onward >= 0) & (distance == distance.min(axis=1, initial=_FAR, where=onward >= 0)[:, None])
            turn = sources[moving] % nearer.sum(axis=1) if spread else np.zeros(len(moving), dtype=np.int64)
            at[moving] = onward[np.arange(len(moving)), (nearer.cumsum(axis=1) == turn[:, None] + 1).argmax(axis=1)]
            ways.append(at.copy())
        return np.stack(ways, axis=1)

    @cached_property
    def _neighbours(self) -> IntArray:
        """The ranks that each rank is linked to, first those at its links in their order, as of `_by_rank`."""
        source, destination = self._table.ends[(self._table.ends < self._world_size).all(axis=1)].T
        others = self._topology.linked_pairs & ~self._table.joined
        source, destination = np.append(source, np.nonzero(others)[0]), np.append(destination, np.nonzero(others)[1])
        place = _by_rank(source, np.arange(len(source)), self._world_size)
        return np.where(place < 0, -1, destination[place])

    def _distances(self, ranks: IntArray, destinations: IntArray) -> IntArray:
        """The least number of hops between linked ranks from each rank, -1 for none, to its destination."""
        wanted = np.unique(destinations)
        missing = wanted[self._row_of[wanted] < 0]
        if len(missing):
            from scipy.sparse.csgraph import dijkstra  # takes longer to import than most predictions take

            rows = dijkstra(self._topology.linked_pairs.T, indices=missing, unweighted=True)
            self._row_of[missing] = len(self._rows) + np.arange(len(missing))
            self._rows = np.concatenate([self._rows, rows.astype(np.int16)])
        found: IntArray = self._rows[self._row_of[destinations], ranks]
        return found

    def _through_switches(self, sources: IntArray, destinations: IntArray) -> IntArray:
        """`_links_of_routes` of hops without a direct link: one search per kind of hops."""
        kinds = self._kind_of_source[sources] * self._world_size + self._kind_of_destination[destinations]
        _, firsts, kind = np.unique(kinds, return_index=True, return_inverse=True)
        models = [self.path(int(sources[at]), int(destinations[at])) for at in firsts]
        lengths = np.array([len(path) for path in models])
        table = np.array([[*path, *(-1,) * (lengths.max() - len(path))] for path in models])
        leaves_at = (self._leaving[sources[firsts]] == table[:, :1]).argmax(axis=1)
        last = table[np.arange(len(table)), lengths - 1]
        enters_at = (self._entering[destinations[firsts]] == last[:, None]).argmax(axis=1)
        paths: IntArray = table[kind]
        paths[:, 0] = self._leaving[sources, leaves_at[kind]]
        paths[np.arange(len(paths)), lengths[kind] - 1] = self._entering[destinations, enters_at[kind]]
        return paths

    def _with_shared(self, paths: IntArray) -> IntArray:
        """The constraints of routes with these links: the links and their shared capacities."""
        if not self._topology.shared:
            return paths
        passed = [self.constraints_of(tuple(path[path >= 0].tolist())) for path in paths]
        most = max((len(constraints) for constraints in passed), default=1)
        rows = [[*indices, *(-1,) * (most - len(indices))] for indices in passed]
        return np.array(rows, dtype=np.int64).reshape(-1, most)


def _by_rank(ranks: IntArray, links: IntArray, world_size: int) -> IntArray:
    """The links of each rank in ascending order, an int array (world_size, most links of a rank) padded with -1."""
    counts = np.bincount(ranks, minlength=world_size)
    order = np.argsort(ranks, kind="stable")
    column = np.arange(len(ranks)) - np.repeat(np.cumsum(counts) - counts, counts)
    table = np.full((world_size, int(counts.max())), -1)
    table[ranks[order], column] = links[order]
    return table


def _memberships(groups: Sequence[Sequence[int]], world_size: int) -> IntArray:
    """The groups of ranks that each rank belongs to, as of `_by_rank`."""
    group = np.repeat(np.arange(len(groups)), [len(members) for members in groups])
    return _by_rank(np.array([rank for members in groups for rank in members], dtype=np.int64), group, world_size)
