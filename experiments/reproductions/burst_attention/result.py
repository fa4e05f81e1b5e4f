"""BurstAttention on eight A100, and one call on one of them."""

from __future__ import annotations

from functools import partial

from experiments.reproductions.changes import with_full_mask
from experiments.reproductions.layers import Reason, Row, found_in, layer_tables
from experiments.reproductions.reproduction import Reproduction


def any_row(row: Row) -> bool:
    """All rows: those of one GPU and of eight have the same error."""
    return True


REASONS = (
    Reason(
        "the time is that of a full mask",
        "all rows",
        any_row,
        {"a full mask": with_full_mask},
    ),
)

REPRODUCTION = Reproduction(
    "burst_attention",
    "BurstAttention on eight A100",
    "How long does BurstAttention take on eight A100, from 65,536 to 1,048,576 positions?",
    "README.md of MayDomine/Burst-Attention b088c55, times rounded to 1 ms",
    "32 heads of 128, causal by the README, flash-attn 2; rows of one GPU are one kernel call.",
    "a100, burst, forward, causal, 8 GPUs, 1048576 positions, 32 heads",
    "All are twice as long as predicted, on one GPU as on eight, and as long as predicted for a full mask, with "
    "which one GPU has 217 instead of 109 TFLOP/s, as other A100 have: so likely a full mask was timed.",
    partial(found_in, layer_tables("burst_8xa100"), REASONS),
)
