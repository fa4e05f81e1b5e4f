"""Run a study: predict the points that have no row yet, store the rows, and write the files of the folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from pathlib import Path

from tasp_lab.core.errors import StudyError
from tasp_lab.core.workers import processes
from tasp_lab.study.evaluate import groups, labelled, sources_of
from tasp_lab.study.folder import begin_folder, export, remove_exports
from tasp_lab.study.result import StudyResult
from tasp_lab.study.rows import STATUSES, Row
from tasp_lab.study.store import Last, Store
from tasp_lab.study.study import Study
from tasp_lab.study.workers import answered

DoneCallback = Callable[[int, int, Mapping[str, int]], None]
"""Called with how many of how many points have a row, and how many of those by status."""


def run_study(
    study: Study,
    folder: str | Path | None = None,
    *,
    jobs: int = 1,
    executor: Executor | None = None,
    screen: bool = False,
    command: str = "",
    done: DoneCallback = lambda done, total, by_status: None,
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
    done : called with the progress, see `DoneCallback`.

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
    asked = {point: point.key() for point in points}
    with ExitStack() as stack:
        kept: Store | _Memory = _Memory() if path is None else stack.enter_context(Store(path))
        progress = _Progress([asked[point] for point in points], done)
        last = _usable(kept.last(), screen)
        sources = sources_of({point.schedule for point in points})
        for point, question in asked.items():
            if question in last and sources[point.schedule] == last[question].sources != "":
                progress.keep(question, last[question].key, last[question].status)
        missing = list(groups(point for point, question in asked.items() if question not in progress.keys))
        if path is not None and missing:
            remove_exports(path)
        progress.tell()
        workers = stack.enter_context(processes(jobs)) if executor is None else executor
        known = ((group, [last[asked[point]].key for point in group if asked[point] in last]) for group in missing)
        for group in answered(known, workers, jobs, screen):
            kept.add((asked[point], sources[point.schedule], row) for point, row in group)
            for point, row in group:
                if isinstance(row, str):
                    progress.keep(asked[point], row, last[asked[point]].status)
                else:
                    progress.keep(asked[point], str(row["key"]), str(row["status"]))
            progress.tell()
        found = kept.rows(progress.keys.values())
    rows = tuple(labelled(found[progress.keys[asked[point]]], point) for point in points)
    if path is not None:
        export(path, study, points, rows, command)
    return StudyResult(study.name, rows, path)


class _Progress:
    """The keys of the questions that have an answer, and how many points have one, by status."""

    def __init__(self, questions: Sequence[str], done: DoneCallback) -> None:
        self.keys = dict[str, str]()
        self._counts: dict[str, int] = dict.fromkeys(STATUSES, 0)
        self._points, self._total, self._done = Counter(questions), len(questions), done

    def keep(self, question: str, key: str, status: str) -> None:
        """A question has an answer; the points that ask it have it, too."""
        if question not in self.keys:
            self.keys[question] = key
            self._counts[status] += self._points[question]

    def tell(self) -> None:
        self._done(sum(self._counts.values()), self._total, dict(self._counts))


class _Memory:
    """A store that is gone with the process."""

    def __init__(self) -> None:
        self._rows: dict[str, Row] = {}

    def last(self) -> Mapping[str, Last]:
        return {}

    def add(self, found: Iterable[tuple[str, str, Row | str]]) -> None:
        self._rows |= {str(row["key"]): row for _, _, row in found if not isinstance(row, str)}

    def rows(self, keys: Iterable[str]) -> Mapping[str, Row]:
        return self._rows


def _usable(last: Mapping[str, Last], screen: bool) -> dict[str, Last]:
    """Answers that need not be asked again: failed ones are, and without `screen` those that a bound settled."""
    again = ("failed",) if screen else ("failed", "settled")
    return {question: each for question, each in last.items() if each.status not in again}
