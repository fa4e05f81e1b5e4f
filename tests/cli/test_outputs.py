"""Every command with every kind of result and every output option that it has: what is printed, and what is written.

The commands and words of what they print are in ``outputs.toml``, and so are the output options of each command. A new
command, or a new output option, has to be entered there.
"""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tomli_w

from tests.conftest import Command
from tests.support.outputs import (
    WIDTH,
    Document,
    broken,
    check_csv,
    check_picture,
    check_report,
    check_trace,
    commands,
    object_of,
    output_options,
    recorded,
    too_long,
    undocumented,
    words_of_tables,
)
from tests.support.selection import covering
from tests.support.studies import PLANS, SMALL, study_of
from tests.support.study_folders import study_rows, write_study

TABLE = tomllib.loads(Path(__file__).with_name("outputs.toml").read_text())
FILES: dict[str, str] = TABLE.pop("files")
OPTIONS: dict[str, list[str]] = TABLE.pop("options")
SLOW: list[str] = TABLE.pop("slow")["commands"]

FLAGS = {"--explain": [], "--force": [], "--pairs": [], "--sources": [], "--top": ["2"], "--wide": []}
"""Options that change what is shown, with their values."""

WRITTEN = {
    "--csv": "rows.csv",
    "--plot": "plot",
    "--trace": "trace.json",
    "calibrate --output": "mine.toml",
    "export --output": "plan",
    "gpu-check --output": "record",
    "search --output": "found.json",
    "study plot --output": "plot",
    "study report --output": "report.html",
    "study run --output": "study",
}
"""What options write, by option or by command and option; pictures without the end of their name."""


class Case(NamedTuple):
    """A command: its line, words of what it prints, output options that it refuses, and its exit code."""

    line: str
    words: Sequence[str]
    without: Sequence[str] = ()
    code: int = 0

    @property
    def command(self) -> str:
        """Its first words."""
        first, second = (*self.line.split(), "", "")[:2]
        return f"{first} {second}" if f"{first} {second}" in OPTIONS else first

    @property
    def options(self) -> list[str]:
        """The output options that it has, without that for JSON."""
        left_out = [*self.without, "--json", "--format"]
        left_out += ["--plot"] if self.command == "compare" and "--explain" not in self.line else []
        return [each for each in OPTIONS[self.command] if each not in left_out]

    def flags(self, *others: str) -> list[str]:
        """Those that write nothing, with their values, without `others`."""
        flags = [each for each in self.options if each in FLAGS and each not in others]
        return [word for each in flags for word in (each, *FLAGS[each])]

    def files(self, folder: Path, picture: str) -> dict[str, Path]:
        """Those that write, and what they write."""
        found = {}
        for each in self.options:
            if each not in FLAGS:
                name = WRITTEN.get(each) or WRITTEN[f"{self.command} {each}"]
                found[each] = folder / (f"plot{picture}" if name == "plot" else name)
        return found


def _case(line: str, told: str | list[str] | dict[str, Any]) -> Case:
    given = told if isinstance(told, dict) else {"words": told}
    words = given["words"]
    return Case(line, **given | {"words": [words] if isinstance(words, str) else words})


