"""Many hops at once: the links, routes and latencies between many pairs of ranks, as arrays.

`Topology.route` finds one route by a search from its source. Here all hops of a ring, or of a thousand, are found
together, and nothing is as large as all pairs of ranks.

Two hops are *alike* when their sources have links to the same switches with the same latencies, listed in the same
order, and so do their destinations have links from switches. The routes of hops that are alike pass the same switches:
a route prefers few links, then little latency, then what is listed first, and the search sees nothing else of a rank
than those links. So one route is searched for each kind of hops, and the others differ in the first and the last link.
Hops over a link of their own need no search.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from scipy.sparse import csr_array

from tasp_lab.arrays import BoolArray, FloatArray, IntArray
from tasp_lab.links import MeshLinks

if TYPE_CHECKING:
    from tasp_lab.topology import Topology


class Hops:
    """Looks up hops of a topology: `sources` and `destinations` are int arrays (hops,) of ranks, all in range."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._world_size = topology.world_size
        if isinstance(topology.links, MeshLinks):
            return
        n, (sources, destinations) = topology.world_size, topology.link_ends.T
        self._latencies_s = np.array([*(float(link.latency_s) for link in topology.links), 0.0])
        direct = np.flatnonzero((sources < n) & (destinations < n))
        keys = sources[direct] * n + destinations[direct]
        order = np.argsort(keys)
        self._keys, self._direct = np.append(keys[order], n * n), np.append(direct[order], -1)
        leaving = np.flatnonzero((sources < n) & (destinations >= n))
        entering = np.flatnonzero((sources >= n) & (destinations < n))
        self._leaving = _by_rank(sources[leaving], leaving, n)
        self._entering = _by_rank(destinations[entering], entering, n)
        self._kind_of_source = self._kinds(destinations[leaving], leaving, self._leaving)
        self._kind_of_destination = self._kinds(sources[entering], entering, self._entering)

    def _kinds(self, switches: IntArray, links: IntArray, of_rank: IntArray) -> IntArray:
        """A number for each rank; ranks whose links join them to the same switches alike have the same one."""
        described = np.zeros((len(self._latencies_s), 2), dtype=np.int64)  # the last row is of no link, -1
        number: dict[object, int] = {}
        latencies = (self._topology.links[link].latency_s for link in links.tolist())
        described[links, 0] = switches
        described[links, 1] = [number.setdefault(latency_s, len(number)) for latency_s in latencies]
        rows = described[of_rank].reshape(len(of_rank), -1)
        return np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)

    def links(self, sources: IntArray, destinations: IntArray) -> IntArray:
        """The index of the link of its own that each hop has; -1: none."""
        if isinstance(self._topology.links, MeshLinks):
            return np.where(sources == destinations, -1, self._topology.links.between(sources, destinations))
        wanted = sources * self._world_size + destinations
        at = np.searchsorted(self._keys, wanted)
        return np.where(self._keys[at] == wanted, self._direct[at], -1)

    def linked(self, sources: IntArray, destinations: IntArray) -> BoolArray:
        """Whether a transfer is possible: over a link of its own, or through switches."""
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
        """As `Topology.routes`, of hops each of which leads from one rank to another."""
        if isinstance(self._topology.links, MeshLinks):
            latencies_s = np.full(len(sources), float(self._topology.links.latency_s))
            return self._with_shared(self.links(sources, destinations)[:, None]), latencies_s
        paths = self._paths(sources, destinations)
        return self._with_shared(paths), self._latencies_s[paths].sum(axis=1)

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
        """`_paths` where no hop has a link of its own: one is searched for among all that are alike."""
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
        """The constraints of routes with these links: the links, and the shared capacities over any of them."""
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
