"""Machines with links of their own and the library of a family: a topology file with a ``profile``.

::

    profile, links = load_profile("h100"), load_machine("machine.json").topology
    machine_of_family(profile, links, ())   # the library, kernels and constants of h100 on these links

Each node of the topology is a domain of the family. The links stay as the file has them; where a constant of the wires
changes, in an override or a sample, they change in proportion.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import groupby

from tasp_lab.core.errors import TopologyError
from tasp_lab.core.units import Number
from tasp_lab.machines.constants import CONSTANTS
from tasp_lab.machines.machine import Constant, EditedRecipe, Machine
from tasp_lab.machines.profile import Member, Profile
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
        before, after = _numbers(self.stated), _numbers(topology)
        factors = {
            key: Fraction(after[key]) / Fraction(before[key])
            for key in before.keys() & after.keys()
            if before[key] and after[key] != before[key]
        }
        if not factors:
            return self.own

        def scaled(link: Link) -> Link:
            nic = _is_nic(self.own, link)
            bandwidth, latency = factors.get((nic, "bandwidth"), 1), factors.get((nic, "latency"), 1)
            return replace(
                link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * bandwidth, latency_s=link.latency_s * latency
            )

        of_name = {link.name: link for link in self.own.links} if self.own.shared else {}
        shared = tuple(
            replace(
                each,
                bandwidth_bytes_per_s=each.bandwidth_bytes_per_s
                * factors.get((_is_nic(self.own, of_name[each.links[0]]), "bandwidth"), 1),
            )
            for each in self.own.shared
        )
        return replace(self.own, links=tuple(scaled(link) for link in self.own.listed_links()), shared=shared)


def _numbers(topology: Topology) -> _Numbers:
    """The numbers of the first link of each kind."""
    found: _Numbers = {}
    links = topology.links[:1] if isinstance(topology.links, MeshLinks) else topology.links
    for link in links:
        nic = _is_nic(topology, link)
        found.setdefault((nic, "bandwidth"), link.bandwidth_bytes_per_s)
        found.setdefault((nic, "latency"), link.latency_s)
    return found


def _is_nic(topology: Topology, link: Link) -> bool:
    if isinstance(link.source, int) and isinstance(link.destination, int):
        return False
    ends = (end for end in (link.source, link.destination) if isinstance(end, str))
    return any(topology.switch_kinds[end] == "network" for end in ends)


def machine_of_family(
    family: str,
    profile: Profile,
    topology: Topology,
    constants: Sequence[Constant],
    *,
    library: str = "auto",
    summary: str = "",
) -> Machine:
    """The machine with the library, kernels and constants of a family on links of its own.

    Parameters
    ----------
    family : the name or file of the profile, for files that are written of the machine.
    constants : those of the machine; where the profile has one of the same name, it is replaced.
    library : as of `Profile.machine`.

    Raises `TopologyError` for nodes that the family does not have, and `ProfileError` for a library it is not of.
    """
    others = [each for each in constants if not profile.has(each.name)]
    profile = with_stated(profile, constants)
    domains, ranks = _domains(topology, profile)
    member = Member(profile, domains, ranks, False, library, topology.name, summary or profile.summary)
    machine = member.machine()
    edit = OwnLinks(family, topology, machine.topology)
    return replace(
        machine, topology=topology, constants=(*others, *machine.constants), recipe=EditedRecipe(member, edit)
    )


def with_stated(profile: Profile, constants: Sequence[Constant]) -> Profile:
    """The profile with these constants in place of its own; those that it does not have are left out.

    What depends on a constant follows it.
    """
    for each in constants:
        old = profile.constant(each.name)
        if old is not None and CONSTANTS[each.name].parse(each.value) != profile.number(each.name):
            new = profile.restated(old, each.value, each.source)
            profile = profile.with_constant(replace(new, low=each.low, high=each.high))
    return profile


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
    recipe = machine.recipe
    edit = recipe.edit if isinstance(recipe, EditedRecipe) else None
    return edit.family if isinstance(edit, OwnLinks) else ""
