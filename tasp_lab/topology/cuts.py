"""Cuts: upper bounds on how fast data can leave a set of vertices, for any schedule.

Data leaves a set of ranks and switches over the links from inside to outside, so their bandwidth bounds every
collective. Two cuts are computed. In AllGather, every rank outside must receive the shards of all ranks inside: the set
with the most ranks per bandwidth is the bottleneck. Every ring leaves the set at least once: the set with the lowest
outgoing bandwidth limits the total of all rings.

Shared capacities count for those of their links that start at one vertex and for those that end at one vertex: a relay
before or after that vertex has the shared bandwidth. This is exact if all links of a shared capacity have one end in
common and no two capacities overlap; otherwise the bounds stay valid, but a tighter one may exist.

Both cuts are exact optima: bandwidths are taken as fractions, and integer max-flows prove that no set is better. The
method is Newton's for a ratio (W. Dinkelbach, "On nonlinear fractional programming",
Management Science 13, 1967) with the flows of ForestColl's optimality condition (L. Zhao et al., "ForestColl:
Throughput-optimal collective communications on heterogeneous network fabrics", arXiv 2402.06787).
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tasp_lab.core.arrays import BoolArray, IntArray
from tasp_lab.core.errors import TopologyError
from tasp_lab.core.units import Number
from tasp_lab.topology.graph import SharedCapacity, Topology, Vertex

if TYPE_CHECKING:
    from scipy.sparse import csr_array

WholeArray = npt.NDArray[Any]
"""Integers: 64-bit, or Python integers if these could overflow."""

_FLOW_BITS = 30
"""scipy's max-flow uses 32 bits without overflow checks, and may add the capacities of both directions."""


@dataclass(frozen=True)
class Cut:
    """A set of vertices, in the order of `Topology.vertices`, and the bandwidth of all links that leave it.

    Links that share a capacity count for no more than that.
    """

    inside: tuple[Vertex, ...]
    ranks_inside: int
    bandwidth_bytes_per_s: Fraction


def all_gather_cut(topology: Topology) -> Cut:
    """The cut with the most ranks inside per bandwidth, of all sets that contain some ranks but not all.

    AllGather of S bytes per rank takes at least S x `ranks_inside` / `bandwidth_bytes_per_s`. Ties depend on
    the order of ranks and links only; without shared capacities, sets that lack one rank are preferred.

    >>> from tasp_lab.topology.builders import nodes
    >>> cut = all_gather_cut(nodes(2, 4, nic_bandwidth_bytes_per_s=1, link_bandwidth_bytes_per_s=50))
    >>> cut.inside, cut.bandwidth_bytes_per_s                 # a node behind its four NICs
    ((4, 5, 6, 7), Fraction(4, 1))

    Raises `TopologyError` for a topology of one rank, which has no cut.
    """
    if topology.table.is_mesh and len(topology.links) and not topology.shared:
        return _of_mesh(topology, range(1, topology.world_size))
    graph = _graph(topology)
    return _as_cut(topology, graph, _narrowest(graph, ~graph.backward().min_rank(), per_rank=True))


def ring_cut(topology: Topology) -> Cut:
    """The cut with the lowest bandwidth, of all sets that contain some ranks but not all.

    Rings carry at most `bandwidth_bytes_per_s` in total. Ties depend on the order of ranks and links only; without
    shared capacities, single ranks are preferred.

    >>> from tasp_lab.topology.builders import full_mesh
    >>> ring_cut(full_mesh(8, 50))
    Cut(inside=(0,), ranks_inside=1, bandwidth_bytes_per_s=Fraction(350, 1))

    Raises `TopologyError` for a topology of one rank, which has no cut.
    """
    if topology.table.is_mesh and len(topology.links) and not topology.shared:
        return _of_mesh(topology, range(1))
    graph = _graph(topology)
    inside = min(graph.min_rank(), ~graph.backward().min_rank(), key=graph.leaving)
    inside = _narrowest(graph, inside, per_rank=False)  # of the sets that hold rank 0
    return _as_cut(topology, graph, ~_narrowest(graph.backward(), ~inside, per_rank=False))  # and of all others


