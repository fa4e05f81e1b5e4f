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
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NoReturn
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
    Nics,
    PcieSurvey,
    Survey,
    nics_of,
    shown,
)
from tasp_lab.machines.parameters import Constant

DEEPEST = 64
"""Far more levels than a PCIe tree has."""

_CHILDREN = {
    "system": ("cpu",),
    "cpu": ("pci", "nic"),
    "pci": ("pci", "gpu", "nic", "pcilink"),
    "gpu": ("nvlink", "xgmi", "c2c"),
}
"""What may be in an element: anything else may carry data in a way unknown here. What a NIC holds is not looked at."""

_NVSWITCH, _CPU = "0x068000", "0x068001"


@dataclass(frozen=True, eq=False)
class Element:
    """One element: its name, attributes and children, the line in which it begins, and the elements around it.

    Lines are counted from 1; `around` begins with the root.
    """

    name: str
    attributes: Mapping[str, str]
    line: int
    around: Sequence[Element] = ()
    children: list[Element] = field(default_factory=list)

    def refuse(self, found: str, expected: str) -> NoReturn:
        """Raise `TopologyError` for this element."""
        raise TopologyError(f"line {self.line}: <{shown(self.name)[1:-1]}> {found}, expected {expected}")

    def attribute(self, name: str, expected: str) -> str:
        """An attribute that must be there."""
        if name not in self.attributes:
            self.refuse(f"has no {name}", expected)
        return self.attributes[name]

    def whole_number(self, name: str, expected: str, least: int = 0) -> int:
        """An attribute that must be a whole number; `expected` is what a missing one should be."""
        text = self.attribute(name, expected)
        if not re.fullmatch("[0-9]{1,6}", text) or int(text) < least:
            self.refuse(f"has {name} {shown(text)}", "a whole number" + f", {least} or more" * bool(least))
        return int(text)

    def below(self, *through: str) -> Iterator[Element]:
        """The elements below this one, in their order; those inside others only where these have one of the names."""
        for child in self.children:
            yield child
            if not through or child.name in through:
                yield from child.below(*through)

    @property
    def address(self) -> tuple[str, str]:
        """The host and the PCI bus id of a GPU; a dump may hold several hosts that share an NVLink domain."""
        bus_id = self.around[-1].attribute("busid", "the PCI bus id of the GPU").lower()
        return self.around[1].attributes.get("host_hash", ""), bus_id

    @property
    def links(self) -> list[Element]:
        """The links of a GPU, without that to its own CPU."""
        return [child for child in self.children if child.name != "c2c"]


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
        element = Element(name, attributes, parser.CurrentLineNumber, tuple(open_elements[1:]))
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


def read(text: str, options: Given) -> Survey:
    """What the XML says. Raises `TopologyError` that names the line where it is no such XML."""
    system = read_elements(text)
    if system.name != "system":
        system.refuse("is the root", "<system>, as in the file that NCCL_TOPO_DUMP_FILE names")
    if (version := system.attribute("version", "version 1 (NCCL) or 2 (RCCL)")) not in ("1", "2"):
        system.refuse(f"has version {shown(version)}", "version 1 (NCCL) or 2 (RCCL)")
    for element in (system, *system.below("cpu", "pci")):
        for child in element.children if element.name in _CHILDREN else ():
            if child.name not in _CHILDREN[element.name]:
                names = " or ".join(f"<{name}>" for name in _CHILDREN[element.name])
                child.refuse(f"is in <{element.name}>", names)
        if element.name == "pci" and {"gpu", "pci"} <= {child.name for child in element.children}:
            element.refuse("holds both a GPU and other PCI devices", "a switch or a device")
    gpus = _in_order_of_ranks([each for each in system.below("cpu", "pci") if each.name == "gpu"])
    ranks = {gpu.address: rank for rank, gpu in enumerate(gpus)}
    if not gpus:
        raise TopologyError(
            "the XML has no <gpu>, expected the dump of a run: a file made for NCCL_TOPO_FILE may have none"
        )
    if len(ranks) < len(gpus):
        raise TopologyError("two <gpu> have the same busid, expected one GPU per device")
    kinds = {link.name for gpu in gpus for link in gpu.links}
    if len(kinds) > 1:
        raise TopologyError("the XML has <nvlink> and <xgmi>, expected GPUs of one vendor")
    is_amd = kinds == {"xgmi"} or any("gcn" in gpu.attributes for gpu in gpus)
    cables, ports = _wiring(gpus, ranks)
    nets = [each for each in system.below() if each.name == "net"]
    return Survey(
        tool="the XML of RCCL" if is_amd else "the XML of NCCL",
        lines=f"lines {system.line} to {len(text.splitlines())}",
        fabric="xGMI" if is_amd else "NVLink",
        gpu_count=len(gpus),
        cables=cables,
        switches=(ports,) if len(ports) > 1 else (),
        wiring_source="links to a GPU are cables, links to a device of class 0x068000 end in NVSwitch",
        link_bandwidth=_link_bandwidth(gpus, is_amd, options) if cables or len(ports) > 1 else None,
        pcie=lambda: _pcie(system, ranks, options),
        nic_count=len(nets),
        nics=_nics(gpus, nets),
    )


