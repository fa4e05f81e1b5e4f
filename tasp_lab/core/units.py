"""Conversion between text with units and SI numbers.

Internally every number is in bytes, seconds, bytes per second or FLOPs per second. This module is the only place that
converts text: ``64MiB`` is 64 * 2**20 bytes, ``64MB`` is 64 * 10**6 bytes, ``50GB/s`` and ``400Gbit/s`` are the same
bandwidth, ``1us`` is a microsecond, ``1TFLOP/s`` is 10**12 floating-point operations per second.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction

from tasp_lab.core.errors import QuantityError

Number = float | Fraction
"""An ordered number type closed under + - * /; engines compute in the type of their inputs."""

_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_BYTES = {f"{prefix}B": Fraction(factor) for prefix, factor in (_DECIMAL | _BINARY).items()}
_BITS = {f"{prefix}bit": Fraction(factor, 8) for prefix, factor in (_DECIMAL | _BINARY).items()}
_SIZE_UNITS = _BYTES | {"": Fraction(1)}
_BANDWIDTH_UNITS = {f"{unit}/s": factor for unit, factor in (_BYTES | _BITS).items()}
_COUNT_UNITS = {"": Fraction(1)} | {prefix: Fraction(factor) for prefix, factor in _BINARY.items()}
_FLOPS_UNITS = {"": Fraction(1)} | {f"{prefix}FLOP/s": Fraction(factor) for prefix, factor in _DECIMAL.items()}
_TIME_UNITS = {
    "s": Fraction(1),
    "ms": Fraction(1, 10**3),
    "us": Fraction(1, 10**6),
    "µs": Fraction(1, 10**6),
    "ns": Fraction(1, 10**9),
}
MAX_BYTES = 2**50
"""Maximum size; the bytes of all shards then fit into 64 bits."""

_QUANTITY = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(\D*?)\s*", re.ASCII)


def parse_size_bytes(text: str) -> int:
    """Parse a positive whole number of bytes, at most `MAX_BYTES`.

    >>> parse_size_bytes("64MiB")
    67108864
    >>> parse_size_bytes("1.5kB"), parse_size_bytes("1000")
    (1500, 1000)

    Raises `QuantityError` for anything else, zero and fractions of a byte included.
    """
    value = _parse(text, _SIZE_UNITS, "size", "64MiB")
    if value <= 0:
        raise QuantityError(f"size {text!r}: expected more than 0 bytes")
    if value > MAX_BYTES:
        raise QuantityError(f"size {text!r}: expected at most {MAX_BYTES} bytes")
    if value.denominator != 1:
        raise QuantityError(f"size {text!r}: expected a whole number of bytes")
    return int(value)


def parse_bandwidth_bytes_per_s(text: str) -> float:
    """Parse a positive bandwidth, in one direction.

    >>> parse_bandwidth_bytes_per_s("50GB/s") == parse_bandwidth_bytes_per_s("400Gbit/s")
    True
    """
    return _parse_rate(text, _BANDWIDTH_UNITS, "bandwidth", "50GB/s or 400Gbit/s", "bytes/s")


def parse_flops_per_s(text: str) -> float:
    """Parse a positive compute rate in floating-point operations per second.

    >>> parse_flops_per_s("300TFLOP/s") == parse_flops_per_s("3e14")
    True
    """
    return _parse_rate(text, _FLOPS_UNITS, "compute rate", "300TFLOP/s", "FLOP/s")


def _parse_rate(text: str, units: dict[str, Fraction], what: str, example: str, unit: str) -> float:
    """Parse a positive rate."""
    value = _parse(text, units, what, example)
    if value <= 0:
        raise QuantityError(f"{what} {text!r}: expected more than 0 {unit}")
    return float(value)


def parse_count(text: str, what: str = "count", least: int = 1) -> int:
    """Read a whole number, `least` or more, with or without a binary prefix; errors name it `what`.

    >>> parse_count("128Ki"), parse_count("1Mi"), parse_count("1000")
    (131072, 1048576, 1000)

    ``128k`` is refused, for people mean 131,072 as often as 128,000 by it; so are K, M, G and T.

    Raises `QuantityError`.
    """
    _check_prefix(text, what)
    value = _parse(text, _COUNT_UNITS, what, "8192 or 128Ki", "a number")
    if value.denominator != 1 or value < least:
        raise QuantityError(f"{what} {text!r}: expected a whole number, {least} or more")
    return int(value)


def count_of(count: int | str, what: str = "count", least: int = 1) -> int:
    """A whole number, given as one or as a text of `parse_count`.

    >>> count_of("128Ki"), count_of(8192)
    (131072, 8192)
    """
    return parse_count(count, what, least) if isinstance(count, str) else count


def _check_prefix(text: str, what: str) -> None:
    """Raise `QuantityError` for a decimal prefix, with both numbers that can be meant."""
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2] not in _DECIMAL or not match[2] or len(match[1]) > 12 or "e" in match[1].casefold():
        return
    number, prefix = Fraction(match[1]), match[2].upper() + "i"
    binary, decimal = number * _BINARY[prefix], number * _DECIMAL[match[2]]
    if number > 0 and binary.denominator == decimal.denominator == 1:
        raise QuantityError(f"{what} {text!r} is ambiguous, expected {match[1]}{prefix} ({binary}) or {decimal}")


def parse_time_s(text: str) -> float:
    """Parse a non-negative time.

    >>> parse_time_s("1us")
    1e-06
    """
    value = _parse(text, _TIME_UNITS, "time", "1us")
    if value < 0:
        raise QuantityError(f"time {text!r}: expected 0 s or more")
    return float(value)


def _parse(
    text: str, units: dict[str, Fraction], what: str, example: str, expected: str = "a number and a unit"
) -> Fraction:
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2] not in units:
        hint = "" if match is None or "unit" not in expected else _unit_hint(match[1], match[2], units)
        raise QuantityError(f"{what} {text!r}: expected {expected}, like {example}{hint}")
    if len(match[1]) > 40 or abs(int(re.sub(r".*[eE]|^[^eE]*$", "", match[1]) or 0)) > 40:
        raise QuantityError(f"{what} {text!r}: the number is out of range")
    return Fraction(match[1]) * units[match[2]]


_SPELLINGS = (
    (r"b(ps|/s)$", "bit/s"),
    (r"Bps$", "B/s"),
    (r"bits(/s)?$", r"bit\1"),
    (r"[bB]ytes?(/s)?$", r"B\1"),
    (r"(?i)flops(/s)?$", "FLOP/s"),
    (
        r"(micro|milli|nano)?se?c?(ond)?s?$",
        lambda found: {"micro": "us", "milli": "ms", "nano": "ns"}.get(found[1], "s"),
    ),
)
"""Other spellings of units, and ours."""


def _unit_hint(number: str, unit: str, units: dict[str, Fraction]) -> str:
    """The units that may be meant by an unknown one, as in ``; did you mean 400Gbit/s?``; else all that there are."""
    spelled = {unit, *(re.sub(pattern, ours, unit) for pattern, ours in _SPELLINGS)} - {""}
    same = [each for each in units if each in spelled]
    same = same or [each for each in units if each.casefold() in {text.casefold() for text in spelled}]
    begun = [each for each in units if unit and each.casefold().startswith(unit.casefold())]
    near = dict.fromkeys(same or begun)
    if near:
        return f"; did you mean {' or '.join(number + each for each in near)}?"
    shown = [each for each in units if each and not re.match("K(?!i)", each)]
    return f"; the units are {', '.join(shown)}" if unit else ""


def format_count(count: float) -> str:
    """Format a count, with a binary prefix if one divides it.

    >>> format_count(131072), format_count(96), format_count(1024**2), format_count(1.5)
    ('128Ki', '96', '1Mi', '1.5')
    """
    for prefix, factor in (("Gi", 2**30), ("Mi", 2**20), ("Ki", 2**10)):
        if count >= factor and count % factor == 0:
            return f"{count / factor:.0f}{prefix}"
    return f"{count:.10g}"


def format_four_digits(value: float) -> str:
    """A number that is not negative in four digits, without an exponent.

    >>> format_four_digits(662.44), format_four_digits(10423.4)
    ('662.4', '10420')
    """
    return f"{value:.4g}" if value < 9999.5 else f"{float(f'{value:.4g}'):.0f}"


def format_size(size_bytes: int) -> str:
    """Format a size exactly, in the largest unit that divides it.

    >>> format_size(4 * 2**20), format_size(1500)
    ('4 MiB', '1500 B')
    """
    for unit, factor in reversed(_BINARY.items()):
        if size_bytes >= factor and size_bytes % factor == 0:
            return f"{size_bytes // factor} {unit}B"
    return f"{size_bytes} B"


def format_size_about(size_bytes: int) -> str:
    """Format a size, to four digits.

    >>> format_size_about(3297939456)
    '3.071 GiB'
    """
    return _in_unit(size_bytes, {f"{prefix}B": factor for prefix, factor in reversed(_BINARY.items())} | {"B": 1})


def format_time(time_s: Number, digits: int = 4) -> str:
    """Format a time, to so many digits.

    >>> format_time(0.00134217728), format_time(0.00134217728, 2), format_time(0)
    ('1.342 ms', '1.3 ms', '0 s')
    """
    return _in_unit(float(time_s), {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}, digits) if time_s else "0 s"


def format_bandwidth(bandwidth_bytes_per_s: Number) -> str:
    """Format a bandwidth, to four digits.

    >>> format_bandwidth(50e9)
    '50 GB/s'
    """
    return _in_unit(float(bandwidth_bytes_per_s), {"GB/s": 1e9, "MB/s": 1e6, "kB/s": 1e3, "B/s": 1.0})


def format_flops(flops_per_s: Number) -> str:
    """Format a compute rate, to four digits.

    >>> format_flops(328.6e12), format_flops(2e9)
    ('328.6 TFLOP/s', '2 GFLOP/s')
    """
    return _in_unit(float(flops_per_s), {"TFLOP/s": 1e12, "GFLOP/s": 1e9, "MFLOP/s": 1e6, "FLOP/s": 1.0})


def format_factor(factor: float) -> str:
    """Format a factor to two digits, without an exponent.

    >>> format_factor(5.805), format_factor(178.5), format_factor(3)
    ('5.8x', '180x', '3x')
    """
    return f"{float(f'{factor:.2g}'):.12g}x"


def format_speed(ratio: float, than: str = "") -> str:
    """Format how fast something is, from another time over its own: in percent below a factor of 2.

    >>> format_speed(1.25), format_speed(0.8), format_speed(1 / 178.5)
    ('25.0% faster', '25.0% slower', '180x slower')
    >>> format_speed(1.25, "the ring"), format_speed(5.805, "the ring")
    ('25.0% faster than the ring', '5.8x as fast as the ring')
    """
    if ratio >= 2:
        return f"{format_factor(ratio)} as fast{than and f' as {than}'}"
    slower = f"{format_factor(1 / ratio)} slower" if ratio <= 1 / 2 else f"{1 / ratio - 1:.1%} slower"
    return f"{slower if ratio < 1 else f'{ratio - 1:.1%} faster'}{than and f' than {than}'}"


def format_regret(regret: float) -> str:
    """Format how much longer something takes than the fastest, as a share of the time of that.

    >>> format_regret(0.021), format_regret(177.5)
    ('2.1%', '180x slower')
    """
    return f"{regret:.1%}" if regret < 1 else format_speed(1 / (1 + regret))


def _in_unit(value: float, units: Mapping[str, float], digits: int = 4) -> str:
    """A value in the first unit that it has at least one of; else in the last one."""
    unit = next((unit for unit, factor in units.items() if abs(value) >= factor), [*units][-1])
    return f"{value / units[unit]:.{digits}g} {unit}"


def parse_integer(text: str) -> int:
    """An integer in decimal digits, with or without a sign, of at most 18 digits.

    >>> parse_integer("-12")
    -12

    Raises `QuantityError` for other text.
    """
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        raise QuantityError(f"{text[:40]!r}, expected a whole number")
    return int(text)
