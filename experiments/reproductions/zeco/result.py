"""ZeCO's gathers and scans of states, and what they add to the operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

from experiments.common import markdown_table
from experiments.reproductions.reproduction import (
    Check,
    Figure,
    Found,
    Range,
    Trial,
    checks_text,
    figure_of,
    numbers_of,
)
from sim.simulate import simulate
from tasp_lab import Workload, predict
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.libraries.library import CommLibrary
from tasp_lab.machines.machine import INSTANT, Machine
from tasp_lab.measure.accuracy import own_tables
from tasp_lab.measure.readers.table import read_table
from tasp_lab.prediction.answer import Answer
from tasp_lab.prediction.interval import Interval, residual_interval
from tasp_lab.prediction.residuals import layer_regime, residual_of
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import linear_schedules

# ZeCO's published figures (arXiv:2507.01004) beside predictions: gathers and scans of states on 8 to 256 H100.
#
# The layer has 32 heads of 128 and, assumed, batch 1 and states in float32: 2 MiB per rank. Nodes are those of the
# catalogue, with one NIC of 400 Gbit/s per GPU, which the notes on the paper do not state.


FOLDER = Path(__file__).parent
GPUS = (8, 16, 32, 64, 128, 256)
HEADS, HEAD_DIM, POSITIONS_PER_GPU = 32, 128, 8192
STATE_BYTES = 4 * HEADS * HEAD_DIM**2
PIECES = (1, 2, 4, 8, 16, 32)
SCHEDULES = ("lasp", "lasp-2", "multi-ring-lasp-2", "direct-lasp-2")
ONE_NODE, TEN_NODES = "h100_xxrjun_1x8_all_gather", "h100_xxrjun_10x8_all_gather"
"""Measurements of others on H100."""

HOP_S = 8e-6
HOPS = CommLibrary("hops", HOP_S)
"""What each further GPU adds to the published scan, 7 to 9 us, and a library whose messages take that."""

MAX_DIRECT_GPUS = 64
"""With more, ``direct-lasp-2`` has tens of thousands of messages at once, which take minutes to simulate."""


@cache
def h100(gpus: int, library: str = "auto") -> Machine:
    """Nodes of eight H100 whose kernels take no time; with the library `HOPS` a message takes `HOP_S` to launch."""
    name = "h100-8" if gpus == 8 else f"h100-{gpus // 8}x8"
    if library == HOPS.name:
        return replace(load_machine(name, library="ideal"), comm_library=HOPS, compute=INSTANT)
    return replace(load_machine(name, library=library), compute=INSTANT)


def layer(gpus: int) -> Workload:
    """The layer of the table of gathers."""
    return Workload(POSITIONS_PER_GPU * gpus, 1, HEADS, HEADS, HEAD_DIM, "bf16", "causal", kind="linear")


@cache
def library_gather(gpus: int, size_bytes: int = STATE_BYTES) -> Interval:
    """NCCL's AllGather."""
    found = predict(h100(gpus), "library-ring", size_bytes)[-1].interval
    assert found is not None, "intervals were asked for"
    return found


def library_gather_ms(gpus: int, size_bytes: int = STATE_BYTES) -> float:
    """The time of NCCL's AllGather in milliseconds."""
    return 1e3 * library_gather(gpus, size_bytes).time_s


@cache
def forward_ms(gpus: int, schedule: str, library: str = "auto", pieces: int | None = None) -> float:
    """The communication of a forward pass by a schedule."""
    machine = h100(gpus, library)
    if schedule == "multi-ring-lasp-2":  # on rings that the simulation finds
        prediction = predict(machine, schedule, layer(gpus), events=False)[-1]
        assert isinstance(prediction, Answer)
        return 1e3 * float(prediction.communication_s)
    options = AttentionOptions(pieces=pieces) if pieces else AttentionOptions()
    (found,) = linear_schedules(schedule, machine.topology, layer(gpus), None, options)
    return 1e3 * float(simulate(found, machine, events=False).time_s)


def best_scan_ms(gpus: int, library: str = "auto") -> tuple[float, int]:
    """All-Scan with the fastest number of pieces, and that number."""
    return min((forward_ms(gpus, "all-scan", library, pieces), pieces) for pieces in PIECES)


def published(column: str) -> dict[int, float]:
    """A column of the table by GPUs."""
    found = {int(row["gpus"] or 0): row[column] for row in numbers_of(FOLDER / "scans.csv")}
    return {gpus: value for gpus, value in found.items() if value is not None}


