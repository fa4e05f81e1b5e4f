"""Time of ``tasp-lab calibrate`` for two tables of 80 ranks, beside another checkout of this repository in one run.

``python -m experiments.benchmarks.calibration_speed --before CHECKOUT`` writes
``experiments/benchmarks/results/calibration_speed.md``. The tables are simulated: AllGather and AllToAll of ten sizes
on ten nodes of eight H100, with other constants than the profile's and 3 % of noise. Both checkouts run alternately,
each time as a command in a new process, and must find the same constants.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.common import machine_record, markdown_table
from tasp_lab.core.files import write_whole
from tasp_lab.machines.parameters import Change, changed
from tasp_lab.machines.profile import load_profile
from tasp_lab.measure.fit.cases import Case, Simulated
from tasp_lab.measure.readers import MeasuredTable, Row
from tasp_lab.schedules.collectives.kinds import NcclTestsName

COLLECTIVES: tuple[NcclTestsName, ...] = ("all_gather", "alltoall")
CHANGED = {"ring_rate": 1.2, "nic_payload": 0.9, "nic_message_launch": 3.0, "base_simple": 5.0}
"""Constants of the machine that is measured, over those of its profile."""

SIZES = tuple(80 * 2**power for power in range(19, 29))
NOISE = 0.03
ROUNDS = 1
RESULTS = Path(__file__).parent / "results"


class Run(NamedTuple):
    """One run of the command: its time, its processor time, and the constants that it found, by name."""

    seconds: float
    cpu_s: float
    constants: dict[str, float]


def main() -> None:
    """Run both checkouts and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, required=True, help="another checkout, to measure beside this one")
    before, here = parser.parse_args().before.resolve(), Path(__file__).parents[2]
    with tempfile.TemporaryDirectory() as folder:
        write_tables(Path(folder))
        rounds = [(_run(before, folder), _run(here, folder)) for _ in range(ROUNDS)]
    rows = [_row(name, [(getattr(a, field), getattr(b, field)) for a, b in rounds])
            for name, field in (("time", "seconds"), ("processor time", "cpu_s"))]  # fmt: skip
    old, new = (each.constants for each in rounds[0])
    apart = max(abs(new[name] / old[name] - 1) if old[name] else abs(new[name]) for name in old)
    table = markdown_table(("of the whole command", "before, s", "after, s", "before / after"), rows)
    text = f"{_head()}\n\n{table}\n\nConstants found differ by at most {apart:.1g} of their value.\n"
    write_whole(RESULTS / "calibration_speed.md", text.encode())
    print(text)


def write_tables(folder: Path) -> None:
    """A CSV table per collective."""
    profile, random = load_profile("h100"), np.random.default_rng(0)
    slower = changed(profile.parameters, {name: Change(factor) for name, factor in CHANGED.items()})
    for name in COLLECTIVES:
        rows = tuple(Row(size, 1.0) for size in SIZES)
        case = Case(MeasuredTable(name, "h100-10x8", name, 80, None, {}, rows), name, "10x8", rows)
        times_us = Simulated(profile, [case])(slower) * np.exp(NOISE * random.normal(size=len(rows))) * 1e6
        lines = [f"{size},{time_us!r}" for size, time_us in zip(SIZES, times_us.tolist(), strict=True)]
        head = f"# profile: h100-10x8\n# collective: {name}\n# ranks: 80\n# source: simulated\nsize_B,time_us\n"
        (folder / f"{name}.csv").write_text(head + "\n".join(lines) + "\n")


def _run(checkout: Path, folder: str) -> Run:
    command = [sys.executable, "-m", "tasp_lab.cli", "calibrate", folder, "--json"]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    began_s, cpu_s = time.perf_counter(), _children_cpu_s()
    done = subprocess.run(command, env=environment, cwd=checkout, stdout=subprocess.PIPE, text=True, check=True)
    seconds = time.perf_counter() - began_s
    constants = {each["name"]: each["value"] for each in json.loads(done.stdout)["constants"]}
    return Run(seconds, _children_cpu_s() - cpu_s, constants)


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _row(name: str, times: list[tuple[float, float]]) -> tuple[str, ...]:
    old, new = (statistics.median(column) for column in zip(*times, strict=True))
    return name, f"{old:.1f}", f"{new:.1f}", f"{old / new:.1f}"


def _head() -> str:
    made = machine_record()
    return (
        f"`tasp-lab calibrate` from two tables of 80 ranks, {len(COLLECTIVES) * len(SIZES)} rows, {ROUNDS} "
        f"run{'s' * (ROUNDS > 1)} of each checkout, made by "
        f"`python -m experiments.benchmarks.calibration_speed --before CHECKOUT` on {made['cores']} cores "
        f"({made['processor']}, {made['date']}); {math.ceil(os.getloadavg()[1])} processes were running or waiting."
    )


if __name__ == "__main__":
    main()
