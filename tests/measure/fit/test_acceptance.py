"""A fit is written if it predicts better than before, also rows that it was not fitted to."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import tasp_lab
from tasp_lab.core.errors import FitError, RejectedFitError
from tasp_lab.measure.calibrate import calibrate
from tasp_lab.measure.fit.acceptance import FOLDS, Acceptance, folds
from tasp_lab.measure.fit.cases import Choice, Simulated, cases_of
from tasp_lab.measure.fit.fit_profile import Calibrated
from tasp_lab.measure.fit.fit_profile import calibrate as fit_profile
from tasp_lab.measure.readers import MeasuredTable, read_nccl_tests
from tests.conftest import ROOT, Command
from tests.measure.fit.test_fit_profile import H100, SIZES, made, table
from tests.measure.fit.test_leave_one_out import csv

SAMPLES = ROOT / "tests" / "measure" / "readers" / "samples"
"""Logs in the format of nccl-tests of plausible machines, made for these tests: slow at small and medium sizes."""


def exact(sizes: list[int]) -> MeasuredTable:
    """What the machine of the profile would measure."""
    (case,) = cases_of([table("all_gather", np.ones(len(sizes)), sizes)], Choice(H100, "8"))
    return table("all_gather", Simulated(H100, [case])(H100.parameters), sizes)


@pytest.mark.parametrize("count", range(12))
def test_every_row_is_held_out_once(count: int) -> None:
    parts = folds(count)
    assert len(parts) == FOLDS
    assert sorted(row for part in parts for row in part) == list(range(count))


@pytest.mark.parametrize(
    ("before", "after", "held_out", "accepted"),
    [
        (0.2, 0.1, 0.15, True),
        (0.2, 0.1, 0.2, False),
        (0.2, 0.1, 0.3, False),
        (0.2, 0.3, 0.1, False),
        (0.2, 0.1, None, True),
        (0.2, 0.2, None, False),
        (None, 0.5, 0.5, True),
    ],
)
def test_both_errors_must_be_smaller(
    before: float | None, after: float, held_out: float | None, accepted: bool
) -> None:
    found = Acceptance(10, before, after, held_out, "" if held_out else "too few")
    assert found.accepted is accepted
    assert found.held_out_rows == (0 if held_out is None else 10)
    assert found.line().startswith("accepted" if accepted else "not accepted")


def test_a_machine_whose_protocols_are_all_slow_is_found() -> None:
    """The rows are slow where latencies decide, and as the profile predicts where the rate does.

    A fit that finds only a lower rate makes the large sizes worse than before.
    """
    found = calibrate(SAMPLES / "h100-8-all_gather.log", profile="h100-8")
    (judged,) = found.acceptances
    assert judged.before is not None
    assert judged.held_out is not None
    assert judged.after < judged.held_out < judged.before / 2
    assert_large_sizes_stay_right(found.result)


def test_a_slower_machine_is_found() -> None:
    cases = cases_of(read_nccl_tests(SAMPLES / "h100-8-all_gather-slow.log"), Choice(H100, "8"))
    found = fit_profile(H100, cases, Simulated(H100, cases), date="2026-01-15")
    before, after = (np.abs(found.errors(times_s)[0]).mean() for times_s in (found.before_s, found.after_s))
    assert after < before / 4
    assert_large_sizes_stay_right(found)


def assert_large_sizes_stay_right(found: Calibrated) -> None:
    for times_s in (found.before_s, found.after_s):
        assert abs(found.errors(times_s)[0][-4:]).max() < 0.06


def test_a_held_out_row_does_not_judge_itself(tmp_path: Path) -> None:
    """Other times of the rows of one part change the fit to all rows, but not what predicts these rows."""
    rows = list(made("all_gather", noise=0.01, sizes=SIZES).rows)
    slower = [
        row._replace(time_s=row.time_s * (1.3 if place in folds(len(rows))[1] else 1)) for place, row in enumerate(rows)
    ]
    found = []
    for name, measured in (("as_is", rows), ("slower", slower)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "all_gather.csv").write_text(
            csv(MeasuredTable("", "", "all_gather", 8, {}, tuple(measured)), "h100-8")
        )
        found.append(calibrate(tmp_path / name, fit=["ring_rate"]).result)
    part = folds(len(rows))[1]
    assert found[0].held_out_s[part] == pytest.approx(found[1].held_out_s[part], rel=1e-9)
    assert found[0].after_s[part] != pytest.approx(found[1].after_s[part], rel=1e-3)


def test_a_profile_that_predicts_exactly_is_not_replaced(command: Command) -> None:
    """No fit is better than the constants that the times were made with."""
    (command.folder / "all_gather.csv").write_text(csv(exact(list(SIZES[::2])), "h100-8"))
    line = ("calibrate", "all_gather.csv", "--output", "my.toml")
    done = command(*line)
    assert done.returncode == 2
    assert "not accepted: mean error of 9 rows 0.0% before" in done.stdout
    assert "my.toml: not written, the fit is no better on rows it was not fitted to" in done.stderr
    assert [path.name for path in command.folder.iterdir()] == ["all_gather.csv"]

    done = command(*line, "--json")
    told = json.loads(done.stdout)
    assert (done.returncode, told["accepted"], told["output"]) == (2, False, None)
    assert told["acceptance"]["held_out_rows"] == 9
    assert "not written" in told["error"]

    shown = command(*line[:2], "--json")
    assert (shown.returncode, json.loads(shown.stdout)["accepted"]) == (0, False)
    forced = command(*line, "--force", "--json")
    assert (forced.returncode, json.loads(forced.stdout)["output"]) == (0, "my.toml")
    assert (command.folder / "my.toml").exists()


def test_save_refuses_what_the_command_refuses(tmp_path: Path) -> None:
    path = tmp_path / "all_gather.csv"
    path.write_text(csv(exact(list(SIZES[::2])), "h100-8"))
    found = tasp_lab.calibrate(path)
    assert not found.accepted
    with pytest.raises(RejectedFitError, match=r"my\.toml: not written"):
        found.save(tmp_path / "my.toml")
    assert not (tmp_path / "my.toml").exists()
    found.save(tmp_path / "my.toml", force=True)
    assert (tmp_path / "my.toml").exists()
    assert issubclass(RejectedFitError, FitError)


def test_few_rows_are_judged_by_themselves(tmp_path: Path) -> None:
    """Three rows determine two constants, but two of them do not."""
    path = tmp_path / "sendrecv.csv"
    path.write_text(csv(made("sendrecv", sizes=[2**14, 2**16, 2**33]), "h100-8"))
    found = calibrate(path, fit=["link_payload", "message_launch"])
    (judged,) = found.acceptances
    assert judged.held_out is None
    assert judged.why.startswith("too few for a fit to 2 of them: 2 points cannot determine 2 parameters")
    assert found.accepted
    assert found.to_dict()["acceptance"]["held_out_rows"] == 0  # type: ignore[index]


@pytest.mark.parametrize("options", [(), ("--fabric", "local", "--output", "my.toml"), ("--judge",)])
def test_force_without_a_file_to_write(command: Command, options: tuple[str, ...]) -> None:
    assert "--force" in command.refused("calibrate", "full-mesh:2", "--force", *options)