def schedule_table() -> list[list[str]]:
    """Communication of one exchange in ms, by GPUs: as published, NCCL's AllGather, and the schedules."""
    cells = []
    for gpus in GPUS:
        ours = [
            f"{forward_ms(gpus, each):.3g}" if each != "direct-lasp-2" or gpus <= MAX_DIRECT_GPUS else ""
            for each in SCHEDULES
        ]
        scans = [f"{time:.3g} ({pieces})" for time, pieces in (best_scan_ms(gpus), best_scan_ms(gpus, "ideal"))]
        cells.append([str(gpus), f"{published('allgather_ms')[gpus]}", f"{library_gather_ms(gpus):.3g}", *ours,
                      f"{published('allscan_ms')[gpus]}", *scans])  # fmt: skip
    return cells


# ZeCO's tables held against each other and against measurements of others.


def checks() -> list[Check]:
    """The tables held against each other and against measurements of others."""
    gathers, scans = published("allgather_ms"), published("allscan_ms")
    chains = {gpus: forward_ms(gpus, "lasp") for gpus in (8, 32, 128)}
    one_node_ms, ten_nodes_ms = measured_ms(ONE_NODE, 2**25), measured_ms(TEN_NODES, 2**27)
    of_8_mib = ", ".join(f"{library_gather_ms(gpus, 2**23):.2f}" for gpus in GPUS)
    lasp2, zeco = (
        ", ".join(f"{each:.0f}" for each in exchanges(published(system), published("data_parallel_bound"), exchange))
        for system, exchange in (("lasp2", gathers), ("zeco", scans))
    )
    return [
        Check("8 GPUs gather 2 MiB each in 0.375 ms, 64 in 2.543 ms.",
              f"nccl-tests on 8 other H100 gathered twice the bytes in {one_node_ms:.3f} ms, and 80 H100 as many bytes "
              f"as these 64 in {ten_nodes_ms:.2f} ms.",
              "At least three times a bare AllGather, in a node and between nodes, so slower links do not explain it."),
        Check("Bytes of the gather.",
              f"From 128 to 256 GPUs each rank's share takes {1e3 * (gathers[256] - gathers[128]) / 128:.1f} us; NCCL "
              f"is predicted to gather 8 MiB per rank instead of 2 MiB in {of_8_mib} ms.",
              "An inference, not a prediction: four to eight times the bytes would fit, as would other work per rank."),
        Check("A hop of All-Scan.",
              f"From 8 to 256 GPUs each further GPU adds {', '.join(f'{x:.1f}' for x in _steps_us(scans))} us, of "
              "which a NIC needs 1.3 us for a piece of 64 KiB, and NVLink 0.15 us.",
              "Latency, alike inside nodes and between them; NCCL's model counts 15 to 22 us to launch a message."),
        Check("tau + (P - 1) tau / K for All-Scan.",
              f"Times of P - 2 + K equal hops fit with K = {fitted_pieces(scans):.0f}, within "
              f"{_worst_fit(scans):.0%}.",
              "Confirmed: the published times have the form of a pipeline, as `all-scan` has."),
        Check("What sequence parallelism adds to the operator, 16384 positions per GPU, is communication.",
              f"One to two exchanges are {operator_share('lasp1', chains).text('.0%')} of it for LASP (predicted "
              f"chains), {operator_share('lasp2', gathers).text('.0%')} for LASP-2 (published gathers) and "
              f"{operator_share('zeco', scans).text('.0%')} for ZeCO (published scans).",
              "For LASP and LASP-2 most of it is not, already inside one node."),
        Check("Tokens per second and GPU, 32768 positions per GPU, against data parallelism alone.",
              f"What an iteration takes longer, beyond that on 8 GPUs, is as long as {lasp2} published gathers (LASP-2 "
              f"on 64, 128 and 256 GPUs), and {zeco} scans (ZeCO).",
              "The exchange explains the growth if there are that many exchanges, two for each of 16 to 30 layers."),
    ]  # fmt: skip


def operator_share(system: str, exchange_ms: Mapping[int, float]) -> Range:
    """The share that one to two exchanges have in what a system adds to the operator, on all numbers of GPUs."""
    shares = []
    for row in numbers_of(FOLDER / "operator.csv"):
        added_ms, one_ms = (row[system] or 0) - (row["no_sp"] or 0), exchange_ms[int(row["gpus"] or 0)]
        shares += [one_ms / added_ms, 2 * one_ms / added_ms]
    return Range.of(*shares)


def measured_ms(table: str, size_bytes: int) -> float:
    """The measured time of the size that comes closest."""
    rows = read_table(own_tables() / f"{table}.csv").rows
    return 1e3 * min(rows, key=lambda row: abs(row.size_bytes - size_bytes)).time_s


