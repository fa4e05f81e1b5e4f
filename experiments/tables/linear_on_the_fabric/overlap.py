"""What the attention within chunks hides of transfers of states, in recorded timelines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.common import RESULTS, Record, markdown_table
from experiments.tables.linear_on_the_fabric.layers import (
    LAYER,
    MESH,
    NODES,
    PLAIN_GATHERS,
    REPEATS,
    SWITCH,
    all_scan,
    state_s,
    times_of,
)
from experiments.tables.on_the_fabric import (
    Part,
    Variant,
    passes_of,
    row_of,
    run_on_fabric,
)
from tasp_lab.core.files import write_whole
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.plots.timelines import draw_timelines, render
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.linear.flops import FlopCounts
from tasp_lab.schedules.linear.task import LinearTask
from tasp_lab.timeline.chrome_trace import chrome_trace
from tasp_lab.timeline.events import ATTEND, DIFFERENTIATE, SEND, Timeline
from tasp_lab.validation.validate import Run


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
PICTURED, PICTURES = "lasp-2", "linear_on_the_fabric"


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
    moving, hidden = 0.0, 0.0
    for rank in range(timeline.world_size):
        transfers = union([
            (float(each.start_s), float(each.end_s))
            for each in timeline.events if each.kind == SEND and rank in (each.rank, each.peer)
        ])  # fmt: skip
        calls = [
            (float(each.start_s), float(each.end_s))
            for each in timeline.events
            if each.kind in (ATTEND, DIFFERENTIATE) and each.rank == rank
        ]
        moving += sum(end_s - start_s for start_s, end_s in transfers)
        hidden += sum(
            max(0.0, min(end_s, last_s) - max(start_s, first_s))
            for start_s, end_s in transfers
            for first_s, last_s in calls
        )
    return hidden / moving if moving else 0.0


def union(intervals: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Intervals joined where they overlap.

    >>> union([(3, 4), (0, 1), (0.5, 2)])
    [(0, 2), (3, 4)]
    """
    found: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def write_timelines(run: Run, folder: Path = RESULTS) -> None:
    """The predicted and the measured timeline of a run, as a picture and as a Chrome trace."""
    timelines = [run.prediction.timeline, run.measured_timeline]
    figure = draw_timelines(timelines, "LASP-2: states go around the ring while every rank attends within its chunk")
    write_whole(folder / f"{PICTURES}.png", render(figure, "png"))
    write_whole(folder / f"{PICTURES}.trace.json", chrome_trace(timelines))


def overlap_text(part: Record) -> str:
    columns = ("schedule, pass", "attention / gather", "beside attention, predicted", "measured", "predicted s",
               "measured s", "spread s", "error", "cores busy")  # fmt: skip
    cells = [
        [
            f"{row['schedule']}, {row['pass']}",
            f"{row['ratio']:g}",
            *(f"{row[name]:.1%}" for name in ("hidden_predicted", "hidden_measured")),
            *times_of(row),
        ]
        for row in part["rows"]
    ]
    return (
        f"With compute on {part['topology']}, scale {part['scale']:.3g}, medians of {part['repeats']}; forward, the "
        "attention within a chunk takes this share of a gather around one ring, and beside attention is the share of "
        f"the time with transfers:\n\n{markdown_table(columns, cells)}"
    )
