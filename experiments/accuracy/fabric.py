"""Prediction against measurement on the emulated fabric, for held-out topologies, schedules and sizes.

Each fabric is calibrated only by point-to-point messages; then every collective that it supports is predicted and run.
``python -m experiments.accuracy.fabric [TOPOLOGY ...]`` writes ``experiments/accuracy/fabrics/TOPOLOGY.json`` after
each topology, and the table ``experiments/accuracy/fabric.md`` from all existing files. All topologies take seven
minutes on two idle cores.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.common import BUSY, TIMES, Record, read_record, table, write_page, write_record
from experiments.tables.on_the_fabric import Fabric
from sim.simulate import simulate
from tasp_lab.core.errors import NoDecompositionError, NoRouteError, ScheduleError
from tasp_lab.core.progress import print_progress as progress
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
    records = [read_record(_file(text)) for text in TOPOLOGIES if _file(text).exists()]
    write_page(FOLDER / "fabric.md", fabric_text(records))


def _file(topology: str) -> Path:
    return FOLDER / "fabrics" / f"{topology.replace(':', '-')}.json"


def measure_topology(text: str) -> Record:
    """Calibrate the fabric of a topology, then predict and run all schedules that it supports, in both sizes."""
    nominal = load_machine(text).topology
    built = [
        (size, schedule)
        for name in SCHEDULES
        for size in SIZES_BYTES
        if (schedule := buildable(name, nominal, size)) is not None
    ]
    at_full_speed_s = (REPEATS + 1) * sum(float(simulate(schedule, Machine(nominal)).time_s) for _, schedule in built)
    scale = default_scale(nominal, at_full_speed_s)
    progress(f"{text}: {len(built)} runs at scale {scale:.3g}, about {at_full_speed_s / scale:.0f} s")
    fields = ("schedule", "predicted_s", "measured_repeats_s", "relative_error", "cpu_busy_share")
    with Fabric.of(nominal.scaled(scale)) as fabric:
        runs = [
            {"size_bytes": size, **{name: run.to_dict()[name] for name in fields}}
            for size, schedule in built
            for run in fabric.runs([schedule], size, REPEATS)
        ]
    return {"topology": text, "scale": scale, "repeats": REPEATS, "runs": runs}


def buildable(name: str, topology: Topology, size_bytes: int) -> Schedule | None:
    """The schedule by name, or None if the topology has no ring, decomposition or route for it."""
    try:
        schedule = collective(name, topology, size_bytes)
        schedule.check_routes(topology)
    except (ScheduleError, NoRouteError, NoDecompositionError):
        return None
    return schedule


def fabric_text(records: Sequence[Record]) -> str:
    """The median and worst error of all runs, and a table of all runs, in Markdown."""
    runs = [{"topology": record["topology"], **run} for record in records for run in record["runs"]]
    for run in runs:
        times_s = run["measured_repeats_s"]
        run |= {"measured_s": statistics.median(times_s), "measured_spread_s": max(times_s) - min(times_s)}
    errors = [abs(run["relative_error"]) for run in runs]
    columns = {"topology, schedule": "{topology}, {schedule}", "bytes": "{size_bytes:size}", **TIMES, **BUSY}
    dates = ", ".join(sorted({record["machine"]["date"] for record in records}))
    return (
        f"{len(errors)} runs on fabrics of {len(records)} topologies: median error {statistics.median(errors):.1%}, "
        f"worst {max(errors):.1%}.\n\n"
        f"Medians of {REPEATS} repeats after one to warm up, made by `python -m experiments.accuracy.fabric` on "
        f"{records[0]['machine']['cores']} cores ({dates}). Bytes: a rank's shard, a chunk "
        "or a message. Predicted from messages between pairs of ranks of the same fabric. Spread: slowest minus "
        f"fastest repeat.\n\n{table(runs, columns)}"
    )


if __name__ == "__main__":
    main()
