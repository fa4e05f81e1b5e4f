"""Names of numbers of a machine: those of its constants, and shorter ones for its wires."""

from __future__ import annotations

from collections.abc import Collection

from tasp_lab.machines.constants import CONSTANTS
from tasp_lab.machines.intervals import WIRES
from tasp_lab.machines.machine import Machine
from tasp_lab.topology.links import MeshLinks, SwitchKind

COMPUTE = "compute.rate"


def constant_name(machine: Machine, name: str) -> str:
    """The name of a constant as files have it; other names as they are.

    A dot stands for an underscore, and ``port`` for ``link`` where ranks have ports into a switch.

    >>> from tasp_lab.machines.catalogue import load_machine
    >>> [constant_name(load_machine("h100-8"), name) for name in ("port.latency", "nic.channel_rate", "compute.rate")]
    ['link_latency', 'nic_channel_rate', 'compute.rate']
    """
    if name == COMPUTE:
        return name
    constant = name.replace(".", "_")
    if constant.startswith("port_") and has_ports(machine):
        constant = constant.replace("port", "link", 1)
    return constant if constant in CONSTANTS else name


def shown(constant: str) -> str:
    """The name of a constant for people: wires have a dot.

    >>> shown("nic_bandwidth"), shown("nic_payload")
    ('nic.bandwidth', 'nic_payload')
    """
    return constant.replace("_", ".", 1) if constant in WIRES else constant


def has_ports(machine: Machine) -> bool:
    """Whether ranks of a node meet in a switch."""
    topology = machine.topology
    return not isinstance(topology.links, MeshLinks) and any(
        kind != "network" for kind in topology.switch_kinds.values()
    )


def has_nics(machine: Machine) -> bool:
    """Whether ranks have NICs into a network."""
    return "network" in _switch_kinds(machine)


def _switch_kinds(machine: Machine) -> Collection[SwitchKind]:
    """The kinds of its switches; none in a mesh, whose links are not listed."""
    topology = machine.topology
    return () if isinstance(topology.links, MeshLinks) else topology.switch_kinds.values()
