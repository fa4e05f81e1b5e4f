"""ZeCO's gathers and scans of states, and what they add to the operator."""

from __future__ import annotations

from experiments.common import markdown_table
from experiments.reproductions.ranges import Range, checks_text, figure_of, read_record, rows_text
from experiments.reproductions.reproduction import Figure, Found, Reproduction, Trial
from experiments.reproductions.zeco.checks import checks
from experiments.reproductions.zeco.exchanges import (
    FOLDER,
    HOPS,
    SCHEDULES,
    best_scan_ms,
    forward_ms,
    h100,
    library_gather,
    library_gather_ms,
    published,
    schedule_table,
)
from experiments.reproductions.zeco.rows import gather_rows, operator_rows, scan_rows
from tasp_lab.prediction.interval import residual_interval
from tasp_lab.prediction.residual_fit import residual_of
from tasp_lab.prediction.residuals import layer_regime

GATHER_REASON = (
    "three times as long as nccl-tests on 8 other H100 for twice the bytes: more than these bytes moved, or more than "
    "the gather was timed"
)
SCAN_REASON = "a hop of the paper's own kernel takes 7 to 9 us: less than a launched message of NCCL, more than wires"
OPERATOR_REASON = "most of it is no communication, already inside one node"

OPERATOR = """\
What sequence parallelism adds to the operator of gated linear attention, 16384 positions per GPU. Which passes were \
timed is not known: communication is one to two of the published exchanges, for `lasp1` of the predicted chain; \
predicted are NCCL's AllGather, `all-scan` with the best number of pieces, and `lasp`."""


def find() -> Found:
    """Predict gathers, scans and the operator, and hold the tables against each other."""
    rows, operators, claims = [*gather_rows(), *scan_rows()], operator_rows(), checks()
    figures = (*gathers(), *scans(), *operator())
    trials = (
        Trial("scans on wires alone, without a library", scans(), scans("ideal"),
              "too fast: a hop is no launch of NCCL, but not free"),
        Trial("scans whose hops take 8 us and the wires", scans(), scans(HOPS.name), "the cost of a hop explains them"),
        Trial("gathers of 8 MiB instead of 2 MiB", gathers(), gathers(2**23), "as if four times the bytes were moved"),
    )  # fmt: skip
    sections = (
        f"## Gathers and scans as ranges\n\n{rows_text(rows)}",
        "All schedules, ms; of All-Scan with the best number of pieces.\n\n"
        + markdown_table(_COLUMNS, schedule_table()),
        f"## Operator\n\n{OPERATOR}\n\n{rows_text(operators)}",
        f"## Tables held against each other\n\n{checks_text(claims)}",
    )
    record = {
        "ranges": [each.record() for each in (*rows, *operators)],
        "checks": [each.record() for each in claims],
    }
    return Found(figures, trials, sections, record)


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
        Figure.of(f"All-Scan, {gpus} GPUs", time_ms, residual_interval(time_s, layer_regime(h100(gpus), time_s), ""),
                  SCAN_REASON)
        for gpus, time_ms in published("allscan_ms").items()
        for time_s in [best_scan_ms(gpus, library)[0] / 1e3]
    )  # fmt: skip


def operator() -> tuple[Figure, ...]:
    """What each system adds to the operator: one to two exchanges."""
    found = []
    for row in read_record(FOLDER / "operator.csv"):
        gpus = int(row["gpus"] or 0)
        once = {"lasp1": forward_ms(gpus, "lasp"), "lasp2": library_gather_ms(gpus), "zeco": best_scan_ms(gpus)[0]}
        found += [
            figure_of(f"{system} operator less that without, {gpus} GPUs", "ms",
                      (row[system] or 0) - (row["no_sp"] or 0), Range(time_ms, 2 * time_ms),
                      residual_of(layer_regime(h100(gpus), time_ms / 1e3)), OPERATOR_REASON)
            for system, time_ms in once.items()
        ]  # fmt: skip
    return tuple(found)


_COLUMNS = (
    "GPUs", "AllGather published", "NCCL's AllGather", *SCHEDULES, "All-Scan published", "all-scan, NCCL (pieces)",
    "all-scan, wires (pieces)",
)  # fmt: skip

REPRODUCTION = Reproduction(
    "zeco",
    "ZeCO's scan on 8 to 256 H100",
    "How much shorter is a scan of states than their gather on 8 to 256 H100?",
    "ZeCO, arXiv:2507.01004, read through third-party notes",
    "One exchange of states of 2 MiB: 32 heads of 128, float32, batch 1; H100 with eight NICs of 400 Gbit/s per node, "
    "which the notes do not state. NCCL's AllGather and `all-scan` with the best number of pieces.",
    "All-Scan, 256 GPUs",
    "The gather takes four to six times as long as NCCL's own of these bytes, as if it had moved four times as many;"
    " the scan is predicted 1.5 to 3.6 times too long, since a launched message of NCCL costs more than a hop of 8 "
    "us inside a kernel; so the order of both is missed, but not what ZeCO adds to its operator.",
    find,
)
