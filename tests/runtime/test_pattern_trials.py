"""Every system that can be written in the language runs, on test patterns, and ends with the right bytes."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from types import SimpleNamespace

import pytest

from runtime.executor.copies import Copies
from sim.host import busy_s
from tasp_lab.core.errors import RunError
from tasp_lab.machines.machine import ComputeRate
from tasp_lab.schedule.buffer_layout import memory_bytes
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.build import attention_schedules
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tests.support.one_device import run_in_process
from tests.support.schedules import parts
from tests.support.tile_times import TileTimes
from tests.support.worlds import WORLDS

TRANSPORTS = [(0, False), (4, False), (0, True)]
"""Receives posted in their turn or steps ahead, and whole steps."""

NOT_CONTIGUOUS = [name for name in WORLDS if "ulysses" in name]
"""Their calls read blocks of the rank's own and blocks that arrived as one operand."""

RUNNING = [name for name in WORLDS if name not in NOT_CONTIGUOUS]


@cache
def schedule_of(name: str) -> Schedule:
    return WORLDS[name]().schedule()


@pytest.mark.parametrize("name", RUNNING)
def test_every_system_runs(name: str) -> None:
    for transport in TRANSPORTS:
        run_in_process(schedule_of(name), *transport, compute=ComputeRate(1e15))


def test_calls_wait_as_long_as_their_shapes_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zigzag shards of 12 positions under a causal mask: calls of several shapes, each with a time of its own."""
    waited: list[float] = []
    monkeypatch.setattr("runtime.trials.patterns.time", SimpleNamespace(sleep=waited.append))
    layer = Workload(48, heads=2, head_dim=4, dtype="fp32", mask="causal")
    (schedule,) = attention_schedules("zigzag-ring-attention", full_mesh(4), layer)
    compute = TileTimes(4, 4, Fraction(1, 1000), Fraction(1, 100))
    run_in_process(schedule, compute=compute)
    assert len(set(waited)) > 1
    assert sum(waited) == pytest.approx(float(sum(busy_s(schedule, compute))))


@pytest.mark.parametrize("name", RUNNING)
def test_the_memory_of_all_ranks_is_that_of_each(name: str) -> None:
    found = [part.memory_bytes for part in parts(schedule_of(name))]
    assert memory_bytes(schedule_of(name)).tolist() == found


@pytest.mark.parametrize("name", [name for name in RUNNING if any(part.joins for part in parts(schedule_of(name)))])
def test_joins_that_are_left_out_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Copies, "join", lambda self, joins: lambda: None)
    with pytest.raises(RunError, match=r"is not the sum of its parts|is not what its owner sent|is not complete"):
        run_in_process(schedule_of(name), 0, True, compute=ComputeRate(1e15))
