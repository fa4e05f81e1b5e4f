"""Quantities at the edge: what people type, as SI numbers, and back.

Inside tasp-lab every number is in bytes, seconds, bytes per second or FLOPs per second. Text is converted here and
nowhere else: ``64MiB`` is 64 * 2**20 bytes, ``64MB`` is 64 * 10**6 bytes, ``50GB/s`` and ``400Gbit/s`` are the same
bandwidth, ``1us`` is a microsecond, ``1TFLOP/s`` is 10**12 floating-point operations per second.
"""

from __future__ import annotations

import re
from fractions import Fraction

from tasp_lab.errors import QuantityError

Number = float | Fraction
"""Any number type that is closed under + - * / and ordered; engines never mix in a type of their own."""

_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_BYTES = {f"{prefix}B": Fraction(factor) for prefix, factor in (_DECIMAL | _BINARY).items()}
_BITS = {f"{prefix}bit": Fraction(factor, 8) for prefix, factor in (_DECIMAL | _BINARY).items()}
_SIZE_UNITS = _BYTES | {"": Fraction(1)}
_BANDWIDTH_UNITS = {f"{unit}/s": factor for unit, factor in (_BYTES | _BITS).items()}
_COUNT_UNITS = {prefix: Fraction(factor) for prefix, factor in (_DECIMAL | _BINARY).items()}
_FLOPS_UNITS = {"": Fraction(1)} | {f"{prefix}FLOP/s": Fraction(factor) for prefix, factor in _DECIMAL.items()}
_TIME_UNITS = {
    "s": Fraction(1),
    "ms": Fraction(1, 10**3),
    "us": Fraction(1, 10**6),
    "µs": Fraction(1, 10**6),
    "ns": Fraction(1, 10**9),
}
MOST_BYTES = 2**50
"""The largest size: with it the bytes of all shards still fit into 64 bits."""

_QUANTITY = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(\D*?)\s*", re.ASCII)


def parse_size_bytes(text: str) -> int:
    """Read a positive whole number of bytes, at most `MOST_BYTES`.

    >>> parse_size_bytes("64MiB")
    67108864
    >>> parse_size_bytes("1.5kB"), parse_size_bytes("1000")
    (1500, 1000)

    Raises `QuantityError` for anything else, zero and fractions of a byte included.
    """
    value = _parse(text, _SIZE_UNITS, "size", "64MiB")
    if value <= 0:
        raise QuantityError(f"size {text!r}: expected more than 0 bytes")
    if value > MOST_BYTES:
        raise QuantityError(f"size {text!r}: expected at most {MOST_BYTES} bytes")
    if value.denominator != 1:
        raise QuantityError(f"size {text!r}: expected a whole number of bytes")
    return int(value)


def parse_bandwidth_bytes_per_s(text: str) -> float:
    """Read a positive bandwidth, one way.

    >>> parse_bandwidth_bytes_per_s("50GB/s") == parse_bandwidth_bytes_per_s("400Gbit/s")
    True
    """
    return _parse_rate(text, _BANDWIDTH_UNITS, "bandwidth", "50GB/s or 400Gbit/s", "bytes/s")


def parse_flops_per_s(text: str) -> float:
    """Read a positive rate of computing, in floating-point operations per second.

    >>> parse_flops_per_s("300TFLOP/s") == parse_flops_per_s("3e14")
    True
    """
    return _parse_rate(text, _FLOPS_UNITS, "compute rate", "300TFLOP/s", "FLOP/s")


def _parse_rate(text: str, units: dict[str, Fraction], what: str, example: str, unit: str) -> float:
    """Read a positive rate."""
    value = _parse(text, units, what, example)
    if value <= 0:
        raise QuantityError(f"{what} {text!r}: expected more than 0 {unit}")
    return float(value)


def parse_count(text: str, what: str = "count") -> int:
    """Read a positive whole number, with or without a prefix; errors name it `what`.

    >>> parse_count("128Ki"), parse_count("1M"), parse_count("1000")
    (131072, 1000000, 1000)
    """
    value = _parse(text, _COUNT_UNITS, what, "8192, 128Ki or 1M", "a number")
    if value.denominator != 1 or value <= 0:
        raise QuantityError(f"{what} {text!r}: expected a whole number, 1 or more")
    return int(value)


def parse_time_s(text: str) -> float:
    """Read a time that is not negative.

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
        raise QuantityError(f"{what} {text!r}: expected {expected}, like {example}")
    if len(match[1]) > 40 or abs(int(re.sub(r".*[eE]|^[^eE]*$", "", match[1]) or 0)) > 40:
        raise QuantityError(f"{what} {text!r}: the number is out of range")
    return Fraction(match[1]) * units[match[2]]


def format_size(size_bytes: int) -> str:
    """A size for people.

    >>> format_size(4 * 2**20), format_size(1500)
    ('4 MiB', '1500 B')
    """
    for unit, factor in reversed(_BINARY.items()):
        if size_bytes >= factor and size_bytes % factor == 0:
            return f"{size_bytes // factor} {unit}B"
    return f"{size_bytes} B"


def format_size_about(size_bytes: int) -> str:
    """A size for people, to four digits.

    >>> format_size_about(3297939456)
    '3.071 GiB'
    """
    for unit, factor in reversed(_BINARY.items()):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.4g} {unit}B"
    return f"{size_bytes} B"


def format_time(time_s: Number) -> str:
    """A time for people, to four digits.

    >>> format_time(0.00134217728), format_time(0)
    ('1.342 ms', '0 s')
    """
    value = float(time_s)
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(value) >= factor:
            return f"{value / factor:.4g} {unit}"
    return f"{value / 1e-9:.4g} ns" if value else "0 s"


def format_bandwidth(bandwidth_bytes_per_s: Number) -> str:
    """A bandwidth for people, to four digits.

    >>> format_bandwidth(50e9)
    '50 GB/s'
    """
    value = float(bandwidth_bytes_per_s)
    for unit, factor in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if value >= factor:
            return f"{value / factor:.4g} {unit}"
    return f"{value:.4g} B/s"


def format_flops(flops_per_s: Number) -> str:
    """A rate of computing for people, to four digits.

    >>> format_flops(328.6e12), format_flops(2e9)
    ('328.6 TFLOP/s', '2 GFLOP/s')
    """
    value = float(flops_per_s)
    for unit, factor in (("TFLOP/s", 1e12), ("GFLOP/s", 1e9), ("MFLOP/s", 1e6)):
        if value >= factor:
            return f"{value / factor:.4g} {unit}"
    return f"{value:.4g} FLOP/s"
