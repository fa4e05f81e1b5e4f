"""Families of machines: systems of any size with their communication library and parameters, read from files.

::

    h100 = load_profile("h100")           # of tasp-lab, or of a file my.toml
    h100.machine("10x8")                  # ten nodes of 8 ranks
    member("h100-2x8-rails")              # the same by name

A machine is named by its size: ``h100-8`` is one node of 8 ranks, ``h100-10x8`` has ten nodes, ``h100-2x8-rails`` two
nodes with rails, ``h100-2x8-rails-only`` with rails that no spine joins. Nodes of ``gb200-2x4`` share an NVLink domain;
``gb200-2x1x4`` has two domains of one node of 4 ranks each, which NICs join, ``gb200-2x2x4`` two nodes in each.

A profile file describes one family: the network of a node or rack, the network between them, the library and its
constants, each with its source. The families of tasp-lab are ``tasp_lab/machines/profiles/*.toml``; users may have
their own files anywhere. Constants common to all machines of a library are in
``tasp_lab/machines/libraries/constants/*.toml``, those of an accelerator in ``tasp_lab/machines/accelerators/*.toml``.
A profile may override either. A profile with a `base` also has the constants of that family of tasp-lab; those that
depend on another follow its value, so a slower NIC needs one line.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import msgspec

from tasp_lab.core.errors import ProfileError, QuantityError, TopologyError
from tasp_lab.core.records import as_text, converted, data_names, load_named
from tasp_lab.machines.compute import COMPUTE_RATES, compute_on, with_accelerator
from tasp_lab.machines.constants import CONSTANTS, WIRES
from tasp_lab.machines.kernel_model.catalogue import gpu_alias
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.parameters import (
    Constant,
    Parameter,
    Parameters,
    changed,
    library_parameters,
    parse_constants,
)
from tasp_lab.machines.system import Family, System, forwarding_of, needed
from tasp_lab.topology.builders import Network, full_mesh, nodes, switch
from tasp_lab.topology.expressions import MAX_WORLD_SIZE
from tasp_lab.topology.graph import Topology

_COUNT = "[1-9][0-9]{0,4}"
SIZE = re.compile(
    rf"(?:(?:(?P<domains>{_COUNT})x)?(?P<nodes>{_COUNT})x)?(?P<ranks>{_COUNT})(?:-(?P<network>rails|rails-only))?"
)
"""The size of a member, like ``8``, ``2x8``, ``2x8-rails`` or ``2x8-rails-only``; ``2x1x8`` begins with the domains."""

_NETWORKS: Mapping[str | None, Network] = {None: "fabric", "rails": "rails", "rails-only": "rails-only"}


class Profile(Family, frozen=True, kw_only=True):
    """A family of machines with its `parameters`: its own, then those of its library and accelerator that it does not
    override.
    """

    parameters: Parameters

    def with_parameters(self, parameters: Parameters) -> Profile:
        """The family with other numbers."""
        return msgspec.structs.replace(self, parameters=parameters)

    def stating(self, parameters: Iterable[Parameter]) -> Profile:
        """The family with these parameters in place of its own; those that it does not have are left out.

        What depends on a parameter follows it, so each is stated beside the numbers that hold by then.
        """
        known = self.parameters
        for new in parameters:
            old = known.get(new.name)
            if old is not None and new.value != known.numbers[new.name]:
                at = None if old.at is None else known.numbers[CONSTANTS[new.name].depends_on]
                known = known.with_parameters([replace(new, at=at, written_at="")])
        return self.with_parameters(known)

    def system(self, size: str, name: str = "", library: str = "auto") -> System:
        """The member of a size like ``10x8`` or ``2x8-rails``, or of an alias, without its numbers.

        Raises `ProfileError` for a text that is no size, for a size outside the family, and if a parameter of its links
        is missing.
        """
        found = SIZE.fullmatch(self.aliases.get(size, size))
        if found is None:
            raise ProfileError(f"profile {self.name!r} has no size {size!r}, expected one like 8 or 2x8")
        each, ranks = int(found["nodes"] or 1), int(found["ranks"])
        node_count = int(found["domains"] or 1) * each
        if ranks > self.ranks_per_node or node_count * ranks > MAX_WORLD_SIZE:
            raise ProfileError(
                f"profile {self.name!r}: {node_count} node{'s' * (node_count != 1)} of {ranks} ranks, "
                f"expected at most {self.ranks_per_node} ranks per node and {MAX_WORLD_SIZE} in all"
            )
        if found["domains"] and each > self.nodes_per_domain:
            raise ProfileError(
                f"profile {self.name!r}: domains of {each} nodes, expected at most {self.nodes_per_domain}"
            )
        domains = int(found["domains"] or -(-node_count // self.nodes_per_domain))
        if node_count % domains:
            raise ProfileError(f"profile {self.name!r}: {node_count} nodes do not fill {domains} domains equally")
        ranks *= node_count // domains
        with needed(self):
            links = replace(
                self._links(domains, ranks, _NETWORKS[found["network"]]),
                name=name or f"{self.name}-{size}",
                forwarding=forwarding_of(self, library),
            )
        return System(self, domains, ranks, links, self.parameters.numbers, library)

    def _links(self, domains: int, ranks: int, network: Network) -> Topology:
        """The links of so many domains of so many ranks."""
        numbers = self.parameters.numbers
        link = (numbers["link_bandwidth"], numbers["link_latency"]) if ranks > 1 else (1.0, 0.0)
        if domains == 1:
            return (switch if self.inside == "switch" else full_mesh)(ranks, *link)
        return nodes(
            domains,
            ranks,
            self.inside,
            network,
            link_bandwidth_bytes_per_s=link[0],
            link_latency_s=link[1],
            nic_bandwidth_bytes_per_s=numbers["nic_bandwidth"],
            nic_latency_s=numbers["nic_latency"],
            ranks_per_nic=self.ranks_per_nic,
        )

    def build(self, system: System, summary: str = "") -> Machine:
        """The machine of a system with the parameters of this family.

        With another library than its own, the machine has only the parameters of its links and compute rates, and needs
        no others. Raises `ProfileError` if a parameter is missing, and for a library that the family does not have.
        """
        parameters = self.parameters
        used, numbers = parameters, parameters.numbers
        if not system.has_own_library:
            of_network = ("nic_bandwidth", "nic_latency") if system.domains > 1 else ()
            wires = ("link_bandwidth", "link_latency", *of_network, *COMPUTE_RATES)
            used = Parameters(each for each in parameters.values() if each.name in wires)
        with needed(self):
            for name in system.wires:  # also those of links of one's own, which change in proportion
                numbers[name]
        made = system.comm_library(numbers), system.contention(numbers)
        return Machine(
            system.links,
            made[0],
            compute_on(parameters, self.accelerator),
            summary or self.summary,
            used,
            accelerator=self.accelerator,
            contention=made[1],
            network=self.network,
            system=system,
            made=made,
        )

    def has(self, size: str) -> bool:
        """Whether a text is a size like ``10x8`` or ``2x8-rails``, or an alias."""
        return SIZE.fullmatch(self.aliases.get(size, size)) is not None

    def machine(self, size: str, name: str = "", library: str = "auto") -> Machine:
        """The member of a size like ``10x8`` or ``2x8-rails``, or of an alias.

        `library` is ``auto`` or the name of the profile's own, or ``ideal`` or ``gloo``. Raises `ProfileError` for a
        size outside the family, and for other libraries.
        """
        return self.build(self.system(size, name, library), self.machines.get(size, ""))

    def machine_on(
        self, topology: Topology, parameters: Parameters, family: str, library: str = "auto", summary: str = ""
    ) -> Machine:
        """The machine with the library, kernels and parameters of this family on links of its own.

        Each node of the topology is a domain. The links stay as they are; where a constant of the wires changes, in an
        override or a sample, they change in proportion.

        Parameters
        ----------
        parameters : those of the machine; where this profile has one of the same name, it is replaced.
        family : the name or file of this profile, for files that are written of the machine.
        library : as of `machine`.

        Raises `TopologyError` for nodes that the family does not have, and `ProfileError` for a library it is not of.
        """
        of_rank = topology.node_of_rank
        sizes, most = Counter(of_rank), self.ranks_per_node * self.nodes_per_domain
        if len(set(sizes.values())) > 1 or len(list(groupby(of_rank))) > len(sizes):
            counts = ", ".join(str(size) for size in sizes.values())
            raise TopologyError(
                f"profile {self.name!r}: nodes of {counts} ranks, expected equal ones of ranks in order"
            )
        ranks = max(sizes.values())
        if ranks > most:
            raise TopologyError(f"profile {self.name!r}: {ranks} ranks per node, expected at most {most}")
        stated, topology = self.stating(parameters.values()), replace(topology, forwarding=forwarding_of(self, library))
        machine = stated.build(
            System(stated, len(sizes), ranks, topology, stated.parameters.numbers, library, family), summary
        )
        others = (each for each in parameters.values() if each.name not in self.parameters)
        return replace(machine, parameters=Parameters([*others, *machine.parameters.values()]))


class _ProfileFile(Family, frozen=True, kw_only=True):
    constants: tuple[Constant, ...]
    base: str | None = None


def profile_names() -> list[str]:
    """The families of tasp-lab, in alphabetical order."""
    return data_names("tasp_lab.machines", "profiles")


def load_profile(text: str) -> Profile:
    """The family of a name or of a ``.toml`` file. Raises `ProfileError`.

    >>> load_profile("h100").machine("10x8").topology.world_size
    80
    """
    return load_named("profile", "tasp_lab.machines", "profiles", text, _read)


def listed_members() -> list[str]:
    """The members in the catalogue, like ``h100-8``, family by family."""
    return [f"{name}-{size}" for name in profile_names() for size in load_profile(name).machines]


def member(text: str, library: str = "auto", name: str = "") -> Machine | None:
    """The member of a family by name, with its library; None for other texts.

    Names are ``h100-8``, ``h100-10x8`` or ``h100-2x8-rails``; of a file, ``my.toml`` (one node) or ``my.toml:4x8``.
    `library` is that of `Profile.machine`, `name` that of the machine: the text, if empty.

    >>> member("h100-8").comm_library.name, member("torus:3x3")
    ('nccl', None)
    """
    found = _family_and_size(text)
    if found is None or not found[0].has(found[1]):
        return None
    return found[0].machine(found[1], name or text, library)


def _family_and_size(text: str) -> tuple[Profile, str] | None:
    """The profile of a member's name, and the rest of the name, which need not be a size; None for other texts."""
    path, _, size = text.rpartition(":") if re.search(r"\.toml:[^:/]+\Z", text) else (text, "", "")
    if path.endswith(".toml"):
        if not is_profile_file(path):
            return None
        profile = load_profile(path)
        return profile, size or str(profile.ranks_per_node)
    family, _, size = text.partition("-")
    return (load_profile(family), size) if family in profile_names() else None


