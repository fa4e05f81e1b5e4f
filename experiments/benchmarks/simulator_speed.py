"""Speed of the SimPy engine relative to bare SimPy timeouts in the same run.

``python -m experiments.benchmarks.simulator_speed`` times AllGathers in the engine and, for comparison, SimPy processes
with one timeout per transfer. Results: ``experiments/benchmarks/results/simulator_speed.json``, ``.md``.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import simpy

from experiments.common import markdown_table, write_record
from sim.event.engine import simulate
from tasp_lab.core.files import write_whole
from tasp_lab.machines.machine import Machine
from tasp_lab.schedules.build import collective
from tasp_lab.topology.builders import full_mesh, nodes, ring, switch
from tasp_lab.topology.graph import Topology

CASES = (
    (ring(64), "ring"),
    (ring(512), "ring"),
    (switch(512), "ring"),
    (full_mesh(32), "multi-ring"),
    (nodes(2, 8), "multi-ring"),
)
REPEATS = 3
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Time all cases and write the table."""
    rows = [_measure(topology, name) for topology, name in CASES]
    write_record(RESULTS / "simulator_speed.json", {"rows": rows})
    columns = ("case", "transfers", "seconds", "transfers/s", "bare timeouts s", "engine over bare")
    cells = [
        [f"{row['topology']}, {row['schedule']}", f"{row['transfers']:,}", f"{row['engine_s']:.3f}",
         f"{row['transfers_per_s']:,.0f}", f"{row['bare_s']:.3f}", f"{row['ratio']:.1f}"]
        for row in rows
    ]  # fmt: skip
    made = "python -m experiments.benchmarks.simulator_speed"
    head = f"Medians of {REPEATS} runs, made by `{made}`. Bare: one SimPy timeout per transfer."
    table = f"{head}\n\n{markdown_table(columns, cells)}"
    write_whole(RESULTS / "simulator_speed.md", (table + "\n").encode())
    print(table)


def _measure(topology: Topology, name: str) -> dict[str, object]:
    schedule, machine = collective(name, topology, 2**20), Machine(topology)
    engine_s = _median_s(lambda: simulate(schedule, machine))
    processes = schedule.world_size * schedule.lanes
    bare_s = _median_s(lambda: _bare(processes, schedule.transfers // processes))
    return {
        "topology": topology.name,
        "schedule": name,
        "transfers": schedule.transfers,
        "engine_s": engine_s,
        "transfers_per_s": schedule.transfers / engine_s,
        "bare_s": bare_s,
        "ratio": engine_s / bare_s,
    }


def _median_s(work: Callable[[], object]) -> float:
    """The median duration of a function, without cyclic garbage collection."""
    times = []
    for _ in range(REPEATS):
        gc.collect()
        gc.disable()
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
        gc.enable()
    return statistics.median(times)


def _bare(processes: int, timeouts: int) -> None:
    """Run `processes` SimPy processes with `timeouts` timeouts each."""
    env = simpy.Environment()

    def process() -> Iterator[simpy.Event]:
        for _ in range(timeouts):
            yield env.timeout(1.0)

    for _ in range(processes):
        env.process(process())  # type: ignore[arg-type]
    env.run()


if __name__ == "__main__":
    main()
