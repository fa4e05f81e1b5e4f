"""One step of TASP against one step of Ring, by message size, on a switch and on a mesh.

Ring sends its M bytes of keys and values to the next rank, as one message or as two; TASP splits them into 7 parts and
sends one to each of the 7 other ranks in one all-to-all. The predictions use neither measurement: on the switch they
follow from NCCL's rule for channels per message, on the mesh from the links.

``python -m experiments.accuracy.step_curve`` writes ``experiments/accuracy/step_curve.json`` with its table ``.md`` and
its picture ``.png``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from experiments.common import Formats, Record, table, write_page
from sim.simulate import simulate
from tasp_lab.core.files import write_whole
from tasp_lab.core.units import format_size, format_size_about
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.machine import Machine
from tasp_lab.measure.accuracy import own_tables
from tasp_lab.measure.readers import read_table
from tasp_lab.plots.timelines import render
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.collectives.point_to_point import all_to_all, send_recv
from tasp_lab.timeline.critical_path import critical_path

MACHINES = ("h100-8", "mi300x-8")
RANKS = 8
FIRST_BYTES, LAST_BYTES = 2**20, 2**30
SIZES_PER_DOUBLING = 16
MEASURED_SEND_RECV, MEASURED_ALL_TO_ALL = "h100_xxrjun_1x8_sendrecv.csv", "h100_xxrjun_1x8_alltoall.csv"
FOLDER = Path(__file__).parent


class Step(NamedTuple):
    """A step of M bytes: times of Ring with one message, of Ring with two, and of TASP; and the bottleneck of each."""

    size_bytes: int
    ring_s: float
    ring_of_two_s: float
    tasp_s: float
    ring_bound: str
    tasp_bound: str

    @property
    def speed_up(self) -> float:
        """Ring with one message over TASP."""
        return self.ring_s / self.tasp_s

    @property
    def speed_up_of_two(self) -> float:
        """Ring with two messages over TASP."""
        return self.ring_of_two_s / self.tasp_s


class MeasuredStep(NamedTuple):
    """Measured times of a step of M bytes in seconds; separate K and V are approximated by twice a message of M/2."""

    size_bytes: int
    ring_s: float
    twice_half_s: float | None
    tasp_s: float


def main() -> None:
    """Predict the curves, and write the record, the table and the picture."""
    curves = {name: curve(load_machine(name)) for name in MACHINES}
    measured = measured_steps()
    document = {
        "ranks": RANKS,
        "curves": {name: [step._asdict() for step in steps] for name, steps in curves.items()},
        "measured": [step._asdict() for step in measured],
    }
    write_whole(FOLDER / "step_curve.json", (json.dumps(document, indent=1) + "\n").encode())
    write_whole(FOLDER / "step_curve.png", render(draw_curves(curves, measured), "png"))
    write_page(FOLDER / "step_curve.md", step_text(curves, measured))


def curve(machine: Machine, sizes_per_doubling: int = SIZES_PER_DOUBLING) -> list[Step]:
    """The step at sizes from 1 MiB to 1 GiB, with `sizes_per_doubling` sizes per factor of 2."""
    doublings = round(math.log2(LAST_BYTES / FIRST_BYTES))
    exponents = np.linspace(0, doublings, doublings * sizes_per_doubling + 1)
    return [predict_step(machine, round(FIRST_BYTES * 2**exponent)) for exponent in exponents]


def predict_step(machine: Machine, size_bytes: int) -> Step:
    """The step of `size_bytes` on a machine."""
    topology = machine.topology
    ring = _parts(machine, send_recv(topology, size_bytes))
    half = _parts(machine, send_recv(topology, size_bytes // 2))
    tasp = _parts(machine, all_to_all(topology, size_bytes // (topology.world_size - 1)))
    # Keys and values to one peer form one group, are launched once, and share the channels of that peer in turn.
    of_two_s = 2 * sum(half.values()) - half["launch"] - half["latency"]
    bounds = (max(parts, key=lambda what: parts[what]) for parts in (ring, tasp))
    return Step(size_bytes, sum(ring.values()), of_two_s, sum(tasp.values()), *bounds)


def _parts(machine: Machine, schedule: Schedule) -> dict[str, float]:
    """The time of a one-step schedule in seconds by cause."""
    parts = {"launch": 0.0, "latency": 0.0}
    for what, seconds in critical_path(simulate(schedule, machine, explain=True)):
        parts[what] = parts.get(what, 0.0) + float(seconds)
    return parts


def measured_steps() -> list[MeasuredStep]:
    """Measured steps of 8 H100, at the sizes of the measured sendrecv up to 1 GiB.

    The size of the measured alltoall includes the part that a rank keeps, so M bytes to 7 peers are a size of 8/7 M;
    its time is interpolated in log-log scale.
    """
    send_recv_s = dict(read_table(own_tables() / MEASURED_SEND_RECV).rows)
    rows = read_table(own_tables() / MEASURED_ALL_TO_ALL).rows
    logarithms = np.log([(row.size_bytes * (RANKS - 1) / RANKS, row.time_s) for row in rows])
    return [
        MeasuredStep(
            size_bytes,
            time_s,
            2 * send_recv_s[size_bytes // 2] if size_bytes // 2 in send_recv_s else None,
            float(np.exp(np.interp(math.log(size_bytes), *logarithms.T))),
        )
        for size_bytes, time_s in send_recv_s.items()
        if size_bytes <= LAST_BYTES
    ]


def step_text(curves: dict[str, list[Step]], measured: Sequence[MeasuredStep]) -> str:
    """Tables of the curve segments by bottleneck, and of the measured steps, in Markdown."""
    by_size = {step.size_bytes: step for step in curves["h100-8"]}
    segments: Formats = {
        "machine, message M": "{where}", "Ring bound by": "{ring}", "TASP bound by": "{tasp}",
        "Ring / TASP": lambda row: _range([step.speed_up for step in row["steps"]]),
        "with K and V apart": lambda row: _range([step.speed_up_of_two for step in row["steps"]]),
    }  # fmt: skip
    beside: Formats = {
        "M": lambda step: format_size(step.size_bytes),
        "measured": lambda step: f"{step.ring_s / step.tasp_s:.2f}",
        "predicted": lambda step: f"{by_size[step.size_bytes].speed_up:.2f}",
        "measured, K and V apart": lambda step: f"{step.twice_half_s / step.tasp_s:.2f}" if step.twice_half_s else "",
        "predicted, K and V apart": lambda step: f"{by_size[step.size_bytes].speed_up_of_two:.2f}",
    }
    return (
        "One step of Ring over one step of TASP, predicted, made by `python -m experiments.accuracy.step_curve`. "
        "Each line is a part of the curve where the same rules bound both.\n\n"
        f"{table((row for name, steps in curves.items() for row in _segments(name, steps)), segments)}\n\n"
        "8 H100, measured (sendrecv over alltoall, both of nccl-tests, of one source) beside predicted. K and V apart: "
        "a message of M/2 twice.\n\n"
        f"{table(measured, beside)}"
    )


def _segments(name: str, steps: Sequence[Step]) -> Iterator[Record]:
    for (ring, tasp), found in groupby(steps, key=lambda step: (_rule(step.ring_bound), _rule(step.tasp_bound))):
        part = list(found)
        ends = " to ".join(format_size_about(step.size_bytes) for step in (part[0], part[-1]))
        yield {"where": f"{name}, {ends}", "ring": ring, "tasp": tasp, "steps": part}


def _rule(bound: str) -> str:
    """The kind of a bottleneck, without its ranks."""
    if "->" not in bound:
        return bound
    return "port" if "switch" in bound else "link"


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def draw_curves(curves: dict[str, list[Step]], measured: Sequence[MeasuredStep]) -> Figure:
    """The speed-up of a step by message size, a panel per machine."""
    figure = Figure(figsize=(11, 4.4), layout="constrained", facecolor="white")
    figure.suptitle("One step: Ring's time over TASP's", x=0.01, ha="left", fontsize=12, fontweight="bold")
    for panel, (name, steps) in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves.items(), strict=True):
        _draw_curve(panel, name, steps)
        if name == "h100-8":
            _draw_measured(panel, measured)
        panel.legend(fontsize=8, frameon=False, loc="lower left" if name == "h100-8" else "lower right")
    return figure


def _draw_curve(panel: Axes, name: str, steps: Sequence[Step]) -> None:
    sizes = [step.size_bytes for step in steps]
    panel.axhline(1, color="0.5", linewidth=0.8)
    panel.plot(sizes, [step.speed_up for step in steps], color="#4477aa", label="predicted, one message")
    panel.plot(sizes, [step.speed_up_of_two for step in steps], "--", color="#4477aa", label="predicted, K and V apart")
    panel.set(xscale="log", xlabel="bytes that a rank sends in the step", ylabel="speed-up of the step by TASP")
    panel.set(ylim=(0, 1.15 * max(step.speed_up_of_two for step in steps)), xlim=(FIRST_BYTES, LAST_BYTES))
    panel.set_title(name, loc="left", fontsize=10)
    panel.xaxis.set_major_locator(FixedLocator([FIRST_BYTES * 4.0**power for power in range(6)]))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda size, _: format_size(round(size))))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)


def _draw_measured(panel: Axes, measured: Sequence[MeasuredStep]) -> None:
    sizes = [step.size_bytes for step in measured]
    panel.plot(
        sizes,
        [step.ring_s / step.tasp_s for step in measured],
        "o",
        color="#ee8866",
        label="measured",
        zorder=3,
        clip_on=False,
    )
    two = [(step.size_bytes, step.twice_half_s / step.tasp_s) for step in measured if step.twice_half_s]
    panel.plot(*zip(*two, strict=True), "o", mfc="none", color="#ee8866", label="measured, M/2 twice")


if __name__ == "__main__":
    main()
