"""Provenance of a result: version, inputs and their hash, constants with their sources, engine, search and date.

The *inputs* are a plain JSON document of everything that determines the numbers of a result. Their hash is the SHA-256
of that document as canonical JSON: keys sorted, no spaces, ASCII only. An integral number is written as an integer, any
other as a float where a float is exact, else as a text such as ``"1/3"``, so equal numbers have one form. A large part
(the links of a topology, rings, a measured table) is replaced by its own SHA-256. The hash does not depend on the
process, the machine, the date or the version of tasp-lab; nor does it depend on options that only add output.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tasp_lab.core.tables import brief
from tasp_lab.core.units import format_flops, format_time
from tasp_lab.core.version import VERSION
from tasp_lab.machines.compute import COMPUTE_RATES, KernelCompute
from tasp_lab.machines.host import HostModel
from tasp_lab.machines.machine import Compute, ComputeRate, ComputeRates, Machine
from tasp_lab.machines.parameters import Parameter
from tasp_lab.machines.stack import load_stack
from tasp_lab.rings.rings import Decomposition
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.files import content_name
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import is_left_out


@dataclass(frozen=True)
class UsedConstant:
    """A constant behind a result: its value as text, and its source."""

    name: str
    value: str
    source: str

    @property
    def assumed(self) -> bool:
        """Whether it is an assumption."""
        return self.source.startswith("assum")


@dataclass(frozen=True, repr=False)
class Provenance:
    """Where a result comes from.

    Parameters
    ----------
    inputs : a plain JSON document of what determines the result.
    constants : the constants of the machine, with their sources.
    engines : the simulation engines that were used.
    search_complete : whether a larger search budget would give the same rings; None where no rings were used.
    environment : of measurements: versions, fabric, scale and host.
    version : of tasp-lab.
    date : UTC, ISO 8601.
    """

    inputs: Mapping[str, object]
    constants: tuple[UsedConstant, ...] = ()
    engines: tuple[str, ...] = ()
    search_complete: bool | None = None
    environment: Mapping[str, object] = field(default_factory=dict)
    version: str = VERSION
    date: str = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))

    def __repr__(self) -> str:
        return brief(self, f"tasp-lab {self.version}", self.date, f"inputs {self.inputs_sha256[:12]}")

    @property
    def inputs_sha256(self) -> str:
        """The SHA-256 of the inputs as canonical JSON, in hexadecimal digits."""
        return sha256(self.inputs)

    def to_dict(self) -> dict[str, object]:
        """The field `provenance` of ``--json``."""
        return {
            "version": self.version,
            "date": self.date,
            "inputs": dict(self.inputs),
            "inputs_sha256": self.inputs_sha256,
            "constants": [asdict(each) | {"assumed": each.assumed} for each in self.constants],
            "engine": " and ".join(self.engines) or None,
            "search_complete": self.search_complete,
            **({"environment": dict(self.environment)} if self.environment else {}),
        }


def sha256(document: object) -> str:
    """The SHA-256 of a plain JSON document in canonical form.

    >>> sha256({"b": 1, "a": [0.5]}) == hashlib.sha256(b'{"a":[0.5],"b":1}').hexdigest()
    True
    """
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def plain(value: object) -> object:
    """A value as plain JSON; a dataclass becomes its type and its fields, optional ones only where they are given.

    >>> plain({"a": (1.0, Fraction(1, 3), math.inf)}), plain(UsedConstant("a", "1s", "here"))
    ({'a': [1, '1/3', 'inf']}, {'type': 'UsedConstant', 'name': 'a', 'value': '1s', 'source': 'here'})

    Raises `TypeError` for a value of any other type.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float, Fraction, np.integer, np.floating)):
        return _number(value.item() if isinstance(value, np.generic) else value)
    if isinstance(value, np.ndarray):
        # in one order of bytes, so that hashes are equal on all computers
        data = np.ascontiguousarray(value.astype(value.dtype.newbyteorder("<")))
        return {
            "shape": list(value.shape),
            "dtype": data.dtype.str,
            "sha256": hashlib.sha256(data.tobytes()).hexdigest(),
        }
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(value[key]) for key in sorted(value, key=str)}
    if is_dataclass(value):
        return {"type": type(value).__name__} | {
            each.name: plain(getattr(value, each.name))
            for each in fields(value)
            if each.compare and not is_left_out(value, each)
        }
    if isinstance(value, Sequence):
        return [plain(each) for each in value]
    raise TypeError(f"no plain form of {type(value).__name__}")


def _number(value: float | Fraction) -> int | float | str:
    # 2, 2.0 and 2/1 are one input
    if isinstance(value, float):
        return str(value) if not math.isfinite(value) else int(value) if value.is_integer() else value
    if value.denominator == 1:
        return value.numerator
    return float(value) if Fraction(float(value)) == value else str(value)


def machine_inputs(machine: Machine, *, compute: bool) -> dict[str, object]:
    """A machine as an input: its topology and communication library; with `compute`, compute rates and contention."""
    found = topology_inputs(machine.topology) | {"library": plain(machine.comm_library)}
    if not compute:
        return found
    if machine.contention.slows:
        found["contention"] = plain(machine.contention)
    if not machine.host.is_instant:
        found["host"] = plain(machine.host)
    if machine.rank_speeds:
        found["rank_speeds"] = plain(machine.rank_speeds)
    return found | {"compute": _rates(machine.compute)}


