"""Published times of layers, each row run as its library runs it: five benchmarks, one entry each."""

from __future__ import annotations

from functools import partial

from experiments.reproductions.layers import (
    Reason,
    Row,
    found_in,
    layer_tables,
    links_alone,
    with_full_mask,
    with_overlap,
    without_contention,
    without_merges,
)
from experiments.reproductions.report import FOLDER
from experiments.reproductions.reproduction import Reproduction


def is_ring(row: Row) -> bool:
    """Whether a row is Transformer Engine's ring."""
    return row.measured.schedule in ("ring-attention", "zigzag-ring-attention")


def is_ulysses_backward(row: Row) -> bool:
    """Whether a row is Ulysses, backward."""
    return row.measured.schedule == "ulysses" and row.has(**{"pass": "backward"})


MAGI_ATTENTION_REASONS = (
    Reason("calls of Transformer Engine's ring take longer than those of its kernel alone",
           "Transformer Engine's ring", is_ring, {"no contention": without_contention, "links alone": links_alone}),
    Reason("FlashAttention-3 is faster backward than on the GPU that its rate is from",
           "Ulysses backward", is_ulysses_backward, {"no contention": without_contention, "links alone": links_alone}),
)  # fmt: skip

MAGI_ATTENTION = Reproduction(
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
    partial(found_in, layer_tables("magi_h100_causal_*", "magi_h100_full_*"), MAGI_ATTENTION_REASONS),
)


ULTRA_ATTN = Reproduction(
    "ultra_attn",
    "UltraAttn's tables of ring-flash-attention",
    "How long do rings of ring-flash-attention take on one to eight nodes of A800, H800 and A100?",
    "results of oliverYoung2001/UltraAttn b5aa10e1",
    "Ring, zigzag and striped rings of ring-flash-attention with flash-attn 2, which UltraAttn's own schedules are "
    "held against; rows that are bound by their hosts do not count.",
    "a800, zigzag-ring-attention, forward, causal, 32 GPUs, 131072 positions, 32 heads",
    "It is no blind test: what these rings wait for was read from their code because predictions missed, and that GPUs "
    "of the A100 cluster share NICs of 200 Gbit/s from a ring that moves more than 100 Gbit/s carry.",
    partial(found_in, layer_tables("ultraattn_*")),
)


USP = Reproduction(
    "usp",
    "USP on eight A100",
    "Which split of eight A100 into Ulysses and a ring is the fastest, and how long does it take?",
    "media/benchmark_results.png and media/gqa.png of feifeibear/long-context-attention 56118e0",
    "flash-attn 2; 8 A100 behind NVSwitch are stated for one table and inferred for the other.",
    "a100, ulysses, forward, causal, 8 GPUs, 32768 positions, 64 heads, batch 2",
    "Ulysses, or USP with few ranks in a ring, is predicted and measured to be the fastest; where splits are "
    "close the order is predicted in most groups only.",
    partial(found_in, layer_tables("usp_8xa100", "usp_8xa100_gqa_fwdbwd")),
)


def is_balanced(row: Row) -> bool:
    """A zigzag or striped ring, whose calls are on halves or masked."""
    return row.measured.schedule != "ring-attention"


RING_FLASH_ATTENTION_REASONS = (
    Reason("calls on halves or under a mask take longer", "zigzag and striped rings", is_balanced,
           {"messages beside kernels": with_overlap, "no merges": without_merges}),
)  # fmt: skip

RING_FLASH_ATTENTION = Reproduction(
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
        [
            FOLDER / "ring_flash_attention" / "a100.csv",
            FOLDER / "ring_flash_attention" / "h800.csv",
            *layer_tables("zhuzilin_varlen_*"),
        ],
        RING_FLASH_ATTENTION_REASONS,
    ),
)


def any_row(row: Row) -> bool:
    """All rows: those of one GPU and of eight have the same error."""
    return True


BURST_ATTENTION_REASONS = (
    Reason("the time is that of a full mask", "all rows", any_row, {"a full mask": with_full_mask}),
)

BURST_ATTENTION = Reproduction(
    "burst_attention",
    "BurstAttention on eight A100",
    "How long does BurstAttention take on eight A100, from 65,536 to 1,048,576 positions?",
    "README.md of MayDomine/Burst-Attention b088c55, times rounded to 1 ms",
    "32 heads of 128, causal by the README, flash-attn 2; rows of one GPU are one kernel call.",
    "a100, burst, forward, causal, 8 GPUs, 1048576 positions, 32 heads",
    "All are twice as long as predicted, on one GPU as on eight, and as long as predicted for a full mask, with "
    "which one GPU has 217 instead of 109 TFLOP/s, as other A100 have: so likely a full mask was timed.",
    partial(found_in, layer_tables("burst_8xa100"), BURST_ATTENTION_REASONS),
)


REPRODUCTIONS = (MAGI_ATTENTION, ULTRA_ATTN, USP, RING_FLASH_ATTENTION, BURST_ATTENTION)
