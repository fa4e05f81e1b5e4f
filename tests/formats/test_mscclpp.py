"""Laws of MSCCL++ plans: they run to the right bytes in any order of thread blocks, within the limits."""

from __future__ import annotations

import json

import pytest

from tasp_lab.core.errors import ScheduleError
from tasp_lab.formats import mscclpp
from tasp_lab.schedules.collectives.all_gather import direct_all_gather
from tasp_lab.schedules.collectives.ring_reductions import ring_all_reduce
from tasp_lab.topology.builders import full_mesh
from tests.formats.msccl_interpreter import expected
from tests.formats.mscclpp_interpreter import run
from tests.formats.worlds import schedules, written

WORLDS = schedules()


@pytest.mark.parametrize("name", WORLDS)
def test_a_plan_runs_to_the_right_bytes(name: str) -> None:
    check(json.loads(written(mscclpp.write, WORLDS[name])))


def check(plan: dict) -> None:
    n = len(plan["gpus"])
    total = max(plan["gpus"][0]["input_chunks"], plan["gpus"][0]["output_chunks"])
    head = {"ngpus": n, "nchunksperloop": total, "coll": plan["collective"], "inplace": str(int(plan["inplace"]))}
    for seed in range(3):
        memory = run(plan, seed)
        for rank in range(n):
            buffer, first, values = expected(head, rank)
            assert memory[rank][buffer][first : first + len(values)] == values


def test_long_thread_blocks_are_cut() -> None:
    """An AllReduce of eight ranks has more than 64 operations a rank: two thread blocks and a semaphore."""
    plan = json.loads(mscclpp.write(ring_all_reduce(full_mesh(8), 64)))
    assert all(len(gpu["threadblocks"]) == 2 and len(gpu["semaphores"]) == 1 for gpu in plan["gpus"])
    check(plan)


def test_without_a_signal_the_interpreter_finds_the_fault() -> None:
    """If ranks do not wait until their peer is ready, some order gives wrong bytes or reads what nobody wrote."""
    plan = json.loads(mscclpp.write(ring_all_reduce(full_mesh(4), 64)))
    for gpu in plan["gpus"]:
        for block in gpu["threadblocks"]:
            block["ops"] = [{"name": "nop"} if op["name"] == "wait" else op for op in block["ops"]]
    with pytest.raises(AssertionError):
        check(plan)


def test_more_than_the_executor_takes_is_refused() -> None:
    with pytest.raises(ScheduleError, match="thread blocks, expected at most 64"):
        mscclpp.write(direct_all_gather(full_mesh(70), 64))
