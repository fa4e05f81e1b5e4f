"""Recommendations on Hopper and Blackwell, judged by full rankings under each other kernel that a stack runs there.

``python -m experiments.tables.other_kernels`` writes ``experiments/results/other_kernels.md``. A recommendation
*loses* under a kernel if another schedule is more than 2 % faster there in a ranking of all schedules. It is *named*
where the first lines of `compare` give another schedule for that kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from experiments.common import RESULTS, Formats, table, write_page
from tasp_lab.prediction.compare import compare
from tasp_lab.prediction.interval import DECIDED
from tasp_lab.workload.layer import Workload

MACHINES = ("h100-8", "h100-2x8", "h200-8", "b200-8", "b200-2x8")
LENGTHS = (8 * 2**10, 32 * 2**10, 128 * 2**10)
HEADS = ((32, 8), (64, 8))


@dataclass(frozen=True)
class Judged:
    """A recommendation under one other kernel: its loss over the fastest schedule there, and whether that is named."""

    machine: str
    layer: Workload
    schedule: str
    decided: bool
    kernel: str
    loss: float
    fastest: str
    named: bool

    @property
    def is_silent(self) -> bool:
        """Whether it loses more than `DECIDED` without a word."""
        return self.loss > DECIDED and not self.named


def judged(machine: str, layer: Workload) -> list[Judged]:
    """The recommendation for a layer, both passes, under each other kernel."""
    chosen = compare(machine, layer, passes="both", screen=True, jobs=2).recommendation
    assert chosen is not None
    found = []
    for other in chosen.otherwise:
        kernel = other.condition.removeprefix("--kernel ")
        ranking = compare(machine, layer, passes="both", screen=True, jobs=2, kernel=kernel)
        times_s = {each.schedule: float(each.time_s) for each in ranking.candidates if each.applies}
        fastest = min(times_s, key=lambda name: times_s[name])
        loss = times_s.get(chosen.schedule, float("inf")) / times_s[fastest] - 1
        named = other.regret > DECIDED
        found.append(Judged(machine, layer, chosen.schedule, chosen.is_decided, kernel, loss, fastest, named))
    return found


def page(rows: Sequence[Judged]) -> str:
    """The table."""
    columns: Formats = {
        "machine": lambda row: row.machine,
        "layer": lambda row: f"{row.layer.sequence // 1024}Ki, {row.layer.heads} heads ({row.layer.kv_heads} KV)",
        "recommended": lambda row: f"{row.schedule}, {'decided' if row.decided else 'open'}",
        "kernel": lambda row: row.kernel,
        "loses": lambda row: f"{row.loss:.1%}",
        "to": lambda row: row.fastest,
        "named": lambda row: "yes" if row.named else "no",
    }
    questions = {(row.machine, row.layer) for row in rows}
    losing = {(row.machine, row.layer) for row in rows if row.loss > DECIDED}
    silent = {(row.machine, row.layer) for row in rows if row.is_silent}
    head = (
        "Recommendations under other kernels that stacks run, causal layers, both passes, by "
        f"`python -m experiments.tables.other_kernels`: of {len(questions)} questions {len(losing)} have a "
        f"recommendation that loses more than {DECIDED:.0%} under another kernel, {len(silent)} where it is not named, "
        f"{sum(row.decided for row in rows if row.is_silent)} of them decided."
    )
    return "\n\n".join([head, table([row for row in rows if row.loss > DECIDED], columns)])


def main() -> None:
    """Write the table."""
    layers = [Workload(length, heads=q, kv_heads=kv, mask="causal") for length, (q, kv) in product(LENGTHS, HEADS)]
    rows = [row for machine, layer in product(MACHINES, layers) for row in judged(machine, layer)]
    write_page(RESULTS / "other_kernels.md", page(rows))


if __name__ == "__main__":
    main()
