"""Machines by name, by file and by expression.

A name is one of the catalogue (the data files of `tasp_lab.machines`) or of a family that has a profile
(`tasp_lab.profile`: ``h100-10x8``), a file ends in ``.json`` or ``.toml``, and an expression is short for a builder
(`tasp_lab.expressions`): ``full-mesh:8``, ``torus:4x4``, ``nodes:2x8:switch:rails``.

A file has one of two forms. The *explicit* form lists every link, where an integer is a rank and a text a switch; it
is what `topology_document` writes. The *expression* form names an expression and gives each number it needs as a
constant with its source. Numbers are SI; bandwidths and latencies may also be texts with a unit (``50GB/s``, ``1us``).
In both forms a constant `COMPUTE_RATE` says how fast a rank computes attention, in the explicit form a constant
`LAUNCH` how long it takes to post a message: what `tasp-lab calibrate` found on a machine that runs.
"""

from __future__ import annotations

import difflib
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

from tasp_lab.errors import ProfileError, QuantityError, TopologyError
from tasp_lab.expressions import (
    EXPRESSION_DEFAULTS,
    MAX_WORLD_SIZE,
    PARSERS,
    ExpressionDefaults,
    expression_forms,
    parse_expression,
)
from tasp_lab.machine import IDEAL, INSTANT, Compute, Constant, Machine, Transport
from tasp_lab.profile import LIBRARIES, gloo, member, profile_names
from tasp_lab.quantities import parse_bandwidth_bytes_per_s, parse_flops_per_s, parse_time_s
from tasp_lab.topology import Link, SharedCapacity, Topology

_DECODERS: dict[str, Callable[[str], object]] = {".json": msgspec.json.decode, ".toml": msgspec.toml.decode}


COMPUTE_RATE = "compute_rate"
"""The name of the constant that says how fast a rank computes attention, like ``328.6TFLOP/s``."""

LAUNCH = "launch"
"""The name of the constant that says how long a rank takes to post a message, like ``50us``."""


def load_machine(text: str, defaults: ExpressionDefaults = EXPRESSION_DEFAULTS) -> Machine:
    """The machine of a catalogue name, a file or an expression; `defaults` apply to a bare expression only.

    It is the wires, and the launch cost where a file states one; `with_library` adds what the communication library
    makes of them.

    >>> load_machine("h100-8").topology.route(0, 7).latency_s
    6e-07
    >>> len(load_machine("nodes:2x4").topology.links)
    40

    Raises `TopologyError` with one line that says what was given, where it is wrong and what was expected.
    """
    if text in catalogue_names():
        return _read_machine(f"machine {text!r}", ".toml", (_catalogue() / f"{text}.toml").read_bytes())
    if text.partition(":")[0] in expression_forms():
        return Machine(parse_expression(text).build(defaults))
    if (found := member(text, wires=True)) is not None:
        return found
    if Path(text).suffix.lower() in _DECODERS or os.sep in text or os.path.exists(text):
        return _load_file(Path(text))
    raise TopologyError(_unknown(text))


def with_library(text: str, machine: Machine, library: str = "auto") -> Machine:
    """The machine that a text names, with the transport of a communication library.

    `library` is ``auto`` for that of the machine's profile, or its own transport where it has no profile; ``ideal`` for
    none; ``gloo`` for any machine; ``nccl`` or ``rccl`` for machines whose profile is of it.

    >>> with_library("h100-8", load_machine("h100-8")).transport.name
    'nccl'

    Raises `ProfileError` for other names, and for libraries that the machine has no constants of.
    """
    if library not in ("auto", *LIBRARIES):
        raise ProfileError(f"library {library!r} is unknown: expected auto, {', '.join(LIBRARIES)}")
    if library == "gloo":
        return replace(machine, transport=gloo())
    found = member(text) if library != "ideal" else None
    if found is None or (library != "auto" and found.transport.name != library):
        if library in ("auto", "ideal"):
            return machine if library == "auto" else replace(machine, transport=IDEAL)
        has = f"the profile of {text} is of {found.transport.name}" if found else f"{text} has no profile"
        raise ProfileError(f"library {library!r}: {has}; expected auto, ideal or gloo there")
    return replace(machine, transport=found.transport)


