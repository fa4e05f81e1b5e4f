"""Counts of a small package whose figures are known, and the recording of what runs in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.benchmarks import structure_walk
from experiments.benchmarks.structure import FIGURES
from experiments.benchmarks.structure_counts import SourceCounts, comment_lines, count_source, count_words

SOURCES = {
    "__init__.py": "",
    "base.py": """
        class Report: ...
        class Table(Report):  # printed
            def to_dict(self): return {}
        class Long(Table): ...
    """,
    "registry.py": """
        NAMES = {"one": "toy.one:run", "elsewhere": "os.path:join"}
        from toy import base
        def build():
            from toy.two import run
            return run
    """,
    "one.py": "from toy.base import Report\ndef run(): return Report()\n",
    "two.py": "import toy.registry\ndef run(): return toy.registry.build\n",
    "part/__init__.py": "",
    "part/a.py": """
        from __future__ import annotations
        TYPE_CHECKING = False
        if TYPE_CHECKING:
            from .b import B
        class A: ...
    """,
    "part/b.py": "from toy.part.a import A\nclass B(A): ...\n",
    "main.py": """
        def main(arguments):
            from toy.registry import build
            from toy.one import run
            build(); run(); [inner() for _ in arguments]
        def inner(): return unused
        def unused(): return 1
    """,
    "hidden.py": """
        from importlib import import_module
        def low(): return import_module("toy.above").high()
    """,
    "above.py": "from toy.hidden import low\ndef high(): return low\n",
}


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    for name, text in SOURCES.items():
        path = tmp_path / "toy" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = text.strip("\n").splitlines()
        indent = len(lines[0]) - len(lines[0].lstrip()) if lines else 0
        path.write_text("".join(f"{line[indent:]}\n" for line in lines).rstrip() + "\n" * bool(lines))
    return tmp_path


@pytest.fixture
def counts(toy: Path) -> SourceCounts:
    return count_source(toy, ("toy",))


def test_modules_and_classes_are_counted(counts: SourceCounts) -> None:
    assert counts.modules == 11
    assert counts.classes == 5
    assert counts.report_subclasses == ["Table"], "Long is a Table"
    assert counts.to_dict == 1


def test_importers_in_functions_registries_and_for_type_checkers_count(counts: SourceCounts) -> None:
    # one: main and the registry's string; base: registry and one; registry: two and main.
    assert counts.single_importers == ["toy.above", "toy.hidden", "toy.main", "toy.part.a", "toy.part.b", "toy.two"]


def test_cycles_are_those_of_imports(counts: SourceCounts) -> None:
    # The registry imports two in a function, and two the registry; a needs b for its annotations alone; hidden imports
    # above by its name.
    cycles = [("toy.above", "toy.hidden"), ("toy.part.a", "toy.part.b"), ("toy.registry", "toy.two")]
    assert counts.cycles == cycles
    assert counts.cycles_across_packages == []


def test_a_cycle_through_two_packages_is_told_apart(toy: Path) -> None:
    (toy / "toy" / "part" / "c.py").write_text("import toy.user\n")
    (toy / "toy" / "user.py").write_text("from toy.part import c\n")
    assert count_source(toy, ("toy",)).cycles_across_packages == [("toy.part.c", "toy.user")]


def test_comments_for_tools_do_not_count() -> None:
    text = 'x = 1  # noqa: E501\n# why\ny = "# no comment"  # fmt: skip\nz = 2  # how\n#\n'
    assert comment_lines(text) == 2


def test_words_of_documents_are_counted_once(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("two words\n")
    assert count_words(tmp_path, ("*.md", "README.md", "docs/*.md")) == 2


def test_what_runs_is_counted(toy: Path) -> None:
    asked = {
        "task": "command", "root": str(toy), "packages": ["toy"], "cli": "toy.main:main", "arguments": ["x", "y"],
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-P", structure_walk.__file__, json.dumps(asked)],
        env=os.environ | {"PYTHONPATH": str(toy)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout)
    # main, its comprehension, inner, build, run, and the bodies of Report, Table and Long
    assert (found["functions"], found["modules"], found["packages"]) == (8, 4, 1)


def test_stored_figures_have_those_of_the_table() -> None:
    stored = json.loads((Path(structure_walk.__file__).parent / "results" / "structure.json").read_text())
    assert set(FIGURES) <= set(stored["before"]) & set(stored["now"])
