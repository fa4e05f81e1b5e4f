"""An imported node joined with a family: its wiring and NICs, and the family's library, kernels and constants.

The wiring must be that of the family's machines: each GPU with as many links into one switch, or as many cables between
any two GPUs. What the file tells of bandwidths replaces the family's constants.

A GPU uses the NICs that are nearest to it. On one node NICs lead to networks that nothing else is on; on several nodes
they meet in one network or, with rails, NICs of one local rank in a switch of their own, and these in a spine. GPUs
that share a NIC share its bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tasp_lab.core.errors import ProfileError
from tasp_lab.core.units import parse_bandwidth_bytes_per_s
from tasp_lab.machines.constants import CONSTANTS
from tasp_lab.machines.importers.survey import Survey
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.own_links import machine_of_family, with_stated
from tasp_lab.machines.parameters import Constant, Parameters
from tasp_lab.machines.profile import Profile
from tasp_lab.machines.profile_files import load_profile
from tasp_lab.topology.graph import Link, SharedCapacity, Switch, Topology, both_ways

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
    plain = stated.machine(nodes, gpus, rails=rails, name=machine.topology.name, library="ideal").topology
    rate = stated.parameters.numbers.get("nic_bandwidth", 0.0)
    topology = _with_nics(plain, survey, _rates(survey, rate), stated)
    return machine_of_family(
        family, profile, topology, parameters, summary=_summary(survey, machine, nodes, rails=rails)
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
    if not survey.nics:
        return
    shared = "; ".join(f"{nic.name}: {', '.join(map(str, nic.ranks))}" for nic in survey.nics)
    yield Constant("nics", shared, f"{survey.tool}, {survey.lines}: the ranks to which no other NIC is nearer")
    if all(nic.gbit_per_s is not None for nic in survey.nics):
        text = CONSTANTS["nic_bandwidth"].format(min(_rates(survey, 0.0)))
        yield Constant("nic_bandwidth", text, f"{survey.tool}, {survey.lines}: the speed of the NICs of a GPU")


def _rates(survey: Survey, of_family: float) -> list[float]:
    """The bandwidth of the NICs of each rank in bytes/s; of NICs of unknown speed that of the family's."""
    rates = [0.0] * survey.gpu_count
    for nic in survey.nics:
        for rank in nic.ranks:
            rates[rank] += of_family if nic.gbit_per_s is None else nic.gbit_per_s * _BYTES_PER_GBIT
    return [rate or of_family for rate in rates]


def _with_nics(plain: Topology, survey: Survey, rates: Sequence[float], profile: Profile) -> Topology:
    """The topology of a family with the NICs of the file: on one node added, on several with their bandwidths."""
    gpus = survey.gpu_count
    if plain.world_size == gpus:
        if not survey.nics or "nic_latency" not in profile.parameters:
            return plain
        half_s = profile.parameters.numbers["nic_latency"] / 2
        added = [link for rank in range(gpus) for link in both_ways(rank, f"rail{rank}", rates[rank], half_s)]
        links = (*plain.listed_links(), *added)
        networks = tuple(Switch(f"rail{rank}", "network") for rank in range(gpus))
        kinds = (*(Switch(name, kind) for name, kind in plain.switch_kinds.items()), *networks)
        found = Topology(plain.name, gpus, links, switches=kinds, nodes=(0,) * gpus)
    else:
        found = plain.map_links(lambda _, link: _at_rate(plain, link, rates))
    return replace(found, shared=tuple(_shared(found, survey, rates)))


def _at_rate(topology: Topology, link: Link, rates: Sequence[float]) -> Link:
    """A NIC with the bandwidth of its rank; other links as they are."""
    rank = _rank_of_nic(topology, link)
    return link if rank is None else replace(link, bandwidth_bytes_per_s=rates[rank % len(rates)])


def _rank_of_nic(topology: Topology, link: Link) -> int | None:
    for rank, other in ((link.source, link.destination), (link.destination, link.source)):
        if isinstance(rank, int) and isinstance(other, str) and topology.switch_kinds[other] == "network":
            return rank
    return None


def _shared(topology: Topology, survey: Survey, rates: Sequence[float]) -> Iterator[SharedCapacity]:
    """The NICs that several ranks share, out of each node and into it."""
    gpus = survey.gpu_count
    for node in range(topology.world_size // gpus):
        for nic in (each for each in survey.nics if len(each.ranks) > 1):
            ranks = {node * gpus + rank for rank in nic.ranks}
            ways: dict[str, list[str]] = {"from": [], "to": []}
            for link in topology.links:
                if _rank_of_nic(topology, link) in ranks:
                    ways["from" if link.source in ranks else "to"].append(link.name)
            for way, names in ways.items():
                yield SharedCapacity(f"node {node} {way} {nic.name}", rates[nic.ranks[0]], tuple(names))


def _summary(survey: Survey, machine: Machine, nodes: int, *, rails: bool) -> str:
    alone = machine.summary.partition("; NICs")[0]
    nics = f"{len(survey.nics)} of {survey.nic_count} NICs near GPUs" if survey.nics else "NICs as in the profile"
    network = "" if nodes == 1 else f"; {nodes} such nodes, NICs in {'rails' if rails else 'one network'}"
    return f"{alone}; {nics}{network}"
