"""Throughput of studies: whole commands, as users call them.

``python -m experiments.benchmarks.study_speed`` runs a study on machines of 8 GPUs, one on 8 nodes, by two workers, by
one and with ``--screen``, and one on 256 GPUs: 2,000, 200 and 20 points, and with ``--full`` five times as many.
Results: ``experiments/benchmarks/results/study_speed.json``, ``.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tomli_w

from experiments.common import Record, markdown_table, write_record
from tasp_lab import load_study
from tasp_lab.core.files import write_whole

RESULTS = Path(__file__).parent / "results"

LAYER: dict[str, Any] = {"model": ["llama-3-8b", "llama-3-70b"], "pass": "both"}
BATCHES = [1, 2, 3, 4, 6]
"""Sequences of the layers of ``--full``; else one."""

SCHEDULES = ["zigzag-ring-attention", "tasp", "ulysses", "token-ring", "kv-all-gather"]

ONE_NODE: dict[str, Any] = {
    "study": {"name": "one-node"},
    "machine": {"name": ["h100-8", "h200-8", "mi300x-8", "a100-8", "b200-8"]},
    "layer": LAYER | {"seq": "geom(8Ki, 1Mi, 2)"},
    "schedule": {"name": SCHEDULES},
    "what-if": {f"link-x{factor}": {"set": {"link.bandwidth": f"x{factor}"}} for factor in (0.25, 0.5, 2, 4)},
}
"""5 machines x 5 variants x 2 models x 8 lengths x 5 schedules: 2,000 points for each batch."""

EIGHT_NODES: dict[str, Any] = {
    "study": {"name": "eight-nodes"},
    "machine": {"name": ["h100-8x8", "mi300x-8x8"]},
    "layer": LAYER | {"seq": "geom(64Ki, 1Mi, 2)"},
    "schedule": {"name": ["zigzag-ring-attention", "tasp", "usp:8x8", "kv-all-gather", "ring-attention"]},
    "what-if": {"nic-x2": {"set": {"nic.bandwidth": "x2"}}},
}
"""2 machines x 2 variants x 2 models x 5 lengths x 5 schedules: 200 points for each batch."""

MANY_GPUS: dict[str, Any] = {
    "study": {"name": "many-gpus"},
    "machine": {"name": "h100-32x8"},
    "layer": LAYER | {"seq": ["256Ki", "1Mi"]},
    "schedule": {"name": ["zigzag-ring-attention", "tasp", "usp:8x32", "kv-all-gather", "ring-attention"]},
}
"""2 models x 2 lengths x 5 schedules on 256 GPUs: 20 points for each batch."""

START: dict[str, Any] = {
    "study": {"name": "start"}, "machine": {"name": "full-mesh:2"}, "layer": {"seq": 1024}, "schedule": {"name": "tasp"}
}  # fmt: skip
"""One point: what any study takes."""


def main() -> None:
    """Run the studies and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="five batches instead of one")
    full = parser.parse_args().full
    rows = [
        _run("one point", START, 1, False),
        _run("1 node, 2 workers", _of(ONE_NODE, full), 2, False),
        _run("8 nodes, 2 workers", _of(EIGHT_NODES, full), 2, False),
        _run("8 nodes, 2 workers, --screen", _of(EIGHT_NODES, full), 2, True),
        _run("8 nodes, 1 worker", _of(EIGHT_NODES, full), 1, False),
        _run("256 GPUs, 2 workers", _of(MANY_GPUS, full), 2, False),
    ]
    write_record(RESULTS / "study_speed.json", {"rows": rows})
    text = page(json.loads((RESULTS / "study_speed.json").read_text()))
    write_whole(RESULTS / "study_speed.md", text.encode())
    print(text)


def page(record: Record) -> str:
    """The page of a record."""
    rows, made = record["rows"], record["machine"]
    cells = [
        [row["what"], f"{row['points']:,}", f"{row['seconds']:.1f}", f"{row['cpu_s']:.0f}",
         f"{1e3 * row['cpu_s'] / row['points']:.0f}", f"{row['peak_bytes'] / 1e6:.0f}",
         ", ".join(f"{count:,} {status}" for status, count in row["rows"].items() if count)]
        for row in rows
    ]  # fmt: skip
    columns = ["study", "points", "time s", "processor s", "processor ms per point", "largest process MB", "rows"]
    two, one = rows[2]["seconds"], rows[4]["seconds"]
    load = min(row["load"] for row in rows[1:])
    if load > 2 * made["cores"]:
        beside = (
            f"The machine ran other work besides, {load:.0f} processes or more at a time: look at the processor time, "
            "which also is longer than alone."
        )
    else:
        beside = f"Two workers are {one / two:.2f} times as fast as one."
    return (
        "# Throughput of studies\n\n"
        f"Whole commands, `tasp-lab study run`, made by `python -m experiments.benchmarks.study_speed` on "
        f"{made['cores']} cores of {made['processor']}, {made['date']}. Python {made['python']}, "
        f"numpy {made['versions']['numpy']}.\n"
        "Every point is a layer forward and backward. The time of one point is what any study takes.\n"
        f"{beside}\n\n"
        f"{markdown_table(columns, cells)}\n"
    )


def _of(study: dict[str, Any], full: bool) -> dict[str, Any]:
    return study | {"layer": study["layer"] | {"batch": BATCHES if full else [1]}}


def _run(what: str, study: dict[str, Any], jobs: int, screen: bool) -> Record:
    """Time one command in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "study.toml"
        file.write_bytes(tomli_w.dumps(study).encode())
        command = ["study", "run", str(file), "--output", f"{folder}/run", "--jobs", str(jobs), "--json", "--yes"]
        before, start_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "tasp_lab.cli", *command, *(["--screen"] if screen else [])],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        seconds, after = time.monotonic() - start_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    found = json.loads(done.stdout)
    row: Record = {
        "load": os.getloadavg()[0], "what": what, "points": found["points"], "seconds": seconds,
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "peak_bytes": 1024 * after.ru_maxrss, "rows": found["rows"], "combinations": load_study(study).count,
    }  # fmt: skip
    print(row, flush=True)
    return row


if __name__ == "__main__":
    main()