def _steps_us(times_ms: dict[int, float]) -> list[float]:
    sizes = sorted(times_ms)
    return [1e3 * (times_ms[b] - times_ms[a]) / (b - a) for a, b in pairwise(sizes)]


def fitted_pieces(times_ms: dict[int, float]) -> float:
    """The pieces K with which the first and the last time are those of P - 2 + K equal hops."""
    first, last = min(times_ms), max(times_ms)
    ratio = times_ms[last] / times_ms[first]
    return (last - 2 - ratio * (first - 2)) / (ratio - 1)


def _worst_fit(times_ms: dict[int, float]) -> float:
    pieces, last = fitted_pieces(times_ms), max(times_ms)
    hop_ms = times_ms[last] / (last - 2 + pieces)
    return max(abs((gpus - 2 + pieces) * hop_ms / time - 1) for gpus, time in times_ms.items())


def exchanges(
    tokens_per_s: Mapping[int, float], bound_tokens_per_s: Mapping[int, float], exchange_ms: Mapping[int, float]
) -> list[float]:
    """How many exchanges take as long as an iteration's loss against data parallelism grows from 8 GPUs on.

    Throughputs are per GPU, with 32768 positions on each.
    """
    loss_ms = {gpus: 32768e3 * (1 / tokens_per_s[gpus] - 1 / bound_tokens_per_s[gpus]) for gpus in tokens_per_s}
    return [(loss_ms[n] - loss_ms[8]) / (exchange_ms[n] - exchange_ms[8]) for n in sorted(loss_ms) if n > 8]


GATHER_REASON = (
    "three times as long as nccl-tests on 8 other H100 for twice the bytes: more than these bytes moved, or more than "
    "the gather was timed"
)
SCAN_REASON = "a hop of the paper's own kernel takes 7 to 9 us: less than a launched message of NCCL, more than wires"
OPERATOR_REASON = "most of it is no communication, already inside one node"


def find() -> Found:
    """Predict gathers, scans and the operator, and hold the tables against each other."""
    claims = checks()
    figures = (*gathers(), *scans(), *operator())
    trials = (
        Trial("scans on wires alone, without a library", scans(), scans("ideal"),
              "too fast: a hop is no launch of NCCL, but not free"),
        Trial("scans whose hops take 8 us and the wires", scans(), scans(HOPS.name), "the cost of a hop explains them"),
        Trial("gathers of 8 MiB instead of 2 MiB", gathers(), gathers(2**23), "as if four times the bytes were moved"),
    )  # fmt: skip
    sections = (
        "## All schedules\n\nMilliseconds; of All-Scan with the best number of pieces.\n\n"
        + markdown_table(_COLUMNS, schedule_table()),
        f"## Tables held against each other\n\n{checks_text(claims)}",
    )
    return Found(figures, trials, sections, {"checks": [vars(each) for each in claims]})


def gathers(size_bytes: int | None = None) -> tuple[Figure, ...]:
    """NCCL's AllGather of the states, or of other bytes."""
    sizes = () if size_bytes is None else (size_bytes,)
    return tuple(
        Figure.of(f"AllGather, {gpus} GPUs", time_ms, library_gather(gpus, *sizes), GATHER_REASON)
        for gpus, time_ms in published("allgather_ms").items()
    )


def scans(library: str = "auto") -> tuple[Figure, ...]:
    """All-Scan with the best number of pieces."""
    return tuple(
        Figure.of(f"All-Scan, {gpus} GPUs", time_ms, residual_interval(time_s, layer_regime(h100(gpus), 1.0), ""),
                  SCAN_REASON)
        for gpus, time_ms in published("allscan_ms").items()
        for time_s in [best_scan_ms(gpus, library)[0] / 1e3]
    )  # fmt: skip


def operator() -> tuple[Figure, ...]:
    """What each system adds to the operator: one to two exchanges."""
    found = []
    for row in numbers_of(FOLDER / "operator.csv"):
        gpus = int(row["gpus"] or 0)
        once = {"lasp1": forward_ms(gpus, "lasp"), "lasp2": library_gather_ms(gpus), "zeco": best_scan_ms(gpus)[0]}
        found += [
            figure_of(f"{system} operator less that without, {gpus} GPUs", "ms",
                      (row[system] or 0) - (row["no_sp"] or 0), Range(time_ms, 2 * time_ms),
                      residual_of(layer_regime(h100(gpus), 1.0)), OPERATOR_REASON)
            for system, time_ms in once.items()
        ]  # fmt: skip
    return tuple(found)


_COLUMNS = (
    "GPUs", "AllGather published", "NCCL's AllGather", *SCHEDULES, "All-Scan published", "all-scan, NCCL (pieces)",
    "all-scan, wires (pieces)",
)  # fmt: skip
