"""Calls of kernels that a layer does not have on its device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from runtime.executor.copies import Work
from runtime.kernels.registry import KERNELS
from runtime.sequence_parallel.layer import AttentionLayer
from runtime.sequence_parallel.linear_layer import LinearLayer
from tasp_lab.core.errors import RunError
from tasp_lab.schedule.rank_part import rank_part
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.forward import attention
from tasp_lab.schedules.attention.task import KEYS, QUERIES
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tests.support.systems import lasp2

LINEAR_KERNELS = "make_state, attend, attend_by_state, fold, advance, combine, apply_state"

LAYER = Workload(8, heads=1, head_dim=4, mask="causal", dtype="fp32")


def softmax() -> tuple[Schedule, Work]:
    schedule, x = attention("ring-attention", full_mesh(2), LAYER), torch.zeros(1, 4, 1, 4)
    return schedule, AttentionLayer(schedule, 0, KERNELS["reference"], 1.0, {QUERIES: (x,), KEYS: (x, x)})


def linear() -> tuple[Schedule, Work]:
    schedule, x = lasp2(full_mesh(2), LAYER), torch.zeros(1, 4, 1, 4)
    return schedule, LinearLayer(schedule, 0, {QUERIES: (x,), KEYS: (x, x)})


@pytest.mark.parametrize(
    ("make", "expected"),
    [(softmax, "'attend'"), (linear, f"one of {LINEAR_KERNELS}")],
)
def test_a_kernel_that_is_not_there_is_named_with_the_device_and_those_that_are(
    make: Callable[[], tuple[Schedule, Work]], expected: str
) -> None:
    schedule, work = make()
    row = rank_part(schedule, 0).calls[0]._replace(kernel="dense")
    with pytest.raises(RunError, match=f"^step 0: there is no kernel 'dense' on cpu, expected {expected}$"):
        work.compute(row, [(), ()])
