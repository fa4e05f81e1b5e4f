"""Groups of processes that a check starts and that may fail, hang or leave processes behind.

`run_group` starts ``python -m MODULE ARGUMENTS RANKS``, which is torchrun, and that starts the module without RANKS for
each rank. The `main` of such a module is `be_member`. Torchrun ends with the process that has started it, and ranks
with torchrun.
"""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from runtime.linux import die_with_parent
from runtime.protocol.jobs import our_module
from tasp_lab.core.errors import TaspLabError
from tasp_lab.core.process import leave
from tasp_lab.core.progress import print_line

START_LIMIT_S = 120.0
"""For the processes to start and to join."""

_OF_THIS_JOB = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_", "SLURM_")
"""What torchrun or Slurm has set for this rank, which the new group must not inherit."""


class Ended(NamedTuple):
    """How a group ended: its output, its exit code, and when, in seconds as of `time.time`; None if it did not.

    `orphans` are processes that were left behind and have been killed.
    """

    output: str
    exit_code: int | None
    ended: float | None
    orphans: tuple[int, ...]

    @property
    def last_line(self) -> str:
        return (self.output.strip().splitlines() or ["no output"])[-1]


def run_group(
    module: str, arguments: tuple[str, ...], ranks: int, limit_s: float, variables: Mapping[str, str] | None = None
) -> Ended:
    """Run `ranks` processes of a module; they are ended after `limit_s`, on top of the time to start."""
    inherited = {
        name: value for name, value in os.environ.items() if name not in _OF_THIS_JOB and not name.startswith(_PREFIXES)
    }
    process = subprocess.Popen(
        our_module(module, *arguments, str(ranks)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL, text=True, start_new_session=True, env=inherited | dict(variables or {}),
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
    started = [int(number) for number in re.findall(r"^process (\d+)$", output, re.MULTILINE)]
    return Ended(output, process.returncode, ended, _kill_ranks(module, started))


def _kill_ranks(module: str, processes: list[int]) -> tuple[int, ...]:
    """Kill what is left of the processes; returns which were."""
    left = []
    for number in processes:
        try:
            with open(f"/proc/{number}/cmdline", "rb") as stream:
                is_rank = module.encode() in stream.read()  # its number may have been given to another process since
        except OSError:
            continue
        if is_rank:
            os.kill(number, signal.SIGKILL)
            left.append(number)
    return tuple(left)


def be_member(module: str, count: int, run: Callable[..., None]) -> None:
    """Be torchrun, or be one rank, which prints its number and calls `run` with the `count` arguments of the group."""
    arguments, ranks = sys.argv[1 : 1 + count], sys.argv[1 + count :]
    if ranks:
        die_with_parent(signal.SIGTERM)  # torchrun then ends its ranks
        torchrun = importlib.import_module("torch.distributed.run")
        torchrun.main(["--standalone", "--nproc-per-node", *ranks, "--no-python", *our_module(module, *arguments)])
        return
    die_with_parent()
    print_line(f"process {os.getpid()}", sys.stdout)
    try:
        run(*arguments)
    except TaspLabError as error:
        print_line(f"gpu-check: {error}", sys.stderr)
        leave(2)
