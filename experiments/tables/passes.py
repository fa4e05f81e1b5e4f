"""Forward and backward passes of attention layers, predicted and measured, on a mesh, a switch and two nodes.

Eight processes run on an emulated fabric. Kernel calls are waits, whose rate sets the CCR: compute over communication
time of the zigzag ring, both passes together. ``python -m experiments.tables.passes`` writes
``experiments/results/passes.json`` and its table ``.md``. Each prediction uses a point-to-point calibration made before
the schedule is run.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import NamedTuple

from experiments.common import RESULTS, Record, markdown_table, write_record
from tasp_lab import predict, validate
from tasp_lab.core.files import write_whole
from tasp_lab.core.progress import print_progress as progress
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.machine import ComputeRate, Machine
from tasp_lab.prediction.answer import Answer
from tasp_lab.schedules.attention.backward import Dataflow
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.validation.fabrics import default_scale
from tasp_lab.validation.validate import Run
from tasp_lab.workload.layer import Workload

LAYER = Workload(sequence=8 * 7 * 2 * 36, heads=4, kv_heads=2, head_dim=128, dtype="bf16", mask="causal")
SCHEDULES = ("zigzag-ring-attention", "tasp")
REPEATS = 3


class Case(NamedTuple):
    """A layer on a topology at a CCR.

    `slow_motion` is an additional slow-down of the fabric: at the default scale, the ports of a switch are so fast that
    a step takes only a few times as long as its host overhead.
    """

    topology: str
    ccr: float
    mask: str = "causal"
    kv_heads: int = 2
    dataflow: Dataflow = "auto"
    slow_motion: float = 1.0


CASES = [
    *(Case("full-mesh:8", ccr) for ccr in (0.01, 0.39, 1.0)),
    Case("full-mesh:8", 0.01, mask="full"),
    Case("full-mesh:8", 0.01, kv_heads=4, dataflow="rotate-q"),
    *(Case("switch:8", ccr, slow_motion=4.0) for ccr in (0.01, 1.0)),
    *(Case("nodes:2x4", ccr) for ccr in (0.01, 1.0)),
]


def main() -> None:
    """Measure all cases, and write the record and the table."""
    rows = [row for case in CASES for row in _rows(case)]
    write_record(RESULTS / "passes.json", {"repeats": REPEATS, "sequence": LAYER.sequence, "rows": rows})
    publish()


def publish() -> None:
    """Write the table from the record."""
    rows = json.loads((RESULTS / "passes.json").read_text())["rows"]
    head = (
        f"Attention layers of {LAYER.sequence} positions, {LAYER.heads} heads of {LAYER.head_dim}, {LAYER.dtype}, "
        "gradients that travel in float32, on eight emulated ranks; made by `python -m experiments.tables.passes`."
    )
    columns = ("topology, mask, KV heads, CCR, schedule", "pass", "predicted s", "measured s", "error", "speed-up")
    table = markdown_table(columns, [_cells(row, rows) for row in rows])
    write_whole(RESULTS / "passes.md", f"{head}\n\n{table}\n".encode())
    print(table)


def _rows(case: Case) -> list[Record]:
    machine = load_machine(case.topology)
    layer = replace(LAYER, mask=case.mask, kv_heads=case.kv_heads)
    options = AttentionOptions(passes="both", dataflow=case.dataflow)
    scale = default_scale(machine.topology, nominal_s=1.0) / case.slow_motion
    scaled = Machine(machine.topology.scaled(scale), compute=ComputeRate(1e30))
    ring = predict(scaled, SCHEDULES[:1], layer, options=options)[-1]
    assert isinstance(ring, Answer), "a layer's"
    rate = ring.flops / scaled.topology.world_size / (case.ccr * float(ring.communication_s))
    progress(f"{case}: {rate / 1e9:.3g} GFLOP/s")
    comparison = validate(
        machine, SCHEDULES, layer, options=options, compute=rate, scale=scale, repeats=REPEATS, progress=progress
    )
    return [_row(case, run) for run in comparison.runs]


def _row(case: Case, run: Run) -> Record:
    prediction = run.prediction
    assert isinstance(prediction, Answer), "a layer's"
    return {
        "case": ", ".join([case.topology, case.mask, str(case.kv_heads), str(case.ccr), prediction.schedule]),
        "setting": list(case),
        "pass": prediction.passing if prediction.dataflow is None else f"{prediction.passing}, {prediction.dataflow}",
        "is_sum": prediction.is_sum,
        "predicted_s": float(prediction.time_s),
        "measured_s": run.measured_s,
        "relative_error": run.relative_error,
        "cpu_busy_share": run.cpu_busy_share,
    }


def _cells(row: Record, rows: list[Record]) -> list[str]:
    """A row of the table; the speed-up of both passes is relative to the first schedule in the same setting."""
    speed_up = ""
    if row["is_sum"]:
        ring = next(each for each in rows if each["is_sum"] and each["setting"] == row["setting"])
        predicted, measured = (ring[name] / row[name] for name in ("predicted_s", "measured_s"))
        speed_up = f"{measured:.2f} ({predicted:.2f} predicted)"
    times = [f"{row[name]:.3f}" for name in ("predicted_s", "measured_s")]
    return [row["case"], row["pass"], *times, f"{row['relative_error']:+.1%}", speed_up]


if __name__ == "__main__":
    main()
