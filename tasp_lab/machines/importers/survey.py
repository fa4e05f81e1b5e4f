"""Survey of one machine: the content of a tool's output, in one form for all formats."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeVar

import networkx as nx

from tasp_lab.core.units import parse_bandwidth_bytes_per_s
from tasp_lab.machines.importers.pcie import PcieSurvey
from tasp_lab.machines.parameters import Constant

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


def shown(found: str) -> str:
    """A piece of a file as a message can show it: quoted, in ASCII, and not longer than a line.

    >>> shown("NV\\n" * 50)
    "'NV\\\\nNV\\\\nNV\\\\nNV\\\\nNV\\\\nNV\\\\nNV\\\\nNV\\\\nNV\\\\nNV\\\\n'..."
    """
    return ascii(found[:30]) + ("..." if len(found) > 30 else "")
