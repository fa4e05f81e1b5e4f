"""Overhead of the executor: schedules with tiny blocks against hand-written loops of the same calls, in one run.

``python -m experiments.benchmarks.executor_cost`` starts gloo processes on this machine and writes
``experiments/benchmarks/results/executor_cost.md``. Blocks have a few bytes, so posting and waiting take nearly all of
the time. There are two loops: of the messages alone, and with the same kernel calls, which take no time, and the
additions of their results, as a loop by hand would make them. Runs of all three alternate. Times are medians over runs
of the slowest rank, processor times of the sum over ranks with the barriers around a run.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
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
from tasp_lab.schedule.buffer_layout import OUTSIDE
from tasp_lab.schedule.rank_part import CallRow
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
COMBINED: tuple[Callable[[Iterable[float]], float], ...] = (max, sum)
"""How the times of ranks are combined: that of the slowest, and the processor time of all."""

RUNS = 400
KINDS = 3
"""The executor, a loop of the messages, and one with the calls."""

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Measure all cases and write the table."""
    torch.set_num_threads(1)
    columns = (
        "schedule, transport, ranks", "steps", "executor us/step", "messages by hand", "with calls by hand",
        "executor / messages", "executor / with calls", "the same, processor time",
    )  # fmt: skip
    rows = [_row(*case) for case in CASES]
    load = os.getloadavg()[1]
    made = machine_record()
    head = (
        f"Schedules with shards of {SHARD_BYTES} bytes, or {LAYER.sequence} positions and kernel calls of no time, "
        f"against hand-written loops of the same torch.distributed calls, without and with the same kernel calls, "
        f"medians of {RUNS} runs of each, made by `python -m experiments.benchmarks.executor_cost` on "
        f"{made['cores']} cores "
        f"({made['date']}, torch {torch.__version__.split('+')[0]}); {load:.0f} processes were running or waiting."
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
    wall_s, cpu_s = (
        [statistics.median(combine(of_rank[kind][run][which] for of_rank in times) for run in range(RUNS)) / steps
         for kind in range(KINDS)]
        for which, combine in enumerate(COMBINED)
    )  # fmt: skip
    texts = [f"{seconds * 1e6:.0f}" for seconds in wall_s]
    ratios = wall_s[0] / wall_s[1], wall_s[0] / wall_s[2], cpu_s[0] / cpu_s[2]
    return f"{name}, {transport}, {world_size}", str(steps), *texts, *(f"{ratio:.2f}" for ratio in ratios)


def _schedule(name: str, world_size: int) -> Schedule:
    return build_schedules(name, full_mesh(world_size), LAYER if name in CIRCULATIONS else SHARD_BYTES)[0]


def _rank(
    rank: int, world_size: int, store: str, name: str, transport: str,
    answers: multiprocessing.SimpleQueue[list[list[tuple[float, float]]]],
) -> None:  # fmt: skip
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store, timedelta(seconds=60), world_size, rank)
    schedule = _schedule(name, world_size)
    work = PatternWork(schedule, rank, checked=False)
    executor = Executor(schedule, rank, make_transport(transport, 60.0), work, as_bytes=True)
    steps = len(schedule.steps)
    alone, with_calls = (LOOPS[transport](executor, calls) for calls in ([()] * steps, _calls(executor, work)))

    def execute() -> None:
        executor.prepare()
        executor.run()

    runs = (execute, alone, with_calls)
    times: list[list[tuple[float, float]]] = [[] for _ in runs]
    for _ in range(RUNS):
        for found, run in zip(times, runs, strict=True):
            dist.barrier()
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            run()
            ended_s = time.perf_counter()
            dist.barrier()
            found.append((ended_s - began_s, time.process_time() - began_cpu_s))
    answers.put(times)
    dist.destroy_process_group()


Call = Callable[[], None]
"""A kernel call of no time, and the additions of its results."""


def _calls(executor: Executor, work: PatternWork) -> list[list[Call]]:
    """The calls of each step."""
    found: list[list[Call]] = [[] for _ in executor.schedule.steps]
    for row in executor.part.calls:
        found[row.step].append(_call(executor, work, row))
    return found


def _call(executor: Executor, work: PatternWork, row: CallRow) -> Call:
    sizes = executor.schedule.block_bytes.tolist()
    operands = [executor.copies.operand(each) for each in row.operands]
    sums = [
        work.bound([place.block])[0] if place.offset == OUTSIDE
        else executor.memory[place.offset : place.offset + sizes[place.block]]
        for place in row.adds
    ]  # fmt: skip

    def call() -> None:
        for total, (part,) in zip(sums, work.compute(row, operands), strict=True):
            total.add_(part)

    return call


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
    return found


def _point_to_point(executor: Executor, calls: Sequence[Sequence[Call]]) -> Call:
    """Per step: post all receives, then all sends, make all calls, wait for all."""
    plan = list(zip(_by_step(executor, len(calls)), calls, strict=True))

    def loop() -> None:
        for (receives, sends), of_step in plan:
            works = [dist.irecv(each.data, each.peer, tag=each.lane) for each in receives]
            works += [dist.isend(each.data, each.peer, tag=each.lane) for each in sends]
            for call in of_step:
                call()
            for work in works:
                assert work is not None
                work.wait()

    return loop


def _batches(executor: Executor, calls: Sequence[Sequence[Call]]) -> Call:
    """Per step: one batch_isend_irecv, all calls, wait for it."""
    plan = [
        [dist.P2POp(dist.irecv, each.data, each.peer, tag=each.lane) for each in receives]
        + [dist.P2POp(dist.isend, each.data, each.peer, tag=each.lane) for each in sends]
        for receives, sends in _by_step(executor, len(calls))
    ]

    def loop() -> None:
        for operations, of_step in zip(plan, calls, strict=True):
            works = dist.batch_isend_irecv(operations) if operations else []
            for call in of_step:
                call()
            for work in works:
                work.wait()

    return loop


def _all_to_all(executor: Executor, calls: Sequence[Sequence[Call]]) -> Call:
    """Per step: pack, one all_to_all_single, all calls, wait for it, unpack."""
    world_size = dist.get_world_size()
    plan = []
    for receives, sends in _by_step(executor, len(calls)):
        incoming, outgoing = (sorted(each, key=lambda sent: (sent.peer, sent.lane)) for each in (receives, sends))
        splits = [[0] * world_size, [0] * world_size]
        for split, messages in zip(splits, (incoming, outgoing), strict=True):
            for message in messages:
                split[message.peer] += message.data.numel()
        plan.append(([each.data for each in incoming], [each.data for each in outgoing], splits))

    def loop() -> None:
        for (incoming, outgoing, (received, sent)), of_step in zip(plan, calls, strict=True):
            packed, arrived = torch.cat(outgoing), torch.empty(sum(received), dtype=torch.uint8)
            work = dist.all_to_all_single(arrived, packed, received, sent, async_op=True)
            assert work is not None
            for call in of_step:
                call()
            work.wait()
            start = 0
            for place in incoming:
                place.copy_(arrived[start : start + place.numel()])
                start += place.numel()

    return loop


LOOPS = {"p2p": _point_to_point, "batched": _batches, "all-to-all": _all_to_all}


if __name__ == "__main__":
    main()
