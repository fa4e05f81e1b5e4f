from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import ROOT

PACKAGES = ("tasp_lab", "sim", "runtime")


def test_the_three_packages_share_one_folder() -> None:
    """`sim` and `runtime` are common words: what is imported must be ours."""
    folders = {Path(str(importlib.import_module(name).__file__)).parent.parent for name in PACKAGES}
    assert folders == {ROOT}


def test_the_wheel_holds_the_three_packages_and_the_machines(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    built = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == set(PACKAGES)
    data = ("machines/descriptions/dgx-1v.toml", "machines/profiles/h100.toml", "machines/accelerators/h100.toml",
            "machines/libraries/constants/nccl.toml", "measure/tables/h100_xxrjun_1x8_sendrecv.csv",
            "study/report.html.j2")  # fmt: skip
    assert {f"tasp_lab/{name}" for name in data} <= set(names)
    assert {f"{name}/py.typed" for name in PACKAGES} <= set(names)


@pytest.mark.parametrize("package", ["tasp_lab", "sim"])
def test_neither_core_nor_simulator_load_torch(package: str) -> None:
    """Importing every module of the package, the command line aside, loads nothing that only few commands need."""
    program = (
        "import importlib, pkgutil, sys\n"
        f"import {package}\n"
        f"for module in pkgutil.iter_modules({package}.__path__, '{package}.'):\n"
        "    if not module.ispkg:\n"
        "        importlib.import_module(module.name)\n"
        "print(*sorted({'torch', 'pyroute2', 'simpy'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_documents_are_filled_in_and_their_links_lead_somewhere() -> None:
    for document in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "experiments").rglob("*.md")):
        text = document.read_text()
        assert not re.search(r"@[A-Z]+@", text), document
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
            assert (document.parent / target).exists(), f"{document}: {target}"


def test_constraints_pin_what_the_project_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"]]
    for extra in ("runtime", "notebooks", "search", "docs", "dev"):
        wanted += project["optional-dependencies"][extra]
    pinned = {line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    names = {requirement.split(";")[0].split(">")[0].strip().lower() for requirement in wanted}
    assert names <= pinned
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text().splitlines()


def test_constraints_pin_all_that_the_documents_are_built_with() -> None:
    """What the extra `docs` asks for, and what that asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    open_names = [Requirement(text).name for text in project["optional-dependencies"]["docs"]]
    needed = set[str]()
    while open_names:
        name = canonicalize_name(open_names.pop())
        if name not in needed:
            needed.add(name)
            found = map(Requirement, requires(name) or ())
            open_names += [each.name for each in found if each.marker is None or each.marker.evaluate({"extra": ""})]
    pinned = {canonicalize_name(line.split("==")[0]) for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert len(needed) > 20
    assert needed - pinned == set()
