"""Scaling of the two engines: equivalence classes and simulation times for 8 to 16,384 ranks.

``python -m experiments.benchmarks.engine_scaling`` simulates AllGathers with the array engine, and those with few
transfers also with the SimPy engine; their times must agree. Results:
``experiments/benchmarks/results/engine_scaling.json``, ``.md``.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from experiments.common import markdown_table, write_record
from sim.array import engine as array_engine
from sim.event import engine
from tasp_lab.core.files import write_whole
from tasp_lab.core.units import format_time
from tasp_lab.machines.machine import Machine
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.build import collective
from tasp_lab.schedules.collectives.all_gather import ring_all_gather
from tasp_lab.topology.builders import full_mesh, nodes, switch
from tasp_lab.topology.derived import with_links
from tasp_lab.topology.graph import Topology

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
MAX_FOR_SIMPY = 255_000
Found = TypeVar("Found")
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Time all cases and write the table."""
    rows = [_measure(make(), name, chunks) for make, name, chunks in CASES]
    write_record(RESULTS / "engine_scaling.json", {"rows": rows})
    columns = ("case", "transfers", "classes", "schedule s", "array s", "again s", "SimPy s", "predicted", "MiB so far")
    cells = [[_cell(row[column]) for column in _COLUMNS] for row in rows]
    made = "python -m experiments.benchmarks.engine_scaling"
    head = (
        f"Made by `{made}`. Wall-clock seconds of building and proving the schedule, and of simulating it: once, a "
        f"second time, and by SimPy where there are at most {MAX_FOR_SIMPY:,} transfers. Memory is the most that the "
        "process had up to that case."
    )
    table = f"{head}\n\n{markdown_table(columns, cells)}"
    write_whole(RESULTS / "engine_scaling.md", (table + "\n").encode())
    print(table)


_COLUMNS = ("case", "transfers", "classes", "schedule_s", "array_s", "again_s", "simpy_s", "predicted", "peak_mib")


def _measure(topology: Topology, name: str, chunks: int) -> dict[str, object]:
    schedule, schedule_s = _timed(lambda: _schedule(topology, name, chunks))
    machine = Machine(topology)
    _, array_s = _timed(lambda: array_engine.run(schedule, machine).time_s)
    found, again_s = _timed(lambda: _simulated(schedule, machine))
    simpy_s = None
    if schedule.transfers <= MAX_FOR_SIMPY:
        expected, simpy_s = _timed(lambda: float(engine.simulate(schedule, machine).time_s))
        assert abs(found.time_s - expected) <= 1e-9 * expected, "the engines agree"
    return {
        "case": f"{topology.name}, {name}" + (f" in {chunks} chunks" if chunks > 1 else ""),
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


def _schedule(topology: Topology, name: str, chunks: int) -> Schedule:
    if chunks > 1:
        return ring_all_gather(topology, SHARD_BYTES, chunks=chunks)
    return collective(name, topology, SHARD_BYTES)


def _simulated(schedule: Schedule, machine: Machine) -> array_engine.ArrayRun:
    found = array_engine.run(schedule, machine)
    assert found.time_s > 0, "there is something to transfer"
    return found


def _timed(work: Callable[[], Found]) -> tuple[Found, float]:
    began = time.perf_counter()
    found = work()
    return found, time.perf_counter() - began


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value or "-")


if __name__ == "__main__":
    main()
