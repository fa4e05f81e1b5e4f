"""LASP-2's gains over LASP and Ring Attention on 64 A100, and its Tables 5 and 6."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

from experiments.reproductions.reproduction import (
    Figure,
    Found,
    Range,
    Trial,
    figure_of,
    numbers_of,
)
from tasp_lab import Workload, predict
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.libraries.channels import ChannelLibrary, channel_rule, halved
from tasp_lab.machines.machine import Machine
from tasp_lab.prediction.answer import Answer
from tasp_lab.prediction.residuals import Regime, residual_of
from tasp_lab.topology.graph import SharedCapacity

# Published iterations of LASP-2 (arXiv:2502.07563), and how much longer those of other systems take.


FOLDER = Path(__file__).parent
OF_LAYERS = residual_of(Regime("layer", "inter", "exposed", "documented", "modelled"))
"""The residual of layers over nodes whose messages are not hidden: gains are those of messages."""


@cache
def iterations_s() -> dict[tuple[int, int], float]:
    """The time of an iteration by sequence and GPUs, from Table 6: positions over throughput."""
    return {
        (int(row["seqlen"] or 0), gpus): (row["seqlen"] or 0) / tokens_per_s
        for row in numbers_of(FOLDER / "throughput.csv")
        for gpus in (16, 32, 64, 128)
        if (tokens_per_s := row[f"gpus{gpus}"]) is not None
    }


def iteration_s(sequence: int) -> Range:
    """An iteration of LASP-2 on 64 GPUs; where Table 6 has none, from that of half the positions to twice its time.

    More positions take no less time, and in Table 6 the throughput never falls with the length. Of
    1048576 positions there are two times, in Tables 5 and 6.
    """
    times = iterations_s()
    if (sequence, GPUS) in times:
        return Range.of(times[sequence, GPUS])
    half = sequence // 2
    by_table5 = half / max(row["tokens_per_s"] or 0 for row in numbers_of(FOLDER / "split.csv"))
    return Range(by_table5, 2 * times[half, GPUS])


def gap_ms(sequence: int, column: str) -> Range:
    """How much longer than LASP-2's an iteration of another system takes."""
    row = next(each for each in numbers_of(FOLDER / "headline.csv") if each["seqlen"] == sequence)
    return iteration_s(sequence).scaled(10 * (row[column] or 0))


# Predicted exchanges and layers of LASP-2's model on 64 A100.
#
# The model is Linear-Llama3-1B: 16 layers of linear attention with 16 heads of 128, batch 1. The paper does not say how
# its nodes are joined, so predictions are ranges from one NIC of 200 Gbit/s per node to eight.


LAYERS, HEADS, HEAD_DIM, GPUS = 16, 16, 128, 64
STATE_BYTES = 4 * HEADS * HEAD_DIM**2
FABRICS = {"1 x 200 Gbit/s": 1, "8 x 200 Gbit/s": 8}
"""NICs per node, assumed."""

PEAK_FLOPS_PER_S = 312e12
"""An A100's dense peak in bf16 (NVIDIA A100 Tensor Core GPU data sheet), an upper limit of any kernel."""

NIC_BYTES_PER_S, NIC_RING_BYTES_PER_S = 25e9, 24e9
"""200 Gbit/s, and what NCCL counts on of it for its rings (``nic_ring_rate`` of the profile)."""

HEADLINES = (524288, 2097152)


