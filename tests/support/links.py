"""Topologies with links of other bandwidths, or without some: ``with_links(torus((3, 3)), ["0-1=25GB/s"])``."""

from __future__ import annotations

from collections.abc import Sequence

from tasp_lab.machines.machine import Machine
from tasp_lab.machines.overrides import overridden
from tasp_lab.topology.graph import Topology
from tasp_lab.topology.missing import without


def with_links(topology: Topology, changes: Sequence[str]) -> Topology:
    """The topology with overrides of links, each like ``0-3=10GB/s``."""
    return overridden(Machine(topology), [f"link.{each}" for each in changes]).topology


def without_links(topology: Topology, names: Sequence[str]) -> Topology:
    """The topology without some links, each like ``0-3`` or ``0>3``."""
    return without(topology, [f"link.{each}" for each in names])
