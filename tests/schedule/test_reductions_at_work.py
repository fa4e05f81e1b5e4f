"""Blocks that are sums, when they run: when transfers start, where parts lie, and what real ranks end up with."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.trials.patterns import PatternTrial
from sim.bounds.least import least_s
from sim.event.engine import simulate
from tasp_lab.core.errors import RunError
from tasp_lab.machines.machine import Machine
from tasp_lab.schedule.buffer_layout import memory_bytes
from tasp_lab.schedule.rank_part import rank_part
from tasp_lab.schedules.collectives.ring_reductions import ring_all_reduce
from tasp_lab.topology.builders import full_mesh
from tests.support.loopback import Board, Loopback
from tests.support.one_device import run_in_process
from tests.support.reductions import Case, reductions
from tests.support.schedules import assert_every_transfer_once


@settings(max_examples=60)
@given(reductions(), st.integers(0, 5), st.booleans())
def test_every_rank_ends_with_the_sums_it_must_have(case: Case, receives_ahead: int, whole_steps: bool) -> None:
    """The executor checks every bit; the timeline has every transfer once."""
    timeline = run_in_process(case.schedule(), receives_ahead, whole_steps)
    assert_every_transfer_once(timeline.events, case.schedule())


@given(reductions())
def test_what_comes_to_be_added_has_a_place_of_its_own(case: Case) -> None:
    """Nothing arrives where anything else lies or arrives, but a copy, where the rank's own part has been."""
    schedule = case.schedule()
    for rank, size_bytes in enumerate(memory_bytes(schedule).tolist()):
        part = rank_part(schedule, rank)
        assert part.memory_bytes == size_bytes
        taken = [(row.offset, row.block) for row in part.receives]
        taken += [(offset, block) for block, offset in part.resident.items()]
        spans = sorted({(offset, offset + case.block_bytes[block]) for offset, block in taken})
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        given = {(s, d, b) for s, rows in enumerate(case.steps) for _, d, _, b, gives in rows if gives}
        in_place = [row for row in part.receives if row.offset == part.resident[row.block]]
        assert {row.operation for row in part.receives if (row.step, rank, row.block) not in given} <= {
            row.operation for row in in_place
        }
        staged = sorted(row.offset for row in part.receives if row not in in_place)
        assert staged == sorted(at for join in part.joins for at in join.received)


@pytest.mark.parametrize("owner", [0, 1])
def test_who_has_one_of_two_parts_must_receive_the_other(owner: int) -> None:
    """Whichever part it has: 60 bytes at 5 bytes per second, and the latency."""
    part, final = np.array([[0], [1]]), np.array([[owner == 0], [owner == 1]])
    schedule = Case(part, final, (((1 - owner, owner, 0, 0, 1),),), (60,), (2,)).schedule()
    machine = Machine(full_mesh(2, Fraction(5), Fraction(7)))
    assert least_s(schedule, machine) == simulate(schedule, machine).time_s == 60 / 5 + 7


def test_a_wrong_sum_is_noticed() -> None:
    trial = PatternTrial(ring_all_reduce(full_mesh(2), 100), 1, Loopback(Board(), 1))
    trial.set_up(checked=True)
    with pytest.raises(RunError, match=r"rank 1: block 0 \(sum\) is not "):
        trial.check()
