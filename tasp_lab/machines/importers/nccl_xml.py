"""The XML that NCCL and RCCL write to the file that ``NCCL_TOPO_DUMP_FILE`` names.

``<system>`` holds a ``<cpu>`` per NUMA node; that nests ``<pci>``, each a PCIe switch or a device, and a device holds a
``<gpu>`` or a ``<nic>``. A GPU lists its ``<nvlink>`` or ``<xgmi>`` with a target and a count: cables to the GPU with
that PCI bus id, or links into NVSwitch, where ``tclass`` is that of a bridge. All NVSwitches count as one, as NCCL
counts them: a GPU spreads what it sends over all of them.

The bandwidth of a link is the line rate of the generation, which ``sm`` or ``gcn`` names. NCCL reaches less of it, and
how much less belongs to a library (NVIDIA/nccl 069a3d4f, src/graph/topo.h: 20.6 GB/s of the 25 of Hopper).
The bandwidth of PCIe comes from ``link_speed`` and ``link_width``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal, NoReturn
from xml.parsers import expat

from tasp_lab.core.errors import TopologyError
from tasp_lab.core.units import parse_bandwidth_bytes_per_s
from tasp_lab.machines.importers.survey import (
    LINK_GENERATIONS,
    NODE,
    PCIE_BANDWIDTH,
    SYS,
    Branch,
    Given,
    Leaf,
    Nics,
    Pair,
    PcieSurvey,
    Survey,
    nics_of,
    shown,
)
from tasp_lab.machines.parameters import Constant

DEEPEST = 64
"""Far more levels than a PCIe tree has."""


@dataclass(frozen=True)
class Element:
    """One element: its name, attributes and children, and the number of its line, counted from 1."""

    name: str
    attributes: Mapping[str, str]
    line: int
    children: list[Element] = field(default_factory=list)

    def refuse(self, found: str, expected: str) -> NoReturn:
        """Raise `TopologyError` for this element."""
        raise TopologyError(f"line {self.line}: <{shown(self.name)[1:-1]}> {found}, expected {expected}")

    def attribute(self, name: str, expected: str) -> str:
        """An attribute that must be there."""
        if name not in self.attributes:
            self.refuse(f"has no {name}", expected)
        return self.attributes[name]

    def check_children(self, *names: str) -> None:
        """Raise `TopologyError` for a child with another name."""
        for child in self.children:
            if child.name not in names:
                child.refuse(f"is in <{self.name}>", " or ".join(f"<{name}>" for name in names) or "nothing")


def read_elements(text: str) -> Element:
    """The root of the document.

    Elements keep their line for messages, which `xml.etree` does not. Nothing that could do harm is read: document
    types are refused, and with them entities, so that a text cannot grow while it is read; nothing is loaded from
    elsewhere; and elements nest no deeper than `DEEPEST`.

    >>> read_elements("<system><cpu numaid='0'/></system>").children[0].attributes
    {'numaid': '0'}

    Raises `TopologyError` where the text is not well-formed, has a document type, or nests too deep.
    """
    parser = expat.ParserCreate()
    top = Element("", {}, 0)
    open_elements = [top]

    def start(name: str, attributes: dict[str, str]) -> None:
        element = Element(name, attributes, parser.CurrentLineNumber)
        if len(open_elements) > DEEPEST:
            element.refuse("is nested too deep", f"at most {DEEPEST} levels")
        open_elements[-1].children.append(element)
        open_elements.append(element)

    def refuse_document_type(*_: object) -> NoReturn:
        raise TopologyError(f"line {parser.CurrentLineNumber}: a document type, expected XML without one")

    parser.StartElementHandler = start
    parser.EndElementHandler = lambda _: open_elements.pop()
    parser.StartDoctypeDeclHandler = refuse_document_type
    try:
        parser.Parse(text, True)
    except expat.ExpatError as error:
        raise TopologyError(
            f"line {error.lineno}: the XML is not well-formed: {expat.ErrorString(error.code)}"
        ) from error
    return top.children[0]


_PAYLOAD = {2.5: (8, 10), 5.0: (8, 10), 8.0: (128, 130), 16.0: (128, 130), 32.0: (128, 130), 64.0: (242, 256)}
"""For each speed in GT/s how many of how many bits carry data (PCI Express Base Specification 1.0 to 6.0)."""

_SPEED = re.compile(r"([0-9]{1,2}(?:\.[0-9])?) GT/s(?: PCIe)?")


def survey_pcie(system: Element, ranks: Mapping[tuple[str, str], int], options: Given) -> PcieSurvey:
    """The tree; `ranks` are by host and PCI bus id. Raises `TopologyError` for GPUs of more than one host."""
    if len({host for host, _ in ranks}) > 1:
        raise TopologyError(
            "GPUs of several hosts, which no PCIe joins; expected NVLink between all of them, or one host"
        )
    reader = _Reader(ranks, options)
    numa_nodes = [
        Branch("cpu", reader.below(cpu, cpu.attributes.get("host_hash", "")), number=_numa_number(cpu))
        for cpu in system.children
    ]
    return PcieSurvey(tuple(numa_nodes), "each <cpu> is one", tuple(reader.constants.values()))


def _numa_number(cpu: Element) -> int | None:
    """The number of the NUMA node; None where the system has none, as in virtual machines."""
    text = cpu.attributes.get("numaid", "")
    return int(text) if re.fullmatch("[0-9]{1,6}", text) else None


@dataclass(frozen=True)
class _Reader:
    """Turns elements into branches, and collects the constants that their bandwidths come from."""

    ranks: Mapping[tuple[str, str], int]
    given: Given
    constants: dict[str, Constant] = field(default_factory=dict)

    def below(self, element: Element, host: str) -> tuple[Branch | Leaf, ...]:
        """GPUs and switches right below an element; NICs are none of them."""
        parts = (self._part(device, host) for device in element.children if device.name == "pci")
        return tuple(part for part in parts if part is not None)

    def _part(self, device: Element, host: str) -> Branch | Leaf | None:
        holds = {child.name for child in device.children}
        if not holds & {"pci", "gpu"}:
            return None
        constant = _constant(device, self.given)
        self.constants.setdefault(constant.name, constant)
        bandwidth_bytes_per_s = parse_bandwidth_bytes_per_s(constant.value)
        if "gpu" in holds:
            return Leaf(self.ranks[host, device.attributes["busid"].lower()], bandwidth_bytes_per_s)
        return Branch("pcie", self.below(device, host), bandwidth_bytes_per_s)


def _constant(device: Element, options: Given) -> Constant:
    """The bandwidth of the link above a device: to four digits what is left of speed times width after line coding."""
    speed = _SPEED.fullmatch(device.attributes.get("link_speed", ""))
    width = device.attributes.get("link_width", "")
    known = speed and float(speed[1]) in _PAYLOAD and re.fullmatch("[1-9][0-9]?", width)
    if options.pcie_bandwidth is not None or not speed or not known:
        return options.constant(PCIE_BANDWIDTH)
    data_bits, all_bits = _PAYLOAD[float(speed[1])]
    gigabytes_per_s = float(speed[1]) * int(width) * data_bits / all_bits / 8
    return Constant(
        f"pcie_bandwidth_{float(speed[1]):g}GTx{width}",
        f"{gigabytes_per_s:.4g}GB/s",
        f"link_speed and link_width in line {device.line}: {float(speed[1]):g} GT/s x {width} x {data_bits}/{all_bits} "
        "/ 8 bits each way",
    )


_NVSWITCH, _CPU = "0x068000", "0x068001"


@dataclass(frozen=True)
class _Gpu:
    """A GPU, the device it is, and the host it is in; a dump may hold several hosts that share an NVLink domain."""

    element: Element
    bus_id: str
    host: str


def read(text: str, options: Given) -> Survey:
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
        link_bandwidth=_link_bandwidth(gpus, fabric, options) if cables or len(ports) > 1 else None,
        pcie=lambda: survey_pcie(system, ranks, options),
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
            if peer == rank:
                link.refuse(f"is a link to itself, {shown(gpu.bus_id)}", "links to another GPU")
            if peer is not None:
                counts[rank, peer] = counts.get((rank, peer), 0) + count
            elif link.attributes.get("tclass", "").startswith(_NVSWITCH):
                ports[rank] = ports.get(rank, 0) + count
            else:
                _refuse_target(link)
    for (a, b), count in counts.items():
        if counts.get((b, a), 0) != count:
            gpus[a].element.refuse(
                f"has {count} links to {shown(gpus[b].bus_id)} and {counts.get((b, a), 0)} back", "as many as back"
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


def _link_bandwidth(gpus: Sequence[_Gpu], fabric: Literal["NVLink", "xGMI"], options: Given) -> Constant:
    """The line rate of one link of the generation that all GPUs share."""
    attribute, prefix = ("sm", "sm ") if fabric == "NVLink" else ("gcn", "gfx")
    if options.link_bandwidth is not None:
        return options.constant(Constant("link_bandwidth", "", ""))
    generations: dict[str, Element] = {}
    for gpu in gpus:
        name = gpu.element.attributes.get(attribute, "").removeprefix("gfx").partition(":")[0]
        generations.setdefault(name, gpu.element)
    for name, element in generations.items():
        if prefix + name not in LINK_GENERATIONS:
            known = [each.removeprefix(prefix) for each in LINK_GENERATIONS if each.startswith(prefix)]
            element.refuse(
                f"has {attribute} {shown(name)}, whose {fabric} bandwidth is not known here",
                f"{attribute} {', '.join(known)}, or link_bandwidth given to the import",
            )
    if len({LINK_GENERATIONS[prefix + name].bandwidth for name in generations}) > 1:
        raise TopologyError(
            f"GPUs with {attribute} {' and '.join(generations)}, expected GPUs with links of one bandwidth"
        )
    (name, element), *_ = generations.items()
    generation = LINK_GENERATIONS[prefix + name]
    source = f"{attribute} {name} in line {element.line}: {generation.link}, {generation.source}, each way"
    return Constant("link_bandwidth", generation.bandwidth, source)


def _nics_of_gpus(system: Element, gpus: Sequence[_Gpu]) -> Nics:
    """The NICs that GPUs use: the more of the PCIe tree two devices have in common, the nearer they are."""
    ways = dict(_ways(system, ()))
    of_gpus = [ways[id(gpu.element)][1] for gpu in gpus]
    nets = [(element, way) for element, way in ways.values() if element.name == "net"]

    def level(gpu: tuple[int, ...], nic: tuple[int, ...]) -> int:
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(gpu, nic, strict=False)))
        return -common if common > 1 else NODE if common else SYS  # the CPU alone, or not even that

    names = [net.attributes.get("name", f"line {net.line}") for net, _ in nets]
    levels = [[level(gpu, way) for _, way in nets] for gpu in of_gpus]
    return nics_of(names, levels, [_gbit_per_s(net) for net, _ in nets])


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
