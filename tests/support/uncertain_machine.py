"""A family of machines whose times are formulas of two uncertain constants: a link's rate and a compute rate."""

from __future__ import annotations

from pathlib import Path

from tasp_lab.study.point import Point
from tasp_lab.workload.layer import Workload

BANDWIDTH, RATE = 1e9, 1e14
FILE = """name = "mine"
summary = "two constants are uncertain"
library = "ideal"
inside = "full-mesh"
ranks_per_node = 4

[[constants]]
name = "link_bandwidth"
value = "1GB/s"
source = "a data sheet"
interval = "20%"

[[constants]]
name = "link_latency"
value = "0s"
source = "a data sheet"

[[constants]]
name = "compute_rate"
value = "100TFLOP/s"
source = "assumed: about as much as others"
interval = ["80TFLOP/s", "110TFLOP/s"]
"""


def uncertain_machine(folder: Path) -> str:
    """The name of the machine with two ranks."""
    path = folder / "mine.toml"
    path.write_text(FILE)
    return f"{path}:2"


def ring_point(machine: str, seq: int, **layer: int) -> Point:
    """Ring attention forward, one head."""
    labels = (("machine", machine), ("seq", seq), ("schedule", "ring-attention"))
    return Point(machine, "ring-attention", Workload(seq, **{"heads": 1, "mask": "full"} | layer), labels=labels)


def ring_time_s(seq: int, link: float = 1.0, compute: float = 1.0) -> float:
    """Two halves of the work of a rank, beside the second of which nothing moves: the block is sent beside the first.

    `link` and `compute` are factors of the two rates. T = K / 2 + max(K / 2, C).
    """
    half_s = 4 * 128 * (seq / 2) ** 2 / (RATE * compute)
    sent_s = 2 * 2 * 128 * (seq / 2) / (BANDWIDTH * link)
    return half_s + max(half_s, sent_s)
