"""ZeCO's published figures (arXiv:2507.01004) beside predictions: gathers and scans of states on 8 to 256 H100.

The layer has 32 heads of 128 and, assumed, batch 1 and states in float32: 2 MiB per rank. Nodes are those of the
catalogue, with one NIC of 400 Gbit/s per GPU, which the notes on the paper do not state.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from experiments.reproductions.ranges import read_record
from sim.simulate import simulate
from tasp_lab import Workload, predict
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.libraries.library import CommLibrary
from tasp_lab.machines.machine import INSTANT, Machine
from tasp_lab.prediction.interval import Interval
from tasp_lab.prediction.results import LayerPrediction
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import linear_schedules

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
    """The same in milliseconds."""
    return 1e3 * library_gather(gpus, size_bytes).time_s


@cache
def forward_ms(gpus: int, schedule: str, library: str = "auto", pieces: int | None = None) -> float:
    """The communication of a forward pass by a schedule."""
    machine = h100(gpus, library)
    if schedule == "multi-ring-lasp-2":  # on rings that the simulation finds
        prediction = predict(machine, schedule, layer(gpus), events=False)[-1]
        assert isinstance(prediction, LayerPrediction)
        return 1e3 * float(prediction.communication_s)
    options = AttentionOptions(pieces=pieces) if pieces else AttentionOptions()
    (found,) = linear_schedules(schedule, machine.topology, layer(gpus), None, options)
    return 1e3 * float(simulate(found, machine, events=False).time_s)


def best_scan_ms(gpus: int, library: str = "auto") -> tuple[float, int]:
    """All-Scan with the fastest number of pieces, and that number."""
    return min((forward_ms(gpus, "all-scan", library, pieces), pieces) for pieces in PIECES)


def published(column: str) -> dict[int, float]:
    """A column of the table by GPUs."""
    found = {int(row["gpus"] or 0): row[column] for row in read_record(FOLDER / "scans.csv")}
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
