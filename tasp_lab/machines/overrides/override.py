"""An override: a name and what becomes of its number, like ``nic.bandwidth=x2``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tasp_lab.core.errors import OverrideError, QuantityError
from tasp_lab.core.units import Number
from tasp_lab.machines.constants import Quantity
from tasp_lab.machines.machine import Constant
from tasp_lab.machines.overrides.change import Change, parse_change

LAYER = "layer."
"""How names of numbers of a layer begin; all others are of the machine."""


@dataclass(frozen=True)
class Override:
    """A number by name, and its change."""

    name: str
    change: Change

    def __str__(self) -> str:
        return f"{self.name}={self.change.text}"

    def of(self, old: Number, quantity: Quantity) -> Number:
        """The number in place of an old one, see `Change.of`. Raises `OverrideError` for an impossible one."""
        try:
            return self.change.of(old, quantity)
        except (OverrideError, QuantityError) as error:
            raise OverrideError(f"override {self}: {error}") from error

    def text(self, old: float, quantity: Quantity) -> str:
        """The text of that number; a new value as it was given, the number it is changed to else.

        Raises `OverrideError` for what is none of its quantity, such as a fraction of a channel.
        """
        new = self.of(old, quantity)
        text = self.change.text if self.change.kind == "to" else quantity.format(float(new), 15)
        try:
            quantity.parse(text)
        except QuantityError as error:
            raise OverrideError(f"override {self}: {error}") from error
        return text

    def source(self, was: str, source: str) -> str:
        """The source of the number: a new value is given and exact, a changed one as sure as the old one.

        >>> parse_override("nic.bandwidth=x2").source("50GB/s", "assumed: as NDR")
        'assumed: nic.bandwidth x2, was 50GB/s (assumed: as NDR)'
        """
        known = "given: " if self.change.kind == "to" else "assumed: " if source.startswith("assum") else ""
        return f"{known}{self._was}{was} ({source})"

    @property
    def _was(self) -> str:
        return f"{self.name} {self.change.text}, was "

    def line(self, constants: Iterable[Constant]) -> str:
        """What became of the number, by the constants of the changed machine, whose sources are from `source`.

        >>> override = parse_override("nic.bandwidth=-5GB/s")
        >>> override.line([Constant("nic_bandwidth", "45GB/s", override.source("50GB/s", "a data sheet"))])
        'nic.bandwidth 50GB/s → 45GB/s (-5GB/s)'
        """
        for constant in constants:
            source = constant.source.removeprefix("given: ").removeprefix("assumed: ")
            if source.startswith(self._was):
                was = source.removeprefix(self._was).partition(" (")[0]
                how = "" if self.change.kind == "to" else f" ({self.change.text})"
                return f"{self.name} {was} → {constant.value}{how}"
        return f"{self.name} {self.change.text}"


def parse_override(text: str) -> Override:
    """The override of a text. Raises `OverrideError` for one that is not ``NAME=VALUE``.

    >>> str(parse_override(" nic.bandwidth = x2"))
    'nic.bandwidth=x2'
    """
    name, equals, value = (part.strip() for part in text.partition("="))
    if not (name and equals and value):
        raise OverrideError(f"override {text!r}: expected NAME=VALUE, like nic.bandwidth=x2")
    try:
        return Override(name, parse_change(value))
    except OverrideError as error:
        raise OverrideError(f"override {text!r}: {error}") from error


def parse_overrides(texts: Sequence[str]) -> list[Override]:
    """The overrides of texts. Raises `OverrideError` for a single text, which would be read letter by letter."""
    if isinstance(texts, str):
        raise OverrideError(f"overrides {texts!r}: expected a sequence of texts, like ({texts!r},)")
    return [parse_override(text) for text in texts]
