"""ZeCO's gathers and scans of states, and what they add to the operator."""

from __future__ import annotations

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
from sim.simulate import simulate
from tasp_lab import Workload, predict
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.libraries.library import CommLibrary
from tasp_lab.machines.machine import INSTANT, Machine
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
HOP_S = 8e-6
HOPS = CommLibrary("hops", HOP_S)
"""What each further GPU adds to the published scan, 7 to 9 us, and a library whose messages take that."""


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


GATHER_REASON = (
    "three times as long as nccl-tests on 8 other H100 for twice the bytes: more than these bytes moved, or more than "
    "the gather was timed"
)
SCAN_REASON = "a hop of the paper's own kernel takes 7 to 9 us: less than a launched message of NCCL, more than wires"
OPERATOR_REASON = "most of it is no communication, already inside one node"


def find() -> Found:
    """Predict gathers, scans and the operator."""
    figures = (*gathers(), *scans(), *operator())
    trials = (
        Trial("scans on wires alone, without a library", scans(), scans("ideal"),
              "too fast: a hop is no launch of NCCL, but not free"),
        Trial("scans whose hops take 8 us and the wires", scans(), scans(HOPS.name), "the cost of a hop explains them"),
        Trial("gathers of 8 MiB instead of 2 MiB", gathers(), gathers(2**23), "as if four times the bytes were moved"),
    )  # fmt: skip
    return Found(figures, trials)


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
