"""Studies of plans: rows are what `plan` answers, however they are asked; and views of them."""

from __future__ import annotations

import csv
import re
import tomllib
from pathlib import Path

import pytest

from tasp_lab import load_study, plan
from tasp_lab.core.errors import StudyError
from tasp_lab.core.units import format_four_digits, format_size_about
from tasp_lab.prediction.training_step.layout import describe
from tasp_lab.study.check import check_study
from tasp_lab.study.folder import StudyFolder
from tasp_lab.study.lookup import points_at
from tasp_lab.study.point import OF_PLANS
from tasp_lab.study.report import report
from tasp_lab.study.run import run_study
from tasp_lab.study.table import table
from tests.conftest import ROOT, Command
from tests.support.studies import plans_of

TEN = ROOT / "experiments/studies/plans"


def test_a_row_is_what_plan_answers_with_any_number_of_workers(command: Command) -> None:
    """In Python, on the command line, and in studies by one process and by two."""
    study = load_study(plans_of())
    one, two = (run_study(study, jobs=jobs).rows for jobs in (1, 2))
    assert one == two
    for row, tokens in zip(one, (1024, 2048), strict=True):
        found = plan("full-mesh:2", "llama-3-8b", 1024, tokens, simulations=1, changes=False)
        printed = command.json("plan", "full-mesh:2", "--model", "llama-3-8b", "--seq", "1Ki", "--batch-tokens",
                               str(tokens), "--simulations", "1", "--no-changes", "--jobs", "1")  # fmt: skip
        assert (row["seq"], row["batch_tokens"], row["passes"], row["attention"]) == (1024, tokens, "both", "any")
        assert row["schedule"] == describe(found.best.plan) == printed["recommended"]
        assert row["time_s"] == found.best.time_s == printed["steps"][0]["time_s"]
        assert row["memory_bytes"] == found.best.memory.total
        for name in OF_PLANS:
            assert row[name] == printed[name]


def test_settings_of_a_study_are_arguments_of_plan() -> None:
    document = plans_of(
        machine={"name": "h100-2", "contention": "off"},
        plan={"batch_tokens": "1Ki", "checkpointing": "full", "logit_chunks": 2, "offload": True},
        schedule={"name": "ulysses"},
        what_if={"fast": {"set": {"link.bandwidth": "x2"}}},
    )
    for row, overrides in zip(run_study(load_study(document)).rows, ((), ("link.bandwidth=x2",)), strict=True):
        found = plan("h100-2", "llama-3-8b", 1024, 1024, schedules="ulysses", contention=False, checkpointing="full",
                     logit_chunks=2, offload=True, overrides=overrides, simulations=1, changes=False)  # fmt: skip
        assert (row["schedule"], row["time_s"]) == (describe(found.best.plan), found.best.time_s)
        assert (row["attention"], row["mfu"]) == ("ulysses", found.best.mfu)


def test_what_has_no_plan_has_a_reason() -> None:
    document = plans_of(
        machine={"name": "h100-8"}, layer={"model": "llama-3-405b"}, plan={"batch_tokens": [1024, 1000]}
    )
    small, broken = run_study(load_study(document)).rows
    assert small["status"] == broken["status"] == "does not apply"
    assert "llama-3-405b with 1Ki positions fits nowhere on h100-8" in str(small["error"])
    assert small["layouts"] == small["too_large"]
    assert "batch tokens" in str(broken["error"])


def test_views_of_plans(tmp_path: Path) -> None:
    """Layouts are answers: the table shows them, and two runs are compared point by point."""
    study = load_study(plans_of(what_if={"fast": {"set": {"link.bandwidth": "x2"}}}))
    told: list[int] = []
    for name in ("a", "a", "b"):
        run_study(study, tmp_path / name, done=lambda ended, total, _: told.append(ended))
    assert told[5:6] == [4]  # the second run asks nothing
    one, two = (StudyFolder(tmp_path / name) for name in "ab")
    numbers = ["schedule", "time_s", "memory_bytes"]
    assert one.rows()[numbers].equals(two.rows()[numbers])
    shown = table(one, baseline="variant=as is").records()
    assert [row["speedup"] for row in shown if row["variant"] == "as is"] == [1.0, 1.0]
    assert all(row["speedup"] >= 1 and row["tokens_per_s_per_gpu"] > 0 for row in shown)
    assert "the fastest layout" in str(table(one))
    page = report(one)
    assert page.html()
    (winners,) = (each["columns"] for name, each in page.tables.items() if name == "winners")
    assert {"winner", "tokens/s per GPU", "memory"} <= {*winners}
    assert "recommended" not in winners, "it is the winner"
    with pytest.raises(StudyError, match="a study of plans, expected one of layers"):
        points_at(study.points())


def test_the_study_of_the_documents_is_valid() -> None:
    texts = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/studies.md").read_text(), re.DOTALL)
    (text,) = (each for each in texts if "[plan]" in each)
    assert check_study(load_study(tomllib.loads(text))).document["points"] == 8


def test_the_page_of_ten_plans_has_the_figures_of_its_rows() -> None:
    checked = check_study(load_study(TEN / "study.toml"))
    with (TEN / "points.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert checked.document["points"] == len(rows) == 10
    page = (TEN / "README.md").read_text()
    lines = [line for line in page.splitlines() if re.match(r"\| (llama|qwen)", line)]
    for row, line in zip(rows, lines, strict=True):
        assert row["machine"] in line
        if row["status"] == "ok":
            assert row["schedule"] in line
            assert format_four_digits(float(row["tokens_per_s_per_gpu"])) in line
            assert format_size_about(int(row["memory_bytes"])) in line
            assert f"| {float(row['mfu']):.1%} |" in line
            assert f"| {float(row['expected_regret']):.1%} |" in line
        else:
            assert "nothing fits" in line
