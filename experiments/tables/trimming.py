"""Bytes and communication time with trimming, relative to schedules without it.

``python -m experiments.tables.trimming`` writes ``experiments/results/trimming.md``. Times are simulated without
compute, so they are communication times.
"""

from __future__ import annotations

from itertools import product

from experiments.common import RESULTS, markdown_table, write_page
from sim.event.engine import simulate
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.machine import Machine
from tasp_lab.schedules.attention.forward import CIRCULATIONS, attention
from tasp_lab.workload.layer import Workload

TOPOLOGIES = ("full-mesh:8", "switch:8", "torus:3x3", "h100-2x8", "h100-4x8")
SEQUENCE = 2**18
WINDOW = SEQUENCE // 8


def main() -> None:
    """Simulate all cases and write the table."""
    cases = product(TOPOLOGIES, (None, WINDOW), CIRCULATIONS)
    rows = [_row(topology, name, window) for topology, window, name in cases]
    columns = ("topology, schedule, window", "bytes", "time", "time whole", "time trimmed")
    head = (
        f"Causal attention, {SEQUENCE} positions, 32 heads of 128, bf16: bytes sent and communication time with "
        "trimming over those without, made by `python -m experiments.tables.trimming`."
    )
    table = f"{head}\n\n{markdown_table(columns, rows)}\n"
    write_page(RESULTS / "trimming.md", table)


def _row(topology: str, name: str, window: int | None) -> tuple[str, ...]:
    machine = Machine(load_machine(topology).topology)
    layer = Workload(SEQUENCE, heads=32, mask="causal", window=window)
    schedules = [attention(name, machine.topology, layer, trim=trim) for trim in (False, True)]
    whole, trimmed = (int(schedule.bytes_sent().sum()) for schedule in schedules)
    whole_s, trimmed_s = (float(simulate(schedule, machine).time_s) for schedule in schedules)
    return (
        f"{topology}, {name}, {window or 'none'}",
        f"{trimmed / whole:.3f}",
        f"{trimmed_s / whole_s:.3f}",
        f"{whole_s * 1e3:.2f} ms",
        f"{trimmed_s * 1e3:.2f} ms",
    )


if __name__ == "__main__":
    main()