def machine_content(machine: Machine) -> dict[str, object]:
    """All of a machine that an answer follows from: the inputs, and what intervals and memory follow from.

    Sources and the summary are texts for people and left out.
    """
    from tasp_lab.prediction.training_step.rates import step_rates  # only questions that are stored need it

    stack = {"stack": _numbers_of(msgspec.to_builtins(load_stack(machine.stack)))} if machine.stack else {}
    return (
        machine_inputs(machine, compute=True)
        | stack
        | {
            "constants": [
                [each.name, each.value, each.at, each.low, each.high] for each in machine.parameters.values()
            ],
            "accelerator": machine.accelerator,
            "network": machine.network,
            "capacity_bytes": plain(step_rates(machine).capacity_bytes),
        }
    )


_TEXTS = {"summary", "library", "version", "source", "host_source", "text", "communication", "memory", "name"}
"""What a stack has for people."""


def _numbers_of(stack: Any) -> Any:
    """What predictions follow from in a stack, or in a part of it."""
    if isinstance(stack, dict):
        return {key: _numbers_of(value) for key, value in stack.items() if key not in _TEXTS}
    return [_numbers_of(each) for each in stack] if isinstance(stack, list | tuple) else stack


def _rates(compute: Compute) -> object:
    if isinstance(compute, ComputeRate):
        return plain(compute.flops_per_s)
    if isinstance(compute, KernelCompute):
        return {"kernel": plain(compute.content()), "others": _rates(compute.rest)}
    assert isinstance(compute, ComputeRates), "there are no others"
    return {" ".join(kind): plain(rate.flops_per_s) for kind, rate in sorted(compute.rates.items())}


def topology_inputs(topology: Topology) -> dict[str, object]:
    """A topology as an input: its name, its size, and the hash of its links, shared capacities, switches and nodes."""
    content = {
        "links": _links(topology),
        "shared": plain(topology.shared),
        "switches": plain(topology.switches),
        "nodes": plain(topology.nodes),
        **({"labels": plain(topology.labels)} if topology.labels else {}),
    }
    return {"topology": topology.name, "world_size": topology.world_size, "topology_sha256": sha256(content)}


def _links(topology: Topology) -> object:
    """All links; those of a full mesh as one, so that a large mesh costs nothing."""
    samples = topology.table.samples
    if topology.table.is_mesh and len({link.latency_s for link in samples}) == 1:
        return ["full mesh", _number(samples[0].bandwidth_bytes_per_s), _number(samples[0].latency_s)]
    return [
        [link.source, link.destination, _number(link.bandwidth_bytes_per_s), _number(link.latency_s)]
        for link in topology.links
    ]


def rings_inputs(decompositions: Iterable[Decomposition]) -> list[object]:
    """Given rings as an input: each decomposition with its rings and shares."""
    return [{"rings": plain(each.rings), "shares": plain(each.shares)} for each in decompositions]


def schedules_inputs(schedules: Iterable[str | Schedule]) -> list[object]:
    """Schedules as an input: by name, and objects with their digest."""
    return [
        content_name(each) if isinstance(each, str) else {"name": each.name, "digest": each.digest}
        for each in schedules
    ]


def overrides_inputs(overrides: Sequence[str]) -> dict[str, object]:
    """Overrides as an input, without blanks; nothing without any."""
    return {"overrides": ["".join(each.split()) for each in overrides]} if overrides else {}


def machine_constants(constants: Iterable[Parameter], prefix: str = "") -> tuple[UsedConstant, ...]:
    """The constants of a machine or a profile without compute rates."""
    return tuple(
        UsedConstant(
            prefix + each.name, each.text if each.at is None else f"{each.text} at {each.at_text}", each.source
        )
        for each in constants
        if each.name not in COMPUTE_RATES
    )


def host_constants(host: HostModel) -> tuple[UsedConstant, ...]:
    """The constants of a host model."""
    of_host = [
        UsedConstant(f"{host.name} {field}", format_time(getattr(host, field)), source)
        for field, source in host.sources
    ]
    passes = host.passes
    moved = {each.name: getattr(passes, each.name) for each in fields(passes) if each.name.endswith("_bytes")}
    of_passes = [
        UsedConstant(f"{host.name} {name}", f"{size:g} B per element", passes.source)
        for name, size in moved.items()
        if size
    ]
    return (*of_host, *of_passes)


def compute_constants(dtype: str, rates: Mapping[str, ComputeRate]) -> tuple[UsedConstant, ...]:
    """The compute rates of a layer, one per pass, and the constants of their kernels."""
    of_rates = [
        UsedConstant(
            f"compute rate {dtype} {passing}" + (f", {rate.kernel} at most" if rate.kernel else ""),
            "no time" if rate.flops_per_s is None else format_flops(rate.flops_per_s),
            rate.source,
        )
        for passing, rate in rates.items()
    ]
    of_kernels = dict.fromkeys(each for rate in rates.values() for each in rate.parameters)
    return (*of_rates, *machine_constants(of_kernels))
