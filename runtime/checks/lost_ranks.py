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

import torch

from runtime.checks.groups import Ended, be_member, run_group
from runtime.executor.transports import default_device, make_transport
from runtime.ranks.torchrun import TorchrunRanks, join
from runtime.trials.patterns import PatternTrial
from tasp_lab.core.choices import BackendKind
from tasp_lab.core.errors import RunError
from tasp_lab.core.progress import print_line
from tasp_lab.schedules.build import collective
from tasp_lab.topology.builders import full_mesh

MODULE = "runtime.checks.lost_ranks"
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
    with join("gloo" if backend == "gloo" else "nccl") as joined:
        _run_until_lost(joined, how)


def _run_until_lost(ranks: TorchrunRanks, how: str) -> None:
    rank, n = ranks.rank, ranks.world_size
    transport = make_transport("auto", 60)
    trial = PatternTrial(collective("ring", full_mesh(n), SHARD_BYTES), rank, transport, device=default_device())
    for number in range(ROUNDS_BEFORE + 1):
        trial.set_up(checked=True)
        trial.executor.prepare()
        if number == ROUNDS_BEFORE and rank == n - 1:
            print_line(f"failing {time.time()}", sys.stdout)
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RunError(f"rank {rank}: {RAISED}")
        trial.executor.run()
        if trial.executor.memory.is_cuda:
            torch.cuda.synchronize()
        trial.check()


if __name__ == "__main__":
    be_member(MODULE, 2, _run_rank)