CASES = [_case(f"{start} {end}".strip(), told) for start, rows in TABLE.items() for end, told in rows.items()]
COSTLY = [pytest.mark.slow, pytest.mark.distributed]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of the table, studies, and folders of studies that were run."""
    folder = tmp_path_factory.mktemp("outputs")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    write_study(folder / "longctx", list(study_rows()))
    for name, study in {"small": SMALL, "other": study_of(layer={"heads": 8}), "plans": PLANS}.items():
        (folder / f"{name}.toml").write_text(tomli_w.dumps(study))
        done = Command(folder)("study", "run", f"{name}.toml", "--output", name, "--jobs", "1")
        assert done.returncode == 0, done.stderr
    layer = "--seq 8Ki --heads 8 --kv-heads 2 --mask causal --pass both"
    done = Command(folder)(f"search ring:4 {layer} --effort 10 --output found.json")
    assert done.returncode == 0, done.stderr
    done = Command(folder)("export full-mesh:4 --schedule multi-ring --format msccl-xml --output plan.xml")
    assert done.returncode == 0, done.stderr
    return folder


def test_the_table_has_every_command_and_every_output_option() -> None:
    assert {name: output_options(command) for name, command in commands()} == OPTIONS
    for command, options in OPTIONS.items():
        refused = [set(case.without) for case in CASES if case.command == command]
        assert refused, command
        assert set.intersection(*refused).isdisjoint(options), command


WAYS = covering(((case.command, way), case.line) for case in CASES for way in ("text", "json", "narrow"))
"""The ways in which each line is tested: every way of each command, and at least one of each line."""


def of_cases(way: str) -> pytest.MarkDecorator:
    """The cases that are tested in one way."""
    chosen = [case for case in CASES if ((case.command, way), case.line) in WAYS]
    return pytest.mark.parametrize(
        "case", [pytest.param(case, id=case.line, marks=COSTLY if case.command in SLOW else []) for case in chosen]
    )


@of_cases("text")
def test_every_result_as_text(folder: Path, tmp_path: Path, case: Case) -> None:
    flags = case.flags("--explain", "--force", "--pairs", "--top")
    out = _run(folder, tmp_path / "text", [case.line, *flags], case, {})
    assert [words for words in case.words if words not in out] == [], out


@of_cases("json")
def test_every_result_as_an_object_with_every_file(folder: Path, tmp_path: Path, case: Case) -> None:
    outputs = tmp_path / "json"
    files = case.files(outputs, (".png", ".svg", ".pdf")[CASES.index(case) % 3])
    with pytest.MonkeyPatch.context() as patches:
        results = recorded(patches)
        out = _run(folder, outputs, [case.line, *case.flags(), *_given(files), "--json"], case, files)
    document = object_of(out)
    assert (missing := undocumented(document)) == [], missing
    for result in results:
        check_report(result)
    _check_files(files, document)


@of_cases("narrow")
def test_every_result_on_a_narrow_terminal(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    """With files, which are the same as beside an object."""
    outputs = tmp_path / "narrow"
    files = {option: path for option, path in case.files(outputs, "").items() if path.stem != "plot"}
    document: Document = {}
    if "--csv" in files and not case.code:
        document = object_of(_run(folder, tmp_path / "json", [case.line, *case.flags(), "--json"], case, {}))
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    with pytest.MonkeyPatch.context() as patches:
        words = words_of_tables(patches)
        out = _run(folder, outputs, [case.line, *case.flags("--wide"), *_given(files)], case, files)
    assert (lines := too_long(out)) == [], lines
    assert (pieces := broken(out, words)) == [], pieces
    _check_files(files, document)


def _given(files: Mapping[str, Path]) -> list[str]:
    return [word for option, path in files.items() for word in (option, str(path))]


def _run(folder: Path, outputs: Path, line: Sequence[str], case: Case, files: Mapping[str, Path]) -> str:
    """What a command prints. Its exit code is checked, and that it writes these files and nothing else."""
    outputs.mkdir()
    done = Command(folder)(*(word for each in line for word in shlex.split(each)))
    assert done.returncode == case.code, done.stderr
    written = {path.name.partition(".")[0] for path in outputs.iterdir()}
    assert written == (set() if case.code else {path.stem for path in files.values()})
    if case.code:
        assert done.stderr.splitlines()[-1].startswith("tasp-lab: ")
    return done.stdout


def _check_files(files: Mapping[str, Path], document: Document) -> None:
    for option, path in files.items():
        if not path.exists():
            continue
        if path.stem == "plot":
            check_picture(path)
        elif option == "--trace":
            check_trace(path)
        elif option == "--csv":
            check_csv(path, document)
        elif path.suffix == ".json":
            assert json.loads(path.read_bytes())
        elif path.suffix == ".toml":
            assert tomllib.loads(path.read_text())
        else:
            assert path.is_dir() or path.stat().st_size > 0
