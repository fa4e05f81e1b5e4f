"""Machines by name, by file and by expression.

A name is one of the catalogue (the data files of `tasp_lab.machines`, and the members that profiles list) or of any
other member of a family that has a profile (`tasp_lab.machines.profile`: ``h100-10x8``), a file ends in ``.json`` or
``.toml``, and an expression is short for a builder (`tasp_lab.topology.expressions`): ``full-mesh:8``, ``torus:4x4``,
``nodes:2x8:switch:rails``.

A file has one of two forms. The *explicit* form lists every link, where an integer is a rank and a text a switch;
`topology_document` writes it. It may give switches a kind and ranks a node; otherwise these follow from the links
(`Topology.switch_kinds`, `Topology.node_of_rank`), never from names. The *expression* form has an expression and each
number it needs as a constant with its source. Numbers are SI; bandwidths and latencies may also be texts with a unit
(``50GB/s``, ``1us``).
In both forms, `accelerator` is one of `tasp_lab.machines.compute`, and the constants `COMPUTE_RATES` are the
attention rates of a rank. In the explicit form, `profile` is a family of machines, which has the library, the kernels
and the constants that the file does not state (`tasp_lab.machines.own_links`); without it, the constant `LAUNCH` is the
time to post a message, as measured by `tasp-lab calibrate` on running ranks.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from fractions import Fraction
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated

import msgspec

from tasp_lab.core.errors import ProfileError, QuantityError, TopologyError, alternatives, nearest, of_type
from tasp_lab.core.records import Record, Text
from tasp_lab.core.units import parse_bandwidth_bytes_per_s, parse_time_s
from tasp_lab.machines.compute import COMPUTE_RATES, compute_on, with_accelerator
from tasp_lab.machines.machine import IDEAL, CommLibrary, Machine, NetworkKind
from tasp_lab.machines.own_links import family_of, machine_of_family
from tasp_lab.machines.parameters import Constant, Parameter, Parameters, parse_interval
from tasp_lab.machines.profile import listed_members, load_profile, member
from tasp_lab.machines.system import LIBRARIES, gloo
from tasp_lab.topology.expressions import (
    EXPRESSION_DEFAULTS,
    MAX_WORLD_SIZE,
    PARSERS,
    ExpressionDefaults,
    expression_forms,
    parse_expression,
)
from tasp_lab.topology.graph import Link, SharedCapacity, Switch, Topology
from tasp_lab.topology.links import SwitchKind

_DECODERS: dict[str, Callable[[str], object]] = {".json": msgspec.json.decode, ".toml": msgspec.toml.decode}


LAUNCH = "launch"
"""The constant of the time a rank takes to post a message, like ``50us``."""


def load_machine(text: str, defaults: ExpressionDefaults = EXPRESSION_DEFAULTS, *, library: str = "auto") -> Machine:
    """The machine of a catalogue name, a file or an expression, with its communication library.

    Parameters
    ----------
    text : the name, the file or the expression.
    defaults : the numbers of a bare expression; names and files have their own.
    library : ``auto`` for that of the machine's profile or file, if any, else ``ideal``; ``ideal`` for the links
        alone; ``gloo`` for any machine; ``nccl`` or ``rccl`` for machines whose profile has it, NCCL also with its
        version, like ``nccl==2.28``.

    >>> load_machine("h100-8").comm_library.name, load_machine("h100-8", library="ideal").comm_library.name
    ('nccl', 'ideal')
    >>> len(load_machine("nodes:2x4").topology.links)
    40

    Raises `TopologyError` for an unknown name and a malformed file or expression, and `ProfileError` for a library that
    is unknown or for which the machine has no constants.
    """
    if not isinstance(text, str):
        raise TopologyError(of_type("machine", text, "the name of a machine"))
    if library.partition("==")[0] not in ("auto", *LIBRARIES):
        raise ProfileError(f"library {library!r} is unknown: expected auto, {', '.join(LIBRARIES)}")
    found = member(text, library)
    if found is not None:
        return found
    machine = _load_links(text, defaults, library)
    if library == "auto" or family_of(machine):
        return machine
    if library not in ("ideal", "gloo"):
        how = ", or a file of topologies import --profile" if Path(text).suffix.lower() in _DECODERS else ""
        raise ProfileError(f"library {library!r}: {text} has no profile; expected auto, ideal or gloo there{how}")
    return replace(machine, comm_library=gloo() if library == "gloo" else IDEAL)


def _load_links(text: str, defaults: ExpressionDefaults, library: str) -> Machine:
    """The machine of a description, an expression or a file, without its library, but for a file with a profile."""
    if text in _described():
        return _read_machine(f"machine {text!r}", ".toml", (_catalogue() / f"{text}.toml").read_bytes())
    if text.partition(":")[0] in expression_forms():
        return Machine(parse_expression(text).build(defaults))
    if Path(text).suffix.lower() in _DECODERS or os.sep in text or os.path.exists(text):
        return _load_file(Path(text), library)
    raise TopologyError(_unknown(text))


def catalogue_names() -> list[str]:
    """The machines of tasp-lab, in alphabetical order.

    >>> catalogue_names()[:3]
    ['a10-4-pcie', 'a100-8', 'a100_100g-2x8']
    """
    return sorted([*_described(), *listed_members()])


def is_expression(text: str) -> bool:
    """Whether a text is an expression, which takes numbers; catalogue names and files have their own.

    >>> is_expression("switch:8"), is_expression("h100-8")
    (True, False)
    """
    return text.partition(":")[0] in expression_forms() and text not in catalogue_names()


def machine_file(machine: Machine, ending: str) -> bytes:
    """A topology file of the machine, ``.json`` or ``.toml``."""
    document = topology_document(machine)
    return json.dumps(document, indent=1).encode() if ending == ".json" else msgspec.toml.encode(document)


def topology_document(machine: Machine) -> dict[str, object]:
    """The machine as a plain document in the explicit form; of its library it has only the constants, or the profile.

    Loading the document gives an equal machine, except for fractions, which become floats, and compute rates that are
    not constants.

    >>> topology_document(load_machine("ring:2"))["links"][0]
    {'source': 0, 'destination': 1, 'bandwidth_bytes_per_s': 50000000000.0, 'latency_s': 1e-06}
    """
    topology, family = machine.topology, family_of(machine)
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
        "constants": [_constant(parameter) for parameter in parameters],
        **({"accelerator": machine.accelerator} if machine.accelerator else {}),
        **({"network": machine.network} if machine.network != "documented" and not family else {}),
    }


def _constant(parameter: Parameter) -> dict[str, object]:
    found: dict[str, object] = {"name": parameter.name, "value": parameter.text, "source": parameter.source}
    if parameter.interval_texts is not None:
        found["interval"] = list(parameter.interval_texts)
    return found


def _plain(part: Link | SharedCapacity | Switch) -> dict[str, object]:
    return {key: _plain_value(value) for key, value in asdict(part).items()}


def _plain_value(value: object) -> object:
    if isinstance(value, Fraction):
        return float(value)
    return list(value) if isinstance(value, tuple) else value


def _described() -> list[str]:
    """The machines with their own description."""
    return [entry.name[: -len(".toml")] for entry in _catalogue().iterdir() if entry.name.endswith(".toml")]


def _catalogue() -> Traversable:
    return files("tasp_lab.machines") / "descriptions"


def _unknown(text: str) -> str:
    near = nearest(text.partition(":")[0], [*expression_forms(), *catalogue_names()], 5)
    kind = next((each for each in expression_forms() if re.match(rf"{each}[-_ ]?\d", text)), None)
    if kind is not None:  # an expression without its colon
        near = [f"{kind}:{text.removeprefix(kind).lstrip('-_ ')}"]
    hint = f" (did you mean {alternatives(near)}?)" if near else ""
    return (
        f"machine {text!r} is unknown{hint}: expected a machine such as h100-8 or h100-10x8, a .json or .toml file, or "
        "an expression such as full-mesh:8 or nodes:2x8; tasp-lab topologies lists all"
    )


_Switch = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z][A-Za-z0-9_.-]*\Z")]
_WorldSize = Annotated[int, msgspec.Meta(ge=1, le=MAX_WORLD_SIZE)]


class _LinkRecord(Record, frozen=True, forbid_unknown_fields=True):
    source: int | _Switch
    destination: int | _Switch
    bandwidth_bytes_per_s: float | str
    latency_s: float | str

    def link(self, where: str) -> Link:
        bandwidth_bytes_per_s = _bandwidth(where, self.bandwidth_bytes_per_s)
        latency_s = _number(f"{where}.latency_s", self.latency_s, parse_time_s)
        return Link(self.source, self.destination, bandwidth_bytes_per_s, latency_s)


class _SharedRecord(Record, frozen=True, forbid_unknown_fields=True):
    name: Text
    bandwidth_bytes_per_s: float | str
    links: tuple[str, ...]

    def shared_capacity(self, where: str) -> SharedCapacity:
        return SharedCapacity(self.name, _bandwidth(where, self.bandwidth_bytes_per_s), self.links)


class _SwitchRecord(Record, frozen=True, forbid_unknown_fields=True):
    name: _Switch
    kind: SwitchKind


class _ExplicitFile(Record, frozen=True, forbid_unknown_fields=True):
    name: Text
    world_size: _WorldSize
    links: tuple[_LinkRecord, ...]
    summary: str = ""
    shared: tuple[_SharedRecord, ...] = ()
    switches: tuple[_SwitchRecord, ...] = ()
    nodes: tuple[int, ...] = ()
    constants: tuple[Constant, ...] = ()
    accelerator: str | None = None
    network: NetworkKind = "documented"
    profile: str = ""

    def topology(self) -> Topology:
        links = tuple(record.link(f"$.links[{index}]") for index, record in enumerate(self.links))
        shared = tuple(record.shared_capacity(f"$.shared[{index}]") for index, record in enumerate(self.shared))
        switches = tuple(Switch(record.name, record.kind) for record in self.switches)
        return Topology(self.name, self.world_size, links, shared, switches, self.nodes)


class _ExpressionFile(Record, frozen=True, forbid_unknown_fields=True):
    name: Text
    expression: str
    summary: str = ""
    constants: tuple[Constant, ...] = ()
    accelerator: str | None = None
    network: NetworkKind = "documented"

    def topology(self) -> Topology:
        expression = parse_expression(self.expression)
        given = [record.name for record in self.constants if record.name not in COMPUTE_RATES]
        needed = expression.constant_names
        if sorted(given) != sorted(needed):
            raise TopologyError(
                f"{self.expression!r} needs the constants {', '.join(needed) or '(none)'}, each once, "
                f"got {', '.join(given) or '(none)'} - at `$.constants`"
            )
        return replace(expression.build(self._numbers()), name=self.name)

    def _numbers(self) -> ExpressionDefaults:
        numbers = {}
        for index, record in enumerate(self.constants):
            if record.name not in COMPUTE_RATES:
                field, parse = PARSERS[record.name]
                numbers[field] = _number(f"$.constants[{index}].value", record.value, parse)
        return ExpressionDefaults(**numbers)


def _parameters(constants: tuple[Constant, ...]) -> Parameters:
    """The parameters that a file states. Raises `TopologyError` for malformed and repeated ones."""
    found: dict[str, Parameter] = {}
    for index, record in enumerate(constants):
        if record.name in found:
            count = sum(other.name == record.name for other in constants)
            raise TopologyError(f"expected the constant {record.name} once, got it {count} times - at `$.constants`")
        try:
            parameter = Parameter.parse(record.name, record.value, record.source)
        except QuantityError as error:
            raise TopologyError(f"{error} - at `$.constants[{index}].value`") from error
        low, high = parse_interval(record, f"$.constants[{index}]")
        found[record.name] = replace(parameter, low=low, high=high)
    return Parameters(found.values())


def _with_rates(own: Parameters, accelerator: str | None) -> Parameters:
    """The parameters of a file and the compute rates of its accelerator."""
    every = with_accelerator(tuple(own.values()), accelerator)
    return Parameters(each for each in every if each.name in own or each.name in COMPUTE_RATES)


def _comm_library(record: _ExplicitFile | _ExpressionFile, parameters: Parameters) -> CommLibrary:
    """The library of the explicit form, whose launch time is a constant."""
    if isinstance(record, _ExplicitFile) and LAUNCH in parameters:
        return CommLibrary("measured", parameters.numbers[LAUNCH])
    return IDEAL


def _bandwidth(where: str, value: float | str) -> float:
    return _number(f"{where}.bandwidth_bytes_per_s", value, parse_bandwidth_bytes_per_s)


def _number(where: str, value: float | str, parse: Callable[[str], float]) -> float:
    if not isinstance(value, str):
        return value
    try:
        return parse(value)
    except QuantityError as error:
        raise TopologyError(f"{error} - at `{where}`") from error


def _load_file(path: Path, library: str) -> Machine:
    where = f"file {str(path)!r}"
    if os.path.isdir(path):
        raise TopologyError(f"{where} is a directory, expected a file whose name ends in .json or .toml")
    if path.suffix.lower() not in _DECODERS:
        raise TopologyError(f"{where}: expected a file whose name ends in .json or .toml")
    if os.path.exists(path) and not os.path.isfile(path):
        raise TopologyError(f"{where} is no regular file")
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        raise TopologyError(f"{where} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    return _read_machine(where, path.suffix.lower(), data, library)


def _read_machine(where: str, suffix: str, data: bytes, library: str = "auto") -> Machine:
    if not data.strip():
        raise TopologyError(f"{where} is empty, expected a topology")
    try:
        record = _record(_DECODERS[suffix](data.decode("utf-8-sig")))
        if isinstance(record, _ExplicitFile) and record.profile:
            return _of_family(record, library)
        topology = record.topology()
        parameters = _with_rates(_parameters(record.constants), record.accelerator)
        accelerator = record.accelerator or ""
        return Machine(
            topology,
            _comm_library(record, parameters),
            compute_on(parameters, accelerator),
            record.summary,
            parameters,
            accelerator=accelerator,
            network=record.network,
        )
    except UnicodeDecodeError as error:
        raise TopologyError(f"{where}: expected UTF-8 text, byte {error.start} is something else") from error
    except (TopologyError, ProfileError, ValueError, OverflowError, RecursionError) as error:
        kind = ProfileError if isinstance(error, ProfileError) else TopologyError
        raise kind(" ".join(f"{where}: {_no_number(data, error)}".split())) from error


def _no_number(data: bytes, error: Exception) -> str:
    """The message of an error; with the word, where JSON has ``NaN`` or ``Infinity``, which only Python writes."""
    at = re.search(r"JSON is malformed: .*\(byte (\d+)\)", str(error))
    word = re.match(rb"NaN|-?Infinity", data[int(at[1]) :]) if at else None
    if at is None or word is None:
        return str(error)
    return f"JSON is malformed: {word[0].decode()} is not allowed, expected a number (byte {at[1]})"


def _of_family(record: _ExplicitFile, library: str) -> Machine:
    """The machine of a file that names a profile. Raises `ProfileError`, and `TopologyError` for a wrong constant."""
    parameters = _parameters(record.constants)
    profile = load_profile(record.profile)
    if record.accelerator not in (None, profile.accelerator):
        raise TopologyError(f"accelerator {record.accelerator!r}, but the profile {profile.name!r} has "
                            f"{profile.accelerator!r}, expected one of them - at `$.accelerator`")  # fmt: skip
    return machine_of_family(
        record.profile, profile, record.topology(), parameters, library=library, summary=record.summary
    )


def _record(document: object) -> _ExplicitFile | _ExpressionFile:
    fields = msgspec.convert(document, dict[str, object])
    if ("links" in fields) == ("expression" in fields):
        raise TopologyError("expected either `links` (the explicit form) or `expression`, got both or none of them")
    if "expression" in fields:
        return msgspec.convert(fields, _ExpressionFile)
    return msgspec.convert(fields, _ExplicitFile)
