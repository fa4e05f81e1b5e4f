"""How the two engines scale: worlds of 8 to 16,384 ranks, what is alike in them, and how long simulating them takes.

``python -m benchmarks.engine_scaling`` simulates AllGathers with the array engine, and those of few transfers with the
SimPy engine, too; where both ran, their times must agree. Results: ``benchmarks/results/engine_scaling.json``, ``.md``.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from experiments.record import markdown_table, write_record
from sim import array_engine, engine
from tasp_lab.all_gather import all_gather, ring_all_gather
from tasp_lab.builders import full_mesh, nodes, switch
from tasp_lab.changes import with_links
from tasp_lab.machine import Machine
from tasp_lab.output import write_whole
from tasp_lab.quantities import format_time
from tasp_lab.schedule import Schedule
from tasp_lab.topology import Topology

CASES: tuple[tuple[Callable[[], Topology], str, int], ...] = (
    (lambda: full_mesh(8), "multi-ring", 1),
    (lambda: full_mesh(64), "multi-ring", 1),
    (lambda: with_links(full_mesh(64), ["0>1=10GB/s"]), "multi-ring", 1),
    (lambda: full_mesh(512), "ring", 1),
    (lambda: switch(512), "ring", 1),
    (lambda: switch(512), "ring", 8),
    (lambda: full_mesh(512), "direct", 1),
    (lambda: switch(512), "direct", 1),
    (lambda: full_mesh(512), "multi-ring", 1),
    (lambda: nodes(2, 8), "multi-ring", 1),
    (lambda: nodes(3, 8), "multi-ring", 1),
    (lambda: nodes(4, 8), "multi-ring", 1),
    (lambda: nodes(10, 8), "multi-ring", 1),
    (lambda: with_links(nodes(16, 8), ["0>1=10GB/s"]), "multi-ring", 1),
    (lambda: nodes(128, 8), "multi-ring", 1),
    (lambda: nodes(2048, 8), "multi-ring", 1),
)
SHARD_BYTES = 511 * 2**20
MOST_FOR_SIMPY = 255_000
Found = TypeVar("Found")
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Time all cases and write the table."""
    rows = [_measure(make(), name, pieces) for make, name, pieces in CASES]
    write_record(RESULTS / "engine_scaling.json", {"rows": rows})
    columns = ("case", "transfers", "classes", "schedule s", "array s", "again s", "SimPy s", "predicted", "MiB so far")
    cells = [[_said(row[column]) for column in _COLUMNS] for row in rows]
    made = "python -m benchmarks.engine_scaling"
    head = (
        f"Made by `{made}`. Wall-clock seconds of building and proving the schedule, and of simulating it: once, a "
        f"second time, and by SimPy where there are at most {MOST_FOR_SIMPY:,} transfers. Memory is the most that the "
        "process had up to that case."
    )
    table = f"{head}\n\n{markdown_table(columns, cells)}"
    write_whole(RESULTS / "engine_scaling.md", (table + "\n").encode())
    print(table)


_COLUMNS = ("case", "transfers", "classes", "schedule_s", "array_s", "again_s", "simpy_s", "predicted", "peak_mib")


def _measure(topology: Topology, name: str, pieces: int) -> dict[str, object]:
    schedule, schedule_s = _timed(lambda: _schedule(topology, name, pieces))
    machine = Machine(topology)
    _, array_s = _timed(lambda: array_engine.run(schedule, machine).time_s)
    found, again_s = _timed(lambda: _simulated(schedule, machine))
    simpy_s = None
    if schedule.transfers <= MOST_FOR_SIMPY:
        expected, simpy_s = _timed(lambda: float(engine.simulate(schedule, machine).time_s))
        assert abs(found.time_s - expected) <= 1e-9 * expected, "the engines agree"
    return {
        "case": f"{topology.name}, {name}" + (f" in {pieces} pieces" if pieces > 1 else ""),
        "transfers": schedule.transfers,
        "classes": found.classes,
        "schedule_s": schedule_s,
        "array_s": array_s,
        "again_s": again_s,
        "simpy_s": simpy_s,
        "time_s": found.time_s,
        "predicted": format_time(found.time_s),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def _schedule(topology: Topology, name: str, pieces: int) -> Schedule:
    if pieces > 1:
        return ring_all_gather(topology, SHARD_BYTES, pieces=pieces)
    return all_gather(name, topology, SHARD_BYTES)


def _simulated(schedule: Schedule, machine: Machine) -> array_engine.ArrayRun:
    found = array_engine.run(schedule, machine)
    assert found.time_s > 0, "there is something to transfer"
    return found


def _timed(work: Callable[[], Found]) -> tuple[Found, float]:
    began = time.perf_counter()
    found = work()
    return found, time.perf_counter() - began


def _said(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value or "-")


if __name__ == "__main__":
    main()
