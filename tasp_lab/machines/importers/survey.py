"""Survey of one machine: the content of a tool's output, in one form for all formats.

**PCIe** is a tree: GPUs hang below PCIe switches, those below NUMA nodes, and these below CPU sockets, which are joined
in pairs. A switch or a socket becomes a switch of the topology, and each way up a link with the bandwidth of that PCIe
link, which all that is below shares. Inside a socket nothing but the links of PCIe limits traffic, whichever of its
NUMA nodes they end in. All traffic from one socket to another shares one path (`in_sockets`).

The latency of a way is in the two links of its GPUs: NCCL has one latency for all PCIe paths, whatever they pass.

**NICs** are handed out by how near they are to GPUs (`nics_of`).
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import combinations, pairwise
from typing import Literal, NamedTuple, TypeVar

import networkx as nx

from tasp_lab.core.errors import TopologyError
from tasp_lab.core.units import parse_bandwidth_bytes_per_s
from tasp_lab.machines.parameters import Constant
from tasp_lab.topology.graph import Link, Switch, both_ways

PCIE_BANDWIDTH = Constant(
    "pcie_bandwidth",
    "31.5GB/s",
    "assumption, as the tool does not print it: PCI Express Base Specification 4.0, 16 lanes: "
    "16 GT/s x 16 x 128/130 / 8 bits = 31.5 GB/s each way; --pcie-bandwidth of the import changes it",
)
"""The bandwidth of a PCIe link of which nothing is known."""


class LinkGeneration(NamedTuple):
    """The links between GPUs of one generation: the bandwidth of one, each way, and its source.

    `accelerators` are those of the catalogue that have such links, separated by blanks.
    """

    link: str
    bandwidth: str
    accelerators: str
    source: str


_TABLE = (files("tasp_lab.machines") / "link_generations.csv").read_text(encoding="utf-8")
LINK_GENERATIONS: Mapping[str, LinkGeneration] = {
    name: LinkGeneration(row["link"], row["bandwidth"], row["accelerators"], row["source"])
    for row in csv.DictReader(_TABLE.splitlines())
    for name in row["gpus"].split(", ")
}
"""The generations by the ``sm`` of NVIDIA or the ``gcn`` of AMD, like ``sm 90`` and ``gfx942``."""


class Branch(NamedTuple):
    """A part of the PCIe tree: a GPU, a PCIe switch, or a CPU, which is a NUMA node or a socket of several.

    `bandwidth_bytes_per_s` is that of its way up; a CPU has none. `number` is the rank of a GPU, or that of a NUMA
    node where it is known.
    """

    kind: Literal["gpu", "pcie", "cpu"]
    below: tuple[Branch, ...] = ()
    bandwidth_bytes_per_s: float = 0.0
    number: int | None = None

    def ranks(self) -> list[int]:
        """The GPUs below it, or itself."""
        own = [] if self.number is None or self.kind != "gpu" else [self.number]
        return sorted([*own, *(rank for part in self.below for rank in part.ranks())])


class PcieSurvey(NamedTuple):
    """The NUMA nodes with all PCIe below them, what tells them apart, and the constants of its bandwidths."""

    numa_nodes: Sequence[Branch]
    numa_source: str
    constants: Sequence[Constant]


def in_sockets(numa_nodes: Sequence[Branch], sockets: int | None = None) -> list[Branch]:
    """The sockets that have GPUs, without switches that decide nothing.

    Tools print NUMA nodes, of which a socket may have several (NPS4 of an EPYC, sub-NUMA clusters of a Xeon). Linux
    numbers them socket by socket, so each socket has an equal part of the numbers; where only some of them have GPUs,
    there are as many as the next power of two. Nodes without numbers, or all with the same, count in their order. By
    default there are two sockets, as servers of GPUs have, or one where all GPUs are in one NUMA node. Where a tool
    shows one NUMA node for several sockets, as in virtual machines, what is right below it is divided.

    >>> nodes = [Branch("cpu", (Branch("gpu", number=rank),), number=node) for rank, node in enumerate((3, 1, 7, 5))]
    >>> [socket.ranks() for socket in in_sockets(nodes)]
    [[0, 1], [2, 3]]

    Raises `TopologyError` for more sockets than parts, and for none.
    """
    nodes = [node for node in map(_trimmed, numa_nodes) if node.below]
    count = min(len(nodes), 2) if sockets is None else sockets
    if len(nodes) == 1 < count:
        nodes = [Branch("cpu", (part,)) for part in nodes[0].below]
    if not 1 <= count <= len(nodes):
        raise TopologyError(f"sockets is {count}, expected 1 to {len(nodes)}, as GPUs are in so many parts of PCIe")
    numbers = [node.number for node in nodes if node.number is not None]
    if len(numbers) < len(nodes) or len(set(numbers)) == 1:
        numbers = list(range(len(nodes)))
    total = max(numbers) + 1
    if len(set(numbers)) < total:
        total = 1 << (total - 1).bit_length()
    below: dict[int, tuple[Branch, ...]] = {}
    for number, node in zip(numbers, nodes, strict=True):
        socket = number * count // max(total, count)
        below[socket] = below.get(socket, ()) + node.below
    return [Branch("cpu", parts) for parts in below.values()]


def _trimmed(branch: Branch) -> Branch:
    """The branch without the switches below it that have no GPU, or one way down, of which the slower link stays."""
    below = []
    for part in map(_trimmed, branch.below):
        if part.kind == "pcie" and len(part.below) == 1:
            (only,) = part.below
            slower = min(only.bandwidth_bytes_per_s, part.bandwidth_bytes_per_s)
            part = only._replace(bandwidth_bytes_per_s=slower)
        if part.kind == "gpu" or part.below:
            below.append(part)
    return branch._replace(below=tuple(below))


def pcie_parts(
    roots: Sequence[Branch], cpu_bandwidth_bytes_per_s: float, latency_s: float
) -> tuple[list[Link], list[Switch]]:
    """The links of the trees and between their roots, and their switches; `latency_s` is from rank to rank.

    >>> first, second, third = (Branch("gpu", (), 32e9, rank) for rank in range(3))
    >>> links, switches = pcie_parts([Branch("cpu", (Branch("pcie", (first, second), 16e9), third))], 22e9, 1e-6)
    >>> [link.name for link in links][::2], [switch.name for switch in switches]
    (['0->pcie0', '1->pcie0', 'pcie0->cpu0', '2->cpu0'], ['cpu0', 'pcie0'])
    """
    links: list[Link] = []
    switches: list[Switch] = []

    def named(branch: Branch) -> str:
        kind: Literal["pcie", "cpu"] = "cpu" if branch.kind == "cpu" else "pcie"
        switches.append(Switch(f"{kind}{sum(other.kind == kind for other in switches)}", kind))
        return switches[-1].name

    def walk(branch: Branch, name: str) -> None:
        for part in branch.below:
            if part.kind == "gpu":
                links.extend(both_ways(part.ranks()[0], name, part.bandwidth_bytes_per_s, latency_s / 2))
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


@dataclass(frozen=True)
class Given:
    """Options of `import_topology`; None if not given."""

    link_bandwidth: str | None = None
    pcie_bandwidth: str | None = None
    cpu_bandwidth: str | None = None
    nvswitch: bool | None = None
    pcie: bool | None = None
    sockets: int | None = None

    def constant(self, default: Constant) -> Constant:
        """The constant with the given value, or else the default.

        >>> Given(link_bandwidth="50GB/s").constant(Constant("link_bandwidth", "25GB/s", "a data sheet")).value
        '50GB/s'
        """
        text: str | None = getattr(self, default.name)
        if text is None:
            return default
        parse_bandwidth_bytes_per_s(text)
        return Constant(default.name, " ".join(text.split()), "given to the import")


PIX, PXB, PHB, NODE, SYS = range(5)
"""What is between two devices, the nearest first: one PCIe switch, several, a host bridge of the CPU, the way between
host bridges of a NUMA node, the way between NUMA nodes. Less than `NODE` is near."""


class Nic(NamedTuple):
    """A NIC with the ranks that use it. `gbit_per_s` is None if it is not known."""

    name: str
    ranks: tuple[int, ...]
    gbit_per_s: float | None = None


class Nics(NamedTuple):
    """The NICs that GPUs use, in the order of the file, and a line on how they were handed out.

    The line begins with the word assumption where the file does not tell.
    """

    used: Sequence[Nic] = ()
    source: str = ""


NO_NICS = Nics()


def nics_of(names: Sequence[str], levels: Sequence[Sequence[int]], gbit_per_s: Sequence[float | None]) -> Nics:
    """Hand out NICs by the `levels` between each rank and each NIC.

    A GPU uses the NICs that are nearest to it. GPUs with the same nearest NICs have equal shares of them: each has as
    many of its own, or each is shared by as many GPUs, or all share all. A GPU that is near none uses one of its
    neighbours, as in NCCL (NVIDIA/nccl, src/graph/topo.cc, ncclTopoGetLocalNet: of the NICs on the best path), one that
    few others use; a NIC that no GPU is near, for storage or management, is used only where nothing nearer is.

    >>> [nic.ranks for nic in nics_of("abc", [[PIX, PIX, NODE]] * 4, [None] * 3).used]
    [(0, 2), (1, 3)]
    >>> [nic.ranks for nic in nics_of("abc", [[PIX, SYS, SYS], [SYS, PIX, SYS], [SYS] * 3], [None] * 3).used]
    [(0, 2), (1,)]
    """
    if not names:
        return NO_NICS
    near = {nic for row in levels for nic, level in enumerate(row) if level < NODE}
    ranks_of: dict[tuple[int, ...], list[int]] = {}
    borrowed: dict[int, list[int]] = {}
    alone: list[int] = []
    for rank, row in enumerate(levels):
        nearest = [nic for nic, level in enumerate(row) if level == min(row)]
        lent = near.intersection(nearest)
        if min(row) >= NODE and lent:
            borrowed[rank] = sorted(lent)
        else:
            ranks_of.setdefault(tuple(nearest), []).append(rank)
            alone += [rank] * (min(row) >= NODE)
    used: dict[int, list[int]] = {}
    for nics, ranks in ranks_of.items():
        most = max(len(nics), len(ranks))
        turns = [(nics[turn % len(nics)], ranks[turn % len(ranks)]) for turn in range(most)]
        if most % len(nics) or most % len(ranks):  # no equal numbers: all share all
            turns = [(nic, rank) for nic in nics for rank in ranks]
        for nic, rank in turns:
            used.setdefault(nic, []).append(rank)
    for rank, candidates in borrowed.items():
        used.setdefault(min(candidates, key=lambda nic: len(used.get(nic, ()))), []).append(rank)
    parts = []
    if alone:
        parts.append(
            f"assumption: the file cannot tell which NICs are near {of_ranks(alone)}, as all are NODE or SYS (NICs "
            "with a second path, as with Blackwell, and virtual machines), so they are shared equally; a file of "
            "NCCL_TOPO_DUMP_FILE may tell more, and --set nic.bandwidth=... changes predictions"
        )
    if borrowed:
        parts.append(f"assumption: {of_ranks(borrowed)}, near no NIC, use those of their neighbours, as NCCL does")
    parts = parts or ["the ranks to which no other NIC is nearer"]
    if idle := [name for nic, name in enumerate(names) if nic not in used]:
        parts.append(f"not used, as near no GPU: {', '.join(idle)}")
    found = [Nic(names[nic], tuple(sorted(used[nic])), gbit_per_s[nic]) for nic in sorted(used)]
    return Nics(found, "; ".join(parts))


def of_ranks(ranks: Iterable[int]) -> str:
    """The ranks as a text, like ``ranks 1, 3``."""
    numbers = [str(rank) for rank in ranks]
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(numbers)}"


@dataclass(frozen=True)
class Survey:
    """GPUs and how links join them.

    `cables` maps pairs of ranks, the smaller one first, to the number of links between them. Each of `switches` maps
    ranks to the number of links they have into it. `link_bandwidth` is that of one link; None where there is no link.
    `pcie` is read only where PCIe is wanted, as it may be missing or make no sense in a file that is otherwise good.
    `nic_count` is the number of all NICs, used or not; None where the tool lists none.
    """

    tool: str
    lines: str
    fabric: Literal["NVLink", "xGMI"]
    gpu_count: int
    cables: Mapping[tuple[int, int], int]
    switches: Sequence[Mapping[int, int]]
    wiring_source: str
    link_bandwidth: Constant | None
    pcie: Callable[[], PcieSurvey]
    nic_count: int | None = None
    nics: Nics = NO_NICS

    @property
    def is_joined(self) -> bool:
        """Whether cables and switches lead from any GPU to any other, over GPUs between them if need be."""
        through_switches = (pair for switch in self.switches for pair in pairwise(switch))
        return len(groups(range(self.gpu_count), [*self.cables, *through_switches])) <= 1

    @property
    def is_complete(self) -> bool:
        """Whether each two GPUs have a cable or a switch in common."""
        through_switches = {pair for switch in self.switches for pair in combinations(sorted(switch), 2)}
        return len(through_switches | set(self.cables)) == self.gpu_count * (self.gpu_count - 1) // 2


_Device = TypeVar("_Device", bound=Hashable)


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
