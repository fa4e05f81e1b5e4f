"""Time and memory of whole commands, as users call them: the process from its start to its end.

``python -m experiments.benchmarks.commands`` runs each command in a process of its own, with bytecode kept as that of
an installed package is. The first rows are what any command, and any prediction, takes at least. Results:
``experiments/benchmarks/results/commands.json``, ``.md``.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from experiments.common import Record, machine_record, markdown_table, write_record
from tasp_lab.core.files import write_whole

LAYER = "--seq 1Mi --heads 32 --kv-heads 8 --mask causal --pass both"
COMMANDS = (
    "--help",
    "predict full-mesh:2 --schedule ring --shard-bytes 1MiB",
    "predict full-mesh:4096 --schedule ring --shard-bytes 1MiB",
    "predict mi300x-8 --schedule tasp --seq 16Ki",
    "predict h100-8 --schedule tasp --seq 16Ki",
    *(f"predict h100-{nodes}x8 {LAYER} --schedule zigzag-ring-attention" for nodes in (8, 16, 32, 128)),
    *(f"predict h100-{nodes}x8 {LAYER} --schedule tasp" for nodes in (8, 16, 32)),
    f"predict gb200-nvl72 {LAYER} --schedule tasp",
    f"compare h100-8 {LAYER}",
    f"compare h100-4x8 {LAYER}",
    f"compare h100-32x8 {LAYER}",
    "decompose gb200-nvl72",
    "accuracy",
)
REPEATS = 5
SHORT_S = 30.0
"""Commands that take longer are run once."""

RESULTS = Path(__file__).parent / "results"
BYTECODE = Path(tempfile.gettempdir()) / "tasp-lab-bytecode"


class Run(NamedTuple):
    """One run of a command: time from start to end, processor time, and the largest resident memory."""

    seconds: float
    cpu_s: float
    peak_bytes: int


def main() -> None:
    """Run all commands and write the table."""
    rows: list[Record] = []
    for command in COMMANDS:
        runs = [_run(command)]
        while len(runs) < REPEATS and runs[0].seconds < SHORT_S:
            runs.append(_run(command))
        middle = {name: statistics.median(getattr(run, name) for run in runs) for name in Run._fields}
        rows.append({"command": command, **middle, "repeats_s": [run.seconds for run in runs]})
        print(command, middle, flush=True)
    write_record(RESULTS / "commands.json", {"repeats": REPEATS, "rows": rows})
    empty_s = rows[1]["seconds"]
    cells = [
        [f"`tasp-lab {row['command']}`", f"{row['seconds']:.2f}", f"{row['seconds'] / empty_s:.1f}",
         f"{row['cpu_s']:.2f}", f"{row['peak_bytes'] / 1e6:.0f}"]
        for row in rows
    ]  # fmt: skip
    made = machine_record()
    head = (
        f"Whole commands, medians of {REPEATS} runs, of one where it takes more than {SHORT_S:g} s, made by "
        f"`python -m experiments.benchmarks.commands` on {made['cores']} cores ({made['processor']}, {made['date']}). "
        "The empty `predict` is the second row."
    )
    table = markdown_table(("command", "s", "over an empty predict", "CPU s", "peak MB"), cells)
    write_whole(RESULTS / "commands.md", f"{head}\n\n{table}\n".encode())


def _run(command: str) -> Run:
    started_s = time.perf_counter()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen(
        [sys.executable, "-m", "tasp_lab.cli", *command.split()],
        stdout=subprocess.DEVNULL,
        env=environment | {"PYTHONPYCACHEPREFIX": str(BYTECODE)},
    )
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started_s
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"tasp-lab {command}: exit code {process.returncode}")
    return Run(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


if __name__ == "__main__":
    main()
