"""Speed-up of TASP over one ring against the compute-to-communication ratio (CCR), predicted and measured.

Eight processes on an emulated full mesh run attention layers. Kernel calls are waits, whose rate sets the CCR: compute
over communication time of the ring. ``python -m experiments.tables.attention_curve`` writes
``experiments/results/attention_curve.json``, its table ``.md`` and its picture ``.png``.

Without contention and with equal steps an attention layer takes T = K/n + max(K(n-1)/n, C) on n ranks, where K is the
compute and C the communication time of a rank; the picture shows this law as a line. With g rings C is g times smaller.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

from matplotlib.figure import Figure

from experiments.common import RESULTS, Formats, Record, read_record, table, write_page, write_record
from experiments.tables.on_the_fabric import Fabric, Part, rate_of
from tasp_lab.core.files import write_whole
from tasp_lab.core.progress import print_progress as progress
from tasp_lab.machines.machine import ComputeRate
from tasp_lab.plots.timelines import render
from tasp_lab.schedules.attention.forward import attention
from tasp_lab.workload.layer import Workload

WORLD_SIZE = 8
RATIOS = (0.01, 0.1, 0.2, 0.39, 0.65, 1.0, 2.0)
PAIRS: dict[str, tuple[str, str]] = {"full": ("ring-attention", "tasp"), "causal": ("zigzag-ring-attention", "tasp")}
LAYER = Workload(sequence=8 * 7 * 2 * 36, batch=1, heads=4, kv_heads=4, head_dim=128, dtype="bf16", mask="full")
REPEATS = 3


def main() -> None:
    """Measure every ratio with both masks, and write the record, the table and the picture."""
    part = Part(f"full-mesh:{WORLD_SIZE}", LAYER)
    layer = {name: getattr(LAYER, name) for name in ("sequence", "batch", "heads", "kv_heads", "head_dim", "dtype")}
    with Fabric.of(part.links.scaled(part.scale)) as fabric:
        points = [_point(fabric, replace(part, layer=replace(LAYER, mask=mask)), at) for mask in PAIRS for at in RATIOS]
    document = {"topology": part.topology, "scale": part.scale, "repeats": REPEATS, "layer": layer, "points": points}
    write_record(RESULTS / "attention_curve.json", document)
    publish()


def publish() -> None:
    """Write the table and the picture from the record."""
    record = read_record(RESULTS / "attention_curve.json")
    write_whole(RESULTS / "attention_curve.png", render(_draw(record), "png"))
    write_page(RESULTS / "attention_curve.md", _table(record))


def _point(fabric: Fabric, part: Part, ratio: float) -> Record:
    """Both schedules of a mask at a CCR."""
    mask = part.layer.mask
    rate = rate_of(part, ratio, PAIRS[mask][0])
    point: Record = {"mask": mask, "ccr": ratio, "flops_per_s": rate, "law": _law(ratio, WORLD_SIZE - 1)}
    for kind, name in zip(("ring", "tasp"), PAIRS[mask], strict=True):
        schedule = attention(name, fabric.topology, part.layer)
        (run,) = fabric.runs([schedule], part.layer, REPEATS, ComputeRate(rate))
        point |= {f"{kind}_predicted_s": float(run.prediction.time_s), f"{kind}_measured_s": list(run.measured)}
    progress(f"{mask}, CCR {ratio}: predicted {_predicted(point):.2f}, measured {_measured(point):.2f}")
    return point


def _law(ratio: float, rings: int) -> float:
    """The speed-up without contention and with equal steps, by times relative to the ring's communication time."""

    def time(communication: float) -> float:
        return ratio / WORLD_SIZE + max(ratio * (WORLD_SIZE - 1) / WORLD_SIZE, communication)

    return time(1) / time(1 / rings)


def _predicted(point: Record) -> float:
    return float(point["ring_predicted_s"] / point["tasp_predicted_s"])


def _measured(point: Record) -> float:
    return float(statistics.median(point["ring_measured_s"]) / statistics.median(point["tasp_measured_s"]))


def _table(record: Record) -> str:
    columns: Formats = {
        "mask, CCR": "{mask}, {ccr}",
        "law": "{law:.2f}",
        "predicted": lambda point: f"{_predicted(point):.2f}",
        "measured": lambda point: f"{_measured(point):.2f}",
        "measured / predicted": lambda point: f"{_measured(point) / _predicted(point) - 1:+.1%}",
        "ring s, error": lambda point: _time(point, "ring"),
        "TASP s, error": lambda point: _time(point, "tasp"),
    }
    head = (
        f"Speed-up of TASP over one ring (zigzag under the causal mask) for an attention layer on {record['topology']} "
        f"emulated at scale {record['scale']:.3g}, medians of {record['repeats']} repeats, made by "
        f"`python -m experiments.tables.attention_curve` on {record['machine']['cores']} cores "
        f"({record['machine']['date']}). "
        "Law: T = K/n + max(K(n-1)/n, C). Error: predicted over measured time, less one."
    )
    return f"{head}\n\n{table(record['points'], columns)}"


def _time(point: Record, kind: str) -> str:
    measured_s = statistics.median(point[f"{kind}_measured_s"])
    return f"{measured_s:.2f}, {point[f'{kind}_predicted_s'] / measured_s - 1:+.1%}"


def _draw(record: Record) -> Figure:
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    fine = [0.01 * 1.03**step for step in range(180)]
    for mask, panel in zip(PAIRS, axes, strict=True):
        points = [point for point in record["points"] if point["mask"] == mask]
        ratios = [point["ccr"] for point in points]
        panel.plot(fine, [_law(ratio, WORLD_SIZE - 1) for ratio in fine], color="0.6", label="law")
        panel.plot(ratios, [_predicted(point) for point in points], "o", mfc="none", ms=9, label="simulated")
        panel.plot(ratios, [_measured(point) for point in points], "x", color="C3", label="measured")
        panel.set(xscale="log", xlabel="CCR of the ring", title=f"{mask} mask: TASP over {PAIRS[mask][0]}")
        panel.set_xticks([0.01, 0.1, 1, 2], ["0.01", "0.1", "1", "2"])
        panel.grid(alpha=0.3)
    axes[0].set_ylabel("speed-up")
    axes[0].legend()
    figure.suptitle(f"Attention on {record['topology']}, emulated")
    return figure


if __name__ == "__main__":
    main()
