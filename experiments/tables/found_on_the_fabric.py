"""Found schedules beside the best named ones, predicted and measured on the emulated fabric.

    python -m experiments.tables.found_on_the_fabric [PART]...

For five layers whose time is that of their messages, `search` finds a schedule for the fabric. It and the best named
one run in turns, both passes, on real processes, with kernel calls that are waits. What is saved is the median over the
turns of one minus found over named, so other load on the cores touches both. Then the found schedule runs once with
real kernels in 32 bits, and ranks compare results and gradients with float64. The schedules are in
``experiments/results/found_on_the_fabric/``, the record beside them. It takes about a quarter of an hour on idle cores.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from experiments.common import RESULTS, Formats, Record, read_record, table, write_page, write_record
from experiments.tables.fabric import Case, layer_text
from tasp_lab import search, validate
from tasp_lab.core.progress import print_progress as progress

TARGET = 0.05
"""By how much the share that is saved may differ from the predicted one."""

TURNS, EFFORT, CCR = 5, 120, 0.25

PARTS = {
    name: Case(topology, sequence=sequence, ccr=CCR, slow_motion=2.0, without=tuple(without))
    for name, topology, sequence, *without in (
        ("nodes", "nodes:2x2", 1024),
        ("switch", "switch:5", 960),
        ("torus", "torus:2x3", 960),
        ("fat-tree", "fat-tree:2x3:2", 960),
        ("broken", "full-mesh:5", 960, "link.0-1"),
    )
}


def main(parts: Sequence[str] = ()) -> None:
    """Measure these parts, by default all, and write the record and the page."""
    for key in parts or PARTS:
        measure(key, PARTS[key])
    publish()


def measure(key: str, part: Case, turns: int = TURNS, effort: int = EFFORT, folder: Path = RESULTS) -> None:
    """Search, run both schedules in turns, check the found one, and put all into the record."""
    rate = part.flops_per_s()
    links = part.links.scaled(part.scale).map_links(lambda _, link: replace(link, latency_s=0.0))
    found = search(links, part.layer, effort=effort, passes="both", compute=rate)
    assert found.named is not None, "ring attention applies to every layer"
    named = found.named.schedule
    progress(str(found).splitlines()[0])
    file = folder / "found_on_the_fabric" / f"{key}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    found.save(file)
    load = os.getloadavg()[0]
    runs = validate(
        part.links, [named, str(file)] * turns, part.layer, passes="both", compute=rate, scale=part.scale, repeats=1,
        progress=progress,
    ).runs  # fmt: skip
    both = [run for run in runs if run.prediction.is_sum]
    validate(  # ranks raise an error where a result or a gradient differs from float64
        part.links, str(file), replace(part.layer, dtype="fp32"), passes="both", compute="real", fabric="local",
        repeats=1, progress=progress,
    )  # fmt: skip
    row = {
        "topology": part.links.name, "layer": layer_text(part.layer), "scale": part.scale, "flops_per_s": rate,
        "named": named, "load_before": load, "load_after": os.getloadavg()[0], "bound_s": found.bound_s,
        "named_predicted_s": float(both[0].prediction.time_s), "found_predicted_s": float(both[1].prediction.time_s),
        "named_measured_s": [run.measured_s for run in both[::2]],
        "found_measured_s": [run.measured_s for run in both[1::2]],
        "explained": found.explained,
    }  # fmt: skip
    path = folder / "found_on_the_fabric.json"
    parts = read_record(path)["parts"] if path.exists() else {}
    write_record(path, {"parts": parts | {key: row}})


def saved(row: Record) -> tuple[float, float]:
    """The share of the time of the named schedule that the found one saves, predicted and measured.

    >>> times = {"named_predicted_s": 2.0, "found_predicted_s": 1.5}
    >>> saved(times | {"named_measured_s": [2.0, 4.0, 2.0], "found_measured_s": [1.0, 3.0, 1.5]})
    (0.25, 0.25)
    """
    turns = zip(row["named_measured_s"], row["found_measured_s"], strict=True)
    predicted: float = 1 - row["found_predicted_s"] / row["named_predicted_s"]
    return predicted, statistics.median(1 - found / named for named, found in turns)


def publish(folder: Path = RESULTS) -> None:
    """Write the page from the record."""
    record = read_record(folder / "found_on_the_fabric.json")
    rows = [record["parts"][key] for key in PARTS if key in record["parts"]]
    near = sum(abs(predicted - measured) <= TARGET for predicted, measured in map(saved, rows))
    head = (
        "# Found schedules on the emulated fabric\n\n"
        "Both passes of layers whose time is that of messages: kernel calls "
        f"are waits that take {CCR} of the communication of the\nzigzag ring. Searched for the fabric, {EFFORT} "
        "simulated passes each, and run in turns with the best named schedule. Times are medians of\nthe turns, "
        "savings "
        f"medians of their ratios. Made by `python -m experiments.tables.found_on_the_fabric` on "
        f"{record['machine']['cores']} cores\n({record['machine']['date']}), which others used too: the load is the "
        "number of processes that wanted one.\n\n"
        f"- What is saved, as a share of the named time, is within {100 * TARGET:.0f} points of the prediction on "
        f"{near} of {len(rows)} layers.\n"
        f"- Each found schedule ran once with real kernels in 32 bits: on all ranks, results and gradients were those "
        "of float64 within rounding."
    )
    columns: Formats = {
        "topology": "{topology}",
        "best named": "{named}",
        "predicted": "{named_predicted_s:.3f} s",
        "measured": lambda row: f"{statistics.median(row['named_measured_s']):.3f} s",
        "found, predicted": "{found_predicted_s:.3f} s",
        "found, measured": lambda row: f"{statistics.median(row['found_measured_s']):.3f} s",
        "saved, predicted": lambda row: f"{saved(row)[0]:.1%}",
        "saved, measured": lambda row: f"{saved(row)[1]:.1%}",
        "load": "{load_before:.0f} to {load_after:.0f}",
    }
    words = "\n".join(
        f"- {row['topology']}, {row['layer']}, scale {row['scale']:.3g}: {'; '.join(row['explained'])}." for row in rows
    )
    write_page(folder / "found_on_the_fabric.md", f"{head}\n\n{table(rows, columns)}\n\n## What was found\n\n{words}")


if __name__ == "__main__":
    main(sys.argv[1:])
