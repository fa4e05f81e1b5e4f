"""Simulation speed of our engines compared with SimGrid, on one machine in one run.

``python -m experiments.benchmarks.peers`` simulates AllGathers and ring attention on full meshes with the array engine,
the SimPy engine, SimGrid from C++ and from Python, and AllGathers with a plain NumPy recurrence. The recurrence is a
lower bound on the cost of stepping through a schedule: it assumes that no two transfers share a link. Every run is a
separate process; all must predict the same time. Results: ``experiments/benchmarks/results/peers.json`` and
``.md``.

``--long`` adds SimGrid's Python on 512 ranks, ``--most-ranks 64`` omits larger worlds, ``--results`` sets the folder of
the results. SimGrid (python3-simgrid, libsimgrid-dev and g++) is omitted if not installed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.benchmarks.peer_run import ATTENTION, BLOCK_BYTES, call_s, rings_of, topology_of
from experiments.common import Record, machine_record, markdown_table, write_page, write_record

SYSTEMS = {
    "array": "tasp-lab, array engine",
    "simpy": "tasp-lab, SimPy engine",
    "simgrid-c++": "SimGrid, C++",
    "simgrid-python": "SimGrid, Python",
    "numpy": "NumPy recurrence",
}
PARTS = ("rings_s", "prepared_s", "proof_s", "simulated_s")
SIMGRID = Path(__file__).parent / "simgrid"
RESULTS = Path(__file__).parent / "results"
REPEATS = 3
SHORT_S = 10.0
"""Cases that take longer are run once."""


class Case(NamedTuple):
    """An AllGather and the systems that simulate it."""

    topology: str
    schedule: str
    systems: tuple[str, ...]

    @property
    def ranks(self) -> int:
        return math.prod(int(side) for side in self.topology.split(":")[1].split("x"))


def main() -> None:
    """Measure all cases and write the table."""
    options = argparse.ArgumentParser(description="Simulate rings with our engines and with SimGrid.")
    options.add_argument("--long", action="store_true", help="also run SimGrid's Python on 512 ranks (a minute)")
    options.add_argument("--most-ranks", dest="max_ranks", type=int, default=2**14, help="omit larger worlds")
    options.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        peers = Peers(Path(folder))
        rows = peers.rows([case for case in table_cases(chosen.long) if case.ranks <= chosen.max_ranks])
    write_record(chosen.results / "peers.json", {"rows": rows})
    write_page(chosen.results / "peers.md", report(rows))


def table_cases(long: bool) -> list[Case]:
    """The rows of the table."""
    all_systems, compiled = tuple(SYSTEMS), tuple(system for system in SYSTEMS if system != "simgrid-python")
    simulators = tuple(system for system in SYSTEMS if system != "numpy")
    return [
        Case("full-mesh:8", "ring", all_systems),
        Case("full-mesh:64", "ring", all_systems),
        Case("full-mesh:512", "ring", all_systems if long else compiled),
        Case("full-mesh:64", "multi-ring", compiled),
        Case("full-mesh:512", "multi-ring", ("array", "numpy")),
        Case("full-mesh:8", ATTENTION, simulators),
        Case("full-mesh:64", ATTENTION, simulators),
        Case("full-mesh:512", ATTENTION, ("array", "simgrid-c++")),
        Case("nodes:128x8", "ring", ("array",)),
        Case("nodes:128x8", "multi-ring", ("array",)),
        Case("nodes:2048x8", "ring", ("array",)),
        Case("nodes:2048x8", "multi-ring", ("array",)),
    ]


class Peers:
    """Runs cases and caches their rows. `folder` is for the compiled program."""

    def __init__(self, folder: Path) -> None:
        self._simgrid = _simgrid_commands(folder)
        self._found: dict[tuple[str, str, str], Record] = {}

    def rows(self, cases: Sequence[Case]) -> list[Record]:
        """A row for each case and each installed system. Fails unless all predict the same time."""
        found = []
        for case in cases:
            here = [name for name in case.systems if name in self._simgrid or not name.startswith("simgrid")]
            rows = [self._row(case, system) for system in here]
            times_s = {row["system"]: row["time_s"] for row in rows}
            assert max(times_s.values()) <= (1 + 1e-6) * min(times_s.values()), (case, times_s)
            found += [row | {"transfers": rows[0]["transfers"]} for row in rows]
        return found

    def _row(self, case: Case, system: str) -> Record:
        key = case.topology, case.schedule, system
        if key not in self._found:
            runs = [self._run(case, system)]
            while len(runs) < REPEATS and sum(runs[0].get(part, 0) for part in PARTS) < SHORT_S:
                runs.append(self._run(case, system))
            medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
            head = {"topology": case.topology, "schedule": case.schedule, "system": system, "ranks": case.ranks}
            self._found[key] = head | {"runs": len(runs)} | medians
            print(*key, f"{medians['simulated_s']:.3g} s", file=sys.stderr)
        return self._found[key]

    def _run(self, case: Case, system: str) -> Record:
        if system in self._simgrid:
            return _output_of(self._simgrid[system], _as_text(case))
        return _output_of(
            [sys.executable, "-m", "experiments.benchmarks.peer_run", system, case.topology, case.schedule]
        )


def _output_of(command: Sequence[str], standard_input: str = "") -> Record:
    done = subprocess.run(command, input=standard_input, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    found: Record = json.loads(done.stdout)
    return found


def _as_text(case: Case) -> str:
    """The input of SimGrid's programs: the links of a full mesh and the rings."""
    topology = topology_of(case.topology)
    decomposition = rings_of(topology, case.schedule)
    rings = [list(range(topology.world_size))] if decomposition is None else decomposition.rings.tolist()
    link = topology.links[0]
    link_of = link.bandwidth_bytes_per_s, link.latency_s
    head = topology.world_size, len(rings), BLOCK_BYTES, *link_of, call_s(case.schedule)
    return "".join(" ".join(map(str, line)) + "\n" for line in (head, *rings))


