"""The module is the function with its options."""

from __future__ import annotations

import torch
import torch.distributed as dist

from runtime import sequence_parallel
from runtime.modules import SequenceParallelAttention
from tasp_lab.attention import attention
from tasp_lab.attention_backward import attention_passes
from tasp_lab.builders import full_mesh
from tasp_lab.workload import Workload


def test_it_gives_what_the_function_gives() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        q, k, v = (torch.randn(2, 16, heads, 64) for heads in (4, 2, 2))
        for options in ({}, {"schedule": "zigzag-ring-attention", "causal": True, "window": 5, "scale": 0.5}):
            expected = sequence_parallel.attention(q, k, v, **options)
            assert torch.equal(SequenceParallelAttention(**options)(q, k, v), expected)
    finally:
        dist.destroy_process_group()


def test_it_shows_its_options_and_has_no_state() -> None:
    for build in (attention, attention_passes):
        schedule = build("tasp", full_mesh(2), Workload(8, mask="causal"))
        module = SequenceParallelAttention(schedule=schedule, causal=True, topology=full_mesh(2))
        assert repr(module) == "SequenceParallelAttention(schedule=tasp, causal=True, topology=full-mesh:2)"
    assert repr(SequenceParallelAttention()) == "SequenceParallelAttention()"
    assert not module.state_dict()
