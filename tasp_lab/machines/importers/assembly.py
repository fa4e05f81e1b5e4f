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
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from tasp_lab.core.errors import ProfileError, TopologyError
from tasp_lab.core.units import format_bandwidth, parse_bandwidth_bytes_per_s, parse_time_s
from tasp_lab.machines.constants import CONSTANTS
from tasp_lab.machines.importers.survey import (
    Branch,
    Given,
    Nic,
    PcieSurvey,
    Survey,
    groups,
    in_sockets,
    pcie_parts,
    without_idle,
)
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.own_links import machine_of_family, with_stated
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
    links = list(_fabric_links(survey))
    constants = [Constant("wiring", _wiring(survey), f"{survey.tool}, {survey.lines}: {survey.wiring_source}")]
    if survey.link_bandwidth is not None:
        constants += [survey.link_bandwidth, _LINK_LATENCY[survey.fabric]]
    ends = dict.fromkeys(link.destination for link in links)
    switches = [Switch(name, "node") for name in ends if isinstance(name, str)]
    has_pcie = survey.gpu_count > 1 and (not survey.is_joined if options.pcie is None else options.pcie)
    if has_pcie:
        pcie, cpu = survey.pcie(), options.constant(_CPU_BANDWIDTH)
        sockets = in_sockets(pcie.numa_nodes, options.sockets)
        roots = without_idle(sockets)
        rates = parse_bandwidth_bytes_per_s(cpu.value), parse_time_s(_PCIE_LATENCY.value)
        pcie_links, pcie_switches = pcie_parts(roots, *rates)
        links, switches = links + pcie_links, switches + pcie_switches
        constants += [*pcie.constants, _PCIE_LATENCY, *([cpu] if len(roots) > 1 else [])]
        if roots[0].kind == "cpu" or options.sockets is not None:
            constants.append(_sockets(sockets, pcie, options))
    for word in ("link_bandwidth", "pcie_bandwidth", "cpu_bandwidth", "sockets"):
        if getattr(options, word) is not None and word not in {constant.name for constant in constants}:
            raise TopologyError(f"{word} was given, but the machine has no link that it is of")
    topology = Topology(name, survey.gpu_count, tuple(links), switches=tuple(switches))
    return Machine(topology, summary=_summary(survey, has_pcie), parameters=Parameters.of_constants(constants))


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


_BYTES_PER_GBIT = 1e9 / 8


def of_family(survey: Survey, machine: Machine, family: str, nodes: int, *, rails: bool) -> Machine:
    """The machine of so many nodes as surveyed, with the constants of a family; `machine` is that of the links alone.

    Raises `ProfileError` for an unknown family, other wiring than its machines have, and nodes that it does not have.
    """
    profile = load_profile(family)
    links, gpus = _links_per_way(survey, profile), survey.gpu_count
    if nodes < 1 or (nodes > 1 and profile.nodes_per_domain > 1):
        why = "1 or more" if nodes < 1 else "1: its nodes share NVLink, which the file of one does not show"
        raise ProfileError(f"profile {family!r}: {nodes} nodes, expected {why}")
    found = Parameters.of_constants([*_link_constant(survey, links), *_nic_constants(survey)])
    parameters = Parameters([machine.parameters["wiring"], *found.values()])
    stated = with_stated(profile, parameters.values())
    plain = stated.machine(f"{nodes}x{gpus}" + "-rails" * rails, machine.topology.name, "ideal").topology
    rate = stated.parameters.numbers.get("nic_bandwidth", 0.0)
    topology = _with_nics(plain, survey, _rates(survey, rate), stated)
    return machine_of_family(
        family, profile, topology, parameters, summary=_family_summary(survey, machine, nodes, rails=rails)
    )


def _links_per_way(survey: Survey, profile: Profile) -> int:
    """How many links a GPU has into the switch, or to each other GPU. Raises `ProfileError` for other wiring."""
    gpus, count = survey.gpu_count, 0
    if profile.inside == "switch":
        expected = "one switch with as many links of each GPU"
        if len(survey.switches) == 1 and not survey.cables and len(survey.switches[0]) == gpus:
            counts = set(survey.switches[0].values())
            count = counts.pop() if len(counts) == 1 else 0
    else:
        expected = "as many links between any two GPUs"
        if not survey.switches and len(survey.cables) == gpus * (gpus - 1) // 2:
            counts = set(survey.cables.values())
            count = counts.pop() if len(counts) == 1 else 0
    if not count or gpus < 2:
        raise ProfileError(
            f"profile {profile.name!r}: its machines have {expected}, but {survey.tool} shows other wiring; without "
            "a profile it is imported as it is"
        )
    return count


def _link_constant(survey: Survey, links: int) -> Iterator[Constant]:
    """The bandwidth of a GPU's port or of a pair, where it is known and not assumed."""
    known = survey.link_bandwidth
    if known is not None and not known.source.startswith("assumption"):
        bandwidth_bytes_per_s = links * parse_bandwidth_bytes_per_s(known.value)
        text = CONSTANTS["link_bandwidth"].format(bandwidth_bytes_per_s)
        yield Constant("link_bandwidth", text, f"{survey.tool}: {links} x {known.value}; {known.source}")


