"""PCIe as a tree: GPUs hang below PCIe switches, those below NUMA nodes, and NUMA nodes are joined in pairs.

A switch or a NUMA node becomes a switch of the topology, and each way up a link with the bandwidth of that PCIe link,
which all that is below shares. A PCIe switch with a single GPU or switch below it decides nothing and is left out; the
slower of its two links stays.

The latency of a way is in the two links of its GPUs: NCCL has one latency for all PCIe paths, whatever they pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

from tasp_lab.machines.parameters import Constant
from tasp_lab.topology.graph import Link, Switch, both_ways
from tasp_lab.topology.links import SwitchKind

PCIE_BANDWIDTH = Constant(
    "pcie_bandwidth",
    "31.5GB/s",
    "assumption, as the tool does not print it: PCI Express Base Specification 4.0, 16 lanes: "
    "16 GT/s x 16 x 128/130 / 8 bits = 31.5 GB/s each way",
)
"""The bandwidth of a PCIe link of which nothing is known."""


_SWITCH_KINDS: Mapping[str, SwitchKind] = {"pcie": "pcie", "numa": "cpu"}


@dataclass(frozen=True)
class Branch:
    """A PCIe switch or a NUMA node with what is below it: ranks and branches.

    `bandwidth_bytes_per_s` is that of its way up; a NUMA node has none.
    """

    kind: Literal["pcie", "numa"]
    below: tuple[Branch | Leaf, ...]
    bandwidth_bytes_per_s: float = 0.0


@dataclass(frozen=True)
class Leaf:
    """A GPU and the bandwidth of its PCIe link."""

    rank: int
    bandwidth_bytes_per_s: float


@dataclass(frozen=True)
class PcieSurvey:
    """The NUMA nodes with all PCIe below them, and the constants that its bandwidths come from."""

    numa_nodes: tuple[Branch, ...]
    constants: tuple[Constant, ...]


def without_idle(numa_nodes: Sequence[Branch]) -> list[Branch]:
    """The trees without what decides nothing; a lone NUMA node with one way down is such a thing too.

    >>> without_idle([Branch("numa", ()), Branch("numa", (Branch("pcie", (Leaf(0, 32e9),), 16e9),))])
    [Branch(kind='numa', below=(Leaf(rank=0, bandwidth_bytes_per_s=16000000000.0),), bandwidth_bytes_per_s=0.0)]
    """
    roots = [root for node in numa_nodes if (root := _trimmed(node)).below]
    only = roots[0].below[0] if len(roots) == 1 and len(roots[0].below) == 1 else None
    return [only] if isinstance(only, Branch) else roots


def pcie_links(roots: Sequence[Branch], cpu_bandwidth_bytes_per_s: float, latency_s: float) -> list[Link]:
    """The links of the trees and between their roots; `latency_s` is from rank to rank.

    >>> pair, single = Branch("pcie", (Leaf(0, 32e9), Leaf(1, 32e9)), 16e9), Leaf(2, 32e9)
    >>> [link.name for link in pcie_links([Branch("numa", (pair, single))], 22e9, 1e-6)][::2]
    ['0->pcie0', '1->pcie0', 'pcie0->numa0', '2->numa0']
    """
    counts: Counter[str] = Counter()
    named = [(root, _name(root, counts)) for root in roots]
    links = [link for root, name in named for link in _links_below(root, name, counts, latency_s / 2)]
    for (_, a), (_, b) in combinations(named, 2):
        links += both_ways(a, b, cpu_bandwidth_bytes_per_s, 0.0)
    return links


def pcie_switches(roots: Sequence[Branch]) -> Iterator[Switch]:
    """The switches of the trees, with the names that `pcie_links` gives them."""
    counts: Counter[str] = Counter()
    for root, name in [(root, _name(root, counts)) for root in roots]:
        yield Switch(name, _SWITCH_KINDS[root.kind])
        yield from _switches_below(root, counts)


def _switches_below(branch: Branch, counts: Counter[str]) -> Iterator[Switch]:
    for part in (part for part in branch.below if isinstance(part, Branch)):
        yield Switch(_name(part, counts), _SWITCH_KINDS[part.kind])
        yield from _switches_below(part, counts)


def _trimmed(branch: Branch) -> Branch:
    below = (_shortened(part) for part in branch.below)
    return replace(branch, below=tuple(part for part in below if part is not None))


def _shortened(part: Branch | Leaf) -> Branch | Leaf | None:
    """The part without switches that have one way down or none; None if no GPU is left."""
    if isinstance(part, Leaf):
        return part
    branch = _trimmed(part)
    if len(branch.below) > 1:
        return branch
    if not branch.below:
        return None
    (only,) = branch.below
    slower = min(only.bandwidth_bytes_per_s, branch.bandwidth_bytes_per_s)
    return replace(only, bandwidth_bytes_per_s=slower)


def _name(branch: Branch, counts: Counter[str]) -> str:
    counts[branch.kind] += 1
    return f"{branch.kind}{counts[branch.kind] - 1}"


def _links_below(branch: Branch, name: str, counts: Counter[str], gpu_latency_s: float) -> Iterator[Link]:
    for part in branch.below:
        if isinstance(part, Leaf):
            yield from both_ways(part.rank, name, part.bandwidth_bytes_per_s, gpu_latency_s)
        else:
            inner = _name(part, counts)
            yield from _links_below(part, inner, counts, gpu_latency_s)
            yield from both_ways(inner, name, part.bandwidth_bytes_per_s, 0.0)
