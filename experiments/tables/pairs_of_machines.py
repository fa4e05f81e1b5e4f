"""Messages between named pairs of GPUs at once, measured and predicted: the component tables of machines of layers.

``python -m experiments.tables.pairs_of_machines h800=FILE.csv a800=FILE.csv ...`` reads tables with the columns
``nodes,module,pattern,bytes,time_us`` and writes ``experiments/results/pairs_of_machines.md``. A pattern lists
[source;destination] ranks, of nodes of eight. A pair is taken to have a communicator of its own, as torch.distributed
makes for send and receive that are not batched: its channels are those of two ranks.
"""

from __future__ import annotations

import csv
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

from experiments.common import markdown_table
from sim.simulate import simulate
from tasp_lab.core.files import write_whole
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.libraries.channels import ChannelLibrary
from tasp_lab.machines.machine import Machine
from tasp_lab.schedule.blocks import Blocks
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.schedule import Schedule

RESULTS = Path(__file__).parents[1] / "results" / "pairs_of_machines.md"
SIZES = {"up to 64 KiB": (0, 2**16), "to 8 MiB": (2**16, 2**23), "to 128 MiB": (2**23, 2**27), "above": (2**27, 2**40)}
PER_NODE = 8

Pairs = list[tuple[int, int]]


def rows_of(path: str) -> Iterator[tuple[str, Pairs, int, float]]:
    """Module, pairs, bytes and seconds of each row of a table."""
    lines = [line for line in Path(path).read_text().splitlines() if not line.startswith("#")]
    for row in csv.DictReader(lines):
        pairs = [(int(a), int(b)) for a, b in re.findall(r"\[(\d+);(\d+)\]", row["pattern"])]
        yield row["module"] or "not stated", pairs, int(row["bytes"]), float(row["time_us"]) * 1e-6


def machine_of(family: str, pairs: Pairs) -> Machine:
    """Nodes of eight with the channels of a communicator of two ranks."""
    away = any(a // PER_NODE != b // PER_NODE for a, b in pairs)
    nodes = 1 + max(max(pair) for pair in pairs) // PER_NODE
    library = load_machine(f"{family}-2x1" if away else f"{family}-2").comm_library
    assert isinstance(library, ChannelLibrary)
    return replace(load_machine(f"{family}-{nodes}x{PER_NODE}"), comm_library=replace(library, domain_ranks=PER_NODE))


def messages(pairs: Pairs, size_bytes: int, world_size: int) -> Schedule:
    """One message per pair, all in one step."""
    source, destination = np.array(pairs).T
    number, before = np.arange(len(pairs)), Counter[int]()
    lane = []
    for rank in source.tolist():
        lane.append(before[rank])
        before[rank] += 1
    at_first = np.zeros((world_size, len(pairs)), dtype=bool)
    at_first[source, number] = True
    at_last = at_first.copy()
    at_last[destination, number] = True
    blocks = Blocks.of_data(np.full(len(pairs), size_bytes))
    step = Step(source, destination, np.array(lane), number)
    return Schedule("pairs", world_size, max(lane) + 1, blocks, at_first, at_last, [step])


def errors_of(family: str, path: str) -> dict[tuple[str, str, str], list[float]]:
    """The relative errors by where pairs are, by module, and by size."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for module, pairs, size_bytes, time_s in rows_of(path):
        machine = machine_of(family, pairs)
        predicted_s = float(simulate(messages(pairs, size_bytes, machine.topology.world_size), machine, "array").time_s)
        where = "between nodes" if any(a // PER_NODE != b // PER_NODE for a, b in pairs) else "in a node"
        size = next(name for name, (low, high) in SIZES.items() if low < size_bytes <= high)
        found.setdefault((where, module, size), []).append(predicted_s / time_s - 1)
    return found


def main(arguments: list[str]) -> None:
    rows = []
    for argument in arguments:
        family, _, path = argument.partition("=")
        for (where, module, size), errors in errors_of(family, path).items():
            cells = (f"{median(errors):+.0%}", f"{median(map(abs, errors)):.0%}", f"{max(errors, key=abs):+.0%}")
            rows.append((family, where, module, size, str(len(errors)), *cells))
    header = ("profile", "pairs", "module", "bytes per pair", "rows", "median error", "median |error|", "worst")
    text = """# Messages between pairs of GPUs

Predicted against measured (oliverYoung2001/UltraAttn b5aa10e1, prof_data).
The largest messages of `a800` and `h800` calibrated the payload of their links and NICs, so these rows judge nothing.
Of torch-distributed, both directions of a pair follow one another, which is not modelled.
"""
    write_whole(RESULTS, f"{text}\n{markdown_table(header, rows)}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1:])
