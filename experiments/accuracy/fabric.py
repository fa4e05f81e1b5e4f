"""Prediction against measurement on the emulated fabric, for held-out topologies, schedules and sizes.

Each fabric is calibrated only by point-to-point messages; then every collective that it supports is predicted and run.
``python -m experiments.accuracy.fabric [TOPOLOGY ...]`` writes ``experiments/accuracy/fabrics/TOPOLOGY.json`` after
each topology, and the table ``experiments/accuracy/fabric.md`` from all existing files. All topologies take seven
minutes on two idle cores.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.common import Record, markdown_table, write_record
from runtime.calibration import Calibration, calibrate
from runtime.fabric.emulated import emulate
from runtime.protocol.jobs import Ranks, RunSchedule
from runtime.protocol.records import RankRecord, duration_s
from runtime.ranks.launcher import launch
from sim.simulate import simulate
from tasp_lab.core.errors import NoDecompositionError, NoRouteError, ScheduleError
from tasp_lab.core.files import write_whole
from tasp_lab.core.progress import print_progress as progress
from tasp_lab.core.units import format_size
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.machine import Machine
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.build import collective
from tasp_lab.topology.graph import Topology
from tasp_lab.validation.fabrics import default_scale

TOPOLOGIES = ("full-mesh:6", "switch:6", "nodes:2x3", "nodes:3x2:switch", "torus:3x2", "ring:5", "hypercube:3")
SCHEDULES = (
    "ring", "multi-ring", "direct", "all-to-all", "send-recv", "ring-reduce-scatter", "ring-all-reduce",
)  # fmt: skip
SIZES_BYTES = (384 * 2**10, 2**20)
REPEATS = 3
FOLDER = Path(__file__).parent


def main() -> None:
    """Measure the topologies of the command line, by default all, and write the table."""
    for text in sys.argv[1:] or TOPOLOGIES:
        write_record(_file(text), measure_topology(text))
    records = [json.loads(_file(text).read_text()) for text in TOPOLOGIES if _file(text).exists()]
    table = fabric_text(records)
    write_whole(FOLDER / "fabric.md", (table + "\n").encode())
    print(table)


def _file(topology: str) -> Path:
    return FOLDER / "fabrics" / f"{topology.replace(':', '-')}.json"


def measure_topology(text: str) -> Record:
    """Calibrate the fabric of a topology, then predict and run all schedules that it supports, in both sizes."""
    nominal = load_machine(text).topology
    work = [(name, size) for name in SCHEDULES for size in SIZES_BYTES]
    schedules = [(size, schedule) for name, size in work if (schedule := buildable(name, nominal, size)) is not None]
    ideal = Machine(nominal)
    at_full_speed_s = (REPEATS + 1) * sum(float(simulate(schedule, ideal).time_s) for _, schedule in schedules)
    scale = default_scale(nominal, at_full_speed_s)
    progress(f"{text}: {len(schedules)} runs at scale {scale:.3g}, about {at_full_speed_s / scale:.0f} s")
    topology = nominal.scaled(scale)
    with emulate(topology) as built, launch(built.locations) as ranks:
        calibration = calibrate(topology, ranks, progress)
        runs = [_run(ranks, calibration, schedule, size) for size, schedule in schedules]
    return {"topology": text, "scale": scale, "repeats": REPEATS, "runs": runs}


def buildable(name: str, topology: Topology, size_bytes: int) -> Schedule | None:
    """The schedule by name, or None if the topology has no ring, decomposition or route for it."""
    try:
        schedule = collective(name, topology, size_bytes)
        schedule.check_routes(topology)
    except (ScheduleError, NoRouteError, NoDecompositionError):
        return None
    return schedule


def _run(ranks: Ranks, calibration: Calibration, schedule: Schedule, size_bytes: int) -> Record:
    predicted_s = float(simulate(schedule, calibration.machine).time_s)
    job = RunSchedule(schedule, "auto", REPEATS, warm_ups=1)
    results = ranks.perform(job, longest_silence_s=10 + predicted_s)
    records = [[record for record in of_rank if isinstance(record, RankRecord)]
               for of_rank in results if isinstance(of_rank, list)]  # fmt: skip
    measured = [duration_s([of_rank[repeat] for of_rank in records]) for repeat in range(REPEATS)]
    error = predicted_s / statistics.median(measured) - 1
    progress(f"{schedule.name}, {format_size(size_bytes)}: predicted {predicted_s:.4g} s, error {error:+.1%}")
    return {
        "schedule": schedule.name,
        "size_bytes": size_bytes,
        "predicted_s": predicted_s,
        "measured_s": measured,
        "relative_error": error,
        "busy_share": statistics.mean(record.busy_share for record in records[0]),
    }


def fabric_text(records: Sequence[Record]) -> str:
    """The median and worst error of all runs, and a table of all runs, in Markdown."""
    errors = [abs(run["relative_error"]) for record in records for run in record["runs"]]
    columns = ("topology, schedule", "bytes", "predicted s", "measured s", "spread s", "error", "cores busy")
    rows = [_row(record["topology"], run) for record in records for run in record["runs"]]
    dates = ", ".join(sorted({record["machine"]["date"] for record in records}))
    return (
        f"{len(errors)} runs on fabrics of {len(records)} topologies: median error {statistics.median(errors):.1%}, "
        f"worst {max(errors):.1%}.\n\n"
        f"Medians of {REPEATS} repeats after one to warm up, made by `python -m experiments.accuracy.fabric` on "
        f"{records[0]['machine']['cores']} cores ({dates}). Bytes: a rank's shard, a chunk "
        "or a message. Predicted from messages between pairs of ranks of the same fabric. Spread: slowest minus "
        f"fastest repeat.\n\n{markdown_table(columns, rows)}"
    )


def _row(topology: str, run: Record) -> tuple[str, ...]:
    return (
        f"{topology}, {run['schedule']}",
        format_size(run["size_bytes"]),
        f"{run['predicted_s']:.3f}",
        f"{statistics.median(run['measured_s']):.3f}",
        f"{max(run['measured_s']) - min(run['measured_s']):.3f}",
        f"{run['relative_error']:+.1%}",
        f"{run['busy_share']:.0%}",
    )


if __name__ == "__main__":
    main()
