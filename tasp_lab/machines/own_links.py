"""Machines with links of their own and the library of a family: a topology file with a ``profile``.

::

    profile, links = load_profile("h100"), load_machine("machine.json").topology
    machine_of_family(profile, links, ())   # the library, kernels and constants of h100 on these links

Each node of the topology is a domain of the family. The links stay as the file has them; where a constant of the wires
changes, in an override or a sample, they change in proportion.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import groupby

from tasp_lab.core.errors import TopologyError
from tasp_lab.core.units import Number
from tasp_lab.machines.constants import CONSTANTS
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.parameters import Parameter, Parameters
from tasp_lab.machines.profile import Profile
from tasp_lab.machines.system import System
from tasp_lab.topology.graph import Link, Topology
from tasp_lab.topology.links import MeshLinks

_Numbers = dict[tuple[bool, str], Number]
"""Bandwidth and latency of links, by whether they are NICs."""


@dataclass(frozen=True)
class OwnLinks:
    """An edit that replaces the topology of a member.

    Parameters
    ----------
    family : the name or file of the profile.
    own : the topology in its place.
    stated : the topology of the member with the constants that `own` has.
    """

    family: str
    own: Topology
    stated: Topology

    def __call__(self, topology: Topology) -> Topology:
        """The own links, whose numbers are as many times larger as those of the member are."""
        before, after, own = _numbers(self.stated), _numbers(topology), self.own
        if before == after:  # bit by bit what the file states
            return own
        # all links of a kind of a family are equal, so the first of each tells by how much all of them changed
        factors = {key: Fraction(after[key]) / Fraction(before[key]) for key in before if before[key] and key in after}

        def scaled(link: Link) -> Link:
            nic = own.is_nic(link)
            bandwidth_bytes_per_s = link.bandwidth_bytes_per_s * factors.get((nic, "bandwidth"), 1)
            latency_s = link.latency_s * factors.get((nic, "latency"), 1)
            return replace(link, bandwidth_bytes_per_s=bandwidth_bytes_per_s, latency_s=latency_s)

        links = {link.name: scaled(link) for link in own.listed_links()}
        # links that share a capacity are of one kind
        times = {each: factors.get((own.is_nic(links[each.links[0]]), "bandwidth"), 1) for each in own.shared}
        shared = (replace(each, bandwidth_bytes_per_s=each.bandwidth_bytes_per_s * times[each]) for each in own.shared)
        return replace(own, links=tuple(links.values()), shared=tuple(shared))


def _numbers(topology: Topology) -> _Numbers:
    """The numbers of the first link of each kind."""
    found: _Numbers = {}
    links = topology.links[:1] if isinstance(topology.links, MeshLinks) else topology.links
    for link in links:
        nic = topology.is_nic(link)
        found.setdefault((nic, "bandwidth"), link.bandwidth_bytes_per_s)
        found.setdefault((nic, "latency"), link.latency_s)
    return found


def machine_of_family(
    family: str,
    profile: Profile,
    topology: Topology,
    parameters: Parameters,
    *,
    library: str = "auto",
    summary: str = "",
) -> Machine:
    """The machine with the library, kernels and parameters of a family on links of its own.

    Parameters
    ----------
    family : the name or file of the profile, for files that are written of the machine.
    parameters : those of the machine; where the profile has one of the same name, it is replaced.
    library : as of `Profile.machine`.

    Raises `TopologyError` for nodes that the family does not have, and `ProfileError` for a library it is not of.
    """
    others = [each for each in parameters.values() if each.name not in profile.parameters]
    profile = with_stated(profile, parameters.values())
    domains, ranks = _domains(topology, profile)
    machine = profile.build(System(profile, domains, ranks, "fabric", library, topology.name), summary)
    machine = machine.edited(OwnLinks(family, topology, machine.topology), topology)
    return replace(machine, parameters=Parameters([*others, *machine.parameters.values()]))


def with_stated(profile: Profile, parameters: Iterable[Parameter]) -> Profile:
    """The profile with these parameters in place of its own; those that it does not have are left out.

    What depends on a parameter follows it, so each is stated beside the numbers that hold by then.
    """
    known = profile.parameters
    for new in parameters:
        old = known.get(new.name)
        if old is not None and new.value != known.numbers[new.name]:
            other = CONSTANTS[new.name].depends_on
            at = None if old.at is None else known.numbers[other]
            known = known.with_parameters([replace(new, at=at, written_at="")])
    return profile.with_parameters(known)


def _domains(topology: Topology, profile: Profile) -> tuple[int, int]:
    """The number of domains and the ranks of each: the nodes of the topology."""
    nodes = topology.node_of_rank
    sizes, most = Counter(nodes), profile.ranks_per_node * profile.nodes_per_domain
    if len(set(sizes.values())) > 1 or len(list(groupby(nodes))) > len(sizes):
        counts = ", ".join(str(size) for size in sizes.values())
        raise TopologyError(f"profile {profile.name!r}: nodes of {counts} ranks, expected equal ones of ranks in order")
    ranks = max(sizes.values())
    if ranks > most:
        raise TopologyError(f"profile {profile.name!r}: {ranks} ranks per node, expected at most {most}")
    return len(sizes), ranks


def family_of(machine: Machine) -> str:
    """The family of a machine with links of its own; empty for others."""
    edits = () if machine.system is None else machine.system.edits
    return edits[-1].family if edits and isinstance(edits[-1], OwnLinks) else ""
