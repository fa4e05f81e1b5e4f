"""The value of an override: a factor (``x2``), what is added (``+1us``), or a new value (``900GB/s``)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from tasp_lab.core.errors import OverrideError
from tasp_lab.core.units import Number
from tasp_lab.machines.constants import Quantity

_FACTOR = re.compile(r"x\s*(\d{1,12}(?:\.\d{1,12})?|\.\d{1,12}|\d{1,12}/\d{1,12})", re.ASCII)
_OTHER_FACTOR = re.compile(r"\*\s*([\d.]+)|([\d.]+)\s*x|(\d{1,12})\s*%", re.ASCII)
"""A factor as it is written elsewhere: ``*2``, ``2x``, ``50%``."""
_ZERO = re.compile(r"0+(?:\.0*)?", re.ASCII)


@dataclass(frozen=True)
class Change:
    """A number changed in one of three ways.

    Parameters
    ----------
    text : as it was given.
    kind : ``times`` a factor, ``plus`` an amount, or ``to`` a new value.
    factor : for ``times``; 1 otherwise.
    """

    text: str
    kind: Literal["times", "plus", "to"]
    factor: Fraction = Fraction(1)

    def of(self, old: Number, quantity: Quantity) -> Number:
        """The changed number, in SI units, exact for exact ones.

        >>> from tasp_lab.machines.constants import CONSTANTS
        >>> parse_change("+1us").of(2e-6, CONSTANTS["nic_latency"].quantity)
        3e-06

        Raises `QuantityError` for an amount without its unit, and `OverrideError` for a rate of 0 or a negative time.
        """
        if self.kind == "times":
            return old * self.factor
        amount = self._amount(quantity)
        exact = Fraction(amount) if isinstance(old, Fraction) else amount
        if self.kind == "to":
            return exact
        return _checked(old + exact if self.text[0] == "+" else old - exact, old, self.text, quantity)

    def _amount(self, quantity: Quantity) -> float:
        """The number of the text without its sign."""
        amount = self.text.lstrip("+-").strip() if self.kind == "plus" else self.text
        return 0.0 if self.kind == "plus" and _ZERO.fullmatch(amount) else quantity.parse(amount)


def _checked(new: Number, old: Number, text: str, quantity: Quantity) -> Number:
    """A sum that is possible; only a time may be 0."""
    if new > 0 or (new == 0 and (quantity.unit == "s" or not old)):
        return new
    least = "0 or more" if quantity.unit == "s" else "more than 0"
    raise OverrideError(f"{quantity.format(float(old), 6)}{text}: expected {least}")


def parse_change(text: str) -> Change:
    """The change that a text means.

    >>> parse_change("x0.5").factor, parse_change("-1us").kind, parse_change("900GB/s").kind
    (Fraction(1, 2), 'plus', 'to')

    Raises `OverrideError` for a factor that is not positive, and for one that is written in another way.
    """
    if text.startswith("x"):
        return Change(text, "times", _factor(text))
    if meant := _OTHER_FACTOR.fullmatch(text):
        factor = f"{int(meant[3]) / 100:g}" if meant[3] else meant[1] or meant[2]
        raise OverrideError(f"{text!r} is no factor, did you mean x{factor}?")
    return Change(text, "plus" if text.startswith(("+", "-")) else "to")


def _factor(text: str) -> Fraction:
    found = _FACTOR.fullmatch(text)
    try:
        factor = Fraction(found[1]) if found else Fraction(0)
    except ZeroDivisionError:
        factor = Fraction(0)
    if factor <= 0:
        raise OverrideError(f"factor {text!r}: expected x and a number more than 0, like x2 or x0.5")
    return factor
