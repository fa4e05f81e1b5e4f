"""Bandwidths between pairs of GPUs beside those that their links have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tasp_lab.core.errors import TableError
from tasp_lab.core.units import format_bandwidth
from tasp_lab.machines.machine import Machine
from tasp_lab.measure.check.causes import Effect, effects
from tasp_lab.measure.readers import PairTable

SLOW_PAIR = 0.8
"""A pair that reaches less than this share of what is expected is slow: copies of healthy pairs differ by some percent
(p2pBandwidthLatencyTest and TransferBench print pairs of one node within 5 %; an assumption)."""


class PairFinding(NamedTuple):
    """Slow pairs of GPUs, and what they have in common."""

    text: str
    effect: Effect | None
    rows: list[dict[str, Any]]


def expected_of_pairs(machine: Machine, table: PairTable) -> float:
    """What a pair is expected to reach, bytes/s: the payload of the link, or of the port behind a switch.

    Raises `TableError` for another number of GPUs.
    """
    n, found = machine.topology.world_size, len(table.bandwidth_bytes_per_s)
    if n != found:
        raise TableError(f"{table.name}: {found} GPUs, but {machine.topology.name} has {n}")
    payload = machine.parameters.numbers.get("link_payload")
    return payload or float(min(link.bandwidth_bytes_per_s for link in machine.topology.listed_links()))


def pairs_beside(machine: Machine, table: PairTable) -> PairFinding:
    """The pairs of a table beside what is expected of them."""
    expected, rates = expected_of_pairs(machine, table), table.bandwidth_bytes_per_s
    n = len(rates)
    rows = [
        {
            "source": source, "destination": destination, "measured_bytes_per_s": float(rates[source, destination]),
            "expected_bytes_per_s": expected, "share": float(rates[source, destination] / expected),
            "mark": "slow" if rates[source, destination] < SLOW_PAIR * expected else "",
        }
        for source in range(n) for destination in range(n)
        if source != destination and np.isfinite(rates[source, destination])
    ]  # fmt: skip
    slow = [row for row in rows if row["mark"]]
    if not slow:
        return PairFinding("", None, rows)
    by_name = {each.name: each for each in effects()}
    worst = min(float(row["measured_bytes_per_s"]) for row in slow)
    reached = f"{format_bandwidth(worst)} of {format_bandwidth(expected)}"
    if len(slow) == len(rows):
        effect = by_name["host memory" if "link_payload" in machine.parameters else "slow PCIe"]
        return PairFinding(f"all pairs are slow ({reached})", effect, rows)
    every = [gpu for gpu in range(n) if all(gpu in (row["source"], row["destination"]) for row in slow)]
    if len(every) == 1 and len(slow) > 2:
        return PairFinding(f"all pairs with GPU {every[0]} are slow ({reached})", by_name["slow links"], rows)
    names = ", ".join(f"{row['source']} to {row['destination']}" for row in slow[:6])
    verb = "is" if len(slow) == 1 else "are"
    more = f" and {len(slow) - 6} others" if len(slow) > 6 else ""
    return PairFinding(f"{len(slow)} of {len(rows)} pairs {verb} slow: {names}{more} ({reached})",
                       by_name["slow links"], rows)  # fmt: skip


def shares(rows: Sequence[dict[str, Any]]) -> float:
    """The median share of all pairs."""
    return float(np.median([row["share"] for row in rows]))