def _nic_constants(survey: Survey) -> Iterator[Constant]:
    """Which GPUs use which NICs, and the least bandwidth of a GPU's NICs where all are known."""
    nics = survey.nics.used
    if not nics:
        return
    shared = "; ".join(f"{nic.name}: {', '.join(map(str, nic.ranks))}" for nic in nics)
    yield Constant("nics", shared, f"{survey.nics.source}; {survey.tool}, {survey.lines}")
    if all(nic.gbit_per_s is not None for nic in nics):
        text = CONSTANTS["nic_bandwidth"].format(min(_rates(survey, 0.0)))
        yield Constant("nic_bandwidth", text, f"{survey.tool}, {survey.lines}: the speed of the NICs of a GPU")


def _rates(survey: Survey, of_family: float) -> list[float]:
    """The bandwidth of the NICs of each rank in bytes/s: its share of them, but at least one NIC."""
    shares, largest = [0.0] * survey.gpu_count, [0.0] * survey.gpu_count
    for nic in survey.nics.used:
        rate = _nic_rate(nic, of_family)
        for rank in nic.ranks:
            shares[rank] += rate / len(nic.ranks)
            largest[rank] = max(largest[rank], rate)
    return [max(share, one) or of_family for share, one in zip(shares, largest, strict=True)]


def _nic_rate(nic: Nic, of_family: float) -> float:
    """The bandwidth of a NIC in bytes/s; of one of unknown speed that of the family's."""
    return of_family if nic.gbit_per_s is None else nic.gbit_per_s * _BYTES_PER_GBIT


def _with_nics(plain: Topology, survey: Survey, rates: Sequence[float], profile: Profile) -> Topology:
    """The topology of a family with the NICs of the file: on one node added, on several with their bandwidths."""
    gpus = survey.gpu_count
    if not survey.nics.used or "nic_latency" not in profile.parameters:
        return plain
    if plain.world_size == gpus:
        half_s = profile.parameters.numbers["nic_latency"] / 2
        added = [link for rank in range(gpus) for link in both_ways(rank, f"rail{rank}", rates[rank], half_s)]
        links = (*plain.listed_links(), *added)
        networks = tuple(Switch(f"rail{rank}", "network") for rank in range(gpus))
        kinds = (*(Switch(name, kind) for name, kind in plain.switch_kinds.items()), *networks)
        topology = Topology(plain.name, gpus, links, switches=kinds, nodes=(0,) * gpus)
    else:

        def at_rate(_: int, link: Link) -> Link:
            """A NIC with the bandwidth of its rank; other links as they are."""
            rank = _rank_of_nic(plain, link)
            return link if rank is None else replace(link, bandwidth_bytes_per_s=rates[rank % gpus])

        topology = plain.map_links(at_rate)
    of_family = profile.parameters.numbers.get("nic_bandwidth", 0.0)
    return replace(topology, shared=tuple(_shared(topology, survey, rates, of_family)))


def _rank_of_nic(topology: Topology, link: Link) -> int | None:
    ranks = (end for end in (link.source, link.destination) if isinstance(end, int))
    return next(ranks, None) if topology.is_nic(link) else None


def _shared(topology: Topology, survey: Survey, rates: Sequence[float], of_family: float) -> Iterator[SharedCapacity]:
    """The NICs that several ranks share, out of each node and into it."""
    gpus, nics = survey.gpu_count, survey.nics.used
    together = groups(range(gpus), [pair for nic in nics for pair in pairwise(nic.ranks)])
    for node in range(topology.world_size // gpus):
        for local_ranks in together:
            of_these = [nic for nic in nics if nic.ranks[0] in local_ranks]
            capacity = sum(_nic_rate(nic, of_family) for nic in of_these)
            if not of_these or sum(rates[rank] for rank in local_ranks) <= capacity * (1 + 1e-9):
                continue  # each has a share of its own
            ranks = {node * gpus + rank for rank in local_ranks}
            ways: dict[str, list[str]] = {"from": [], "to": []}
            for link in topology.links:
                if _rank_of_nic(topology, link) in ranks:
                    ways["from" if link.source in ranks else "to"].append(link.name)
            for way, names in ways.items():
                name = f"node {node} {way} {', '.join(nic.name for nic in of_these)}"
                yield SharedCapacity(name, capacity, tuple(names))


def _family_summary(survey: Survey, machine: Machine, nodes: int, *, rails: bool) -> str:
    alone = machine.summary.partition("; NICs")[0]
    nics = f"{len(survey.nics.used)} of {survey.nic_count} NICs used" if survey.nics.used else "NICs as in the profile"
    if survey.nics.source.startswith("assumption"):
        nics += f" ({survey.nics.source})"
    network = "" if nodes == 1 else f"; {nodes} such nodes, NICs in {'rails' if rails else 'one network'}"
    return f"{alone}; {nics}{network}"
