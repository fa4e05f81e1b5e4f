"""Runs of studies: kept rows, interrupts, workers, stores."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import tomli_w

from tasp_lab import load_study
from tasp_lab.core.errors import OutputError, StudyError
from tasp_lab.study.folder import StudyFolder
from tasp_lab.study.run import run_study
from tasp_lab.study.store import RESULTS, Store
from tasp_lab.study.study import Study
from tasp_lab.study.table import table
from tests.conftest import ROOT, Tell
from tests.support.selection import fifth
from tests.support.signals import hear_interrupts
from tests.support.studies import SMALL, study_of

SCREENED = study_of(
    machine={"name": "h100-{n}", "n": 8},
    layer={"seq": "geom(32Ki, 64Ki, 2)"},
    schedule={"name": ["ring-attention", "zigzag-ring-attention"], "baseline": "zigzag-ring-attention"},
)
"""On one node a ring of whole blocks computes longer than a zigzag takes."""

DONE = {"ok": 20, "settled": 0, "does not apply": 4, "failed": 0}


def test_a_run_keeps_its_rows(tmp_path: Path) -> None:
    heard: list[tuple[int, int]] = []
    study = load_study(SMALL)
    first = run_study(study, tmp_path, done=lambda ended, total, _: heard.append((ended, total)))
    assert first.counts == DONE
    assert heard[0] == (0, 24)
    assert heard[-1] == (24, 24)
    heard.clear()
    assert run_study(study, tmp_path, done=lambda ended, total, _: heard.append((ended, total))).rows == first.rows
    assert heard == [(24, 24)]
    more = run_study(
        load_study(study_of(layer={"seq": "geom(1Ki, 16Ki, 2)"})),
        tmp_path,
        done=lambda ended, total, _: heard.append((ended, total)),
    )
    assert heard[1] == (24, 30)
    assert more.rows[: len(first.rows)] != more.rows  # rows of the longer sequence lie among them
    assert [row for row in more.rows if row["seq"] != 16384] == list(first.rows)


def test_the_files_of_a_folder_are_what_was_asked(tmp_path: Path) -> None:
    result = run_study(load_study(SMALL), tmp_path, command="tasp-lab study run small.toml")
    folder = StudyFolder(tmp_path)
    assert len(folder.rows()) == DONE["ok"]
    assert set(folder.unanswered()["schedule"]) == {"usp:2x2"}
    assert folder.baseline == "ring-attention"
    assert folder.provenance["command"] == "tasp-lab study run small.toml"
    written = pd.read_csv(tmp_path / "points.csv")
    assert written["key"].tolist() == [row["key"] for row in result.rows]
    assert written["time_s"].dropna().tolist() == [row["time_s"] for row in result.rows if row["time_s"] is not None]
    assert set(written["n"]) == {2, 4}
    assert len(pd.read_csv(tmp_path / "unanswered.csv")) == DONE["does not apply"]


def test_rows_are_the_same_with_any_number_of_workers() -> None:
    study = load_study(SMALL)
    assert run_study(study, jobs=2).rows == run_study(study).rows


def test_screened_rows_are_simulated_when_they_are_wanted(tmp_path: Path) -> None:
    study = load_study(SCREENED)
    screened = run_study(study, tmp_path, screen=True).counts
    assert screened["settled"] > 0
    baseline = study_of(**{**SCREENED, "schedule": SCREENED["schedule"] | {"baseline": "ring-attention"}})
    rows = run_study(load_study(baseline), screen=True).rows
    assert {row["status"] for row in rows if row["schedule"] == "ring-attention"} == {"ok"}
    assert run_study(study, tmp_path, screen=True).counts == screened
    assert run_study(study, tmp_path).counts == {"ok": 4, "settled": 0, "does not apply": 0, "failed": 0}


def test_a_folder_belongs_to_one_study(tmp_path: Path) -> None:
    run_study(load_study(study_of(layer={"seq": 1024})), tmp_path)
    with pytest.raises(StudyError, match="has the study 'small', expected 'other'"):
        run_study(load_study(study_of(study={"name": "other"})), tmp_path)


def test_a_store_of_another_format_is_refused(tmp_path: Path) -> None:
    with Store(tmp_path):
        pass
    with sqlite3.connect(tmp_path / RESULTS) as connection:
        connection.execute("PRAGMA user_version=99")
    with pytest.raises(StudyError, match="has format 99, expected format 2 of this version"):
        run_study(load_study(SMALL), tmp_path)


def test_another_file_is_no_store(tmp_path: Path) -> None:
    (tmp_path / RESULTS).write_bytes(b"text" * 1024)
    with pytest.raises(StudyError, match="file is not a database"):
        Store(tmp_path)
    (tmp_path / RESULTS).unlink()
    with sqlite3.connect(tmp_path / RESULTS) as connection:
        connection.execute("CREATE TABLE mine (a)")
    with pytest.raises(StudyError, match="no store of a study"):
        Store(tmp_path)


@pytest.mark.parametrize("broken", ["pages", "cells", "tables"])
def test_a_damaged_store_says_what_to_do(tmp_path: Path, broken: str) -> None:
    study = load_study(SMALL)
    run_study(study, tmp_path)
    file = tmp_path / RESULTS
    if broken == "pages":
        content = bytearray(file.read_bytes())
        content[4096 * 2 :] = b"\xff" * (len(content) - 4096 * 2)
        file.write_bytes(content)
    with contextlib.closing(sqlite3.connect(file)) as connection, connection:
        if broken == "cells":
            connection.execute("UPDATE rows SET cells = '{'")
        elif broken == "tables":
            connection.execute("DROP TABLE questions")
    with pytest.raises(StudyError, match="move this file away and run the study again") as refused:
        run_study(study, tmp_path)
    assert str(file) in str(refused.value)
    assert "\n" not in str(refused.value)
    file.rename(tmp_path / "old.sqlite")
    assert run_study(study, tmp_path).counts == DONE


class StoppedError(Exception):
    """In place of Ctrl-C."""


def interrupted(study: Study, folder: Path, after: int) -> None:
    """Run a study until so many points have a row."""

    def done(ended: int, total: int, by_status: Mapping[str, int]) -> None:
        if ended >= after:
            raise StoppedError

    with pytest.raises(StoppedError):
        run_study(study, folder, done=done)


def test_an_interrupted_study_shows_what_it_has(tmp_path: Path, tell: Tell) -> None:
    study = load_study(SMALL)
    interrupted(study, tmp_path, 9)
    with Store(tmp_path) as store:
        kept = len(store.last())
    assert 9 <= kept < 24
    folder = StudyFolder(tmp_path)
    assert (folder.so_far, folder.expected) == (kept, 24)
    whole = run_study(study).rows
    times = {row["key"]: row["time_s"] for row in whole}
    assert all(times[row["key"]] == row["time_s"] for row in folder.rows().to_dict("records"))
    assert folder.baseline == "ring-attention"
    assert f"{kept} of 24 points so far" in str(table(folder))
    code, out, err = tell("study", "show", str(tmp_path), "--json")
    assert code == 0, err
    assert (json.loads(out)["rows_so_far"], json.loads(out)["points"]) == (kept, 24)
    run_study(study, tmp_path)
    assert "so far" not in str(table(StudyFolder(tmp_path)))
    assert len(StudyFolder(tmp_path).rows()) == DONE["ok"]


@pytest.mark.parametrize("is_rebuilt", [False, True])
def test_a_resumed_study_counts_what_was_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_rebuilt: bool
) -> None:
    """Also if the schedules are built again to see whether the rows are still theirs."""
    study = load_study(SMALL)
    interrupted(study, tmp_path, 9)
    with Store(tmp_path) as store:
        kept = len(store.last())
    if is_rebuilt:
        monkeypatch.setattr("tasp_lab.study.run.sources_of", lambda names: dict.fromkeys(names, ""))
    counts: list[int] = []
    found = run_study(study, tmp_path, done=lambda ended, total, by_status: counts.append(sum(by_status.values())))
    assert counts[0] == kept > 0
    assert counts == sorted(counts)
    assert (counts[-1], found.counts) == (24, DONE)


def test_while_a_study_grows_its_old_files_are_not_shown(tmp_path: Path) -> None:
    run_study(load_study(SMALL), tmp_path)
    interrupted(load_study(study_of(layer={"seq": "geom(1Ki, 32Ki, 2)"})), tmp_path, 25)
    folder = StudyFolder(tmp_path)
    assert folder.expected == 36
    assert 25 <= folder.so_far < 36


def test_a_study_that_has_no_row_yet_is_refused_as_before(tmp_path: Path) -> None:
    interrupted(load_study(SMALL), tmp_path, 0)
    with pytest.raises(StudyError, match=r"nothing was run yet, expected points\.parquet or results\.sqlite"):
        table(StudyFolder(tmp_path))


def test_progress_says_how_many_points_do_not_apply(tmp_path: Path, tell: Tell) -> None:
    file = study_file(
        tmp_path, study_of(machine={"n": 2}, schedule={"name": ["usp:2x2", "ulysses"], "baseline": "ulysses"})
    )
    code, out, err = tell("study", "run", str(file), "--output", str(tmp_path / "run"), "--jobs", "1")
    assert code == 0, err
    assert "8 of 8 points (4 do not apply)" in err
    assert "study small: 8 points: 4 simulated, 4 do not apply" in out


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write"):
        run_study(load_study(SMALL), tmp_path / "file" / "folder")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a small disk")
def test_a_full_disk_ends_in_one_line_and_keeps_what_was_written(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount: {mounted.stderr.decode().strip()}")
    try:
        study = load_study(study_of(layer={"seq": "geom(1Ki, 64Ki, 2)", "batch": [1, 2, 3, 4]}))
        with pytest.raises((StudyError, OutputError), match=r"full|No space"):
            run_study(study, tmp_path)
        with Store(tmp_path) as store:
            kept = store.last()
        assert 0 < len(kept) < study.count
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


RUN = """
import sys
from tasp_lab import load_study, run_study
run_study(load_study(sys.argv[1]), sys.argv[2], jobs=int(sys.argv[3]),
          done=lambda ended, total, _: print(ended, flush=True))
