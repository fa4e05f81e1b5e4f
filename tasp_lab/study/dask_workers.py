"""Workers of a Dask cluster, beyond one machine."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager

from tasp_lab.core.errors import StudyError, first_line
from tasp_lab.study.needed import needed

ANSWER_S = 10
"""How long a scheduler may take to answer."""


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