def at_provider(text: str, provider: str) -> str:
    """The member of a cloud that a member is there; the same where nothing is known of it.

    >>> at_provider("h100-2x8", "AWS"), at_provider("h100-2x8", "Azure")
    ('h100_p5-2x8', 'h100-2x8')
    """
    family, _, size = text.partition("-")
    known = (name for name in profile_names() if name.startswith(f"{family}_"))
    found = (name for name in known if provider.casefold() in load_profile(name).providers)
    return f"{next(found, family)}-{size}" if size else text


def find_profile(text: str) -> tuple[Profile, Machine]:
    """The profile and member of a text: a family, of which the member is one node, or a member.

    Raises `ProfileError`.
    """
    found = _family_and_size(text)
    if found and found[0].has(found[1]):
        return found[0], found[0].machine(found[1], text)
    profile = load_profile(text)
    return profile, profile.machine(f"1x{profile.ranks_per_node}")


def family_of_gpus(gpu: str) -> Profile | None:
    """The family of tasp-lab with these GPUs by the name of their driver, if it is named as they are; else None.

    >>> found = family_of_gpus("NVIDIA H100 80GB HBM3")
    >>> found and found.name, family_of_gpus("NVIDIA H100 PCIe")
    ('h100', None)
    """
    name = gpu_alias(gpu)
    found = load_profile(name) if name in profile_names() else None
    return found if found and found.accelerator == name else None


