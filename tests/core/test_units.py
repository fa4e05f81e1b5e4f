from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasp_lab.core.errors import QuantityError
from tasp_lab.core.units import (
    format_bandwidth,
    format_flops,
    format_size,
    format_size_about,
    format_time,
    parse_bandwidth_bytes_per_s,
    parse_count,
    parse_flops_per_s,
    parse_size_bytes,
    parse_time_s,
)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("1", 1), ("64MiB", 64 * 2**20), ("64MB", 64 * 10**6), ("1.5KiB", 1536), (" 2 kB ", 2000), ("1e3B", 1000)],
)
def test_sizes(text: str, size_bytes: int) -> None:
    assert parse_size_bytes(text) == size_bytes


@pytest.mark.parametrize(
    "text", ["", "5parsecs", "0", "-1", "-1MiB", "0.5B", "nan", "inf", "1e999MiB", "1 2", "MiB", "64mib", "0x10"]
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(QuantityError, match="size"):
        parse_size_bytes(text)


@pytest.mark.parametrize(
    ("parse", "text", "hint"),
    [
        (parse_size_bytes, "64M", "did you mean 64MB or 64MiB?"),
        (parse_size_bytes, "64mib", "did you mean 64MiB?"),
        (parse_size_bytes, "10PiB", "the units are B, kB, MB, GB, TB, KiB, MiB, GiB, TiB"),
        (parse_bandwidth_bytes_per_s, "400Gb/s", "did you mean 400Gbit/s?"),
        (parse_bandwidth_bytes_per_s, "400Gbps", "did you mean 400Gbit/s?"),
        (parse_bandwidth_bytes_per_s, "50GBps", "did you mean 50GB/s?"),
        (parse_bandwidth_bytes_per_s, "50GB", "did you mean 50GB/s or 50Gbit/s?"),
        (parse_time_s, "2.5usec", "did you mean 2.5us?"),
        (parse_time_s, "3 microseconds", "did you mean 3us?"),
        (parse_flops_per_s, "300TFLOPS", "did you mean 300TFLOP/s?"),
    ],
)
def test_the_unit_that_may_be_meant_is_named(parse: Callable[[str], float], text: str, hint: str) -> None:
    with pytest.raises(QuantityError, match=re.escape(hint)):
        parse(text)
    for meant in re.findall(r"[\d.]+[A-Za-z/]+", hint.partition("did you mean")[2]):
        assert parse(meant) > 0


def test_digits_are_those_of_ascii() -> None:
    with pytest.raises(QuantityError, match="expected a number and a unit"):
        parse_size_bytes("\u0661")


def test_a_size_has_a_limit() -> None:
    assert parse_size_bytes("1024TiB") == 2**50
    for text in ("1e30", "1e16", "1025TiB"):
        with pytest.raises(QuantityError, match=f"size '{text}': expected at most 1125899906842624 bytes"):
            parse_size_bytes(text)


def test_bandwidths_are_in_bytes_whatever_the_unit() -> None:
    assert parse_bandwidth_bytes_per_s("400Gbit/s") == parse_bandwidth_bytes_per_s("50GB/s") == 50e9
    assert parse_bandwidth_bytes_per_s("1GiB/s") == 2**30


@pytest.mark.parametrize("text", ["50GB", "0GB/s", "-5GB/s", "nanGB/s", "50", "fast"])
def test_what_is_no_bandwidth(text: str) -> None:
    with pytest.raises(QuantityError, match="bandwidth"):
        parse_bandwidth_bytes_per_s(text)


def test_times() -> None:
    assert parse_time_s("0s") == 0
    assert parse_time_s("2.5ms") == 0.0025
    assert parse_time_s("1us") == parse_time_s("1µs") == parse_time_s("1000ns") == 1e-6
    for text in ("1", "-1s", "1min", "nan s"):
        with pytest.raises(QuantityError, match="time"):
            parse_time_s(text)


def test_rates_of_computing() -> None:
    assert parse_flops_per_s("2e9") == parse_flops_per_s("2GFLOP/s") == 2e9
    assert parse_flops_per_s("328.6TFLOP/s") == 328.6e12


@pytest.mark.parametrize("text", ["", "0", "-1", "0TFLOP/s", "nan", "inf", "300TFLOPS", "300T", "2 GiFLOP/s", "fast"])
def test_what_is_no_rate_of_computing(text: str) -> None:
    with pytest.raises(QuantityError, match=f"compute rate '{text}': expected"):
        parse_flops_per_s(text)


def test_counts() -> None:
    assert [parse_count(text) for text in ("1", "8192", "128Ki", "1Mi", "1.5Ki", "1e3")] == [
        1, 8192, 131072, 2**20, 1536, 1000,
    ]  # fmt: skip
    assert parse_count("0", least=0) == 0


@pytest.mark.parametrize("text", ["", "0", "-5", "1.5", "abc", "128KiB", "0.1Ki", "nan", "Ki", "0k", "-1k", "1e3k"])
def test_what_is_no_count(text: str) -> None:
    with pytest.raises(QuantityError, match=f"heads '{text}': expected"):
        parse_count(text, "heads")


@given(st.integers(1, 10**9), st.sampled_from("kKMGT"))
def test_a_decimal_prefix_of_a_count_is_refused_with_both_numbers_that_can_be_meant(number: int, prefix: str) -> None:
    power = " KMGT".index(prefix.upper())
    expected = f"expected {number}{prefix.upper()}i ({number * 1024**power}) or {number * 1000**power}"
    with pytest.raises(QuantityError) as refused:
        parse_count(f"{number}{prefix}")
    assert str(refused.value) == f"count '{number}{prefix}' is ambiguous, {expected}"


@given(st.integers(1, 2**50))
def test_a_size_survives_being_written_and_read(size_bytes: int) -> None:
    assert parse_size_bytes(format_size(size_bytes)) == size_bytes


@given(st.floats(1e-9, 1e6))
def test_a_time_is_written_to_four_digits(time_s: float) -> None:
    assert parse_time_s(format_time(time_s)) == pytest.approx(time_s, rel=1e-3)


@given(st.floats(1, 1e13))
def test_a_bandwidth_is_written_to_four_digits(bandwidth_bytes_per_s: float) -> None:
    written = parse_bandwidth_bytes_per_s(format_bandwidth(bandwidth_bytes_per_s))
    assert written == pytest.approx(bandwidth_bytes_per_s, rel=1e-3)


@given(st.floats(1, 1e18))
def test_a_rate_of_computing_is_written_to_four_digits(flops_per_s: float) -> None:
    assert parse_flops_per_s(format_flops(flops_per_s)) == pytest.approx(flops_per_s, rel=1e-3)


@given(st.integers(1, 2**50))
def test_about_how_large_is_said_to_four_digits(size_bytes: int) -> None:
    number, unit = format_size_about(size_bytes).split()
    assert float(number) * parse_size_bytes(f"1{unit}") == pytest.approx(size_bytes, rel=1e-3)
