"""Studies on a Dask cluster of real processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from tasp_lab import load_study
from tasp_lab.core.errors import StudyError
from tasp_lab.study.run import dask_executor, run_study
from tests.conftest import ROOT, Tell
from tests.study.test_run import study_file
from tests.support.studies import SMALL, study_of

pytestmark = [
    pytest.mark.slow,
    # sockets that Dask leaves to the garbage collector when a worker is gone
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:distributed"),
]


class Cluster:
    """A scheduler and workers as processes."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        scheduler = self._start("scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard")
        assert scheduler.stderr is not None
        line = next(line for line in scheduler.stderr if "Scheduler at:" in line)
        self.address = line.split()[-1]
        self.workers: list[subprocess.Popen[str]] = []

    def add_worker(self) -> None:
        worker = self._start("worker", self.address, "--nthreads", "1", "--no-dashboard", "--no-nanny")
        assert worker.stderr is not None
        next(line for line in worker.stderr if "Registered to:" in line)
        self.workers.append(worker)

    def _start(self, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "dask", *arguments], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        self._stack.callback(_end, process)
        return process


def _end(process: subprocess.Popen[str]) -> None:
    with process:
        process.kill()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with ExitStack() as stack:
        found = Cluster(stack)
        for _ in range(2):
            found.add_worker()
        yield found


def test_a_lost_worker_loses_no_row(cluster: Cluster, tmp_path: Path) -> None:
    study = load_study(study_of(layer={"seq": "geom(1Ki, 8Ki, 2)", "batch": [1, 2, 3, 4]}))

    killed = list[subprocess.Popen[str]]()

    def done(ended: int, total: int, by_status: Mapping[str, int]) -> None:
        if not killed and total > ended > total // 4:
            killed.append(cluster.workers[0])
            killed[0].kill()

    with dask_executor(cluster.address) as (executor, count):
        assert count == 2
        found = run_study(study, tmp_path, executor=executor, jobs=count, done=done)
    assert killed
    assert found.rows == run_study(study).rows


def test_the_command_line_takes_an_address(cluster: Cluster, tmp_path: Path, tell: Tell) -> None:
    file = study_file(tmp_path, SMALL)
    code, out, err = tell(
        "study", "run", str(file), "--output", str(tmp_path / "run"), "--dask", cluster.address, "--json"
    )
    assert code == 0, err
    assert '"does not apply": 4' in out


def test_an_address_that_does_not_answer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasp_lab.study.run.ANSWER_S", 0.5)
    for address in ("tcp://127.0.0.1:9", "nowhere"):
        with (
            pytest.raises(StudyError, match=f"dask '{address}'.*expected the address of a scheduler"),
            dask_executor(address),
        ):
            pass


def test_a_scheduler_without_workers_is_refused() -> None:
    with ExitStack() as stack:
        alone = Cluster(stack)
        with pytest.raises(StudyError, match="has no workers"), dask_executor(alone.address):
            pass
