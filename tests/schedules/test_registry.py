"""A schedule is one file: without it all others work, and a new file adds one. No other file names it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import tasp_lab.schedules
from tasp_lab.schedules.registry import SCHEDULES, _declared
from tests.conftest import ROOT


def test_what_is_read_from_sources_is_what_decorators_register() -> None:
    for name, declared in _declared().items():
        import_module(declared.module)
        assert (SCHEDULES[name].kind, SCHEDULES[name].split) == (declared.kind, declared.split)
        assert SCHEDULES[name].builder.__module__ == declared.module
    own = Path(tasp_lab.schedules.__file__).parent
    assert len(_declared()) == sum(each.read_text().count("\n@schedule(") for each in own.glob("*/*.py"))


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the packages, whose schedules a test may change."""
    for name in ("tasp_lab", "sim", "runtime"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def predict(package: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run(package, "predict", "full-mesh:4", "--seq", "64", *arguments)


def run(package: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line of a copy: the current folder comes first where Python looks for packages."""
    command = [sys.executable, "-c", "from tasp_lab.cli import main; main()", *arguments]
    return subprocess.run(command, cwd=package, capture_output=True, text=True, check=False)


def test_without_its_file_a_schedule_is_gone_and_all_others_work(package: Path) -> None:
    (package / "tasp_lab/schedules/attention/burst.py").unlink()
    assert predict(package, "--schedule", "usp:2x2", "--schedule", "tasp").returncode == 0
    gone = predict(package, "--schedule", "burst")
    assert (gone.returncode, gone.stdout) == (2, "")
    assert "unknown schedule 'burst'" in gone.stderr
    compared = run(package, "compare", "full-mesh:4", "--seq", "64", "--heads", "4")
    assert compared.returncode == 0, compared.stderr
    assert "ulysses" in compared.stdout
    assert "burst" not in compared.stdout


def test_a_new_file_is_a_new_schedule(package: Path) -> None:
    folder = package / "tasp_lab/schedules/attention"
    text = (folder / "burst.py").read_text().replace('"burst"', '"mine"', 1)
    (folder / "mine.py").write_text(text)
    found = predict(package, "--schedule", "mine", "--pass", "both")
    assert found.returncode == 0, found.stderr
    assert "mine" in found.stdout