def _in_order_of_ranks(gpus: Sequence[Element]) -> Sequence[Element]:
    """By the ranks that the GPUs have in the file, if all have one; they need not begin with 0."""
    rank_of: dict[int, Element] = {}
    for gpu in gpus:
        if "rank" not in gpu.attributes:
            return gpus
        rank = gpu.whole_number("rank", "a rank")
        if rank in rank_of:
            gpu.refuse(f"has rank {rank} as that of line {rank_of[rank].line}", "ranks that differ")
        rank_of[rank] = gpu
    return [rank_of[rank] for rank in sorted(rank_of)]


def _wiring(
    gpus: Sequence[Element], ranks: Mapping[tuple[str, str], int]
) -> tuple[dict[tuple[int, int], int], dict[int, int]]:
    """The cables, and how many links each GPU has into NVSwitch."""
    counts: Counter[tuple[int, int]] = Counter()
    ports: Counter[int] = Counter()
    for rank, gpu in enumerate(gpus):
        host, bus_id = gpu.address
        for link in gpu.links:
            count = link.whole_number("count", "the number of links", least=1)
            target = link.attribute("target", "a PCI bus id")
            peer, end = ranks.get((host, target.lower())), link.attributes.get("tclass", "")
            if peer == rank:
                link.refuse(f"is a link to itself, {shown(bus_id)}", "links to another GPU")
            elif peer is not None:
                counts[rank, peer] += count
            elif end.startswith(_NVSWITCH):
                ports[rank] += count
            elif end.startswith(_CPU):
                link.refuse(f"leads to a CPU, {shown(target)}", "links between GPUs or to NVSwitch only")
            else:
                link.refuse(
                    f"leads to {shown(target)}, which is no GPU of this file",
                    f"one, or tclass {_NVSWITCH} of NVSwitch; a run on some of the GPUs dumps links to all: dump one "
                    "on all, or remove such links",
                )
    for (a, b), count in counts.items():
        if counts[b, a] != count:
            there = f"has {count} links to {shown(gpus[b].address[1])} and {counts[b, a]} back"
            gpus[a].refuse(there, "as many as back")
    return {pair: count for pair, count in counts.items() if pair[0] < pair[1]}, dict(ports)


