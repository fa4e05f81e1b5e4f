"""Sizes and counts of the tests for GPUs."""

from __future__ import annotations

from typing import NamedTuple

from tasp_lab.workload.layer import Workload
from tests.gpu.training import Recipe

KIB, MIB = 2**10, 2**20
SILENCE_S = 120.0


class Sizes(NamedTuple):
    """Sizes and counts.

    Sizes of the library's own collectives ascend by powers of 8, the steps of nccl-tests; the largest one is what
    others are held against. Of `aligned_bytes`, the rings of multi-ring divide the first without rest, not the second.
    """

    message_bytes: tuple[int, ...] = (MIB, 64 * MIB, 512 * MIB)
    peer_bytes: tuple[int, ...] = (MIB, 16 * MIB, 256 * MIB)
    calls: int = 10
    kernel_rows: int = 300
    head_dims: tuple[tuple[int, int], ...] = ((64, 64), (128, 128), (192, 128))
    delayed_bytes: int = 64 * KIB
    seeds: int = 1
    delayed_masks: tuple[str, ...] = ("causal",)
    aligned_bytes: tuple[int, int] = (56 * MIB, 64 * MIB)
    timed_layer: Workload = Workload(16384, heads=32, kv_heads=8, head_dim=128, dtype="bf16", mask="full")
    overlap_sequences: tuple[int, ...] = (16384,)
    recipe: Recipe = Recipe(4096, heads=16, head_dim=64)
    repeats: int = 5
    loss_limit_s: float = 10.0


QUICK = Sizes()
"""Meant for 5 minutes on 8 GPUs; not measured."""

FULL = Sizes(
    message_bytes=(MIB, 8 * MIB, 64 * MIB, 512 * MIB), calls=20,
    peer_bytes=tuple(MIB << power for power in range(9)), kernel_rows=1000,
    head_dims=((64, 64), (96, 96), (128, 128), (256, 256), (192, 128), (128, 64)),
    delayed_bytes=MIB, seeds=20, delayed_masks=("causal", "full"), overlap_sequences=(8192, 16384, 65536),
    recipe=Recipe(16384, heads=16, head_dim=64), repeats=10,
)  # fmt: skip
"""Meant for 45 minutes on 8 GPUs; not measured."""

HOST = Sizes(
    message_bytes=(64 * KIB, MIB), calls=2, peer_bytes=(64 * KIB,), kernel_rows=48, head_dims=((32, 32), (32, 24)),
    delayed_bytes=2 * KIB, aligned_bytes=(56 * KIB, 64 * KIB), overlap_sequences=(256,),
    timed_layer=Workload(256, heads=4, head_dim=16, dtype="fp32", mask="full"),
    recipe=Recipe(64, heads=2, head_dim=8), repeats=2, loss_limit_s=60.0,
)  # fmt: skip
"""On processors with gloo: small, since nothing is held against a limit of speed."""
