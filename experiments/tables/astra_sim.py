"""AllGather, AllReduce and AllToAll in ASTRA-sim and here: the same schedules, exported as Chakra traces.

``ASTRA_SIM=…/AstraSim_Analytical_Congestion_Aware python -m experiments.tables.astra_sim`` runs each trace in ASTRA-sim
(astra-sim/astra-sim at 518bd51, analytical backend that models congestion) and writes
``experiments/results/astra_sim.md``. The program beside it, ``AstraSim_Analytical_Congestion_Unaware``, runs what needs
two dimensions or a switch that stores nothing. Without both programs the command ends and leaves the table as it is.

Links have 50 GiB/s, which ASTRA-sim calls GB/s, and 500 ns; the way through a switch is two links. There is no launch
cost on either side, and additions take no time.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import networkx as nx

from experiments.common import RESULTS, Formats, table, write_page
from sim.simulate import simulate
from tasp_lab.core.errors import RunError, TaspLabError
from tasp_lab.formats import chakra
from tasp_lab.machines.machine import Machine
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.build import collective
from tasp_lab.schedules.collectives.conditions import collectives_of
from tasp_lab.topology.builders import bidirectional_ring, full_mesh, switch
from tasp_lab.topology.graph import Topology

PROGRAM, UNAWARE = "AstraSim_Analytical_Congestion_Aware", "AstraSim_Analytical_Congestion_Unaware"
RANKS, BANDWIDTH_GIB, LATENCY_NS = 8, 50, 500
SIZES = (2**16, 2**20, 2**24)
SCHEDULES = ("ring", "multi-ring", "direct", "trees", "ring-all-reduce", "all-to-all")
SETTINGS = {
    "AllGather": "all-gather",
    "AllReduce": "all-reduce",
    "ReduceScatter": "reduce-scatter",
    "AllToAll": "all-to-all",
}
STREAMED, TWO_NODES = "Switch, streamed", "TwoNodes"
"""What the backend without congestion runs: rings through a switch, where no message is stored; and two full meshes of
four with a link from each rank to that of the same place in the other node."""

ALONE = ("ring", "multi-ring", "ring-all-reduce")
"""Schedules whose messages have links to themselves there."""

PAGE = RESULTS / "astra_sim.md"

ABOUT = """\
The same schedules in ASTRA-sim and here, made by `python -m experiments.tables.astra_sim`: eight ranks, links of
50 GiB/s and 500 ns, no launch cost; bytes are those of the shard of a rank. ASTRA-sim is astra-sim/astra-sim at 518bd51
with the analytical backend that models congestion (that without for *Switch, streamed* and *TwoNodes*); it runs our
Chakra traces as custom collectives.

"""

WHY = """

Where every message has its links to itself, both models are the same: latency plus bytes over bandwidth, and a message
is sent on when it has arrived. ASTRA-sim counts whole nanoseconds and rounds each hop down.

- *direct and all-to-all on the ring*: messages pass other ranks, where ASTRA-sim stores them and serves them in the
  order in which they arrive, so links idle for a fifth of the time. Here they stream through and share links max-min
  fairly: the links of the ring are busy until the end, with n * n / 8 messages each.
- *trees on the ring, 64 KiB*: chunks of several trees use one link. ASTRA-sim sends them in the order in which they
  arrive, here a lane sends them in the order of steps.
- *switch, one message per port*: ASTRA-sim stores a message in the switch before it sends it on, so its bytes take
  their time twice; here they stream through both links at once, as through a cut-through switch. Its backend without
  congestion lets them stream, too (*Switch, streamed*): the difference goes.
- *switch, several messages per port*: besides, ASTRA-sim serves them in the order in which they arrive, here they share
  the port max-min fairly and end together. So the way of one message to the switch overlaps with that of another from
  it, and with short messages the first of several rings hides the latency of the others.

