"""A group of ranks that loses its last one on purpose.

``python -m runtime.gpu_check.failing_rank HOW BACKEND [RANKS]`` is a program of its own.

With a number of ranks it is torchrun, which starts this module for each rank. While a schedule runs, the last rank
raises an error (``raise``) or kills itself (``kill``); the others do what any program of this package does then. All
ranks print a line with the number of their process first. Torchrun ends with the process that has started it, and ranks
with torchrun.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time

import torch

from runtime.executor.transports import default_device, make_transport
from runtime.linux.namespaces import die_with_parent
from runtime.protocol.rank_setup import our_module
from runtime.ranks.torchrun import TorchrunRanks, join
from runtime.trials.patterns import PatternTrial
from tasp_lab.core.choices import BackendKind
from tasp_lab.core.errors import RunError, TaspLabError
from tasp_lab.core.leaving import leave
from tasp_lab.core.progress import print_line
from tasp_lab.schedules.build import collective
from tasp_lab.topology.builders import full_mesh

MODULE = "runtime.gpu_check.failing_rank"
RAISED = "raised on purpose by gpu-check"
SHARD_BYTES = 2**20
ROUNDS_BEFORE = 3


def main() -> None:
    """The program of torchrun, or of one rank."""
    how, backend, *ranks = sys.argv[1:]
    chosen: BackendKind = "gloo" if backend == "gloo" else "nccl"
    if ranks:
        start_ranks(how, chosen, ranks[0])
    else:
        be_rank(how, chosen)


def start_ranks(how: str, backend: BackendKind, ranks: str) -> None:
    """Start the ranks by torchrun in this process."""
    die_with_parent(signal.SIGTERM)  # torchrun then ends its ranks
    run = importlib.import_module("torch.distributed.run")
    run.main(["--standalone", "--nproc-per-node", ranks, "--no-python", *our_module(MODULE, how, backend)])


def be_rank(how: str, backend: BackendKind) -> None:
    """Run until the last rank fails."""
    die_with_parent()
    print_line(f"process {os.getpid()}", sys.stdout)
    try:
        with join(backend) as ranks:
            _run(ranks, how)
    except TaspLabError as error:
        print_line(f"gpu-check: {error}", sys.stderr)
        leave(2)


def _run(ranks: TorchrunRanks, how: str) -> None:
    rank, n = ranks.rank, ranks.world_size
    transport = make_transport("auto", 60)
    trial = PatternTrial(collective("ring", full_mesh(n), SHARD_BYTES), rank, transport, device=default_device())
    for number in range(ROUNDS_BEFORE + 1):
        trial.set_up(checked=True)
        trial.executor.prepare()
        if number == ROUNDS_BEFORE and rank == n - 1:
            _fail(how, rank)
        trial.executor.run()
        if trial.executor.memory.is_cuda:
            torch.cuda.synchronize()
        trial.check()


def _fail(how: str, rank: int) -> None:
    print_line(f"failing {time.time()}", sys.stdout)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise RunError(f"rank {rank}: {RAISED}")


if __name__ == "__main__":
    main()
