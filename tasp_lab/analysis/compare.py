"""All schedules of attention on a machine, best first: which one, for this layer?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Unpack

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
from tasp_lab.analysis.predict import MANY_EVENTS, predict_schedule, with_compute
from tasp_lab.analysis.provenance import Provenance, machine_constants, machine_inputs, plain, rings_inputs
from tasp_lab.analysis.registry import USES_RINGS, build_schedules, check_names
from tasp_lab.analysis.report import Report, flat
from tasp_lab.analysis.results import LayerPrediction, layer_constants, ratio, rows_table, together
from tasp_lab.analysis.ring_choice import RingOptions, ring_candidates
from tasp_lab.analysis.validate import Comparison, validate
from tasp_lab.attention.options import DEFAULT_OPTIONS, AttentionOptions
from tasp_lab.attention.registry import CIRCULATIONS, attention_names_on, options_for
from tasp_lab.choices import FabricKind
from tasp_lab.decomposition.decompose import Decomposition
from tasp_lab.decomposition.search_budget import DEFAULT_SEARCH_BUDGET
from tasp_lab.errors import NoDecompositionError, NoRouteError, QuantityError, ScheduleError, first_line
from tasp_lab.machines.machine import Machine
from tasp_lab.progress import ProgressCallback, no_progress
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.tables import Part, Table
from tasp_lab.timeline.critical_path import time_by_kind
from tasp_lab.topology.graph import Topology
from tasp_lab.units import format_size_about, format_time
from tasp_lab.workload.layer import Workload

SINGLE_RINGS = tuple(name for name in CIRCULATIONS if name not in USES_RINGS)
"""The schedules over one ring; speed-ups are over the fastest of them."""


@dataclass(frozen=True)
class Candidate:
    """A schedule that was compared: its prediction, over all requested passes, or why there is none.

    `sent_bytes` is the largest number of bytes that a rank sends, `link_bytes` those on the link that they occupy
    longest. `bound_by` is what most of the time of the critical path was spent on. `measured_s` is the median time on
    the fabric, and `measured_prediction_s` what was predicted for it there; None unless it was run.
    """

    schedule: str
    prediction: LayerPrediction | None = None
    reason: str = ""
    sent_bytes: int = 0
    link_bytes: int = 0
    bound_by: str = ""
    measured_s: float | None = None
    measured_prediction_s: float | None = None

    @property
    def time_s(self) -> float:
        """The predicted time in seconds; infinite for a schedule that does not apply."""
        return float("inf") if self.prediction is None else float(self.prediction.time_s)

    def to_dict(self) -> dict[str, object]:
        p = self.prediction
        return {
            "schedule": self.schedule,
            "computes": "softmax",
            "applies": p is not None,
            "reason": self.reason or None,
            "time_s": None if p is None else float(p.time_s),
            "bound_s": None if p is None else float(p.bound_s),
            "sent_bytes": None if p is None else self.sent_bytes,
            "link_bytes": None if p is None else self.link_bytes,
            "peak_bytes": None if p is None else p.memory_bytes,
            "ccr": None if p is None else p.ccr,
            "bound_by": self.bound_by or None,
            "measured_s": self.measured_s,
            "measured_prediction_s": self.measured_prediction_s,
        }


@dataclass(frozen=True, repr=False)
class Ranking(Report):
    """All candidates, the fastest first; those that do not apply last.

    `fabric` are the comparisons of the schedules that were run, one for each set of options.
    """

    candidates: tuple[Candidate, ...]
    machine: Machine
    provenance: Provenance
    fabric: tuple[Comparison, ...] = ()

    @property
    def is_reporter(self) -> bool:
        """False on the ranks of a torchrun group that leave the output to rank 0."""
        return all(each.is_reporter for each in self.fabric)

    @property
    def best(self) -> Candidate:
        """The fastest schedule."""
        return self.candidates[0]

    @property
    def single_ring_s(self) -> float | None:
        """The time of the fastest schedule over one ring; None if none applies."""
        return next((each.time_s for each in self._applying if each.schedule in SINGLE_RINGS), None)

    @property
    def _applying(self) -> list[Candidate]:
        return [each for each in self.candidates if each.prediction is not None]

    def to_dict(self) -> dict[str, object]:
        return {
            "library": self.machine.comm_library.name,
            "results": [each.to_dict() for each in self.candidates],
            "fabric": [each.to_dict() for each in self.fabric],
            "provenance": self.provenance.to_dict(),
        }

    def records(self) -> list[dict[str, object]]:
        return [flat(each.to_dict()) for each in self.candidates]

    def parts(self) -> list[Part]:
        found: list[Part] = []
        first = self.best.prediction
        if first is not None:
            library = self.machine.comm_library.name
            where = f"{first.topology}, {first.ranks}" + ("" if library == "ideal" else f", {library}")
            found += [rows_table(first.title(where), [self._row(each) for each in self._applying])]
            found += first.assumptions()
        refused = [each for each in self.candidates if each.prediction is None]
        if refused:
            rows = [(each.schedule, each.reason) for each in refused]
            found.append(Table("do not apply", ("schedule", "reason"), rows, (0, 1)))
        return found

    def _row(self, each: Candidate) -> dict[str, str]:
        p = each.prediction
        assert p is not None, "the schedule applies"
        ring_s = self.single_ring_s
        row = {
            "schedule": each.schedule,
            "time": format_time(p.time_s),
            "speed-up": "-" if ring_s is None else f"{ratio(ring_s, p.time_s):.2f}x",
            "sent by a rank": format_size_about(each.sent_bytes),
            "busiest link": format_size_about(each.link_bytes),
            "memory": format_size_about(p.memory_bytes),
            "CCR": "-" if p.ccr is None else f"{p.ccr:.3g}",
            "share of bound": f"{ratio(p.bound_s, p.time_s):.1%}",
            "bound by": each.bound_by,
        }
        if self.fabric:
            row |= {"on the fabric": "", "error": ""}
            if each.measured_s is not None and each.measured_prediction_s is not None:
                row["on the fabric"] = format_time(each.measured_s)
                row["error"] = f"{ratio(each.measured_prediction_s, each.measured_s) - 1:+.1%}"
        return row


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
    measure: int = 0,
    fabric: FabricKind = "emulated",
    scale: float | None = None,
    repeats: int = 5,
    progress: ProgressCallback = no_progress,
    options: AttentionOptions = DEFAULT_OPTIONS,
    **attention: Unpack[AttentionKeywords],
) -> Ranking:
    """Predict every schedule of attention that applies to a layer on a machine, and rank them by time.

    Parameters
    ----------
    machine, library, without_links, links, compute, engine, options, attention : see
        `tasp_lab.analysis.predict.predict`.
    work : the layer.
    schedules : names to compare; by default all, families at every split of the ranks into two factors.
    decomposition, fold, lanes, rail_aligned, search_budget : the rings of schedules over rings, see `predict`.
    measure : how many of the best schedules to run on a fabric, beside the fastest single ring; 0 for none.
    fabric, scale, repeats : of that run, see `tasp_lab.analysis.validate.validate`.
    progress : called with each schedule before it is predicted.

    A schedule does not apply if the layer or the topology contradicts it; `Candidate.reason` says why. Options apply to
    the schedules that have them, see `tasp_lab.attention.registry.options_for`.

    Raises `TaspLabError` for invalid inputs, see `predict` and `validate`.

    >>> from tasp_lab.workload.layer import Workload
    >>> compare("full-mesh:4", Workload(4096, heads=4, mask="causal"), ["ring-attention", "ulysses"]).best.schedule
    'ulysses'
    """
    options = as_options(options, **attention)
    if measure < 0:
        raise QuantityError(f"measure: {measure}, expected 0 or more")
    machine = with_compute(with_rate(as_machine(machine, library, without_links, links), compute))
    names = attention_names_on(machine.topology.world_size) if schedules is None else as_names(schedules)
    check_names(names, work)
    rings = RingOptions(fold, lanes, rail_aligned, search_budget)
    found: Sequence[Decomposition] = () if decomposition is None else (decomposition,)
    no_rings = ""
    if rings.check_needed(names, given=bool(found)):
        try:
            found = ring_candidates(machine, partial(rings.find, progress=progress), with_known=rings.is_free)
        except NoDecompositionError as error:
            no_rings = first_line(error)
    candidates = []
    for number, name in enumerate(names, start=1):
        progress(f"{number} of {len(names)}: {name}")
        if name in USES_RINGS and no_rings:
            candidates.append(Candidate(name, reason=no_rings))
        else:
            candidates.append(
                _candidate(name, machine, work, found if name in USES_RINGS else (None,), options, engine)
            )
    candidates.sort(key=lambda each: each.time_s)
    best = [each.schedule for each in candidates if each.prediction is not None]
    ring = [name for name in best if name in SINGLE_RINGS][:1]
    run = partial(
        validate, machine.topology, compute=compute, fabric=fabric, scale=scale, repeats=repeats, progress=progress
    )
    to_run = list(dict.fromkeys(best[:measure] + ring)) if measure else []
    measured = tuple(run([*names], work, options=each) for each, names in _by_options(to_run, options))
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
        },
        machine_constants(machine.constants) + layer_constants(predictions),
        (),
        all(each.search_complete for each in found) if found else None,
    )
    return Ranking(tuple(candidates), machine, provenance, measured)


def _candidate(
    name: str,
    machine: Machine,
    work: Workload,
    rings: Sequence[Decomposition | None],
    options: AttentionOptions,
    engine: Engine,
) -> Candidate:
    """A schedule by name with the fastest rings, or the reason why it does not apply."""
    tried = []
    try:
        options = options_for(name, options)
        for found in rings:
            schedules = build_schedules(name, machine.topology, work, found, options)
            predictions = [predict_schedule(machine, each, work, options, engine, events=False) for each in schedules]
            tried.append((sum(float(each.time_s) for each in predictions), schedules, predictions))
    except (ScheduleError, NoRouteError, NoDecompositionError) as error:
        return Candidate(name, reason=_without_name(first_line(error), name))
    _, schedules, predictions = min(tried, key=lambda each: each[0])
    layers = [each for each in predictions if isinstance(each, LayerPrediction)]
    topology = machine.topology
    return Candidate(
        name,
        replace(together(*layers) if len(layers) > 1 else layers[0], schedule=name),
        sent_bytes=int(sum(each.bytes_sent().sum(axis=(0, 2)) for each in schedules).max()),
        link_bytes=busiest_link_bytes(schedules, topology),
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


def _by_options(names: Iterable[str], options: AttentionOptions) -> Iterator[tuple[AttentionOptions, list[str]]]:
    """The names, grouped by the options that apply to them."""
    groups: dict[AttentionOptions, list[str]] = {}
    for name in names:
        groups.setdefault(options_for(name, options), []).append(name)
    yield from groups.items()


def _measured(each: Candidate, fabric: Iterable[Comparison]) -> Candidate:
    """The candidate with its measurement, if it was run."""
    for run in (run for comparison in fabric for run in comparison.runs):
        if run.prediction.is_all and run.prediction.schedule == each.schedule:
            return replace(each, measured_s=run.measured_s, measured_prediction_s=float(run.prediction.time_s))
    return each
