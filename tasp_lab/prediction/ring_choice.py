"""Choose the rings of a machine by effective bandwidth under its communication library.

The effective bandwidth is a part of a link's bandwidth, and not the same part everywhere: NCCL sends 345 of 450 GB/s
through the port of an H100 and 47 of 50 through its NIC. Rings are therefore searched on the *usable* topology, with
effective bandwidths (`usable_topology`). With an ideal library that is the topology itself.

An effective bandwidth is asymptotic: it ignores channels, launch and protocol of each message, so rings with a slightly
higher rate and many more messages can take longer. Where a search improves on rings known by formula, both are
*candidates*, and the simulation decides (`ring_candidates`). Rings by formula do not depend on bandwidths: they stay
candidates when a link becomes faster, as long as they carry half as much as the best. So a faster link makes no best
prediction slower; for short messages, whose time is latency, one schedule alone may take longer around rings that carry
more than twice as much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np

from tasp_lab.core.arrays import IntArray
from tasp_lab.machines.machine import CommLibrary, Machine
from tasp_lab.rings.closed_forms import closed_forms
from tasp_lab.rings.decompose import decompose
from tasp_lab.rings.rings import Decomposition, ring_limit_bytes_per_s
from tasp_lab.topology.components import components
from tasp_lab.topology.graph import Topology
from tasp_lab.topology.links import Link

CLOSE_ENOUGH = Fraction(1, 100)
"""Rings by formula within this share of the upper bound are taken without a search on a usable topology: payloads are
not known more exactly."""


def usable_topology(machine: Machine) -> Topology:
    """The topology with the payload rates of the machine's library as bandwidths, exact numbers.

    >>> from tasp_lab.machines.profile import load_profile
    >>> found = usable_topology(load_profile("h100").machine("2x8"))
    >>> sorted({float(link.bandwidth_bytes_per_s) for link in found.links})
    [47000000000.0, 345000000000.0]
    """
    topology, shares = machine.topology, machine.comm_library.payload_shares
    if len(set(shares)) == 1:  # equal shares change no ring
        return topology
    places = _link_places(topology, machine.comm_library)

    def usable(index: int, link: Link) -> Link:
        return replace(link, bandwidth_bytes_per_s=Fraction(link.bandwidth_bytes_per_s) * shares[places[index]])

    return topology.map_links(usable)


def _link_places(topology: Topology, library: CommLibrary) -> IntArray:
    """The place (`CommLibrary.places`) of each link: of its ranks, or of all ranks that its switches connect."""
    n, size, ends = topology.world_size, len(topology.vertices), topology.link_ends
    between_switches = ends[(ends >= n).all(axis=1)]
    group = components(between_switches, size)
    place = np.zeros(size, dtype=np.int64)
    first = np.full(size, -1, dtype=np.int64)
    for a, b in ends.tolist():
        if (a < n) != (b < n):
            rank, switches = min(a, b), group[max(a, b)]
            first[switches] = rank if first[switches] < 0 else first[switches]
            away = library.places(first[switches : switches + 1], np.array([rank]))
            place[switches] = max(place[switches], int(away[0]))
    direct = library.places(np.minimum(ends[:, 0], n - 1), np.minimum(ends[:, 1], n - 1))
    return np.where((ends < n).all(axis=1), direct, place[group[ends.max(axis=1)]])


def ring_candidates(
    machine: Machine, find: Callable[[Topology], Decomposition] = decompose, *, with_known: bool = True
) -> Sequence[Decomposition]:
    """The rings that may be fastest on a machine, of its usable topology; one decomposition or a few.

    Parameters
    ----------
    machine : its links and its library.
    find : the search for rings; with an ideal library its result is the only candidate.
    with_known : whether rings by formula are candidates, too; False where `find` seeks rings of a certain kind.

    >>> from tasp_lab.machines.profile import load_profile
    >>> [len(found.rings) for found in ring_candidates(load_profile("h100").machine("2x8"))]
    [8]
    """
    topology = usable_topology(machine)
    if topology is machine.topology or not with_known:
        return [find(topology)]
    known = [*closed_forms(topology, None, None)]
    best = max(known, key=lambda each: each.rate_bytes_per_s, default=None)
    if best is None or best.rate_bytes_per_s < (1 - CLOSE_ENOUGH) * ring_limit_bytes_per_s(topology):
        best = find(topology)
    found = [best, *(each for each in known if 2 * each.rate_bytes_per_s >= best.rate_bytes_per_s)]
    return list({(each.rings.tobytes(), each.shares): each for each in reversed(found)}.values())[::-1]  # each once
