"""Forward and backward passes of attention layers, predicted and measured, on a mesh, a switch and two nodes.

Eight processes run on an emulated fabric. Kernel calls are waits, whose rate sets the CCR: compute over communication
time of the zigzag ring, both passes together. ``python -m experiments.tables.passes`` writes
``experiments/results/passes.json`` and its table ``.md``. Each prediction uses a point-to-point calibration made before
the schedule is run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from experiments.common import RESULTS, TIMES, Record, read_record, table, write_page, write_record
from experiments.tables.on_the_fabric import Part, rate_of
from tasp_lab import validate
from tasp_lab.core.progress import print_progress as progress
from tasp_lab.prediction.answer import Answer
from tasp_lab.schedules.attention.backward import Dataflow
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.validation.validate import Run
from tasp_lab.workload.layer import Workload

LAYER = Workload(sequence=8 * 7 * 2 * 36, heads=4, kv_heads=2, head_dim=128, dtype="bf16", mask="causal")
SCHEDULES = ("zigzag-ring-attention", "tasp")
REPEATS = 3


class Case(NamedTuple):
    """A layer on a topology at a CCR, in slow motion as a `Part`."""

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
    """Write the table from the record. The speed-up of both passes is over the first schedule in the same setting."""
    rows = read_record(RESULTS / "passes.json")["rows"]
    head = (
        f"Attention layers of {LAYER.sequence} positions, {LAYER.heads} heads of {LAYER.head_dim}, {LAYER.dtype}, "
        "gradients that travel in float32, on eight emulated ranks; made by `python -m experiments.tables.passes`."
    )

    def speed_up(row: Record) -> str:
        if not row["is_sum"]:
            return ""
        ring = next(each for each in rows if each["is_sum"] and each["setting"] == row["setting"])
        predicted, measured = (ring[name] / row[name] for name in ("predicted_s", "measured_s"))
        return f"{measured:.2f} ({predicted:.2f} predicted)"

    times = {name: TIMES[name] for name in ("predicted s", "measured s", "error")}
    first = "topology, mask, KV heads, CCR, schedule"
    write_page(
        RESULTS / "passes.md",
        f"{head}\n\n{table(rows, {first: '{case}', 'pass': '{pass}', **times, 'speed-up': speed_up})}",
    )


def _rows(case: Case) -> list[Record]:
    part = Part(case.topology, replace(LAYER, mask=case.mask, kv_heads=case.kv_heads), case.slow_motion)
    options = AttentionOptions(passes="both", dataflow=case.dataflow)
    rate = rate_of(part, case.ccr, SCHEDULES[0], options)
    progress(f"{case}: {rate / 1e9:.3g} GFLOP/s")
    comparison = validate(
        part.links, SCHEDULES, part.layer, options=options, compute=rate, scale=part.scale, repeats=REPEATS,
        progress=progress,
    )  # fmt: skip
    return [_row(case, run) for run in comparison.runs]


def _row(case: Case, run: Run) -> Record:
    prediction = run.prediction
    assert isinstance(prediction, Answer), "a layer's"
    names = ("predicted_s", "measured_s", "relative_error", "cpu_busy_share")
    return {
        "case": ", ".join([case.topology, case.mask, str(case.kv_heads), str(case.ccr), prediction.schedule]),
        "setting": list(case),
        "pass": prediction.passing if prediction.dataflow is None else f"{prediction.passing}, {prediction.dataflow}",
        "is_sum": prediction.is_sum,
        **{name: run.to_dict()[name] for name in names},
    }


if __name__ == "__main__":
    main()