*Two nodes* are full meshes of four with a link between ranks of the same place. That takes two dimensions, which only
the backend without congestion has. It routes a message that differs in both along the first alone, and messages do not
share links, so the rows are those of schedules whose messages go from neighbour to neighbour on links of their own.
"""


class Row(NamedTuple):
    """A schedule of a size per rank on a topology: its times in ASTRA-sim and here, in seconds."""

    topology: str
    schedule: str
    shard_bytes: int
    astra_s: float
    own_s: float


def program() -> str | None:
    """The program of ASTRA-sim with the other beside it: that of ``ASTRA_SIM``, or the one on the path, if any."""
    found = shutil.which(os.environ.get("ASTRA_SIM", PROGRAM))
    return found if found and Path(found).with_name(UNAWARE).exists() else None


def topologies() -> dict[str, Topology]:
    """By ASTRA-sim's names."""
    bandwidth, latency_s = BANDWIDTH_GIB * 2**30, LATENCY_NS * 1e-9
    two_nodes: nx.Graph[Any] = nx.cartesian_product(nx.complete_graph(2), nx.complete_graph(RANKS // 2))
    numbered = nx.convert_node_labels_to_integers(two_nodes)
    return {
        "FullyConnected": full_mesh(RANKS, bandwidth, latency_s),
        "Ring": bidirectional_ring(RANKS, bandwidth, latency_s),
        "Switch": switch(RANKS, bandwidth, 2 * latency_s),
        STREAMED: switch(RANKS, bandwidth, 2 * latency_s),
        TWO_NODES: Topology.from_networkx(numbered, bandwidth=f"{BANDWIDTH_GIB}GiB/s", latency=f"{LATENCY_NS}ns"),
    }


def run(binary: str, block: str, schedule: Schedule) -> float:
    """The time of a collective in ASTRA-sim, in seconds. Raises `RunError` if it does not end."""
    counts = (RANKS // 2, 2) if block == TWO_NODES else (RANKS,)
    blocks = ("FullyConnected",) * 2 if block == TWO_NODES else (block.split(",")[0],)
    network = {
        "topology": blocks,
        "npus_count": counts,
        "bandwidth": (BANDWIDTH_GIB,) * len(counts),
        "latency": (LATENCY_NS,) * len(counts),
    }
    with tempfile.TemporaryDirectory() as folder:
        command = [binary, *write_inputs(Path(folder), schedule, network)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    return end_s(done, schedule.world_size)


def write_inputs(
    folder: Path, schedule: Schedule, network: Mapping[str, Sequence[object]], is_native: bool = False
) -> list[str]:
    """Write the files of a collective for ASTRA-sim, which has to run in their folder; returns its options.

    `network` has topology, npus_count, bandwidth in GiB/s and latency in ns of each dimension. If `is_native`,
    ASTRA-sim's own ring runs a collective of the kind and size of the schedule, else the schedule itself.
    """
    kind = next(kind for kind in SETTINGS if kind in collectives_of(schedule))
    key, value = ("implementation", "ring") if is_native else ("implementation-custom", "plan")
    system = {
        "scheduling-policy": "LIFO",
        "endpoint-delay": 1,  # ns, the least: with 0 an assertion of ASTRA-sim fails
        "active-chunks-per-dimension": 1,
        "preferred-dataset-splits": 1,
        f"{SETTINGS[kind]}-{key}": [value],
        "local-mem-bw": 10**9,  # GB/s: additions take no time
    }
    plans = () if is_native else chakra.write(schedule)
    for rank, trace in enumerate(plans):
        (folder / f"plan.{rank}.et").write_bytes(trace)
    for rank in range(schedule.world_size):
        (folder / f"work.{rank}.et").write_bytes(chakra.workload(schedule))
    (folder / "network.yml").write_text(
        "".join(f"{key}: [ {', '.join(map(str, each))} ]\n" for key, each in network.items())
    )
    (folder / "system.json").write_text(json.dumps(system))
    (folder / "memory.json").write_text('{"memory-type": "NO_MEMORY_EXPANSION"}')
    files = {"workload": "work", "system": "system.json", "remote-memory": "memory.json", "network": "network.yml"}
    return [f"--{key}-configuration={file}" for key, file in files.items()]


def end_s(done: subprocess.CompletedProcess[str], ranks: int) -> float:
    """The time that a run of ASTRA-sim printed, in seconds. Raises `RunError` if not all ranks ended."""
    ends = [int(cycles) for cycles in re.findall(r"finished, (\d+) cycles", done.stdout)]
    if len(ends) != ranks:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise RunError(f"ASTRA-sim: {len(ends)} of {ranks} ranks ended {last}")
    return max(ends) * 1e-9


def rows(binary: str) -> list[Row]:
    """All schedules that have links on each topology, at all sizes."""
    found = []
    unaware = str(Path(binary).with_name(UNAWARE))
    for block, topology in topologies().items():
        alone = block in (STREAMED, TWO_NODES)
        for name in ALONE if alone else SCHEDULES:
            if block == STREAMED and name == "multi-ring":
                continue  # its rings share ports
            for size in SIZES:
                try:
                    schedule = collective(name, topology, size)
                except TaspLabError:
                    break  # messages between ranks without a link
                own_s = float(simulate(schedule, Machine(topology)).time_s)
                found.append(Row(block, name, size, run(unaware if alone else binary, block, schedule), own_s))
    return found


def page(rows: list[Row]) -> str:
    """The page, with a line per row."""
    columns: Formats = {
        "topology, schedule": "{topology}, {schedule}",
        "bytes per rank": "{shard_bytes:size}",
        "ASTRA-sim": "{astra_s:time}",
        "tasp-lab": "{own_s:time}",
        "difference": lambda row: f"{row['own_s'] / row['astra_s'] - 1:+.1%}",
    }
    return ABOUT + table((row._asdict() for row in rows), columns) + WHY


def main() -> None:
    """Write the page."""
    binary = program()
    if binary is None:
        sys.exit(f"ASTRA-sim is missing: set ASTRA_SIM to {PROGRAM}, beside {UNAWARE}; {PAGE.name} is left as it is")
    write_page(PAGE, page(rows(binary)))


if __name__ == "__main__":
    main()
