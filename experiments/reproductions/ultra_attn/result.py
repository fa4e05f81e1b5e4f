"""UltraAttn's benchmark of ring-flash-attention on three clusters."""

from __future__ import annotations

from functools import partial

from experiments.reproductions.changes import with_network_of
from experiments.reproductions.layers import Reason, Row, found_in, layer_tables
from experiments.reproductions.reproduction import Reproduction


def on_a100_nodes(row: Row) -> bool:
    """On several nodes of A100 with 100 Gbit/s."""
    return row.has(profile="a100_100g") and row.judged.shape["nodes"] != 1


REASONS = (
    Reason("messages between its nodes take half the time, as if a ring had 200 Gbit/s there",
           "nodes of A100", on_a100_nodes, {"NICs of 200 Gbit/s": partial(with_network_of, profile="a100")}),
)  # fmt: skip

REPRODUCTION = Reproduction(
    "ultra_attn",
    "UltraAttn's tables of ring-flash-attention",
    "How long do rings of ring-flash-attention take on one to eight nodes of A800, H800 and A100?",
    "results of oliverYoung2001/UltraAttn b5aa10e1",
    "Ring, zigzag and striped rings of ring-flash-attention with flash-attn 2, which UltraAttn's own schedules are "
    "held against; rows that are bound by their hosts do not count.",
    "a800, zigzag-ring-attention, forward, causal, 32 GPUs, 131072 positions, 32 heads",
    "All of those outside are on a cluster with 100 Gbit/s per GPU whose rings run as with 200, and with 200 they come "
    "inside. It is no blind test: what these rings wait for was read from their code because predictions missed.",
    partial(found_in, layer_tables("ultraattn_*"), REASONS),
)
