"""Profile files: reading, writing and lookup of families by name.

A profile file describes one family: the network of a node or rack, the network between them, the library and its
constants, each with its source. The families of tasp-lab are ``tasp_lab/machines/profiles/*.toml``; users may have
their own files anywhere.

Constants common to all machines of a library are in ``tasp_lab/machines/libraries/constants/*.toml``, those of an
accelerator in ``tasp_lab/machines/accelerators/*.toml``. A profile may override either. A profile with a `base` also
has the constants of that family of tasp-lab; those that depend on another follow its value, so a slower NIC needs one
line.
"""

from __future__ import annotations

import math
import re
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from tasp_lab.core.errors import ProfileError, QuantityError, TopologyError, expected_one_of
from tasp_lab.core.records import Record
from tasp_lab.machines.compute_rates import with_accelerator
from tasp_lab.machines.constants import CONSTANTS
from tasp_lab.machines.kernel_model.catalogue import gpu_alias
from tasp_lab.machines.machine import Machine, NetworkKind
from tasp_lab.machines.parameters import (
    DependentConstant,
    Parameter,
    Parameters,
    library_parameters,
    parse_constants,
)
from tasp_lab.machines.profile import SIZE, Profile
from tasp_lab.machines.system import Library
from tasp_lab.topology.expressions import MAX_WORLD_SIZE


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


def profile_names() -> list[str]:
    """The families of tasp-lab, in alphabetical order."""
    return sorted(entry.name[: -len(".toml")] for entry in (files("tasp_lab.machines") / "profiles").iterdir()
                  if entry.name.endswith(".toml"))  # fmt: skip


def load_profile(text: str) -> Profile:
    """The family of a name or of a ``.toml`` file. Raises `ProfileError`.

    >>> load_profile("h100").machine(10, 8).topology.world_size
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
    return profile.member(size, name or text, library)


def find_profile(text: str) -> tuple[Profile, Machine]:
    """The profile and member of a text: a family, of which the member is one node, or a member.

    Raises `ProfileError`.
    """
    found = member(text)
    if found is None:
        profile = load_profile(text)
        return profile, profile.machine(1, profile.ranks_per_node)
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
        **({"accelerator": profile.accelerator} if profile.accelerator else {}),
        "network": profile.network,
        "aliases": dict(profile.aliases),
        "machines": dict(profile.machines),
        "constants": [
            {"name": each.name, "value": each.text, "source": each.source}
            | ({} if each.at is None else {"at": each.at_text})
            | ({} if each.interval_texts is None else {"interval": list(each.interval_texts)})
            for each in profile.parameters.values()
        ],
    }
    return msgspec.toml.encode(head).decode()


def _read(where: str, data: bytes) -> Profile:
    if not data.strip():
        raise ProfileError(f"{where} is empty, expected a profile")
    try:
        profile = _profile(msgspec.toml.decode(data, type=_ProfileFile))
        _check_sizes(profile)
        _check_parts(profile)
    except UnicodeDecodeError as error:
        raise ProfileError(f"{where}: expected UTF-8 text, byte {error.start} is something else") from error
    except (ValueError, QuantityError, ProfileError, TopologyError) as error:
        raise ProfileError(" ".join(f"{where}: {error}".split())) from error
    return profile


def _profile(record: _ProfileFile) -> Profile:
    """The profile of a file, with what it does not override: of its accelerator, its base and its library."""
    own = parse_constants(record.constants)
    shared = [*with_accelerator((), record.accelerator), *_base_parameters(record), *library_parameters(record.library)]
    found = {parameter.name: parameter for parameter in own}
    for parameter in shared:
        found.setdefault(parameter.name, parameter)
    accelerator = record.accelerator or (_built_in(record.base).accelerator if record.base else "")
    return Profile(
        record.name, record.summary, record.library, record.inside, record.ranks_per_node, record.nodes_per_domain,
        Parameters(found.values()), record.aliases, record.machines, accelerator, record.network,
    )  # fmt: skip


def _base_parameters(record: _ProfileFile) -> tuple[Parameter, ...]:
    """The parameters of the base. Raises `ProfileError` for one that is unknown or of another library."""
    if record.base is None:
        return ()
    if record.base not in profile_names():
        raise ProfileError(f"base {record.base!r} is unknown: expected one of {', '.join(profile_names())}")
    base = _built_in(record.base)
    if base.library != record.library:
        raise ProfileError(f"base {record.base!r} is of {base.library}, expected one of {record.library}")
    return tuple(base.parameters.values())


def _check_sizes(profile: Profile) -> None:
    for size in (*profile.aliases.values(), *profile.machines):
        if SIZE.fullmatch(profile.aliases.get(size, size)) is None:
            raise ProfileError(f"{size!r} is not a size, expected one like 8, 2x8 or 2x8-rails")


def _check_parts(profile: Profile) -> None:
    """Check that no payload exceeds its line rate."""
    numbers = profile.parameters.numbers
    for part in (spec for spec in CONSTANTS.values() if spec.is_part):
        if numbers.get(part.name, 0.0) > numbers.get(part.depends_on, math.inf):
            raise ProfileError(f"{part.name} is more than {part.depends_on}")
