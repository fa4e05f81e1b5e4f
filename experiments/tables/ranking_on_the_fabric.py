"""The measured ranking of all schedules of attention on the emulated fabric beside the predicted one.

Eight processes run the forward pass of one causal layer by every schedule that applies, on a mesh, behind a switch and
on two nodes of four. Kernel calls are waits; those of the zigzag ring take `CCR` of its communication. The command
``python -m experiments.tables.ranking_on_the_fabric`` writes ``experiments/results/ranking_on_the_fabric.json`` after
each topology, and its table ``.md``. It takes about eight minutes on two idle cores; ``--only PART``, several times,
repeats some topologies and keeps the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

from experiments.common import BUSY, RESULTS, TIMES, Formats, Record, read_record, table, write_page
from experiments.tables.on_the_fabric import chosen, layer_text, rate_of, replace_part, rows_on_fabric
from experiments.tables.schedules_on_the_fabric import Part, applying
from tasp_lab import Workload

LAYER = Workload(8 * 28 * 3, heads=16, kv_heads=8, head_dim=128, mask="causal")
PARTS = {
    "mesh": Part("full-mesh:8", LAYER),
    "switch": Part("switch:8", LAYER, slow_motion=1.5),
    "nodes": Part("nodes:2x4", LAYER),
}
CCR = 0.25
REPEATS = 3
TIE, TARGET = 0.03, 0.10


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the chosen topologies, and write the record and the table."""
    for key in chosen("Rank all schedules of attention on the emulated fabric.", PARTS, arguments):
        measure(key, PARTS[key])
    publish()


def measure(key: str, part: Part, repeats: int = REPEATS, folder: Path = RESULTS) -> None:
    """Run all schedules on the fabric of a part and put them into the record, replacing those of an earlier one."""
    rate = rate_of(part, CCR)
    rows = rows_on_fabric(part, applying(part)[0], rate, repeats)
    found = {
        "topology": part.topology, "scale": part.scale, "repeats": repeats, "layer": layer_text(part.layer),
        "flops_per_s": rate, "rows": sorted(rows, key=lambda row: float(row["predicted_s"])),
    }  # fmt: skip
    replace_part(folder / "ranking_on_the_fabric.json", key, found)


def out_of_order(rows: Sequence[Record]) -> list[tuple[str, str]]:
    """The pairs of which the first is predicted to be the faster one but is measured to be the slower one, no ties.

    A tie is a pair whose predicted or measured times differ by at most `TIE` of the longer one.

    >>> times = (("a", 1.0, 2.0), ("b", 1.1, 1.0), ("c", 1.11, 0.9))
    >>> out_of_order([{"schedule": name, "predicted_s": p, "measured_s": m} for name, p, m in times])
    [('a', 'b'), ('a', 'c')]
    """
    found = []
    for first, second in combinations(sorted(rows, key=lambda row: float(row["predicted_s"])), 2):
        tie = any(
            abs(first[time] - second[time]) <= TIE * max(first[time], second[time])
            for time in ("predicted_s", "measured_s")
        )
        if not tie and first["measured_s"] > second["measured_s"]:
            found.append((first["schedule"], second["schedule"]))
    return found


def publish(folder: Path = RESULTS) -> None:
    """Write the tables from the record."""
    record = read_record(folder / "ranking_on_the_fabric.json")
    parts = [record["parts"][key] for key in PARTS if key in record["parts"]]
    head = (
        "All schedules that apply to a layer, by predicted time, forward, on eight emulated ranks; kernel calls are "
        f"waits that take {CCR} of the communication of the zigzag ring. Made by "
        f"`python -m experiments.tables.ranking_on_the_fabric` on {record['machine']['cores']} cores "
        f"({record['machine']['date']})."
    )
    text = "\n\n".join([head, *map(_part_text, parts), verdict(parts)])
    write_page(folder / "ranking_on_the_fabric.md", text)


def _part_text(part: Record) -> str:
    by_time = sorted(part["rows"], key=lambda row: float(row["measured_s"]))
    place = {row["schedule"]: str(number) for number, row in enumerate(by_time, start=1)}
    columns: Formats = {"schedule": "{schedule}", "measured place": lambda row: place[row["schedule"]], **TIMES, **BUSY}
    head = f"{part['topology']}, {part['layer']}, scale {part['scale']:.3g}, medians of {part['repeats']} repeats:"
    pairs = "; ".join(f"{first} before {second}" for first, second in out_of_order(part["rows"])) or "none"
    return f"{head}\n\n{table(part['rows'], columns)}\n\nPredicted in the wrong order, ties apart: {pairs}."


def verdict(parts: Sequence[Record]) -> str:
    """How many pairs are in order and how many times within the target, and the worst."""
    rows = [(abs(row["relative_error"]), row["schedule"], part["topology"]) for part in parts for row in part["rows"]]
    pairs = sum(len(part["rows"]) * (len(part["rows"]) - 1) // 2 for part in parts)
    wrong = sum(len(out_of_order(part["rows"])) for part in parts)
    far = [
        f"{name} on {topology} {error:.1%}" for error, name, topology in sorted(rows, reverse=True) if error > TARGET
    ]
    return (
        f"Verdict: {wrong} of {pairs} pairs are in the wrong order by more than {TIE:.0%}; {len(rows) - len(far)} of "
        f"{len(rows)} times are within {TARGET:.0%} of their prediction"
        + (f", not: {', '.join(far)}." if far else f", the worst is off by {max(rows)[0]:.1%}.")
    )


if __name__ == "__main__":
    main()
