"""Chains and gathers of states without compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from experiments.common import Record, markdown_table
from experiments.tables.linear_on_the_fabric.layers import (
    GATHERS,
    LAYER,
    MESH,
    NODES,
    PLAIN_GATHERS,
    REPEATS,
    SWITCH,
    all_scan,
    kib,
    state_bytes,
    state_s,
    times_of,
)
from experiments.tables.on_the_fabric import (
    NO_COMPUTE,
    Part,
    Variant,
    rows_on_fabric,
)
from runtime.fabric.emulated import BUCKET_PACKETS, packet_size_bytes
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.schedules.attention.options import AttentionOptions

HEAD_DIMS = (96, 128)
HOPS = {
    "mesh": Part(MESH, LAYER),
    "switch": Part(SWITCH, LAYER, slow_motion=2.0),
    "nodes": Part(NODES, LAYER),
}
PIECES = (1, 2, 7, 28)


def measure_hops(part: Part, repeats: int = REPEATS, head_dims: Sequence[int] = HEAD_DIMS) -> Record:
    """Chains and gathers of states of several sizes, both passes, without compute."""
    gathers = PLAIN_GATHERS if part.topology == SWITCH else GATHERS
    variants = [*map(all_scan, PIECES), *(Variant(name, AttentionOptions("both")) for name in gathers)]
    rows = []
    for head_dim in head_dims:
        sized = replace(part, layer=replace(part.layer, head_dim=head_dim))
        facts = {"state_bytes": state_bytes(sized.layer), "state_s": state_s(sized)}
        rows += [facts | row for row in rows_on_fabric(sized, variants, NO_COMPUTE, repeats)]
    return {"topology": part.topology, "scale": part.scale, "repeats": repeats, "rows": rows}


def hops_text(part: Record) -> str:
    columns = ("schedule, pass", "state", "theory, tau", "predicted s", "measured s", "spread s", "error", "cores busy")
    cells = [
        [
            f"{row['schedule']}, {row['pass']}",
            kib(row["state_bytes"]),
            f"{row['nominal_s'] / row['state_s']:.3f}",
            *times_of(row),
        ]
        for row in part["rows"]
    ]
    fits = ", ".join(
        f"{start:.3f} + {hops:.2f} / K ({kib(size)}, {passing})" for size, passing, start, hops in chain_fits(part)
    )
    return (
        f"Without compute on {part['topology']}, scale {part['scale']:.3g}, medians of {part['repeats']}:\n\n"
        f"{markdown_table(columns, cells)}\n\nMeasured times of LASP and All-Scan as a line in 1 / K, in tau: {fits}. "
        f"Per hop they are {saved_per_hop_s(part) * 1e3:.1f} ms shorter than predicted, in the median: on a link that "
        f"has been idle, a token bucket lets {BUCKET_PACKETS} packets pass at once, which are "
        f"{bucket_s(part) * 1e3:.1f} ms of its time, and gloo and TCP add a few milliseconds."
    )


def chain_fits(part: Record) -> list[tuple[int, str, float, float]]:
    """Per size of state and pass, the least-squares line of measured times of chains in 1 / K, in times of a state."""
    found = []
    for size, passing in dict.fromkeys((row["state_bytes"], row["pass"]) for row in part["rows"]):
        of_pieces, times = zip(*(
            (1 / pieces, row["measured_s"] / row["state_s"])
            for row in part["rows"]
            for pieces in PIECES
            if (row["state_bytes"], row["pass"], row["schedule"]) == (size, passing, all_scan(pieces).label)
        ), strict=True)  # fmt: skip
        hops, start = np.polyfit(of_pieces, times, 1)
        found.append((size, passing, float(start), float(hops)))
    return found


def saved_per_hop_s(part: Record) -> float:
    """The median of predicted minus measured times of chains, per hop of the chain, in seconds."""
    chains = {all_scan(pieces).label for pieces in PIECES}
    hops = load_machine(part["topology"]).topology.world_size - 1
    saved = [row["predicted_s"] - row["measured_s"] for row in part["rows"] if row["schedule"] in chains]
    return float(np.median(saved)) / hops


def bucket_s(part: Record) -> float:
    """The time of the packets that a token bucket of the slowest link holds, in seconds."""
    topology = load_machine(part["topology"]).topology.scaled(part["scale"])
    slowest = min(float(link.bandwidth_bytes_per_s) for link in topology.links)
    return BUCKET_PACKETS * packet_size_bytes(slowest) / slowest
