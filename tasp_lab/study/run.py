"""Run a study: predict the points that have no row yet, store the rows, and write the files of the folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tasp_lab.core.errors import RunError, StudyError, first_line
from tasp_lab.core.report import View
from tasp_lab.core.tables import Part, Table
from tasp_lab.core.workers import as_they_end, processes
from tasp_lab.study.evaluate import CODE, batches, group_rows, labelled, sources_of
from tasp_lab.study.folder import begin_folder, export, remove_exports
from tasp_lab.study.frames import counts_text, needed
from tasp_lab.study.point import PREDICTED, STATUSES, Point, Row
from tasp_lab.study.store import Store
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
    # Equal points of named points and axes are one question: it is answered once, and counts as many times.
    asked = {point: point.key() for point in points}
    points_of = Counter(asked[point] for point in points)
    keys, counts = dict[str, str](), Counter[str]()

    def tell() -> None:
        done(counts.total(), len(points), {status: counts[status] for status in STATUSES})

    with ExitStack() as stack:
        kept = stack.enter_context(Store(path))
        # failed questions are asked again, and where all times are wanted those that a bound settled
        again = ("failed",) if screen else ("failed", "settled")
        last = {question: each for question, each in kept.last().items() if each.status not in again}
        # Points whose row is in the store count from the start, also those whose schedules are built again to see
        # whether the row is still theirs: after an upgrade all of them, and always those of schedules from elsewhere.
        statuses = {question: last[question].status for question in points_of if question in last}
        for question, status in statuses.items():
            counts[status] += points_of[question]
        tell()  # before anything long, so that an interrupt finds the counts
        sources = sources_of({point.schedule for point in points})
        for point, question in asked.items():
            if question in last and sources[point.schedule] == last[question].sources != "":
                keys[question] = last[question].key
        missing = list(batches(point for point, question in asked.items() if question not in keys))
        if path is not None and missing:  # files of fewer rows than the store has would be read as the whole study
            remove_exports(path)
        workers = stack.enter_context(processes(jobs)) if executor is None else executor
        known = ((group, [last[asked[point]].key for point in group if asked[point] in last]) for group in missing)
        try:
            for (group, _), rows in as_they_end(partial(_rows_of, screen=screen, code=CODE), known, workers, jobs):
                # stored before it is counted: what a user has been told is kept, even if the next line is a kill
                kept.add((asked[point], sources[point.schedule], row) for point, row in zip(group, rows, strict=True))
                for question, row in zip(map(asked.__getitem__, group), rows, strict=True):
                    if isinstance(row, str):  # the stored row is still that of the question, and has been counted
                        keys[question] = row
                        continue
                    if question in statuses:
                        counts[statuses[question]] -= points_of[question]
                    keys[question], statuses[question] = str(row["key"]), str(row["status"])
                    counts[statuses[question]] += points_of[question]
                tell()
        except RunError as error:
            raise StudyError("a worker ended before its work, perhaps for want of memory: start the study again, "
                             "with fewer workers (--jobs)") from error  # fmt: skip
        stored = kept.rows(keys.values())
    found = tuple(labelled(stored[keys[asked[point]]], point) for point in points)
    if path is not None:
        export(path, study, points, found, command)
    return _result(study.name, found, path)


def _rows_of(group: tuple[Sequence[Point], Collection[str]], screen: bool, code: str) -> list[Row | str]:
    """The rows of points of one layer, or of those with a known key that key.

    Workers return rows, which are small, and not answers, which have all events and schedules.
    """
    points, known = group
    return group_rows(points, screen, known, code)


MAX_ROWS = 40
"""Rows of the table; all are in the files."""


@dataclass(frozen=True, repr=False)
class StudyResult(View):
    """The rows of a study, in the order of its points; `folder` is where they are kept, None if nowhere."""

    rows: tuple[Row, ...]
    counts: Mapping[str, int]
    folder: Path | None

    def fastest(self, *group: str) -> list[Row]:
        """The fastest row for each value of some columns, in their order. Rows without a time are left out."""
        best: dict[tuple[object, ...], Row] = {}
        for row in self.rows:
            if row["time_s"] is not None:
                key = tuple(row[name] for name in group)
                best[key] = min(best.get(key, row), row, key=lambda each: float(each["time_s"] or 0))
        return list(best.values())


def _result(study: str, rows: tuple[Row, ...], folder: Path | None) -> StudyResult:
    by_status = Counter(str(row["status"]) for row in rows)
    counts: dict[str, int] = {status: by_status[status] for status in STATUSES}
    where = "" if folder is None else f", in {folder}"
    parts: list[Part] = [f"study {study}: {counts_text(counts, 'points')}{where}"]
    for status in STATUSES:
        reasons = Counter(str(row["error"]) for row in rows if row["status"] == status not in PREDICTED)
        cells = [(f"{count}", reason) for reason, count in reasons.most_common(MAX_ROWS)]
        parts += [Table(status, ("points", "reason"), cells, (1,))] if cells else []
    document = {"study": study, "folder": None if folder is None else str(folder), "points": len(rows), "rows": counts}
    return StudyResult(document, rows, parts, counts, folder)


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
