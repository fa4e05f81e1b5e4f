"""How far arrivals on topologies with routes of many links are from SimGrid's.

``python -m experiments.tables.against_simgrid`` needs SimGrid (apt-get install python3-simgrid) and writes
``experiments/results/against_simgrid.md``; `tests/sim/test_against_simgrid.py` holds the same cases to a millionth.
"""

from __future__ import annotations

import sys

import numpy as np

from experiments.common import RESULTS, markdown_table, write_page
from tasp_lab.topology.graph import Topology
from tests.support.simgrid.comparison import (
    ROUTED_SCHEDULES,
    largest_differences,
    messages_of,
    routed_case,
    routed_topologies,
    simgrid_python,
)


def main() -> int:
    """Write the table; 2 without SimGrid."""
    if (python := simgrid_python()) is None:
        print("no SimGrid 3.32 for the system's Python, expected python3-simgrid: apt-get install python3-simgrid")
        return 2
    rows, largest, messages = [], 0.0, 0
    for topology in routed_topologies():
        cases = [routed_case(topology, name) for name in ROUTED_SCHEDULES]
        differences = largest_differences(python, cases)
        messages += sum(len(messages_of(schedule)) for _, schedule, _ in cases)
        largest = max(largest, *differences)
        rows.append([topology.name, _forwarded(topology), *(f"{difference:.1e}" for difference in differences)])
    columns = ("topology", "pairs that others forward", *ROUTED_SCHEDULES)
    head = (
        "Relative difference between the arrivals of messages in SimGrid and in our two engines, the largest of each "
        f"schedule, made by `python -m experiments.tables.against_simgrid`: {largest:.1e} at most, {messages:,} "
        "messages. Both have the routes of the topology; calls take no time."
    )
    write_page(RESULTS / "against_simgrid.md", f"{head}\n\n{markdown_table(columns, rows)}")
    return 0


def _forwarded(topology: Topology) -> str:
    pairs = topology.world_size * (topology.world_size - 1)
    return f"{pairs - int(np.count_nonzero(topology.linked_pairs))} of {pairs}"


if __name__ == "__main__":
    sys.exit(main())
