"""Runs of the best schedules of a ranking on a fabric."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from tasp_lab.core.choices import FabricKind
from tasp_lab.core.errors import QuantityError, ScheduleError
from tasp_lab.core.progress import ProgressCallback, no_progress
from tasp_lab.machines.host_model.runtime import NO_RUNTIME
from tasp_lab.machines.machine import IDEAL
from tasp_lab.prediction.answer import Answer
from tasp_lab.prediction.compare import SINGLE_RINGS, Ranking, Rankings
from tasp_lab.prediction.inputs import ComputeLike, parse_compute
from tasp_lab.prediction.question import RingOptions
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

    def run(self, ranking: Ranking | Rankings, progress: ProgressCallback = no_progress) -> Ranking | Rankings:
        """The same ranking with the measurements of its best schedules beside their predictions."""
        if isinstance(ranking, Rankings):
            return Rankings(tuple(self._measured(each, progress) for each in ranking))
        return self._measured(ranking, progress)

    def _measured(self, ranking: Ranking, progress: ProgressCallback) -> Ranking:
        """A ranking with a comparison per set of options. An emulated fabric scales compute like the links."""
        question = ranking.question
        for each in ranking.candidates:
            if not isinstance(each.question.schedule, str):
                name = each.schedule
                raise ScheduleError(
                    f"measure: schedule {name!r} is an object, but only schedules by name run on a fabric"
                )
        given = question.rings if isinstance(question.rings, tuple) else ()
        rings = question.rings if isinstance(question.rings, RingOptions) else RingOptions()
        applying = [each for each in ranking.candidates if each.applies]
        single = [each for each in applying if each.schedule in SINGLE_RINGS]
        groups: dict[AttentionOptions, dict[str, float]] = {}
        for each in {each.schedule: each for each in applying[: self.count] + single[:1]}.values():
            groups.setdefault(each.options, {})[each.schedule] = float(each.time_s)
        _announce(groups, ranking.machine.topology, self.fabric, self.scale, self.repeats, progress)
        run = partial(
            validate,
            replace(ranking.machine, comm_library=IDEAL, runtime=NO_RUNTIME),
            work=question.layer,
            decomposition=given[0] if given else None,
            compute=None if self.fabric == "emulated" else question.compute,
            fabric=self.fabric,
            scale=self.scale,
            repeats=self.repeats,
            progress=progress,
        )
        comparisons = tuple(
            run(schedules=list(times_s), options=used, **(vars(rings) if any(map(uses_rings, times_s)) else {}))
            for used, times_s in groups.items()
        )
        return replace(
            ranking,
            candidates=tuple(_with_measurement(each, comparisons) for each in ranking.candidates),
            fabric=comparisons,
            is_reporter=all(each.is_reporter for each in comparisons),
        )


def run_best(
    ranking: Ranking,
    count: int,
    fabric: FabricKind = "emulated",
    scale: float | None = None,
    repeats: int = 5,
    progress: ProgressCallback = no_progress,
) -> Ranking:
    """Run the best schedules of a ranking on a fabric, beside the fastest single ring.

    Parameters
    ----------
    ranking, count : of `tasp_lab.prediction.compare.compare`, and how many of its best schedules to run.
    fabric, scale, repeats, progress : see `tasp_lab.validation.validate.validate`. An emulated fabric scales the
        compute rate like the links, so the ratio of both is that of the prediction.

    Raises `TaspLabError` for what the fabric cannot run.
    """
    runs = FabricRuns(count, fabric, scale, repeats)
    runs.check(ranking.question.layer, ranking.question.compute)
    found = runs.run(ranking, progress) if count else ranking
    assert isinstance(found, Ranking), "one ranking was given"
    return found


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


def _with_measurement(each: Answer, fabric: Iterable[Comparison]) -> Answer:
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
