"""Runs of the best schedules of a ranking on a fabric."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tasp_lab.core.choices import FabricKind
from tasp_lab.core.errors import QuantityError
from tasp_lab.core.progress import ProgressCallback
from tasp_lab.machines.host_model.runtime import NO_RUNTIME
from tasp_lab.machines.machine import IDEAL, Machine
from tasp_lab.prediction.inputs import ComputeLike, parse_compute
from tasp_lab.prediction.ranking import SINGLE_RINGS, Candidate
from tasp_lab.prediction.ring_choice import RingOptions
from tasp_lab.rings.decompose import Decomposition
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.registry import uses_rings
from tasp_lab.topology.graph import Topology
from tasp_lab.validation.fabrics import check_kernels, check_runs, default_scale, expected_fabric_s
from tasp_lab.validation.validate import Comparison, validate
from tasp_lab.workload.layer import Workload


@dataclass(frozen=True)
class FabricRuns:
    """The `count` best schedules, and the fastest single ring, on a fabric; `scale` and `repeats`: see `validate`."""

    count: int
    fabric: FabricKind
    scale: float | None
    repeats: int

    def check(self, work: Workload, compute: ComputeLike | None) -> None:
        """Raise `TaspLabError` for what the fabric cannot run."""
        if self.count < 0:
            raise QuantityError(f"measure: {self.count}, expected 0 or more")
        if self.count:
            check_runs(self.scale, self.fabric, self.repeats)
            check_kernels(work, parse_compute(compute), self.fabric)

    def of(
        self,
        candidates: Iterable[Candidate],
        machine: Machine,
        work: Workload,
        decomposition: Decomposition | None,
        rings: RingOptions,
        compute: ComputeLike | None,
        progress: ProgressCallback,
    ) -> tuple[Comparison, ...]:
        """The measurements, one comparison per set of options. An emulated fabric scales compute like the links."""
        groups = _by_options(_to_run(candidates, self.count))
        _announce(groups, machine.topology, self.fabric, self.scale, self.repeats, progress)
        run = partial(
            validate,
            replace(machine, comm_library=IDEAL, runtime=NO_RUNTIME),
            work=work,
            decomposition=decomposition,
            compute=None if self.fabric == "emulated" else compute,
            fabric=self.fabric,
            scale=self.scale,
            repeats=self.repeats,
            progress=progress,
        )
        return tuple(
            run(schedules=list(times_s), options=used, **_for_rings(rings, times_s)) for used, times_s in groups.items()
        )


def _to_run(candidates: Iterable[Candidate], count: int) -> list[Candidate]:
    """The best candidates that apply, and the fastest single ring."""
    applying = [each for each in candidates if each.prediction is not None]
    rings = [each for each in applying if each.schedule in SINGLE_RINGS]
    return list({each.schedule: each for each in applying[:count] + rings[:1]}.values())


def _by_options(candidates: Iterable[Candidate]) -> dict[AttentionOptions, dict[str, float]]:
    """The predicted times of the schedules, by name, grouped by their options."""
    groups: dict[AttentionOptions, dict[str, float]] = {}
    for each in candidates:
        groups.setdefault(each.options, {})[each.schedule] = each.time_s
    return groups


def _for_rings(rings: RingOptions, names: Iterable[str]) -> dict[str, Any]:
    """Which rings are sought, for schedules of which some use rings."""
    return vars(rings) if any(map(uses_rings, names)) else {}


def _announce(
    groups: Mapping[AttentionOptions, Mapping[str, float]],
    topology: Topology,
    fabric: FabricKind,
    scale: float | None,
    repeats: int,
    progress: ProgressCallback,
) -> None:
    """Report how many schedules will be run, and how long that takes where it is known: each group has a fabric."""
    seconds = 0.0
    for times_s in groups.values():
        full_speed_s = (repeats + 1) * sum(times_s.values())
        used = default_scale(topology, full_speed_s) if scale is None else scale
        seconds += expected_fabric_s(topology.scaled(used), full_speed_s / used)
    runs = sum(map(len, groups.values()))
    what = f"running {runs} schedule{'s' * (runs != 1)} on the {fabric} fabric, {repeats + 1} times each"
    progress(f"{what}: about {seconds:.0f} s" if fabric == "emulated" else what)


def with_measurement(each: Candidate, fabric: Iterable[Comparison]) -> Candidate:
    """The candidate with its measurement, if it was run."""
    for run in (run for comparison in fabric for run in comparison.runs):
        if run.prediction.is_all and run.prediction.schedule == each.schedule:
            return replace(
                each,
                measured_s=run.measured_s,
                measured_prediction_s=float(run.prediction.time_s),
                not_comparable=run.not_comparable,
            )
    return each
