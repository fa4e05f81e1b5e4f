"""Schedules of linear attention on the emulated fabric: hops of states, crossovers, and what attention hides.

Eight processes run causal layers, forward and backward, on an emulated mesh, behind an emulated switch and on two
emulated nodes of four. ``python -m experiments.tables.linear_on_the_fabric`` writes
``experiments/results/linear_on_the_fabric.json`` after each part, its table ``.md``, and pictures and a trace of a run.
It takes about half an hour on two idle cores; ``--only PART``, several times, repeats some and keeps the others.

**Theory.** A state of 4 x KV heads x head_dim^2 bytes takes the time tau on a link. With n ranks, a chain of states in
K pieces has n - 2 + K hops of tau / K: ``tau + (n - 2) tau / K``, for LASP K = 1. A ring takes n - 1 hops of tau,
several rings share them, and straight to all it is tau on a mesh, but a port carries n - 1 states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.common import BUSY, RESULTS, TIMES, Formats, Record, read_record, table, write_page
from experiments.tables.on_the_fabric import (
    NO_COMPUTE,
    Part,
    Variant,
    chosen,
    passes_of,
    replace_part,
    row_of,
    rows_on_fabric,
    run_on_fabric,
    verdict,
)
from runtime.fabric.emulated import BUCKET_PACKETS, packet_size_bytes
from tasp_lab import Workload
from tasp_lab.core.files import write_whole
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.plots.timelines import draw_timelines, render, union
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.linear.flops import FlopCounts
from tasp_lab.schedules.linear.task import LinearTask
from tasp_lab.timeline.chrome_trace import chrome_trace
from tasp_lab.timeline.events import ATTEND, DIFFERENTIATE, SEND, Timeline
from tasp_lab.validation.validate import Run

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


def in_tau(row: Record) -> str:
    """The time without latency and headers, in times of a state."""
    return f"{row['nominal_s'] / row['state_s']:.3f}"


def kib(size_bytes: int) -> str:
    """Bytes in KiB."""
    return f"{size_bytes / 2**10:g} KiB"


# ----------------------------------------------------------------------- chains and gathers of states without compute

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
    columns: Formats = {
        "schedule, pass": "{schedule}, {pass}",
        "state": lambda row: kib(row["state_bytes"]),
        "theory, tau": in_tau,
        **TIMES,
        **BUSY,
    }
    fits = ", ".join(
        f"{start:.3f} + {hops:.2f} / K ({kib(size)}, {passing})" for size, passing, start, hops in chain_fits(part)
    )
    return (
        f"Without compute on {part['topology']}, scale {part['scale']:.3g}, medians of {part['repeats']}:\n\n"
        f"{table(part['rows'], columns)}\n\nMeasured times of LASP and All-Scan as a line in 1 / K, in tau: {fits}. "
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


# ----------------------------------------------------------- where All-Scan and LASP are as fast as gathers of states

SCAN = "all-scan"
"""All-Scan in as many pieces as a sweep says."""


@dataclass(frozen=True)
class Sweep:
    """Schedules at several values of a quantity, and pairs of which the times cross; those of `fixed` do not change.

    `at` is the part at a value, and `swept` are the schedules there.
    """

    quantity: str
    values: tuple[float, ...]
    at: Callable[[float], Part]
    swept: Callable[[float], Sequence[Variant]]
    pairs: tuple[tuple[str, str], ...]
    fixed: tuple[Variant, ...] = ()


LARGER = replace(LAYER, head_dim=96)
"""Hops of smaller states are shortened by the bucket of an idle link, see `hops_text`."""


def _rings(count: int) -> Variant:
    return Variant("multi-ring-lasp-2", AttentionOptions(), count)


def _slower_nics(ratio: float) -> Part:
    return Part(NODES, LARGER, nics_slower_by=ratio)


SWEEPS = {
    "pieces": Sweep(
        "pieces",
        (2, 4, 7, 14),
        lambda _: Part(MESH, LARGER),
        lambda pieces: [all_scan(int(pieces), "forward")],
        tuple((SCAN, _rings(count).label) for count in (2, 4)),
        tuple(map(_rings, (2, 4))),
    ),
    "nics": Sweep(
        "times slower NICs",
        (1, 1.5, 2.5, 4),
        _slower_nics,
        lambda _: [
            *(all_scan(pieces, "forward") for pieces in (1, 7)),
            *(Variant(name, AttentionOptions()) for name in ("direct-lasp-2", "multi-ring-lasp-2")),
        ],
        (("lasp", "direct-lasp-2"), ("all-scan, 7 pieces", "multi-ring-lasp-2")),
    ),
}


def measure_sweep(sweep: Sweep, repeats: int = REPEATS) -> Record:
    """The forward passes of all schedules of a sweep, without compute."""
    rows = []
    for value in sweep.values:
        part, is_first = sweep.at(value), value == sweep.values[0]
        facts = {"value": value, "state_bytes": state_bytes(part.layer), "state_s": state_s(part)}
        for is_fixed, variants in ((False, sweep.swept(value)), (True, sweep.fixed if is_first else ())):
            found = rows_on_fabric(part, variants, NO_COMPUTE, repeats)
            rows += [facts | {"is_fixed": is_fixed} | row for row in found]
    return {"topology": part.topology, "scale": sweep.at(1).scale, "repeats": repeats, "rows": rows}


class Crossover(NamedTuple):
    """Where two curves cross: predicted, measured, and the interval of the repeats; NaN where they do not."""

    first: str
    second: str
    predicted: float
    measured: float
    low: float
    high: float


def crossing(values: Sequence[float], first: Sequence[float], second: Sequence[float]) -> float:
    """Where the ratio of two curves passes 1, its logarithm interpolated in that of the value; else NaN.

    >>> crossing([1, 4], [2, 1], [1, 2])
    2.0
    """
    x, y = np.log(values), np.log(np.array(first) / np.array(second))
    for at in range(len(x) - 1):
        if y[at] * y[at + 1] < 0 or (y[at] == 0) != (y[at + 1] == 0):
            return float(np.exp(x[at] - y[at] * (x[at + 1] - x[at]) / (y[at + 1] - y[at])))
    return float("nan")


Curve = Mapping[float, Record]
"""Rows of a schedule by the value of what is swept."""


def curve(rows: Sequence[Record], name: str) -> Curve:
    """The rows of a schedule, at all values if it does not depend on them; `SCAN` are those in any number of pieces."""
    fixed = [row for row in rows if row["is_fixed"] and row["schedule"] == name]
    if fixed:
        return dict.fromkeys((row["value"] for row in rows), fixed[0])
    swept = [row for row in rows if not row["is_fixed"]]
    return {row["value"]: row for row in swept if name in (SCAN, row["schedule"])}


def crossover(rows: Sequence[Record], pair: tuple[str, str]) -> Crossover:
    """Where two schedules cross: by medians, and the fastest repeats of one against the slowest of the other."""
    first, second = (curve(rows, name) for name in pair)

    def at(one: Callable[[Record], float], other: Callable[[Record], float]) -> float:
        return crossing(list(first), [one(each) for each in first.values()], [other(second[each]) for each in first])

    def fastest(row: Record) -> float:
        return float(min(row["measured_repeats_s"]))

    def slowest(row: Record) -> float:
        return float(max(row["measured_repeats_s"]))

    predicted, measured = (at(time, time) for time in (itemgetter("predicted_s"), itemgetter("measured_s")))
    ends = at(fastest, slowest), at(slowest, fastest)
    return Crossover(*pair, predicted, measured, min(ends), max(ends))


def sweep_text(sweep: Sweep, part: Record) -> str:
    columns: Formats = {
        "schedule": "{schedule}",
        sweep.quantity: lambda row: "" if row["is_fixed"] else f"{row['value']:g}",
        "theory, tau": in_tau,
        **TIMES,
        **BUSY,
    }
    found = "; ".join(
        f"{each.first} and {each.second} at {each.predicted:.2f} {sweep.quantity} predicted, {each.measured:.2f} "
        f"measured ({each.low:.2f} to {each.high:.2f})"
        for each in (crossover(part["rows"], pair) for pair in sweep.pairs)
    )
    size = kib(part["rows"][0]["state_bytes"])
    return (
        f"Forward on {part['topology']} without compute, states of {size}, by {sweep.quantity}, scale "
        f"{part['scale']:.3g}, medians of {part['repeats']}:\n\n{table(part['rows'], columns)}\n\nCrossovers, "
        f"interpolated, with those of the fastest repeats of one against the slowest of the other: {found}."
    )


# ----------------------------------- transfers of states hidden by the attention within chunks, in recorded timelines


@dataclass(frozen=True)
class Overlap:
    """Passes whose attention within a chunk takes each of `ratios` of the time of a gather around a ring."""

    part: Part
    ratios: tuple[float, ...]


CHUNKS = replace(LAYER, sequence=8 * 256, head_dim=48)
OVERLAPS = {
    "overlap": Overlap(Part(MESH, CHUNKS), (0.5, 1.2)),
    "overlap-switch": Overlap(Part(SWITCH, CHUNKS, slow_motion=2.0), (0.5,)),
    "overlap-nodes": Overlap(Part(NODES, CHUNKS), (0.5,)),
}
PICTURED, NAME = "lasp-2", "linear_on_the_fabric"


def measure_overlap(overlap: Overlap, repeats: int = REPEATS, folder: Path = RESULTS) -> Record:
    """Both passes of chains and gathers with compute; a picture and a trace of the last forward pass of `PICTURED`."""
    variants = [all_scan(1), all_scan(7), *(Variant(name, AttentionOptions("both")) for name in PLAIN_GATHERS)]
    rows = []
    for ratio in overlap.ratios:
        runs = run_on_fabric(overlap.part, variants, rate_of(overlap.part, ratio), repeats)
        for variant, passes in zip(variants, runs, strict=True):
            rows += [{"ratio": ratio} | row_of(variant, run) | _shares(run) for run in passes]
        if overlap.part.topology == MESH:
            pictured = [variant.name for variant in variants].index(PICTURED)
            write_timelines(runs[pictured][0], folder)
    part = overlap.part
    return {"topology": part.topology, "scale": part.scale, "repeats": repeats, "rows": rows}


def rate_of(part: Part, ratio: float) -> float:
    """The FLOP/s at which the attention within a chunk takes a share of n - 1 hops of a state."""
    topology = load_machine(part.topology).topology
    task = passes_of(all_scan(1, "forward"), topology, part.layer)[0].task
    assert isinstance(task, LinearTask), "a layer of linear attention"
    return int(FlopCounts(task).within.max()) / (ratio * (topology.world_size - 1) * state_s(part))


def _shares(run: Run) -> Record:
    shares = [hidden_share(each) for each in (run.prediction.timeline, run.measured_timeline)]
    return {"hidden_predicted": shares[0], "hidden_measured": shares[1]}


def hidden_share(timeline: Timeline) -> float:
    """The share of the time with transfers from or to a rank in which the rank attends within its chunk, of all ranks.

    Time counts once per rank, however many transfers it has.
    """
    moving = hidden = 0.0
    for rank in range(timeline.world_size):
        own = [(event.kind, float(event.start_s), float(event.end_s)) for event in timeline.events
               if event.rank == rank or (event.kind == SEND and event.peer == rank)]  # fmt: skip
        sends = [(start_s, end_s) for kind, start_s, end_s in own if kind == SEND]
        calls = [(start_s, end_s) for kind, start_s, end_s in own if kind in (ATTEND, DIFFERENTIATE)]
        for start_s, end_s in union(np.array(sends, dtype=np.float64).reshape(-1, 2)).tolist():
            moving += end_s - start_s
            hidden += sum(max(0.0, min(end_s, last_s) - max(start_s, first_s)) for first_s, last_s in calls)
    return hidden / moving if moving else 0.0


def write_timelines(run: Run, folder: Path = RESULTS) -> None:
    """The predicted and the measured timeline of a run, as a picture and as a Chrome trace."""
    timelines = [run.prediction.timeline, run.measured_timeline]
    figure = draw_timelines(timelines, "LASP-2: states go around the ring while every rank attends within its chunk")
    write_whole(folder / f"{NAME}.png", render(figure, "png"))
    write_whole(folder / f"{NAME}.trace.json", chrome_trace(timelines))


def overlap_text(part: Record) -> str:
    columns: Formats = {
        "schedule, pass": "{schedule}, {pass}",
        "attention / gather": "{ratio:g}",
        "beside attention, predicted": "{hidden_predicted:.1%}",
        "measured": "{hidden_measured:.1%}",
        **TIMES,
        **BUSY,
    }
    return (
        f"With compute on {part['topology']}, scale {part['scale']:.3g}, medians of {part['repeats']}; forward, the "
        "attention within a chunk takes this share of a gather around one ring, and beside attention is the share of "
        f"the time with transfers:\n\n{table(part['rows'], columns)}"
    )


# ------------------------------------------------------------------------------- all parts: the record and the report

PARTS = (*HOPS, *SWEEPS, *OVERLAPS)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the chosen parts, and write the record and the table."""
    for key in chosen("Schedules of linear attention on the emulated fabric.", PARTS, arguments):
        replace_part(RESULTS / f"{NAME}.json", key, measure(key))
    publish()


def measure(key: str) -> Record:
    """A part by its name."""
    if key in HOPS:
        return measure_hops(HOPS[key])
    if key in SWEEPS:
        return measure_sweep(SWEEPS[key])
    return measure_overlap(OVERLAPS[key])


def publish(folder: Path = RESULTS) -> None:
    """Write the table from the record."""
    record = read_record(folder / f"{NAME}.json")
    parts: dict[str, Record] = {key: record["parts"][key] for key in PARTS if key in record["parts"]}
    head = (
        f"Causal layers of linear attention with {KV_HEADS} KV heads on eight emulated ranks; made by "
        f"`python -m experiments.tables.{NAME}` on {record['machine']['cores']} cores ({record['machine']['date']}). "
        "tau is the time of a state on a link; the theory has neither latency nor headers. Spread is the slowest "
        "repeat minus the fastest."
    )
    text = "\n\n".join([head, *(_text(key, part) for key, part in parts.items()), verdict(parts.values())])
    write_page(folder / f"{NAME}.md", text)


def _text(key: str, part: Record) -> str:
    if key in HOPS:
        return hops_text(part)
    return sweep_text(SWEEPS[key], part) if key in SWEEPS else overlap_text(part)


if __name__ == "__main__":
    main()
