"""ring-flash-attention on eight A100 and eight H800: one sequence, and packed documents."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from experiments.reproductions.changes import with_overlap, without_merges
from experiments.reproductions.layers import Reason, Row, found_in, layer_tables
from experiments.reproductions.reproduction import Reproduction

FOLDER = Path(__file__).parent


def is_balanced(row: Row) -> bool:
    """A zigzag or striped ring, whose calls are on halves or masked."""
    return row.judged.schedule != "ring-attention"


REASONS = (
    Reason("calls on halves or under a mask take longer", "zigzag and striped rings", is_balanced,
           {"messages beside kernels": with_overlap, "no merges": without_merges}),
)  # fmt: skip

REPRODUCTION = Reproduction(
    "ring_flash_attention",
    "ring-flash-attention on A100 and H800",
    "How long do rings of ring-flash-attention take on eight A100 and eight H800?",
    "README.md of zhuzilin/ring-flash-attention 8996282, both tables",
    "65,536 positions, 32 heads, 8 KV heads, causal; packed batches are means over four packings.",
    "a100, zigzag-ring-attention, forward, causal, 8 GPUs, 65536 positions, 32 heads",
    "Times are met within 20 %, most within 12 %; neither merges nor messages beside kernels explain what is "
    "missing on A100.",
    partial(
        found_in,
        [FOLDER / "a100.csv", FOLDER / "h800.csv", *layer_tables("zhuzilin_varlen_*")],
        REASONS,
    ),
)
