"""When a topology is valid: its numbers and names, and that every rank can reach every other."""

from __future__ import annotations

import math
from typing import get_args

from tasp_lab.core.errors import TopologyError
from tasp_lab.core.units import Number
from tasp_lab.topology.links import Link, Linked, SharedCapacity, SwitchKind, Vertex

MIN_BANDWIDTH_BYTES_PER_S, MAX_BANDWIDTH_BYTES_PER_S = 1e-9, 1e18
"""Far below any scaled-down link and far above any real link, so that all results are finite."""

MAX_LATENCY_S = 1e9
"""Thirty years: more than the latency of any real link, and finite."""


def check_topology(topology: Linked) -> None:
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


def _check_places(topology: Linked) -> None:
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


def _check_switch(topology: Linked, switch: str) -> None:
    where = f"topology {topology.name!r}: switch {switch!r}"
    if not switch.strip():
        raise TopologyError(f"topology {topology.name!r}: a switch has no name")
    if switch.strip().lstrip("+-").isdecimal():
        raise TopologyError(f"{where} could be taken for a rank, expected a name that is no number")
    if "->" in switch:
        raise TopologyError(f"{where} could be taken for a link, expected a name without '->'")


def _check_link(topology: Linked, link: Link) -> None:
    where = f"topology {topology.name!r}: link {link.name}"
    for end in (link.source, link.destination):
        if isinstance(end, int) and not 0 <= end < topology.world_size:
            raise TopologyError(f"{where}: there is no rank {end}, expected 0 to {topology.world_size - 1}")
    if link.source == link.destination:
        raise TopologyError(f"{where} connects a vertex with itself")
    _check_bandwidth(where, link.bandwidth_bytes_per_s)
    _check_latency(where, link.latency_s)


def _check_shared(topology: Linked, shared: SharedCapacity, names: set[str]) -> None:
    where = f"topology {topology.name!r}: shared capacity {shared.name!r}"
    _check_bandwidth(where, shared.bandwidth_bytes_per_s)
    if not shared.links:
        raise TopologyError(f"{where} covers no link")
    for name in shared.links:
        if name not in names:
            raise TopologyError(f"{where} covers link {name}, which does not exist")


def _check_connected(topology: Linked) -> None:
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
