"""All parts of the table, the record and the report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from experiments.common import RESULTS, Record, write_page
from experiments.tables.linear_on_the_fabric.crossovers import SWEEPS, measure_sweep, sweep_text
from experiments.tables.linear_on_the_fabric.hops import HOPS, hops_text, measure_hops
from experiments.tables.linear_on_the_fabric.layers import (
    KV_HEADS,
)
from experiments.tables.linear_on_the_fabric.overlap import OVERLAPS, measure_overlap, overlap_text
from experiments.tables.on_the_fabric import (
    chosen,
    replace_part,
    verdict,
)

NAME = "linear_on_the_fabric"

PARTS = (*HOPS, *SWEEPS, *OVERLAPS)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the chosen parts, and write the record and the table."""
    for key in chosen("Schedules of linear attention on the emulated fabric.", PARTS, arguments):
        replace_part(RESULTS / f"{NAME}.json", key, measure(key))
    publish()


def measure(key: str) -> Record:
    """A part by its name."""
    if key in HOPS:
        return measure_hops(HOPS[key])
    if key in SWEEPS:
        return measure_sweep(SWEEPS[key])
    return measure_overlap(OVERLAPS[key])


def publish(folder: Path = RESULTS) -> None:
    """Write the table from the record."""
    record = json.loads((folder / f"{NAME}.json").read_text())
    parts: dict[str, Record] = {key: record["parts"][key] for key in PARTS if key in record["parts"]}
    head = (
        f"Causal layers of linear attention with {KV_HEADS} KV heads on eight emulated ranks; made by "
        f"`python -m experiments.tables.{NAME}` on {record['machine']['cores']} cores ({record['machine']['date']}). "
        "tau is the time of a state on a link; the theory has neither latency nor headers. Spread is the slowest "
        "repeat minus the fastest."
    )
    text = "\n\n".join([head, *(_text(key, part) for key, part in parts.items()), verdict(parts.values())])
    write_page(folder / f"{NAME}.md", text)


def _text(key: str, part: Record) -> str:
    if key in HOPS:
        return hops_text(part)
    return sweep_text(SWEEPS[key], part) if key in SWEEPS else overlap_text(part)