def _simgrid_commands(folder: Path) -> dict[str, list[str]]:
    """The commands of SimGrid's programs that can be compiled or imported on this machine."""
    commands = {}
    program, source = str(folder / "rings"), str(SIMGRID / "rings.cpp")
    if shutil.which("g++") and _works(["g++", "-O2", "-o", program, source, "-lsimgrid"]):
        commands["simgrid-c++"] = [program, "--log=root.thresh:error"]
    python = shutil.which("python3", path=os.defpath)
    if python and _works([python, "-c", "import simgrid"]):
        commands["simgrid-python"] = [python, str(SIMGRID / "rings.py")]
    return commands


def _works(command: Sequence[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def report(rows: Sequence[Record]) -> str:
    """The table and its explanation."""
    made = machine_record()
    head = (
        f"AllGathers, and ring attention forward with a full mask, of blocks of {BLOCK_BYTES // 2**20} MiB, made by "
        f"`python -m experiments.benchmarks.peers` on {made['cores']} "
        f"cores ({made['processor']}, {made['date']}). Medians of {REPEATS} processes; of one where it takes more than "
        f"{SHORT_S:g} s. All that simulate the same predict the same time, to a millionth. *Prepared*: the schedule "
        "built and proved, for SimGrid its platform and actors made; *proof*: that part alone, done once more. Memory: "
        "the most that the process had, Python and its libraries included."
    )
    columns = (
        "topology, schedule", "simulated by", "transfers", "rings s", "prepared s", "proof s", "simulated s", "peak MB",
    )  # fmt: skip
    cells = [
        [f"{row['topology']}, {row['schedule']}", SYSTEMS[row["system"]], f"{row['transfers']:,}",
         *(f"{row[part]:.3g}" if row.get(part) else "" for part in PARTS), f"{row['peak_bytes'] / 1e6:,.0f}"]
        for row in rows
    ]  # fmt: skip
    return f"{head}\n\n{markdown_table(columns, cells)}"


if __name__ == "__main__":
    main()
