"""An override: a parameter by name and what becomes of its number, like ``nic.bandwidth=x2``.

The value is a factor (``x2``), what is added (``+1us``), or a new value (``900GB/s``)::

    override = parse_override("nic.bandwidth=x2")
    override.of(50e9, CONSTANTS["nic_bandwidth"].quantity)    # 1e11
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from tasp_lab.core.errors import OverrideError, QuantityError
from tasp_lab.core.units import Number
from tasp_lab.machines.constants import CONSTANTS, Quantity
from tasp_lab.machines.intervals import WIRES
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.parameters import Change, Parameter

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

    def of(self, old: Number, quantity: Quantity) -> Number:
        """The number in place of an old one, in SI units, exact for exact ones.

        >>> parse_override("nic.latency=+1us").of(2e-6, CONSTANTS["nic_latency"].quantity)
        3e-06

        Raises `OverrideError` for an amount without its unit, a rate of 0 and a negative time.
        """
        if self.kind == "times":
            return old * self.factor
        try:
            text = self.text.lstrip("+-").strip() if self.kind == "plus" else self.text
            amount = 0.0 if self.kind == "plus" and _ZERO.fullmatch(text) else quantity.parse(text)
        except QuantityError as error:
            raise OverrideError(f"override {self}: {error}") from error
        exact = Fraction(amount) if isinstance(old, Fraction) else amount
        if self.kind == "to":
            return exact
        new = old + exact if self.text[0] == "+" else old - exact
        if new > 0 or (new == 0 and (quantity.unit == "s" or not old)):  # only a time may be 0
            return new
        least = "0 or more" if quantity.unit == "s" else "more than 0"
        raise OverrideError(f"override {self}: {quantity.format(float(old), 6)}{self.text}: expected {least}")

    def checked(self, old: float, quantity: Quantity) -> float:
        """The number in place of an old one. Raises `OverrideError`, also for a fraction of a channel and the like."""
        new = float(self.of(old, quantity))
        try:
            quantity.parse(self.text if self.kind == "to" else quantity.format(new, 15))
        except QuantityError as error:
            raise OverrideError(f"override {self}: {error}") from error
        return new

    def change(self, old: float, new: float) -> Change:
        """The change from an old number to a new one, which `checked` has found."""
        if self.kind == "to":
            return Change(0, new)
        return Change(float(self.factor)) if self.kind == "times" else Change(1, new - old)

    def source(self, was: str, source: str) -> str:
        """The source of the number: a new value is given and exact, a changed one as sure as the old one.

        >>> parse_override("nic.bandwidth=x2").source("50GB/s", "assumed: as NDR")
        'assumed: nic.bandwidth x2, was 50GB/s (assumed: as NDR)'
        """
        known = "given: " if self.kind == "to" else "assumed: " if source.startswith("assum") else ""
        return f"{known}{self._was}{was} ({source})"

    @property
    def _was(self) -> str:
        return f"{self.name} {self.text}, was "

    def line(self, parameters: Iterable[Parameter]) -> str:
        """What became of the number, by the parameters of the changed machine, whose sources are from `source`.

        >>> override = parse_override("nic.bandwidth=-5GB/s")
        >>> override.line([Parameter("nic_bandwidth", 45e9, override.source("50GB/s", "a data sheet"))])
        'nic.bandwidth 50GB/s → 45GB/s (-5GB/s)'
        """
        for parameter in parameters:
            source = parameter.source.removeprefix("given: ").removeprefix("assumed: ")
            if source.startswith(self._was):
                was = source.removeprefix(self._was).partition(" (")[0]
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
        try:
            factor = Fraction(match[1]) if match else Fraction(0)
        except ZeroDivisionError:
            factor = Fraction(0)
        if factor <= 0:
            raise OverrideError(
                f"override {text!r}: factor {value!r}: expected x and a number more than 0, like x2 or x0.5"
            )
        return Override(name, value, "times", factor)
    if meant := _OTHER_FACTOR.fullmatch(value):
        wanted = f"{int(meant[3]) / 100:g}" if meant[3] else meant[1] or meant[2]
        raise OverrideError(f"override {text!r}: {value!r} is no factor, did you mean x{wanted}?")
    return Override(name, value, "plus" if value.startswith(("+", "-")) else "to")


def parse_overrides(texts: Sequence[str]) -> list[Override]:
    """The overrides of texts. Raises `OverrideError` for a single text, which would be read letter by letter."""
    if isinstance(texts, str):
        raise OverrideError(f"overrides {texts!r}: expected a sequence of texts, like ({texts!r},)")
    return [parse_override(text) for text in texts]


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
    return any(kind != "network" for kind in machine.topology.switch_kinds.values())


def has_nics(machine: Machine) -> bool:
    """Whether ranks have NICs into a network."""
    return "network" in machine.topology.switch_kinds.values()
