"""Simulation speed of our engines compared with SimGrid and ASTRA-sim, on one machine in one run.

``python -m experiments.benchmarks.peers`` simulates AllGathers, AllReduces and ring attention on full meshes with the
array engine, the SimPy engine, SimGrid from C++ and from Python, ASTRA-sim, and a plain NumPy recurrence, each what it
can. The recurrence is a lower bound on the cost of stepping through a schedule: it assumes that no two transfers share
a link. Every run is a separate process; all must predict the same time. Results:
``experiments/benchmarks/results/peers.json`` and ``.md``.

``--long`` adds SimGrid's Python on 512 ranks, ``--most-ranks 64`` omits larger worlds, ``--results`` sets the folder of
the results. SimGrid (python3-simgrid, libsimgrid-dev and g++) and ASTRA-sim (``ASTRA_SIM``, see
`experiments.tables.astra_sim`) are omitted if not installed.
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

from experiments.benchmarks import process_cost
from experiments.benchmarks.peer_run import ATTENTION, BLOCK_BYTES, call_s, rings_of, topology_of
from experiments.benchmarks.peer_run import SYSTEMS as ENGINES
from experiments.common import Record, machine_record, markdown_table, write_page, write_record
from experiments.tables import astra_sim
from tasp_lab.schedules.build import collective

SYSTEMS = {
    "array": "tasp-lab, array engine",
    "simpy": "tasp-lab, SimPy engine",
    "simgrid-c++": "SimGrid, C++",
    "simgrid-python": "SimGrid, Python",
    "astra-sim": "ASTRA-sim",
    "numpy": "NumPy recurrence",
}
PARTS = ("rings_s", "prepared_s", "proof_s", "simulated_s")
ALL_REDUCE = "ring-all-reduce"
SIMGRID = Path(__file__).parent / "simgrid"
RESULTS = Path(__file__).parent / "results"
REPEATS = 3

ASTRA = """

*ASTRA-sim* is astra-sim/astra-sim at 518bd51, the analytical backend that models congestion. To have its rows, clone it
with its submodules, run `build/astra_analytical/build.sh` and set `ASTRA_SIM` to the path of
`AstraSim_Analytical_Congestion_Aware`. The build measured here has other commits of submodules:
astra-sim/astra-network-analytical at 599a047, spdlog 1.13.0, and the trace reader of astra-sim/chakra at f37c2bb with
an added line that brings its classes into the namespace Chakra.

Around one ring it runs its own ring algorithm, on its topology *Ring*, in one chunk; around several rings it reads the
Chakra traces of our schedule on *FullyConnected*, the writing of which is not timed. It prints no times of parts, so
compare *whole*.