def _link_bandwidth(gpus: Sequence[Element], is_amd: bool, options: Given) -> Constant:
    """The line rate of one link of the generation that all GPUs share."""
    if options.link_bandwidth is not None:
        return options.constant(Constant("link_bandwidth", "", ""))
    attribute, prefix = ("gcn", "gfx") if is_amd else ("sm", "sm ")
    first_of: dict[str, Element] = {}
    for gpu in gpus:
        name = gpu.attributes.get(attribute, "").removeprefix("gfx").partition(":")[0]
        if prefix + name not in LINK_GENERATIONS:
            known = [each.removeprefix(prefix) for each in LINK_GENERATIONS if each.startswith(prefix)]
            gpu.refuse(
                f"has {attribute} {shown(name)}, whose {'xGMI' if is_amd else 'NVLink'} bandwidth is not known here",
                f"{attribute} {', '.join(known)}, or link_bandwidth given to the import",
            )
        first_of.setdefault(name, gpu)
    generations = [LINK_GENERATIONS[prefix + name] for name in first_of]
    if len({each.bandwidth for each in generations}) > 1:
        raise TopologyError(
            f"GPUs with {attribute} {' and '.join(first_of)}, expected GPUs with links of one bandwidth"
        )
    (name, gpu), *_ = first_of.items()
    source = f"{attribute} {name} in line {gpu.line}: {generations[0].link}, {generations[0].source}, each way"
    return Constant("link_bandwidth", generations[0].bandwidth, source)


_PAYLOAD = {2.5: (8, 10), 5.0: (8, 10), 8.0: (128, 130), 16.0: (128, 130), 32.0: (128, 130), 64.0: (242, 256)}
"""For each speed in GT/s how many of how many bits carry data (PCI Express Base Specification 1.0 to 6.0)."""

_SPEED = re.compile(r"([0-9]{1,2}(?:\.[0-9])?) GT/s(?: PCIe)?")


def _pcie(system: Element, ranks: Mapping[tuple[str, str], int], options: Given) -> PcieSurvey:
    """The tree; `ranks` are by host and PCI bus id. Raises `TopologyError` for GPUs of more than one host."""
    if len({host for host, _ in ranks}) > 1:
        raise TopologyError(
            "GPUs of several hosts, which no PCIe joins; expected NVLink between all of them, or one host"
        )
    constants: dict[str, Constant] = {}

    def below(element: Element) -> Iterator[Branch]:
        """The GPUs and switches right below an element; NICs are none of them."""
        for device in element.children:
            gpu = next((child for child in device.children if child.name == "gpu"), None)
            if device.name != "pci" or not (gpu or any(child.name == "pci" for child in device.children)):
                continue
            constant = _pcie_bandwidth(device, options)
            constants.setdefault(constant.name, constant)
            bandwidth_bytes_per_s = parse_bandwidth_bytes_per_s(constant.value)
            if gpu:
                yield Branch("gpu", (), bandwidth_bytes_per_s, ranks[gpu.address])
            else:
                yield Branch("pcie", tuple(below(device)), bandwidth_bytes_per_s)

    numa_nodes = []
    for cpu in system.children:
        number = cpu.attributes.get("numaid", "")  # virtual machines have -1, or none
        known = int(number) if re.fullmatch("[0-9]{1,6}", number) else None
        numa_nodes.append(Branch("cpu", tuple(below(cpu)), number=known))
    return PcieSurvey(numa_nodes, "each <cpu> is one", tuple(constants.values()))


def _pcie_bandwidth(device: Element, options: Given) -> Constant:
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


def _nics(gpus: Sequence[Element], nets: Sequence[Element]) -> Nics:
    """The NICs that GPUs use: the more of the PCIe tree two devices have in common, the nearer they are."""

    def way(device: Element) -> list[Element]:
        return [element for element in device.around if element.name in ("cpu", "pci")]

    def level(gpu: Element, net: Element) -> int:
        common = sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], zip(way(gpu), way(net), strict=False)))
        return -common if common > 1 else NODE if common else SYS  # the CPU alone, or not even that

    # the speed of a NIC is in Mbit/s in the file
    speeds = [net.attributes.get("speed", "") for net in nets]
    gbit_per_s = [int(speed) / 1000 if re.fullmatch("[1-9][0-9]{0,8}", speed) else None for speed in speeds]
    names = [net.attributes.get("name", f"line {net.line}") for net in nets]
    return nics_of(names, [[level(gpu, net) for net in nets] for gpu in gpus], gbit_per_s)
