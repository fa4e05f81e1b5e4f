"""A study by its file or by the folder that it was run in; rows that are known there are not predicted again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tasp_lab.core.errors import StudyError
from tasp_lab.machines.sampling import Sampling
from tasp_lab.prediction.answer import answer
from tasp_lab.prediction.interval import Interval
from tasp_lab.schedules.registry import is_own
from tasp_lab.study.evaluate import answers, labelled, own_sources
from tasp_lab.study.file import load_study
from tasp_lab.study.find.contest import IntervalOf
from tasp_lab.study.folder import POINTS, STUDY, StudyFolder
from tasp_lab.study.point import Point
from tasp_lab.study.rows import Row
from tasp_lab.study.store import RESULTS, Store
from tasp_lab.study.study import Study


@dataclass(frozen=True)
class Asked:
    """A study; `folder` is where it was run, None of a file.

    `known` are rows that were simulated there, by key, and `keys` those of questions whose schedules need not be built.
    """

    study: Study
    folder: Path | None
    known: Mapping[str, Row] = field(default_factory=dict, repr=False)
    keys: Mapping[str, str] = field(default_factory=dict, repr=False)

    def evaluate(self, point: Point) -> Row:
        """The row of a point: that of the folder if it still holds, else a new one."""
        key = self.keys.get(point.key(), "") if is_own(point.schedule) else ""
        if key in self.known:
            return self.known[key]
        (found,) = answers([point], known=self.known)
        return self.known[found] if isinstance(found, str) else labelled(found, point)


def asked(path: str | Path) -> Asked:
    """The study of a file or of a folder. Raises `StudyError` where there is none."""
    path = Path(path)
    if not path.is_dir():
        return Asked(load_study(path), None)
    if not (path / STUDY).exists():
        raise StudyError(f"{path}: no study there, expected {STUDY}, as tasp-lab study run FILE --output {path} writes")
    return Asked(load_study(path / STUDY), path, *_stored(path))


def asked_in(folder: Path) -> Asked:
    """The study of a folder. Raises `StudyError` for a file."""
    if folder.is_file():
        raise StudyError(f"{folder}: a file, expected the folder that a study was run in")
    if not folder.exists():
        raise StudyError(f"{folder}: no such folder")
    return asked(folder)


def _stored(folder: Path) -> tuple[dict[str, Row], dict[str, str]]:
    """The rows of a folder that have a time, by key; and the keys of questions that hold without building schedules.

    Without a store, as in a folder that was passed on, the rows are those of the files.
    """
    if (folder / RESULTS).exists():
        own = own_sources()
        with Store(folder) as store:
            last = {question: each for question, each in store.last().items() if each.status == "ok"}
            rows = store.rows(each.key for each in last.values())
        return rows, {question: each.key for question, each in last.items() if each.sources == own}
    if not (folder / POINTS).exists():
        return {}, {}
    rows_of_files = StudyFolder(folder).rows()
    done = rows_of_files[rows_of_files["status"] == "ok"]
    columns = [each for each in ("key", "status", "time_s", "bottleneck") if each in done]
    return {str(row["key"]): row for row in done[columns].to_dict("records")}, {}


def interval_of(sampling: Sampling) -> IntervalOf | None:
    """The interval of a point with these samples of the constants; None for no samples."""
    if not sampling.samples:
        return None

    def found(point: Point) -> Interval | None:
        return answer(replace(point, sampling=sampling)).interval

    return found
