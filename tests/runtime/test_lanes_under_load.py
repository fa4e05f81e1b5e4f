"""Threads of lanes that overtake each other anywhere, and one thread for all: every bit arrives, every run ends.

Ranks are threads of one process that give way to each other after a few instructions, and at random for longer:
before a message is posted, after it has arrived, before a kernel call.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Iterator
from itertools import product

import pytest
import torch

from runtime.executor import executor as executors
from runtime.executor.per_lane import PerLane
from runtime.executor.per_step import PerStep
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import build_schedules
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Work, Workload
from tests.gpu.delays import DelayedTrial
from tests.support.loopback import Board, Loopback
from tests.support.selection import covering

LIMIT_S = 60.0
RANKS = 4
ATTENTION = Workload(64, heads=4, kv_heads=4, head_dim=4, mask="causal")
LINEAR = Workload(64, heads=4, kv_heads=4, head_dim=4, mask="causal", kind="linear", decay="head")
WORK: dict[str, Work] = {
    "multi-ring": 120,
    "multi-ring-all-reduce": 120,
    "tasp": ATTENTION,
    "zigzag-ring-attention": ATTENTION,
    "double-ring:2x2": ATTENTION,
    "all-scan": LINEAR,
    "multi-ring-lasp-2": LINEAR,
}


@pytest.fixture(autouse=True)
def threads_give_way() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def schedules(name: str, work: Work) -> list[Schedule]:
    options = AttentionOptions("both") if isinstance(work, Workload) else AttentionOptions()
    return list(build_schedules(name, full_mesh(RANKS), work, options=options))


WAYS = [(0, "lanes"), (1, "lanes"), (4, "lanes"), (0, "together"), (2, "together"), (0, "steps"), (2, "steps")]


@pytest.mark.parametrize(("name", "way"), covering(product(WORK, WAYS)))
def test_lanes_that_overtake_each_other(monkeypatch: pytest.MonkeyPatch, name: str, way: tuple[int, str]) -> None:
    """A thread per lane, one for those that are alike, and one for all and calls."""
    ahead, how = way
    if how == "together":
        monkeypatch.setattr(executors, "SHORT_FLOPS", -1)  # calls are long
    for seed, schedule in enumerate(schedules(name, WORK[name])):
        run(schedule, ahead, how, seed)


def run(schedule: Schedule, ahead: int, how: str, seed: int) -> None:
    """Run all ranks, each in a thread, and check their results."""
    board, errors = Board(LIMIT_S), list[BaseException]()

    def be(rank: int) -> None:
        try:
            run_rank(schedule, rank, board, ahead, how, seed * RANKS + rank)
        except BaseException as error:
            errors.append(error)

    ranks = [threading.Thread(target=be, args=(rank,), daemon=True) for rank in range(schedule.world_size)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(LIMIT_S)
    assert not errors
    assert not any(each.is_alive() for each in ranks)


def run_rank(schedule: Schedule, rank: int, board: Board, ahead: int, how: str, seed: int) -> None:
    drawn, device = random.Random(seed), torch.device("cpu")

    def delay() -> None:
        if drawn.random() < 0.3:
            time.sleep(drawn.random() * 1e-3)

    loopback = Loopback(board, rank, ahead, whole_steps=False)
    loopback.short_bytes = 0 if how == "lanes" else 1 << 30
    trial = DelayedTrial(schedule, rank, loopback, device, delay)
    trial.set_up()
    trial.executor.prepare()
    assert isinstance(trial.executor.strategy, PerStep if how == "steps" else PerLane)
    trial.executor.run()
    trial.check()
