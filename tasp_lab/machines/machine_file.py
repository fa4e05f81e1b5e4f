"""Files of machines, read and written.

A file ends in ``.json`` or ``.toml`` and has one of two forms. The *explicit* form lists every link, where an integer
is a rank and a text a switch; `topology_document` writes it. It may give switches a kind and ranks a node; otherwise
these follow from the links (`Topology.switch_kinds`, `Topology.node_of_rank`), never from names. The *expression* form
has an expression and each number it needs as a constant with its source. Numbers are SI; bandwidths and latencies may
also be texts with a unit: ``bandwidth = "50GB/s"`` or ``bandwidth_bytes_per_s = 50e9``. A file that ends in ``.csv``
is a list of links: its columns are the fields of a link in the explicit form.

In both forms, `accelerator` is one of `tasp_lab.machines.compute`, and the constants `COMPUTE_RATES` are the
attention rates of a rank. In the explicit form, `profile` is a family of machines, which has the library, the kernels
and the constants that the file does not state (`tasp_lab.machines.profile.Profile.machine_on`); without
it, the constants make the library (`tasp_lab.machines.libraries.library.library_of`).
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from fractions import Fraction
from math import prod
from pathlib import PurePath
from typing import Annotated, Any

import msgspec

from tasp_lab.core.errors import ProfileError, TaspLabError, TopologyError
from tasp_lab.core.records import Record, Text, as_text, converted
from tasp_lab.core.units import parse_bandwidth_bytes_per_s, parse_time_s
from tasp_lab.machines.compute import COMPUTE_RATES, compute_on, with_accelerator
from tasp_lab.machines.libraries.library import library_of
from tasp_lab.machines.machine import IDEAL, Machine
from tasp_lab.machines.parameters import Constant, Parameters, located
from tasp_lab.machines.profile import load_profile
from tasp_lab.machines.system import NetworkKind, Ranks
from tasp_lab.topology.builders import torus
from tasp_lab.topology.expressions import MAX_WORLD_SIZE, PARSERS, ExpressionDefaults, parse_expression
from tasp_lab.topology.graph import Link, SharedCapacity, Switch, Topology, both_ways
from tasp_lab.topology.links import SwitchKind
from tasp_lab.topology.routing import Grid


def _edge_list(text: str) -> list[dict[str, object]]:
    """The links of a list, as those of the explicit form. Raises `TopologyError` for a line without its cells."""
    numbered = _lines_of(text)
    rows = csv.reader([line for _, line in numbered], skipinitialspace=True, strict=True)
    names = [name.strip() for name in next(rows, [])]
    if len(set(names)) < len(names):
        raise TopologyError(f"line {numbered[0][0]}: the columns are {', '.join(names)}, expected each once")
    links: list[dict[str, object]] = []
    for (number, _), row in zip(numbered[1:], rows, strict=True):
        if len(row) != len(names):
            raise TopologyError(f"line {number}: {len(row)} cells, expected {len(names)}: {', '.join(names)}")
        cells = zip(names, map(str.strip, row), strict=True)
        links.append({name: _cell(name, value) for name, value in cells if value})
    return links


def _lines_of(text: str) -> list[tuple[int, str]]:
    """The lines of a list, the header first, with their numbers; without blank ones and comments."""
    return [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip() and line[0] != "#"]


def _cell(name: str, text: str) -> object:
    """A rank, a number, yes or no; else the text itself, whose unit is read later."""
    if name == "both_ways":
        return {"yes": True, "true": True, "no": False, "false": False}.get(text.lower(), text)
    if name in ("source", "destination"):
        return int(text) if text.lstrip("-").isdecimal() else text
    try:
        return float(text) if name in ("bandwidth_bytes_per_s", "latency_s") else text
    except ValueError:
        return text


_DECODERS: dict[str, Callable[[str], object]] = {
    ".json": msgspec.json.decode,
    ".toml": msgspec.toml.decode,
    ".csv": _edge_list,
}

LAUNCH = "launch"
"""The constant of the time a rank takes to post a message, like ``50us``."""


def read_machine(where: str, path: PurePath, data: bytes, library: str = "auto") -> Machine:
    """The machine of a file with this content; `where` names it in messages. Raises `TopologyError`, `ProfileError`."""
    if not data.strip():
        raise TopologyError(f"{where} is empty, expected a topology")
    suffix = path.suffix.lower()
    try:
        document = _DECODERS[suffix](as_text(data))
        return _build(_record({"name": path.stem, "links": document} if suffix == ".csv" else document), library)
    except (TaspLabError, ValueError, OverflowError, RecursionError, csv.Error) as error:
        kind = ProfileError if isinstance(error, ProfileError) else TopologyError
        # users know lines of a list and words of JSON, not numbers of links and bytes
        text = _by_line(data, error) if suffix == ".csv" else _no_number(data, error)
        raise kind(" ".join(f"{where}: {text}".split())) from error


def _build(record: _ExplicitFile | _ExpressionFile, library: str) -> Machine:
    """The machine of a record. Raises a `TaspLabError`."""
    own = Parameters.of_constants(record.constants)
    family = record.profile if isinstance(record, _ExplicitFile) else ""
    if family:
        profile = load_profile(family)
        if record.accelerator not in (None, profile.accelerator):
            raise TopologyError(f"accelerator {record.accelerator!r}, but the profile {profile.name!r} has "
                                f"{profile.accelerator!r}, expected one of them - at `$.accelerator`")  # fmt: skip
        return profile.machine_on(record.topology(own), own, family, library, record.summary)
    # of its accelerator a machine without a library has the compute rates alone
    every = with_accelerator(tuple(own.values()), record.accelerator)
    parameters = Parameters(each for each in every if each.name in own or each.name in COMPUTE_RATES)
    accelerator = record.accelerator or ""
    return Machine(
        record.topology(own),
        library_of(parameters.numbers) if isinstance(record, _ExplicitFile) else IDEAL,
        compute_on(parameters, accelerator),
        record.summary,
        parameters,
        accelerator=accelerator,
        network=record.network,
    )


def _by_line(data: bytes, error: Exception) -> str:
    """The message of an error in a list of links, which begins with the line in place of the number of the link."""
    found = re.fullmatch(r"(.*) - at `\$\.links\[(\d+)\][.\w]*`", str(error), re.DOTALL)
    if found is None:
        return str(error)
    return f"line {_lines_of(data.decode('utf-8-sig'))[int(found[2]) + 1][0]}: {found[1]}"


def _no_number(data: bytes, error: Exception) -> str:
    """The message of an error; with the word, where JSON has ``NaN`` or ``Infinity``, which only Python writes."""
    at = re.search(r"JSON is malformed: .*\(byte (\d+)\)", str(error))
    word = re.match(rb"NaN|-?Infinity", data[int(at[1]) :]) if at else None
    if at is None or word is None:
        return str(error)
    return f"JSON is malformed: {word[0].decode()} is not allowed, expected a number (byte {at[1]})"


def _record(document: object) -> _ExplicitFile | _ExpressionFile:
    fields = msgspec.convert(document, dict[str, object])
    if ("links" in fields) == ("expression" in fields):
        raise TopologyError("expected either `links` (the explicit form) or `expression`, got both or none of them")
    return converted(fields, _ExpressionFile) if "expression" in fields else converted(fields, _ExplicitFile)


def machine_file(machine: Machine, ending: str) -> bytes:
    """A topology file of the machine, ``.json`` or ``.toml``."""
    document = topology_document(machine)
    return json.dumps(document, indent=1).encode() if ending == ".json" else msgspec.toml.encode(document)


def topology_document(machine: Machine) -> dict[str, object]:
    """The machine as a plain document in the explicit form; of its library it has only the constants, or the profile.

    Loading the document gives an equal machine, except for fractions, which become floats, and compute rates that are
    not constants.

    >>> from tasp_lab.machines.catalogue import load_machine
    >>> topology_document(load_machine("ring:2"))["links"][0]
    {'source': 0, 'destination': 1, 'bandwidth_bytes_per_s': 50000000000.0, 'latency_s': 1e-06}
    """
    topology, family = machine.topology, machine.system.own_links if machine.system else ""
    parameters = list(machine.parameters.values())
    if family:  # what the file of the family states is read from there
        known = load_profile(family).parameters
        parameters = [each for each in parameters if known.get(each.name) != each]
    return {
        "name": topology.name,
        "summary": machine.summary,
        "world_size": topology.world_size,
        **({"profile": family} if family else {}),
        "links": [_plain(link) for link in topology.listed_links()],
        "shared": [_plain(shared) for shared in topology.shared],
        "switches": [_plain(switch) for switch in topology.switches],
        "nodes": list(topology.nodes),
        **({"labels": list(topology.labels)} if topology.labels else {}),
        **({"grid": {key: list(each) for key, each in asdict(topology.grid).items()}} if topology.grid else {}),
        "constants": [each.document() for each in parameters],
        **({"accelerator": machine.accelerator} if machine.accelerator else {}),
        **({"network": machine.network} if machine.network != "documented" and not family else {}),
    }


def _plain(part: Link | SharedCapacity | Switch) -> dict[str, object]:
    plain: dict[type, Callable[[Any], object]] = {Fraction: float, tuple: list}
    return {key: plain[type(value)](value) if type(value) in plain else value for key, value in asdict(part).items()}


_Switch = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z][A-Za-z0-9_.-]*\Z")]


class _Capacity(Record, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A bandwidth, in one of two fields: a text with its unit, or a number in SI units."""

    bandwidth: str = ""
    bandwidth_bytes_per_s: float | str = ""

    def rate(self, where: str) -> float:
        parse = parse_bandwidth_bytes_per_s
        return _number(where, "bandwidth", self.bandwidth, "bandwidth_bytes_per_s", self.bandwidth_bytes_per_s, parse)


