"""The layers of these tables, their schedules, and the time of a state."""

from __future__ import annotations

from typing import Any

from experiments.common import Record
from experiments.tables.on_the_fabric import (
    Part,
    Variant,
)
from tasp_lab import Workload
from tasp_lab.schedules.attention.options import AttentionOptions

MESH, SWITCH, NODES = "full-mesh:8", "switch:8", "nodes:2x4"
KV_HEADS = 28
"""A multiple of the seven rings of the mesh and of the four of two nodes."""

LAYER = Workload(8 * 64, heads=KV_HEADS, head_dim=64, mask="causal", kind="linear", decay="scalar")
GATHERS = ("lasp-2", "multi-ring-lasp-2", "direct-lasp-2", "trees-lasp-2")
PLAIN_GATHERS = ("lasp-2", "direct-lasp-2")
"""Around one ring, and straight to all; behind a switch all others load ports as these do."""

REPEATS = 3


def state_bytes(layer: Workload) -> int:
    """The bytes of the state of a chunk in float32, without its decay."""
    return 4 * layer.batch * layer.kv_head_count * layer.head_dim**2


def state_s(part: Part) -> float:
    """The time of a state on a link or port of the fabric, within nodes, in seconds: tau."""
    return state_bytes(part.layer) / float(part.links.scaled(part.scale).links[0].bandwidth_bytes_per_s)


def all_scan(pieces: int, passes: Any = "both") -> Variant:
    """All-Scan in so many pieces; in one it is LASP."""
    if pieces == 1:
        return Variant("lasp", AttentionOptions(passes))
    return Variant("all-scan", AttentionOptions(passes, pieces=pieces))


def times_of(row: Record) -> list[str]:
    """Predicted and measured time, spread, error and busy cores."""
    times = [f"{row[time]:.4g}" for time in ("predicted_s", "measured_s", "measured_spread_s")]
    return [*times, f"{row['relative_error']:+.1%}", f"{row['cpu_busy_share']:.0%}"]


def kib(size_bytes: int) -> str:
    """Bytes in KiB."""
    return f"{size_bytes / 2**10:g} KiB"
