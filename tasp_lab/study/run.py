"""Run a study: predict the points that have no row yet, store the rows, and write the files of the folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tasp_lab.core.errors import RunError, StudyError, first_line
from tasp_lab.core.report import Report
from tasp_lab.core.tables import Part, Table
from tasp_lab.core.workers import as_they_end, processes
from tasp_lab.study.evaluate import CODE, batches, group_rows, labelled, sources_of
from tasp_lab.study.folder import begin_folder, export, remove_exports
from tasp_lab.study.frames import counts_text, needed
from tasp_lab.study.point import PREDICTED, STATUSES, Point, Row
from tasp_lab.study.store import Last, Store
from tasp_lab.study.study import Study

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
        kept = stack.enter_context(Store(path))
        last = _usable(kept.last(), screen)
        progress = _Progress([asked[point] for point in points], last, done)
        progress.tell()  # before anything long, so that an interrupt finds the counts
        sources = sources_of({point.schedule for point in points})
        for point, question in asked.items():
            if question in last and sources[point.schedule] == last[question].sources != "":
                progress.keep(question, last[question].key, last[question].status)
        missing = list(batches(point for point, question in asked.items() if question not in progress.keys))
        if path is not None and missing:
            remove_exports(path)
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
    """The keys of the questions that have an answer, and how many points have a row, by status.

    Points whose row is in the store count from the start, also those whose schedules are built again to see whether
    the row is still theirs: after an upgrade all of them, and always those of schedules from elsewhere.
    """

    def __init__(self, questions: Sequence[str], last: Mapping[str, Last], done: DoneCallback) -> None:
        self.keys = dict[str, str]()
        self._points, self._total, self._done = Counter(questions), len(questions), done
        self._statuses = {question: last[question].status for question in self._points if question in last}
        self._counts: dict[str, int] = dict.fromkeys(STATUSES, 0)
        for question, status in self._statuses.items():
            self._counts[status] += self._points[question]

    def keep(self, question: str, key: str, status: str) -> None:
        """A question has an answer; the points that ask it have it, too."""
        self.keys[question] = key
        if question in self._statuses:
            self._counts[self._statuses[question]] -= self._points[question]
        self._statuses[question] = status
        self._counts[status] += self._points[question]

    def tell(self) -> None:
        self._done(sum(self._counts.values()), self._total, dict(self._counts))


def _usable(last: Mapping[str, Last], screen: bool) -> dict[str, Last]:
    """Answers that need not be asked again: failed ones are, and without `screen` those that a bound settled."""
    again = ("failed",) if screen else ("failed", "settled")
    return {question: each for question, each in last.items() if each.status not in again}


MAX_ROWS = 40
"""Rows of the table; all are in the files."""


@dataclass(frozen=True, repr=False)
class StudyResult(Report):
    """The rows of a study, in the order of its points; `folder` is where they are kept, None if nowhere."""

    study: str
    rows: tuple[Row, ...]
    folder: Path | None

    @property
    def counts(self) -> dict[str, int]:
        """The number of rows by status."""
        found = Counter(str(row["status"]) for row in self.rows)
        return {status: found[status] for status in STATUSES}

    def to_dict(self) -> dict[str, object]:
        """What ``--json`` prints: the study, its folder and its counts; rows are in the folder's files."""
        folder = None if self.folder is None else str(self.folder)
        return {"study": self.study, "folder": folder, "points": len(self.rows), "rows": self.counts}

    def records(self) -> Sequence[Mapping[str, object]]:
        return self.rows

    def parts(self) -> list[Part]:
        where = "" if self.folder is None else f", in {self.folder}"
        found: list[Part] = [f"study {self.study}: {counts_text(self.counts, 'points')}{where}"]
        for status in STATUSES:
            reasons = Counter(str(row["error"]) for row in self.rows if row["status"] == status not in PREDICTED)
            if reasons:
                rows = [(f"{count}", reason) for reason, count in reasons.most_common(MAX_ROWS)]
                found.append(Table(status, ("points", "reason"), rows, (1,)))
        return found

    def fastest(self, *group: str) -> list[Row]:
        """The fastest row for each value of some columns, in their order.

        Rows without a time are left out.
        """
        best: dict[tuple[object, ...], Row] = {}
        for row in self.rows:
            key = tuple(row[name] for name in group)
            if row["time_s"] is not None and (key not in best or _time_s(row) < _time_s(best[key])):
                best[key] = row
        return list(best.values())


def _time_s(row: Row) -> float:
    return float(row["time_s"] or 0)


Group = tuple[Sequence[Point], Collection[str]]
"""Points of one layer, and the keys of rows that they may have already."""


def answered(
    groups: Iterable[Group], executor: Executor | None, workers: int, screen: bool = False
) -> Iterator[list[tuple[Point, Row | str]]]:
    """The points of groups with their rows, or keys of rows, in the order in which they end.

    Without an executor they are answered in this process. Workers return rows, which are small, and not answers, which
    have all events and schedules.

    Raises `StudyError` if workers end before their work.
    """
    rows_of = partial(_rows_of, screen=screen, code=CODE)
    try:
        for (points, _), rows in as_they_end(rows_of, groups, executor, workers):
            yield list(zip(points, rows, strict=True))
    except RunError as error:
        raise StudyError("a worker ended before its work, perhaps for want of memory: start the study again, "
                         "with fewer workers (--jobs)") from error  # fmt: skip


def _rows_of(group: Group, screen: bool, code: str) -> list[Row | str]:
    points, known = group
    return group_rows(points, screen, known, code)


ANSWER_S = 10
"""How long a scheduler of Dask may take to answer."""


@contextmanager
def dask_executor(address: str) -> Iterator[tuple[Executor, int]]:
    """An executor on the workers of the scheduler at `address`, and how many there are.

    A lost worker's groups go to others. Raises `StudyError` where no scheduler answers or no worker is there.
    """
    distributed = needed("distributed", "--dask")
    try:
        client = distributed.Client(address, timeout=ANSWER_S)
    except (OSError, ValueError, TimeoutError) as error:
        raise StudyError(f"dask {address!r}: {first_line(error)}; expected the address of a scheduler") from error
    with client:
        count = len(client.scheduler_info(n_workers=-1)["workers"])
        if not count:
            raise StudyError(f"dask {address!r}: the scheduler has no workers, expected one or more")
        yield client.get_executor(pure=False), count
