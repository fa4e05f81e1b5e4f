"""Machines from surveys: links with bandwidths and latencies, and the constants behind them.

Parallel links between two GPUs become one link with the sum of their bandwidths, as do all links of a GPU to a switch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tasp_lab.core.errors import TopologyError
from tasp_lab.core.units import format_bandwidth, parse_bandwidth_bytes_per_s, parse_time_s
from tasp_lab.machines.importers.pcie import pcie_links, pcie_switches, without_idle
from tasp_lab.machines.importers.survey import Given, Survey
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.parameters import Constant, Parameters
from tasp_lab.topology.expressions import MAX_WORLD_SIZE
from tasp_lab.topology.graph import Link, Switch, Topology, both_ways

_LINK_LATENCY = {
    "NVLink": Constant(
        "link_latency",
        "0.6us",
        "from rank to rank: NVIDIA/nccl 5067397c, src/graph/tuning.cc, hwLat for NVLink, Ring, LL: 0.6 us per hop; the "
        "protocol that adds least to the wire",
    ),
    "xGMI": Constant(
        "link_latency",
        "0.8us",
        "from rank to rank, as for MI300X: ROCm/rccl 9e22c79d, src/graph/tuning.cc, tuning_model_5, hwLat for the GPU "
        "link, Ring, LL: 0.8 us per hop; the protocol that adds least to the wire",
    ),
}
_PCIE_LATENCY = Constant(
    "pcie_latency",
    "1us",
    "from rank to rank, whatever is between: NVIDIA/nccl 5067397c, src/graph/tuning.cc, hwLat for PCI, Ring, LL: "
    "1.0 us per hop; the protocol that adds least to the wire",
)
_CPU_BANDWIDTH = Constant(
    "cpu_bandwidth",
    "22GB/s",
    "assumption, as the tool does not print it: what NCCL counts between two Sapphire Rapids sockets (NVIDIA/nccl "
    "069a3d4f, src/graph/topo.h, SRP_QPI_BW; 6 to 40 GB/s for other CPUs)",
)


def assemble(survey: Survey, name: str, given: Given) -> Machine:
    """The machine. Raises `TopologyError` if it has too many GPUs, or if it falls apart without PCIe."""
    if survey.gpu_count > MAX_WORLD_SIZE:
        raise TopologyError(f"{survey.gpu_count} GPUs, expected at most {MAX_WORLD_SIZE}")
    links, constants = list(_fabric_links(survey)), list(_fabric_constants(survey))
    ends = dict.fromkeys(link.destination for link in links)
    switches = [Switch(name, "node") for name in ends if isinstance(name, str)]
    has_pcie = survey.gpu_count > 1 and (not survey.is_joined if given.pcie is None else given.pcie)
    if has_pcie:
        pcie, cpu = survey.pcie(), given.constant(_CPU_BANDWIDTH)
        roots = without_idle(pcie.numa_nodes)
        links += pcie_links(roots, parse_bandwidth_bytes_per_s(cpu.value), parse_time_s(_PCIE_LATENCY.value))
        switches += pcie_switches(roots)
        constants += [*pcie.constants, _PCIE_LATENCY, *([cpu] if len(roots) > 1 else [])]
    for word in ("link_bandwidth", "pcie_bandwidth", "cpu_bandwidth"):
        if getattr(given, word) is not None and word not in {constant.name for constant in constants}:
            raise TopologyError(f"{word} was given, but the machine has no link that it is of")
    topology = Topology(name, survey.gpu_count, tuple(links), switches=tuple(switches))
    return Machine(topology, summary=_summary(survey, has_pcie), parameters=Parameters.of_constants(constants))


def _fabric_links(survey: Survey) -> Iterator[Link]:
    if survey.link_bandwidth is None:
        return
    bandwidth_bytes_per_s = parse_bandwidth_bytes_per_s(survey.link_bandwidth.value)
    latency_s = parse_time_s(_LINK_LATENCY[survey.fabric].value)
    for (a, b), count in survey.cables.items():
        yield from both_ways(a, b, count * bandwidth_bytes_per_s, latency_s)
    for index, ports in enumerate(survey.switches):
        name = f"nvswitch{index}" if len(survey.switches) > 1 else "nvswitch"
        for rank, count in ports.items():
            yield from both_ways(rank, name, count * bandwidth_bytes_per_s, latency_s / 2)


def _fabric_constants(survey: Survey) -> Iterator[Constant]:
    yield Constant("wiring", _wiring(survey), f"{survey.tool}, {survey.lines}: {survey.wiring_source}")
    if survey.link_bandwidth is not None:
        yield survey.link_bandwidth
        yield _LINK_LATENCY[survey.fabric]


def _wiring(survey: Survey) -> str:
    """How many GPUs have how many links, and to where, like ``NVLink: 8 GPUs with 18 links each into a switch``."""
    parts = []
    for ports in survey.switches:
        counts = Counter(ports.values())
        parts += [
            f"{_many(gpus, 'GPU')} with {_many(links, 'link')} each into a switch" for links, gpus in counts.items()
        ]
    for links, pairs in Counter(survey.cables.values()).items():
        parts.append(f"{_many(pairs, 'pair')} of GPUs with {_many(links, 'link')}")
    return f"{survey.fabric}: {', '.join(parts) or 'none'}"


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _summary(survey: Survey, has_pcie: bool) -> str:
    wiring = _wiring(survey)
    if survey.link_bandwidth is not None:
        each_way = format_bandwidth(parse_bandwidth_bytes_per_s(survey.link_bandwidth.value))
        wiring += f", {each_way} each way per link"
    nics = "" if survey.nic_count is None else f" ({survey.nic_count} in the file)"
    return (
        f"{_many(survey.gpu_count, 'GPU')}, imported from {survey.tool}; {wiring}; "
        f"PCIe {_pcie_remark(survey, has_pcie)}; "
        f"NICs{nics} left out, as one machine does not show the network behind them"
    )


def _pcie_remark(survey: Survey, has_pcie: bool) -> str:
    if has_pcie:
        return "included"
    if survey.is_complete:
        return f"left out, as {survey.fabric} joins all pairs" if survey.gpu_count > 1 else "left out"
    return f"left out, as {survey.fabric} joins all GPUs, though not all pairs"
