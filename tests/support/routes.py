"""Topologies whose ranks do not forward."""

from __future__ import annotations

from dataclasses import replace

from tasp_lab.topology.graph import Topology
from tasp_lab.topology.routing import CHOICES


def direct(topology: Topology) -> Topology:
    """The topology with routes over links and switches only."""
    return replace(topology, forwarding=CHOICES["direct"])
