"""Tables of schedules that ran on the emulated fabric, each beside its prediction; ``fabric.toml`` has their cases.

    python -m experiments.tables.fabric                              # all tables, some hours on two idle cores
    python -m experiments.tables.fabric passes linear_on_the_fabric.mesh

A table has parts, and a part cases: schedules of one layer or size on one topology, which `tasp_lab.validate` runs.
After each part its rows replace those of the record ``experiments/results/TABLE.json``, and the page beside it is
written anew. Kernel calls are waits: `ccr` is the share of the communication of the first schedule, or of the balanced
ring, that its calls take; without `ccr` calls take no time.
"""

from __future__ import annotations

import statistics
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import msgspec
from matplotlib.figure import Figure

from experiments.common import BUSY, RESULTS, TIMES, Formats, Record, read_record, table, write_page, write_record
from sim.simulate import simulate
from tasp_lab import Workload, validate
from tasp_lab.core.errors import unknown
from tasp_lab.core.files import write_whole
from tasp_lab.core.progress import print_progress as progress
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.machine import Machine
from tasp_lab.plots.timelines import render
from tasp_lab.rings.options import RingOptions
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.backward import Dataflow
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import build_schedules
from tasp_lab.schedules.linear.flops import FlopCounts
from tasp_lab.schedules.linear.task import LinearTask
from tasp_lab.schedules.registry import NOT_APPLICABLE, attention_names_on, balanced_ring, options_for
from tasp_lab.topology.expressions import EXPRESSION_DEFAULTS
from tasp_lab.topology.graph import Topology
from tasp_lab.topology.missing import without
from tasp_lab.validation.fabrics import default_scale
from tasp_lab.validation.validate import Run

