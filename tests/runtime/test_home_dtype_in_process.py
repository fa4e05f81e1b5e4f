"""Sums that are float32 at home and have 16 bit on the wire, by the executor, every rank a thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.executor.executor import Executor
from runtime.trials.in_process import InProcess, Mailboxes, run_in_process
from runtime.trials.layers import AttentionTrial
from tasp_lab.machines.machine import ComputeRate
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.task import QUERY_GRADIENTS, RESULTS
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tests.schedule.test_home_dtype import SYSTEMS
from tests.schedule.test_messages import sums_at_home
from tests.support.home_dtype import with_home_dtype
from tests.support.systems import token_ring_passes


@pytest.mark.parametrize("name", SYSTEMS)
@settings(max_examples=8)
@given(st.integers(1, 3), st.integers(1, 20), st.booleans(), st.sampled_from(["bf16", "fp16"]))
def test_every_system_computes_attention_with_sums_that_are_wider_at_home(
    name: str, n: int, more: int, whole_steps: bool, dtype: str
) -> None:
    """With real kernels against float64, and with test patterns byte by byte."""
    layer = Workload(2 * n + more, heads=12, head_dim=9, mask="causal", dtype=dtype)
    schedule = with_home_dtype(SYSTEMS[name](full_mesh(n), layer))
    run_in_process(schedule, 3, whole_steps)
    run_in_process(schedule, 3, whole_steps, compute=ComputeRate(1e15))


def test_a_sum_that_lies_behind_another_one_is_narrowed_by_itself() -> None:
    """What rank 1 sends of it is rounded to bfloat16; rank 0 adds it in float32."""
    schedule, mailboxes = sums_at_home(), Mailboxes()
    values = torch.randn(2, 2, 2, 4, generator=torch.Generator().manual_seed(0))  # rank, block, position, element

    def run(rank: int) -> torch.Tensor:
        executor = Executor(schedule, rank, InProcess(rank, mailboxes, 30.0))
        for block in (0, 1):
            executor.copies.store([block], [values[rank, block]])
        executor.prepare()
        executor.run()
        return torch.stack([executor.copies.resident([block])[0] for block in (0, 1)])

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(run, range(2)))
    assert torch.equal(found[0][0], values[0, 0] + values[1, 0])
    assert torch.equal(found[0][1], values[0, 1] + values[1, 1].bfloat16().float())


def outputs(schedule: Schedule, tensor: int) -> list[torch.Tensor]:
    """An output of each rank in float32, after a run with real kernels."""
    mailboxes = Mailboxes()

    def run(rank: int) -> torch.Tensor:
        trial = AttentionTrial(schedule, rank, InProcess(rank, mailboxes, 30.0))
        trial.set_up(checked=False)
        trial.executor.prepare()
        trial.executor.run()
        return trial._layer.output(trial.executor.copies, tensor, torch.float32)[0].clone()

    with ThreadPoolExecutor(schedule.world_size) as threads:
        return list(threads.map(run, range(schedule.world_size)))


@pytest.mark.parametrize("tensor", [RESULTS, QUERY_GRADIENTS])
def test_float32_at_home_saves_the_rounding_of_every_sum(tensor: int) -> None:
    """Parts are rounded once, on the wire; narrow sums are rounded again with each part that joins them.

    So wide sums are closer to those that are float32 everywhere, and are no multiples of bfloat16 steps.
    """
    mesh, layer = full_mesh(6), Workload(96, heads=4, head_dim=16, dtype="bf16")

    def found(wire: str, is_wide: bool) -> torch.Tensor:
        passes = token_ring_passes(mesh, layer, result_dtype=wire, gradient_dtype=wire)
        schedule = passes.forward if tensor == RESULTS else passes.backward
        return torch.cat(outputs(with_home_dtype(schedule, "fp32" if is_wide else None), tensor), 1)

    exact, narrow, wide = found("fp32", False), found("input", False), found("input", True)
    assert torch.equal(narrow, narrow.bfloat16().float())
    assert not torch.equal(wide, wide.bfloat16().float())
    assert (wide - exact).norm() < (narrow - exact).norm()
