"""Overhead of the executor: schedules against hand-written loops of the same messages, in one run.

``python -m experiments.benchmarks.executor_cost`` starts gloo processes on this machine and writes
``experiments/benchmarks/results/executor_cost.md``. Blocks have a few bytes, or are longer than what one thread always
sends (`runtime.executor.transports.PointToPoint.short_bytes`). There are two loops: of the messages alone, and with the
same kernel calls, which take no time, and the additions of their results, as a loop by hand would make them. They call
the process group itself, not `torch.distributed.isend`, which takes longer, and have their tensors beforehand. Of long
blocks a third program has a thread per lane, written by hand, which a loop by steps does not need; the executor has
threads beside the calls of the last two cases, as it takes them for long. Samples of all alternate.

A second table has the executor's own time: the same, on torch's fake process group, whose calls end at once. It is wall
time of one process, which hardly depends on what else runs, and all of it is Python of the executor or of the loop.

What is compared is the processor time of the threads that run Python, user and system, of all ranks. The threads of
gloo itself are left out: they poll while a thread that posts holds a lock, most of their time on a busy machine, and
how often that happens is chance. But they also carry what the loops leave to them, as those post receives when they
come to them: then a message waits for its receiver, while the executor, which posts receives ahead, sends it itself. So
two columns compare the processor time of all threads, and the time by the clock.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from experiments.common import machine_record, markdown_table
from runtime.executor.executor import Executor
from runtime.executor.per_lane import run_beside
from runtime.executor.transports import make_transport
from runtime.trials.patterns import PatternWork
from tasp_lab.core.arrays import FloatArray
from tasp_lab.core.files import write_whole
from tasp_lab.schedule.buffer_layout import OUTSIDE
from tasp_lab.schedule.rank_part import CallRow
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.forward import CIRCULATIONS
from tasp_lab.schedules.build import build_schedules
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload

CASES = (
    ("ring", "p2p", 4, False),
    ("ring", "batched", 4, False),
    ("multi-ring", "p2p", 5, False),
    ("multi-ring", "batched", 5, False),
    ("multi-ring", "all-to-all", 5, False),
    ("ring-attention", "p2p", 4, False),
    ("ring-attention", "batched", 4, False),
    ("tasp", "p2p", 5, False),
    ("tasp", "batched", 5, False),
    ("ring", "p2p", 4, True),
    ("multi-ring", "p2p", 5, True),
    ("ring-attention", "p2p", 4, True),
    ("tasp", "p2p", 5, True),
)
"""Schedule, transport, ranks, and whether blocks are long."""

LAYERS = tuple(Workload(sequence=5 * 4 * 3, head_dim=dim, dtype="bf16", heads=1, mask="full") for dim in (1, 1024))
SHARD_BYTES = 64, 2**16
"""Of short blocks, of long ones."""

SAMPLES, PASSES = 20, 20
"""Samples of each of the three, and passes in a row in a sample, between two barriers."""

TURNS = 12
"""So many times `SAMPLES` are passes on the fake process group."""

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Measure all cases and write the table."""
    torch.set_num_threads(1)
    columns = (
        "schedule, transport, ranks", "longest message", "messages of a rank", "us/message by hand",
        "executor / messages by hand", "executor / messages and calls by hand", "the same, all threads",
        "the same, by the clock", "executor / threads by hand",
    )  # fmt: skip
    rows = [_row(*case) for case in CASES]
    made = machine_record()
    head = (
        f"Processor time, user and system, of the threads of all ranks that run Python: schedules with shards of "
        f"{SHARD_BYTES[0]} and {SHARD_BYTES[1]} bytes, or {LAYERS[0].sequence} positions and kernel calls of no time, "
        f"against hand-written loops of the same messages, without and with the same kernel calls, and, of long "
        f"blocks, a hand-written thread per lane; medians and quartiles of the ratios of neighbouring samples, "
        f"{SAMPLES} of each, of {PASSES} passes, made by "
        f"`python -m experiments.benchmarks.executor_cost` on {made['cores']} cores "
        f"({made['date']}, torch {torch.__version__.split('+')[0]}) at a load average of {os.getloadavg()[2]:.0f}. "
        "Where other programs use the caches, ratios are higher than the second table lets expect."
    )
    tables = [head, markdown_table(columns, rows), own_text()]
    table = "\n\n".join(tables) + "\n"
    write_whole(RESULTS / "executor_cost.md", table.encode())
    print(table)


