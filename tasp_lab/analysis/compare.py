"""All schedules of attention on a machine, best first: which one, for this layer?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Unpack

import numpy as np

from sim.simulate import Engine, simulate
from tasp_lab.analysis.inputs import (
    AttentionKeywords,
    ComputeLike,
    MachineLike,
    ScheduleNames,
    as_machine,
    as_names,
    as_options,
    with_rate,
)
from tasp_lab.analysis.predict import MANY_EVENTS, at_softmax_rates, predict_schedule, with_compute
from tasp_lab.analysis.provenance import Provenance, machine_constants, machine_inputs, plain, rings_inputs
from tasp_lab.analysis.ranking import SINGLE_RINGS, Candidate, Ranking
from tasp_lab.analysis.registry import USES_RINGS, build_schedules, check_names, layer_names_on, options_for
from tasp_lab.analysis.results import LayerPrediction, layer_constants, together
from tasp_lab.analysis.ring_choice import RingOptions, ring_candidates
from tasp_lab.analysis.tune import NOT_APPLICABLE, SEARCHED, axes_of, most_trials, search
from tasp_lab.analysis.validate import Comparison, check_runs, default_scale, expected_fabric_s, validate
from tasp_lab.attention.options import DEFAULT_OPTIONS, AttentionOptions
from tasp_lab.choices import FabricKind
from tasp_lab.decomposition.decompose import Decomposition
from tasp_lab.decomposition.search_budget import DEFAULT_SEARCH_BUDGET
from tasp_lab.errors import NoDecompositionError, QuantityError, ScheduleError, first_line
from tasp_lab.machines.machine import IDEAL, Machine
from tasp_lab.progress import CountCallback, ProgressCallback, count_lines, no_progress
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.timeline.critical_path import time_by_kind
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload


def compare(
    machine: MachineLike,
    work: Workload,
    schedules: ScheduleNames | None = None,
    *,
    library: str = "auto",
    without_links: Sequence[str] = (),
    links: Sequence[str] = (),
    decomposition: Decomposition | None = None,
    fold: int | None = None,
    lanes: int | None = None,
    rail_aligned: bool | None = None,
    search_budget: int = DEFAULT_SEARCH_BUDGET,
    compute: ComputeLike | None = None,
    engine: Engine = "auto",
    tune: bool = False,
    measure: int = 0,
    fabric: FabricKind = "emulated",
    scale: float | None = None,
    repeats: int = 5,
    progress: ProgressCallback = no_progress,
    count: CountCallback | None = None,
    options: AttentionOptions = DEFAULT_OPTIONS,
    **attention: Unpack[AttentionKeywords],
) -> Ranking:
    """Predict every schedule of attention that applies to a layer on a machine, and rank them by time.

    Parameters
    ----------
    machine, library, without_links, links, compute, engine, options, attention : see
        `tasp_lab.analysis.predict.predict`.
    work : the layer.
    schedules : names to compare; by default all, families at every split of the ranks into two factors, and tuned also
        in all their variants.
    decomposition, fold, lanes, rail_aligned, search_budget : the rings of schedules over rings, see `predict`.
    tune : whether to search the options of each schedule for the shortest time, see `tasp_lab.analysis.tune`.
    measure : how many of the best schedules to run on a fabric, beside the fastest single ring; 0 for none.
    fabric, scale, repeats : of that run, see `tasp_lab.analysis.validate.validate`. An emulated fabric scales the
        compute rate like the links, so the ratio of both is that of the prediction.
    progress : called with lines of progress.
    count : called with each schedule before it is predicted; by default a line of progress.

    A schedule does not apply if the layer or the topology contradicts it; `Candidate.reason` says why. Options apply to
    the schedules that have them, see `tasp_lab.analysis.registry.options_for`.

    Raises `TaspLabError` for invalid inputs, see `predict` and `validate`.

    >>> from tasp_lab.workload.layer import Workload
    >>> compare("full-mesh:4", Workload(4096, heads=4, mask="causal"), ["ring-attention", "ulysses"]).best.schedule
    'ulysses'
    """
    options = as_options(options, **attention)
    options.check_layer(work)
    if measure < 0:
        raise QuantityError(f"measure: {measure}, expected 0 or more")
    if measure:
        check_runs(scale, fabric, repeats)
    machine = with_compute(with_rate(as_machine(machine, library, without_links, links), compute))
    if work.kind == "linear" and compute is None:
        machine = at_softmax_rates(machine)
    world_size = machine.topology.world_size
    names = layer_names_on(world_size, work, variants=tune) if schedules is None else as_names(schedules)
    check_names(names, work)
    if decomposition is not None and decomposition.world_size != world_size:
        where = f"{machine.topology.name} has {world_size}"
        raise ScheduleError(f"decomposition: rings of {decomposition.world_size} ranks, {where}")
    rings = RingOptions(fold, lanes, rail_aligned, search_budget)
    found: Sequence[Decomposition] = () if decomposition is None else (decomposition,)
    no_rings = ""
    if rings.check_needed(names, given=bool(found)):
        try:
            found = ring_candidates(machine, partial(rings.find, progress=progress), with_known=rings.is_free)
        except NoDecompositionError as error:
            no_rings = first_line(error)
    count = count or count_lines(progress)
    if tune:
        trials = sum(most_trials(axes_of(name, options)) for name in names)
        plural = "" if len(names) == 1 else "s"
        progress(f"tuning {len(names)} schedule{plural}: combinations of options to simulate: at most {trials}")
    candidates = []
    for number, name in enumerate(names):
        count(number, len(names), name)
        tried = found if name in USES_RINGS else (None,)
        if tried:
            candidates.append(_OneCandidate(machine, work, tried, engine).candidate(name, options, tune))
        else:
            candidates.append(Candidate(name, work.kind, options_for(name, options), reason=no_rings))
    count(len(names), len(names), "")
    candidates.sort(key=lambda each: each.time_s)
    measured: tuple[Comparison, ...] = ()
    if measure:
        run = partial(
            validate,
            replace(machine, comm_library=IDEAL),
            work=work,
            decomposition=decomposition,
            compute=None if fabric == "emulated" else compute,
            fabric=fabric,
            scale=scale,
            repeats=repeats,
            progress=progress,
        )
        groups = _by_options(_to_run(candidates, measure))
        _announce(groups, machine.topology, fabric, scale, repeats, progress)
        measured = tuple(
            run(schedules=list(times_s), options=used, **_for_rings(rings, times_s)) for used, times_s in groups.items()
        )
        candidates = [_measured(each, measured) for each in candidates]
    predictions = [each.prediction for each in candidates if each.prediction is not None]
    provenance = Provenance(
        {
            "machine": machine_inputs(machine, compute=True),
            "schedules": list(names),
            "work": plain(work),
            "options": plain(options),
            "rings": rings_inputs([decomposition]) if decomposition is not None else plain(rings),
            "engine": engine,
            **({"searched": plain(SEARCHED)} if tune else {}),
        },
        machine_constants(machine.constants) + layer_constants(predictions),
        (),
        all(each.search_complete for each in found) if found else None,
    )
    return Ranking(tuple(candidates), machine, provenance, measured)


@dataclass(frozen=True)
class _OneCandidate:
    """Predicts one schedule, with the fastest of these rings; `times_s` are those of schedules by digest."""

    machine: Machine
    work: Workload
    rings: Sequence[Decomposition | None]
    engine: Engine
    times_s: dict[str, float] = field(default_factory=dict)

    def candidate(self, name: str, options: AttentionOptions, tune: bool) -> Candidate:
        """A schedule by name, or the reason why it does not apply."""
        start = options_for(name, options)
        try:
            if not tune:
                return self._predicted(name, start)
            tuned = search(partial(self._time_s, name), start, axes_of(name, options))
            return replace(self._predicted(name, tuned.options), untuned_s=tuned.untuned_s)
        except NOT_APPLICABLE as error:
            return Candidate(name, self.work.kind, start, reason=_without_name(first_line(error), name))

    def _time_s(self, name: str, options: AttentionOptions) -> float:
        """The time of all passes; a pass that several options have in common is simulated once."""
        return min(sum(map(self._pass_s, self._schedules(name, options, found))) for found in self.rings)

    def _pass_s(self, schedule: Schedule) -> float:
        if schedule.digest not in self.times_s:
            timeline = simulate(schedule, self.machine, self.engine, events=False)
            self.times_s[schedule.digest] = float(timeline.time_s)
        return self.times_s[schedule.digest]

    def _schedules(self, name: str, options: AttentionOptions, found: Decomposition | None) -> tuple[Schedule, ...]:
        return build_schedules(name, self.machine.topology, self.work, found, options)

    def _predicted(self, name: str, options: AttentionOptions) -> Candidate:
        machine, tried = self.machine, []
        for found in self.rings:
            schedules = self._schedules(name, options, found)
            predictions = [
                predict_schedule(machine, each, self.work, options, self.engine, events=False) for each in schedules
            ]
            tried.append((sum(float(each.time_s) for each in predictions), schedules, predictions))
        _, schedules, predictions = min(tried, key=lambda each: each[0])
        layers = [each for each in predictions if isinstance(each, LayerPrediction)]
        return Candidate(
            name,
            self.work.kind,
            options,
            replace(together(*layers) if len(layers) > 1 else layers[0], schedule=name),
            sent_bytes=int(sum(each.bytes_sent().sum(axis=(0, 2)) for each in schedules).max()),
            link_bytes=busiest_link_bytes(schedules, machine.topology),
            bound_by=_bound_by(machine, schedules, layers),
        )


def _without_name(text: str, name: str) -> str:
    """A message about a schedule, beside its name."""
    return text.removeprefix(f"schedule {name!r}").lstrip(":, ")


def busiest_link_bytes(schedules: Sequence[Schedule], topology: Topology) -> int:
    """The bytes on the link that all transfers together occupy longest."""
    load = np.zeros(len(topology.constraints), dtype=np.int64)
    n = topology.world_size
    for schedule in schedules:
        between = np.zeros(n * n, dtype=np.int64)
        for step in schedule.steps:
            np.add.at(between, step.source * n + step.destination, schedule.block_bytes[step.block])
        pairs = np.flatnonzero(between)
        routes, _ = topology.routes(pairs // n, pairs % n)
        hop, column = np.nonzero(routes >= 0)
        np.add.at(load, routes[hop, column], between[pairs[hop]])
    rates = np.array([float(each.bandwidth_bytes_per_s) for each in topology.constraints])
    return int(load[np.argmax(load / rates)]) if len(load) else 0


def _bound_by(machine: Machine, schedules: Sequence[Schedule], layers: Sequence[LayerPrediction]) -> str:
    """What most of the time was spent on; only computing or communicating where there are too many events to tell."""
    if sum(each.transfers for each in schedules) > MANY_EVENTS:
        compute_s, communication_s = (sum(float(x) for x in each) for each in zip(
            *((p.compute_s, p.communication_s) for p in layers), strict=True))  # fmt: skip
        return "compute" if compute_s >= communication_s else "communication"
    spent: dict[str, float] = {}
    for schedule in schedules:
        for kind, seconds in time_by_kind(simulate(schedule, machine, explain=True), machine.topology):
            spent[kind] = spent.get(kind, 0.0) + seconds
    return max(spent, key=lambda kind: spent[kind]) if spent else "nothing"


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
    return vars(rings) if any(name in USES_RINGS for name in names) else {}


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


def _measured(each: Candidate, fabric: Iterable[Comparison]) -> Candidate:
    """The candidate with its measurement, if it was run."""
    for run in (run for comparison in fabric for run in comparison.runs):
        if run.prediction.is_all and run.prediction.schedule == each.schedule:
            return replace(each, measured_s=run.measured_s, measured_prediction_s=float(run.prediction.time_s))
    return each
