"""What tables of schedules on the emulated fabric share: parts measured one by one, runs, rows and verdicts."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.common import Record, read_record, write_record
from runtime.protocol.jobs import Ranks
from sim.simulate import simulate
from tasp_lab import Workload, validate
from tasp_lab.core.progress import print_progress as progress
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.machine import INSTANT, Compute, Machine
from tasp_lab.rings.options import RingOptions
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import DEFAULT_OPTIONS, AttentionOptions
from tasp_lab.schedules.build import build_schedules
from tasp_lab.schedules.registry import balanced_ring
from tasp_lab.topology.expressions import EXPRESSION_DEFAULTS
from tasp_lab.topology.graph import Topology
from tasp_lab.validation.fabrics import calibrate_ranks, default_scale, start_ranks
from tasp_lab.validation.validate import Run, Trials
from tasp_lab.workload.layer import Work

NO_COMPUTE = 1e30
"""FLOP/s at which kernel calls take no time."""

TARGET = 0.05
"""The relative error that predictions are to keep."""


@dataclass(frozen=True)
class Part:
    """A layer on a topology.

    `nics_slower_by` divides the bandwidth of NICs, which otherwise is that of links. `slow_motion` is an additional
    slow-down of the fabric: at the default scale the ports of a switch are so fast that a step takes only a few times
    as long as its host overhead.
    """

    topology: str
    layer: Workload
    slow_motion: float = 1.0
    nics_slower_by: float = 1.0

    @property
    def links(self) -> Topology:
        """The topology with its bandwidths."""
        usual = EXPRESSION_DEFAULTS.nic_bandwidth_bytes_per_s
        slower = replace(EXPRESSION_DEFAULTS, nic_bandwidth_bytes_per_s=usual / self.nics_slower_by)
        return load_machine(self.topology, slower).topology

    @property
    def scale(self) -> float:
        """Bandwidth of the fabric over that of the topology: what this machine's cores can feed, in slow motion."""
        return default_scale(self.links, nominal_s=1.0) / self.slow_motion


@dataclass(frozen=True)
class Variant:
    """A schedule by name with options, and how it is called in tables; `rings`: how many its decomposition has."""

    name: str
    options: AttentionOptions
    rings: int | None = None

    @property
    def label(self) -> str:
        chunks, pieces = self.options.tail_chunks, self.options.pieces
        counts = {"tail chunks": chunks if chunks > 1 else None, "pieces": pieces, "rings": self.rings}
        return ", ".join([self.name, *(f"{count} {what}" for what, count in counts.items() if count)])


def chosen(description: str, parts: Iterable[str], arguments: Sequence[str] | None) -> Iterable[str]:
    """The parts to measure, of those that a command has: those after ``--only``, else all."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--only", action="append", choices=list(parts), help="measure this part only; several times")
    return parser.parse_args(arguments).only or parts


def replace_part(path: Path, key: str, part: Record) -> None:
    """Put a part into a record, replacing that of an earlier run."""
    parts = read_record(path)["parts"] if path.exists() else {}
    write_record(path, {"parts": parts | {key: part}})


def passes_of(variant: Variant, topology: Topology, layer: Workload) -> Sequence[Schedule]:
    """The passes of a schedule."""
    rings = RingOptions(lanes=variant.rings).find(topology) if variant.rings else None
    return build_schedules(variant.name, topology, layer, rings, variant.options)


def one_pass(variant: Variant, topology: Topology, layer: Workload) -> Schedule:
    """The only pass of a schedule."""
    (schedule,) = passes_of(variant, topology, layer)
    return schedule


def run_on_fabric(part: Part, variants: Sequence[Variant], flops_per_s: float, repeats: int) -> list[list[Run]]:
    """Predict and run schedules on the fabric of a part, those with equal options together; the passes of each."""
    runs: dict[Variant, list[Run]] = {}
    for options, rings in dict.fromkeys((each.options, each.rings) for each in variants):
        alike = [each for each in variants if (each.options, each.rings) == (options, rings)]
        found = validate(
            part.links, [each.name for each in alike], part.layer, compute=flops_per_s, scale=part.scale,
            repeats=repeats, options=options, lanes=rings, progress=progress,
        ).runs  # fmt: skip
        single = [run for run in found if not run.prediction.is_sum]
        count = len(single) // len(alike)
        runs |= {variant: single[at * count : (at + 1) * count] for at, variant in enumerate(alike)}
    return [runs[each] for each in variants]


@dataclass(frozen=True)
class Fabric:
    """A calibrated fabric of a scaled topology, on which any number of schedules run."""

    topology: Topology
    ranks: Ranks
    calibrated: Machine

    @classmethod
    @contextmanager
    def of(cls, topology: Topology) -> Iterator[Fabric]:
        """The fabric, while its ranks run."""
        with start_ranks("emulated", topology, "auto", Machine(topology)) as ranks:
            yield cls(topology, ranks, calibrate_ranks("emulated", topology, ranks, progress).machine)

    def runs(self, schedules: Sequence[Schedule], work: Work, repeats: int, compute: Compute = INSTANT) -> list[Run]:
        """The runs of single passes, predicted and measured."""
        nominal = Machine(self.topology.map_links(lambda _, link: replace(link, latency_s=0.0)))
        options = DEFAULT_OPTIONS
        trials = Trials(self.ranks, work, options, compute, False, self.calibrated, nominal, repeats, "auto", progress)
        return list(trials.run_all(schedules))


def rows_on_fabric(part: Part, variants: Sequence[Variant], flops_per_s: float, repeats: int) -> list[Record]:
    """As `run_on_fabric`, a row for each run."""
    found = zip(variants, run_on_fabric(part, variants, flops_per_s, repeats), strict=True)
    return [row_of(variant, run) for variant, runs in found for run in runs]


def row_of(variant: Variant, run: Run) -> Record:
    """A run as a row of a record."""
    names = ("pass", "predicted_s", "nominal_s", "measured_s", "measured_spread_s", "measured_repeats_s",
             "relative_error", "cpu_busy_share")  # fmt: skip
    found = run.to_dict()
    return {"schedule": variant.label, "buffers": variant.options.buffers, **{name: found[name] for name in names}}


def rate_of(part: Part, ccr: float, schedule: str = "", options: AttentionOptions = DEFAULT_OPTIONS) -> float:
    """The FLOP/s at which the calls of a schedule, by default of the balanced ring, take `ccr` of its communication."""
    topology = part.links.scaled(part.scale)
    passes = passes_of(Variant(schedule or balanced_ring(part.layer), options), topology, part.layer)
    flops = sum(int(each.flops().sum(axis=0).max()) for each in passes)
    return flops / (ccr * sum(float(simulate(each, Machine(topology)).time_s) for each in passes))


def verdict(parts: Iterable[Record]) -> str:
    """How many runs are within the target, and the worst."""
    runs = [(abs(row["relative_error"]), row["schedule"], part["topology"]) for part in parts for row in part["rows"]]
    within, (error, name, topology) = sum(each[0] <= TARGET for each in runs), max(runs)
    return (
        f"Verdict: {within} of {len(runs)} runs are within {TARGET:.0%} of their prediction; the worst is {name} on "
        f"{topology}, {error:.1%}."
    )


def layer_text(layer: Workload) -> str:
    """A layer in words."""
    return (
        f"{layer.sequence} positions, {layer.heads} heads ({layer.kv_head_count} KV) of {layer.head_dim}, "
        f"{layer.dtype}, {layer.mask} mask"
    )