def _row(name: str, transport: str, world_size: int, long: bool) -> tuple[str, ...]:
    fork = multiprocessing.get_context("fork")
    answers = fork.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        task = (world_size, f"file://{folder}/store", name, transport, long, answers)
        ranks = [fork.Process(target=_rank, args=(rank, *task)) for rank in range(world_size)]
        for process in ranks:
            process.start()
        found = [answers.get() for _ in ranks]
        for process in ranks:
            process.join()
    messages = sum(count for _, count in found)
    executor, *by_hand = np.sum([times for times, _ in found], axis=0)  # [samples, own, all threads, clock] of each
    by_hand_s = statistics.median(by_hand[0][:, 0]) / PASSES / messages
    own = [_spread(executor[:, 0] / program[:, 0]) for program in by_hand]
    ratios = [*own[:2], *(_spread(executor[:, at] / by_hand[1][:, at]) for at in (1, 2)), *own[2:]]
    longest = max(_schedule(name, world_size, long).block_bytes)
    row = (
        f"{name}, {transport}, {world_size}",
        f"{longest} B",
        f"{messages / world_size:.1f}",
        f"{by_hand_s * 1e6:.0f}",
        *ratios,
        *["-"] * (not long),
    )
    print(row, flush=True)
    return row


def _spread(values: FloatArray) -> str:
    low, middle, high = statistics.quantiles(values.tolist(), n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def _schedule(name: str, world_size: int, long: bool) -> Schedule:
    work = LAYERS[long] if name in CIRCULATIONS else SHARD_BYTES[long]
    return build_schedules(name, full_mesh(world_size), work)[0]


def _rank(
    rank: int, world_size: int, store: str, name: str, transport: str, long: bool,
    answers: multiprocessing.SimpleQueue[tuple[list[list[FloatArray]], int]],
) -> None:  # fmt: skip
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store, timedelta(seconds=60), world_size, rank)
    schedule = _schedule(name, world_size, long)
    work = PatternWork(schedule, rank, checked=False)
    executor = Executor(schedule, rank, make_transport(transport, 60.0), work, as_bytes=True)
    steps = len(schedule.steps)
    calls = _calls(executor, work)
    by_hand = [LOOPS[transport](executor, of_steps) for of_steps in ([()] * steps, calls)]
    if long:
        by_hand.append(_lanes(executor, calls))

    runs: tuple[Call, ...] = (partial(_execute, executor), *by_hand)
    times: list[list[FloatArray]] = [[] for _ in runs]
    for _ in range(SAMPLES):
        for found, run in zip(times, runs, strict=True):
            dist.barrier()
            began_s = _clocks_s()
            for _ in range(PASSES):
                run()
            dist.barrier()
            found.append(_clocks_s() - began_s)
    answers.put((times, len(executor.part.messages_out)))
    dist.destroy_process_group()


def _clocks_s() -> FloatArray:
    """Processor time of the threads that run Python, that of all threads, and the time by the clock."""
    return np.array([own_s(), time.process_time(), time.perf_counter()])


def own_s() -> float:
    """Processor time so far of the threads of this process that run Python."""
    return (
        sum(
            float(Path(f"/proc/self/task/{each.native_id}/schedstat").read_text().split()[0])
            for each in threading.enumerate()
        )
        / 1e9
    )


Call = Callable[[], object]
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
        for total, part in zip(sums, work.compute(row, operands), strict=True):
            total.add_(part.fields[0])

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


def _messages(executor: Executor, calls: Sequence[Sequence[Call]]) -> Call:
    """Per step: post all receives, then all sends, make all calls, wait for all. On gloo a batch is no more than that.

    Works are kept until the next step: to free one right after it has ended contends with gloo's thread.
    """
    group = _group()
    plan = [
        (
            [(group.recv, [each.data], each.peer, each.lane) for each in receives]
            + [(group.send, [each.data], each.peer, each.lane) for each in sends],
            of_step,
        )
        for (receives, sends), of_step in zip(_by_step(executor, len(calls)), calls, strict=True)
    ]

    def loop() -> None:
        for messages, of_step in plan:
            works = [post(data, peer, tag) for post, data, peer, tag in messages]
            for call in of_step:
                call()
            for work in works:
                work.wait()

    return loop


