"""Overrides of the constants of a machine: of its profile, or of its links and its library where it has none."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from tasp_lab.core.errors import OverrideError
from tasp_lab.core.units import Number
from tasp_lab.machines.compute_rates import COMPUTE_RATES
from tasp_lab.machines.constants import CONSTANTS
from tasp_lab.machines.contention import NONE
from tasp_lab.machines.libraries.library import TcpLibrary
from tasp_lab.machines.machine import Constant, EditedRecipe, Machine, Recipe
from tasp_lab.machines.overrides.link_classes import with_class
from tasp_lab.machines.overrides.names import shown
from tasp_lab.machines.overrides.override import Override
from tasp_lab.machines.overrides.profile_constants import overridden_profile
from tasp_lab.machines.profile import Member
from tasp_lab.topology.graph import Topology

LIBRARY_FIELDS = {"launch": "launch_s", "tcp_payload": "payload_share"}
"""Constants of a library without a profile, and its fields."""


def member_of(machine: Machine) -> Member | None:
    """The member of a profile that a machine is; None for one of an expression, a file or links."""
    recipe = machine.recipe
    while isinstance(recipe, EditedRecipe):
        recipe = recipe.recipe
    return recipe if isinstance(recipe, Member) else None


def library_constants(machine: Machine, others: Collection[str]) -> list[str]:
    """The constants of its library that a machine has beside `others`."""
    library = machine.comm_library
    has = {"launch": bool(library.launch_s), "tcp_payload": isinstance(library, TcpLibrary)}
    return [name for name, has_it in has.items() if has_it and name not in others]


def with_constants(machine: Machine, overrides: Mapping[str, Override]) -> Machine:
    """The machine with overrides of constants that it has, by name."""
    member = member_of(machine)
    read = () if member is None else member.constants_read()
    of_library = {name: overrides[name] for name in library_constants(machine, read) if name in overrides}
    rest = {name: override for name, override in overrides.items() if name not in of_library}
    if member is not None and rest:
        machine = _with_profile(machine, member, rest)
    elif rest:
        machine = _with_links(machine, rest)
    for name, override in of_library.items():
        machine = _with_library(machine, name, override)
    return machine


def _with_profile(machine: Machine, member: Member, overrides: Mapping[str, Override]) -> Machine:
    if not _has_own_links(machine):
        raise OverrideError(
            f"{machine.topology.name}: its links are not those of its profile any more; override it before they change"
        )
    made = replace(member, profile=overridden_profile(member.profile, overrides)).machine()
    for edit in _edits(machine.recipe):
        made = made.edited(edit)
    of_name = {each.name: each for each in made.constants if each.name not in COMPUTE_RATES}
    own = made.comm_library.name == machine.comm_library.name
    return replace(
        machine,
        topology=made.topology,
        comm_library=made.comm_library if own else machine.comm_library,
        constants=tuple(of_name.get(each.name, each) for each in machine.constants),
        contention=made.contention if machine.contention.slows else NONE,
        recipe=made.recipe,
    )


def _has_own_links(machine: Machine) -> bool:
    """Whether the topology follows from the constants."""
    if machine.recipe is None:
        return True
    made = machine.recipe.topology(machine.constants)
    return replace(made, name=machine.topology.name) == machine.topology


def _edits(recipe: Recipe | None) -> Iterator[Callable[[Topology], Topology]]:
    """The edits of a recipe's topology, in order."""
    if isinstance(recipe, EditedRecipe):
        yield from _edits(recipe.recipe)
        yield recipe.edit


def _with_links(machine: Machine, overrides: Mapping[str, Override]) -> Machine:
    """The machine with overrides of all its links, or all its NICs."""
    for name, override in overrides.items():
        topology, old, new = with_class(machine.topology, name, override)
        machine = replace(_with_number(machine, name, override, old, new), topology=topology)
    return machine


def _with_library(machine: Machine, name: str, override: Override) -> Machine:
    """The machine with an override of a number of its library."""
    field, spec = LIBRARY_FIELDS[name], CONSTANTS[name]
    old: Number = getattr(machine.comm_library, field)
    new = spec.parse(override.text(float(old), spec.quantity))
    new = float(old) if new == old else new
    change: dict[str, Any] = {field: new}
    changed = _with_number(machine, name, override, old, new)
    return replace(changed, comm_library=replace(machine.comm_library, **change))


def _with_number(machine: Machine, name: str, override: Override, old: Number, new: Number) -> Machine:
    """The machine whose constant of a name, stated or not, has a new number."""
    spec = CONSTANTS[name]
    known = next((each for each in machine.constants if each.name == name), None)
    source = override.source(spec.format(float(old)), "of the machine" if known is None else known.source)
    constant = Constant(shown(name) if known is None else name, spec.format(float(new)), source)
    others = tuple(constant if each is known else each for each in machine.constants)
    return replace(machine, constants=others if known else (*others, constant))
