"""UltraAttn's benchmark of ring-flash-attention on three clusters."""

from __future__ import annotations

from functools import partial

from experiments.reproductions.changes import in_pairs, links_alone, with_network_of, with_overlap
from experiments.reproductions.layers import Reason, Row, found_in, layer_tables
from experiments.reproductions.reproduction import Reproduction


def on_a100_nodes(row: Row) -> bool:
    """On several nodes of A100 with 100 Gbit/s."""
    return row.has(profile="a100_100g") and row.judged.shape["nodes"] != 1


def on_one_h800_node(row: Row) -> bool:
    """On one node of H800."""
    return row.has(profile="h800", nodes=1)


def on_one_a100_node(row: Row) -> bool:
    """On one node of A100."""
    return row.has(profile="a100_100g", nodes=1)


def one_head_on_many(row: Row) -> bool:
    """One head on several nodes of A800 or H800."""
    return row.has(heads=1) and not row.has(profile="a100_100g") and row.judged.shape["nodes"] != 1


REASONS = (
    Reason("messages between its nodes take half the time, as if a ring had 200 Gbit/s there",
           "nodes of A100", on_a100_nodes, {"NICs of 200 Gbit/s": partial(with_network_of, profile="a100")}),
    Reason("messages inside the node are faster than the channels of eight ranks allow",
           "one node of H800", on_one_h800_node,
           {"the channels of two ranks": partial(in_pairs, profile="h800"), "links alone": links_alone,
            "messages beside kernels": with_overlap}),
    Reason("messages inside a node are faster than the channels of eight ranks allow",
           "one node of A100", on_one_a100_node,
           {"the channels of two ranks": partial(in_pairs, profile="a100_100g"), "links alone": links_alone,
            "messages beside kernels": with_overlap}),
    Reason("messages of one head run beside kernels",
           "one head on nodes of A800 and H800", one_head_on_many,
           {"messages beside kernels": with_overlap}),
)  # fmt: skip

REPRODUCTION = Reproduction(
    "ultra_attn",
    "UltraAttn's tables of ring-flash-attention",
    "How long do rings of ring-flash-attention take on one to eight nodes of A800, H800 and A100?",
    "results of oliverYoung2001/UltraAttn b5aa10e1",
    "Ring, zigzag and striped rings of ring-flash-attention with flash-attn 2, which UltraAttn's own schedules are "
    "held against; rows that are bound by their hosts do not count.",
    "a800, zigzag-ring-attention, forward, causal, 32 GPUs, 131072 positions, 32 heads",
    "Three things account for nearly all of those outside: a cluster with 100 Gbit/s per GPU whose rings run as with"
    " 200, messages inside nodes that have the channels of two ranks rather than eight, and messages of one head "
    "that run beside kernels.",
    partial(found_in, layer_tables("ultraattn_*"), REASONS),
)
