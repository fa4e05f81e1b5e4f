"""LASP-2's gains over LASP and Ring Attention on 64 A100, and its Tables 5 and 6."""

from __future__ import annotations

from collections.abc import Callable

from experiments.common import markdown_table
from experiments.reproductions.lasp2.checks import checks, grown_s, split_published_s, split_s
from experiments.reproductions.lasp2.exchanges import FABRICS, GPUS, HEADLINES, a100_nodes, layer_table
from experiments.reproductions.lasp2.gaps import blocked_chain_ms, chain_ms, headline_rows, ring_ms
from experiments.reproductions.lasp2.iterations import FOLDER, iteration_s, iterations_s
from experiments.reproductions.ranges import Range, checks_text, figure_of, read_record, rows_text
from experiments.reproductions.reproduction import Figure, Found, Reproduction, Trial
from tasp_lab.prediction.residual_fit import Residual, residual_of
from tasp_lab.prediction.residuals import Regime, layer_regime

CHAIN_REASON = "the gain grows with the sequence, as kernels between the hops of a blocking chain do"
RING_REASON = (
    "a ring of 64 GPUs that multiplies all pairs takes longer than the published iteration even at peak rate, so the "
    "baseline did something else"
)
GROWN_REASON = "more than gathers grows with the number of GPUs, a quarter at most with one NIC per node"
SPLIT_REASON = "63 more gathers, each a call, cannot cost so little, so they were not made one after another"

GAPS = """\
Gains are published in percent of an iteration; rows have them as time, with an iteration from Table 6 or, at 2097152 \
positions, where it has none, between that of half the positions and twice as long. LASP-2 is taken as released, \
NCCL's AllGather and then the kernels."""


def find() -> Found:
    """Predict the gains, what grows with GPUs and pieces, and hold the tables against each other."""
    gains, rings = gains_of(chain_ms), ring_gains("ring-linear-attention")
    trials = (
        Trial("every rank's kernels between two hops of LASP", gains, gains_of(blocked_chain_ms),
              "too much: so part of the kernels runs there, not all"),
        Trial("Ring Attention by states of keys", rings, ring_gains("ring-linear-attention-right"),
              "keys alone take too long"),
    )  # fmt: skip
    rows, tables = headline_rows(), checks()
    sections = (
        f"## Gains as time per iteration\n\n{GAPS}\n\n{rows_text(rows)}",
        "Both passes of one layer, ms. LASP-2 as released is NCCL's AllGather, others are messages.\n\n"
        + markdown_table(_per_fabric(), layer_table()),
        f"## Tables 5 and 6 held against each other\n\n{checks_text(tables)}",
    )
    record = {"gaps": [each.record() for each in rows], "checks": [each.record() for each in tables]}
    return Found((*gains, *rings, *table_figures()), trials, sections, record)


def gains_of(gap: Callable[[int], Range]) -> tuple[Figure, ...]:
    """The gain over LASP at both lengths, in percent of an iteration of LASP-2."""
    return tuple(
        figure_of(f"gain over LASP, {sequence} positions", "%", published(sequence, "over_lasp1_percent"),
                  gap(sequence).scaled(0.1) / iteration_s(sequence), of_layers(1e-2), CHAIN_REASON)
        for sequence in HEADLINES
    )  # fmt: skip


def ring_gains(name: str) -> tuple[Figure, ...]:
    """The gain over Ring Attention, which multiplies all pairs, at both lengths."""
    return tuple(
        figure_of(f"gain over Ring Attention, {sequence} positions", "%", published(sequence, "over_ring_percent"),
                  ring_ms(sequence, name).scaled(0.1) / iteration_s(sequence), of_layers(1.0), RING_REASON)
        for sequence in HEADLINES
    )  # fmt: skip


def table_figures() -> tuple[Figure, ...]:
    """What an iteration takes longer on more GPUs, and with gathers in pieces."""
    times, gathers = iterations_s(), residual_of(Regime("collective", "inter", "small", "documented", "modelled"))
    grown = times[16384 * 128, 128] - times[16384 * 16, 16]
    return (
        figure_of("an iteration of 16384 positions per GPU, 128 GPUs less 16 (Table 6)", "s", grown, grown_s(),
                  gathers, GROWN_REASON),
        figure_of("an iteration with 64 gathers instead of one, less one with one (Table 5)", "ms",
                  1e3 * split_published_s(), split_s().scaled(1e3), gathers, SPLIT_REASON),
    )  # fmt: skip


def published(sequence: int, column: str) -> float:
    """A gain in percent."""
    return next(row[column] or 0 for row in read_record(FOLDER / "headline.csv") if row["seqlen"] == sequence)


def of_layers(time_s: float) -> Residual:
    """The residual of layers that take about so long on these machines."""
    return residual_of(layer_regime(a100_nodes(8), time_s))


def _per_fabric() -> list[str]:
    parts = [f"{fabric}, {part}" for fabric in FABRICS for part in ("time", "communication")]
    return ["schedule, positions", *parts]


REPRODUCTION = Reproduction(
    "lasp2",
    "LASP-2 on 64 A100",
    "Is LASP-2 15 % faster than LASP and 37 % faster than Ring Attention on 2,097,152 positions?",
    "LASP-2, arXiv:2502.07563: the headline, Tables 5 and 6",
    f"Linear-Llama3-1B, 16 layers of 16 heads of 128, batch 1, {GPUS} A100. The fabric is not stated: predictions are "
    "for one to eight NICs of 200 Gbit/s per node, and intervals include both. Kernels have the rates of softmax "
    "attention, an assumption.",
    "gain over LASP, 2097152 positions",
    "Communication explains half of the gain over LASP at 524288 positions and less at 2097152, where likely kernels "
    "between blocking hops do the rest; the gain over Ring Attention is impossible for a ring of 64 GPUs, and Table 5 "
    "for gathers one after another.",
    find,
)
