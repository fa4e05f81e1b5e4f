"""A group of processes that loses a rank on purpose: does the end name it, how long does it take, is anything left?

While a schedule runs, the last rank raises an error (``raise``) or kills itself (``kill``); the others do what any
program of this package does then.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from dataclasses import dataclass
from typing import NoReturn

from runtime.executor.executor import Executor
from runtime.protocol.jobs import RunSchedule
from runtime.ranks.torchrun import join
from tasp_lab.core.choices import BackendKind
from tasp_lab.core.errors import RunError
from tasp_lab.core.progress import print_line
from tasp_lab.schedules.build import collective
from tasp_lab.topology.builders import full_mesh
from tests.gpu.groups import Ended, be_member, run_group

MODULE = "tests.gpu.lost_ranks"
RAISED = "raised on purpose by gpu-check"
SHARD_BYTES = 2**20
ROUNDS_BEFORE = 3


@dataclass(frozen=True)
class Loss:
    """A group that lost its last rank, and how it ended.

    `ended_s` is the time from there to the end of the last process, None if the group did not end; `named` whether the
    output names the rank.
    """

    how: str
    end: Ended
    ended_s: float | None
    named: bool

    def problem(self, limit_s: float) -> str | None:
        """What is wrong in one line; None if all is as it should be."""
        if "failing " not in self.end.output:
            return f"{self.how}: the processes did not get to the run: {self.end.last_line}"
        if self.ended_s is None or self.ended_s > limit_s:
            took = f"{self.ended_s:.1f} s" if self.ended_s is not None else "longer than can be waited for"
            return f"{self.how}: the end took {took}, expected at most {limit_s:g} s"
        if not self.end.exit_code:
            return f"{self.how}: exit code {self.end.exit_code}, expected an error"
        if not self.named:
            return f"{self.how}: the output does not name the rank: {self.end.last_line}"
        if self.end.orphans:
            return f"{self.how}: {len(self.end.orphans)} processes were left behind"
        return None


def lose_rank(how: str, backend: BackendKind, ranks: int, limit_s: float) -> Loss:
    """Start `ranks` processes by torchrun of which the last one fails: ``raise`` an error, or ``kill`` itself."""
    end = run_group(MODULE, (how, backend), ranks, limit_s)
    failed = re.search(r"^failing ([\d.]+)$", end.output, re.MULTILINE)
    ended_s = end.ended - float(failed[1]) if failed and end.ended is not None else None
    return Loss(how, end, ended_s, _is_named(how, ranks - 1, end.output))


def _is_named(how: str, rank: int, output: str) -> bool:
    """A rank prints its own error. A killed rank is named by its peers or, where those cannot, by torchrun."""
    if how == "raise":
        return f"rank {rank}: {RAISED}" in output
    by_peers = re.search(rf"lost rank {rank}\b", output)
    by_torchrun = re.search(rf"rank\s*:\s*{rank} \(local_rank: {rank}\).*?SIGKILL", output, re.DOTALL)
    return bool(by_peers or by_torchrun)


def _run_rank(how: str, backend: str) -> None:
    """Run a schedule as `validate` does, again and again; in the last run the last rank fails behind the barrier."""

    def fail(executor: Executor) -> NoReturn:
        print_line(f"failing {time.time()}", sys.stdout)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RunError(f"rank {executor.part.rank}: {RAISED}")

    with join("gloo" if backend == "gloo" else "nccl") as ranks:
        job = RunSchedule(collective("ring", full_mesh(ranks.world_size), SHARD_BYTES), "auto", ROUNDS_BEFORE, 1)
        ranks.perform(job, 60)
        if ranks.rank == ranks.world_size - 1:
            Executor.run_timed = fail  # type: ignore[method-assign, assignment]
        ranks.perform(job, 60)


if __name__ == "__main__":
    be_member(MODULE, 2, _run_rank)
