"""What is compiled computes what Python does, and what cannot be compiled is refused with its line."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasp_lab.core.assembly import FLOAT, INT, Struct, translate
from tasp_lab.core.compiled import call, table

integers = st.integers(-(2**20), 2**20)
floats = st.floats(-1e9, 1e9)

_LIMIT, _HALF = 3, 0.5


def whole_numbers(a: int, b: int) -> int:
    total = a * b + (a - b) * 7 - (-a) + (a & b) - (a | b) + (a ^ b) + (a << (b & 7)) - (a >> (b & 7))
    if b:
        total += a // b - 5 * (a % b)
    total ^= min(a, b, 12)
    total -= max(a, _LIMIT)
    return total


def real_numbers(a: float, b: float, n: int) -> float:
    total = a * b - -a + n * _HALF + n + min(a, n) - max(n, b, math.pi)
    if b != 0:
        total += a / b + n / 7
    total *= 1.5 if total < math.inf else n
    return total + float(n) + int(n)


def conditions(a: int, b: int, x: float) -> int:
    found = 0
    found += (a < b) + 2 * (a <= b) + 4 * (a == b) + 8 * (a != x) + 16 * (x > a) + 32 * (x >= b)
    found += 64 * (a < x < b) + 128 * (a <= b <= x < 5)
    is_small = a < 5 and (b < 5 or x < 5.0)
    if not is_small or (x and a) or not (a or b or x):
        found += 256
    return found + 512 * is_small + 1024 * (not a) + 2048 * bool(x) + (4096 if x and b else 0)


def divides(a: int, b: int, seen: Any) -> bool:
    """Whether it does; it counts its calls: `and` and `or` compute only what decides."""
    seen[0] += 1
    return bool(a % b == 0)


def loops(a: int, b: int, seen: Any) -> int:
    total, at = 0, -1
    for at in range(a):
        if at == 3:
            continue
        if at > 7 and divides(at, 2, seen):
            break
        for inner in range(at, b):
            if inner == 6 or divides(inner + 1, 5, seen):
                break
            total += inner * at
        at = total  # what counts is another variable
    while total > 10:
        total -= 7
        if total & 1:
            continue
        total //= 2
    return 1000 * total + at


class Pair(NamedTuple):
    rows: Any
    counts: Any
    factor: float


class Nest(NamedTuple):
    first: int
    pair: Pair


def tables(nest: Nest, at: int) -> float:
    pair, rows = nest.pair, nest.pair.rows
    row = rows[at]
    row.weight, row.number = row.weight + pair.factor, row.number - 1
    row.is_on = row.number > nest.first
    pair.counts[0], pair.counts[1] = pair.counts[1], pair.counts[0]
    rows[_next(pair.counts)].number = pair.counts[2] = _next(pair.counts)
    rows[_next(pair.counts) - 1].number += 5
    total: float = 0.0
    for number in range(len(rows)):
        total += rows[number].weight * rows[number].number + rows[number].is_on
    return total


def _next(counts: Any) -> int:
    """A function that changes something is called as often as Python calls it."""
    counts[3] += 1
    return int(counts[3])


def checked(number: int) -> int:
    return _positive(number) + 1


def _positive(number: int) -> int:
    assert number > 0, "a positive number"
    return number


def assert_as_in_python(function: Callable[..., object], *arguments: object) -> None:
    assert call(function, *arguments, fast=True) == call(function, *arguments, fast=False)


@given(integers, integers)
def test_integers(a: int, b: int) -> None:
    assert_as_in_python(whole_numbers, a, b)


@given(floats, floats, integers)
def test_floats(a: float, b: float, n: int) -> None:
    assert_as_in_python(real_numbers, a, b, n)


small = st.integers(-1, 6)


@given(small, small, small | st.floats(-1, 6))
def test_conditions(a: int, b: int, x: float) -> None:
    assert_as_in_python(conditions, a, b, float(x))


@given(st.integers(-1, 12), st.integers(0, 12))
def test_loops(a: int, b: int) -> None:
    seen, again = np.zeros((2, 1), dtype=np.int64)
    assert call(loops, a, b, seen, fast=True) == call(loops, a, b, again, fast=False)
    assert seen.tolist() == again.tolist()


@given(st.integers(0, 7), st.integers(-3, 3), floats)
def test_tables(at: int, first: int, factor: float) -> None:
    found: list[Any] = []
    for fast in (True, False):
        rows = table(8, number="i4", weight="f8", is_on="i2", unused="i8")
        rows["number"], rows["weight"] = np.arange(8) - 3, np.arange(8) / 7
        nest = Nest(first, Pair(rows, np.arange(4, dtype=np.int32), factor))
        found.append((call(tables, nest, at, fast=fast), rows.tolist(), nest.pair.counts.tolist()))
    assert found[0] == found[1]


def test_an_assertion_of_a_called_function_ends_the_caller() -> None:
    assert call(checked, 1, fast=True) == 2
    with pytest.raises(AssertionError, match="checked"):
        call(checked, 0, fast=True)


def of_two_types(a: int) -> float:
    total: float = a
    total += 0.5
    return total


def with_a_list(a: int) -> int:
    return len([a])


def with_a_step(a: int) -> int:
    for at in range(0, a, 2):
        a += at
    return a


def with_an_exception(a: int) -> int:
    try:
        return a
    finally:
        a += 1


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (of_two_types, r"total \+= 0.5: cannot be compiled: expected i64, not double"),
        (with_a_list, r"return len\(\[a\]\): cannot be compiled: an unknown expression"),
        (with_a_step, r"for at in range\(0, a, 2\):: cannot be compiled: an unknown statement"),
        (with_an_exception, "try:: cannot be compiled: an unknown statement"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_its_line(function: Callable[..., object], line: str) -> None:
    with pytest.raises(TypeError, match=rf"test_assembly.py:\d+: {line}"):
        translate(function, Struct("", ("a",), (INT,)))


def test_a_float_is_no_integer() -> None:
    with pytest.raises(TypeError, match="expected i64, not double"):
        translate(checked, Struct("", ("a",), (FLOAT,)))
