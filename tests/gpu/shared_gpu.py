"""Two ranks on one GPU, in processes of their own: layers over NCCL against those of a single process.

NCCL takes several ranks on one GPU from version 2.30 on, where `VARIABLES` are set
(https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-multi-rank-gpu-enable). Their kernels take
turns, so this shows that results are right, not how fast they are. With ``gloo`` the same runs on a host.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from runtime.executor.messages import Message, Post, Wait
from runtime.executor.transports import TRANSPORTS, Batched
from runtime.protocol.jobs import RunSchedule
from runtime.ranks.torchrun import join
from tasp_lab.core.choices import BackendKind
from tasp_lab.core.errors import RunError
from tasp_lab.core.progress import print_line
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import build_schedules
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tests.gpu.groups import be_member, run_group

MODULE = "tests.gpu.shared_gpu"
RANKS = 2
SCHEDULES = ("ring-attention", "zigzag-ring-attention", "tasp", "ulysses")
LIMIT_S = 300.0
SILENCE_S = 60.0

NEEDED_NCCL = (2, 30)
NEEDED_BYTES = 4 << 30
"""Memory for two more processes with CUDA and NCCL. An assumption: it was not measured."""

VARIABLES = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}
"""NCCL refuses to share a GPU where NVLS is demanded (https://github.com/NVIDIA/nccl/issues/1716)."""

_ALONE = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
"""To torch each rank is alone on its host, so each takes the first GPU."""

_REFUSALS = {
    r"busy or unavailable": "the GPU takes one process at a time (compute mode exclusive)",
    r"out of memory": "the memory of the GPU is too short for two more processes",
    r"Duplicate GPU|same GPU/Partition": "this NCCL takes one rank on a GPU",
}
"""Errors of CUDA and NCCL because of which two ranks cannot share this GPU."""


def reason_against(device: torch.device) -> str:
    """Why two ranks cannot share a GPU, in one line, as far as that is known beforehand; else empty."""
    if torch.version.hip is not None:
        return "RCCL is not known to take two ranks on one GPU"
    if not dist.is_nccl_available():
        return "torch has no NCCL"
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    if version < NEEDED_NCCL:
        return f"NCCL {'.'.join(map(str, version))} takes one rank on a GPU, expected 2.30 or later"
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    if free < NEEDED_BYTES:
        return f"{free / 2**30:.1f} GiB of the GPU's memory are free, expected {NEEDED_BYTES >> 30} GiB or more"
    return ""


@dataclass(frozen=True)
class Shared:
    """What came of two ranks: the passes that were right, and why they failed or could not run, else empty."""

    passed: tuple[str, ...]
    failure: str = ""
    refusal: str = ""


def share(backend: BackendKind, fault: bool = False) -> Shared:
    """Run layers with two ranks of their own. With `fault` rank 1 sends wrong bytes, which must be found."""
    arguments = (backend, "fault" if fault else "right")
    end = run_group(MODULE, arguments, RANKS, LIMIT_S, None if backend == "gloo" else VARIABLES)
    passed = tuple(re.findall(r"^passed (.+)$", end.output, re.MULTILINE))
    if end.exit_code == 0:
        return Shared(passed)
    reason = next((reason for error, reason in _REFUSALS.items() if re.search(error, end.output)), "")
    if reason:
        return Shared(passed, refusal=reason)
    told = re.search(r"^gpu-check: (.+)$", end.output, re.MULTILINE)
    line = told[1] if told else end.last_line
    return Shared(passed, failure=line if end.ended is not None else f"did not end within {LIMIT_S:g} s: {line}")


class _Faulty(Batched):
    """A transport in which rank 1 overwrites the first message of a batch."""

    def bind(self, receives: Sequence[Message], sends: Sequence[Message]) -> Post:
        right = super().bind(receives, sends)

        def post() -> Sequence[Wait]:
            if dist.get_rank() == 1 and sends:
                sends[0].data.fill_(0x3F)
            return right()

        return post


def _run_rank(backend: str, how: str) -> None:
    on_gpu, transport = backend != "gloo", "auto"
    if on_gpu:
        os.environ |= _ALONE
    if how == "fault":
        transport = "faulty"
        TRANSPORTS[transport] = _Faulty
    head_dim, dtype, per_rank = (64, "bf16", 256) if on_gpu else (8, "fp32", 9)
    layer = Workload(RANKS * per_rank, heads=4, kv_heads=2, head_dim=head_dim, dtype=dtype, mask="causal")
    with join("nccl" if on_gpu else "gloo") as ranks:
        for name in SCHEDULES:
            passes = build_schedules(name, full_mesh(RANKS), layer, options=AttentionOptions("both"))
            for which, schedule in zip(("forward", "backward"), passes, strict=True):
                try:
                    ranks.perform(RunSchedule(schedule, transport, repeats=1, warm_ups=1), SILENCE_S)
                except RunError as error:
                    raise RunError(f"{name}, {which}: {error}") from None
                if ranks.is_reporter:
                    print_line(f"passed {name}, {which}", sys.stdout)


if __name__ == "__main__":
    be_member(MODULE, 2, _run_rank)
