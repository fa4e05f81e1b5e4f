"""Predictions: the simulated times of named schedules on a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar, Unpack

from sim.array.from_schedule import is_ring_schedule
from sim.bounds.collectives import collective_bound_s
from sim.bounds.least import least_s
from sim.host import busy_s
from sim.simulate import Engine, engine_of, simulate
from tasp_lab.core.errors import NoDecompositionError, QuantityError, ScheduleError, TaspLabError
from tasp_lab.core.progress import ProgressCallback, ShareCallback, no_progress, no_share
from tasp_lab.core.units import Number
from tasp_lab.machines.compute_rates import ASSUMED_COMPUTE
from tasp_lab.machines.contention import NONE
from tasp_lab.machines.host_model.runtime import Runtime
from tasp_lab.machines.machine import INSTANT, ComputeRate, Machine
from tasp_lab.machines.overrides import overridden_layer
from tasp_lab.machines.sampling import DEFAULT_SAMPLING, Sampling
from tasp_lab.prediction.inputs import (
    AttentionKeywords,
    ComputeLike,
    MachineLike,
    Schedules,
    WorkLike,
    as_options,
    as_schedules,
    as_work,
    check_arguments,
    chosen_machine,
    with_contention,
    with_runtime,
)
from tasp_lab.prediction.provenance import (
    Provenance,
    machine_constants,
    machine_inputs,
    overrides_inputs,
    plain,
    rings_inputs,
    runtime_constants,
    schedules_inputs,
)
from tasp_lab.prediction.results import CollectivePrediction as CollectivePrediction
from tasp_lab.prediction.results import LayerPrediction as LayerPrediction
from tasp_lab.prediction.results import Prediction as Prediction
from tasp_lab.prediction.results import Predictions as Predictions
from tasp_lab.prediction.results import Refused, label, layer_constants, pass_of, together
from tasp_lab.prediction.ring_choice import RingOptions, ring_candidates
from tasp_lab.prediction.uncertainty import Uncertainty
from tasp_lab.rings.decompose import Decomposition
from tasp_lab.rings.search_budget import DEFAULT_SEARCH_BUDGET
from tasp_lab.schedule.buffer_layout import memory_bytes
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.backward import dataflow_of
from tasp_lab.schedules.attention.options import DEFAULT_OPTIONS, AttentionOptions
from tasp_lab.schedules.attention.task import AttentionTask
from tasp_lab.schedules.build import build_schedules
from tasp_lab.schedules.collectives.kinds import CollectiveKind
from tasp_lab.schedules.hybrid.stack import layers_of, relayout_bytes
from tasp_lab.schedules.linear.task import LinearTask
from tasp_lab.schedules.objects import AnySchedule, check_schedules, name_of, names_in
from tasp_lab.schedules.registry import NOT_APPLICABLE, kind_of, reason_of, uses_rings
from tasp_lab.workload.layer import Work, Workload

_Given = TypeVar("_Given", ComputeLike | None, str | None)

MANY_RANKS = 256
"""Building and proving a schedule, and its bound, may take more than a few seconds for so many ranks or more."""

MANY_TRANSFERS = {"simpy": 10_000, "array": 200_000}
"""An engine may take more than a few seconds for more transfers than this, which is reported as progress."""

MANY_EVENTS = 20_000
"""A timeline of more events is kept on request only."""


def predict(
    machine: MachineLike,
    schedules: Schedules,
    work: WorkLike,
    *,
    library: str = "auto",
    without_links: Sequence[str] = (),
    links: Sequence[str] = (),
    overrides: Sequence[str] = (),
    decomposition: Decomposition | Sequence[Decomposition] | None = None,
    fold: int | None = None,
    lanes: int | None = None,
    rail_aligned: bool | None = None,
    search_budget: int = DEFAULT_SEARCH_BUDGET,
    compute: ComputeLike | None = None,
    kernel: str | None = None,
    contention: bool | None = None,
    runtime: str | Runtime | None = None,
    engine: Engine = "auto",
    explain: bool = False,
    events: bool | None = None,
    samples: int = DEFAULT_SAMPLING.samples,
    seed: int = DEFAULT_SAMPLING.seed,
    progress: ProgressCallback = no_progress,
    options: AttentionOptions = DEFAULT_OPTIONS,
    **attention: Unpack[AttentionKeywords],
) -> Predictions:
    """Predict a collective, an attention layer or a hybrid by each of the schedules.

    Parameters
    ----------
    machine : a machine, or its name; ranks without compute rates have `ASSUMED_COMPUTE`, in every dtype and pass.
        A `Topology` has no communication library.
    schedules : a schedule, or several: a name of `tasp_lab.schedules.registry`, or a
        `tasp_lab.schedule.schedule.Schedule` that computes this work, of a layer in the one requested pass. Options of
        layers and rings apply to schedules by name.
    work : the bytes per rank of a collective, a number or text such as ``"64MiB"``, or an attention layer or
        a hybrid, a stack of them.
    library : of a machine given by name, see `tasp_lab.machines.catalogue.load_machine`.
    without_links, links : links to remove (``"0-3"``) and bandwidths to change (``"0-3=10GB/s"``), see
        `tasp_lab.topology.derived`.
    overrides : texts such as ``"nic.bandwidth=x2"``, see `tasp_lab.machines.overrides`; `without_links` and `links`
        apply to the overridden machine.
    decomposition : the rings of schedules over rings; the fastest of several, which the simulation finds. By default
        those of `tasp_lab.prediction.ring_choice.ring_candidates`.
    fold, lanes, rail_aligned, search_budget : which rings are sought, see `tasp_lab.rings.decompose.decompose`.
    compute : the compute rate of a rank in FLOP/s, or ``"timed:RATE"``; by default the machine's own kernel or rates.
    kernel : a kernel of the machine's accelerator by name, as ``tasp-lab profile show`` lists them.
    contention : whether messages slow the kernel calls beside them (`tasp_lab.machines.contention`); by default where
        the machine has constants of it.
    runtime : what the library that runs a layer takes on the host, a name of `tasp_lab.machines.host_model.catalogue`.
    engine : ``auto``, ``simpy`` or ``array``, see `sim.simulate.simulate`.
    explain : include what the time was spent on, and every transfer.
    events : keep every event, or none unless it costs nothing; by default timelines of more than `MANY_EVENTS` have a
        time only.
    samples, seed : of the constants, from which intervals are made, see `tasp_lab.prediction.uncertainty`; 0 samples
        for none.
    progress : called with stages of searches, and before schedules are built or simulated that take long.
    options, attention : `AttentionOptions` of a layer, and its fields as keywords: ``passes="both"``.

    Returns a `CollectivePrediction` or a `LayerPrediction` per schedule; with the passes ``both`` three: forward,
    backward, and both together. Schedules that do not apply to the work or the topology are in `Predictions.refused`.

    Raises `TaspLabError`: an unknown name (`TopologyError`, `ScheduleError`, `ProfileError`), a text that is no
    quantity (`QuantityError`), a schedule of other work (`ScheduleError`); and if no schedule applies, why.

    >>> [round(p.time_s * 1e6) for p in predict("full-mesh:8", ["ring", "multi-ring"], "1MiB")]
    [154, 28]
    """
    check_arguments(locals())
    sampling = Sampling(samples, seed)
    chosen, options = as_schedules(schedules), as_options(options, **attention)
    work = overridden_layer(as_work(work), overrides)
    collective, names = check_schedules(chosen, work, options.passes), names_in(chosen)
    _check_layer_only(work, compute=compute, kernel=kernel, contention=contention, runtime=runtime)
    machine = chosen_machine(machine, library, compute, kernel, overrides, without_links, links)
    machine = with_contention(with_compute(machine), contention)
    machine = with_runtime(machine, runtime)
    if isinstance(work, Workload) and compute is None:
        machine = with_assumptions(machine, work)
    rings = RingOptions(fold, lanes, rail_aligned, search_budget)
    given = (decomposition,) if isinstance(decomposition, Decomposition) else tuple(decomposition or ())
    sought = rings.check_needed(names, given=bool(given))
    candidates, no_rings = given, None
    if sought:
        find = partial(rings.find, progress=progress)
        try:
            candidates = tuple(ring_candidates(machine, find, with_known=rings.is_free))
        except NoDecompositionError as error:  # schedules without rings may apply
            no_rings = error
    uncertainty = Uncertainty(machine, sampling)
    one_schedule = _OneSchedule(
        machine, work, options, engine, explain, events, progress, uncertainty, candidates, no_rings, collective
    )
    predictions, refused = one_schedule.of_all(chosen)
    provenance = Provenance(
        {
            "machine": machine_inputs(machine, compute=isinstance(work, Workload)),
            "schedules": schedules_inputs(chosen),
            "work": plain(work),
            "options": plain(options) if isinstance(work, Workload) else None,
            "rings": rings_inputs(given) if given else plain(rings) if sought else None,
            "engine": engine,
            "sampling": plain(sampling),
            **overrides_inputs(overrides),
        },
        machine_constants(machine.constants) + runtime_constants(machine.runtime) + layer_constants(predictions),
        tuple(sorted(one_schedule.engines)),
        all(each.search_complete for each in candidates) if any(map(uses_rings, names)) else None,
    )
    return Predictions(tuple(predictions), machine, provenance, explain, tuple(refused))


def _check_layer_only(work: Work, **given: object) -> None:
    """Raise `QuantityError` for what is given although the work is a collective."""
    for what, value in given.items():
        if value is not None and not isinstance(work, Workload):
            raise QuantityError(f"{what}: applies to attention layers only, not to collectives")


@dataclass
class _OneSchedule:
    """Predicts one schedule after the other; `engines` are those that were used.

    `candidates` are the rings of schedules over rings, and `no_rings` is why there are none. `collective` is what all
    schedules implement, None of a layer.
    """

    machine: Machine
    work: Work
    options: AttentionOptions
    engine: Engine
    explain: bool
    events: bool | None
    progress: ProgressCallback
    uncertainty: Uncertainty
    candidates: Sequence[Decomposition]
    no_rings: NoDecompositionError | None
    collective: CollectiveKind | None
    engines: set[str] = field(default_factory=set)

    def of_all(self, schedules: Sequence[AnySchedule]) -> tuple[list[Prediction], list[Refused]]:
        """The predictions of those schedules that apply, and the others. Raises why if none applies."""
        predictions: list[Prediction] = []
        errors: list[tuple[str, TaspLabError]] = []
        for each in schedules:
            try:
                predictions += self._predictions(each)
            except NOT_APPLICABLE as error:
                errors.append((name_of(each), error))
        if not predictions and len({str(error) for _, error in errors}) == 1:
            raise errors[0][1]
        refused = [Refused(name, reason_of(error, name)) for name, error in errors]
        if not predictions:
            reasons = "; ".join(f"{each.schedule}: {each.reason}" for each in refused)
            raise ScheduleError(f"no schedule applies: {reasons}")
        return predictions, refused

    def _predictions(self, schedule: AnySchedule) -> list[Prediction]:
        """The predictions of a schedule: its passes with the fastest rings, and both passes together."""
        rings: Sequence[Decomposition | None] = [None]
        if isinstance(schedule, str) and uses_rings(schedule):
            if self.no_rings is not None:
                raise self.no_rings
            rings = self.candidates
        tried = [self._passes(schedule, found) for found in rings]
        fastest = min(tried, key=lambda passes: sum(each.time_s for each, _ in passes))
        interval, most = self.uncertainty.interval, max(schedule.transfers for _, schedule in fastest)
        passes = [replace(each, interval=interval(schedule, float(each.time_s), most)) for each, schedule in fastest]
        return [*passes, together(*passes)] if self.options.passes == "both" else passes

    def _passes(self, schedule: AnySchedule, found: Decomposition | None) -> list[tuple[Prediction, Schedule]]:
        if isinstance(schedule, Schedule):
            schedule.check_routes(self.machine.topology)
            return [(self._predict(schedule), schedule)]
        if (ranks := self.machine.topology.world_size) >= MANY_RANKS:
            self.progress(f"building {schedule} for {ranks:,} ranks; this may take a while")
        schedules = build_schedules(schedule, self.machine.topology, self.work, found, self.options)
        return [(self._predict(each), each) for each in schedules]

    def _predict(self, schedule: Schedule) -> Prediction:
        engine, share = engine_of(schedule, self.machine, self.engine), no_share
        if schedule.transfers > MANY_TRANSFERS[engine] and (engine == "simpy" or not is_ring_schedule(schedule)):
            what = label(schedule, self.options)
            self.progress(f"simulating {schedule.transfers:,} transfers of {what}; this may take a while")
            share = partial(self._report, what)
        self.engines.add(engine)
        few = schedule.transfers <= MANY_EVENTS if self.events is None else self.events
        keep = few or self.explain
        return predict_schedule(
            self.machine,
            schedule,
            self.work,
            self.options,
            self.engine,
            explain=self.explain,
            events=keep,
            progress=share,
            collective=self.collective,
        )

    def _report(self, what: str, share: float) -> None:
        self.progress(f"{what}: {share:.0%} simulated")


def with_compute(machine: Machine) -> Machine:
    """The machine with `ASSUMED_COMPUTE` where it has no compute rate of its own."""
    return replace(machine, compute=ASSUMED_COMPUTE) if machine.compute == INSTANT else machine


def with_assumptions(machine: Machine, work: Workload) -> Machine:
    """The machine with its compute rates marked as assumed for linear layers, whose kernels have none of their own."""
    if work.kind == "softmax" or (work.kind == "hybrid" and "L" not in work.layers):
        return machine
    what = f"assumed{'' if work.kind == 'linear' else ' of linear layers'}: as softmax attention"
    return replace(machine, compute=machine.compute.as_assumed(what))


def predict_schedule(
    machine: Machine,
    schedule: Schedule,
    work: Work,
    options: AttentionOptions = DEFAULT_OPTIONS,
    engine: Engine = "auto",
    *,
    explain: bool = False,
    events: bool = True,
    progress: ShareCallback = no_share,
    collective: CollectiveKind | None = None,
) -> Prediction:
    """Predict a schedule of this work that was built with these `options`; `progress` is told the share that is done.

    `collective` is what a schedule of a collective does; by default what its name stands for. A layer is simulated with
    its kernel calls and without; and with contention once more, without that.
    """
    slows = machine.contention.slows
    times = 2 + slows if isinstance(work, Workload) else 1

    def time_s(changed: Machine, done: int) -> Number:
        share = partial(_report_part, progress, done, times)
        return simulate(schedule, changed, engine, events=False, progress=share).time_s

    timeline = simulate(
        schedule, machine, engine, explain=explain, events=events, progress=partial(_report_part, progress, 0, times)
    )
    head = (schedule.name, machine.topology.name, machine.topology.world_size, timeline.time_s)
    if not isinstance(work, Workload):
        collective = collective or kind_of([schedule.name])
        bound = collective_bound_s(collective, machine.topology, work)
        return CollectivePrediction(*head, bound, timeline, collective, work)
    bound = bound_s(machine, schedule, work)
    task = schedule.task
    assert task is not None, "a schedule of a layer has a task"
    has_dataflow = isinstance(task, AttentionTask) and task.is_backward
    flops, busy = schedule.flops().sum(axis=0).tolist(), busy_s(schedule, machine.compute, machine.rank_speeds)
    rate = machine.rate_of(work, task.passing)
    return LayerPrediction(
        *head,
        bound,
        replace(timeline, schedule=label(schedule, options)),
        layer=work,
        options=options,
        passing=pass_of(schedule),
        dataflow=dataflow_of(schedule) if has_dataflow else None,
        gradient_dtype=gradient_dtype(schedule),
        rates={task.passing: rate},
        compute_flops_per_s=reached(rate, flops, busy, equal=not machine.rank_speeds),
        compute_s=max(busy),
        communication_s=time_s(replace(machine, compute=INSTANT), 1),
        contention_s=timeline.time_s - time_s(replace(machine, contention=NONE), 2) if slows else None,
        bytes_sent=int(schedule.bytes_sent().sum()),
        memory_bytes=int(memory_bytes(schedule).max()),
        flops=sum(flops),
        relayout_bytes=relayout_bytes(schedule) if work.kind == "hybrid" else None,
    )


def reached(rate: ComputeRate, flops: Sequence[int], busy_s: Sequence[Number], *, equal: bool) -> Number | None:
    """The FLOP/s of the busiest rank; the rate itself where it is the same for all calls of `equal` ranks."""
    busiest = max(range(len(flops)), key=lambda rank: busy_s[rank])
    return flops[busiest] / busy_s[busiest] if (rate.kernel or not equal) and busy_s[busiest] else rate.flops_per_s


def _report_part(progress: ShareCallback, done: int, times: int, share: float) -> None:
    """Tell the share of all simulations, of which so many are done."""
    progress((done + share) / times)


def gradient_dtype(schedule: Schedule) -> str | None:
    """The dtype of gradients on the wire, None forward; of a hybrid that of softmax layers, if there are any."""
    tasks = [task for task, _ in layers_of(schedule)]
    first = next((task for task in tasks if isinstance(task, AttentionTask)), tasks[0])
    assert isinstance(first, AttentionTask | LinearTask), "there are no other layers"
    return first.gradient_dtype


def bound_s(machine: Machine, schedule: Schedule, work: Work) -> Number:
    """The lower bound of the time of all schedules on a machine, in seconds; those of a layer with the same start."""
    if not isinstance(work, Workload):
        return collective_bound_s(kind_of([schedule.name]), machine.topology, work)
    return least_s(schedule, machine)
