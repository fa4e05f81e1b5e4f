"""Groups of points on workers: this process, processes of this machine, a Dask cluster, or any other `Executor`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from functools import partial

from tasp_lab.core.errors import RunError, StudyError, first_line
from tasp_lab.core.workers import as_they_end
from tasp_lab.study.evaluate import CODE, group_rows
from tasp_lab.study.needed import needed
from tasp_lab.study.point import Point
from tasp_lab.study.rows import Row

Group = tuple[Sequence[Point], Collection[str]]
"""Points of one machine and layer, and the keys of rows that they may have already."""


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