def is_profile_file(path: str) -> bool:
    """Whether a file is a profile; machine files have no library."""
    # not parsed: a file with an error must be known for what it is, so that its reader reports the error
    try:
        return b"\nlibrary" in b"\n" + Path(path).read_bytes()
    except OSError:
        return False


def profile_document(profile: Profile) -> str:
    """The profile as the text of a file that `load_profile` reads."""
    fields = msgspec.structs.fields(Family)
    stated = {field.name: getattr(profile, field.name) for field in fields}
    head = {field.name: stated[field.name] for field in fields if stated[field.name] not in (field.default, {})}
    constants = [
        each.document() | ({} if each.at is None else {"at": each.at_text}) for each in profile.parameters.values()
    ]
    return msgspec.toml.encode(head | {"constants": constants}).decode()


def _read(name: str, data: bytes) -> Profile:
    where = f"{'file' if name.endswith('.toml') else 'profile'} {name!r}"
    if not data.strip():
        raise ProfileError(f"{where} is empty, expected a profile")
    try:
        profile = _profile(converted(msgspec.toml.decode(as_text(data)), _ProfileFile))
        _check(profile)
    except (ValueError, QuantityError, ProfileError, TopologyError) as error:
        raise ProfileError(" ".join(f"{where}: {error}".split())) from error
    return profile


