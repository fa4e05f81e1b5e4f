"""Routes through switches, one at a time: the search from a rank, and what a route over some links is."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from tasp_lab.core.errors import NoRouteError
from tasp_lab.core.units import Number
from tasp_lab.topology.links import Vertex, strong_components

if TYPE_CHECKING:
    from tasp_lab.topology.graph import Topology


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


class Paths:
    """The paths of a topology, and the links at each vertex that they are made of."""

    def __init__(self, topology: Topology) -> None:
        self._topology, self._links, self._world_size = topology, topology.links, topology.world_size
        self._paths: dict[int, dict[Vertex, _Path]] = {}

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
        found: dict[Vertex, dict[Vertex, int]] = defaultdict(dict)
        for index, link in enumerate(self._links):
            found[link.source][link.destination] = index
        return found

    @cached_property
    def _shared_of_link(self) -> dict[int, tuple[int, ...]]:
        index_of = {link.name: index for index, link in enumerate(self._links)} if self._topology.shared else {}
        found: dict[int, tuple[int, ...]] = defaultdict(tuple)
        for position, shared in enumerate(self._topology.shared, start=len(self._links)):
            for name in shared.links:
                found[index_of[name]] += (position,)
        return found

    @cached_property
    def _links_to_switches(self) -> dict[Vertex, dict[Vertex, int]]:
        """For each vertex, the switches it has a link to, with the link."""
        found: dict[Vertex, dict[Vertex, int]] = defaultdict(dict)
        for index, link in enumerate(self._links):
            if isinstance(link.destination, str):
                found[link.source][link.destination] = index
        return found

    @cached_property
    def _links_out_of_switches(self) -> dict[Vertex, dict[Vertex, int]]:
        """For each rank, the switches that have a link to it, with the link."""
        found: dict[Vertex, dict[Vertex, int]] = defaultdict(dict)
        for index, link in enumerate(self._links):
            if isinstance(link.source, str) and isinstance(link.destination, int):
                found[link.destination][link.source] = index
        return found

    def path(self, source: int, destination: int) -> tuple[int, ...]:
        """The links of the route from one rank to another: the best path, in the order of `_paths_from`.

        Raises `NoRouteError` for what is no rank, and if no link and no switch leads there.
        """
        for rank in (source, destination):
            if not 0 <= rank < self._world_size:
                raise NoRouteError(
                    f"topology {self._topology.name!r} has no rank {rank}, expected 0 to {self._world_size - 1}"
                )
        if (direct := self._topology.table.link(source, destination)) >= 0:
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
            raise NoRouteError(
                f"topology {self._topology.name!r}: no link and no switch leads from rank {source} to {destination}"
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
                    latency_s = latency + self._links[link].latency_s
                    heapq.heappush(queue, (hops + hops_per_link, latency_s, order, onward, (*path, link)))
        return settled

    def min_latencies_into_ranks_s(self) -> tuple[Number, ...]:
        """The lowest latency of a route into each rank."""
        if not self._topology.table.switches:
            return self._topology.table.latencies_into_ranks_s
        paths = self._paths_from(range(self._world_size), hops_per_link=0)
        least = []
        for rank, direct_s in enumerate(self._topology.table.latencies_into_ranks_s):
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
