"""The known machine that is nearest to a log whose GPUs or network no profile names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from tasp_lab.core.errors import TableError, TaspLabError
from tasp_lab.machines.catalogue import catalogue_names, load_machine
from tasp_lab.machines.kernel_model.catalogue import gpu_names
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.overrides import overridden
from tasp_lab.machines.profile import load_profile, profile_names
from tasp_lab.measure.check.diagnosis import Observation, plausibility
from tasp_lab.measure.profiles import machine_named
from tasp_lab.measure.readers import MeasuredTable

NIC_RATES = (1.25, 3.125, 12.5, 25.0, 50.0)
"""NICs of 10, 25, 100, 200 and 400 Gbit/s, in GB/s: what a log of several nodes does not tell."""

_OF_NODES = ("a100", "h100", "mi300x")
"""Families that stand for all others where several nodes are measured: NICs matter more there."""

_NVIDIA = (*gpu_names(), "v100")
"""GPUs of machines without a profile, all of NVIDIA; these logs are of no TPU, Gaudi or Ascend."""

_AMD = re.compile(r"\b(AMD|MI\d{3}|Instinct|gfx)", re.IGNORECASE)


def nearest_machine(table: MeasuredTable, rows: Sequence[Observation]) -> Machine:
    """The machine with as many ranks and nodes as a table says under which the measured times are most likely.

    Raises `TableError` if none has so many.
    """
    found = list(_candidates(table))
    if not found:
        raise TableError(
            f"{table.name}: no machine of tasp-lab has {table.size} ranks, expected --machine with a name or a file"
        )
    return max(found, key=lambda machine: plausibility(machine, rows))


def _candidates(table: MeasuredTable) -> Iterator[Machine]:
    """The members of all families with documented networks in this size, and the machines of the catalogue."""
    is_amd = bool(_AMD.search(table.headers.get("gpu", "")))
    several = "x" in table.size
    for name in profile_names():
        profile = load_profile(name)
        if profile.network == "cloud" or (profile.library == "rccl") != is_amd or not profile.has(table.size):
            continue
        machine = machine_named(f"{name}-{table.size}")
        if not several:
            yield machine
        elif name in _OF_NODES:
            yield from (overridden(machine, [f"nic.bandwidth={rate}GB/s"]) for rate in NIC_RATES)
    for name in catalogue_names():
        try:
            machine = load_machine(name)
        except TaspLabError:
            continue
        is_other = machine.system is None and machine.accelerator in _NVIDIA
        if is_other and not several and not is_amd and machine.topology.world_size == table.ranks:
            yield machine
