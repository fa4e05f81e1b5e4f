"""The module is the function with its options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from runtime.sequence_parallel import api as sequence_parallel
from runtime.sequence_parallel.api import SequenceParallelAttention
from tasp_lab.core.errors import ScheduleError, WorkloadError
from tasp_lab.schedules.attention.backward import attention_passes
from tasp_lab.schedules.attention.forward import attention
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload


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
        schedule = build("tasp", full_mesh(2), Workload(8, mask="causal", heads=1))
        module = SequenceParallelAttention(schedule=schedule, causal=True, topology=full_mesh(2))
        assert repr(module) == "SequenceParallelAttention(schedule=tasp, causal=True, topology=full-mesh:2)"
    options = AttentionOptions("both", trim=False)
    assert repr(SequenceParallelAttention(options=options)) == f"SequenceParallelAttention(options={options})"
    assert repr(SequenceParallelAttention()) == "SequenceParallelAttention()"
    assert not module.state_dict()


def test_the_longest_names_are_refused_by_name() -> None:
    """What ranks tell each other is of one size, whatever the lengths of its texts."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        q = torch.randn(1, 4, 1, 8, requires_grad=True)
        topology = replace(full_mesh(1), name="t" * 400)
        with pytest.raises(ScheduleError, match="unknown schedule 'ssss"):
            sequence_parallel.attention(q, q, q, schedule="s" * 400, topology=topology)
    finally:
        dist.destroy_process_group()


def test_the_module_takes_the_keywords_of_the_function() -> None:
    """Those of `attention_with_lse`, and no others."""
    signature = inspect.signature(sequence_parallel.attention_with_lse)
    keywords = {name for name, each in signature.parameters.items() if each.kind == inspect.Parameter.KEYWORD_ONLY}
    assert keywords == set(sequence_parallel.CallKeywords.__annotations__)


@pytest.mark.parametrize("attend", [sequence_parallel.attention, sequence_parallel.attention_with_lse])
@pytest.mark.parametrize("name", [each.name for each in fields(AttentionOptions)])
def test_what_travels_in_options_is_no_keyword(attend: Callable[..., Any], name: str) -> None:
    q = torch.randn(1, 4, 1, 8)
    with pytest.raises(WorkloadError, match=f"unknown argument '{name}'"):
        attend(q, q, q, **{name: getattr(AttentionOptions(), name)})
