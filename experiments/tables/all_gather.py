"""Predicted against measured AllGather on five emulated topologies.

``python -m experiments.tables.all_gather [TOPOLOGY ...]`` writes ``experiments/results/all_gather/TOPOLOGY.json`` after
each topology, and the table ``experiments/results/all_gather.md`` from all existing files.
"""

from __future__ import annotations

import sys
from pathlib import Path

from experiments.common import RESULTS, Record, comparison_table, read_record, write_page, write_record
from tasp_lab import validate
from tasp_lab.core.progress import print_progress as progress

TOPOLOGIES = ("full-mesh:4", "full-mesh:5", "full-mesh:8", "switch:8", "nodes:2x4")
SCHEDULES = ("ring", "multi-ring", "direct")
SHARD_BYTES = 4 * 2**20
REPEATS = 5


def main() -> None:
    """Measure the topologies of the command line, by default all, and write the table."""
    for text in sys.argv[1:] or TOPOLOGIES:
        comparison = validate(text, SCHEDULES, SHARD_BYTES, repeats=REPEATS, progress=progress)
        write_record(_file(text), comparison.to_dict())
    records = [read_record(_file(text)) for text in TOPOLOGIES if _file(text).exists()]
    write_page(RESULTS / "all_gather.md", _table(records))


def _file(topology: str) -> Path:
    return RESULTS / "all_gather" / f"{topology.replace(':', '-')}.json"


def _table(records: list[Record]) -> str:
    dates = sorted({record["machine"]["date"] for record in records})
    head = (
        f"AllGather of {SHARD_BYTES} bytes per rank on the emulated fabric, medians of {REPEATS} repeats, made by "
        f"`python -m experiments.tables.all_gather` on {records[0]['machine']['cores']} cores ({', '.join(dates)}). "
        "Spread: slowest minus fastest repeat. Speed-up: over ring. Bound: the topology's nominal bandwidth at the "
        "fabric's scale, packet headers not counted."
    )
    return f"{head}\n\n{comparison_table(records)}"


if __name__ == "__main__":
    main()
