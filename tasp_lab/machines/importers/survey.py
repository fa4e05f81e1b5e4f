"""Survey of one machine: the content of a tool's output, in one form for all formats.

**PCIe** is a tree: GPUs hang below PCIe switches, those below NUMA nodes, and NUMA nodes are joined in pairs.
A switch or a NUMA node becomes a switch of the topology, and each way up a link with the bandwidth of that PCIe link,
which all that is below shares. A PCIe switch with a single GPU or switch below it decides nothing and is left out; the
slower of its two links stays.

The latency of a way is in the two links of its GPUs: NCCL has one latency for all PCIe paths, whatever they pass.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Literal, TypeVar

import networkx as nx

from tasp_lab.core.units import parse_bandwidth_bytes_per_s
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


def pcie_parts(
    roots: Sequence[Branch], cpu_bandwidth_bytes_per_s: float, latency_s: float
) -> tuple[list[Link], list[Switch]]:
    """The links of the trees and between their roots, and their switches; `latency_s` is from rank to rank.

    >>> pair, single = Branch("pcie", (Leaf(0, 32e9), Leaf(1, 32e9)), 16e9), Leaf(2, 32e9)
    >>> links, switches = pcie_parts([Branch("numa", (pair, single))], 22e9, 1e-6)
    >>> [link.name for link in links][::2], [switch.name for switch in switches]
    (['0->pcie0', '1->pcie0', 'pcie0->numa0', '2->numa0'], ['numa0', 'pcie0'])
    """
    links: list[Link] = []
    switches: list[Switch] = []

    def named(branch: Branch) -> str:
        kind = _SWITCH_KINDS[branch.kind]
        switches.append(Switch(f"{branch.kind}{sum(other.kind == kind for other in switches)}", kind))
        return switches[-1].name

    def walk(branch: Branch, name: str) -> None:
        for part in branch.below:
            if isinstance(part, Leaf):
                links.extend(both_ways(part.rank, name, part.bandwidth_bytes_per_s, latency_s / 2))
            else:
                inner = named(part)
                walk(part, inner)
                links.extend(both_ways(inner, name, part.bandwidth_bytes_per_s, 0.0))

    names = [named(root) for root in roots]
    for root, name in zip(roots, names, strict=True):
        walk(root, name)
    for a, b in combinations(names, 2):
        links += both_ways(a, b, cpu_bandwidth_bytes_per_s, 0.0)
    return links, switches


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


_Device = TypeVar("_Device", bound=Hashable)

Pair = tuple[int, int]
"""Two ranks, the smaller one first."""


@dataclass(frozen=True)
class Given:
    """Options of `import_topology`; None if not given."""

    link_bandwidth: str | None = None
    pcie_bandwidth: str | None = None
    cpu_bandwidth: str | None = None
    nvswitch: bool | None = None
    pcie: bool | None = None

    def constant(self, default: Constant) -> Constant:
        """The constant with the given value, or else the default.

        >>> Given(link_bandwidth="50GB/s").constant(Constant("link_bandwidth", "25GB/s", "a data sheet"))
        Constant(name='link_bandwidth', value='50GB/s', source='given to the import', interval=None)
        """
        text: str | None = getattr(self, default.name)
        if text is None:
            return default
        parse_bandwidth_bytes_per_s(text)
        return Constant(default.name, " ".join(text.split()), "given to the import")


@dataclass(frozen=True)
class Nic:
    """A NIC with the ranks that use it: those to which no other is nearer. `gbit_per_s` is None if it is not known."""

    name: str
    ranks: tuple[int, ...]
    gbit_per_s: float | None = None


def nics_of(
    gpu_count: int, names: Sequence[str], distance: Callable[[int, int], int], gbit_per_s: Sequence[float | None]
) -> tuple[Nic, ...]:
    """The NICs that GPUs use, by their `distance` from ranks (first argument) to NICs (second), in the order of names.

    GPUs with the same nearest NICs take them in turn; NICs that are nearest to none are of no use for GPUs.

    >>> [nic.ranks for nic in nics_of(4, ["a", "b", "c"], lambda rank, nic: 2 if nic == 2 else 1, [None] * 3)]
    [(0, 2), (1, 3)]
    """
    nearest: dict[tuple[int, ...], list[int]] = {}
    for rank in range(gpu_count if names else 0):
        distances = [distance(rank, nic) for nic in range(len(names))]
        least = min(distances)
        nearest.setdefault(tuple(nic for nic, each in enumerate(distances) if each == least), []).append(rank)
    used: dict[int, list[int]] = {}
    for nics, ranks in nearest.items():
        for turn in range(max(len(nics), len(ranks))):
            used.setdefault(nics[turn % len(nics)], []).append(ranks[turn % len(ranks)])
    return tuple(Nic(names[nic], tuple(dict.fromkeys(used[nic])), gbit_per_s[nic]) for nic in sorted(used))


@dataclass(frozen=True)
class Survey:
    """GPUs and how links join them.

    `cables` maps pairs of ranks to the number of links between them. Each of `switches` maps ranks to the number of
    links they have into it. `link_bandwidth` is that of one link; None where there is no link. `pcie` is read only
    where PCIe is wanted, as it may be missing or make no sense in a file that is otherwise good. `nics` are those that
    GPUs use, `nic_count` is the number of all; None where the tool lists none.
    """

    tool: str
    lines: str
    fabric: Literal["NVLink", "xGMI"]
    gpu_count: int
    cables: Mapping[Pair, int]
    switches: tuple[Mapping[int, int], ...]
    wiring_source: str
    link_bandwidth: Constant | None
    pcie: Callable[[], PcieSurvey]
    nic_count: int | None = None
    nics: tuple[Nic, ...] = ()

    @property
    def is_joined(self) -> bool:
        """Whether cables and switches lead from any GPU to any other, over GPUs between them if need be."""
        through_switches = (pair for switch in self.switches for pair in pairwise(switch))
        return len(groups(range(self.gpu_count), [*self.cables, *through_switches])) <= 1

    @property
    def is_complete(self) -> bool:
        """Whether each two GPUs have a cable or a switch in common."""
        through_switches = {(a, b) for switch in self.switches for a in switch for b in switch if a < b}
        return len(through_switches | set(self.cables)) == self.gpu_count * (self.gpu_count - 1) // 2


def groups(devices: Iterable[_Device], pairs: Iterable[tuple[_Device, _Device]]) -> list[list[_Device]]:
    """The devices, put together where a chain of pairs leads from one to the other; in their order.

    >>> groups("abcd", [("a", "c"), ("c", "d")])
    [['a', 'c', 'd'], ['b']]
    """
    order = {device: index for index, device in enumerate(devices)}
    graph: nx.Graph[_Device] = nx.Graph()
    graph.add_nodes_from(order)
    graph.add_edges_from(pairs)
    return [sorted(group, key=order.__getitem__) for group in nx.connected_components(graph)]


def shown(text: str) -> str:
    """A piece of a file as a message can show it: quoted, in ASCII, and not longer than a line.

    >>> shown("NV\\n" * 50)
    "'NV\\\\nNV\\\\nNV\\\\nNV\\\\nNV\\\\nNV\\\\nNV\\\\nNV\\\\nNV\\\\nNV\\\\n'..."
    """
    return ascii(text[:30]) + ("..." if len(text) > 30 else "")
