"""Machines from surveys: links with bandwidths and latencies, and the constants behind them.

Parallel links between two GPUs become one link with the sum of their bandwidths, as do all links of a GPU to a switch.

With a family (`of_family`), the machine has the family's library, kernels and constants. The wiring must be that of the
family's machines: each GPU with as many links into one switch, or as many cables between any two GPUs. What the file
tells of bandwidths replaces the family's constants.

A GPU uses the NICs that the survey gives it. On one node NICs lead to networks that nothing else is on; on several
nodes they meet in one network or, with rails, NICs of one local rank in a switch of their own, and these in a spine.
GPUs that share NICs share their bandwidth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from tasp_lab.core.errors import ProfileError, TopologyError
from tasp_lab.core.units import format_bandwidth, parse_bandwidth_bytes_per_s, parse_time_s
from tasp_lab.machines.constants import CONSTANTS
from tasp_lab.machines.importers.survey import Branch, Given, Nic, PcieSurvey, Survey, groups, in_sockets, pcie_parts
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.parameters import Constant, Parameters
from tasp_lab.machines.profile import Profile, load_profile
from tasp_lab.topology.expressions import MAX_WORLD_SIZE
from tasp_lab.topology.graph import Link, SharedCapacity, Switch, Topology, both_ways

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
    "069a3d4f, src/graph/topo.h, SRP_QPI_BW; 6 to 40 GB/s for other CPUs); --cpu-bandwidth of the import changes it",
)


def assemble(survey: Survey, name: str, options: Given) -> Machine:
    """The machine. Raises `TopologyError` if it has too many GPUs, or if it falls apart without PCIe."""
    if survey.gpu_count > MAX_WORLD_SIZE:
        raise TopologyError(f"{survey.gpu_count} GPUs, expected at most {MAX_WORLD_SIZE}")
    wiring, links = _wiring(survey), list[Link]()
    constants = [Constant("wiring", wiring, f"{survey.tool}, {survey.lines}: {survey.wiring_source}")]
    if survey.link_bandwidth is not None:
        latency = _LINK_LATENCY[survey.fabric]
        constants += [survey.link_bandwidth, latency]
        rate, latency_s = parse_bandwidth_bytes_per_s(survey.link_bandwidth.value), parse_time_s(latency.value)
        wiring += f", {format_bandwidth(rate)} each way per link"
        for (a, b), count in survey.cables.items():
            links += both_ways(a, b, count * rate, latency_s)
        for index, ports in enumerate(survey.switches):
            switch = f"nvswitch{index}" if len(survey.switches) > 1 else "nvswitch"
            for rank, count in ports.items():
                links += both_ways(rank, switch, count * rate, latency_s / 2)
    ends = dict.fromkeys(link.destination for link in links)
    switches = [Switch(end, "node") for end in ends if isinstance(end, str)]
    if survey.gpu_count > 1 and (not survey.is_joined if options.pcie is None else options.pcie):
        remark = "included"
        pcie, cpu = survey.pcie(), options.constant(_CPU_BANDWIDTH)
        sockets = roots = in_sockets(pcie.numa_nodes, options.sockets)
        if len(roots) == 1 and len(roots[0].below) == 1 and roots[0].below[0].kind == "pcie":
            roots = list(roots[0].below)  # a socket with one way down decides nothing
        rates = parse_bandwidth_bytes_per_s(cpu.value), parse_time_s(_PCIE_LATENCY.value)
        pcie_links, pcie_switches = pcie_parts(roots, *rates)
        links, switches = links + pcie_links, switches + pcie_switches
        constants += [*pcie.constants, _PCIE_LATENCY, *([cpu] if len(roots) > 1 else [])]
        if roots[0].kind == "cpu" or options.sockets is not None:
            constants.append(_sockets(sockets, pcie, options))
    else:
        remark = "left out"
        if survey.gpu_count > 1:
            all_pairs = "all pairs" if survey.is_complete else "all GPUs, though not all pairs"
            remark += f", as {survey.fabric} joins {all_pairs}"
    for word in ("link_bandwidth", "pcie_bandwidth", "cpu_bandwidth", "sockets"):
        if getattr(options, word) is not None and word not in {constant.name for constant in constants}:
            raise TopologyError(f"{word} was given, but the machine has no link that it is of")
    nics = "" if survey.nic_count is None else f" ({survey.nic_count} in the file)"
    summary = (
        f"{_many(survey.gpu_count, 'GPU')}, imported from {survey.tool}; {wiring}; PCIe {remark}; "
        f"NICs{nics} left out, as one machine does not show the network behind them"
    )
    topology = Topology(name, survey.gpu_count, tuple(links), switches=tuple(switches))
    return Machine(topology, summary=summary, parameters=Parameters.of_constants(constants))


def _wiring(survey: Survey) -> str:
    """How many GPUs have how many links, and to where, like ``NVLink: 8 GPUs with 18 links each into a switch``."""
    parts = [
        f"{_many(gpus, 'GPU')} with {_many(links, 'link')} each into a switch"
        for ports in survey.switches
        for links, gpus in Counter(ports.values()).items()
    ]
    for links, pairs in Counter(survey.cables.values()).items():
        parts.append(f"{_many(pairs, 'pair')} of GPUs with {_many(links, 'link')}")
    return f"{survey.fabric}: {', '.join(parts) or 'none'}"


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _sockets(sockets: Sequence[Branch], pcie: PcieSurvey, options: Given) -> Constant:
    """The ranks of each socket, and how they were found."""
    numa_nodes = sum(bool(node.ranks()) for node in pcie.numa_nodes)
    parts = [f"NUMA nodes: {pcie.numa_source}" if numa_nodes > 1 else f"one NUMA node: {pcie.numa_source}"]
    if options.sockets is not None:
        parts.insert(0, "given to the import")
    elif numa_nodes > 1:
        parts.insert(
            0,
            f"assumption, as the tool does not print sockets: {numa_nodes} NUMA nodes are divided between two by their "
            "numbers; --sockets of the import changes it",
        )
    elif "assumption" in pcie.numa_source:
        parts.insert(0, "assumption: one socket; --sockets of the import changes it")
    if len(sockets) > 1:
        parts.append("assumption: any two sockets have one path each way, of cpu_bandwidth, that all GPUs share")
    return Constant("sockets", "; ".join(", ".join(map(str, socket.ranks())) for socket in sockets), "; ".join(parts))


def of_family(survey: Survey, machine: Machine, family: str, nodes: int, *, rails: bool) -> Machine:
    """The machine of so many nodes as surveyed, with the constants of a family; `machine` is that of the links alone.

    Raises `ProfileError` for an unknown family, other wiring than its machines have, and nodes that it does not have.
    """
    profile = load_profile(family)
    links, gpus, nics = _links_per_way(survey, profile), survey.gpu_count, survey.nics.used
    if nodes < 1 or (nodes > 1 and profile.nodes_per_domain > 1):
        why = "1 or more" if nodes < 1 else "1: its nodes share NVLink, which the file of one does not show"
        raise ProfileError(f"profile {family!r}: {nodes} nodes, expected {why}")
    constants, known = list[Constant](), survey.link_bandwidth
    if known is not None and not known.source.startswith("assumption"):
        text = CONSTANTS["link_bandwidth"].format(links * parse_bandwidth_bytes_per_s(known.value))
        source = f"{survey.tool}: {links} x {known.value}; {known.source}"
        constants.append(Constant("link_bandwidth", text, source))
    if nics:
        shared = "; ".join(f"{nic.name}: {', '.join(map(str, nic.ranks))}" for nic in nics)
        constants.append(Constant("nics", shared, f"{survey.nics.source}; {survey.tool}, {survey.lines}"))
    if nics and all(nic.gbit_per_s is not None for nic in nics):
        text = CONSTANTS["nic_bandwidth"].format(min(_rank_rates(survey, 0.0)))
        source = f"{survey.tool}, {survey.lines}: the speed of the NICs of a GPU"
        constants.append(Constant("nic_bandwidth", text, source))
    parameters = Parameters([machine.parameters["wiring"], *Parameters.of_constants(constants).values()])
    stated = profile.stating(parameters.values())
    topology = stated.machine(f"{nodes}x{gpus}" + "-rails" * rails, machine.topology.name, "ideal").topology
    if nics and "nic_latency" in stated.parameters:
        topology = _with_nics(topology, survey, stated.parameters.numbers)
    used = f"{len(nics)} of {survey.nic_count} NICs used" if nics else "NICs as in the profile"
    if survey.nics.source.startswith("assumption"):
        used += f" ({survey.nics.source})"
    network = "" if nodes == 1 else f"; {nodes} such nodes, NICs in {'rails' if rails else 'one network'}"
    summary = f"{machine.summary.partition('; NICs')[0]}; {used}{network}"
    return profile.machine_on(topology, parameters, family, summary=summary)


def _links_per_way(survey: Survey, profile: Profile) -> int:
    """How many links a GPU has into the switch, or to each other GPU. Raises `ProfileError` for other wiring."""
    gpus = survey.gpu_count
    if profile.inside == "switch":
        expected = "one switch with as many links of each GPU"
        fits = len(survey.switches) == 1 and not survey.cables and len(survey.switches[0]) == gpus
        counts = {count for ports in survey.switches for count in ports.values()}
    else:
        expected = "as many links between any two GPUs"
        fits = not survey.switches and len(survey.cables) == gpus * (gpus - 1) // 2
        counts = set(survey.cables.values())
    if not fits or len(counts) != 1 or gpus < 2:
        raise ProfileError(
            f"profile {profile.name!r}: its machines have {expected}, but {survey.tool} shows other wiring; without "
            "a profile it is imported as it is"
        )
    return counts.pop()


def _nic_rate(nic: Nic, of_family: float) -> float:
    """The bandwidth of a NIC in bytes/s; of one of unknown speed that of the family's."""
    return of_family if nic.gbit_per_s is None else nic.gbit_per_s * (1e9 / 8)


