"""The version of the models is raised whenever an answer changes, so that no study takes an old answer for a new one.

These answers are copies of our own output: they are no test of what is right, but of `MODEL_VERSION`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tasp_lab.core.errors import StudyError
from tasp_lab.core.version import MODEL_VERSION
from tests.support.golden_answers import COMMAND, SAME, advice, answers, moved, stored, write


def test_answers_move_with_the_version_only() -> None:
    (version, before), now = stored(), answers()
    differences = moved(before, now)
    assert not differences, advice(differences)
    names = [{question: sorted(numbers) for question, numbers in each.items()} for each in (before, now)]
    assert (version, names[0]) == (MODEL_VERSION, names[1]), f"write the file again with {COMMAND}"


@pytest.mark.parametrize(("factor", "version", "refused"), [(1, 1, False), (1 + 2 * SAME, 1, True), (2, 2, False)])
def test_moved_answers_are_not_written_with_the_same_version(
    tmp_path: Path, factor: float, version: int, refused: bool
) -> None:
    file = tmp_path / "answers.json"
    write({"ring": {"time_s": 1.0}}, 1, file)
    before = file.read_bytes()
    now = {"ring": {"time_s": factor, "more": 1.0}, "another question": {"time_s": 3.0}}
    if refused:
        with pytest.raises(StudyError, match=r"answers moved, 1 numbers .* raise MODEL_VERSION"):
            write(now, version, file)
        assert file.read_bytes() == before
    else:
        write(now, version, file)
        assert stored(file) == (version, now)
