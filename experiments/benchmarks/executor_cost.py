"""Overhead of the executor: schedules with tiny blocks against hand-written loops of the same calls, in one run.

``python -m experiments.benchmarks.executor_cost`` starts gloo processes on this machine and writes
``experiments/benchmarks/results/executor_cost.md``. Blocks have a few bytes, so posting and waiting take nearly all of
the time. Runs of both kinds alternate; times are medians over runs of the slowest rank.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from experiments.common import machine_record, markdown_table
from runtime.executor.executor import Executor
from runtime.executor.transports import make_transport
from runtime.trials.patterns import PatternWork
from tasp_lab.analysis.registry import build_schedules
from tasp_lab.attention.registry import CIRCULATIONS
from tasp_lab.files import write_whole
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload

CASES = (
    ("ring", "p2p", 4),
    ("ring", "batched", 4),
    ("multi-ring", "p2p", 5),
    ("multi-ring", "batched", 5),
    ("multi-ring", "all-to-all", 5),
    ("ring-attention", "p2p", 4),
    ("ring-attention", "batched", 4),
    ("tasp", "p2p", 5),
    ("tasp", "batched", 5),
)
LAYER = Workload(sequence=5 * 4 * 3, head_dim=1, dtype="bf16", heads=1)
SHARD_BYTES = 64
RUNS = 400
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Measure all cases and write the table."""
    torch.set_num_threads(1)
    columns = ("schedule, transport, ranks", "steps", "executor us/step", "loop us/step", "executor / loop")
    rows = [_row(*case) for case in CASES]
    made = machine_record()
    head = (
        f"Schedules with shards of {SHARD_BYTES} bytes, or {LAYER.sequence} positions and kernel calls of no time, "
        f"against hand-written loops of the same torch.distributed calls, "
        f"medians of {RUNS} runs of each, made by `python -m experiments.benchmarks.executor_cost` on "
        f"{made['cores']} cores "
        f"({made['date']}, torch {torch.__version__.split('+')[0]})."
    )
    table = f"{head}\n\n{markdown_table(columns, rows)}\n"
    write_whole(RESULTS / "executor_cost.md", table.encode())
    print(table)


def _row(name: str, transport: str, world_size: int) -> tuple[str, ...]:
    steps = len(_schedule(name, world_size).steps)
    fork = multiprocessing.get_context("fork")
    answers = fork.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        task = (world_size, f"file://{folder}/store", name, transport, answers)
        ranks = [fork.Process(target=_rank, args=(rank, *task)) for rank in range(world_size)]
        for process in ranks:
            process.start()
        times = [answers.get() for _ in ranks]
        for process in ranks:
            process.join()
    executor, loop = (
        statistics.median(max(of_rank[kind][run] for of_rank in times) for run in range(RUNS)) / steps
        for kind in (0, 1)
    )
    ratio = f"{executor / loop:.2f}"
    return f"{name}, {transport}, {world_size}", str(steps), f"{executor * 1e6:.0f}", f"{loop * 1e6:.0f}", ratio


def _schedule(name: str, world_size: int) -> Schedule:
    return build_schedules(name, full_mesh(world_size), LAYER if name in CIRCULATIONS else SHARD_BYTES)[0]


def _rank(
    rank: int, world_size: int, store: str, name: str, transport: str,
    answers: multiprocessing.SimpleQueue[tuple[list[float], list[float]]],
) -> None:  # fmt: skip
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store, timedelta(seconds=60), world_size, rank)
    schedule = _schedule(name, world_size)
    work = PatternWork(schedule, rank, checked=False)
    executor = Executor(schedule, rank, make_transport(transport, 60.0), work, as_bytes=True)
    loop = LOOPS[transport](executor, len(schedule.steps))

    def execute() -> None:
        executor.prepare()
        executor.run()

    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(RUNS):
        for kind, run in enumerate((execute, loop)):
            dist.barrier()
            began_s = time.perf_counter()
            run()
            times[kind].append(time.perf_counter() - began_s)
    answers.put(times)
    dist.destroy_process_group()


class _Sent(NamedTuple):
    """A message as the executor sends it."""

    peer: int
    lane: int
    data: torch.Tensor


def _by_step(executor: Executor, steps: int) -> list[tuple[list[_Sent], list[_Sent]]]:
    part, size = executor.part, executor.schedule.block_bytes.tolist()
    found: list[tuple[list[_Sent], list[_Sent]]] = [([], []) for _ in range(steps)]
    for kind, messages in enumerate((part.messages_in, part.messages_out)):
        for rows in messages:
            first, count = rows[0].offset, sum(size[row.block] for row in rows)
            message = _Sent(rows[0].peer, rows[0].lane, executor.memory[first : first + count])
            found[rows[0].step][kind].append(message)
    return [(receives, sends) for receives, sends in found if receives or sends]


def _point_to_point(executor: Executor, steps: int) -> Callable[[], None]:
    """Per step: post all receives, then all sends, wait for all."""
    plan = _by_step(executor, steps)

    def loop() -> None:
        for receives, sends in plan:
            works = [dist.irecv(each.data, each.peer, tag=each.lane) for each in receives]
            works += [dist.isend(each.data, each.peer, tag=each.lane) for each in sends]
            for work in works:
                assert work is not None
                work.wait()

    return loop


def _batches(executor: Executor, steps: int) -> Callable[[], None]:
    """Per step: one batch_isend_irecv, wait for it."""
    plan = [
        [dist.P2POp(dist.irecv, each.data, each.peer, tag=each.lane) for each in receives]
        + [dist.P2POp(dist.isend, each.data, each.peer, tag=each.lane) for each in sends]
        for receives, sends in _by_step(executor, steps)
    ]

    def loop() -> None:
        for operations in plan:
            for work in dist.batch_isend_irecv(operations):
                work.wait()

    return loop


def _all_to_all(executor: Executor, steps: int) -> Callable[[], None]:
    """Per step: pack, one all_to_all_single, wait for it, unpack."""
    world_size = dist.get_world_size()
    plan = []
    for receives, sends in _by_step(executor, steps):
        incoming, outgoing = (sorted(each, key=lambda sent: (sent.peer, sent.lane)) for each in (receives, sends))
        splits = [[0] * world_size, [0] * world_size]
        for split, messages in zip(splits, (incoming, outgoing), strict=True):
            for message in messages:
                split[message.peer] += message.data.numel()
        plan.append(([each.data for each in incoming], [each.data for each in outgoing], splits))

    def loop() -> None:
        for incoming, outgoing, (received, sent) in plan:
            packed, arrived = torch.cat(outgoing), torch.empty(sum(received), dtype=torch.uint8)
            work = dist.all_to_all_single(arrived, packed, received, sent, async_op=True)
            assert work is not None
            work.wait()
            start = 0
            for place in incoming:
                place.copy_(arrived[start : start + place.numel()])
                start += place.numel()

    return loop


LOOPS = {"p2p": _point_to_point, "batched": _batches, "all-to-all": _all_to_all}


if __name__ == "__main__":
    main()