def a100_nodes(nics: int, gpus: int = GPUS) -> Machine:
    """Nodes of eight A100 with one NIC per GPU, as in the catalogue, or one for all eight."""
    machine = load_machine(f"a100-{gpus // 8}x8")
    library, topology = machine.comm_library, machine.topology
    assert isinstance(library, ChannelLibrary)
    if nics == 8:
        return machine
    assert nics == 1, "one NIC per GPU or per node"
    shared = [
        SharedCapacity(f"NIC {way} node {node}", NIC_BYTES_PER_S, names)
        for node in range(gpus // 8)
        for way, names in (
            ("of", tuple(f"{rank}->network" for rank in range(8 * node, 8 * node + 8))),
            ("into", tuple(f"network->{rank}" for rank in range(8 * node, 8 * node + 8))),
        )
    ]
    channels = 2  # NCCL's channels_per_nic
    rule = channel_rule(gpus, channels, halved(2, -(-gpus // 8), channels))
    library = replace(library, ring_bytes_per_s=NIC_RING_BYTES_PER_S, rule=rule)
    topology = replace(topology, name=f"{topology.name}, one NIC per node", shared=tuple(shared))
    return replace(machine, topology=topology, comm_library=library)


def layer(sequence: int) -> Workload:
    """One layer of attention of the model."""
    return Workload(sequence, 1, HEADS, HEADS, HEAD_DIM, "bf16", "causal", kind="linear")


@cache
def both_passes(fabric: str, schedule: str, sequence: int) -> Answer:
    """Both passes of a layer by a schedule, as published: nothing trimmed, gradients of keys in 16 bits."""
    options: dict[str, object] = {} if schedule in ("lasp", "all-scan") else {"trim": False}
    if schedule.startswith("ring"):
        options["gradient_dtype"] = "input"
    found = predict(
        a100_nodes(FABRICS[fabric]), schedule, layer(sequence), passes="both", events=False, samples=0, **options,  # type: ignore[arg-type]
    )[-1]  # fmt: skip
    assert isinstance(found, Answer)
    return found


@cache
def gather_s(fabric: str, size_bytes: int = STATE_BYTES, gpus: int = GPUS) -> float:
    """NCCL's AllGather of so many bytes per rank."""
    return float(predict(a100_nodes(FABRICS[fabric], gpus), "library-ring", size_bytes, samples=0)[-1].time_s)


def as_released_s(fabric: str, sequence: int) -> float:
    """Both passes of LASP-2 as in its released code: NCCL's AllGather, which blocks, and the kernels after it."""
    return 2 * gather_s(fabric) + float(both_passes(fabric, "lasp", sequence).compute_s)


def of_layers_ms(values_s: list[float]) -> Range:
    """A time of one layer in seconds on each fabric, for all layers, in ms."""
    return Range.of(*(1e3 * LAYERS * each for each in values_s))


# The headline of LASP-2 as time per iteration: what another system's attention is predicted to take longer.


def chain_ms(sequence: int) -> Range:
    """What the chain of LASP takes longer than the gather of LASP-2, with kernels beside it."""
    return of_layers_ms(
        [float(both_passes(each, "lasp", sequence).time_s) - as_released_s(each, sequence) for each in FABRICS]
    )


def blocked_chain_ms(sequence: int) -> Range:
    """What the chain of LASP takes longer if the kernels of every rank run between two hops."""
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


# Tables 5 and 6 of LASP-2 (arXiv:2502.07563) beside predictions.


def grown_s() -> Range:
    """How much longer the gathers of an iteration take on 128 GPUs than on 16."""
    return Range.of(*(2 * LAYERS * (gather_s(each, gpus=128) - gather_s(each, gpus=16)) for each in FABRICS))


def split_s() -> Range:
    """How much longer the gathers of an iteration take in 64 pieces each."""
    return Range.of(*(2 * LAYERS * (64 * gather_s(each, STATE_BYTES // 64) - gather_s(each)) for each in FABRICS))


def split_published_s() -> float:
    """How much an iteration changes between one gather and 64."""
    split = [row["tokens_per_s"] or 0 for row in numbers_of(FOLDER / "split.csv")]
    return 1048576 * (1 / min(split) - 1 / max(split))


CHAIN_REASON = "the gain grows with the sequence, as kernels between the hops of a blocking chain do"
RING_REASON = (
    "a ring of 64 GPUs that multiplies all pairs takes longer than the published iteration even at peak rate, so the "
    "baseline did something else"
)
GROWN_REASON = "more than gathers grows with the number of GPUs, a quarter at most with one NIC per node"
SPLIT_REASON = "63 more gathers, each a call, cannot cost so little, so they were not made one after another"


def find() -> Found:
    """Predict the gains, and what grows with GPUs and pieces."""
    gains, rings = gains_of(chain_ms), ring_gains("ring-linear-attention")
    trials = (
        Trial("every rank's kernels between two hops of LASP", gains, gains_of(blocked_chain_ms),
              "too much: so part of the kernels runs there, not all"),
        Trial("Ring Attention by states of keys", rings, ring_gains("ring-linear-attention-right"),
              "keys alone take too long"),
    )  # fmt: skip
    return Found((*gains, *rings, *table_figures()), trials)


def gains_of(gap: Callable[[int], Range]) -> tuple[Figure, ...]:
    """The gain over LASP at both lengths, in percent of an iteration of LASP-2."""
    return tuple(
        figure_of(f"gain over LASP, {sequence} positions", "%", published(sequence, "over_lasp1_percent"),
                  gap(sequence).scaled(0.1) / iteration_s(sequence), OF_LAYERS, CHAIN_REASON)
        for sequence in HEADLINES
    )  # fmt: skip


def ring_gains(name: str) -> tuple[Figure, ...]:
    """The gain over Ring Attention, which multiplies all pairs, at both lengths."""
    return tuple(
        figure_of(f"gain over Ring Attention, {sequence} positions", "%", published(sequence, "over_ring_percent"),
                  ring_ms(sequence, name).scaled(0.1) / iteration_s(sequence), OF_LAYERS, RING_REASON)
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
    return next(row[column] or 0 for row in numbers_of(FOLDER / "headline.csv") if row["seqlen"] == sequence)
