"""Links, routes and latencies of many hops (pairs of ranks) at once, as arrays.

`Topology.route` finds one route by a search from its source. `RouteTable` finds those of all hops of many rings
together, without a table of all pairs of ranks.

Two hops are of the same *kind* if their sources have links to the same switches with the same latencies, listed in the
same order, and likewise their destinations from switches. Hops of a kind pass the same switches: routes are ordered by
number of links, latency and order of listing, and the search depends on a rank through these links only. So one route
is searched per kind; the others differ in the first and the last link. Hops with a direct link need no search.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from scipy.sparse import csr_array

from tasp_lab.core.arrays import BoolArray, FloatArray, IntArray

if TYPE_CHECKING:
    from tasp_lab.topology.graph import Topology


class RouteTable:
    """Routes of many hops of a topology; `sources` and `destinations` are int arrays (hops,) of ranks, in range."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._world_size = topology.world_size
        self._table = topology.table

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

    def links(self, sources: IntArray, destinations: IntArray) -> IntArray:
        """The index of the direct link of each hop; -1: none."""
        return self._table.between(sources, destinations)

    def linked(self, sources: IntArray, destinations: IntArray) -> BoolArray:
        """Whether each hop has a route, by a direct link or through switches."""
        found = self.links(sources, destinations) >= 0
        others = np.flatnonzero(~found & (sources != destinations))
        if len(others) and len(self._topology.vertices) > self._world_size:
            entries, exits = self._crossings
            found[others] = entries[sources[others]].multiply(exits[destinations[others]]).sum(axis=1) > 0
        return found

    @cached_property
    def _crossings(self) -> tuple[csr_array, csr_array]:
        """Which crossings each rank enters, and to which ranks they lead: two sparse arrays (world_size, crossings)."""
        crossings = list(self._topology.crossings())
        of_entries = _incidence([entries for entries, _ in crossings], self._world_size)
        return of_entries, _incidence([exits for _, exits in crossings], self._world_size)

    def routes(self, sources: IntArray, destinations: IntArray) -> tuple[IntArray, FloatArray]:
        """As `Topology.routes`, for hops between different ranks."""
        paths = self._paths(sources, destinations)
        return self._with_shared(paths), self._table.latencies_s(paths).sum(axis=1)

    def _paths(self, sources: IntArray, destinations: IntArray) -> IntArray:
        """The links of each route in order, an int array (hops, most links of a route) padded with -1."""
        direct = self.links(sources, destinations)
        through = np.flatnonzero(direct < 0)
        if not len(through):
            return direct[:, None]
        found = self._through_switches(sources[through], destinations[through])
        paths = np.full((len(sources), found.shape[1]), -1)
        paths[:, 0] = direct
        paths[through] = found
        return paths

    def _through_switches(self, sources: IntArray, destinations: IntArray) -> IntArray:
        """`_paths` of hops without a direct link: one search per kind of hops."""
        kinds = self._kind_of_source[sources] * self._world_size + self._kind_of_destination[destinations]
        _, firsts, kind = np.unique(kinds, return_index=True, return_inverse=True)
        models = [self._topology.route(int(sources[at]), int(destinations[at])).links for at in firsts]
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
        found = [self._topology.constraints_of(tuple(path[path >= 0].tolist())) for path in paths]
        most = max((len(constraints) for constraints in found), default=1)
        return np.array([[*each, *(-1,) * (most - len(each))] for each in found]).reshape(-1, most)


def _by_rank(ranks: IntArray, links: IntArray, world_size: int) -> IntArray:
    """The links of each rank in ascending order, an int array (world_size, most links of a rank) padded with -1."""
    counts = np.bincount(ranks, minlength=world_size)
    order = np.argsort(ranks, kind="stable")
    column = np.arange(len(ranks)) - np.repeat(np.cumsum(counts) - counts, counts)
    table = np.full((world_size, int(counts.max())), -1)
    table[ranks[order], column] = links[order]
    return table


def _incidence(ranks: Sequence[Sequence[int]], world_size: int) -> csr_array:
    """Sparse int array (world_size, groups): 1 where a rank is in a group of ranks."""
    group = np.repeat(np.arange(len(ranks)), [len(each) for each in ranks])
    rank = np.array([rank for each in ranks for rank in each])
    return csr_array((np.ones(len(rank), dtype=np.int64), (rank, group)), shape=(world_size, len(ranks)))