"""


def started(file: Path, folder: Path, jobs: int = 1) -> subprocess.Popen[str]:
    """A process that runs a study and prints how many points have a row."""
    return subprocess.Popen(
        [sys.executable, "-c", RUN, str(file), str(folder), str(jobs)],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, preexec_fn=hear_interrupts,
    )  # fmt: skip


def study_file(folder: Path, document: dict[str, Any]) -> Path:
    file = folder / "small.toml"
    file.write_bytes(tomli_w.dumps(document).encode())
    return file


@pytest.mark.slow
def test_no_row_is_lost_or_doubled_when_runs_are_killed(tmp_path: Path) -> None:
    document = study_of(layer={"seq": "geom(1Ki, 8Ki, 2)", "batch": [1, 2, 3, 4, 5]})
    file, folder, drawn = study_file(tmp_path, document), tmp_path / "run", random.Random(19)
    before = 0
    for _ in range(fifth(10)):
        process = started(file, folder)
        assert process.stdout is not None
        after = drawn.randint(0, 12)
        for _, line in zip(range(after + 1), process.stdout, strict=False):
            assert int(line) >= before  # what was kept stays
            before = int(line)
        with process:
            process.kill()
    result = run_study(load_study(file), folder)
    assert result.rows == run_study(load_study(file)).rows
    with sqlite3.connect(folder / RESULTS) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert connection.execute("SELECT count(*) FROM rows").fetchone() == (len({row["key"] for row in result.rows}),)


def test_two_processes_may_run_one_study(tmp_path: Path) -> None:
    file, folder = study_file(tmp_path, SMALL), tmp_path / "run"
    processes = [started(file, folder), started(file, folder, jobs=2)]
    for process in processes:
        told, _ = process.communicate()
        assert process.returncode == 0
        assert told.split()[-1] == "24"
    with sqlite3.connect(folder / RESULTS) as connection:
        assert connection.execute("SELECT count(*) FROM rows").fetchone() == (24,)
    assert len(StudyFolder(folder).rows()) == DONE["ok"]


def test_ctrl_c_keeps_what_has_ended(tmp_path: Path) -> None:
    document = study_of(layer={"seq": "geom(1Ki, 512Ki, 2)", "batch": list(range(1, 200))})
    file, folder = study_file(tmp_path, document), tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "tasp_lab.cli", "study", "run", str(file), "--output", str(folder), "--jobs", "2"],
        cwd=ROOT, stderr=subprocess.PIPE, text=True, preexec_fn=hear_interrupts, start_new_session=True,
    )  # fmt: skip
    assert process.stderr is not None
    assert "points" in process.stderr.readline()
    while not kept_in(folder):
        pass
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: all processes hear it
    with process:
        told = process.stderr.read()
    assert process.returncode == 130
    assert "are kept in" in told
    assert "Traceback" not in told
    assert kept_in(folder) > 0


def kept_in(folder: Path) -> int:
    """The number of rows in the store of a folder that another process writes."""
    try:
        with Store(folder) as store:
            return len(store.last())
    except StudyError:
        return 0


def test_the_command_line_ends_with_counts(tmp_path: Path, tell: Tell) -> None:
    file = study_file(tmp_path, SMALL)
    code, out, err = tell("study", "run", str(file), "--output", str(tmp_path / "run"), "--jobs", "1", "--json")
    assert code == 0, err
    assert json.loads(out) == {"study": "small", "folder": str(tmp_path / "run"), "points": 24, "rows": DONE}
    assert "24 of 24 points" in err
    code, out, err = tell("study", "check", str(file), "--json")
    assert json.loads(out)["questions"] == 24
