"""The PCIe tree in the XML of NCCL and RCCL, with bandwidths from ``link_speed`` and ``link_width``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from tasp_lab.core.errors import TopologyError
from tasp_lab.core.units import parse_bandwidth_bytes_per_s
from tasp_lab.machines.importers.elements import Element
from tasp_lab.machines.importers.pcie import PCIE_BANDWIDTH, Branch, Leaf, PcieSurvey
from tasp_lab.machines.importers.survey import Given
from tasp_lab.machines.parameters import Constant

_PAYLOAD = {2.5: (8, 10), 5.0: (8, 10), 8.0: (128, 130), 16.0: (128, 130), 32.0: (128, 130), 64.0: (242, 256)}
"""For each speed in GT/s how many of how many bits carry data (PCI Express Base Specification 1.0 to 6.0)."""

_SPEED = re.compile(r"([0-9]{1,2}(?:\.[0-9])?) GT/s(?: PCIe)?")


def survey_pcie(system: Element, ranks: Mapping[tuple[str, str], int], given: Given) -> PcieSurvey:
    """The tree; `ranks` are by host and PCI bus id. Raises `TopologyError` for GPUs of more than one host."""
    if len({host for host, _ in ranks}) > 1:
        raise TopologyError(
            "GPUs of several hosts, which no PCIe joins; expected NVLink between all of them, or one host"
        )
    reader = _Reader(ranks, given)
    numa_nodes = [Branch("numa", reader.below(cpu, cpu.attributes.get("host_hash", ""))) for cpu in system.children]
    return PcieSurvey(tuple(numa_nodes), tuple(reader.constants.values()))


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


def _constant(device: Element, given: Given) -> Constant:
    """The bandwidth of the link above a device: to four digits what is left of speed times width after line coding."""
    speed = _SPEED.fullmatch(device.attributes.get("link_speed", ""))
    width = device.attributes.get("link_width", "")
    known = speed and float(speed[1]) in _PAYLOAD and re.fullmatch("[1-9][0-9]?", width)
    if given.pcie_bandwidth is not None or not speed or not known:
        return given.constant(PCIE_BANDWIDTH)
    data_bits, all_bits = _PAYLOAD[float(speed[1])]
    gigabytes_per_s = float(speed[1]) * int(width) * data_bits / all_bits / 8
    return Constant(
        f"pcie_bandwidth_{float(speed[1]):g}GTx{width}",
        f"{gigabytes_per_s:.4g}GB/s",
        f"link_speed and link_width in line {device.line}: {float(speed[1]):g} GT/s x {width} x {data_bits}/{all_bits} "
        "/ 8 bits each way",
    )
