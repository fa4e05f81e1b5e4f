"""A calibration is judged by collectives that it was not fitted to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasp_lab.core.errors import FitError, TableError, TaspLabError
from tasp_lab.machines.parameters import changed
from tasp_lab.machines.profile import load_profile, profile_document
from tasp_lab.measure.calibrate import leave_one_out
from tasp_lab.measure.fit.cases import cases_of, measured
from tasp_lab.measure.fit.fit_profile import calibrate as fit_profile
from tasp_lab.measure.profiles import Choice
from tasp_lab.measure.readers import MeasuredTable, read_table
from tasp_lab.schedules.collectives.kinds import NcclTestsName
from tests.conftest import Command
from tests.measure.fit.test_fit_profile import H100, SIZES, made, simulated_anew

Write = Callable[..., Path]


def csv(table: MeasuredTable, profile: str) -> str:
    head = f"# profile: {profile}\n# collective: {table.collective}\n# ranks: {table.ranks}\n# algorithm: ring\n"
    return head + "size_B,time_us\n" + "".join(f"{row.size_bytes},{row.time_s * 1e6!r}\n" for row in table.rows)


def write(folder: Path, *names: NcclTestsName, profile: str = "h100-8", factor: float = 1.0) -> Path:
    """Tables of a machine with other constants than the profile's; of the last collective times a factor."""
    folder.mkdir(exist_ok=True)
    for name in names:
        table = made(name, noise=0.01, sizes=SIZES[::3])
        slower = factor if name == names[-1] else 1.0
        rows = tuple(row._replace(time_s=row.time_s * slower) for row in table.rows)
        (folder / f"{name}.csv").write_text(csv(MeasuredTable(name, "", name, 8, {}, rows), profile))
    return folder


def judged(folder: Path) -> list[dict[str, Any]]:
    """The rows of the test, a collective each."""
    return [dict(each) for each in leave_one_out(folder).result]


def test_what_is_left_out_is_predicted_by_what_the_others_tell(tmp_path: Path) -> None:
    """Rings share their constants, so each tells the other. The answer is that of a fit and a prediction by hand."""
    folder = write(tmp_path, "all_gather", "reduce_scatter")
    found = judged(folder)
    assert [each["collective"] for each in found] == ["all_gather", "reduce_scatter"]
    for each in found:
        (other,) = each["fitted_from"]
        assert {each["collective"], other} == {"all_gather", "reduce_scatter"}
        assert "ring_rate" in each["constants"]
        assert each["median_relative_error"] is not None
        assert each["median_relative_error"] < 0.02 < each["median_relative_error_before"]
        kept, aside = (
            cases_of([read_table(folder / f"{name}.csv")], Choice(H100, "")) for name in (other, each["collective"])
        )
        by_hand = fit_profile(H100, kept, simulated_anew(kept), date="2026-01-15").profile
        errors = np.abs(simulated_anew(aside)(by_hand.parameters) / measured(aside) - 1)
        found_errors = each["median_relative_error"], each["worst_relative_error"]
        assert found_errors == pytest.approx((np.median(errors), errors.max()), rel=1e-3)


def test_a_collective_does_not_fit_what_judges_it(tmp_path: Path) -> None:
    """Twice the time of a collective doubles its own ratios, and changes nothing of the fit."""
    once = judged(write(tmp_path / "once", "all_gather", "reduce_scatter"))[1]
    twice = judged(write(tmp_path / "twice", "all_gather", "reduce_scatter", factor=2.0))[1]
    assert once["constants"] == twice["constants"]
    assert once["median_relative_error"] is not None
    assert once["median_relative_error"] < 0.02
    assert twice["median_relative_error"] == pytest.approx(0.5, abs=0.02)


def test_a_collective_that_leaves_nothing_to_fit_has_a_reason(tmp_path: Path) -> None:
    """What is left out is then told as it was."""
    folder = write(tmp_path, "sendrecv", "all_gather")
    table = (folder / "sendrecv.csv").read_text().splitlines()
    (folder / "sendrecv.csv").write_text("\n".join(table[:6]))
    rings, *others = judged(folder)
    assert (rings["collective"], rings["median_relative_error"]) == ("all_gather", None)
    assert "1 row determines none, expected 5 or more" in str(rings["reason"])
    assert all(each["median_relative_error"] is not None for each in others)


def test_the_command(command: Command) -> None:
    """Progress is on standard error, and a profile of one's own is beside its tables."""
    write(command.folder / "mine", "all_gather", "reduce_scatter", profile="my.toml")
    (command.folder / "mine" / "my.toml").write_text(profile_document(load_profile("h100")))
    done = command("calibrate", "--judge", "mine", "--json")
    assert done.returncode == 0, done.stderr
    assert "2 of 2: reduce_scatter is left out" in done.stderr
    for each in json.loads(done.stdout)["collectives"]:
        assert each["rows"] == 6
        assert each["median_relative_error"] < 0.02 < each["median_relative_error_before"]
        assert each["reason"] is None
    shown = command("calibrate", "--judge", "mine").stdout
    assert "each collective predicted by a fit to the others" in shown


def test_what_cannot_be_judged(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    one = write(tmp_path / "one", "all_gather")
    mixed = write(tmp_path / "mixed", "all_gather", "reduce_scatter")
    (mixed / "other.csv").write_text(csv(made("alltoall", sizes=SIZES[::3]), "mi300x-8"))
    unnamed = write(tmp_path / "unnamed", "all_gather", "reduce_scatter", profile="")
    refused: list[tuple[tuple[Path, ...], type[TaspLabError], str]] = [
        ((one,), FitError, "one: all_gather to predict, expected tables of two collectives or more"),
        ((tmp_path / "empty",), TableError, "empty: no measurement in it"),
        ((tmp_path / "none",), TableError, "none"),
        ((mixed,), TableError, "profile 'mi300x-8', expected one of the family 'h100'"),
        ((unnamed,), FitError, "expected --profile"),
        ((), TaspLabError, "no tables: expected"),
    ]
    for paths, kind, said in refused:
        with pytest.raises(kind, match=said) as error:
            leave_one_out(*paths)
        assert len(str(error.value).splitlines()) == 1


def test_profiles_of_one_name_that_differ_are_two_machines(tmp_path: Path) -> None:
    for name, rate in (("all_gather", 300e9), ("reduce_scatter", 200e9)):
        folder = write(tmp_path / name, name, profile="my.toml")
        (folder / "my.toml").write_text(
            profile_document(H100.with_parameters(changed(H100.parameters, {"ring_rate": rate})))
        )
    with pytest.raises(FitError, match=r"'my\.toml' differs from that of .*all_gather\.csv, expected one machine"):
        leave_one_out(tmp_path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--output", "my.toml"), "--output: not with --judge"),
        (("--fabric", "local"), "--fabric: not with --judge"),
        (("--fit", "nothing"), "constant 'nothing': all_gather, reduce_scatter on h100 may identify"),
    ],
)
def test_options_that_judging_does_not_take(command: Command, options: tuple[str, ...], said: str) -> None:
    write(command.folder / "mine", "all_gather", "reduce_scatter")
    assert said in command.refused("calibrate", "--judge", "mine", *options)
