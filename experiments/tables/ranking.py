"""The predicted ranking of all schedules of attention on one and several nodes, by heads and length of the sequence.

``python -m experiments.tables.ranking`` predicts every machine, shape and length, in one process per core, and writes
``experiments/results/ranking.json`` after each of them and the table ``ranking.md`` at the end. ``--only MACHINE``,
several times, repeats some machines and keeps the others. All machines take about ten minutes on two idle cores; on 64
GPUs, where one ranking takes a core half a minute, only two lengths are ranked.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from experiments.common import RESULTS, Record, markdown_table, write_page, write_record
from tasp_lab import Workload, compare
from tasp_lab.core.process import usable_cores
from tasp_lab.core.progress import print_progress as progress
from tasp_lab.core.units import format_time
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.prediction.compare import SINGLE_RINGS
from tasp_lab.schedules.registry import attention_names_on

MACHINES = ("mi300x-8", "h100-8", "mi300x-2x8", "h100-2x8", "mi300x-8x8", "h100-8x8")
SHAPES = ((32, 8), (64, 8), (128, 8))
SEQUENCES = (2**14, 2**16, 2**18, 2**20)
MANY_RANKS, SEQUENCES_OF_MANY_RANKS = 64, (2**16, 2**20)
BEST, TIE = 3, 0.01


class Case(NamedTuple):
    """A layer on a machine."""

    machine: str
    heads: int
    kv_heads: int
    sequence: int


def main(arguments: Sequence[str] | None = None) -> None:
    """Rank the schedules on the chosen machines, and write the record and the table."""
    parser = argparse.ArgumentParser(description="Rank all schedules of attention by their predicted time.")
    parser.add_argument("--only", action="append", choices=MACHINES, help="rank on this machine only; several times")
    chosen = parser.parse_args(arguments).only or MACHINES
    rank([case for name in chosen for case in cases(name)])


def cases(machine: str) -> list[Case]:
    """All layers of a machine."""
    many = load_machine(machine).topology.world_size >= MANY_RANKS
    lengths = SEQUENCES_OF_MANY_RANKS if many else SEQUENCES
    return [Case(machine, *shape, sequence) for shape in SHAPES for sequence in lengths]


def rank(chosen: Iterable[Case], folder: Path = RESULTS) -> None:
    """Rank the schedules in these cases, replacing those of an earlier record, and write the record and the table."""
    path = folder / "ranking.json"
    found = {_case(row): row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ProcessPoolExecutor(usable_cores(), mp_context=get_context("spawn")) as pool:
        tasks = {pool.submit(ranking, case): case for case in chosen}
        for number, task in enumerate(as_completed(tasks), start=1):
            row = task.result()
            found[_case(row)] = row
            write_record(path, {"rows": [found[case] for case in sorted(found, key=_order)]})
            progress(f"{number} of {len(tasks)}: {tasks[task]}, {next(iter(row['times_s']))}, {row['seconds']:.0f} s")
    publish(folder)


def ranking(case: Case) -> Record:
    """The predicted times of all schedules that apply, the fastest first, and why the others do not."""
    layer = Workload(case.sequence, heads=case.heads, kv_heads=case.kv_heads, head_dim=128, dtype="bf16", mask="causal")
    machine = load_machine(case.machine)
    started_s = os.times().user
    names = attention_names_on(machine.topology.world_size)
    candidates = compare(machine, layer, names, passes="both", samples=0).candidates
    applying = [each for each in candidates if each.applies]
    return case._asdict() | {
        "seconds": os.times().user - started_s,
        "times_s": {each.schedule: each.time_s for each in applying},
        "bound_by": {each.schedule: each.bottleneck for each in applying},
        "refused": {each.schedule: each.reason for each in candidates if not each.applies},
    }


def publish(folder: Path = RESULTS) -> None:
    """Write the table from the record."""
    rows = json.loads((folder / "ranking.json").read_text())["rows"]
    head = (
        "Causal attention, forward and backward, heads of 128, bf16: the three schedules that are predicted to be the "
        "fastest, with their time and their speed-up over the fastest single ring, and how many of all are within "
        f"{TIE:.0%} of the first. Made by "
        f"`python -m experiments.tables.ranking`, which ranks all schedules without variants "
        f"({len(_names(rows))} names on these machines; the record has all times). Kernels by shape, links, library "
        "and contention: `tasp-lab profile show MACHINE`. Each time has a wide interval: `tasp-lab compare` lists "
        "the ties. On "
        f"{MANY_RANKS} GPUs only two lengths were ranked, because each takes a core half a minute."
    )
    columns = (
        "machine, heads/KV heads, positions",
        "fastest single ring",
        "first",
        "second",
        "third",
        f"within {TIE:.0%}",
    )
    table = markdown_table(columns, [_cells(row) for row in rows])
    text = "\n\n".join((head, "\n".join(map(_winners, _by_machine(rows))), table))
    write_page(folder / "ranking.md", text)


def fastest_ring(row: Record) -> str:
    """The name of the fastest schedule over one ring."""
    return next(str(name) for name in row["times_s"] if name in SINGLE_RINGS)


def speed_up(row: Record, name: str) -> float:
    """Over the fastest single ring."""
    return float(row["times_s"][fastest_ring(row)] / row["times_s"][name])


def _case(row: Record) -> Case:
    return Case(*(row[field] for field in Case._fields))


def _order(case: Case) -> tuple[int, str, int, int, int]:
    known = MACHINES.index(case.machine) if case.machine in MACHINES else len(MACHINES)
    return known, case.machine, case.heads, case.kv_heads, case.sequence


def _names(rows: Iterable[Record]) -> set[str]:
    return {name for row in rows for name in (*row["times_s"], *row["refused"])}


def _cells(row: Record) -> list[str]:
    case, ring = _case(row), fastest_ring(row)
    first = [f"{name}, {format_time(row['times_s'][name])}, {speed_up(row, name):.2f}x" for name in row["times_s"]]
    tied = sum(time_s <= (1 + TIE) * row["times_s"][_first(row)] for time_s in row["times_s"].values())
    return [
        f"{case.machine}, {case.heads}/{case.kv_heads}, {case.sequence // 2**10} Ki",
        f"{ring}, {format_time(row['times_s'][ring])}",
        *(first + ["-"] * BEST)[:BEST],
        f"{tied} of {len(row['times_s'])}",
    ]


def _by_machine(rows: Sequence[Record]) -> list[list[Record]]:
    names = dict.fromkeys(row["machine"] for row in rows)
    return [[row for row in rows if row["machine"] == name] for name in names]


def _winners(rows: Sequence[Record]) -> str:
    """Who wins on a machine, by how much, and what most of the critical path of winner and ring is spent on."""
    won = [row for row in rows if speed_up(row, _first(row)) > 1 + TIE]
    text = (
        f"- {rows[0]['machine']}: in {len(rows) - len(won)} of {len(rows)} layers the fastest single ring is within "
        f"{TIE:.0%} of the first."
    )
    if not won:
        return text
    gains = [speed_up(row, _first(row)) for row in won]
    ring, first = ([row["bound_by"][name(row)] for row in won] for name in (fastest_ring, _first))
    others = "other" if len(won) == 1 else "others"
    return (
        f"{text} First in the {others}: {_counted(map(_first, won))}, up to {max(gains):.2f} times as fast; most of "
        f"their time goes to {_counted(first)}, that of the ring to {_counted(ring)}."
    )


def _first(row: Record) -> str:
    return str(next(iter(row["times_s"])))


def _counted(names: Iterable[str]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in Counter(names).most_common())


if __name__ == "__main__":
    main()