def _of_mesh(mesh: Topology, inside: range) -> Cut:
    """One rank or all but one: in a full mesh, r of n ranks have r (n - r) links to the others."""
    crossing = len(inside) * (mesh.world_size - len(inside))
    return Cut(tuple(inside), len(inside), crossing * Fraction(mesh.links[0].bandwidth_bytes_per_s))


@dataclass(frozen=True)
class _Graph:
    """Vertices ``0 .. size - 1``, ranks first, and edges with capacities in multiples of a unit in bytes/s."""

    world_size: int
    size: int
    tails: IntArray
    heads: IntArray
    capacities: npt.NDArray[np.object_]
    unit_bytes_per_s: Fraction

    def leaving(self, inside: BoolArray) -> int:
        """The capacity of all edges that leave a set of vertices, given as a bool array (size,)."""
        return int(self.capacities[inside[self.tails] & ~inside[self.heads]].sum())

    def backward(self) -> _Graph:
        """The graph with every edge reversed."""
        return replace(self, tails=self.heads, heads=self.tails)

    def min_rank(self) -> BoolArray:
        """The single rank with the lowest outgoing capacity, as a bool array (size,)."""
        leaving = np.zeros(self.size, dtype=object)
        np.add.at(leaving, self.tails, self.capacities)
        inside = np.zeros(self.size, dtype=bool)
        inside[leaving[: self.world_size].argmin()] = True
        return inside