def _profile(record: _ProfileFile) -> Profile:
    """The profile of a file, with what it does not override: of its accelerator, its base and its library."""
    own, base = parse_constants(record.constants), _base(record)
    generation = record.generation or (base.generation if base else "")
    shared = [
        *with_accelerator((), record.accelerator or None),
        *(_with_wires(base, own) if base else ()),
        *(library_parameters(f"{record.library}_{generation}") if generation else ()),
        *library_parameters(record.library),
    ]
    found = {parameter.name: parameter for parameter in own}
    for parameter in shared:
        found.setdefault(parameter.name, parameter)
    head = {name: getattr(record, name) for name in Family.__struct_fields__}
    accelerator = record.accelerator or (base.accelerator if base else "")
    given = {"accelerator": accelerator, "generation": generation, "parameters": Parameters(found.values())}
    return Profile(**(head | given))


def _with_wires(base: Profile, own: Iterable[Parameter]) -> Iterator[Parameter]:
    """The parameters of a base, whose hops have in them what the wires of a profile take longer than those of the base.

    What a network adds to the hops of a library is an assumption, as long as nobody measured them.
    """
    known = base.parameters
    wires = {each.name: each.number for each in own if each.name in WIRES and each.name in known}
    moved = changed(known, wires, clamp=False)
    for name, hop in known.items():
        wire = CONSTANTS[name].min_constant
        if wire in wires and moved.numbers[name] != known.numbers[name]:
            source = f"as in {base.name}, and what {wire} is longer here: an assumption"
            yield Parameter.parse(name, CONSTANTS[name].format(moved.numbers[name], 12), source)
        else:
            yield hop


def _base(record: _ProfileFile) -> Profile | None:
    """The family that is the base. Raises `ProfileError` for one that is unknown or of another library."""
    if record.base is None:
        return None
    if record.base not in profile_names():
        raise ProfileError(f"base {record.base!r} is unknown: expected one of {', '.join(profile_names())}")
    base = load_profile(record.base)
    if base.library != record.library:
        raise ProfileError(f"base {record.base!r} is of {base.library}, expected one of {record.library}")
    return base


def _check(profile: Profile) -> None:
    """Check that members have sizes, and that no payload exceeds its line rate."""
    for size in (*profile.aliases.values(), *profile.machines):
        if not profile.has(size):
            raise ProfileError(f"{size!r} is not a size, expected one like 8, 2x8 or 2x8-rails")
    numbers = profile.parameters.numbers
    for part in (spec for spec in CONSTANTS.values() if spec.is_part):
        if numbers.get(part.name, 0.0) > numbers.get(part.depends_on, math.inf):
            raise ProfileError(f"{part.name} is more than {part.depends_on}")
