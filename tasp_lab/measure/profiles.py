"""The machine of a measured table: by its header, by a name on the command line, or by the GPUs that a log lists.

>>> choose("h100-2x8").size, machine_named("h100-2x8").topology.world_size
('2x8', 16)
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from tasp_lab.core.errors import FitError, ProfileError
from tasp_lab.machines.catalogue import catalogue_names, load_machine
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.parameters import Parameter, read_constants
from tasp_lab.machines.profile import (
    Profile,
    at_provider,
    family_of_gpus,
    find_profile,
    member,
    profile_names,
)
from tasp_lab.measure.readers import AnyTable, KernelTable, LayerTable, MeasuredTable
from tasp_lab.measure.readers.table import profile_beside


class Choice(NamedTuple):
    """A profile and the size of its member, empty if not given."""

    profile: Profile
    size: str


def choose(text: str) -> Choice:
    """The profile and the size that a text like ``h100``, ``h100-2x8`` or ``my.toml:2x8`` names.

    >>> choose("h100").size
    ''

    Raises `ProfileError`.
    """
    profile, _ = find_profile(text)
    path, _, size = text.rpartition(".toml")
    return Choice(profile, size.lstrip(":") if path else text.partition("-")[2])


def choose_for(tables: Sequence[MeasuredTable]) -> Choice:
    """The profile in the tables' headers.

    Raises `FitError` for a table without one and for different profiles of one name, and `ProfileError`.
    """
    unnamed = [table for table in tables if table.profile is None]
    if unnamed or not tables:
        what, how = (unnamed[0].name, how_to_name(unnamed[0])) if unnamed else ("tables of pairs", how_to_name())
        raise FitError(f"{what}: the machine is missing, expected {how}")
    profile = choose(tables[0].machine or "").profile
    for table in tables:
        other = choose(table.machine or "").profile
        if other.name == profile.name and other != profile:
            raise FitError(
                f"{table.name}: profile {table.profile!r} differs from that of {tables[0].name}, "
                "expected one machine, or --profile"
            )
    return Choice(profile, "")


def suggested_profile(table: MeasuredTable) -> str:
    """The machine of a log by the GPUs that it lists, like ``h100-2x8``; empty if there is no family of them."""
    family = family_of_gpus(table.headers.get("gpu", ""))
    return f"{family.name}-{table.size}" if family is not None and table.ranks else ""


def how_to_name(table: MeasuredTable | None = None) -> str:
    """How users name the machine of a table, with an example."""
    name = (suggested_profile(table) if table else "") or "h100-8"
    return f"--profile, like --profile {name}, or a line # profile: {name} in the file"


def sized(name: str, size: str) -> str:
    """A machine by its name, or the member of this size of a family.

    >>> sized("h100", "2x8"), sized("h100-8", "2x8")
    ('h100-2x8', 'h100-8')
    """
    return f"{name}-{size}" if name in profile_names() else name


def on_profile(table: AnyTable, profile: str | None) -> tuple[AnyTable, str]:
    """A table with its machine, and a note if that is a guess; a table that names its machine stays as it is.

    Parameters
    ----------
    profile : of tables that name none: a machine, or a family, whose size is in the table. Without it, a log of one
        full node has the family of the GPUs that it lists.
    """
    if isinstance(table, KernelTable) or table.profile is not None:
        return table, ""
    if isinstance(table, LayerTable):
        return table.on(profile) if profile else table, ""
    if profile is not None:
        return table.on(sized(profile, table.size)), ""
    guess = suggested_profile(table)
    # only a full node is sure: behind fewer GPUs, or several nodes, is a network that the GPUs do not tell
    if not guess or table.headers.get("nodes") != "1" or choose(guess).profile.ranks_per_node != table.ranks:
        return table, ""
    what = f"{table.ranks} {table.headers['gpu']}"
    return table.on(guess), f"{Path(table.name).name}: taken as {guess}, by its {what}; --profile names another machine"


def machine_named(profile: str, library: str = "auto", name: str = "") -> Machine:
    """The member of a family, or the machine of the catalogue, that a table names.

    `name` is that of the machine and in messages: `profile`, if empty. Raises `ProfileError` if there is none.
    """
    machine = member(profile, library, name)
    if machine is None and profile in catalogue_names():
        machine = load_machine(profile, library=library)
    if machine is None:
        name = name or profile
        near = difflib.get_close_matches(name, [*profile_names(), *catalogue_names()], n=1, cutoff=0.5)
        hint = f", did you mean {near[0]!r}?" if near else ","
        raise ProfileError(
            f"there is no profile {name!r}{hint} expected one of {', '.join(profile_names())} with a size, like "
            "h100-2x8, a machine of the catalogue, like l20-8-pcie, or a file, like my.toml:2x8"
        )
    return machine


def machine_of(table: MeasuredTable, library: str = "auto", *, left_out: bool = False) -> Machine:
    """The machine of a table of a collective.

    With a header `provider` its network is that of this cloud, or of any, whatever its profile is; a header `library`,
    such as ``nccl==2.28.9``, is its library where `library` is ``auto``. With `left_out` the machine has no constant
    that comes from tables of the same system (`constants_without`).

    Raises `TaspLabError` if it has none.
    """
    headers = table.headers
    if not table.machine:
        raise ProfileError(f"the table does not name its machine, expected {how_to_name(table)}")
    library = headers.get("library", library) if library == "auto" else library
    machine = machine_named(at_provider(table.machine, headers.get("provider", "")), library, str(table.profile))
    without = constants_without(headers.get("system", "")) if left_out else ()
    if machine.system is not None and without:
        known = machine.parameters
        machine = machine.rebuilt(known.with_parameters(each for each in without if each.name in known))
    return replace(machine, network="cloud") if headers.get("provider") else machine


@cache
def machine_with(profile: str, gpus: int, nodes: int, folder: Path) -> Machine:
    """The machine of a row of layers: the member of a family with so many nodes and GPUs, or the machine that is named.

    `folder` is that of the table, which may have the file of the profile. Raises `ProfileError` if there is none, and
    for another number of GPUs.

    >>> machine_with("h100", 16, 2, Path()).topology.name
    'h100-2x8'
    """
    size, path = (f"{nodes}x{gpus // nodes}" if nodes > 1 else str(gpus)), profile_beside(profile, folder)
    if path.endswith(".toml"):
        machine = machine_named(f"{path}:{size}", name=f"{Path(path).stem}-{size}")
    else:
        machine = machine_named(f"{profile}-{size}" if profile in profile_names() else path)
    if machine.topology.world_size != gpus:
        raise ProfileError(f"{profile} has {machine.topology.world_size} ranks, the row {gpus} GPUs")
    return machine


@cache
def constants_without(system: str) -> tuple[Parameter, ...]:
    """What the family of a measured system would have without its tables; none where no constant is from them.

    ``tasp_lab/measure/left_out/<system>.toml``, made by ``python -m experiments.accuracy.library_constants``.
    """
    file = files("tasp_lab.measure") / "left_out" / f"{system}.toml"
    return read_constants(file.read_bytes()) if system and file.is_file() else ()