def _graph(topology: Topology) -> _Graph:
    """The links, with relays for shared capacities; bandwidths as multiples of their greatest common unit."""
    if topology.world_size == 1:
        raise TopologyError(f"topology {topology.name!r} has one rank, expected 2 or more: no cut divides it")
    edges, size = _edges(topology)
    exact = {bandwidth: Fraction(bandwidth) for bandwidth in {bandwidth for *_, bandwidth in edges}}
    denominator = math.lcm(*(number.denominator for number in exact.values()))
    whole = {bandwidth: int(number * denominator) for bandwidth, number in exact.items()}
    divisor = math.gcd(*whole.values())
    return _Graph(
        topology.world_size,
        size,
        np.array([tail for tail, *_ in edges], dtype=np.int64),
        np.array([head for _, head, _ in edges], dtype=np.int64),
        np.array([whole[bandwidth] // divisor for *_, bandwidth in edges], dtype=object),
        Fraction(divisor, denominator),
    )


def _edges(topology: Topology) -> tuple[list[tuple[int, int, Number]], int]:
    """Tail, head and bandwidth of every link and every relay, and how many vertices there are with the relays."""
    position = {vertex: index for index, vertex in enumerate(topology.vertices)}
    tails = [position[link.source] for link in topology.links]
    heads = [position[link.destination] for link in topology.links]
    bandwidths = [link.bandwidth_bytes_per_s for link in topology.links]
    index_of = {link.name: index for index, link in enumerate(topology.links)} if topology.shared else {}
    groups = [({index_of[name] for name in shared.links}, shared.bandwidth_bytes_per_s) for shared in topology.shared]
    for group, most in groups:  # so that no link takes a relay of its own, which would part it from its neighbours
        for link in group:
            bandwidths[link] = min(bandwidths[link], most)
    relays: list[tuple[int, int, Number]] = []
    size = len(position)
    for group, most in sorted(groups, key=lambda entry: -len(entry[0])):  # so that a smaller one hangs from a larger
        for ends in (tails, heads):
            for vertex, members in _by_end(group, ends).items():
                if sum(Fraction(bandwidths[link]) for link in members) > most:
                    relays.append((vertex, size, most) if ends is tails else (size, vertex, most))
                    for link in members:
                        ends[link] = size
                    size += 1
    return [*zip(tails, heads, bandwidths, strict=True), *relays], size


def _by_end(links: set[int], ends: list[int]) -> dict[int, list[int]]:
    links_at: dict[int, list[int]] = defaultdict(list)
    for link in sorted(links):
        links_at[ends[link]].append(link)
    return links_at


def _as_cut(topology: Topology, graph: _Graph, inside: BoolArray) -> Cut:
    vertices = tuple(vertex for vertex, held in zip(topology.vertices, inside.tolist(), strict=False) if held)
    return Cut(vertices, int(inside[: graph.world_size].sum()), graph.leaving(inside) * graph.unit_bytes_per_s)


def _narrowest(graph: _Graph, inside: BoolArray, *, per_rank: bool) -> BoolArray:
    """The set that the least capacity leaves, per rank inside or in total, of those that hold some ranks and not all.

    In total, only sets that hold rank 0 are seen. The search starts from the set given. For one rank after the other
    it asks for a better set without that rank; once there is none, every better set holds the rank, which then is a
    source like rank 0. What was settled for one ratio is settled for all better ones.
    """
    network = _Network(graph)
    settled = [] if per_rank else [0]
    probe = _Probe(graph, inside, settled, per_rank)
    for rank in range(len(settled), graph.world_size):
        while not probe.is_fed(rank) and (narrower := network.min_cut(probe.capacities(), rank)).any():
            inside, probe = narrower, _Probe(graph, narrower, settled, per_rank)
        settled.append(rank)
        probe.settle(rank)
    return inside


class _Probe:
    """Capacities under which a set is a cut of less than what is needed if its ratio is better than p/q.

    Edges have q times their capacity. A source gives p to each of the n ranks, and every rank needs n p: a set S of r
    ranks that capacity B leaves stops the flow into a rank outside at (n - r) p + q B, which is less if B / r < p / q.
    In total, ranks need p, S stops the flow at q B, and the source gives to settled ranks only. To those it gives all.
    """

    def __init__(self, graph: _Graph, inside: BoolArray, settled: list[int], per_rank: bool) -> None:
        n = graph.world_size
        ratio = Fraction(graph.leaving(inside), int(inside[:n].sum()) if per_rank else 1)
        self._graph = graph
        self._needed = ratio.numerator * (n if per_rank else 1)
        dtype = np.int64 if self._needed * n < 2**61 else np.object_
        self._edges: WholeArray = np.minimum(graph.capacities * ratio.denominator, self._needed).astype(dtype)
        self._supply: WholeArray = np.full(n, ratio.numerator if per_rank else 0, dtype)
        self._within_reach = np.zeros(graph.size, dtype)
        self._within_reach[:n] = self._supply
        for rank in settled:
            self.settle(rank)

    def settle(self, rank: int) -> None:
        """Add a rank to the sources."""
        out = np.flatnonzero(self._graph.tails == rank)
        heads = self._graph.heads[out]
        self._within_reach[heads] = np.minimum(self._within_reach[heads] + self._edges[out], self._needed)
        self._within_reach[rank] = self._supply[rank] = self._needed

    def is_fed(self, rank: int) -> bool:
        """Whether a rank surely gets what it needs: what sources and their neighbours send it at once is enough.

        This spares most flows where all ranks are alike and close, as on a full mesh or a switch.
        """
        into = np.flatnonzero(self._graph.heads == rank)
        missing = self._needed - self._supply[rank]
        if self._reaching(into) >= missing:
            return True
        if len(into) != 1 or self._edges[into[0]] < missing:
            return False
        # Behind one switch: what the others send there reaches the rank, except for what it sends itself.
        to_switch = (self._graph.heads == self._graph.tails[into[0]]) & (self._graph.tails != rank)
        return bool(self._reaching(np.flatnonzero(to_switch)) >= missing)

    def _reaching(self, links: IntArray) -> int:
        """What sources and their neighbours send over these edges at once."""
        return int(np.minimum(self._edges[links], self._within_reach[self._graph.tails[links]]).sum())

    def capacities(self) -> WholeArray:
        """Of the edges of the graph, from the source to each rank, and of one before the source: what is needed."""
        return np.concatenate([self._edges, self._supply, np.array([self._needed], self._edges.dtype)])


class _Network:
    """The graph behind a source, as scipy's max-flow takes it: sorted rows, and with every edge its reverse."""

    def __init__(self, graph: _Graph) -> None:
        source, self._before, self._size = graph.size, graph.size + 1, graph.size + 2
        tails = np.concatenate([graph.tails, np.full(graph.world_size, source), [self._before]])
        heads = np.concatenate([graph.heads, np.arange(graph.world_size), [source]])
        keys = np.concatenate([tails * self._size + heads, heads * self._size + tails])
        slots, slot_of = np.unique(keys, return_inverse=True)
        self._slot_of = slot_of[: len(tails)]
        self._columns = (slots % self._size).astype(np.int32)
        self._starts = np.searchsorted(slots, np.arange(self._size + 1) * self._size).astype(np.int32)

    def min_cut(self, capacities: WholeArray, rank: int) -> BoolArray:
        """The smallest set of the graph's vertices whose cut stops the flow into a rank; none if the first edge does.

        Max-flow by scaling: the highest bits first, then, a few bits at a time, what the residual capacities allow.
        After each pass no more than one unit per edge is left, so what is clipped would not be used.
        """
        residual = np.zeros(len(self._columns), dtype=capacities.dtype)
        residual[self._slot_of] = capacities
        shift = max(0, int(capacities[-1]).bit_length() - _FLOW_BITS)
        while True:
            residual = residual - (self._flow(residual >> shift, rank).astype(residual.dtype) << shift)
            if shift == 0:
                return self._reached(residual)
            shift = max(0, shift - (_FLOW_BITS - len(self._columns).bit_length()))

    def _flow(self, capacities: WholeArray, rank: int) -> WholeArray:
        """The maximum flow over each edge, negative against it, for capacities clipped to what scipy takes."""
        from scipy.sparse.csgraph import maximum_flow  # takes longer to import than most predictions take

        clipped = np.minimum(capacities, 2**_FLOW_BITS - 1).astype(np.int32)
        flow: WholeArray = maximum_flow(self._matrix(clipped), self._before, rank).flow.data
        return flow

    def _reached(self, residual: WholeArray) -> BoolArray:
        """The vertices of the graph to which the flow could still be more."""
        from scipy.sparse.csgraph import breadth_first_order

        matrix = self._matrix((residual > 0).astype(np.int32)).copy()
        matrix.eliminate_zeros()
        reached = np.zeros(self._size, dtype=bool)
        reached[breadth_first_order(matrix, self._before, return_predecessors=False)] = True
        return reached[:-2]

    def _matrix(self, values: npt.NDArray[np.int32]) -> csr_array[np.int32]:
        from scipy.sparse import csr_array

        return csr_array((values, self._columns, self._starts), shape=(self._size, self._size))


# What the lower bounds of collectives and of attention need of a topology.


def ranks_behind(topology: Topology, group: SharedCapacity) -> list[int]:
    """The ranks all of whose incoming links belong to the shared capacity."""
    inside = set(group.links)
    outside = {link.destination for link in topology.links if link.name not in inside}
    return [rank for rank in range(topology.world_size) if rank not in outside]


@lru_cache(maxsize=4)
def bottleneck(topology: Topology) -> Cut:
    """The AllGather cut of a topology, cached."""
    return all_gather_cut(topology)


def like(topology: Topology, value: Fraction) -> Number:
    """The fraction, converted to float if the topology's numbers are floats."""
    return float(value) if isinstance(topology.links[0].bandwidth_bytes_per_s, float) else value
