"""How time and memory of a causal layer grow with ranks: whole commands, and the exponents between them.

``python -m experiments.benchmarks.scale`` predicts both passes on 8 to 128 nodes of 8 H100, once each, and writes
``experiments/benchmarks/results/scale.md``. Processor time, as wall time depends on what else runs.
"""

from __future__ import annotations

import argparse
import math
from itertools import pairwise

from experiments.benchmarks.commands import LAYER, RESULTS, Run, run_command
from experiments.common import machine_record, markdown_table
from tasp_lab.core.files import write_whole

NODES = (8, 16, 32, 64, 128)
SCHEDULES = ("tasp", "zigzag-ring-attention")
RANKS_PER_NODE = 8

PLANNED_RANKS = 100_000

PLAN = """\
## What {planned:,} GPUs would need

With P ranks, r rings and two spans per rank (zigzag), a pass of keys and values has 2 r P (P - 1) transfers, a backward
pass twice as many. No two ranks are alike: which part of a block the causal mask needs differs by rank and step, and
with it the shapes of calls. So the exponent tends to 2, and 1.3 is reached only while a fixed part of the time (start,
imports, rings) counts.

| for tasp with 8 rings | 1,024 ranks | {planned:,} ranks |
|---|---|---|
| transfers, both passes | {transfers[0]:.2g} | {transfers[1]:.2g} |
| calls | {calls[0]:.2g} | {calls[1]:.2g} |
| who starts and ends with what, coverage: 3 bytes each | {masks_gb[0]:.2g} GB | {masks_gb[1]:,.0f} GB |
| operations of a step backward, 350 bytes each | {window_gb[0]:.2g} GB | {window_gb[1]:.2g} GB |

Ranks drift apart, so operations of some tens of steps are in progress at once. What is in buffers takes no more than
these: a copy is looked up among those that came at the step before.

From {ranks:,} ranks in {cpu_s:.0f} s, with the exponent 2: {days:.1f} days of one core. So it takes other structure, in
this order:

1. *Masks.* What a rank starts with, ends with and needs follows from owner and span: formulas of a few numbers. Then
   memory grows with P r, not with P squared.
2. *Classes.* Around one ring, ranks differ at a step by whether they are above or below a threshold. Two or three
   shapes of calls are left per step, and ranks that had the same shapes so far are one class until the threshold passes
   between them. Rings over all nodes are alike up to a rotation by a node, but for the same threshold. If C classes of
   ranks are left, time grows with C P instead of P squared.
3. *Steady states.* Where no threshold passes, the events of a step repeat with the same distances in time, and are
   found once.

None of the three is built. The first would make 10,000 ranks fit into memory.
"""


def main() -> None:
    """Run the commands, those of few ranks first, and write the page after each of them."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=NODES, help="numbers of nodes")
    runs: dict[tuple[str, int], Run] = {}
    for nodes in parser.parse_args().nodes:
        for schedule in SCHEDULES:
            runs[schedule, nodes] = run_command(f"predict h100-{nodes}x8 {LAYER} --schedule {schedule}")
            print(schedule, nodes, runs[schedule, nodes], flush=True)
            write_whole(RESULTS / "scale.md", page(runs).encode())


def exponents(runs: dict[tuple[str, int], Run], schedule: str) -> dict[int, float]:
    """For each number of nodes but the smallest, the exponent of processor time against ranks from the one before."""
    sizes = sorted(nodes for name, nodes in runs if name == schedule)
    return {
        more: math.log(runs[schedule, more].cpu_s / runs[schedule, fewer].cpu_s) / math.log(more / fewer)
        for fewer, more in pairwise(sizes)
    }


def page(runs: dict[tuple[str, int], Run]) -> str:
    """The result page."""
    rows = []
    for schedule in SCHEDULES:
        growth = exponents(runs, schedule)
        rows += [
            [schedule, f"{nodes * RANKS_PER_NODE:,}", f"{run.cpu_s:.1f}", f"{run.peak_bytes / 1e9:.2f}",
             f"{growth[nodes]:.2f}" if nodes in growth else ""]
            for (name, nodes), run in runs.items() if name == schedule
        ]  # fmt: skip
    made = machine_record()
    head = (
        f"`tasp-lab predict h100-Nx8 {LAYER}`, whole commands, one run each, made by "
        f"`python -m experiments.benchmarks.scale` on {made['cores']} cores ({made['processor']}, {made['date']}). "
        "The exponent is that of processor time against ranks, from the row above."
    )
    table = markdown_table(("schedule", "ranks", "CPU s", "peak GB", "exponent"), rows)
    return f"# Time and memory against ranks\n\n{head}\n\n{table}\n\n{plan(runs)}"


def plan(runs: dict[tuple[str, int], Run]) -> str:
    """What many more ranks would need, from the largest run of the first schedule."""
    nodes = max(nodes for name, nodes in runs if name == SCHEDULES[0])
    ranks, cpu_s = nodes * RANKS_PER_NODE, runs[SCHEDULES[0], nodes].cpu_s
    sizes = (1024, PLANNED_RANKS)
    per_rank = 2 * RANKS_PER_NODE  # circulating blocks: spans times rings
    return PLAN.format(
        planned=PLANNED_RANKS,
        ranks=ranks,
        cpu_s=cpu_s,
        days=cpu_s * (PLANNED_RANKS / ranks) ** 2 / 86_400,
        transfers=[3 * per_rank * n * (n - 1) for n in sizes],
        calls=[2 * 2 * n * n for n in sizes],
        masks_gb=[3 * (per_rank + 2) * n * n / 1e9 for n in sizes],
        window_gb=[350 * 2 * per_rank * n / 1e9 for n in sizes],
    )


if __name__ == "__main__":
    main()
