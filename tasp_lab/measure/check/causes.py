"""Why collectives are slow: each cause is the machine with other numbers, predicted as the healthy one is.

The file ``causes.toml`` has an entry per *effect*: what changes of a machine, and how severely it may. The *causes* of
an effect have severities of their own within it, and a remedy. Sizes and collectives tell effects apart, and causes of
one effect only by their severities; `Effect.separate` is the measurement that does.

>>> from tasp_lab.measure.profiles import machine_named
>>> [each.name for each in effects_on(machine_named("mi300x-8"))]
['slow links', 'slow launches', 'low clocks']
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Literal

import msgspec

from tasp_lab.core.errors import TaspLabError
from tasp_lab.machines.libraries.channels import ChannelLibrary
from tasp_lab.machines.libraries.nccl_tuning import ProtocolName, parse_version
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.overrides import overridden
from tasp_lab.prediction.residuals import spans_domains
from tasp_lab.schedules.collectives.kinds import NcclTestsName


class Cause(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What may have brought an effect about, by severities in `range`; all of them without one.

    `weight` is how often it is the reason beside others: 2 where the library's own guide to troubleshooting names it
    (an assumption).
    """

    name: str
    remedy: str
    source: str
    range: tuple[float, float] | None = None
    weight: float = 1.0

    def may_be(self, severity: float | None) -> bool:
        """Whether it may have a severity."""
        return severity is None or self.range is None or self.range[0] <= severity <= self.range[1]


class Effect(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What changes of a machine.

    Attributes
    ----------
    reach : where: inside a domain, between domains, on links that are PCIe, in NCCL's choices, or in any call.
    set : overrides, with the place of the severity in braces.
    severities : the numbers that are tried.
    from_bytes : sizes from which on it begins; empty for all sizes.
    collectives : those in which it is felt; empty for all.
    nvls : whether the switch may still add up and multicast.
    protocol : the only one that NCCL may take.
    versions : of NCCL, tried in turn.
    seen : whether NCCL's own cost model knows the changed numbers, and may choose otherwise.
    separate : the measurement that tells its causes apart.
    """

    name: str
    reach: Literal["inside", "between", "pcie", "nccl", "any"]
    causes: tuple[Cause, ...]
    separate: str
    set: tuple[str, ...] = ()
    severities: tuple[float, ...] = ()
    from_bytes: tuple[int, ...] = ()
    collectives: tuple[NcclTestsName, ...] = ()
    nvls: bool = True
    protocol: ProtocolName | None = None
    versions: tuple[str, ...] = ()
    seen: bool = False

    def variants(self, machine: Machine) -> Iterator[tuple[float | None, Machine]]:
        """The machine with each severity that it can have."""
        for severity in self.severities or (None,):
            for version in self.versions or (None,):
                try:
                    yield severity, self.on(machine, severity, version)
                except TaspLabError:
                    continue  # a number that the machine does not have, or cannot have

    def on(self, machine: Machine, severity: float | None = None, version: str | None = None) -> Machine:
        """The machine with this effect. Raises `TaspLabError` where it cannot have it."""
        known = [text for text in self.set if _name(text) in machine.parameters or machine.system is None]
        found = overridden(machine, [text.format(severity) for text in known]) if known else machine
        library, healthy = found.comm_library, machine.comm_library
        if not isinstance(library, ChannelLibrary) or not isinstance(healthy, ChannelLibrary):
            return found
        tuner = library.tuner if self.seen else healthy.tuner
        if tuner is not None:
            version_of = parse_version(version) if version else tuner.version
            protocols = (self.protocol,) if self.protocol else tuner.protocols
            in_switch = tuner.in_switch and self.nvls
            tuner = replace(tuner, version=version_of, protocols=protocols, in_switch=in_switch)
        return replace(found, comm_library=replace(library, tuner=tuner, nvls=library.nvls if self.nvls else None))


def _name(text: str) -> str:
    """The constant that an override names."""
    return text.partition("=")[0].replace(".", "_")


@cache
def effects() -> tuple[Effect, ...]:
    """All effects, in the order of the file."""
    data = (files("tasp_lab.measure.check") / "causes.toml").read_bytes()
    return msgspec.toml.decode(data, type=dict[Literal["effects"], tuple[Effect, ...]])["effects"]


def effects_on(machine: Machine) -> Sequence[Effect]:
    """The effects that a machine may have."""
    library = machine.comm_library
    is_channel = isinstance(library, ChannelLibrary)
    tuner = library.tuner if isinstance(library, ChannelLibrary) else None
    topology = machine.topology
    inside = len(set(topology.node_of_rank)) < topology.world_size
    can = {
        "inside": is_channel and inside,
        "between": is_channel and spans_domains(machine),
        "pcie": not is_channel,
        "nccl": tuner is not None,
        "any": is_channel,
    }
    found = []
    for each in effects():
        needs_switch = not each.nvls and not each.set
        of_nvidia = each.nvls or tuner is not None
        if can[each.reach] and of_nvidia and not (needs_switch and not (tuner and tuner.has_nvls)):
            found.append(each)
    return found
