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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from tasp_lab.core.errors import ProfileError, QuantityError, TopologyError, expected_one_of
from tasp_lab.core.records import Record, converted, data_names
from tasp_lab.machines.compute import COMPUTE_RATES, compute_on, with_accelerator
from tasp_lab.machines.constants import CONSTANTS
from tasp_lab.machines.kernel_model.catalogue import gpu_alias
from tasp_lab.machines.libraries.nccl_tuning import Generation
from tasp_lab.machines.machine import Machine, NetworkKind
from tasp_lab.machines.parameters import DependentConstant, Parameter, Parameters, library_parameters, parse_constants
from tasp_lab.machines.system import Library, System
from tasp_lab.topology.builders import Network
from tasp_lab.topology.expressions import MAX_WORLD_SIZE

_COUNT = "[1-9][0-9]{0,4}"
SIZE = re.compile(
    rf"(?:(?:(?P<domains>{_COUNT})x)?(?P<nodes>{_COUNT})x)?(?P<ranks>{_COUNT})(?:-(?P<network>rails|rails-only))?"
)
"""The size of a member, like ``8``, ``2x8``, ``2x8-rails`` or ``2x8-rails-only``; ``2x1x8`` begins with the domains."""

_NETWORKS: Mapping[str | None, Network] = {None: "fabric", "rails": "rails", "rails-only": "rails-only"}


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
    accelerator : the name of its GPUs, see `tasp_lab.machines.compute`; empty if they are unknown.
    ranks_per_nic : GPUs that share a NIC: 2 for nodes of 8 GPUs and 4 NICs.
    providers : the clouds whose nodes of its base these are, in lower case.
    network : whether the network of its machines is documented, or that of a cloud.
    generation : of the GPUs, as NCCL tells them apart; its constants are in
        ``libraries/constants/nccl_<generation>.toml``.
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
    generation: Generation | Literal[""] = ""
    ranks_per_nic: int = 1
    providers: tuple[str, ...] = ()

    def with_parameters(self, parameters: Parameters) -> Profile:
        """The family with other numbers."""
        return replace(self, parameters=parameters)

    def with_constants(self, constants: Iterable[Parameter]) -> Profile:
        """The family with these constants in place of its own of the same names, stated as they are."""
        new = {each.name: each for each in constants}
        return self.with_parameters(Parameters(new.get(each.name, each) for each in self.parameters.values()))

    def system(self, size: str, name: str = "", library: str = "auto") -> System:
        """The member of a size like ``10x8`` or ``2x8-rails``, or of an alias, without its numbers.

        Raises `ProfileError` for a text that is no size, and for a size outside the family.
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
        network = _NETWORKS[found["network"]]
        return self.system_of(domains, node_count // domains * ranks, name or f"{self.name}-{size}", library, network)

    def system_of(
        self, domains: int, ranks: int, name: str, library: str = "auto", network: Network = "fabric"
    ) -> System:
        """The system of so many domains of so many ranks each."""
        return System(
            self.name, self.library, self.inside, domains, ranks, network, library, name, self.generation,
            self.ranks_per_nic,
        )  # fmt: skip

    def build(self, system: System, summary: str = "") -> Machine:
        """The machine of a system with the parameters of this family.

        With another library than its own, the machine has only the parameters of its links and compute rates, and needs
        no others. Raises `ProfileError` if a parameter is missing, and for a library that the family does not have.
        """
        parameters = self.parameters
        used = parameters
        if not system.has_own_library:
            of_network = ("nic_bandwidth", "nic_latency") if system.domains > 1 else ()
            wires = ("link_bandwidth", "link_latency", *of_network, *COMPUTE_RATES)
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

    def has(self, size: str) -> bool:
        """Whether a text is a size like ``10x8`` or ``2x8-rails``, or an alias."""
        return SIZE.fullmatch(self.aliases.get(size, size)) is not None

    def machine(self, size: str, name: str = "", library: str = "auto") -> Machine:
        """The member of a size like ``10x8`` or ``2x8-rails``, or of an alias.

        `library` is ``auto`` or the name of the profile's own, or ``ideal`` or ``gloo``. Raises `ProfileError` for a
        size outside the family, and for other libraries.
        """
        return self.build(self.system(size, name, library), self.machines.get(size, ""))


class _ProfileFile(Record, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9_]*\Z")]
    summary: str
    library: Library
    inside: Literal["switch", "full-mesh"]
    constants: tuple[DependentConstant, ...]
    ranks_per_node: Annotated[int, msgspec.Meta(ge=1, le=MAX_WORLD_SIZE)] = 8
    nodes_per_domain: Annotated[int, msgspec.Meta(ge=1, le=MAX_WORLD_SIZE)] = 1
    aliases: dict[str, str] = msgspec.field(default_factory=dict)
    machines: dict[str, str] = msgspec.field(default_factory=dict)
    accelerator: str | None = None
    base: str | None = None
    network: NetworkKind = "documented"
    generation: Generation | None = None
    ranks_per_nic: Annotated[int, msgspec.Meta(ge=1, le=MAX_WORLD_SIZE)] = 1
    providers: tuple[str, ...] = ()


def profile_names() -> list[str]:
    """The families of tasp-lab, in alphabetical order."""
    return data_names("tasp_lab.machines", "profiles")


def load_profile(text: str) -> Profile:
    """The family of a name or of a ``.toml`` file. Raises `ProfileError`.

    >>> load_profile("h100").machine("10x8").topology.world_size
    80
    """
    if text in profile_names():
        return _built_in(text)
    if not text.endswith(".toml"):
        raise ProfileError(f"profile {text!r} is unknown: {expected_one_of(text, profile_names())}, or a .toml file")
    try:
        return _read(f"file {text!r}", Path(text).read_bytes())
    except OSError as error:
        raise ProfileError(f"file {text!r} cannot be read: {error.strerror}") from error


@cache
def _built_in(name: str) -> Profile:
    return _read(f"profile {name!r}", (files("tasp_lab.machines") / "profiles" / f"{name}.toml").read_bytes())


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
    path, _, size = text.rpartition(":") if re.search(r"\.toml:[^:/]+\Z", text) else (text, "", "")
    if path.endswith(".toml"):
        if not is_profile_file(path):
            return None
        profile = load_profile(path)
        size = size or str(profile.ranks_per_node)
    else:
        family, _, size = text.partition("-")
        if family not in profile_names():
            return None
        profile = load_profile(family)
    return profile.machine(size, name or text, library) if profile.has(size) else None


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
    found = member(text)
    if found is None:
        profile = load_profile(text)
        return profile, profile.machine(f"1x{profile.ranks_per_node}")
    path = re.sub(r"\.toml:[^:/]+\Z", ".toml", text)
    return load_profile(path if path.endswith(".toml") else text.partition("-")[0]), found


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
    try:
        return b"\nlibrary" in b"\n" + Path(path).read_bytes()
    except OSError:
        return False


def profile_document(profile: Profile) -> str:
    """The profile as the text of a file that `load_profile` reads."""
    head = {
        "name": profile.name,
        "summary": profile.summary,
        "library": profile.library,
        "inside": profile.inside,
        "ranks_per_node": profile.ranks_per_node,
        "nodes_per_domain": profile.nodes_per_domain,
        **({"ranks_per_nic": profile.ranks_per_nic} if profile.ranks_per_nic > 1 else {}),
        **({"providers": list(profile.providers)} if profile.providers else {}),
        **({"accelerator": profile.accelerator} if profile.accelerator else {}),
        "network": profile.network,
        **({"generation": profile.generation} if profile.generation else {}),
        "aliases": dict(profile.aliases),
        "machines": dict(profile.machines),
        "constants": [
            each.document() | ({} if each.at is None else {"at": each.at_text}) for each in profile.parameters.values()
        ],
    }
    return msgspec.toml.encode(head).decode()


def _read(where: str, data: bytes) -> Profile:
    if not data.strip():
        raise ProfileError(f"{where} is empty, expected a profile")
    try:
        profile = _profile(converted(msgspec.toml.decode(data), _ProfileFile))
        _check(profile)
    except UnicodeDecodeError as error:
        raise ProfileError(f"{where}: expected UTF-8 text, byte {error.start} is something else") from error
    except (ValueError, QuantityError, ProfileError, TopologyError) as error:
        raise ProfileError(" ".join(f"{where}: {error}".split())) from error
    return profile


def _profile(record: _ProfileFile) -> Profile:
    """The profile of a file, with what it does not override: of its accelerator, its base and its library."""
    own = parse_constants(record.constants)
    base = _base(record)
    generation = record.generation or (base.generation if base else "")
    shared = [
        *with_accelerator((), record.accelerator),
        *(base.parameters.values() if base else ()),
        *(library_parameters(f"{record.library}_{generation}") if generation else ()),
        *library_parameters(record.library),
    ]
    found = {parameter.name: parameter for parameter in own}
    for parameter in shared:
        found.setdefault(parameter.name, parameter)
    accelerator = record.accelerator or (base.accelerator if base else "")
    return Profile(
        record.name, record.summary, record.library, record.inside, record.ranks_per_node, record.nodes_per_domain,
        Parameters(found.values()), record.aliases, record.machines, accelerator, record.network, generation,
        record.ranks_per_nic, record.providers,
    )  # fmt: skip


def _base(record: _ProfileFile) -> Profile | None:
    """The family that is the base. Raises `ProfileError` for one that is unknown or of another library."""
    if record.base is None:
        return None
    if record.base not in profile_names():
        raise ProfileError(f"base {record.base!r} is unknown: expected one of {', '.join(profile_names())}")
    base = _built_in(record.base)
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
