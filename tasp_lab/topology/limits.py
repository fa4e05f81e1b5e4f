"""Capacity limits of a topology, used by the lower bounds of collectives and of attention."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

from tasp_lab.core.units import Number
from tasp_lab.topology.cuts import Cut, all_gather_cut
from tasp_lab.topology.graph import SharedCapacity, Topology


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
