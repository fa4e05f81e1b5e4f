"""What a topology is made of, the kinds of its switches and the nodes of its ranks, and when it is valid.

`tasp_lab.topology.graph.Topology` is what users construct: a `TopologyModel` that checks itself and has routes.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from typing import get_args

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray
from tasp_lab.core.errors import TopologyError
from tasp_lab.core.units import Number
from tasp_lab.topology.components import components
from tasp_lab.topology.links import Link, LinkTable, MeshLinks, SharedCapacity, Switch, SwitchKind, Vertex, link_table

MIN_BANDWIDTH_BYTES_PER_S, MAX_BANDWIDTH_BYTES_PER_S = 1e-9, 1e18
"""Far below any scaled-down link and far above any real link, so that all results are finite."""

MAX_LATENCY_S = 1e9
"""Thirty years: more than the latency of any real link, and finite."""


@dataclass(frozen=True, repr=False)
class TopologyModel:
    """The fields of a topology and what follows from them without routes. Nothing is checked here."""

    name: str
    world_size: int
    links: tuple[Link, ...] | MeshLinks
    shared: tuple[SharedCapacity, ...] = ()
    switches: tuple[Switch, ...] = ()
    nodes: tuple[int, ...] = ()

    @cached_property
    def vertices(self) -> tuple[Vertex, ...]:
        """All ranks, then the switches in order of first occurrence in the links."""
        return (*range(self.world_size), *self.table.switches)

    @cached_property
    def table(self) -> LinkTable:
        """The links as arrays."""
        return link_table(self.links, self.world_size)

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

        >>> from tasp_lab.topology.graph import Topology, both_ways
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
                kind: SwitchKind = "network" if self._hold_nodes_together(group == number) else "node"
                kinds |= {str(self.vertices[at]): kind for at in missing if group[at] == number}
        return {name: kinds[name] for name in self.table.switches}

    @cached_property
    def node_of_rank(self) -> tuple[int, ...]:
        """The node of each rank: `nodes` if given, else the components of the graph without the network.

        >>> from tasp_lab.topology.graph import Topology, both_ways
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
        facts = self.world_size, kinds, self.node_of_rank, shared, self.table.is_uniform, len(self.vertices)
        return hashlib.sha256(repr(facts).encode() + ends).hexdigest()

    def _hold_nodes_together(self, switches: BoolArray) -> bool:
        """Whether removing these vertices splits the ranks into several groups, not all of one rank."""
        node = self._components(~np.any(switches[self.link_ends], axis=1))[: self.world_size]
        return 1 < len(np.unique(node)) < self.world_size

    def _components(self, links: BoolArray) -> IntArray:
        """The connected component of each vertex over the chosen links, a bool array (links,), in either direction."""
        return components(self.link_ends[links], len(self.vertices))


def check_topology(topology: TopologyModel) -> None:
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


def _check_places(topology: TopologyModel) -> None:
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


def _check_switch(topology: TopologyModel, switch: str) -> None:
    where = f"topology {topology.name!r}: switch {switch!r}"
    if not switch.strip():
        raise TopologyError(f"topology {topology.name!r}: a switch has no name")
    if switch.strip().lstrip("+-").isdecimal():
        raise TopologyError(f"{where} could be taken for a rank, expected a name that is no number")
    if "->" in switch:
        raise TopologyError(f"{where} could be taken for a link, expected a name without '->'")


def _check_link(topology: TopologyModel, link: Link) -> None:
    where = f"topology {topology.name!r}: link {link.name}"
    for end in (link.source, link.destination):
        if isinstance(end, int) and not 0 <= end < topology.world_size:
            raise TopologyError(f"{where}: there is no rank {end}, expected 0 to {topology.world_size - 1}")
    if link.source == link.destination:
        raise TopologyError(f"{where} connects a vertex with itself")
    _check_bandwidth(where, link.bandwidth_bytes_per_s)
    _check_latency(where, link.latency_s)


def _check_shared(topology: TopologyModel, shared: SharedCapacity, names: set[str]) -> None:
    where = f"topology {topology.name!r}: shared capacity {shared.name!r}"
    _check_bandwidth(where, shared.bandwidth_bytes_per_s)
    if not shared.links:
        raise TopologyError(f"{where} covers no link")
    for name in shared.links:
        if name not in names:
            raise TopologyError(f"{where} covers link {name}, which does not exist")


def _check_connected(topology: TopologyModel) -> None:
    """Check that every rank reaches every other, and that every switch has incoming and outgoing links."""
    component = topology.table.components
    for vertex, label in zip(topology.vertices, component.tolist(), strict=True):
        if label != component[0]:
            raise TopologyError(
                f"topology {topology.name!r} is not connected: "
                f"no way from {_name(topology.vertices[0])} to {_name(vertex)} and back"
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


def _name(vertex: Vertex) -> str:
    return f"rank {vertex}" if isinstance(vertex, int) else f"switch {vertex!r}"
