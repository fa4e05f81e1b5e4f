"""All schedules of attention on a machine, best first: which one, for this layer?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, Unpack

from sim.simulate import Engine
from tasp_lab.analysis.candidates import OneCandidate
from tasp_lab.analysis.inputs import (
    AttentionKeywords,
    ComputeLike,
    MachineLike,
    ScheduleNames,
    as_names,
    as_options,
    chosen_machine,
    parse_compute,
    with_contention,
    with_runtime,
)
from tasp_lab.analysis.predict import with_assumptions, with_compute
from tasp_lab.analysis.provenance import (
    Provenance,
    machine_constants,
    machine_inputs,
    overrides_inputs,
    plain,
    rings_inputs,
    runtime_constants,
)
from tasp_lab.analysis.ranking import SINGLE_RINGS, Candidate, Ranking, Rankings, beside_first
from tasp_lab.analysis.registry import by_kind, check_names, layer_names_on, options_for, uses_rings
from tasp_lab.analysis.results import layer_constants
from tasp_lab.analysis.ring_choice import RingOptions, ring_candidates
from tasp_lab.analysis.stack_choice import StackChoice, choose_stacks
from tasp_lab.analysis.tune import SEARCHED, axes_of, most_trials
from tasp_lab.analysis.uncertainty import Uncertainty
from tasp_lab.analysis.validate import (
    Comparison,
    check_kernels,
    check_runs,
    default_scale,
    expected_fabric_s,
    validate,
)
from tasp_lab.attention.options import DEFAULT_OPTIONS, AttentionOptions
from tasp_lab.choices import AttentionKind, FabricKind
from tasp_lab.decomposition.decompose import Decomposition
from tasp_lab.decomposition.search_budget import DEFAULT_SEARCH_BUDGET
from tasp_lab.errors import NoDecompositionError, QuantityError, ScheduleError, first_line
from tasp_lab.machines.machine import IDEAL, Machine
from tasp_lab.machines.sampling import DEFAULT_SAMPLING, FEW_SAMPLES, NO_SAMPLES, Sampling
from tasp_lab.overrides import overridden_layer
from tasp_lab.progress import CountCallback, ProgressCallback, count_lines, no_progress
from tasp_lab.runtimes.runtime import NO_RUNTIME, Runtime
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.layer_pattern import LAYER_KINDS


def compare(
    machine: MachineLike,
    work: Workload,
    schedules: ScheduleNames | None = None,
    *,
    library: str = "auto",
    without_links: Sequence[str] = (),
    links: Sequence[str] = (),
    overrides: Sequence[str] = (),
    decomposition: Decomposition | None = None,
    fold: int | None = None,
    lanes: int | None = None,
    rail_aligned: bool | None = None,
    search_budget: int = DEFAULT_SEARCH_BUDGET,
    compute: ComputeLike | None = None,
    kernel: str | None = None,
    contention: bool | None = None,
    runtime: str | Runtime | None = None,
    engine: Engine = "auto",
    tune: bool = False,
    measure: int = 0,
    fabric: FabricKind = "emulated",
    scale: float | None = None,
    repeats: int = 5,
    samples: int = FEW_SAMPLES.samples,
    seed: int = DEFAULT_SAMPLING.seed,
    progress: ProgressCallback = no_progress,
    count: CountCallback | None = None,
    options: AttentionOptions = DEFAULT_OPTIONS,
    **attention: Unpack[AttentionKeywords],
) -> Ranking:
    """Predict every schedule of attention that applies to a layer on a machine, and rank them by time.

    Of a hybrid those stacks are compared that `tasp_lab.analysis.stack_choice` chooses.

    Parameters
    ----------
    machine, library, without_links, links, overrides, compute, kernel, contention, runtime, engine, options,
    attention : see `tasp_lab.analysis.predict.predict`.
    work : the layer, or the hybrid.
    schedules : names to compare; by default all, families at every split of the ranks into two factors, and tuned also
        in all their variants.
    decomposition, fold, lanes, rail_aligned, search_budget : the rings of schedules over rings, see `predict`.
    tune : whether to search the options of each schedule for the shortest time, see `tasp_lab.analysis.tune`.
    measure : how many of the best schedules to run on a fabric, beside the fastest single ring; 0 for none.
    fabric, scale, repeats : of that run, see `tasp_lab.analysis.validate.validate`. An emulated fabric scales the
        compute rate like the links, so the ratio of both is that of the prediction.
    samples, seed : of intervals, see `predict`; schedules are compared on the same samples.
    progress : called with lines of progress.
    count : called with each schedule before it is predicted; by default a line of progress.

    A schedule does not apply if the layer or the topology contradicts it; `Candidate.reason` says why. Options apply to
    the schedules that have them, see `tasp_lab.analysis.registry.options_for`.

    Raises `TaspLabError` for invalid inputs, see `predict` and `validate`.

    >>> from tasp_lab.workload.layer import Workload
    >>> compare("full-mesh:4", Workload(4096, heads=4, mask="causal"), ["ring-attention", "ulysses"]).best.schedule
    'ulysses'
    """
    options, work = as_options(options, **attention), overridden_layer(work, overrides)
    options.check_layer(work)
    if measure < 0:
        raise QuantityError(f"measure: {measure}, expected 0 or more")
    if measure:
        check_runs(scale, fabric, repeats)
        check_kernels(work, parse_compute(compute), fabric)
    machine = chosen_machine(machine, library, compute, kernel, overrides, without_links, links)
    machine = with_runtime(with_compute(with_contention(machine, contention)), runtime)
    if compute is None:
        machine = with_assumptions(machine, work)
    world_size = machine.topology.world_size
    uncertainty = Uncertainty(machine, Sampling(samples, seed))
    alone = _names_alone(work, world_size) if schedules is None else {}
    names = layer_names_on(world_size, work, variants=tune) if schedules is None else as_names(schedules)
    check_names(names, work)
    rings = RingOptions(fold, lanes, rail_aligned, search_budget)
    found, no_rings = _rings(machine, rings, decomposition, [*names, *chain(*alone.values())], progress)
    count = count or count_lines(progress)
    choice: StackChoice | None = None
    if alone:
        choice = _choice(machine, work, alone, found, engine, options, count, progress)
        names = choice.names
    if tune:
        _announce_tuning(names, options, progress)
    candidates = []
    for number, name in enumerate(names):
        count(number, len(names), name)
        tried = found if uses_rings(name) else (None,)
        if tried:
            candidates.append(OneCandidate(machine, work, tried, engine, uncertainty).candidate(name, options, tune))
        else:
            candidates.append(Candidate(name, work.kind, options_for(name, options), reason=no_rings))
    count(len(names), len(names), "")
    candidates.sort(key=lambda each: each.time_s)
    candidates = [beside_first(each, candidates[0]) for each in candidates]
    measured: tuple[Comparison, ...] = ()
    if measure:
        groups = _by_options(_to_run(candidates, measure))
        _announce(groups, machine.topology, fabric, scale, repeats, progress)
        run = partial(
            validate,
            replace(machine, comm_library=IDEAL, runtime=NO_RUNTIME),
            work=work,
            decomposition=decomposition,
            compute=None if fabric == "emulated" else compute,
            fabric=fabric,
            scale=scale,
            repeats=repeats,
            progress=progress,
        )
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
            "sampling": plain(uncertainty.sampling),
            **({"searched": plain(SEARCHED)} if tune else {}),
            **overrides_inputs(overrides),
        },
        machine_constants(machine.constants) + runtime_constants(machine.runtime) + layer_constants(predictions),
        (),
        all(each.search_complete for each in found) if found else None,
    )
    return Ranking(tuple(candidates), machine, provenance, measured, work.kind, choice)


def compare_kinds(
    machine: MachineLike, layers: Sequence[Workload], schedules: ScheduleNames | None = None, **settings: Any
) -> Rankings:
    """A ranking per kind of attention: layers of different kinds are never in one.

    Parameters
    ----------
    machine : see `compare`.
    layers : layers or hybrids, one of each kind.
    schedules : names to compare, each in the ranking of its kind; a kind without one is left out. By default all.
    settings : further arguments of `compare`.

    Raises `ScheduleError` for several layers of one kind and for names that none of them has, and what `compare`
    raises.

    >>> layer = Workload(4096, heads=4, mask="causal", kind="hybrid", layers="LS")
    >>> found = compare_kinds("full-mesh:2", [layer.of("L"), layer.of("S")], ["lasp-2", "tasp", "ulysses"])
    >>> [(each.kind, len(each.candidates)) for each in found]
    [('linear', 1), ('softmax', 2)]
    """
    kinds = [each.kind for each in layers]
    if len(set(kinds)) < len(kinds):
        raise ScheduleError(f"layers of the kinds {', '.join(kinds)}, expected each kind once")
    given = None if schedules is None else by_kind(as_names(schedules), kinds)
    if settings.get("measure"):
        for work in layers:
            check_kernels(work, parse_compute(settings.get("compute")), settings.get("fabric", "emulated"))
    chosen = [each for each in layers if given is None or given[each.kind]]
    return Rankings(
        tuple(compare(machine, each, None if given is None else given[each.kind], **settings) for each in chosen)
    )


def _rings(
    machine: Machine,
    rings: RingOptions,
    decomposition: Decomposition | None,
    names: Sequence[str],
    progress: ProgressCallback,
) -> tuple[Sequence[Decomposition], str]:
    """The rings to try, none if no schedule uses any, and why there are none where some does."""
    if decomposition is not None and decomposition.world_size != machine.topology.world_size:
        where = f"{machine.topology.name} has {machine.topology.world_size}"
        raise ScheduleError(f"decomposition: rings of {decomposition.world_size} ranks, {where}")
    given = () if decomposition is None else (decomposition,)
    if not rings.check_needed(names, given=bool(given)):
        return given, ""
    try:
        return ring_candidates(machine, partial(rings.find, progress=progress), with_known=rings.is_free), ""
    except NoDecompositionError as error:
        return (), first_line(error)


def _announce_tuning(names: Sequence[str], options: AttentionOptions, progress: ProgressCallback) -> None:
    trials = sum(most_trials(axes_of(name, options)) for name in names)
    plural = "" if len(names) == 1 else "s"
    progress(f"tuning {len(names)} schedule{plural}: combinations of options to simulate: at most {trials}")


def _names_alone(work: Workload, world_size: int) -> dict[AttentionKind, list[str]]:
    """The schedules of the layers of a hybrid, by kind; none of another layer."""
    if work.kind != "hybrid":
        return {}
    letters = [letter for letter in LAYER_KINDS if letter in work.layers]
    return {LAYER_KINDS[letter]: layer_names_on(world_size, work.of(letter)) for letter in letters}


def _choice(
    machine: Machine,
    work: Workload,
    alone: Mapping[AttentionKind, list[str]],
    found: Sequence[Decomposition],
    engine: Engine,
    options: AttentionOptions,
    count: CountCallback,
    progress: ProgressCallback,
) -> StackChoice:
    """Choose the stacks of a hybrid to compare, by the times of all schedules of its layers."""
    total = sum(map(len, alone.values()))
    progress(f"hybrid {work.layers}: {total} schedules of its layers are predicted alone, the fastest are stacked")
    numbers = iter(range(total))

    def time_of(layer: Workload, name: str) -> float | None:
        count(next(numbers), total, f"one layer by {name}")
        tried = found if uses_rings(name) else (None,)
        return (
            OneCandidate(machine, layer, tried, engine, Uncertainty(machine, NO_SAMPLES)).time_alone_s(name, options)
            if tried
            else None
        )

    choice = choose_stacks(work, machine.topology, alone, options, time_of)
    count(total, total, "")
    progress(str(choice))
    return choice


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


def _measured(each: Candidate, fabric: Iterable[Comparison]) -> Candidate:
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
