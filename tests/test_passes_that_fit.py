"""Passes that were not built together are refused before data moves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from runtime import attention
from tasp_lab.attention_backward import WAYS, Passes, attention_passes, check_fit
from tasp_lab.builders import full_mesh
from tasp_lab.errors import ScheduleError, WorkloadError
from tasp_lab.workload import Workload

LAYER = Workload(24, heads=2, head_dim=4, dtype="fp32", mask="causal")


def passes(name: str, way: str, world_size: int = 4, rooms: int = 3) -> Passes:
    return attention_passes(name, full_mesh(world_size), LAYER, way=way, rooms=rooms)  # type: ignore[arg-type]


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["ring-attention", "zigzag-ring-attention", "striped-ring-attention", "tasp"])
@pytest.mark.parametrize("rooms", [2, 3])
def test_what_is_built_together_fits(name: str, rooms: int) -> None:
    for world_size in (1, 2, 4, 7):
        for way in WAYS:
            check_fit(*passes(name, way, world_size, rooms))


def test_what_does_not_fit_is_named() -> None:
    onward, back = passes("ring-attention", "onward"), passes("ring-attention", "reversed")
    zigzag, tasp = passes("zigzag-ring-attention", "onward"), passes("tasp", "reversed")
    whole = passes("zigzag-ring-attention", "reversed")
    for forward, backward, message in [
        (onward.backward, onward.forward, "expected a forward and a backward pass of attention, in this order"),
        (onward.forward, onward.forward, "expected a forward and a backward pass of attention, in this order"),
        (onward.forward, zigzag.backward, "has the placement contiguous, the backward pass zigzag"),
        (onward.forward, back.backward, "does not start where the forward pass leaves the keys"),
        (whole.forward, tasp.backward, "does not start where the forward pass leaves the keys"),
    ]:
        with pytest.raises(ScheduleError, match=message):
            check_fit(forward, backward)


def test_the_layer_refuses_what_does_not_fit(alone: None) -> None:
    q, k, v = (torch.randn(1, 24, 2, 4, requires_grad=True) for _ in range(3))
    one = passes("ring-attention", "onward", 1)
    with pytest.raises(ScheduleError, match="has the placement contiguous, the backward pass zigzag"):
        attention(q, k, v, causal=True, schedule=Passes(one.forward, passes("zigzag-ring-attention", "onward", 1)[1]))
    with torch.no_grad(), pytest.raises(WorkloadError, match="the schedule is a backward pass, expected a forward"):
        attention(q, k, v, causal=True, schedule=one.backward)
