"""Two ranks that share a device: real processes over gloo in place of NCCL, and why a GPU is not shared."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.gpu import shared_gpu
from tests.gpu.groups import Ended
from tests.gpu.shared_gpu import SCHEDULES, Shared, reason_against, share

GPU = torch.device("cuda", 0)


@pytest.mark.distributed
def test_two_processes_compute_layers_of_one() -> None:
    expected = tuple(f"{name}, {which}" for name in SCHEDULES for which in ("forward", "backward"))
    assert share("gloo") == Shared(expected)


@pytest.mark.distributed
def test_wrong_bytes_of_a_message_are_found() -> None:
    found = share("gloo", fault=True)
    assert found.passed == ()
    assert found.failure.startswith("ring-attention, forward: rank ")
    assert "differs from single-process attention" in found.failure


@pytest.mark.parametrize(
    ("hip", "has_nccl", "version", "free_gib", "reason"),
    [
        (None, True, (2, 30, 7), 4, ""),
        (None, True, (2, 30), 80, ""),
        ("6.4", True, (2, 30), 80, "RCCL is not known to take two ranks on one GPU"),
        (None, False, (2, 30), 80, "torch has no NCCL"),
        (None, True, (2, 29, 7), 80, "NCCL 2.29.7 takes one rank on a GPU, expected 2.30 or later"),
        (None, True, (2, 31, 2), 3.5, "3.5 GiB of the GPU's memory are free, expected 4 GiB or more"),
    ],
)
def test_why_a_gpu_is_not_shared(
    hip: str | None, has_nccl: bool, version: tuple[int, ...], free_gib: float, reason: str
) -> None:
    free = int(free_gib * 2**30)
    with (
        patch.object(torch.version, "hip", hip),
        patch.object(dist, "is_nccl_available", lambda: has_nccl),
        patch.object(torch.cuda.nccl, "version", lambda: version),
        patch.object(torch.cuda, "empty_cache", lambda: None),
        patch.object(torch.cuda, "mem_get_info", lambda _: (free, 80 * 2**30)),
    ):
        assert reason_against(GPU) == reason


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (Ended("passed tasp, forward\n", 0, 1.0, ()), Shared(("tasp, forward",))),
        (
            Ended("gpu-check: rank 0: cannot join: CUDA-capable device(s) is/are busy or unavailable\n", 1, 1.0, ()),
            Shared((), refusal="the GPU takes one process at a time (compute mode exclusive)"),
        ),
        (
            Ended("passed a\ngpu-check: rank 1: CUDA out of memory. Tried to allocate\ntorchrun: failed", 1, 1.0, ()),
            Shared(("a",), refusal="the memory of the GPU is too short for two more processes"),
        ),
        (
            Ended("NCCL WARN Duplicate GPU detected : rank 0 and rank 1\n", 1, 1.0, ()),
            Shared((), refusal="this NCCL takes one rank on a GPU"),
        ),
        (Ended("gpu-check: tasp: wrong\nfurther lines", 1, 1.0, ()), Shared((), failure="tasp: wrong")),
        (Ended("process 1\n", -15, None, ()), Shared((), failure="did not end within 300 s: process 1")),
        (Ended("", 1, 1.0, ()), Shared((), failure="no output")),
    ],
)
def test_how_two_ranks_end(end: Ended, expected: Shared) -> None:
    asked: list[Any] = []
    with patch.object(shared_gpu, "run_group", lambda *arguments: asked.append(arguments) or end):
        assert share("nccl") == expected
    assert asked[0][-1]["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
