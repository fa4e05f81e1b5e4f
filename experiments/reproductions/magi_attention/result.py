"""MagiAttention's benchmark: its baselines, and its own attention by messages of NCCL, on 8 to 64 H100."""

from __future__ import annotations

from functools import partial

from experiments.reproductions.changes import links_alone, without_contention
from experiments.reproductions.layers import Reason, Row, found_in, layer_tables
from experiments.reproductions.reproduction import Reproduction


def is_ring(row: Row) -> bool:
    """Whether a row is Transformer Engine's ring."""
    return row.judged.schedule in ("ring-attention", "zigzag-ring-attention")


def is_ulysses_backward(row: Row) -> bool:
    """Whether a row is Ulysses, backward."""
    return row.judged.schedule == "ulysses" and row.has(**{"pass": "backward"})


REASONS = (
    Reason("calls of Transformer Engine's ring take longer than those of its kernel alone",
           "Transformer Engine's ring", is_ring, {"no contention": without_contention, "links alone": links_alone}),
    Reason("FlashAttention-3 is faster backward than on the GPU that its rate is from",
           "Ulysses backward", is_ulysses_backward, {"no contention": without_contention, "links alone": links_alone}),
)  # fmt: skip

REPRODUCTION = Reproduction(
    "magi_attention",
    "MagiAttention's benchmark on H100",
    "How long do Ulysses, rings, gathers, USP and MagiAttention take on 8 to 64 H100, forward and backward?",
    "bar charts in assets/magi_attn/exp/distributed/h100 of SandAI-org/MagiAttention 2c641357, digitised to about "
    "0.3 %",
    "64 heads, 8 KV heads, 8,192 positions per GPU, FlashAttention-3; the network between nodes is not stated, that of "
    "the catalogue is assumed.",
    "h100, ulysses, forward, causal, 64 GPUs, 524288 positions, 64 heads",
    "Nearly all forward times of Ulysses, USP and gathers are met, and the fastest schedule is predicted in nearly "
    "all groups; Transformer Engine's ring takes a fifth longer, which neither contention nor the library explains: "
    "likely its calls do.",
    partial(found_in, layer_tables("magi_h100_causal_*", "magi_h100_full_*"), REASONS),
)
