"""Runs of a study: the points that have no row yet are answered and kept; then the folder gets its files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from pathlib import Path

from tasp_lab.errors import StudyError
from tasp_lab.study.evaluate import groups, key_of, labelled
from tasp_lab.study.export import begin_folder, export
from tasp_lab.study.point import Point
from tasp_lab.study.result import StudyResult
from tasp_lab.study.rows import Row
from tasp_lab.study.store import Store
from tasp_lab.study.study import Study
from tasp_lab.study.workers import answered, processes

DoneCallback = Callable[[int, int], None]
"""Called with how many of how many points have a row."""


def run_study(
    study: Study,
    folder: str | Path | None = None,
    *,
    jobs: int = 1,
    executor: Executor | None = None,
    screen: bool = False,
    command: str = "",
    done: DoneCallback = lambda done, total: None,
) -> StudyResult:
    """Answer all points of a study that have no row yet.

    Parameters
    ----------
    study : the study.
    folder : where rows are kept, and files are written at the end; without one nothing is kept.
    jobs : worker processes; 1 for this process. A script that starts more needs ``if __name__ == "__main__":``.
    executor : workers of an engine of one's own instead, such as Dask's ``Client(...).get_executor()``; `jobs` says how
        many it has.
    screen : whether schedules whose bound is above the time of another are settled without a simulation.
    command : what repeats the run, for the provenance.
    done : called with the progress.

    Rows that have ended stay when the run is interrupted or killed; the same call goes on. Raises `StudyError`.
    """
    if jobs < 1:
        raise StudyError(f"jobs: {jobs}, expected 1 or more")
    path = None if folder is None else Path(folder)
    if path is not None:
        begin_folder(path, study)
    points = list(study.points())
    if not points:
        raise StudyError(f"study {study.name!r} has no points, its filters skip all {study.count:,}")
    keys = [key_of(point) for point in points]
    with ExitStack() as stack:
        kept: Store | _Memory = _Memory() if path is None else stack.enter_context(Store(path))
        missing = _missing(points, keys, kept.keys(settled=screen))
        workers = stack.enter_context(processes(jobs)) if executor is None else executor
        ended = len(points) - sum(map(len, missing))
        done(ended, len(points))
        for group in answered(missing, workers, jobs, screen):
            kept.add(group)
            ended += len(group)
            done(ended, len(points))
        found = kept.rows(keys)
    rows = tuple(labelled(found[key], point) for key, point in zip(keys, points, strict=True))
    if path is not None:
        export(path, study, points, rows, command)
    return StudyResult(study.name, rows, path)


class _Memory:
    """A store that is gone with the process."""

    def __init__(self) -> None:
        self._rows: dict[str, Row] = {}

    def keys(self, settled: bool = True) -> set[str]:
        return set()

    def add(self, rows: Iterable[Row]) -> None:
        self._rows |= {str(row["key"]): row for row in rows}

    def rows(self, keys: Iterable[str]) -> Mapping[str, Row]:
        return self._rows


def _missing(points: Sequence[Point], keys: Sequence[str], known: set[str]) -> list[list[Point]]:
    """The points that have no row, each question once, in groups."""
    first = {key: point for key, point in zip(reversed(keys), reversed(points), strict=True) if key not in known}
    return list(groups(point for key, point in zip(keys, points, strict=True) if first.get(key) is point))
