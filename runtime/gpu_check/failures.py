"""Groups of processes that lose a rank on purpose: does the end name it, how long does it take, is anything left?"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass

from runtime.gpu_check.failing_rank import RAISED
from runtime.protocol.jobs import our_module
from tasp_lab.core.choices import BackendKind

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_", "SLURM_")

START_LIMIT_S = 120.0
"""For the processes to start and to lose a rank."""


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
        if "failing " not in self.output:
            return f"{self.how}: the processes did not get to the run: {_last_line(self.output)}"
        if self.ended_s is None or self.ended_s > limit_s:
            took = f"{self.ended_s:.1f} s" if self.ended_s is not None else "longer than can be waited for"
            return f"{self.how}: the end took {took}, expected at most {limit_s:g} s"
        if not self.exit_code:
            return f"{self.how}: exit code {self.exit_code}, expected an error"
        if not self.named:
            return f"{self.how}: the output does not name the rank: {_last_line(self.output)}"
        if self.orphans:
            return f"{self.how}: {len(self.orphans)} processes were left behind"
        return None


def lose_rank(how: str, backend: BackendKind, ranks: int, limit_s: float) -> Loss:
    """Start `ranks` processes by torchrun of which the last one fails: ``raise`` an error, or ``kill`` itself."""
    process = subprocess.Popen(
        our_module("runtime.gpu_check.failing_rank", how, backend, str(ranks)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        env=_clean_environment(),
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=START_LIMIT_S + limit_s)
        ended: float | None = time.time()
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        output, _ = _collect(process)
        ended = None
    orphans = _end(_processes(output))
    return Loss(how, process.returncode, _since_failure(output, ended), _is_named(how, ranks, output), orphans, output)


def _clean_environment() -> dict[str, str]:
    """The environment without what torchrun or Slurm said to this rank."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in TORCHRUN_VARIABLES and not name.startswith(_PREFIXES)
    }


def _collect(process: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        return process.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()


def _processes(output: str) -> list[int]:
    return [int(each) for each in re.findall(r"^process (\d+)$", output, re.MULTILINE)]


def _end(processes: list[int]) -> tuple[int, ...]:
    """Kill what is left of the processes; returns which were."""
    left = tuple(each for each in processes if _is_ours(each))
    for each in left:
        os.kill(each, signal.SIGKILL)
    return left


def _is_ours(process: int) -> bool:
    """Whether a process is a rank of the group: its number may have been given to another one since."""
    try:
        with open(f"/proc/{process}/cmdline", "rb") as stream:
            return b"runtime.gpu_check.failing_rank" in stream.read()
    except OSError:
        return False


def _since_failure(output: str, ended: float | None) -> float | None:
    found = re.search(r"^failing ([\d.]+)$", output, re.MULTILINE)
    return ended - float(found[1]) if found and ended is not None else None


def _is_named(how: str, ranks: int, output: str) -> bool:
    """An error is told by its rank. A killed rank is told by those that miss it or, where they cannot, by torchrun."""
    last = ranks - 1
    if how == "raise":
        return f"rank {last}: {RAISED}" in output
    by_peers = re.search(rf"lost rank {last}\b", output)
    by_torchrun = re.search(rf"rank\s*:\s*{last} \(local_rank: {last}\).*?SIGKILL", output, re.DOTALL)
    return bool(by_peers or by_torchrun)


def _last_line(output: str) -> str:
    return (output.strip().splitlines() or ["no output"])[-1]
