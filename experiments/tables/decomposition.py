"""Ring decompositions of all catalogue machines and other topologies, with predicted AllGather times.

``python -m experiments.tables.decomposition`` writes ``experiments/results/decompositions.json`` and the table
``experiments/results/decompositions.md``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from experiments.common import RESULTS, Formats, Record, table, write_page, write_record
from tasp_lab import decompose, predict
from tasp_lab.core.errors import ScheduleError
from tasp_lab.core.progress import print_progress as progress
from tasp_lab.machines.catalogue import catalogue_names, load_machine
from tasp_lab.machines.machine import Machine
from tasp_lab.prediction.inputs import changed_machine
from tasp_lab.rings.rings import Decomposition
from tasp_lab.schedules.registry import schedules_of

PREDICTED_SHARD_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Case:
    """A topology with edited links, without a library, and the maximum number of lanes of the rings."""

    topology: str
    without: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    lanes: int | None = None

    @property
    def name(self) -> str:
        """The case as command-line arguments."""
        options = [f"--without {part}" for part in self.without] + [f"--set {each}" for each in self.overrides]
        return " ".join([self.topology, *options, *([f"--lanes {self.lanes}"] if self.lanes else [])])

    def machine(self) -> Machine:
        """The machine with its edited links."""
        return changed_machine(load_machine(self.topology, library="ideal"), self.overrides, self.without)


OTHERS = (
    Case("full-mesh:4"),
    Case("full-mesh:6"),
    Case("full-mesh:64"),
    Case("bidirectional-ring:8"),
    Case("torus:3x3"),
    Case("torus:2x3"),
    Case("torus:8x8"),
    Case("torus:4x4x4"),
    Case("hypercube:3"),
    Case("hypercube:5"),
    Case("circulant:12:1,5"),
    Case("multipartite:3x2"),
    Case("nodes:2x4"),
    Case("nodes:3x3"),
    Case("nodes:2x4:rails"),
    Case("nodes:4x8:rails"),
    Case("full-mesh:5", without=("link.0-3",)),
    Case("full-mesh:8", overrides=("link.0-3=10GB/s",)),
    Case("full-mesh:8", lanes=4),
    Case("torus:8x8", without=("link.0-1",)),
    Case("torus:3x3", without=("link.0-1",)),
    Case("nodes:2x8", without=("link.0-1",)),
    Case("h100-2x8", overrides=("link.0-network=25GB/s",)),
)


def main() -> None:
    """Find all rings, predict, and write the table."""
    rows = [_find(case) for case in [*(Case(name) for name in catalogue_names()), *OTHERS]]
    write_record(RESULTS / "decompositions.json", {"shard_bytes": PREDICTED_SHARD_BYTES, "decompositions": rows})
    write_page(RESULTS / "decompositions.md", _found_table(rows))


def _find(case: Case) -> Record:
    progress(f"rings of {case.name}")
    machine = case.machine()
    started_s = time.perf_counter()
    found = decompose(machine.topology, lanes=case.lanes, progress=progress)
    seconds = time.perf_counter() - started_s
    document = found.to_dict()
    return document | {"case": case.name, "seconds": seconds, "predicted_s": _predict(machine, found)}


def _predict(machine: Machine, found: Decomposition) -> dict[str, float | None]:
    """The time of each schedule; None if it needs a link that does not exist."""
    times: dict[str, float | None] = {}
    for name in schedules_of("AllGather"):
        try:
            predicted = predict(machine, [name], PREDICTED_SHARD_BYTES, decomposition=found, progress=progress)
            times[name] = float(predicted[0].time_s)
        except ScheduleError:
            times[name] = None
    return times


def _found_table(rows: list[Record]) -> str:
    head = (
        f"Rings found, and AllGather of {PREDICTED_SHARD_BYTES // 2**20} MiB per rank predicted, made by "
        "`python -m experiments.tables.decomposition`. Share of bound: of what the bottleneck cut lets any AllGather "
        "reach. Most for rings: whether it is proved that no rings (of so many lanes, where these are given) carry "
        "more. A dash: some pair of ranks has no link."
    )
    columns: Formats = {
        "topology": "{case}",
        "rings": lambda row: str(len(row["rings"])),
        "fold": "{fold}",
        "share of bound": "{share_of_bound:.1%}",
        "most for rings": lambda row: "proved" if row["proved_optimal"] else "not proved",
        "found in": "{seconds:.2g} s",
        **{name: f"{{predicted_s[{name}]:time}}" for name in schedules_of("AllGather")},
    }
    return f"{head}\n\n{table(rows, columns)}"


if __name__ == "__main__":
    main()
