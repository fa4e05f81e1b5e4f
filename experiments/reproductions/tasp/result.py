"""TASP over Ring Attention on eight MI300X: speed-ups and CCR, by length."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.common import markdown_table
from experiments.reproductions.reproduction import Figure, Found, Trial, interval_of, predicted, rows_of
from tasp_lab import Question, Workload, answer
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.sampling import DEFAULT_SAMPLING, machine_samples
from tasp_lab.prediction.answer import Answer
from tasp_lab.prediction.interval import Interval

MACHINE = "mi300x-8"
LAYER = Workload(8, 48, 20, 20, 64, "bf16", "full")
"""The batch is published. The script of the code times 20, 4 and 12 heads of 64, mask full: the first is assumed."""

STACK = "hamilton"
"""What runs both schedules: the code of the paper."""

CHANGES: dict[str, dict[str, Any]] = {
    "another kernel, aiter-asm": {"kernel": "aiter-asm"},
    "no contention": {"contention": False},
    "links alone, no library": {"library": "ideal"},
    "no host, concatenations and merges": {"stack": None},
}
SHAPES = {
    "32 heads of 128": replace(LAYER, heads=32, kv_heads=32, head_dim=128),
    "4 KV heads": replace(LAYER, kv_heads=4),
}

CCR_REASON = (
    "the published CCR grows 3.0 times while the sequence grows tenfold, where compute grows with its square and bytes "
    "with the sequence: no kernel, library, host or shape that was tried gives less than 8"
)
SPEED_UP_REASON = "it depends on the CCR, whose growth is not that of a kernel at a rate beside messages of a size"


def find() -> Found:
    """Predict all lengths, as they are and with each change."""
    figures = all_figures(LAYER)
    tried = {name: all_figures(LAYER, **change) for name, change in CHANGES.items()}
    tried |= {name: all_figures(layer) for name, layer in SHAPES.items()}
    trials = tuple(Trial(name, figures, found, growth(found)) for name, found in tried.items())
    return Found(figures, trials, (values({"as predicted": figures} | tried), grid_averages()))


def all_figures(layer: Workload, **change: Any) -> tuple[Figure, ...]:
    """Speed-up and CCR of all published lengths."""
    rows = rows_of(Path(__file__).parent / "mi300x.csv")
    found = [figures(row, layer, change) for row in rows]
    return tuple(pair[0] for pair in found) + tuple(pair[1] for pair in found)


def figures(row: dict[str, str], layer: Workload, change: dict[str, Any]) -> tuple[Figure, Figure]:
    """The speed-up and the CCR of a length, of which all ranks have as many positions."""
    sequence = int(row["sequence"])
    layer = replace(layer, sequence=sequence - sequence % 8)
    ring, fast = (predicted(MACHINE, name, layer, **({"stack": STACK} | change)) for name in ("ring-attention", "tasp"))
    low, _, high = interval_of(ring).over(interval_of(fast))
    ratio = float(ring.time_s / fast.time_s)
    published = float(row["speedup"]), float(row["ccr"])
    return (
        Figure(f"speed-up, {sequence} positions", "x", published[0], ratio, low, high, SPEED_UP_REASON),
        Figure(f"CCR of Ring Attention, {sequence} positions", "", published[1], *ccr(ring), CCR_REASON),
    )


def ccr(ring: Answer) -> tuple[float, float, float]:
    """Compute over communication, and its interval: that of the kernels' rate over that of messages."""
    assert ring.ccr is not None, "a ring communicates"
    samples = machine_samples(load_machine(MACHINE), DEFAULT_SAMPLING)
    factors = samples.of_rate(ring.rates["forward"], ring.layer.dtype, "forward")
    found = Interval(ring.ccr, ring.ccr / factors, interval_of(ring).residual)
    return found.time_s, found.low_s, found.high_s


def growth(figures: tuple[Figure, ...]) -> str:
    """How much the CCR grows from the first to the last length."""
    ratios = [each.predicted for each in figures if each.unit == ""]
    return f"the CCR grows {ratios[-1] / ratios[0]:.1f} times"


def values(tried: dict[str, tuple[Figure, ...]]) -> str:
    """A table of all predicted numbers, with each change."""
    names = list(tried)
    rows = [
        (first.what, f"{first.published:.3g}", *(f"{tried[name][index].predicted:.3g}" for name in names))
        for index, first in enumerate(tried[names[0]])
    ]
    return "## All predicted numbers\n\n" + markdown_table(("what", "published", *names), rows)


GRID = (128, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4, 2, 1)
GRID_HEADS = (20, 4, 12)
GRID_BASE, GRID_POSITIONS = 3360, 10**7
"""The grid of its script (MI300X-1 and H100-1): multiples of the base and batches, as far as their product fits."""

PUBLISHED_AVERAGES = {("mi300x-8", "full"): (1.57, 3.58), ("h100-8", "full"): (1.05, 2.31)}
"""Average and largest speed-up, from a summary of the paper (secondary)."""


def grid_averages() -> str:
    """A table of the average and the largest speed-up over the grid of its script, by machine."""
    rows = []
    for (machine, mask), (average, largest) in PUBLISHED_AVERAGES.items():
        speed_ups = {
            layer: float(ring.time_s / fast.time_s)
            for layer in grid_layers(mask)
            for ring, fast in [[answer(grid_question(machine, name, layer)) for name in ("ring-attention", "tasp")]]
        }
        best = max(speed_ups, key=lambda layer: speed_ups[layer])
        at = f"{best.sequence} positions, batch {best.batch}, {best.heads} heads"
        mean = sum(speed_ups.values()) / len(speed_ups)
        rows.append((f"{machine}, {mask} mask", f"{average:.2f}", f"{mean:.2f}", f"{largest:.2f}",
                     f"{speed_ups[best]:.2f}", at))  # fmt: skip
    head = (
        "## Averages of its grid\n\nAll lengths, batches and numbers of heads of its script, of 64 elements each, "
        "weighted alike. Which of them the published averages are over is not known.\n\n"
    )
    columns = ("machine", "published average", "predicted", "published largest", "predicted", "at")
    return head + markdown_table(columns, rows)


def grid_layers(mask: str) -> list[Workload]:
    """The layers of the grid."""
    return [
        Workload(GRID_BASE * times, batch, heads, heads, 64, "bf16", mask)
        for heads in GRID_HEADS
        for times in GRID
        for batch in GRID
        if GRID_BASE * times * batch <= GRID_POSITIONS
    ]


def grid_question(machine: str, schedule: str, layer: Workload) -> Question:
    """A question without an interval."""
    return Question(machine, schedule, layer, stack=STACK, sampling=None)
