"""The XML that NCCL and RCCL write to the file that ``NCCL_TOPO_DUMP_FILE`` names.

``<system>`` holds a ``<cpu>`` per NUMA node; that nests ``<pci>``, each a PCIe switch or a device, and a device holds a
``<gpu>`` or a ``<nic>``. A GPU lists its ``<nvlink>`` or ``<xgmi>`` with a target and a count: cables to the GPU with
that PCI bus id, or links into NVSwitch, where ``tclass`` is that of a bridge. All NVSwitches count as one, as NCCL
counts them: a GPU spreads what it sends over all of them.

The bandwidth of a link is the line rate of the generation, which ``sm`` or ``gcn`` names. NCCL reaches less of it, and
how much less belongs to a library (NVIDIA/nccl 069a3d4f, src/graph/topo.h: 20.6 GB/s of the 25 of Hopper).
PCIe is read by `tasp_lab.machines.importers.nccl_pcie`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal, NoReturn

from tasp_lab.core.errors import TopologyError
from tasp_lab.machines.importers.elements import Element, read_elements
from tasp_lab.machines.importers.nccl_pcie import survey_pcie
from tasp_lab.machines.importers.survey import Given, Nic, Pair, Survey, nics_of, shown
from tasp_lab.machines.parameters import Constant

_NVLINK_RATES = {
    "60": ("20GB/s", "NVLink 1 (NVIDIA Tesla P100 white paper: 4 links, 160 GB/s both ways)"),
    "70": ("25GB/s", "NVLink 2 (NVIDIA Tesla V100 white paper: 6 links, 300 GB/s both ways)"),
    "80": ("25GB/s", "NVLink 3 (NVIDIA A100 white paper: 12 links, 600 GB/s both ways)"),
    "86": ("14.0625GB/s", "NVLink 3 of GA102 (NVIDIA Ampere GA102 white paper: 14.0625 GB/s in each direction)"),
    "90": ("25GB/s", "NVLink 4 (18 links, 450 GB/s: stated by an NCCL maintainer in NVIDIA/nccl-tests#212)"),
    "100": ("50GB/s", "NVLink 5 (NVIDIA NVLink page: 18 links, 1.8 TB/s both ways)"),
    "103": ("50GB/s", "NVLink 5 (NVIDIA NVLink page: 18 links, 1.8 TB/s both ways)"),
}
_XGMI_RATES = {
    "908": ("46GB/s", "raw rate of xGMI of MI100: 16 lanes of 23 GT/s (ROCm documentation, MI100 microarchitecture)"),
    "90a": ("50GB/s", "raw rate of xGMI of MI200: 16 lanes of 25 GT/s (ROCm documentation, MI250 microarchitecture)"),
    "942": (
        "64GB/s",
        "raw rate of xGMI of MI300 (Kolla, Alizadeh, Lee, 'Understanding RCCL Bandwidth and xGMI Performance on AMD "
        "Instinct MI300X', 2025-03-02, "
        "https://rocm.blogs.amd.com/software-tools-optimization/mi300x-rccl-xgmi/README.html)",
    ),
}
_OLD_GCN = {"910": "90a", "940": "942", "941": "942"}
"""Names of generations as older RCCL writes them, and early steppings of MI300."""

_NVSWITCH, _CPU = "0x068000", "0x068001"


@dataclass(frozen=True)
class _Gpu:
    """A GPU, the device it is, and the host it is in; a dump may hold several hosts that share an NVLink domain."""

    element: Element
    bus_id: str
    host: str


def read(text: str, given: Given) -> Survey:
    """What the XML says. Raises `TopologyError` that names the line where it is no such XML."""
    system = read_elements(text)
    _check_system(system)
    gpus = _in_order_of_ranks(
        [gpu for cpu in system.children for gpu in _gpus(cpu, cpu.attributes.get("host_hash", ""))]
    )
    ranks = {(gpu.host, gpu.bus_id): rank for rank, gpu in enumerate(gpus)}
    if not gpus:
        raise TopologyError(
            "the XML has no <gpu>, expected the dump of a run: a file made for NCCL_TOPO_FILE may have none"
        )
    if len(ranks) < len(gpus):
        raise TopologyError("two <gpu> have the same busid, expected one GPU per device")
    fabric = _fabric(gpus)
    cables, ports = _wiring(gpus, ranks)
    return Survey(
        tool="the XML of NCCL" if fabric == "NVLink" else "the XML of RCCL",
        lines=f"lines {system.line} to {len(text.splitlines())}",
        fabric=fabric,
        gpu_count=len(gpus),
        cables=cables,
        switches=(ports,) if len(ports) > 1 else (),
        wiring_source="links to a GPU are cables, links to a device of class 0x068000 end in NVSwitch",
        link_bandwidth=_link_bandwidth(gpus, fabric, given) if cables or len(ports) > 1 else None,
        pcie=lambda: survey_pcie(system, ranks, given),
        nic_count=sum(_nics(cpu) for cpu in system.children),
        nics=_nics_of_gpus(system, gpus),
    )


def _check_system(system: Element) -> None:
    if system.name != "system":
        system.refuse("is the root", "<system>, as in the file that NCCL_TOPO_DUMP_FILE names")
    version = system.attribute("version", "version 1 (NCCL) or 2 (RCCL)")
    if version not in ("1", "2"):
        system.refuse(f"has version {shown(version)}", "version 1 (NCCL) or 2 (RCCL)")
    system.check_children("cpu")
    for cpu in system.children:
        cpu.check_children("pci", "nic")
        for child in cpu.children:
            _check_device(child)


def _check_device(device: Element) -> None:
    """Refuse what may carry data in a way unknown here; what a NIC holds is not looked at."""
    if device.name == "nic":
        return
    device.check_children("pci", "gpu", "nic", "pcilink")
    names = {child.name for child in device.children}
    if {"gpu", "pci"} <= names:
        device.refuse("holds both a GPU and other PCI devices", "a switch or a device")
    for child in device.children:
        if child.name == "pci":
            _check_device(child)
        elif child.name == "gpu":
            child.check_children("nvlink", "xgmi", "c2c")


def _gpus(element: Element, host: str) -> Iterator[_Gpu]:
    for child in element.children:
        if child.name == "pci":
            yield from _gpus(child, host)
        elif child.name == "gpu":
            yield _Gpu(child, element.attribute("busid", "the PCI bus id of the GPU").lower(), host)


def _in_order_of_ranks(gpus: Sequence[_Gpu]) -> list[_Gpu]:
    """By the ranks that the GPUs have in the file, if all have one; they need not begin with 0."""
    rank_of: dict[int, _Gpu] = {}
    for gpu in gpus:
        text = gpu.element.attributes.get("rank")
        if text is None:
            return list(gpus)
        rank = _whole_number(gpu.element, "rank", text)
        if rank in rank_of:
            gpu.element.refuse(f"has rank {rank} as that of line {rank_of[rank].element.line}", "ranks that differ")
        rank_of[rank] = gpu
    return [rank_of[rank] for rank in sorted(rank_of)]


def _fabric(gpus: Sequence[_Gpu]) -> Literal["NVLink", "xGMI"]:
    names = {link.name for gpu in gpus for link in _links(gpu)}
    if len(names) > 1:
        raise TopologyError("the XML has <nvlink> and <xgmi>, expected GPUs of one vendor")
    return "xGMI" if names == {"xgmi"} or any("gcn" in gpu.element.attributes for gpu in gpus) else "NVLink"


def _links(gpu: _Gpu) -> list[Element]:
    return [child for child in gpu.element.children if child.name != "c2c"]


def _wiring(gpus: Sequence[_Gpu], ranks: Mapping[tuple[str, str], int]) -> tuple[dict[Pair, int], dict[int, int]]:
    """The cables, and how many links each GPU has into NVSwitch."""
    counts: dict[tuple[int, int], int] = {}
    ports: dict[int, int] = {}
    for rank, gpu in enumerate(gpus):
        for link in _links(gpu):
            count = _whole_number(link, "count", link.attribute("count", "the number of links"))
            peer = ranks.get((gpu.host, link.attribute("target", "a PCI bus id").lower()))
            if peer is not None:
                counts[rank, peer] = counts.get((rank, peer), 0) + count
            elif link.attributes.get("tclass", "").startswith(_NVSWITCH):
                ports[rank] = ports.get(rank, 0) + count
            else:
                _refuse_target(link)
    for (a, b), count in counts.items():
        if a == b or counts.get((b, a), 0) != count:
            gpus[a].element.refuse(
                f"has {count} links to {shown(gpus[b].bus_id)} and {counts.get((b, a), 0)} back",
                "links to another GPU, as many as back",
            )
    return {pair: count for pair, count in counts.items() if pair[0] < pair[1]}, ports


def _refuse_target(link: Element) -> NoReturn:
    target = shown(link.attributes["target"])
    if link.attributes.get("tclass", "").startswith(_CPU):
        link.refuse(f"leads to a CPU, {target}", "links between GPUs or to NVSwitch only")
    link.refuse(
        f"leads to {target}, which is no GPU of this file",
        f"one, or tclass {_NVSWITCH} of NVSwitch; a run on some of the GPUs dumps links to all: dump one on all, or "
        "remove such links",
    )


def _whole_number(element: Element, name: str, text: str) -> int:
    if not re.fullmatch("[0-9]{1,6}", text) or (name == "count" and int(text) == 0):
        element.refuse(f"has {name} {shown(text)}", "a whole number" + (", 1 or more" if name == "count" else ""))
    return int(text)


def _link_bandwidth(gpus: Sequence[_Gpu], fabric: Literal["NVLink", "xGMI"], given: Given) -> Constant:
    """The line rate of one link of the generation that all GPUs share."""
    attribute, rates = ("sm", _NVLINK_RATES) if fabric == "NVLink" else ("gcn", _XGMI_RATES)
    if given.link_bandwidth is not None:
        return given.constant(Constant("link_bandwidth", "", ""))
    found: dict[str, Element] = {}
    for gpu in gpus:
        name = gpu.element.attributes.get(attribute, "").removeprefix("gfx")
        found.setdefault(_OLD_GCN.get(name, name), gpu.element)
    for name, element in found.items():
        if name not in rates:
            element.refuse(
                f"has {attribute} {shown(name)}, whose {fabric} bandwidth is not known here",
                f"{attribute} {', '.join(rates)}, or link_bandwidth given to the import",
            )
    if len({rates[name][0] for name in found}) > 1:
        raise TopologyError(f"GPUs with {attribute} {' and '.join(found)}, expected GPUs with links of one bandwidth")
    (name, element), *_ = found.items()
    value, source = rates[name]
    return Constant("link_bandwidth", value, f"{attribute} {name} in line {element.line}: {source}, each way")


def _nics_of_gpus(system: Element, gpus: Sequence[_Gpu]) -> tuple[Nic, ...]:
    """The NICs that GPUs use: those with which they have most of the PCIe tree in common."""
    ways = dict(_ways(system, ()))
    of_gpus = [ways[id(gpu.element)][1] for gpu in gpus]
    nets = [(element, way) for element, way in ways.values() if element.name == "net"]

    def distance(rank: int, nic: int) -> int:
        pairs = zip(of_gpus[rank], nets[nic][1], strict=False)
        return -sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    names = [net.attributes.get("name", f"line {net.line}") for net, _ in nets]
    return nics_of(len(gpus), names, distance, [_gbit_per_s(net) for net, _ in nets])


def _ways(element: Element, way: tuple[int, ...]) -> Iterator[tuple[int, tuple[Element, tuple[int, ...]]]]:
    """All GPUs and NICs below an element, by identity, with their way down the tree."""
    for child in element.children:
        if child.name in ("gpu", "net"):
            yield id(child), (child, way)
        yield from _ways(child, (*way, child.line) if child.name in ("cpu", "pci") else way)


def _gbit_per_s(net: Element) -> float | None:
    """The speed of a NIC, which is in Mbit/s in the file; None if it is not known."""
    speed = net.attributes.get("speed", "")
    return int(speed) / 1000 if re.fullmatch("[1-9][0-9]{0,8}", speed) else None


def _nics(element: Element) -> int:
    return sum((child.name == "net") + _nics(child) for child in element.children)
