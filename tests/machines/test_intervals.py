"""Intervals of constants: in files, by the kind of a source, and refused where they are impossible."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasp_lab.core.errors import ProfileError
from tasp_lab.machines.intervals import WIDTHS, log_ends, source_kind
from tasp_lab.machines.profile import load_profile, profile_document

PROFILE = """name = "mine"
summary = "two ranks"
library = "ideal"
inside = "switch"
ranks_per_node = 2

[[constants]]
name = "link_bandwidth"
value = "50GB/s"
source = "a data sheet"
interval = {interval}

[[constants]]
name = "link_latency"
value = "1us"
source = "a data sheet"
"""


def _profile(folder: Path, interval: str) -> str:
    path = folder / "mine.toml"
    path.write_text(PROFILE.format(interval=interval))
    return str(path)


@pytest.mark.parametrize("interval", ['["45GB/s", "55GB/s"]', '"10%"', '["360Gbit/s", "440Gbit/s"]'])
def test_an_interval_has_two_values_or_a_width(tmp_path: Path, interval: str) -> None:
    found = load_profile(_profile(tmp_path, interval)).parameters["link_bandwidth"]
    assert [round(end, 6) for end in log_ends(found)] == [-0.105361, 0.09531]


@pytest.mark.parametrize(
    ("interval", "reason"),
    [
        ('["55GB/s", "45GB/s"]', "is empty"),
        ('["51GB/s", "55GB/s"]', "does not hold the value 50GB/s"),
        ('["x", "55GB/s"]', "bandwidth 'x'"),
        ('"10"', "expected two values, or a width"),
        ('"-1%"', "expected two values, or a width"),
        ('"100%"', "expected two values, or a width"),
        ('["45GB/s"]', "interval"),
    ],
)
def test_an_impossible_interval_is_refused_in_one_line(tmp_path: Path, interval: str, reason: str) -> None:
    with pytest.raises(ProfileError, match=reason) as found:
        load_profile(_profile(tmp_path, interval))
    assert "\n" not in str(found.value)
    assert "mine.toml" in str(found.value)


def test_a_profile_keeps_its_intervals(tmp_path: Path) -> None:
    first = load_profile(_profile(tmp_path, '["45GB/s", "55GB/s"]'))
    (tmp_path / "mine.toml").write_text(profile_document(first))
    assert load_profile(str(tmp_path / "mine.toml")).parameters == first.parameters


def test_an_assumption_is_never_more_certain_than_a_measurement() -> None:
    for dimension in ("rate", "time", "compute"):
        assert WIDTHS[dimension, "assumed"] >= WIDTHS[dimension, "measured"]  # type: ignore[index]
    assert source_kind("assumed: as measured on A100, src/graph/tuning.cc") == "assumed"