def catalogue_names() -> list[str]:
    """The machines that tasp-lab brings along, in alphabetical order.

    >>> catalogue_names()[:3]
    ['a10-4-pcie', 'a100-8', 'ascend-910b-8']
    """
    return sorted(entry.name[: -len(".toml")] for entry in _catalogue().iterdir() if entry.name.endswith(".toml"))


def is_expression(text: str) -> bool:
    """Whether a text is an expression, which takes numbers; catalogue names and files have their own.

    >>> is_expression("switch:8"), is_expression("h100-8")
    (True, False)
    """
    return text.partition(":")[0] in expression_forms() and text not in catalogue_names()


def topology_document(machine: Machine) -> dict[str, object]:
    """The machine as a plain document, which is a file in the explicit form; of its transport only a constant is left.

    Fractions become floats; but for those, loading the document gives an equal machine, if its compute rate, too, is a
    constant.

    >>> topology_document(load_machine("ring:2"))["links"][0]
    {'source': 0, 'destination': 1, 'bandwidth_bytes_per_s': 50000000000.0, 'latency_s': 1e-06}
    """
    topology = machine.topology
    return {
        "name": topology.name,
        "summary": machine.summary,
        "world_size": topology.world_size,
        "links": [_plain(link) for link in topology.listed_links()],
        "shared": [_plain(shared) for shared in topology.shared],
        "constants": [_plain(constant) for constant in machine.constants],
    }


def _plain(part: Link | SharedCapacity | Constant) -> dict[str, object]:
    return {key: _plain_value(value) for key, value in asdict(part).items()}


def _plain_value(value: object) -> object:
    if isinstance(value, Fraction):
        return float(value)
    return list(value) if isinstance(value, tuple) else value


def _catalogue() -> Traversable:
    return files("tasp_lab") / "machines"


def _unknown(text: str) -> str:
    near = difflib.get_close_matches(text.casefold().partition(":")[0], [*expression_forms(), *catalogue_names()], n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    names, forms = ", ".join(catalogue_names()), ", ".join(expression_forms().values())
    families = ", ".join(f"{name}-NODESxRANKS" for name in profile_names())
    return (
        f"machine {text!r} is unknown{hint}: expected one of {names}; of a family, {families}; a .json or .toml file; "
        f"or one of {forms}"
    )


_Text = Annotated[str, msgspec.Meta(pattern=r"\S")]
_Switch = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z][A-Za-z0-9_.-]*\Z")]
_WorldSize = Annotated[int, msgspec.Meta(ge=1, le=MAX_WORLD_SIZE)]


_UNSEEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff]")
"""Characters that no line shows as they are: controls, line breaks, marks of direction and width, half characters."""


class _Record(msgspec.Struct, frozen=True):
    """A part of a file, the texts of which can be printed as they are."""

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            value = getattr(self, field)
            if isinstance(value, str) and (unseen := _UNSEEN.search(value)):
                raise ValueError(f"`{field}` has the character {unseen[0]!a}, expected text that can be seen")


class _LinkRecord(_Record, frozen=True, forbid_unknown_fields=True):
    source: int | _Switch
    destination: int | _Switch
    bandwidth_bytes_per_s: float | str
    latency_s: float | str

    def link(self, where: str) -> Link:
        bandwidth_bytes_per_s = _bandwidth(where, self.bandwidth_bytes_per_s)
        latency_s = _number(f"{where}.latency_s", self.latency_s, parse_time_s)
        return Link(self.source, self.destination, bandwidth_bytes_per_s, latency_s)


class _SharedRecord(_Record, frozen=True, forbid_unknown_fields=True):
    name: _Text
    bandwidth_bytes_per_s: float | str
    links: tuple[str, ...]

    def shared_capacity(self, where: str) -> SharedCapacity:
        return SharedCapacity(self.name, _bandwidth(where, self.bandwidth_bytes_per_s), self.links)