def _rank_rates(survey: Survey, of_family: float) -> list[float]:
    """The bandwidth of the NICs of each rank in bytes/s: its share of them, but at least one NIC."""
    shares, largest = [0.0] * survey.gpu_count, [0.0] * survey.gpu_count
    for nic in survey.nics.used:
        rate = _nic_rate(nic, of_family)
        for rank in nic.ranks:
            shares[rank] += rate / len(nic.ranks)
            largest[rank] = max(largest[rank], rate)
    return [max(share, one) or of_family for share, one in zip(shares, largest, strict=True)]


def _with_nics(plain: Topology, survey: Survey, numbers: Mapping[str, float]) -> Topology:
    """The topology of a family with the NICs of the file: on one node added, on several with their bandwidths."""
    gpus, nics, of_family = survey.gpu_count, survey.nics.used, numbers.get("nic_bandwidth", 0.0)
    rates = _rank_rates(survey, of_family)

    def rank_of(link: Link) -> int | None:
        """The rank whose NIC a link is."""
        ranks = (end for end in (link.source, link.destination) if isinstance(end, int))
        return next(ranks, None) if topology.is_nic(link) else None

    def at_rate(_: int, link: Link) -> Link:
        rank = rank_of(link)
        return link if rank is None else replace(link, bandwidth_bytes_per_s=rates[rank % gpus])

    topology = plain
    if plain.world_size > gpus:
        topology = plain.map_links(at_rate)
    else:
        half_s = numbers["nic_latency"] / 2
        added = [link for rank in range(gpus) for link in both_ways(rank, f"rail{rank}", rates[rank], half_s)]
        kinds = [Switch(name, kind) for name, kind in plain.switch_kinds.items()]
        switches = (*kinds, *(Switch(f"rail{rank}", "network") for rank in range(gpus)))
        topology = Topology(plain.name, gpus, (*plain.listed_links(), *added), switches=switches, nodes=(0,) * gpus)
    nic_links = [(rank_of(link), link) for link in topology.links]
    shared = []
    for node in range(topology.world_size // gpus):
        for local_ranks in groups(range(gpus), [pair for nic in nics for pair in pairwise(nic.ranks)]):
            of_these = [nic for nic in nics if nic.ranks[0] in local_ranks]
            capacity = sum(_nic_rate(nic, of_family) for nic in of_these)
            if not of_these or sum(rates[rank] for rank in local_ranks) <= capacity * (1 + 1e-9):
                continue  # each has a share of its own
            ranks = {node * gpus + rank for rank in local_ranks}
            for way in ("from", "to"):
                links = tuple(
                    link.name for rank, link in nic_links if rank in ranks and (link.source in ranks) == (way == "from")
                )
                name = f"node {node} {way} {', '.join(nic.name for nic in of_these)}"
                shared.append(SharedCapacity(name, capacity, links))
    return replace(topology, shared=tuple(shared))