def _group() -> dist.ProcessGroup:
    assert isinstance(dist.group.WORLD, dist.ProcessGroup), "ranks have joined"
    return dist.group.WORLD


def _lanes(executor: Executor, calls: Sequence[Sequence[Call]]) -> Call:
    """A thread per lane: post a receive one step ahead, send what has arrived, wait, and tell the thread of calls."""
    plan = _by_step(executor, len(calls))
    lanes = sorted({each.lane for of_step in plan for messages in of_step for each in messages})
    programs = [
        [tuple(next((each for each in kind if each.lane == lane), None) for kind in of_step) for of_step in plan]
        for lane in lanes
    ]
    arrived, group = queue.SimpleQueue[None](), _group()

    def run_lane(program: Sequence[Sequence[_Sent | None]]) -> None:
        receives = [each and group.recv([each.data], each.peer, each.lane) for each, _ in program[:1]]
        sends = []
        for step, (_, sent) in enumerate(program):
            if sent is not None:
                sends.append(group.send([sent.data], sent.peer, sent.lane))
            following = program[step + 1][0] if step + 1 < len(program) else None
            receives.append(following and group.recv([following.data], following.peer, following.lane))
            if (received := receives[step]) is not None:
                received.wait()
            arrived.put(None)
        for work in sends:
            work.wait()
        arrived.put(None)

    def run() -> None:
        for program in programs:
            run_beside(partial(run_lane, program))
        for of_step in (*calls, ()):
            for call in of_step:
                call()
            for _ in programs:
                arrived.get()

    return run


def _all_to_all(executor: Executor, calls: Sequence[Sequence[Call]]) -> Call:
    """Per step: pack, one all_to_all_single, all calls, wait for it, unpack."""
    world_size, group, options, plan = dist.get_world_size(), _group(), dist.AllToAllOptions(), []
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
            work = group.alltoall_base(arrived, packed, received, sent, options)
            for call in of_step:
                call()
            work.wait()
            start = 0
            for place in incoming:
                place.copy_(arrived[start : start + place.numel()])
                start += place.numel()

    return loop


LOOPS = {"p2p": _messages, "batched": _messages, "all-to-all": _all_to_all}


def own_text() -> str:
    """The table of the executor's own time, with its head."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    columns = "schedule, transport, ranks", "executor, us", "messages and calls by hand, us", "own us per message"
    rows = []
    for name, transport, world_size, long in CASES:
        if long:
            continue
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=world_size)
        schedule = _schedule(name, world_size, long)
        work = PatternWork(schedule, 1, checked=False)
        sender = make_transport(transport, 60.0, device=torch.device("cpu"))
        executor = Executor(schedule, 1, sender, work, as_bytes=True)
        runs: tuple[Call, ...] = (partial(_execute, executor), LOOPS[transport](executor, _calls(executor, work)))
        times_us: tuple[list[float], ...] = [], []
        for _ in range(TURNS * SAMPLES):
            for found, run in zip(times_us, runs, strict=True):
                began_s = time.perf_counter()
                run()
                found.append(1e6 * (time.perf_counter() - began_s))
        dist.destroy_process_group()
        ours_us, hand_us = (statistics.quantiles(times, n=10)[0] for times in times_us)
        own_us = (ours_us - hand_us) / len(executor.part.messages_out)
        rows.append((f"{name}, {transport}, {world_size}", f"{ours_us:.0f}", f"{hand_us:.0f}", f"{own_us:.1f}"))
    head = (
        f"Wall time of a pass of one rank on torch's fake process group, whose calls end at once; fastest tenths of "
        f"{TURNS * SAMPLES} passes. The table above has what a message takes on gloo."
    )
    return f"{head}\n\n{markdown_table(columns, rows)}"


def _execute(executor: Executor) -> None:
    executor.prepare()
    executor.run()


if __name__ == "__main__":
    main()
