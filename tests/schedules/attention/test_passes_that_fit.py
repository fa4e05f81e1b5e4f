"""Passes that were not built together are refused before data moves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from runtime import attention
from tasp_lab.core.errors import ScheduleError, WorkloadError
from tasp_lab.schedules.attention.backward import DATAFLOWS, Passes, attention_passes, check_fit
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.attention.task import KEYS
from tasp_lab.schedules.build import attention_schedules
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload

LAYER = Workload(24, heads=2, head_dim=4, dtype="fp32", mask="causal")


def passes(name: str, dataflow: str, world_size: int = 4, buffers: int = 3) -> Passes:
    return attention_passes(name, full_mesh(world_size), LAYER, dataflow=dataflow, buffers=buffers)  # type: ignore[arg-type]


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["ring-attention", "zigzag-ring-attention", "striped-ring-attention", "tasp"])
@pytest.mark.parametrize("buffers", [2, 3])
def test_what_is_built_together_fits(name: str, buffers: int) -> None:
    for world_size in (1, 2, 4, 7):
        for dataflow in DATAFLOWS:
            check_fit(*passes(name, dataflow, world_size, buffers))


def test_keys_in_stages_of_heads_fit() -> None:
    """Stages have fewer blocks forward than backward, so their keys have other numbers there."""
    layer = replace(LAYER, heads=8, kv_heads=8)
    passes_of = attention_schedules("staged-ulysses", full_mesh(4), layer, options=AttentionOptions("both", stages=2))
    numbers = [schedule.task.blocks_of(KEYS).tolist() for schedule in passes_of]  # type: ignore[union-attr]
    assert numbers[0] != numbers[1]
    check_fit(*passes_of)


def test_what_does_not_fit_is_named() -> None:
    rotate_kv, back = passes("ring-attention", "rotate-kv"), passes("ring-attention", "rotate-kv-back")
    zigzag, tasp = passes("zigzag-ring-attention", "rotate-kv"), passes("tasp", "rotate-kv-back")
    whole = passes("zigzag-ring-attention", "rotate-kv-back")
    for forward, backward, message in [
        (rotate_kv.backward, rotate_kv.forward, "expected a forward and a backward pass of attention, in this order"),
        (rotate_kv.forward, rotate_kv.forward, "expected a forward and a backward pass of attention, in this order"),
        (rotate_kv.forward, zigzag.backward, "has the layout contiguous, the backward pass zigzag"),
        (rotate_kv.forward, back.backward, "does not start where the forward pass leaves the keys"),
        (whole.forward, tasp.backward, "does not start where the forward pass leaves the keys"),
    ]:
        with pytest.raises(ScheduleError, match=message):
            check_fit(forward, backward)


def test_the_layer_refuses_what_does_not_fit(alone: None) -> None:
    q, k, v = (torch.randn(1, 24, 2, 4, requires_grad=True) for _ in range(3))
    one = passes("ring-attention", "rotate-kv", 1)
    with pytest.raises(ScheduleError, match="has the layout contiguous, the backward pass zigzag"):
        attention(
            q, k, v, causal=True, schedule=Passes(one.forward, passes("zigzag-ring-attention", "rotate-kv", 1)[1])
        )
    with torch.no_grad(), pytest.raises(WorkloadError, match="the schedule is a backward pass, expected a forward"):
        attention(q, k, v, causal=True, schedule=one.backward)
