"""Overrides of single links: ``link.0-1=10GB/s`` and ``link.0-1.latency=+1us``; ``0>1`` is one direction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tasp_lab.core.errors import OverrideError
from tasp_lab.core.units import Number
from tasp_lab.machines.constants import CONSTANTS
from tasp_lab.machines.machine import Constant
from tasp_lab.machines.overrides.link_classes import FIELDS, Field, with_number
from tasp_lab.machines.overrides.override import Override
from tasp_lab.topology.derived import links_named
from tasp_lab.topology.graph import Topology
from tasp_lab.topology.links import Link

PREFIX = "link."


def is_named(name: str) -> bool:
    """Whether a name is that of a single link.

    >>> is_named("link.0>1"), is_named("link.0-1.latency"), is_named("link.bandwidth")
    (True, True, False)
    """
    return name.startswith(PREFIX) and ("-" in name or ">" in name)


def ends_and_field(name: str) -> tuple[str, str]:
    """The ends of a link and its quantity.

    >>> ends_and_field("link.0-1.latency"), ends_and_field("link.0>1")
    (('0-1', 'latency'), ('0>1', 'bandwidth'))
    """
    ends, _, field = name.removeprefix(PREFIX).rpartition(".")
    return (ends, field) if ends and field in FIELDS else (name.removeprefix(PREFIX), "bandwidth")


@dataclass(frozen=True)
class LinkOverrides:
    """An edit of a topology: overrides of single links."""

    overrides: tuple[Override, ...]

    def __call__(self, topology: Topology) -> Topology:
        """The topology with these overrides. Raises `TopologyError` for an unknown link, `OverrideError`."""
        changes = self._changes(topology)

        def changed(index: int, link: Link) -> Link:
            for (at, field), override in changes.items():
                if at == index:
                    link = with_number(link, field, _number(link, field, override))
            return link

        return topology.map_links(changed)

    def _changes(self, topology: Topology) -> Mapping[tuple[int, Field], Override]:
        """The override of each number of each link that has one."""
        found: dict[tuple[int, Field], Override] = {}
        for override in self.overrides:
            ends, field = ends_and_field(override.name)
            for link in links_named(topology, ends):
                other = found.setdefault((link, FIELDS[field]), override)
                if other is not override:
                    name = topology.links[link].name
                    raise OverrideError(f"override {override}: {name} has the override {other}, too, expected one")
        return found

    def constants(self, topology: Topology) -> list[Constant]:
        """The overridden numbers with their sources; `topology` has the old ones."""
        return [_constant(topology, override) for override in self.overrides]


def _number(link: Link, field: Field, override: Override) -> Number:
    value: Number = getattr(link, field)
    return override.of(value, CONSTANTS[f"link_{'latency' if field == 'latency_s' else 'bandwidth'}"].quantity)


def _constant(topology: Topology, override: Override) -> Constant:
    ends, field = ends_and_field(override.name)
    link = topology.links[links_named(topology, ends)[0]]
    spec = CONSTANTS[f"link_{field}"]
    was = spec.format(float(getattr(link, FIELDS[field])))
    new = spec.format(float(_number(link, FIELDS[field], override)))
    return Constant(override.name, new, override.source(was, f"{link.name} of the machine"))
