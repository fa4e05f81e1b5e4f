"""A fit is written if it predicts better than before, also rows that it was not fitted to."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest

import tasp_lab
from tasp_lab.core.errors import FitError, RejectedFitError
from tasp_lab.measure.calibrate import calibrate
from tasp_lab.measure.fit.acceptance import CHANCE, LEAST_ROWS, Acceptance, folds
from tasp_lab.measure.fit.cases import Simulated, cases_of
from tasp_lab.measure.fit.fit_profile import Calibrated
from tasp_lab.measure.fit.fit_profile import calibrate as fit_profile
from tasp_lab.measure.profiles import Choice
from tasp_lab.measure.readers import MeasuredTable, find_tables
from tasp_lab.schedules.collectives.kinds import NcclTestsName
from tests.conftest import ROOT, Command
from tests.measure.fit.test_fit_profile import H100, SIZES, csv, made, table
from tests.support.selection import covering

SAMPLES = ROOT / "tests" / "measure" / "readers" / "samples"
"""Logs in the format of nccl-tests of plausible machines, made for these tests: slow at small and medium sizes."""


def exact(sizes: list[int]) -> MeasuredTable:
    """What the machine of the profile would measure."""
    (case,) = cases_of([table("all_gather", np.ones(len(sizes)), sizes)], Choice(H100, "8"))
    return table("all_gather", Simulated(H100, [case])(H100.parameters), sizes)


@pytest.mark.parametrize("count", range(1, 40))
def test_every_row_is_held_out_once(count: int) -> None:
    """No fit to the others lacks more than half of the rows, and where rows are few none lacks more than a fifth."""
    parts = folds(count)
    assert sorted(row for part in parts for row in part) == list(range(count))
    assert max(map(len, parts)) == (-(-count // 5) if count <= 12 else -(-count // 3))


@pytest.mark.parametrize(
    ("before", "after", "held_out", "chance", "refusal"),
    [
        (0.2, 0.1, 0.15, 0.01, ""),
        (0.2, 0.1, 0.2, 0.01, "no better on rows it was not fitted to: mean error 20.0% before, 20.0% after"),
        (0.2, 0.1, 0.3, 0.01, "no better"),
        (0.2, 0.3, 0.1, 0.01, "no better"),
        (0.2, 0.1, None, None, "cannot be checked on rows it was not fitted to: too few"),
        (0.2, 0.1, 0.15, 0.06, "10 rows that improve by chance with a probability of 6% do not show"),
        (2.0, 0.1, 0.6, 0.01, "miss it by 60%, expected 50% at most"),
        (None, 0.1, 0.6, None, "miss it by 60%, expected 50% at most"),
        (None, 0.1, None, None, "cannot be checked"),
        (None, 0.4, 0.4, None, ""),
    ],
)
def test_a_fit_is_better_also_on_held_out_rows_and_not_by_chance(
    before: float | None, after: float, held_out: float | None, chance: float | None, refusal: str
) -> None:
    found = Acceptance(10, before, after, held_out, chance, "" if held_out else "too few")
    assert refusal in found.refusal()
    assert found.accepted is (refusal == "")
    assert found.held_out_rows == (0 if held_out is None else 10)
    assert found.line().startswith("not accepted" if refusal else "accepted")


@pytest.mark.parametrize("rows", range(1, 9))
def test_few_rows_show_no_improvement(rows: int) -> None:
    """If all are better, the chance is that of heads alone: 1 in 2 ** rows."""
    measured_s, errors = np.ones(rows), np.linspace(1.3, 1.4, rows)
    found = Acceptance.of(measured_s, errors, measured_s, 1 + (errors - 1) / 7)
    assert found.chance == pytest.approx(2.0**-rows)
    assert found.accepted is (rows >= LEAST_ROWS)
    assert (f"it takes {LEAST_ROWS} rows or more" in found.refusal()) is (rows < LEAST_ROWS)
    assert 2.0**-LEAST_ROWS <= CHANCE < 2.0 ** (1 - LEAST_ROWS)


def test_noise_about_right_constants_seldom_passes_for_another_machine() -> None:
    """The mean of the other rows predicts each. Of such tables one in five improves, and almost none is accepted."""
    random, improved, accepted, tables = np.random.default_rng(0), 0, 0, 300
    for _ in range(tables):
        noisy = np.exp(random.normal(0, 0.1, 7))
        held_out = np.exp((np.log(noisy).sum() - np.log(noisy)) / 6)
        found = Acceptance.of(noisy, np.ones(7), np.full(7, noisy.mean()), held_out)
        assert found.before is not None
        assert found.held_out is not None
        improved += found.held_out < found.before
        accepted += found.accepted
    assert improved > 0.1 * tables
    assert accepted <= CHANCE * tables


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
    cases = cases_of(find_tables([SAMPLES / "h100-8-all_gather-slow.log"]), Choice(H100, "8"))
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
            csv(MeasuredTable("", {}, "all_gather", 8, tuple(measured)), "h100-8")
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


def test_a_fit_that_no_row_checks_is_not_written(tmp_path: Path) -> None:
    """Three rows determine two constants, but two of them do not."""
    path = tmp_path / "sendrecv.csv"
    path.write_text(csv(made("sendrecv", sizes=[2**14, 2**16, 2**33]), "h100-8"))
    found = calibrate(path, fit=["link_payload", "message_launch"])
    (judged,) = found.acceptances
    assert judged.held_out is None
    assert judged.why.startswith("too few rows for a fit to 2 of 3: 2 points cannot determine 2 parameters")
    assert not found.accepted
    assert found.to_dict()["acceptance"]["held_out_rows"] == 0  # type: ignore[index]


def spread(count: int) -> list[int]:
    """So many of the sizes, from the smallest to the largest."""
    return [SIZES[place] for place in np.linspace(0, len(SIZES) - 1, count).astype(int)]


@pytest.mark.parametrize(("collective", "count"), covering(product(["all_gather", "sendrecv"], [1, 3, 5, 7])))
def test_what_is_written_was_checked_and_predicts_sizes_that_were_not_measured(
    tmp_path: Path, collective: NcclTestsName, count: int
) -> None:
    """Tables of a machine with other constants; the others of its sizes are those that nobody measured."""
    path = tmp_path / "table.csv"
    path.write_text(csv(made(collective, noise=0.03, sizes=spread(count), seed=count), "h100-8"))
    if count == 1:
        with pytest.raises(FitError, match=f"1 row determines none, expected {LEAST_ROWS} or more"):
            calibrate(path)
        return
    found = calibrate(path)
    (judged,) = found.acceptances
    if collective == "sendrecv":  # whose constants are far from the profile's
        assert found.accepted is (count >= LEAST_ROWS)
    assert found.accepted is (judged.held_out_rows == count and judged.held_out is not None and not judged.refusal())
    other = [size for size in SIZES if size not in spread(count)]
    if found.accepted and other:
        (case,) = cases_of([made(collective, sizes=other)], Choice(H100, "8"))
        predict, times_s = Simulated(H100, [case]), np.array([row.time_s for row in case.rows])
        before, after = (
            np.abs(predict(profile.parameters) / times_s - 1).mean() for profile in (H100, found.result.profile)
        )
        assert after < before


@pytest.mark.parametrize(("count", "seed"), covering(product([2, 3, 5, 7, 8], range(3))))
def test_noise_is_not_written(command: Command, count: int, seed: int) -> None:
    """Times of the profile's own machine times noise: nothing is left to find. The seeds were not chosen."""
    (case,) = cases_of([table("all_gather", np.ones(count), spread(count))], Choice(H100, "8"))
    noise = np.exp(np.random.default_rng(seed).normal(0, 0.1, count))
    measured_table = table("all_gather", Simulated(H100, [case])(H100.parameters) * noise, spread(count))
    (command.folder / "all_gather.csv").write_text(csv(measured_table, "h100-8"))
    done = command("calibrate", "all_gather.csv", "--output", "my.toml")
    assert done.returncode == 2
    assert len([line for line in done.stderr.splitlines() if line.startswith("tasp-lab:")]) == 1
    assert not (command.folder / "my.toml").exists()


def test_times_that_no_machine_has_are_not_written(command: Command) -> None:
    """Drawn between 10 us and 10 ms whatever the size: the profile is far off, and no fit describes them."""
    times_s = np.exp(np.random.default_rng(0).uniform(np.log(1e-5), np.log(1e-2), 8))
    (command.folder / "all_gather.csv").write_text(csv(table("all_gather", times_s, spread(8)), "h100-8"))
    assert command("calibrate", "all_gather.csv", "--output", "my.toml").returncode == 2
    assert not (command.folder / "my.toml").exists()


@pytest.mark.parametrize("options", [(), ("--fabric", "local", "--output", "my.toml")])
def test_force_without_a_file_to_write(command: Command, options: tuple[str, ...]) -> None:
    assert "--force" in command.refused("calibrate", "full-mesh:2", "--force", *options)
