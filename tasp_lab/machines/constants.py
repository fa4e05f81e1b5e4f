"""All constants a machine may have: unit, meaning, limits, dependence and identification of each.

``constants.csv`` is the only such list, with the fields of `ConstantSpec` as columns. Profiles, accelerators, machine
files, fits and reports read it, so a new constant is one row there and one value with its source in a data file.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from importlib.resources import files
from typing import Any, Literal, NamedTuple, get_args

from tasp_lab.core.errors import QuantityError
from tasp_lab.core.units import (
    parse_bandwidth_bytes_per_s,
    parse_count,
    parse_flops_per_s,
    parse_size_bytes,
    parse_time_s,
)
from tasp_lab.machines.libraries.channels import ProtocolName

Traffic = Literal["rings", "messages", "tcp"]
"""What a measurement consists of: ring collectives, send and receive, or either of them over TCP."""

Kind = tuple[str, str]
"""A dtype (``bf16``, ``fp16``, ``fp32`` or ``fp8``) and a pass (``forward`` or ``backward``)."""

PROTOCOLS: tuple[ProtocolName, ...] = get_args(ProtocolName)


def _parse_share(text: str) -> float:
    try:
        value = float(Fraction(text))
    except (ValueError, ZeroDivisionError):
        value = 0.0
    if not 0 < value <= 1:
        raise QuantityError(f"share {text!r}: expected a number more than 0, at most 1")
    return value


def _format_number(value: float, digits: int) -> str:
    return f"{value:.{digits}g}"


def _format_bandwidth(value: float, digits: int) -> str:
    return f"{value / 1e9:.{digits}g}GB/s"


def _format_time(value: float, digits: int) -> str:
    return f"{value * 1e6:.{digits}g}us"


class Quantity(NamedTuple):
    """A kind of number: its SI unit, its parser, its text form with so many digits, and its largest value."""

    unit: str
    parse: Callable[[str], float]
    format: Callable[[float, int], str] = _format_number
    max_value: float = math.inf


_QUANTITIES = {
    "bandwidth": Quantity("bytes/s", parse_bandwidth_bytes_per_s, _format_bandwidth),
    "time": Quantity("s", parse_time_s, _format_time),
    "flop_rate": Quantity("FLOP/s", parse_flops_per_s),
    "size": Quantity("bytes", parse_size_bytes),
    "count": Quantity("", parse_count),
    "share": Quantity("", _parse_share, max_value=1.0),
}


@dataclass(frozen=True, kw_only=True)
class ConstantSpec:
    """Definition of one constant.

    Parameters
    ----------
    name : of the constant in files.
    quantity : its unit, parser, text form and largest value.
    meaning : one line for users, without a full stop.
    depends_on : a constant to which it is proportional; files state it at a value of that one (`Parameter.at`). Channel
        counts do not depend on a NIC's rate in this way, although NCCL derives them from it: they change the protocol
        of a message, and their values for another NIC are in the library's code.
    is_part : whether it never exceeds `depends_on`; otherwise predictions would beat the bound.
    min_constant : a constant that it never falls below, like the wire's latency for a hop.
    kind : dtype and pass of a compute rate; None for all others. fp16 has the rate of bf16: all data sheets that list
        both give one number for the two.
    fitted_to : the traffic whose measurements can identify it; empty for constants that are never fitted, like those of
        a library's code.
    identified_by : the measurement that identifies it, for users.
    """

    name: str
    quantity: Quantity
    meaning: str
    depends_on: str = ""
    is_part: bool = False
    min_constant: str = ""
    kind: Kind | None = None
    fitted_to: frozenset[Traffic] = frozenset()
    identified_by: str = ""

    @property
    def unit(self) -> str:
        """SI unit of the value; empty for counts and shares."""
        return self.quantity.unit

    def parse(self, text: str) -> float:
        """The value of a text in SI units. Raises `QuantityError`."""
        return self.quantity.parse(text)

    def format(self, value: float, digits: int = 6) -> str:
        """A value in SI units as a text for files.

        >>> CONSTANTS["link_payload"].format(3.708e11), CONSTANTS["message_launch"].format(1.5e-5)
        ('370.8GB/s', '15us')
        """
        return self.quantity.format(value, digits)

    def rounded(self, value: float, digits: int) -> float:
        """A value to so many digits, as a file that states it so has it."""
        return self.parse(self.format(value, digits))


def _spec(row: dict[str, str]) -> ConstantSpec:
    dtype, _, passing = row["kind"].partition(" ")
    typed: dict[str, Any] = {
        "quantity": _QUANTITIES[row["quantity"]],
        "is_part": row["is_part"] == "yes",
        "kind": (dtype, passing) if dtype else None,
        "fitted_to": frozenset(row["fitted_to"].split()),
    }
    return ConstantSpec(**{**row, **typed})


_TABLE = (files("tasp_lab.machines") / "constants.csv").read_text(encoding="utf-8")
CONSTANTS: Mapping[str, ConstantSpec] = {row["name"]: _spec(row) for row in csv.DictReader(_TABLE.splitlines())}
"""All constants by name, those on which others depend first. A fit takes them in this order, those with the largest
effect first."""

WIRES = ("link_bandwidth", "link_latency", "nic_bandwidth", "nic_latency")
"""The constants of links, from which a topology is built."""