TABLES: Mapping[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
NO_COMPUTE = 1e30
"""FLOP/s at which kernel calls take no time."""

TIE = 0.03
"""Schedules whose predicted or measured times differ by at most this share of the longer one are in no order."""


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Schedules of one layer, or of one size, on a topology; all that apply to the layer if `schedules` is empty.

    `slow_motion` slows the fabric of a layer down further: at the default scale the ports of a switch are so fast that
    a step takes only a few times as long as its host overhead. `nics_slower_by` divides the bandwidth of NICs, which
    otherwise is that of links. `rings` is the most rings of a decomposition.
    """

    topology: str
    schedules: tuple[str, ...] = ()
    size_bytes: int | None = None
    sequence: int = 0
    heads: int = 8
    kv_heads: int | None = None
    head_dim: int = 128
    mask: str = "causal"
    kind: str = "softmax"
    decay: str = "none"
    passes: str = "forward"
    dataflow: Dataflow = "auto"
    buffers: int = 3
    tail_chunks: int = 1
    pieces: int | None = None
    rings: int | None = None
    ccr: float | None = None
    slow_motion: float = 1.0
    nics_slower_by: float = 1.0
    without: tuple[str, ...] = ()
    repeats: int = 3

    @property
    def links(self) -> Topology:
        """The topology with its bandwidths."""
        slower = EXPRESSION_DEFAULTS.nic_bandwidth_bytes_per_s / self.nics_slower_by
        machine = load_machine(self.topology, replace(EXPRESSION_DEFAULTS, nic_bandwidth_bytes_per_s=slower))
        return without(machine.topology, self.without)

    @property
    def scale(self) -> float:
        """Bandwidth of the fabric of a layer over that of the topology."""
        return default_scale(self.links, nominal_s=1.0) / self.slow_motion

    @property
    def layer(self) -> Workload:
        return Workload(**{name: getattr(self, name) for name in LAYER_FIELDS})

    @property
    def options(self) -> AttentionOptions:
        return AttentionOptions(**{name: getattr(self, name) for name in OPTION_FIELDS})

    def names(self) -> tuple[str, ...]:
        """The schedules, of which those that are not listed must apply."""
        return self.schedules or tuple(name for name in attention_names_on(self.links.world_size, variants=True)
                                       if self._applies(name))  # fmt: skip

    def _applies(self, name: str) -> bool:
        try:
            self.built(name)
        except NOT_APPLICABLE as error:
            progress(f"{self.topology}: {error}")
            return False
        return True

    def built(self, name: str) -> Sequence[Schedule]:
        """The passes of a schedule on the links, in slow motion."""
        links = self.links.scaled(self.scale)
        rings = RingOptions(lanes=self.rings).find(links) if self.rings else None
        return build_schedules(name, links, self.layer, rings, options_for(name, self.options))

    def state_s(self) -> float:
        """The time of a state of linear attention, which is float32, on a link of the fabric."""
        return self.state_bytes / float(self.links.scaled(self.scale).links[0].bandwidth_bytes_per_s)

    @property
    def state_bytes(self) -> int:
        return 4 * self.layer.batch * self.layer.kv_head_count * self.head_dim**2

    def flops_per_s(self) -> float:
        """The rate at which calls take `ccr` of the communication.

        With linear attention: at which attention within a chunk takes `ccr` of a gather of states around one ring.
        """
        if self.ccr is None:
            return NO_COMPUTE
        passes = self.built(self.schedules[0] if self.schedules else balanced_ring(self.layer))
        if isinstance(passes[0].task, LinearTask):
            gather_s = (self.links.world_size - 1) * self.state_s()
            return int(FlopCounts(passes[0].task).within.max()) / (self.ccr * gather_s)
        machine = Machine(self.links.scaled(self.scale))
        flops = sum(int(each.flops().sum(axis=0).max()) for each in passes)
        return flops / (self.ccr * sum(float(simulate(each, machine).time_s) for each in passes))

    def runs(self) -> Iterator[tuple[str, Run]]:
        """Predict and run the schedules, those with equal options together: each run with its schedule's label."""
        settings: dict[str, Any] = {"repeats": self.repeats, "progress": progress}
        if self.size_bytes is not None:
            for run in validate(self.links, self.schedules, self.size_bytes, **settings).runs:
                yield run.prediction.schedule, run
            return
        settings |= {"compute": self.flops_per_s(), "scale": self.scale, "lanes": self.rings}
        options = {name: options_for(name, self.options) for name in self.names()}
        for alike in dict.fromkeys(options.values()):
            names = [name for name, own in options.items() if own == alike]
            for run in validate(self.links, names, self.layer, options=alike, **settings).runs:
                yield self.label(run.prediction.schedule), run

    def label(self, name: str) -> str:
        """A schedule with its counts, such as ``token-ring, 2 tail chunks``."""
        counts = {"tail chunks": self.tail_chunks if self.tail_chunks > 1 else None, "pieces": self.pieces,
                  "rings": self.rings}  # fmt: skip
        return ", ".join([name, *(f"{count} {what}" for what, count in counts.items() if count)])


LAYER_FIELDS = ("sequence", "heads", "kv_heads", "head_dim", "mask", "kind", "decay")
OPTION_FIELDS = ("passes", "dataflow", "buffers", "tail_chunks", "pieces")
SETTING = ("topology", "size_bytes", "mask", "kv_heads", "head_dim", "ccr", "nics_slower_by")
"""What rows have of their case. Speed-ups are over the first row with the same."""

MEASURED = ("predicted_s", "nominal_s", "bound_s", "measured_s", "measured_spread_s", "measured_repeats_s",
            "relative_error", "cpu_busy_share")  # fmt: skip
"""What rows have of the dictionary of a run."""


def cases_of(of_table: Record, part: str) -> Iterator[Case]:
    """The cases of a part: its settings and those of its table, with every combination of the lists of `vary`.

    >>> cases = [{"vary": {"ccr": [1, 2]}}, {"rings": 2}]
    >>> table = {"settings": {"topology": "ring:3"}, "parts": {"one": {"run": {"cases": cases}}}}
    >>> [(case.ccr, case.rings) for case in cases_of(table, "one")]
    [(1.0, None), (2.0, None), (None, 2)]
    """
    run = of_table["parts"][part]["run"]
    for case in run.get("cases", [{}]):
        layers = of_table.get("settings", {}), run, case
        given = {name: value for layer in layers for name, value in layer.items() if name not in ("cases", "vary")}
        vary = {name: values for layer in layers for name, values in layer.get("vary", {}).items()}
        for values in product(*vary.values()):
            yield msgspec.convert(given | dict(zip(vary, values, strict=True)), Case)


def measure(case: Case, sums: bool = False) -> list[Record]:
    """The rows of a case; with `sums` also those of both passes together."""
    setting: Record = {name: getattr(case, name) for name in SETTING}
    if case.kind == "linear":
        setting |= {"state_bytes": case.state_bytes, "state_s": case.state_s()}
    found = []
    for label, run in case.runs():
        if sums or not run.prediction.is_sum:
            row = run.to_dict()
            flow = getattr(run.prediction, "dataflow", None)
            passing = f"{row['pass']}, {flow}" if sums and flow else row.get("pass")
            times = {name: row[name] for name in MEASURED if name in row}
            found.append(setting | {"topology": run.prediction.topology, "schedule": label, "pass": passing,
                                    "is_sum": run.prediction.is_sum} | times)  # fmt: skip
    return found


def measure_part(name: str, part: str, folder: Path = RESULTS) -> None:
    """Run the cases of a part, and put their rows into the record of its table."""
    of_table, path = TABLES[name], folder / f"{name}.json"
    cases = list(cases_of(of_table, part))
    rows = [row for case in cases for row in measure(case, of_table.get("sums", False))]
    facts: Record = {"repeats": cases[0].repeats, "rows": rows}
    if cases[0].sequence:
        facts |= {"topology": cases[0].links.name, "scale": cases[0].scale, "layer": layer_text(cases[0].layer)}
    parts = read_record(path)["parts"] if path.exists() else {}
    write_record(path, {"parts": parts | {part: facts}})


def layer_text(layer: Workload) -> str:
    """A layer in words."""
    return (
        f"{layer.sequence} positions, {layer.heads} heads ({layer.kv_head_count} KV) of {layer.head_dim}, "
        f"{layer.dtype}, {layer.mask} mask"
    )


# -- pages ------------------------------------------------------------------------------------------------------------
def _faster(row: Record, which: str) -> float:
    return float(row["first"][which] / row[which])


def _time(row: Record) -> str:
    return f"{row['measured_s']:.2f}, {row['relative_error']:+.1%}"


def law(ccr: float, rings: int) -> float:
    """The speed-up of so many rings over one without contention and with equal steps.

    A layer then takes K / n + max(K (n - 1) / n, C) on n = rings + 1 ranks, where K is the compute and C the
    communication time of a rank, and with g rings C is g times smaller.
    """
    n = rings + 1
    one, several = (ccr / n + max(ccr * rings / n, communication) for communication in (1, 1 / rings))
    return one / several


COLUMNS: Formats = {
    "schedule": "{schedule}",
    "schedule, pass": "{schedule}, {pass}",
    "topology, schedule": "{topology}, {schedule}",
    "topology, mask, KV heads, CCR, schedule": "{topology}, {mask}, {kv_heads}, {ccr}, {schedule}",
    "mask, CCR": "{mask}, {ccr}",
    "pass": "{pass}",
    "bytes": "{size_bytes:size}",
    "state": "{state_bytes:size}",
    "times slower NICs": "{nics_slower_by:g}",
    "attention / gather": "{ccr:g}",
    "measured place": "{place}",
    "law": lambda row: f"{law(row['ccr'], 7):.2f}",
    "nominal": lambda row: f"{_faster(row, 'nominal_s'):.2f}",
    "theory, tau": lambda row: f"{row['nominal_s'] / row['state_s']:.3f}",
    **TIMES,
    "predicted": lambda row: f"{_faster(row, 'predicted_s'):.2f}",
    "measured": lambda row: f"{_faster(row, 'measured_s'):.2f}",
    "measured / predicted": lambda row: f"{_faster(row, 'measured_s') / _faster(row, 'predicted_s') - 1:+.1%}",
    "speed-up predicted": lambda row: f"{_faster(row, 'predicted_s'):.2f}",
    "speed-up measured": lambda row: f"{_faster(row, 'measured_s'):.2f}",
    "speed-up": lambda row: f"{_faster(row, 'measured_s'):.2f} ({_faster(row, 'predicted_s'):.2f} predicted)"
    if row["is_sum"] else "",
    "ring s, error": lambda row: _time(row["first"]),
    "TASP s, error": _time,
    "measured share of bound": lambda row: f"{row['bound_s'] / row['measured_s']:.1%}",
    **BUSY,
}  # fmt: skip
"""Columns by their titles, which tables list; rows have besides `first`, that of their setting, and their `place`."""


def publish(name: str, folder: Path = RESULTS) -> None:
    """Write the page of a table from its record."""
    of_table, record = TABLES[name], read_record(folder / f"{name}.json")
    parts = {part: record["parts"][part] for part in of_table["parts"] if part in record["parts"]}
    made = record["machine"]
    head = (f"{of_table['about'].strip()} Medians of repeats, made by `python -m experiments.tables.fabric {name}` on "
            f"{made['cores']} cores ({made['date']}).")  # fmt: skip
    shown, joined = [head], list[Record]()
    for part, found in parts.items():
        rows = _with_places(found["rows"])
        joined += rows
        if "heading" in of_table:
            columns = of_table["parts"][part].get("columns", of_table.get("columns"))
            heading = of_table["parts"][part].get("heading", of_table["heading"]).format(**found)
            shown += [heading, _table(rows, columns, of_table)]
            if of_table.get("ranked"):
                crossed = "; ".join(" before ".join(pair) for pair in out_of_order(rows)) or "none"
                shown.append(f"Predicted in the wrong order, ties apart: {crossed}.")
    if "heading" not in of_table:
        shown.append(_table(joined, of_table["columns"], of_table))
    shown += [verdict(joined, of_table["target"])] if "target" in of_table else []
    if of_table.get("ranked"):
        wrong = sum(len(out_of_order(part["rows"])) for part in parts.values())
        pairs = sum(len(part["rows"]) * (len(part["rows"]) - 1) // 2 for part in parts.values())
        shown.append(f"{wrong} of {pairs} pairs are in the wrong order by more than {TIE:.0%}.")
    write_page(folder / f"{name}.md", "\n\n".join(shown))
    for suffix, draw in PICTURES.get(name, {}).items():
        write_whole(folder / f"{name}.{suffix}", render(draw(joined), suffix))


def _with_places(rows: Sequence[Record]) -> list[Record]:
    firsts: dict[tuple[object, ...], Record] = {}
    by_time = sorted(row["measured_s"] for row in rows)
    return [row | {"first": firsts.setdefault((*(row[name] for name in SETTING), row["is_sum"]), row),
                   "place": by_time.index(row["measured_s"]) + 1} for row in rows]  # fmt: skip


def _table(rows: Sequence[Record], titles: Sequence[str], of_table: Record) -> str:
    rows = sorted(rows, key=lambda row: float(row["predicted_s"])) if of_table.get("ranked") else rows
    shown = [row for row in rows if not of_table.get("pairs") or row["schedule"] != row["first"]["schedule"]]
    return table(shown, {title: COLUMNS[title] for title in titles})


def verdict(rows: Sequence[Record], target: float) -> str:
    """How many runs are within the target, the median, and the worst."""
    errors = [(abs(row["relative_error"]), f"{row['schedule']} on {row['topology']}") for row in rows]
    worst, name = max(errors)
    return (
        f"Verdict: {sum(error <= target for error, _ in errors)} of {len(errors)} runs are within {target:.0%} of "
        f"their prediction, median error {statistics.median(error for error, _ in errors):.1%}; the worst is {name}, "
        f"{worst:.1%}."
    )


def out_of_order(rows: Sequence[Record]) -> list[tuple[str, str]]:
    """The pairs of which the first is predicted to be the faster one but is measured to be the slower one, no ties.

    >>> times = (("a", 1.0, 2.0), ("b", 1.1, 1.0), ("c", 1.11, 0.9))
    >>> out_of_order([{"schedule": name, "predicted_s": p, "measured_s": m} for name, p, m in times])
    [('a', 'b'), ('a', 'c')]
    """
    found = []
    for first, second in combinations(sorted(rows, key=lambda row: float(row["predicted_s"])), 2):
        tie = any(
            abs(first[time] - second[time]) <= TIE * max(first[time], second[time])
            for time in ("predicted_s", "measured_s")
        )
        if not tie and first["measured_s"] > second["measured_s"]:
            found.append((first["schedule"], second["schedule"]))
    return found


def draw_curve(rows: Sequence[Record]) -> Figure:
    """Speed-ups against the ratio of compute to communication, by mask: the law, simulated and measured."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    masks = dict.fromkeys(row["mask"] for row in rows)
    axes = figure.subplots(1, len(masks), sharey=True)
    fine = [0.01 * 1.03**step for step in range(180)]
    for mask, panel in zip(masks, axes, strict=True):
        points = [row for row in rows if row["mask"] == mask and row["schedule"] != row["first"]["schedule"]]
        ratios = [row["ccr"] for row in points]
        panel.plot(fine, [law(ratio, 7) for ratio in fine], color="0.6", label="law")
        panel.plot(ratios, [_faster(row, "predicted_s") for row in points], "o", mfc="none", ms=9, label="simulated")
        panel.plot(ratios, [_faster(row, "measured_s") for row in points], "x", color="C3", label="measured")
        title = f"{mask} mask: TASP over {points[0]['first']['schedule']}"
        panel.set(xscale="log", xlabel="CCR of the ring", title=title)
        panel.set_xticks([0.01, 0.1, 1, 2], ["0.01", "0.1", "1", "2"])
        panel.grid(alpha=0.3)
    axes[0].set_ylabel("speed-up")
    axes[0].legend()
    figure.suptitle(f"Attention on {rows[0]['topology']}, emulated")
    return figure


PICTURES: Mapping[str, Mapping[str, Callable[[Sequence[Record]], Figure]]] = {"attention_curve": {"png": draw_curve}}


def main(names: Sequence[str] = ()) -> int:
    """Measure tables or parts of them, by default all; 2 if one is unknown."""
    known = {f"{name}.{part}": (name, part) for name, of_table in TABLES.items() for part in of_table["parts"]}
    chosen = {text: [(name, part) for name, part in known.values() if text in (name, f"{name}.{part}")]
              for text in names or TABLES}  # fmt: skip
    for text, parts in chosen.items():
        if not parts:
            print(unknown("table", text, [*TABLES, *known]), file=sys.stderr)
            return 2
        for name, part in parts:
            measure_part(name, part)
        publish(parts[0][0])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
