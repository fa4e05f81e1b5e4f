"""A schedule is one file and one entry of a list: without them all others work, and no other file names it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import tasp_lab.schedules
from tasp_lab.schedules.registry import FILES, SCHEDULES
from tests.conftest import ROOT


def test_the_list_of_files_names_what_their_decorators_register() -> None:
    """All of it: a schedule of a file that the list lacks would not be found."""
    own = Path(tasp_lab.schedules.__file__).parent
    for path in own.glob("*/*.py"):
        import_module(f"tasp_lab.schedules.{path.parent.name}.{path.stem}")
    listed = {name: (kind, split, file) for kind, file, names in FILES
              for name, _, split in (each.partition(":") for each in names.split())}  # fmt: skip
    ours = {name: spec for name, spec in SCHEDULES.items() if spec.builder.__module__.startswith("tasp_lab.schedules.")}
    assert listed == {
        name: (spec.kind, spec.split, spec.builder.__module__.removeprefix("tasp_lab.schedules."))
        for name, spec in ours.items()
    }


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the packages, whose schedules a test may change."""
    for name in ("tasp_lab", "sim", "runtime"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


BURST = '    ("softmax", "attention.burst", "burst"),\n'


def replace_entry(package: Path, entries: str) -> None:
    registry = package / "tasp_lab/schedules/registry.py"
    before, entry, after = registry.read_text().partition(BURST)
    assert entry == BURST
    registry.write_text(before + entries + after)


def predict(package: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run(package, "predict", "full-mesh:4", "--seq", "64", *arguments)


def run(package: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line of a copy: the current folder comes first where Python looks for packages."""
    command = [sys.executable, "-c", "from tasp_lab.cli import main; main()", *arguments]
    return subprocess.run(command, cwd=package, capture_output=True, text=True, check=False)


def test_without_its_file_a_schedule_is_gone_and_all_others_work(package: Path) -> None:
    (package / "tasp_lab/schedules/attention/burst.py").unlink()
    replace_entry(package, "")
    assert predict(package, "--schedule", "usp:2x2", "--schedule", "tasp").returncode == 0
    gone = predict(package, "--schedule", "burst")
    assert (gone.returncode, gone.stdout) == (2, "")
    assert "unknown schedule 'burst'" in gone.stderr
    compared = run(package, "compare", "full-mesh:4", "--seq", "64", "--heads", "4")
    assert compared.returncode == 0, compared.stderr
    assert "ulysses" in compared.stdout
    assert "burst" not in compared.stdout


def test_a_new_file_and_its_entry_are_a_new_schedule(package: Path) -> None:
    folder = package / "tasp_lab/schedules/attention"
    text = (folder / "burst.py").read_text().replace('"burst"', '"mine"', 1)
    (folder / "mine.py").write_text(text)
    replace_entry(package, BURST + BURST.replace("burst", "mine"))
    found = predict(package, "--schedule", "mine", "--pass", "both")
    assert found.returncode == 0, found.stderr
    assert "mine" in found.stdout
