"""Wrong commands are refused: exit code 2, one line on stderr, nothing on stdout, and no file is written.

The commands and what the line contains are in ``refusals.toml``.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from tests.conftest import Command
from tests.support.study_folders import study_rows, write_study

TABLE = tomllib.loads(Path(__file__).with_name("refusals.toml").read_text())
FILES: dict[str, str] = TABLE.pop("files")
REFUSALS = {
    f"{start} {end}".strip(): [words] if isinstance(words, str) else words
    for start, rows in TABLE.items()
    for end, words in rows.items()
}
LENGTH = 560
"""The most characters of a line that lists all names there are."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of the table, files that are no text, an empty folder, and a study that was run."""
    folder = tmp_path_factory.mktemp("refusals")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (folder / "bytes.toml").write_bytes(b"a\xff")
    (folder / "binary.log").write_bytes(bytes(range(256)))
    (folder / "folder").mkdir()
    write_study(folder / "longctx", list(study_rows()))
    return folder


def contents(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


@pytest.mark.parametrize("line", REFUSALS)
def test_a_wrong_command_is_answered_in_one_line(folder: Path, line: str) -> None:
    """With ``--json`` the error is an object on stdout, too."""
    before = contents(folder)
    for typed in {line, line if "--json" in line else f"{line} --json"}:
        done = Command(folder)(typed)
        assert done.returncode == 2
        (told,) = done.stderr.splitlines()
        assert told.startswith("tasp-lab: ")
        assert [words for words in REFUSALS[line] if words not in told] == [], told
        assert len(told) < LENGTH
        assert "'direct'" not in told or "direct" in line  # the first of all schedules, which nobody named
        document = {"error": told.removeprefix("tasp-lab: ")}
        assert done.stdout == (json.dumps(document) + "\n" if "--json" in typed else "")
    assert contents(folder) == before


def test_a_number_of_too_many_digits(command: Command) -> None:
    """Python reads whole numbers of at most 4,300 digits."""
    line = "validate full-mesh:4 --schedule ring --shard-bytes 1 --repeat"
    assert "a whole number" in command.refused(*line.split(), "9" * 5000)


def test_what_the_messages_lead_to_works(command: Command) -> None:
    """The steps that some lines of the table propose."""
    shown = command("topologies").stdout
    assert all(form in shown for form in ("h100-NODESxRANKS", "full-mesh:N", "nodes:UxM"))
    line = "step torus:4x4 --model llama-3-8b --seq 8Ki --schedule tasp --no-fsdp --pass forward --json"
    done = command(*line.split())
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["time_s"] > 0
