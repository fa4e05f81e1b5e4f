"""Runs of the best schedules of a ranking on a fabric."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

from tasp_lab.core.choices import FabricKind
from tasp_lab.core.errors import QuantityError, ScheduleError
from tasp_lab.core.progress import ProgressCallback, no_progress
from tasp_lab.core.report import Reports
from tasp_lab.machines.compute import KernelCompute
from tasp_lab.machines.machine import IDEAL
from tasp_lab.prediction.answer import Answer
from tasp_lab.prediction.compare import SINGLE_RINGS, Ranking
from tasp_lab.prediction.inputs import ComputeLike, parse_compute
from tasp_lab.rings.options import RingOptions
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.registry import uses_rings
from tasp_lab.validation.fabrics import check_fabric, check_work, default_scale, expected_fabric_s
from tasp_lab.validation.validate import Comparison, validate
from tasp_lab.workload.layer import Workload

Found = TypeVar("Found", bound=Ranking | Reports[Ranking])


def check_best(
    work: Workload, compute: ComputeLike | None, count: int, fabric: FabricKind, scale: float | None, repeats: int
) -> None:
    """Raise `TaspLabError` for what `run_best` cannot run."""
    if count < 0:
        raise QuantityError(f"measure: {count}, expected 0 or more")
    if count:
        check_fabric(fabric, scale, repeats=repeats)
        check_work(work, parse_compute(compute), fabric)


def run_best(
    ranking: Found,
    count: int,
    fabric: FabricKind = "emulated",
    scale: float | None = None,
    repeats: int = 5,
    progress: ProgressCallback = no_progress,
) -> Found:
    """Run the best schedules of a ranking on a fabric, beside the fastest single ring.

    Parameters
    ----------
    ranking, count : of `tasp_lab.prediction.compare.compare`, and how many of its best schedules to run; of each of
        several rankings.
    fabric, scale, repeats, progress : see `tasp_lab.validation.validate.validate`. An emulated fabric scales the
        compute rate like the links, so the ratio of both is that of the prediction.

    Raises `TaspLabError` for what the fabric cannot run.
    """
    if isinstance(ranking, Reports):
        return type(ranking)(tuple(run_best(each, count, fabric, scale, repeats, progress) for each in ranking))
    question = ranking.question
    check_best(question.layer, question.compute, count, fabric, scale, repeats)
    if not count:
        return ranking
    for each in ranking.candidates:
        if not isinstance(each.question.schedule, str):
            name = each.schedule
            raise ScheduleError(f"measure: schedule {name!r} is an object, but only schedules by name run on a fabric")
    given = question.rings if isinstance(question.rings, tuple) else ()
    rings = question.rings if isinstance(question.rings, RingOptions) else RingOptions()
    applying = [each for each in ranking.candidates if each.applies]
    single = [each for each in applying if each.schedule in SINGLE_RINGS]
    groups: dict[AttentionOptions, dict[str, float]] = {}
    for each in {each.schedule: each for each in applying[:count] + single[:1]}.values():
        groups.setdefault(each.options, {})[each.schedule] = float(each.time_s)
    topology, seconds = ranking.machine.topology, 0.0
    for times_s in groups.values():  # each has a fabric, and how long all of them take is told before the first
        full_speed_s = (repeats + 1) * sum(times_s.values())
        used = default_scale(topology, full_speed_s) if scale is None else scale
        seconds += expected_fabric_s(topology.scaled(used), full_speed_s / used)
    runs = sum(map(len, groups.values()))
    what = f"running {runs} schedule{'s' * (runs != 1)} on the {fabric} fabric, {repeats + 1} times each"
    progress(f"{what}: about {seconds:.0f} s" if fabric == "emulated" else what)
    # the hosts of ranks are those of this computer; the kernel stays that of the stack
    compute = ranking.machine.compute
    compute = replace(compute, by_stack=False) if isinstance(compute, KernelCompute) else compute
    machine = replace(ranking.machine, comm_library=IDEAL, stack="", compute=compute)
    comparisons = tuple(
        validate(
            machine, schedules=list(names),
            work=question.layer, options=used, decomposition=given[0] if given else None,
            compute=None if fabric == "emulated" else question.compute,
            fabric=fabric, scale=scale, repeats=repeats, progress=progress,
            **(vars(rings) if any(map(uses_rings, names)) else {}),
        )
        for used, names in groups.items()
    )  # fmt: skip
    return replace(
        ranking,
        candidates=tuple(_with_measurement(each, comparisons) for each in ranking.candidates),
        fabric=comparisons,
        is_reporter=all(each.is_reporter for each in comparisons),
    )


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
