"""The headline of LASP-2 as time per iteration: what another system's attention is predicted to take longer."""

from __future__ import annotations

from experiments.reproductions.lasp2.exchanges import (
    FABRICS,
    GPUS,
    HEAD_DIM,
    HEADLINES,
    HEADS,
    LAYERS,
    NIC_BYTES_PER_S,
    PEAK_FLOPS_PER_S,
    as_released_s,
    both_passes,
    gather_s,
    of_layers_ms,
)
from experiments.reproductions.lasp2.iterations import gap_ms, iteration_s
from experiments.reproductions.ranges import Range, Row


def headline_rows() -> list[Row]:
    """The headline as time per iteration: what the other system's attention is predicted to take longer."""
    return [row for sequence in HEADLINES for row in (*_over_lasp(sequence), *_over_ring(sequence))]


def chain_ms(sequence: int) -> Range:
    """What the chain of LASP takes longer than the gather of LASP-2, with kernels beside it."""
    return of_layers_ms(
        [float(both_passes(each, "lasp", sequence).time_s) - as_released_s(each, sequence) for each in FABRICS]
    )


def blocked_chain_ms(sequence: int) -> Range:
    """The same if every rank's kernels run between two hops."""
    return of_layers_ms([
        float(both_passes(each, "lasp", sequence).communication_s) - 2 * gather_s(each)
        + (GPUS - 1) * float(both_passes(each, "lasp", sequence).compute_s)
        for each in FABRICS
    ])  # fmt: skip


def ring_ms(sequence: int, name: str) -> Range:
    """What a ring of keys takes longer than LASP-2."""
    return of_layers_ms(
        [float(both_passes(each, name, sequence).time_s) - as_released_s(each, sequence) for each in FABRICS]
    )


def _over_lasp(sequence: int) -> list[Row]:
    published, where = gap_ms(sequence, "over_lasp1_percent"), f"LASP less LASP-2, {sequence} positions"
    chain = chain_ms(sequence)
    parts, gain = (chain / published).text(".0%"), (chain.scaled(1e-3) / iteration_s(sequence)).text("+.1%")
    return [
        Row(f"{where}, kernels beside the chain", published, chain, chain,
            f"The chain of states makes {gain}, {parts} of the gap; it does not grow with the sequence, the gap does."),
        Row(f"{where}, every rank's kernels between two hops", published, blocked_chain_ms(sequence), chain,
            "More than the gap: so part of the kernels runs between hops, as blocking calls force it, not all."),
    ]  # fmt: skip


def _over_ring(sequence: int) -> list[Row]:
    published, rows = gap_ms(sequence, "over_ring_percent"), []
    for name, how in (("ring-linear-attention-right", "by states of keys"), ("ring-linear-attention", "all pairs")):
        found = [both_passes(each, name, sequence) for each in FABRICS]
        exposed = of_layers_ms([float(each.time_s) - float(each.compute_s) for each in found])
        rows.append(Row(
            f"Ring Attention less LASP-2, {sequence} positions, {how}", published, ring_ms(sequence, name), exposed,
            "Not explained: keys that go around 64 GPUs take longer than the gap at any of these rates."
            if how != "all pairs" else
            "Not explained: the products of all pairs alone take longer than the published iteration.",
        ))  # fmt: skip
    return rows


def all_pairs_s(sequence: int) -> float:
    """The least time of an iteration that multiplies all pairs of positions, with equal shares at peak rate."""
    pair_flops = 2 * HEADS * HEAD_DIM * (2 + 5)  # two products forward, five backward
    return LAYERS * pair_flops * sequence**2 / 2 / GPUS / PEAK_FLOPS_PER_S


def keys_into_a_node_s(sequence: int, nics: int) -> float:
    """The least time of an iteration in which the keys of all other nodes come into the last one, in both passes."""
    keys_bytes = 2 * 2 * sequence * HEADS * HEAD_DIM
    return LAYERS * 2 * keys_bytes * (GPUS - 8) / GPUS / (nics * NIC_BYTES_PER_S)
