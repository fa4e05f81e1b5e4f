"""Time and memory of whole commands, as users call them: the process from its start to its end.

``python -m experiments.benchmarks.commands`` runs each command in a process of its own; the first row, ``--help``, is
what any command takes at least. Results: ``experiments/benchmarks/results/commands.json``, ``.md``.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from experiments.common import Record, machine_record, markdown_table, write_record
from tasp_lab.core.files import write_whole

ATTENTION = "predict h100-16x8 --seq 1Mi --mask causal --pass both --schedule"
COMMANDS = (
    "--help",
    "predict h100-8 --schedule ring --schedule multi-ring --shard-bytes 32MiB",
    "predict full-mesh:512 --schedule ring --shard-bytes 1MiB",
    "predict full-mesh:4096 --schedule ring --shard-bytes 1MiB",
    f"{ATTENTION} ring-attention",
    f"{ATTENTION} zigzag-ring-attention",
    f"{ATTENTION} striped-ring-attention",
    f"{ATTENTION} tasp",
    "decompose gb200-nvl72",
    "accuracy",
)
REPEATS = 3
RESULTS = Path(__file__).parent / "results"


class Run(NamedTuple):
    """One run of a command: time from start to end, processor time, and the largest resident memory."""

    seconds: float
    cpu_s: float
    peak_bytes: int


def main() -> None:
    """Run all commands and write the table."""
    rows: list[Record] = []
    for command in COMMANDS:
        runs = [_run(command) for _ in range(REPEATS)]
        middle = {name: statistics.median(getattr(run, name) for run in runs) for name in Run._fields}
        rows.append({"command": command, **middle, "repeats_s": [run.seconds for run in runs]})
        print(command, middle, flush=True)
    write_record(RESULTS / "commands.json", {"repeats": REPEATS, "rows": rows})
    shortest_s = rows[0]["seconds"]
    cells = [
        [f"`tasp-lab {row['command']}`", f"{row['seconds']:.2f}", f"{row['seconds'] / shortest_s:.1f}",
         f"{row['cpu_s']:.2f}", f"{row['peak_bytes'] / 1e6:.0f}"]
        for row in rows
    ]  # fmt: skip
    made = machine_record()
    head = (
        f"Whole commands, medians of {REPEATS} runs, made by `python -m experiments.benchmarks.commands` on "
        f"{made['cores']} cores ({made['processor']}, {made['date']})."
    )
    table = markdown_table(("command", "s", "over --help", "CPU s", "peak MB"), cells)
    write_whole(RESULTS / "commands.md", f"{head}\n\n{table}\n".encode())


def _run(command: str) -> Run:
    started_s = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "tasp_lab.cli", *command.split()], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started_s
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"tasp-lab {command}: exit code {process.returncode}")
    return Run(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


if __name__ == "__main__":
    main()
