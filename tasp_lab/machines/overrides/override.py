"""An override: a parameter by name and what becomes of its number, like ``nic.bandwidth=x2``.

The value is a factor (``x2``), what is added (``+1us``), or a new value (``900GB/s``)::

    override = parse_override("nic.bandwidth=x2")
    override.of(50e9, CONSTANTS["nic_bandwidth"].quantity)    # 1e11
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Any, Literal, overload

from tasp_lab.core.errors import OverrideError, QuantityError, WorkloadError, unknown
from tasp_lab.core.units import Number, parse_count
from tasp_lab.machines.constants import Quantity
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.parameters import Change, Parameter
from tasp_lab.workload.layer import Workload

LAYER = "layer."
"""How names of numbers of a layer begin; all others are of the machine."""

COMPUTE = "compute.rate"
"""The name of all rates of kernel calls together."""

_FACTOR = re.compile(r"x\s*(\d{1,12}(?:\.\d{1,12})?|\.\d{1,12}|\d{1,12}/\d{1,12})", re.ASCII)
_OTHER_FACTOR = re.compile(r"\*\s*([\d.]+)|([\d.]+)\s*x|(\d{1,12})\s*%", re.ASCII)
"""A factor as it is written elsewhere: ``*2``, ``2x``, ``50%``."""
_ZERO = re.compile(r"0+(?:\.0*)?", re.ASCII)


@dataclass(frozen=True)
class Override:
    """A number by name, changed in one of three ways.

    Parameters
    ----------
    name, text : as they were given.
    kind : ``times`` a factor, ``plus`` an amount, or ``to`` a new value.
    factor : for ``times``; 1 otherwise.
    """

    name: str
    text: str
    kind: Literal["times", "plus", "to"]
    factor: Fraction = Fraction(1)

    def __str__(self) -> str:
        return f"{self.name}={self.text}"

    def change(self, quantity: Quantity) -> Change:
        """What becomes of a number of this quantity, in SI units. Raises `OverrideError` for a text without its unit.

        >>> from tasp_lab.machines.constants import CONSTANTS
        >>> parse_override("nic.latency=+1us").change(CONSTANTS["nic_latency"].quantity).of(2e-6)
        3e-06
        """
        if self.kind == "times":
            return Change(self.factor, 0, self.name, self.text)
        # nothing added needs no unit, everything else does
        text = self.text.lstrip("+-").strip() if self.kind == "plus" else self.text
        try:
            amount = 0.0 if self.kind == "plus" and _ZERO.fullmatch(text) else quantity.parse(text)
        except QuantityError as error:
            raise OverrideError(f"override {self}: {error}") from error
        return Change(int(self.kind != "to"), -amount if self.text[0] == "-" else amount, self.name, self.text)

    def of(self, old: Number, quantity: Quantity) -> Number:
        """The number in place of an old one, in SI units, exact for exact ones.

        >>> from tasp_lab.machines.constants import CONSTANTS
        >>> parse_override("nic.bandwidth=x2").of(Fraction(50), CONSTANTS["nic_bandwidth"].quantity)
        Fraction(100, 1)

        Raises `OverrideError` for an amount without its unit, a rate of 0, a negative time, a fraction of a channel and
        the like.
        """
        new = self.change(quantity).of(old)
        self.check(new, quantity)
        return new

    def check(self, new: Number, quantity: Quantity) -> None:
        """Raise `OverrideError` for a number that the quantity cannot have."""
        try:  # a new value is checked as it was written
            quantity.parse(self.text if self.kind == "to" else quantity.format(float(new), 15))
        except QuantityError as error:
            raise OverrideError(f"override {self}: {error}") from error

    def source(self, was: str, source: str) -> str:
        """The source of the number: a new value is given and exact, a changed one as sure as the old one.

        >>> parse_override("nic.bandwidth=x2").source("50GB/s", "assumed: as NDR")
        'assumed: nic.bandwidth x2, was 50GB/s (assumed: as NDR)'
        """
        return Change(int(self.kind != "to"), 0, self.name, self.text).source(was, source)

    def line(self, parameters: Iterable[Parameter]) -> str:
        """What became of the number, by the parameters of the changed machine, whose sources are from `source`.

        >>> override = parse_override("nic.bandwidth=-5GB/s")
        >>> override.line([Parameter("nic_bandwidth", 45e9, override.source("50GB/s", "a data sheet"))])
        'nic.bandwidth 50GB/s → 45GB/s (-5GB/s)'
        """
        begin = f"{self.name} {self.text}, was "
        for parameter in parameters:
            source = parameter.source.removeprefix("given: ").removeprefix("assumed: ")
            if source.startswith(begin):
                was = source.removeprefix(begin).partition(" (")[0]
                how = "" if self.kind == "to" else f" ({self.text})"
                return f"{self.name} {was} → {parameter.text}{how}"
        return f"{self.name} {self.text}"


def parse_override(text: str) -> Override:
    """The override of a text.

    >>> str(parse_override(" nic.bandwidth = x2")), parse_override("nic.latency=-1us").kind
    ('nic.bandwidth=x2', 'plus')

    Raises `OverrideError` for a text that is not ``NAME=VALUE``, for a factor that is not positive, and for one that is
    written in another way.
    """
    name, equals, value = (part.strip() for part in text.partition("="))
    if not (name and equals and value):
        raise OverrideError(f"override {text!r}: expected NAME=VALUE, like nic.bandwidth=x2")
    if value.startswith("x"):
        match = _FACTOR.fullmatch(value)
        if match and (factor := _fraction(match[1])):
            return Override(name, value, "times", factor)
        raise OverrideError(
            f"override {text!r}: factor {value!r}: expected x and a number more than 0, like x2 or x0.5"
        )
    if meant := _OTHER_FACTOR.fullmatch(value):
        wanted = f"{int(meant[3]) / 100:g}" if meant[3] else meant[1] or meant[2]
        raise OverrideError(f"override {text!r}: {value!r} is no factor, did you mean x{wanted}?")
    return Override(name, value, "plus" if value.startswith(("+", "-")) else "to")


def _fraction(text: str) -> Fraction:
    try:
        return Fraction(text)
    except ZeroDivisionError:
        return Fraction(0)


def parse_overrides(texts: Sequence[str]) -> list[Override]:
    """The overrides of texts. Raises `OverrideError` for a single text, which would be read letter by letter."""
    if isinstance(texts, str):
        raise OverrideError(f"overrides {texts!r}: expected a sequence of texts, like ({texts!r},)")
    return [parse_override(text) for text in texts]


def has_nics(machine: Machine) -> bool:
    """Whether ranks have NICs into a network."""
    return "network" in machine.topology.switch_kinds.values()


# ------------------------------------------------------------ fields of an attention layer: layer.kv_heads=1

TEXTS = ("dtype", "mask", "kind", "decay", "layers")
"""Fields that are words."""

LAYER_NAMES = tuple(f"{LAYER}{each.name}" for each in fields(Workload))


@overload
def overridden_layer(work: Workload, overrides: Sequence[str]) -> Workload: ...
@overload
def overridden_layer(work: Workload | int, overrides: Sequence[str]) -> Workload | int: ...
def overridden_layer(work: Workload | int, overrides: Sequence[str]) -> Workload | int:
    """The layer with those overrides whose names begin with ``layer.``; the others are of the machine.

    Heads of keys and values follow the number of heads where both are equal, and the sequence follows documents.

    >>> overridden_layer(Workload(8192), ["layer.kv_heads=1", "layer.sequence=x2", "nic.bandwidth=x2"])
    Workload(sequence=16384, batch=1, heads=32, kv_heads=1, head_dim=128, dtype='bf16', mask='causal', window=None, \
documents=None)

    Raises `OverrideError` for a collective, an unknown field, a field given twice, and a value that the layer cannot
    have.
    """
    found = parse_overrides(overrides)
    if not isinstance(work, Workload):
        for override in found:
            if override.name.startswith((LAYER, "compute")) or override.name.endswith(".compute"):
                raise OverrideError(f"override {override}: a collective has no layer and no kernel calls")
        return work
    given = [each for each in found if each.name.startswith(LAYER)]
    if not given:
        return work
    changes: dict[str, Any] = {}
    for override in given:
        field = _field(override)
        if field in changes:
            raise OverrideError(f"override {override}: {LAYER}{field} is given twice, expected once")
        changes[field] = _value(work, field, override)
    try:
        return replace(work, **_followed(work, changes))
    except WorkloadError as error:
        raise OverrideError(f"override {', '.join(map(str, given))}: {error}") from error


def _field(override: Override) -> str:
    name = override.name.removeprefix(LAYER)
    field = "sequence" if name == "seq" else name
    if LAYER + field not in LAYER_NAMES:
        raise OverrideError(f"override {override}: {unknown('name', override.name, LAYER_NAMES)}")
    return field


def _value(work: Workload, field: str, override: Override) -> object:
    is_text, old = field in TEXTS, getattr(work, field)
    if override.kind != "to":
        if is_text or field == "documents":
            raise OverrideError(f"override {override}: expected a new value, not a factor and no sum")
        if old is None:
            raise OverrideError(f"override {override}: the layer has no {field}, expected a number like 4096")
    count = Quantity("", lambda text: parse_count(text, override.name, least=0))
    if field == "documents":
        return tuple(int(replace(override, text=part).of(0, count)) for part in override.text.split(","))
    return override.text if is_text else int(override.of(old or 0, count))


def _followed(work: Workload, changes: dict[str, Any]) -> dict[str, Any]:
    """The changes, and those of fields that follow from them."""
    if "heads" in changes and work.kv_head_count == work.heads:
        changes = {"kv_heads": changes["heads"], **changes}
    if "documents" in changes:
        changes = {"sequence": sum(changes["documents"]), **changes}
    return changes
