"""Machines by name, by file and by expression.

A name is one of the catalogue (the data files of `tasp_lab.machines`), a file ends in ``.json`` or ``.toml``, and an
expression is short for a builder: ``full-mesh:8``, ``switch:8``, ``ring:8``, ``nodes:2x8:switch:rails``.

A file has one of two forms. The *explicit* form lists every link, where an integer is a rank and a text a switch; it
is what `topology_document` writes. The *expression* form names an expression and gives each number it needs as a
constant with its source. Numbers are SI; bandwidths and latencies may also be texts with a unit (``50GB/s``, ``1us``).
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated

import msgspec

from tasp_lab import builders
from tasp_lab.errors import QuantityError, TopologyError
from tasp_lab.machine import Constant, Machine
from tasp_lab.quantities import Number, parse_bandwidth_bytes_per_s, parse_time_s
from tasp_lab.topology import Link, SharedCapacity, Topology

MAX_WORLD_SIZE = 4096
"""The largest world size of an expression or a file."""

MAX_LINKS = 1024 * 1023
"""The most links of an expression: those of a full mesh of 1024 ranks, which takes seconds to build."""

_FORMS = {
    "full-mesh": "full-mesh:N",
    "switch": "switch:N",
    "ring": "ring:N",
    "nodes": "nodes:UxM[:switch][:rails]",
}
_ONE_NODE = re.compile(r"(full-mesh|switch|ring):([1-9][0-9]{0,3})")
_NODES = re.compile(r"nodes:([1-9][0-9]{0,3})x([1-9][0-9]{0,3})(|:switch|:rails|:switch:rails|:rails:switch)")
_ONE_NODE_BUILDERS: dict[str, Callable[[int, Number, Number], Topology]] = {
    "full-mesh": builders.full_mesh,
    "switch": builders.switch,
    "ring": builders.ring,
}
_PARSERS: dict[str, tuple[str, Callable[[str], float]]] = {
    "link_bandwidth": ("link_bandwidth_bytes_per_s", parse_bandwidth_bytes_per_s),
    "link_latency": ("link_latency_s", parse_time_s),
    "nic_bandwidth": ("nic_bandwidth_bytes_per_s", parse_bandwidth_bytes_per_s),
    "nic_latency": ("nic_latency_s", parse_time_s),
}
"""For each constant of an expression: the field of `ExpressionDefaults` it sets, and how its text is read."""

_DECODERS: dict[str, Callable[[str], object]] = {".json": msgspec.json.decode, ".toml": msgspec.toml.decode}


@dataclass(frozen=True)
class ExpressionDefaults:
    """The numbers of a bare expression: bandwidths in bytes/s one way, latencies in seconds from rank to rank."""

    link_bandwidth_bytes_per_s: Number = builders.DEFAULT_LINK_BANDWIDTH_BYTES_PER_S
    link_latency_s: Number = builders.DEFAULT_LINK_LATENCY_S
    nic_bandwidth_bytes_per_s: Number = builders.DEFAULT_NIC_BANDWIDTH_BYTES_PER_S
    nic_latency_s: Number = builders.DEFAULT_NIC_LATENCY_S


EXPRESSION_DEFAULTS = ExpressionDefaults()


def load_machine(text: str, defaults: ExpressionDefaults = EXPRESSION_DEFAULTS) -> Machine:
    """The machine of a catalogue name, a file or an expression; `defaults` apply to a bare expression only.

    >>> load_machine("h100-8").topology.route(0, 7).latency_s
    6e-07
    >>> len(load_machine("nodes:2x4").topology.links)
    40

    Raises `TopologyError` with one line that says what was given, where it is wrong and what was expected.
    """
    if text in catalogue_names():
        return _read_machine(f"machine {text!r}", ".toml", (_catalogue() / f"{text}.toml").read_bytes())
    if text.partition(":")[0] in _FORMS:
        return Machine(_parse_expression(text).topology(defaults))
    if Path(text).suffix.lower() in _DECODERS or os.sep in text or os.path.exists(text):
        return _load_file(Path(text))
    raise TopologyError(_unknown(text))


def catalogue_names() -> list[str]:
    """The machines that tasp-lab brings along, in alphabetical order.

    >>> catalogue_names()
    ['a10-4-pcie', 'h100-2x8', 'h100-8', 'mi300x-8']
    """
    return sorted(entry.name[: -len(".toml")] for entry in _catalogue().iterdir() if entry.name.endswith(".toml"))


def is_expression(text: str) -> bool:
    """Whether a text is an expression, which takes numbers; catalogue names and files have their own.

    >>> is_expression("switch:8"), is_expression("h100-8")
    (True, False)
    """
    return text.partition(":")[0] in _FORMS and text not in catalogue_names()


def expression_defaults(texts: Mapping[str, str]) -> ExpressionDefaults:
    """The usual numbers of an expression but for those given as texts with a unit, by their names as constants.

    >>> expression_defaults({"nic_latency": "3us"}).nic_latency_s
    3e-06
    """
    parsed = {field: parse(texts[name]) for name, (field, parse) in _PARSERS.items() if name in texts}
    return ExpressionDefaults(**parsed)


def topology_document(machine: Machine) -> dict[str, object]:
    """The machine without its transport as a plain document, which is a file in the explicit form.

    Fractions become floats; but for those, loading the document gives an equal machine.

    >>> topology_document(load_machine("ring:2"))["links"][0]
    {'source': 0, 'destination': 1, 'bandwidth_bytes_per_s': 50000000000.0, 'latency_s': 1e-06}
    """
    topology = machine.topology
    return {
        "name": topology.name,
        "summary": machine.summary,
        "world_size": topology.world_size,
        "links": [_plain(link) for link in topology.links],
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
    near = difflib.get_close_matches(text.casefold().partition(":")[0], [*_FORMS, *catalogue_names()], n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    names, forms = ", ".join(catalogue_names()), ", ".join(_FORMS.values())
    return f"machine {text!r} is unknown{hint}: expected one of {names}; a .json or .toml file; or one of {forms}"


@dataclass(frozen=True)
class _Expression:
    """An expression, taken apart: `words` are those after the numbers, `node_count` is 1 but for ``nodes``."""

    kind: str
    node_count: int
    ranks_per_node: int
    words: str = ""

    @property
    def link_count(self) -> int:
        """The links inside the nodes; those of the network are few."""
        is_mesh = self.kind in ("full-mesh", "nodes") and "switch" not in self.words
        return self.node_count * self.ranks_per_node * (self.ranks_per_node - 1 if is_mesh else 2)

    @property
    def constant_names(self) -> list[str]:
        """The constants that this expression needs."""
        kinds = [kind for kind, used in (("link", self.ranks_per_node > 1), ("nic", self.node_count > 1)) if used]
        return [f"{kind}_{quantity}" for kind in kinds for quantity in ("bandwidth", "latency")]

    def topology(self, numbers: ExpressionDefaults) -> Topology:
        if self.kind != "nodes":
            build = _ONE_NODE_BUILDERS[self.kind]
            return build(self.ranks_per_node, numbers.link_bandwidth_bytes_per_s, numbers.link_latency_s)
        inside: builders.Inside = "switch" if "switch" in self.words else "full-mesh"
        network: builders.Network = "rails" if "rails" in self.words else "fabric"
        return builders.nodes(self.node_count, self.ranks_per_node, inside, network, **asdict(numbers))


def _parse_expression(text: str) -> _Expression:
    expression = _match_expression(text)
    if expression is None or expression.node_count * expression.ranks_per_node > MAX_WORLD_SIZE:
        form = _FORMS.get(text.partition(":")[0], " or ".join(_FORMS.values()))
        raise TopologyError(f"machine {text!r}: expected {form} with 1 to {MAX_WORLD_SIZE} ranks in all")
    if expression.link_count > MAX_LINKS:
        raise TopologyError(f"machine {text!r}: that is {expression.link_count} links, expected at most {MAX_LINKS}")
    return expression


def _match_expression(text: str) -> _Expression | None:
    if match := _ONE_NODE.fullmatch(text):
        return _Expression(match[1], 1, int(match[2]))
    if match := _NODES.fullmatch(text):
        return _Expression("nodes", int(match[1]), int(match[2]), match[3])
    return None


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
        expression = _parse_expression(self.expression)
        given, needed = [record.name for record in self.constants], expression.constant_names
        if sorted(given) != sorted(needed):
            raise TopologyError(
                f"{self.expression!r} needs the constants {', '.join(needed) or '(none)'}, each once, "
                f"got {', '.join(given) or '(none)'} - at `$.constants`"
            )
        return replace(expression.topology(self._numbers()), name=self.name)

    def _numbers(self) -> ExpressionDefaults:
        numbers = {}
        for index, record in enumerate(self.constants):
            field, parse = _PARSERS[record.name]
            numbers[field] = _number(f"$.constants[{index}].value", record.value, parse)
        return ExpressionDefaults(**numbers)


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
        return Machine(record.topology(), summary=record.summary, constants=constants)
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