Its predicted times differ from ours by {difference:.3%} at most. In both models a message takes the latency and its
bytes over the bandwidth, and the link is free again when its bytes are sent, before the latency has passed. ASTRA-sim
counts whole nanoseconds, rounds each message down, and adds to each step of its own ring an endpoint delay, here 1 ns,
the least. It would also read and write memory for additions, here at a bandwidth so high that they take no time.
"""


class Case(NamedTuple):
    """A schedule on a topology, and the systems that simulate it."""

    topology: str
    schedule: str
    systems: tuple[str, ...]

    @property
    def ranks(self) -> int:
        return math.prod(int(side) for side in self.topology.split(":")[1].split("x"))


def main() -> None:
    """Measure all cases and write the table."""
    options = argparse.ArgumentParser(description="Simulate rings with our engines and those of others.")
    options.add_argument("--long", action="store_true", help="also run SimGrid's Python on 512 ranks (three minutes)")
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
    attention = tuple(system for system in SYSTEMS if system not in ("numpy", "astra-sim"))
    return [
        Case("full-mesh:8", "ring", all_systems),
        Case("full-mesh:64", "ring", all_systems),
        Case("full-mesh:512", "ring", all_systems if long else compiled),
        Case("full-mesh:64", "multi-ring", compiled),
        Case("full-mesh:512", "multi-ring", ("array", "numpy")),
        Case("full-mesh:8", ALL_REDUCE, ("array", "simpy", "astra-sim")),
        Case("full-mesh:64", ALL_REDUCE, ("array", "simpy", "astra-sim")),
        Case("full-mesh:512", ALL_REDUCE, ("array", "astra-sim")),
        Case("full-mesh:8", ATTENTION, attention),
        Case("full-mesh:64", ATTENTION, attention),
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
        self._astra_sim = astra_sim.program()
        self._installed = {*ENGINES, *self._simgrid, *(["astra-sim"] if self._astra_sim else [])}
        self._found: dict[tuple[str, str, str], Record] = {}

    def rows(self, cases: Sequence[Case]) -> list[Record]:
        """A row for each case and each installed system. Fails unless all predict the same time."""
        found = []
        for case in cases:
            rows = [self._row(case, system) for system in case.systems if system in self._installed]
            for row in rows:
                # ASTRA-sim counts whole nanoseconds, and a step takes more than a microsecond.
                within = 1e-3 if row["system"] == "astra-sim" else 1e-6
                assert math.isclose(row["time_s"], rows[0]["time_s"], rel_tol=within), (row, rows[0])
            found += [row | {"transfers": rows[0]["transfers"]} for row in rows]
        return found

    def _row(self, case: Case, system: str) -> Record:
        key = case.topology, case.schedule, system
        if key not in self._found:
            runs = [self._run(case, system) for _ in range(REPEATS)]
            medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
            head = {"topology": case.topology, "schedule": case.schedule, "system": system, "ranks": case.ranks}
            self._found[key] = head | {"runs": len(runs)} | medians
            print(*key, f"{medians['cpu_s']:.3g} s", file=sys.stderr)
        return self._found[key]

    def _run(self, case: Case, system: str) -> Record:
        if system == "astra-sim":
            return _run_astra_sim(str(self._astra_sim), case)
        if system in self._simgrid:
            done, cost = _run_command(self._simgrid[system], _as_text(case))
        else:
            module = "experiments.benchmarks.peer_run"
            done, cost = _run_command([sys.executable, "-m", module, system, case.topology, case.schedule])
        return {**json.loads(done.stdout), **cost}


def _run_command(
    command: Sequence[str], standard_input: str = "", folder: Path | None = None
) -> tuple[subprocess.CompletedProcess[str], Record]:
    """Run a command in a folder; what it printed, and the processor time and memory of the whole process."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    measured = [sys.executable, "-I", "-S", process_cost.__file__, *command]
    done = subprocess.run(
        measured, input=standard_input, capture_output=True, text=True, check=False, cwd=folder, env=environment
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    return done, json.loads(done.stderr.splitlines()[-1])


def _run_astra_sim(program: str, case: Case) -> Record:
    """One run of ASTRA-sim: its own ring on the links of one ring, or the traces of our schedule on a full mesh."""
    topology = topology_of(case.topology)
    link, is_native = topology.links[0], case.schedule != "multi-ring"
    network = {
        "topology": ("Ring" if is_native else "FullyConnected",),
        "npus_count": (case.ranks,),
        "bandwidth": (float(link.bandwidth_bytes_per_s) / 2**30,),
        "latency": (float(link.latency_s) * 1e9,),
    }
    decomposition = rings_of(topology, case.schedule)
    rings = 1 if decomposition is None else len(decomposition.rings)
    # The size of its own AllGather is that of a shard, and our workload has the bytes of all of them.
    parts = case.ranks if case.schedule == "ring" else 1
    schedule = collective(case.schedule, topology, rings * BLOCK_BYTES // parts, decomposition)
    with tempfile.TemporaryDirectory() as name:
        options = astra_sim.write_inputs(Path(name), schedule, network, is_native)
        done, cost = _run_command([program, *options], folder=Path(name))
    return {"time_s": astra_sim.end_s(done, case.ranks), **cost}


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
        f"Collectives, and ring attention forward with a full mask, of blocks of {BLOCK_BYTES // 2**20} MiB, made by\n"
        f"`python -m experiments.benchmarks.peers` on {made['cores']} cores ({made['processor']}, {made['date']}).\n\n"
        "Seconds are processor time, user and system, as other work may share the cores: medians of "
        f"{REPEATS} processes.\n"
        "Of the same schedule, our engines and SimGrid predict the same time to a millionth. *Prepared*: the\n"
        "schedule built and proved, for SimGrid its platform and actors made; *proof*: that part alone, done once\n"
        "more. *Whole* and *peak*: the whole process, with Python, its libraries and our warm-up on four ranks."
    )
    columns = (
        "topology, schedule", "simulated by", "transfers", "predicted us", "rings s", "prepared s", "proof s",
        "simulated s", "whole s", "peak MB",
    )  # fmt: skip
    cells = [
        [f"{row['topology']}, {row['schedule']}", SYSTEMS[row["system"]], f"{row['transfers']:,}",
         f"{1e6 * row['time_s']:,.3f}", *(f"{row[part]:.3g}" if row.get(part) else "" for part in PARTS),
         f"{row['cpu_s']:.3g}", f"{row['peak_bytes'] / 1e6:,.0f}"]
        for row in rows
    ]  # fmt: skip
    ours_s = {(row["topology"], row["schedule"]): row["time_s"] for row in rows if row["system"] == "array"}
    differences = [
        abs(row["time_s"] / ours_s[row["topology"], row["schedule"]] - 1)
        for row in rows
        if row["system"] == "astra-sim"
    ]
    about_astra = ASTRA.format(difference=max(differences)) if differences else ""
    return f"{head}\n\n{markdown_table(columns, cells)}{about_astra}"


if __name__ == "__main__":
    main()