class _LinkRecord(_Capacity, frozen=True, kw_only=True):
    source: int | _Switch
    destination: int | _Switch
    latency: str = ""
    latency_s: float | str = ""
    both_ways: bool = False

    def links(self, where: str) -> tuple[Link, ...]:
        latency_s = _number(where, "latency", self.latency, "latency_s", self.latency_s, parse_time_s)
        there, back = both_ways(self.source, self.destination, self.rate(where), latency_s)
        return (there, back) if self.both_ways else (there,)


class _SharedRecord(_Capacity, frozen=True, kw_only=True):
    name: Text
    links: tuple[str, ...]


class _SwitchRecord(Record, frozen=True, forbid_unknown_fields=True):
    name: _Switch
    kind: SwitchKind


class _File(Record, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What both forms have."""

    name: Text
    summary: str = ""
    constants: tuple[Constant, ...] = ()
    accelerator: str | None = None
    network: NetworkKind = "documented"


class _ExplicitFile(_File, frozen=True, kw_only=True):
    links: tuple[_LinkRecord, ...]
    world_size: Ranks | msgspec.UnsetType = msgspec.UNSET
    shared: tuple[_SharedRecord, ...] = ()
    switches: tuple[_SwitchRecord, ...] = ()
    nodes: tuple[int, ...] = ()
    labels: tuple[int, ...] = ()
    grid: Grid | None = None
    profile: str = ""

    def topology(self, _: Parameters) -> Topology:
        links = tuple(link for index, record in enumerate(self.links) for link in record.links(f"$.links[{index}]"))
        shared = tuple(
            SharedCapacity(record.name, record.rate(f"$.shared[{index}]"), record.links)
            for index, record in enumerate(self.shared)
        )
        switches = tuple(Switch(record.name, record.kind) for record in self.switches)
        world_size = self.world_size
        if world_size is msgspec.UNSET:
            ends = (end for link in links for end in (link.source, link.destination) if isinstance(end, int))
            world_size = min(max(ends, default=0) + 1, MAX_WORLD_SIZE)
        if self.grid is not None:
            sides = self.grid.sides
            own = torus(sides, wraps=self.grid.wraps).links if prod(sides) == world_size else ()
            if {(link.source, link.destination) for link in own} != {(link.source, link.destination) for link in links}:
                raise TopologyError(f"a grid of {'x'.join(map(str, sides))}, but other links - at `$.grid`")
        return Topology(self.name, world_size, links, shared, switches, self.nodes, self.labels, grid=self.grid)


class _ExpressionFile(_File, frozen=True, kw_only=True):
    expression: str

    def topology(self, parameters: Parameters) -> Topology:
        expression = parse_expression(self.expression)
        given = [name for name in parameters if name not in COMPUTE_RATES]
        needed = expression.constant_names
        if sorted(given) != sorted(needed):
            raise TopologyError(
                f"{self.expression!r} needs the constants {', '.join(needed) or '(none)'}, each once, "
                f"got {', '.join(given) or '(none)'} - at `$.constants`"
            )
        numbers = {PARSERS[name][0]: parameters[name].number for name in given}
        return replace(expression.build(ExpressionDefaults(**numbers)), name=self.name)


def _number(
    where: str, text_field: str, text: str, value_field: str, value: float | str, parse: Callable[[str], float]
) -> float:
    """The one of two fields that is given: a text with its unit, or a number in SI units, which may be a text, too."""
    if (text == "") == (value == ""):
        got = "none of them" if text == "" else "both"
        raise TopologyError(f"expected `{text_field}` with a unit or `{value_field}`, got {got} - at `{where}`")
    given = text or value
    with located(f"{where}.{text_field if text else value_field}"):
        return parse(given) if isinstance(given, str) else given
