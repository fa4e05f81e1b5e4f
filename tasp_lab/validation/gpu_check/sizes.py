"""How much each step does: on GPUs quickly or in full, and on a host, where only the logic is checked."""

from __future__ import annotations

from dataclasses import dataclass

KIB, MIB = 2**10, 2**20


@dataclass(frozen=True)
class Sizes:
    """Sizes and counts of all steps.

    Parameters
    ----------
    message_bytes : sizes of the library's own collectives, ascending by powers of 8, the steps of nccl-tests; the
        largest one is what others are held against.
    calls : calls back to back per timed batch.
    kernel_rows, head_dims : of the checked kernels.
    delayed_bytes, seeds, delayed_masks : of blocks with random delays; runs of each schedule and transport; masks.
    aligned_bytes : shards of multi-ring: the first is divided by the rings without rest, the second is not.
    layer_heads, layer_kv_heads, layer_head_dim, layer_dtype : of layers whose time is measured.
    overlap_sequences, table_sequences : positions of these layers.
    table_bytes : shards of the AllGathers in the table.
    training_sequence, training_heads, training_head_dim, training_steps : of the model that is trained.
    repeats : timed runs of a schedule.
    loss_limit_s : within which the loss of a rank ends a group.
    step_limit_s : within which a step ends.
    """

    message_bytes: tuple[int, ...]
    calls: int
    kernel_rows: int
    head_dims: tuple[int, ...]
    delayed_bytes: int
    seeds: int
    delayed_masks: tuple[str, ...]
    aligned_bytes: tuple[int, int]
    layer_heads: int
    layer_kv_heads: int
    layer_head_dim: int
    layer_dtype: str
    overlap_sequences: tuple[int, ...]
    table_sequences: tuple[int, ...]
    table_bytes: tuple[int, ...]
    training_sequence: int
    training_heads: int
    training_head_dim: int
    training_steps: int
    repeats: int
    loss_limit_s: float
    step_limit_s: float


QUICK = Sizes(
    message_bytes=(MIB, 64 * MIB, 512 * MIB),
    calls=10,
    kernel_rows=300,
    head_dims=(64, 128),
    delayed_bytes=64 * KIB,
    seeds=1,
    delayed_masks=("causal",),
    aligned_bytes=(56 * MIB, 64 * MIB),
    layer_heads=32,
    layer_kv_heads=8,
    layer_head_dim=128,
    layer_dtype="bf16",
    overlap_sequences=(16384,),
    table_sequences=(16384,),
    table_bytes=(64 * MIB,),
    training_sequence=4096,
    training_heads=16,
    training_head_dim=64,
    training_steps=20,
    repeats=5,
    loss_limit_s=10.0,
    step_limit_s=300.0,
)
"""Meant for 5 minutes on 8 GPUs; not measured."""

FULL = Sizes(
    message_bytes=(MIB, 8 * MIB, 64 * MIB, 512 * MIB),
    calls=20,
    kernel_rows=1000,
    head_dims=(64, 96, 128, 256),
    delayed_bytes=MIB,
    seeds=20,
    delayed_masks=("causal", "full"),
    aligned_bytes=(56 * MIB, 64 * MIB),
    layer_heads=32,
    layer_kv_heads=8,
    layer_head_dim=128,
    layer_dtype="bf16",
    overlap_sequences=(8192, 16384, 65536),
    table_sequences=(16384, 65536),
    table_bytes=(MIB, 8 * MIB, 64 * MIB, 448 * MIB),
    training_sequence=16384,
    training_heads=16,
    training_head_dim=64,
    training_steps=20,
    repeats=10,
    loss_limit_s=10.0,
    step_limit_s=1800.0,
)
"""Meant for 45 minutes on 8 GPUs; not measured."""

HOST = Sizes(
    message_bytes=(64 * KIB, MIB),
    calls=2,
    kernel_rows=48,
    head_dims=(32,),
    delayed_bytes=2 * KIB,
    seeds=1,
    delayed_masks=("causal",),
    aligned_bytes=(56 * KIB, 64 * KIB),
    layer_heads=4,
    layer_kv_heads=4,
    layer_head_dim=16,
    layer_dtype="fp32",
    overlap_sequences=(256,),
    table_sequences=(256,),
    table_bytes=(64 * KIB,),
    training_sequence=64,
    training_heads=2,
    training_head_dim=8,
    training_steps=20,
    repeats=2,
    loss_limit_s=60.0,
    step_limit_s=240.0,
)
"""On processors with gloo: small, since nothing is held against a limit of speed."""


def sizes_for(*, on_gpu: bool, quick: bool) -> Sizes:
    """The sizes for a backend."""
    return (QUICK if quick else FULL) if on_gpu else HOST
