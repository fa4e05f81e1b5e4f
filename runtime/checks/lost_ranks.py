"""A group of processes that loses a rank on purpose: does the end name it, how long does it take, is anything left?

`lose_rank` starts ``python -m runtime.checks.lost_ranks HOW BACKEND RANKS``, which is torchrun and starts this module
without RANKS for each rank. While a schedule runs, the last rank raises an error (``raise``) or kills itself
(``kill``); the others do what any program of this package does then. All ranks print a line with the number of their
process first. Torchrun ends with the process that has started it, and ranks with torchrun.
"""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import torch

from runtime.executor.transports import default_device, make_transport
from runtime.linux import die_with_parent
from runtime.protocol.jobs import our_module
from runtime.ranks.torchrun import TorchrunRanks, join
from runtime.trials.patterns import PatternTrial
from tasp_lab.core.choices import BackendKind
from tasp_lab.core.errors import RunError, TaspLabError
from tasp_lab.core.process import leave
from tasp_lab.core.progress import print_line
from tasp_lab.schedules.build import collective
from tasp_lab.topology.builders import full_mesh

MODULE = "runtime.checks.lost_ranks"
RAISED = "raised on purpose by gpu-check"
SHARD_BYTES = 2**20
ROUNDS_BEFORE = 3

START_LIMIT_S = 120.0
"""For the processes to start and to lose a rank."""

_OF_THIS_JOB = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_", "SLURM_")
"""What torchrun or Slurm has set for this rank, which the new group must not inherit."""


@dataclass(frozen=True)
class Loss:
    """A group that lost its last rank.

    `ended_s` is the time from there to the end of the last process, None if the group did not end; `named` whether the
    output names the rank; `orphans` are processes that were left behind and have been killed.
    """

    how: str
    exit_code: int | None
    ended_s: float | None
    named: bool
    orphans: tuple[int, ...]
    output: str

    def problem(self, limit_s: float) -> str | None:
        """What is wrong in one line; None if all is as it should be."""
        last_line = (self.output.strip().splitlines() or ["no output"])[-1]
        if "failing " not in self.output:
            return f"{self.how}: the processes did not get to the run: {last_line}"
        if self.ended_s is None or self.ended_s > limit_s:
            took = f"{self.ended_s:.1f} s" if self.ended_s is not None else "longer than can be waited for"
            return f"{self.how}: the end took {took}, expected at most {limit_s:g} s"
        if not self.exit_code:
            return f"{self.how}: exit code {self.exit_code}, expected an error"
        if not self.named:
            return f"{self.how}: the output does not name the rank: {last_line}"
        if self.orphans:
            return f"{self.how}: {len(self.orphans)} processes were left behind"
        return None


def lose_rank(how: str, backend: BackendKind, ranks: int, limit_s: float) -> Loss:
    """Start `ranks` processes by torchrun of which the last one fails: ``raise`` an error, or ``kill`` itself."""
    process = subprocess.Popen(
        our_module(MODULE, how, backend, str(ranks)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL, text=True, start_new_session=True,
        env={name: value for name, value in os.environ.items()
             if name not in _OF_THIS_JOB and not name.startswith(_PREFIXES)},
    )  # fmt: skip
    ended: float | None = None
    try:
        output, _ = process.communicate(timeout=START_LIMIT_S + limit_s)
        ended = time.time()
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            output, _ = process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
    orphans = _kill_ranks([int(number) for number in re.findall(r"^process (\d+)$", output, re.MULTILINE)])
    failed = re.search(r"^failing ([\d.]+)$", output, re.MULTILINE)
    ended_s = ended - float(failed[1]) if failed and ended is not None else None
    return Loss(how, process.returncode, ended_s, _is_named(how, ranks - 1, output), orphans, output)


def _kill_ranks(processes: list[int]) -> tuple[int, ...]:
    """Kill what is left of the processes; returns which were."""
    left = []
    for number in processes:
        try:
            with open(f"/proc/{number}/cmdline", "rb") as stream:
                is_rank = MODULE.encode() in stream.read()  # its number may have been given to another process since
        except OSError:
            continue
        if is_rank:
            os.kill(number, signal.SIGKILL)
            left.append(number)
    return tuple(left)


def _is_named(how: str, rank: int, output: str) -> bool:
    """A rank prints its own error. A killed rank is named by its peers or, where those cannot, by torchrun."""
    if how == "raise":
        return f"rank {rank}: {RAISED}" in output
    by_peers = re.search(rf"lost rank {rank}\b", output)
    by_torchrun = re.search(rf"rank\s*:\s*{rank} \(local_rank: {rank}\).*?SIGKILL", output, re.DOTALL)
    return bool(by_peers or by_torchrun)


def main() -> None:
    """The program of torchrun, or of one rank."""
    how, backend, *ranks = sys.argv[1:]
    if ranks:
        die_with_parent(signal.SIGTERM)  # torchrun then ends its ranks
        run = importlib.import_module("torch.distributed.run")
        run.main(["--standalone", "--nproc-per-node", *ranks, "--no-python", *our_module(MODULE, how, backend)])
        return
    die_with_parent()
    print_line(f"process {os.getpid()}", sys.stdout)
    try:
        with join("gloo" if backend == "gloo" else "nccl") as joined:
            _run_until_lost(joined, how)
    except TaspLabError as error:
        print_line(f"gpu-check: {error}", sys.stderr)
        leave(2)


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
    main()
