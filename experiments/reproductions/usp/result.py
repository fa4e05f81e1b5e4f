"""USP on eight A100: splits into Ulysses and rings."""

from __future__ import annotations

from functools import partial

from experiments.reproductions.layers import found_in, layer_tables
from experiments.reproductions.reproduction import Reproduction

REPRODUCTION = Reproduction(
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