class _ConstantRecord(_Record, frozen=True, forbid_unknown_fields=True):
    name: _Text
    value: _Text
    source: _Text


class _ExplicitFile(_Record, frozen=True, forbid_unknown_fields=True):
    name: _Text
    world_size: _WorldSize
    links: tuple[_LinkRecord, ...]
    summary: str = ""
    shared: tuple[_SharedRecord, ...] = ()
    constants: tuple[_ConstantRecord, ...] = ()

    def topology(self) -> Topology:
        links = tuple(record.link(f"$.links[{index}]") for index, record in enumerate(self.links))
        shared = tuple(record.shared_capacity(f"$.shared[{index}]") for index, record in enumerate(self.shared))
        return Topology(self.name, self.world_size, links, shared)


class _ExpressionFile(_Record, frozen=True, forbid_unknown_fields=True):
    name: _Text
    expression: str
    summary: str = ""
    constants: tuple[_ConstantRecord, ...] = ()

    def topology(self) -> Topology:
        expression = parse_expression(self.expression)
        given = [record.name for record in self.constants if record.name != COMPUTE_RATE]
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
            if record.name != COMPUTE_RATE:
                field, parse = PARSERS[record.name]
                numbers[field] = _number(f"$.constants[{index}].value", record.value, parse)
        return ExpressionDefaults(**numbers)


def _compute(constants: tuple[_ConstantRecord, ...]) -> Compute:
    """How fast a rank computes, if a constant says so."""
    rate = _constant(constants, COMPUTE_RATE, parse_flops_per_s)
    return INSTANT if rate is None else Compute(rate)


def _transport(record: _ExplicitFile | _ExpressionFile) -> Transport:
    """What it costs to post a message, if a constant of the explicit form says so."""
    launch_s = _constant(record.constants, LAUNCH, parse_time_s) if isinstance(record, _ExplicitFile) else None
    return IDEAL if launch_s is None else Transport("measured", launch_s)


def _constant(constants: tuple[_ConstantRecord, ...], name: str, parse: Callable[[str], float]) -> float | None:
    """The number of a constant that may be there once."""
    numbers = [
        _number(f"$.constants[{index}].value", record.value, parse)
        for index, record in enumerate(constants)
        if record.name == name
    ]
    if len(numbers) > 1:
        raise TopologyError(f"expected the constant {name} once, got it {len(numbers)} times - at `$.constants`")
    return numbers[0] if numbers else None


def _bandwidth(where: str, value: float | str) -> float:
    return _number(f"{where}.bandwidth_bytes_per_s", value, parse_bandwidth_bytes_per_s)


def _number(where: str, value: float | str, parse: Callable[[str], float]) -> float:
    if not isinstance(value, str):
        return value
    try:
        return parse(value)
    except QuantityError as error:
        raise TopologyError(f"{error} - at `{where}`") from error


def _load_file(path: Path) -> Machine:
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
    return _read_machine(where, path.suffix.lower(), data)


def _read_machine(where: str, suffix: str, data: bytes) -> Machine:
    try:
        record = _record(_DECODERS[suffix](data.decode("utf-8-sig")))
        constants = tuple(Constant(known.name, known.value, known.source) for known in record.constants)
        return Machine(record.topology(), _transport(record), _compute(record.constants), record.summary, constants)
    except UnicodeDecodeError as error:
        raise TopologyError(f"{where}: expected UTF-8 text, byte {error.start} is something else") from error
    except (TopologyError, ValueError, OverflowError, RecursionError) as error:
        raise TopologyError(" ".join(f"{where}: {error}".split())) from error


def _record(document: object) -> _ExplicitFile | _ExpressionFile:
    fields = msgspec.convert(document, dict[str, object])
    if ("links" in fields) == ("expression" in fields):
        raise TopologyError("expected either `links` (the explicit form) or `expression`, got both or none of them")
    if "expression" in fields:
        return msgspec.convert(fields, _ExpressionFile)
    return msgspec.convert(fields, _ExplicitFile)
