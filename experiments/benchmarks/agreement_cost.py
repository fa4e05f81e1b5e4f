"""What it costs that ranks agree before each pass of a layer, in one run.

``python -m experiments.benchmarks.agreement_cost`` starts gloo processes on this machine and writes
``experiments/benchmarks/results/agreement_cost.md``. Passes of a small layer run with and without the agreement on the
backward pass, alternately; the agreement alone is timed too, and so is the all-gather of gloo that it could be instead.
Wall-clock times are those of rank 0, so they contain the waits for others; processor time is that of all ranks and
threads, which depends less on what else runs.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist

from experiments.common import machine_record, markdown_table
from runtime.sequence_parallel.agreement import Call
from runtime.sequence_parallel.api import attention
from tasp_lab.core.files import write_whole

RANKS = 2, 4, 8
POSITIONS = 64
"""Positions per rank: so few that the host takes most of the time."""

SAMPLES, PASSES = 30, 10
"""Samples of each case, alternately, and calls in a row in each."""

RESULTS = Path(__file__).parent / "results"


class Sample(NamedTuple):
    """Seconds of a call, on the clock and on processors."""

    wall_s: float
    processor_s: float


def main() -> None:
    """Measure all numbers of ranks and write the table."""
    torch.set_num_threads(1)
    columns = (
        "ranks",
        "agreement alone, us",
        "all-gather of gloo, us",
        "both passes without it on the way back, ms",
        "with it, wall-clock time",
        "with it, processor time",
    )
    rows = [_row(ranks) for ranks in RANKS]
    made = machine_record()
    head = (
        f"Ring attention of {POSITIONS} positions per rank, forward and backward over gloo: medians of {SAMPLES} "
        f"samples of {PASSES} calls, wall-clock time of rank 0, and medians and quartiles of the ratios of "
        f"neighbouring samples, made by `python -m experiments.benchmarks.agreement_cost` on {made['cores']} cores "
        f"({made['date']}, torch {torch.__version__.split('+')[0]}), which others used, too."
    )
    table = f"{head}\n\n{markdown_table(columns, rows)}\n"
    write_whole(RESULTS / "agreement_cost.md", table.encode())
    print(table)


def _row(world_size: int) -> tuple[str, ...]:
    fork = multiprocessing.get_context("fork")
    answers = fork.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            fork.Process(target=_rank, args=(rank, world_size, f"file://{folder}/store", answers))
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        of_ranks = dict(answers.get() for _ in ranks)
        for process in ranks:
            process.join()
    alone, gathered, without, both = ([each.wall_s * 1e6 for each in of_case] for of_case in of_ranks[0])
    processor_s = [
        [
            sum(each.processor_s for each in sample)
            for sample in zip(*(each[case] for each in of_ranks.values()), strict=True)
        ]
        for case in (2, 3)
    ]
    row = (
        str(world_size),
        f"{statistics.median(alone):.0f}",
        f"{statistics.median(gathered):.0f}",
        f"{statistics.median(without) / 1e3:.2f}",
        _ratio(both, without),
        _ratio(*processor_s[::-1]),
    )
    print(row, flush=True)
    return row


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles([a / b for a, b in zip(ours, theirs, strict=True)], n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def _rank(rank: int, world_size: int, store: str, answers: Any) -> None:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    x = torch.randn(1, POSITIONS, 2, 16, requires_grad=True)
    call = Call(None, 60.0)
    call.agree({"positions": POSITIONS})
    token = torch.zeros(16, dtype=torch.uint8)
    tokens = [torch.empty_like(token) for _ in range(world_size)]

    def passes() -> None:
        attention(x, x, x, schedule="ring-attention", timeout_s=60.0).sum().backward()  # type: ignore[no-untyped-call]

    off = patch.object(Call, "agree_on_backward", lambda *_: None)
    cases: Sequence[tuple[Callable[[], object], Any]] = (
        (call.agree_on_backward, nullcontext()),
        (lambda: dist.all_gather(tokens, token), nullcontext()),
        (passes, off),
        (passes, nullcontext()),
    )
    times: list[list[Sample]] = [[] for _ in cases]
    for sample in range(SAMPLES + 1):
        for (run, context), found in zip(cases, times, strict=True):
            with context:
                dist.barrier()
                began, worked = time.perf_counter(), time.process_time()
                for _ in range(PASSES):
                    run()
                took = time.perf_counter() - began, time.process_time() - worked
                if sample:  # the first one warms up
                    found.append(Sample(took[0] / PASSES, took[1] / PASSES))
    answers.put((rank, times))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
