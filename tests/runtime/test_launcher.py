"""Real processes, real sockets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.protocol.jobs import MeasurePair, PairTimes, RankLocation, RunSchedule
from runtime.ranks.launcher import LaunchedRanks, launch
from tasp_lab.core.errors import RunError
from tasp_lab.schedules.build import collective
from tasp_lab.topology.builders import full_mesh
from tests.conftest import ROOT, assert_gone
from tests.support.ranks import as_if_by_torchrun

pytestmark = pytest.mark.distributed


def test_pairs_are_measured_one_way_at_a_time(ranks: LaunchedRanks) -> None:
    results = ranks.perform(MeasurePair(2, 1, (1000, 100_000), repeats=3, tiny=10), longest_silence_s=20)
    assert [isinstance(result, PairTimes) for result in results] == [False, False, True, False]
    times = results[2]
    assert isinstance(times, PairTimes)
    assert [size for size, _ in times.answered_s] == [1000] * 3 + [100_000] * 3
    assert len(times.tiny_answered_s) == len(times.tiny_posted_s) == 10
    assert all(seconds > 0 for _, seconds in times.answered_s)


def reports_under_torchrun() -> bool:
    from runtime.ranks.torchrun import join

    with join() as joined:
        return joined.is_reporter


def test_one_process_reports(ranks: LaunchedRanks) -> None:
    """The launcher, which is no rank; of ranks that each run the program, the first."""
    assert ranks.is_reporter
    assert as_if_by_torchrun(reports_under_torchrun, 3) == [True, False, False]


def long_job() -> RunSchedule:
    """Enough work to be interrupted: ranks verify and repeat for many seconds."""
    return RunSchedule(collective("multi-ring", full_mesh(4), 4 * 2**20), "p2p", repeats=500)


def rank_processes(launched: LaunchedRanks) -> list[int]:
    """The process of every rank, in order: children of the fork_server are forked in the order of ranks."""
    fork_server = launched._fork_server.pid
    return [int(pid) for pid in Path(f"/proc/{fork_server}/task/{fork_server}/children").read_text().split()]


def when_it_works(launched: LaunchedRanks, rank: int, then: Callable[..., object], *arguments: object) -> None:
    """Call a function once a rank has moved blocks of its first job: it reports each wait for a message."""
    _, at_rest, _ = launched._heartbeat.row(rank)
    while launched._heartbeat.row(rank)[1] < at_rest + 20:
        time.sleep(0.01)
    then(*arguments)


@pytest.mark.parametrize(
    ("signal_number", "told"),
    [(signal.SIGKILL, "rank 2 was killed by SIGKILL"), (signal.SIGSTOP, "rank 2 hangs .* no heartbeat")],
)
def test_a_rank_that_dies_or_hangs_ends_the_run_and_is_named(signal_number: int, told: str) -> None:
    with launch([RankLocation()] * 4) as launched:
        processes = rank_processes(launched)
        assert len(processes) == 4
        thread = threading.Thread(target=when_it_works, args=(launched, 2, os.kill, processes[2], signal_number))
        thread.start()
        with pytest.raises(RunError, match=told):
            launched.perform(long_job(), longest_silence_s=200)
        thread.join()
    assert_gone(processes)


def test_a_rank_that_dies_between_jobs_is_named() -> None:
    with launch([RankLocation()] * 2) as launched:
        killed = rank_processes(launched)[1]
        os.kill(killed, signal.SIGKILL)
        assert_gone([killed])
        with pytest.raises(RunError, match="rank 1 was killed by SIGKILL"):
            launched.perform(long_job(), longest_silence_s=20)


def job_that_crashes() -> RunSchedule:
    """The name of its transport is none: an error that the ranks do not expect."""
    return RunSchedule(collective("ring", full_mesh(2), 10), ["p2p"], 1)  # type: ignore[arg-type]


def test_an_error_inside_a_rank_is_one_line() -> None:
    with (
        launch([RankLocation()] * 2) as launched,
        pytest.raises(RunError, match=r"rank . failed during the run: TypeError"),
    ):
        launched.perform(job_that_crashes(), longest_silence_s=20)


def test_an_interface_that_does_not_exist_is_told() -> None:
    """One rank fails to start while the others wait for it: it is named, and not for being late."""
    locations = [RankLocation(), RankLocation("nonesuch"), RankLocation()]
    with pytest.raises(RunError, match=r"rank 1 ended with exit code 1"), launch(locations):
        pass


def test_after_a_failure_the_ranks_are_gone() -> None:
    with launch([RankLocation()] * 2) as launched:
        for told in ("failed during the run: TypeError", "the ranks are gone"):
            with pytest.raises(RunError, match=told):
                launched.perform(job_that_crashes(), longest_silence_s=20)


def test_modules_of_the_current_folder_are_not_ours(tmp_path: Path) -> None:
    for name in ("runtime", "tasp_lab", "sim"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    program = (
        f"import sys; sys.path[0] = {str(ROOT)!r}\n"
        "from runtime.ranks.launcher import launch\n"
        "from runtime.protocol.jobs import RankLocation\n"
        "with launch([RankLocation()]) as ranks:\n"
        "    print(ranks.world_size)\n"
    )
    line = [sys.executable, "-c", program]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100)
    assert done.stdout.strip() == "1", done.stderr


def test_nothing_is_left_when_the_launcher_is_killed() -> None:
    program = (
        "import time\n"
        "from runtime.ranks.launcher import launch\n"
        "from runtime.protocol.jobs import RankLocation\n"
        "with launch([RankLocation()] * 2) as ranks:\n"
        "    print(ranks._fork_server.pid, flush=True)\n"
        "    time.sleep(100)\n"
    )
    launcher = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    fork_server = int(launcher.stdout.readline())
    children = Path(f"/proc/{fork_server}/task/{fork_server}/children").read_text().split()
    assert len(children) == 2
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    assert_gone([fork_server, *map(int, children)])
