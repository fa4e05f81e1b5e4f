"""Speed-up of TASP over one ring against the compute-to-communication ratio (CCR), predicted and measured.

Eight processes on an emulated full mesh run attention layers. Kernel calls are waits, whose rate sets the CCR: compute
over communication time of the ring. ``python -m experiments.curves.attention`` writes
``experiments/results/attention_curve.json``, its table ``.md`` and its picture ``.png``.

Without contention and with equal steps an attention layer takes T = K/n + max(K(n-1)/n, C) on n ranks, where K is the
compute and C the communication time of a rank; the picture shows this law as a line. With g rings C is g times smaller.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import replace

from matplotlib.figure import Figure

from experiments.common import RESULTS, Record, markdown_table, write_record
from runtime.calibration import calibrate
from runtime.fabric.emulated import emulate
from runtime.protocol.jobs import Ranks, RunSchedule
from runtime.protocol.records import RankRecord, duration_s
from runtime.ranks.launcher import launch
from sim.event.engine import simulate
from tasp_lab.core.files import write_whole
from tasp_lab.core.progress import print_progress as progress
from tasp_lab.machines.machine import ComputeRate, Machine
from tasp_lab.plots.timelines import render
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.forward import attention
from tasp_lab.topology.builders import full_mesh
from tasp_lab.validation.fabrics import default_scale
from tasp_lab.workload.layer import Workload

WORLD_SIZE = 8
RATIOS = (0.01, 0.1, 0.2, 0.39, 0.65, 1.0, 2.0)
PAIRS: dict[str, tuple[str, str]] = {"full": ("ring-attention", "tasp"), "causal": ("zigzag-ring-attention", "tasp")}
LAYER = Workload(sequence=8 * 7 * 2 * 36, batch=1, heads=4, kv_heads=4, head_dim=128, dtype="bf16")
REPEATS = 3


def main() -> None:
    """Measure every ratio with both masks, and write the record, the table and the picture."""
    topology = full_mesh(WORLD_SIZE)
    scale = default_scale(topology, nominal_s=1.0)
    topology = topology.scaled(scale)
    with emulate(topology) as built, launch(built.locations) as ranks:
        machine = calibrate(topology, ranks, progress).machine
        points = [point for mask in PAIRS for point in _curve(machine, ranks, mask)]
    layer = {name: getattr(LAYER, name) for name in ("sequence", "batch", "heads", "kv_heads", "head_dim", "dtype")}
    document = {"topology": topology.name, "scale": scale, "repeats": REPEATS, "layer": layer, "points": points}
    write_record(RESULTS / "attention_curve.json", document)
    publish()


def publish() -> None:
    """Write the table and the picture from the record."""
    record = json.loads((RESULTS / "attention_curve.json").read_text())
    write_whole(RESULTS / "attention_curve.md", (_table(record) + "\n").encode())
    write_whole(RESULTS / "attention_curve.png", render(_draw(record), "png"))
    print(_table(record))


def _curve(machine: Machine, ranks: Ranks, mask: str) -> list[Record]:
    schedules = [attention(name, machine.topology, replace(LAYER, mask=mask)) for name in PAIRS[mask]]
    communication_s = [float(simulate(schedule, machine).time_s) for schedule in schedules]
    flops = int(schedules[0].flops().sum(axis=0).max())
    points = []
    for ratio in RATIOS:
        rate = flops / (ratio * communication_s[0])
        point: Record = {"mask": mask, "ccr": ratio, "flops_per_s": rate, "law": _law(ratio, WORLD_SIZE - 1)}
        for schedule in schedules:
            kind = "tasp" if schedule.name == "tasp" else "ring"
            predicted_s = float(simulate(schedule, replace(machine, compute=ComputeRate(rate))).time_s)
            measured = _measure(ranks, schedule, rate, predicted_s)
            point |= {f"{kind}_predicted_s": predicted_s, f"{kind}_measured_s": measured}
        points.append(point)
        progress(f"{mask}, CCR {ratio}: predicted {_predicted(point):.2f}, measured {_measured(point):.2f}")
    return points


def _measure(ranks: Ranks, schedule: Schedule, rate: float, predicted_s: float) -> list[float]:
    """The seconds of each repeat, on the slowest rank."""
    job = RunSchedule(schedule, "auto", REPEATS, warm_ups=1, compute=ComputeRate(rate))
    results = ranks.perform(job, longest_silence_s=10 + predicted_s)
    records = [[record for record in of_rank if isinstance(record, RankRecord)]
               for of_rank in results if isinstance(of_rank, list)]  # fmt: skip
    return [duration_s([of_rank[repeat] for of_rank in records]) for repeat in range(REPEATS)]


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
    columns = ("mask, CCR", "law", "predicted", "measured", "measured / predicted", "ring s, error", "TASP s, error")
    rows = [
        (
            f"{point['mask']}, {point['ccr']}",
            f"{point['law']:.2f}",
            f"{_predicted(point):.2f}",
            f"{_measured(point):.2f}",
            f"{_measured(point) / _predicted(point) - 1:+.1%}",
            *(_time(point, kind) for kind in ("ring", "tasp")),
        )
        for point in record["points"]
    ]
    head = (
        f"Speed-up of TASP over one ring (zigzag under the causal mask) for an attention layer on {record['topology']} "
        f"emulated at scale {record['scale']:.3g}, medians of {record['repeats']} repeats, made by "
        f"`python -m experiments.curves.attention` on {record['machine']['cores']} cores "
        f"({record['machine']['date']}). "
        "Law: T = K/n + max(K(n-1)/n, C). Error: predicted over measured time, less one."
    )
    return f"{head}\n\n{markdown_table(columns, rows)}"


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
