"""Families of machines: systems of any size with their communication library and parameters.

A machine is named by its size: ``h100-8`` is one node of 8 ranks, ``h100-10x8`` has ten nodes, ``h100-2x8-rails`` two
nodes with rails. `tasp_lab.machines.profile_files` reads families from files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from tasp_lab.core.errors import ProfileError
from tasp_lab.machines.compute_rates import COMPUTE_RATES
from tasp_lab.machines.kernel_compute import compute_on
from tasp_lab.machines.machine import Machine, NetworkKind
from tasp_lab.machines.parameters import Parameters
from tasp_lab.machines.system import Library, System
from tasp_lab.topology.expressions import MAX_WORLD_SIZE

SIZE = re.compile(r"(?:(?P<nodes>[1-9][0-9]{0,4})x)?(?P<ranks>[1-9][0-9]{0,4})(?P<rails>-rails)?")
"""The size of a member, like ``8``, ``2x8`` or ``2x8-rails``."""


@dataclass(frozen=True)
class Profile:
    """A family of machines.

    Parameters
    ----------
    name : name of the family, like ``h100``.
    summary : one line for users.
    library : the communication library.
    inside : the network of a domain: a switch, or a link between any two GPUs.
    ranks_per_node : GPUs per node; members may use fewer.
    nodes_per_domain : nodes per switch; more than one for racks.
    parameters : the profile's own, then those of its library and accelerator that it does not override.
    aliases : other names of members, to their sizes.
    machines : the members in the catalogue: their sizes, or aliases of these, each with a summary.
    accelerator : the name of its GPUs, see `tasp_lab.machines.compute_rates`; empty if they are unknown.
    network : whether the network of its machines is documented, or that of a cloud.
    """

    name: str
    summary: str
    library: Library
    inside: Literal["switch", "full-mesh"]
    ranks_per_node: int
    nodes_per_domain: int
    parameters: Parameters
    aliases: Mapping[str, str]
    machines: Mapping[str, str]
    accelerator: str = ""
    network: NetworkKind = "documented"

    def with_parameters(self, parameters: Parameters) -> Profile:
        """The family with other numbers."""
        return replace(self, parameters=parameters)

    def system(self, size: str, name: str = "", library: str = "auto") -> System:
        """The member of a size like ``10x8`` or ``2x8-rails``, or of an alias, without its numbers.

        Raises `ProfileError` for a text that is no size, and for a size outside the family.
        """
        found = SIZE.fullmatch(self.aliases.get(size, size))
        if found is None:
            raise ProfileError(f"profile {self.name!r} has no size {size!r}, expected one like 8 or 2x8")
        node_count, ranks = int(found["nodes"] or 1), int(found["ranks"])
        if ranks > self.ranks_per_node or node_count * ranks > MAX_WORLD_SIZE:
            raise ProfileError(
                f"profile {self.name!r}: {node_count} node{'s' * (node_count != 1)} of {ranks} ranks, "
                f"expected at most {self.ranks_per_node} ranks per node and {MAX_WORLD_SIZE} in all"
            )
        domains = -(-node_count // self.nodes_per_domain)
        if node_count % domains:
            raise ProfileError(f"profile {self.name!r}: {node_count} nodes do not fill {domains} domains equally")
        return self.system_of(
            domains, node_count // domains * ranks, name or f"{self.name}-{size}", library, rails=bool(found["rails"])
        )

    def system_of(self, domains: int, ranks: int, name: str, library: str = "auto", *, rails: bool = False) -> System:
        """The system of so many domains of so many ranks each."""
        return System(self.name, self.library, self.inside, domains, ranks, rails, library, name)

    def build(self, system: System, summary: str = "") -> Machine:
        """The machine of a system with the parameters of this family.

        With another library than its own, the machine has only the parameters of its links and compute rates, and needs
        no others. Raises `ProfileError` if a parameter is missing, and for a library that the family does not have.
        """
        parameters = self.parameters
        used = parameters
        if not system.has_own_library:
            wires = _of_wires(system.domains)
            used = Parameters(each for each in parameters.values() if each.name in wires)
        numbers = parameters.numbers
        return Machine(
            system.topology(numbers),
            system.comm_library(numbers),
            compute_on(parameters, self.accelerator),
            summary or self.summary,
            used,
            accelerator=self.accelerator,
            contention=system.contention(numbers),
            network=self.network,
            system=system,
        )

    def machine(
        self,
        node_count: int,
        ranks_per_node: int,
        *,
        rails: bool = False,
        name: str = "",
        summary: str = "",
        library: str = "auto",
    ) -> Machine:
        """The member of `node_count` nodes with `ranks_per_node` ranks each.

        `library` is ``auto`` or the name of the profile's own, or ``ideal`` or ``gloo``. Raises `ProfileError` for a
        size outside the family, and for other libraries.
        """
        size = f"{node_count}x{ranks_per_node}"
        return self.build(self.system(size + "-rails" * rails, name or f"{self.name}-{size}", library), summary)

    def member(self, size: str, name: str, library: str = "auto") -> Machine | None:
        """The member of a size like ``10x8`` or ``2x8-rails``, or of an alias; None for other texts."""
        if SIZE.fullmatch(self.aliases.get(size, size)) is None:
            return None
        return self.build(self.system(size, name, library), self.machines.get(size, ""))


def _of_wires(domains: int) -> tuple[str, ...]:
    """The parameters of links and compute rates of `domains` domains."""
    of_network = ("nic_bandwidth", "nic_latency") if domains > 1 else ()
    return ("link_bandwidth", "link_latency", *of_network, *COMPUTE_RATES)
