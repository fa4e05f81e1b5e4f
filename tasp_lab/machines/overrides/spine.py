"""Overrides of the spine between nodes: ``spine.oversubscription=4``.

Without it the network between nodes carries all that NICs bring. With rails, NICs meet in rail switches, and the spine
is the links between these. Otherwise the NICs of a node meet in a switch of their own, whose links up to the spine and
down from it have the bandwidth of these NICs over the oversubscription: a capacity that they share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from tasp_lab.core.errors import OverrideError
from tasp_lab.core.units import Number
from tasp_lab.machines.constants import Quantity
from tasp_lab.machines.machine import Constant
from tasp_lab.machines.overrides.override import Override
from tasp_lab.topology.graph import Topology
from tasp_lab.topology.links import Link, SharedCapacity

SPINE = "spine.oversubscription"


def _parse_ratio(text: str) -> float:
    try:
        ratio = float(text)
    except ValueError:
        ratio = 0.0
    if not 1 <= ratio < 1e6:
        raise OverrideError(f"{text!r}, expected a number of 1 or more, like 4")
    return ratio


_RATIO = Quantity("", _parse_ratio)


@dataclass(frozen=True)
class SpineOverride:
    """An edit of a topology: its spine carries a part of what NICs bring."""

    override: Override

    @property
    def ratio(self) -> Fraction:
        """How many times more NICs bring. Raises `OverrideError` for less than once."""
        if self.override.change.kind == "plus":
            raise OverrideError(f"override {self.override}: expected a number of 1 or more, like 4")
        ratio = Fraction(self.override.of(1.0, _RATIO))
        if ratio < 1:
            raise OverrideError(f"override {self.override}: expected a number of 1 or more, like 4")
        return ratio

    def __call__(self, topology: Topology) -> Topology:
        """The topology with this spine. Raises `OverrideError` where no network joins its nodes."""
        ratio = self.ratio
        network = {name for name, kind in topology.switch_kinds.items() if kind == "network"}
        if ratio == 1:
            return topology
        if any({link.source, link.destination} <= network for link in topology.links):
            return topology.map_links(lambda _, link: _divided(link, ratio, network))
        return replace(topology, shared=(*topology.shared, *self._uplinks(topology, network, ratio)))

    def _uplinks(self, topology: Topology, network: set[str], ratio: Fraction) -> list[SharedCapacity]:
        """The capacities up and down of each node."""
        found = []
        for node in dict.fromkeys(topology.node_of_rank):
            for where, links in _nics(topology, network, node).items():
                if not links:
                    raise OverrideError(
                        f"override {self.override}: ranks of {topology.name} have no NICs of their own, expected a "
                        "machine of nodes with a NIC per rank"
                    )
                bandwidth: Number = sum(link.bandwidth_bytes_per_s for link in links) / ratio
                found.append(
                    SharedCapacity(f"node {node} {where} spine", bandwidth, tuple(each.name for each in links))
                )
        return found

    def constants(self) -> list[Constant]:
        """The oversubscription with its source."""
        return [Constant(SPINE, self.override.change.text.removeprefix("x"), f"given: {self.override}, was 1")]


def _nics(topology: Topology, network: set[str], node: int) -> dict[str, Sequence[Link]]:
    """The links of the NICs of a node, out of it and into it."""
    nodes = topology.node_of_rank
    out = [x for x in topology.links if x.destination in network and _is_on(x.source, nodes, node)]
    into = [x for x in topology.links if x.source in network and _is_on(x.destination, nodes, node)]
    return {"to": out, "from": into}


def _is_on(vertex: int | str, nodes: Sequence[int], node: int) -> bool:
    return isinstance(vertex, int) and nodes[vertex] == node


def _divided(link: Link, ratio: Fraction, network: set[str]) -> Link:
    if not {link.source, link.destination} <= network:
        return link
    return replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / ratio)
