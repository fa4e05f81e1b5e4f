"""All schedules of attention on a machine, best first: which one, for this layer?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Unpack

from sim.simulate import Engine
from tasp_lab.core.choices import AttentionKind, FabricKind
from tasp_lab.core.errors import NoDecompositionError, ScheduleError, first_line
from tasp_lab.core.progress import CountCallback, ProgressCallback, count_lines, no_progress
from tasp_lab.machines.host_model.runtime import Runtime
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.overrides import overridden_layer
from tasp_lab.machines.sampling import DEFAULT_SAMPLING, FEW_SAMPLES, NO_SAMPLES, Sampling
from tasp_lab.prediction.candidates import OneCandidate
from tasp_lab.prediction.inputs import (
    AttentionKeywords,
    ComputeLike,
    MachineLike,
    ScheduleNames,
    Schedules,
    as_names,
    as_options,
    as_schedules,
    check_arguments,
    chosen_machine,
    parse_compute,
    with_contention,
    with_runtime,
)
from tasp_lab.prediction.predict import with_assumptions, with_compute
from tasp_lab.prediction.provenance import (
    Provenance,
    UsedConstant,
    machine_constants,
    machine_inputs,
    overrides_inputs,
    plain,
    rings_inputs,
    runtime_constants,
    schedules_inputs,
)
from tasp_lab.prediction.ranking import Candidate, Ranking, Rankings, beside_first
from tasp_lab.prediction.results import layer_constants
from tasp_lab.prediction.ring_choice import RingOptions, ring_candidates
from tasp_lab.prediction.stack_choice import StackChoice, choose_stacks
from tasp_lab.prediction.tune import SEARCHED, axes_of, most_trials
from tasp_lab.prediction.uncertainty import Uncertainty
from tasp_lab.rings.decompose import Decomposition
from tasp_lab.rings.search_budget import DEFAULT_SEARCH_BUDGET
from tasp_lab.schedules.attention.options import DEFAULT_OPTIONS, AttentionOptions
from tasp_lab.schedules.objects import AnySchedule, built_in, check_schedules, name_of, names_in
from tasp_lab.schedules.registry import by_kind, layer_names_on, options_for, uses_rings
from tasp_lab.validation.fabric_runs import FabricRuns, with_measurement
from tasp_lab.validation.fabrics import check_kernels
from tasp_lab.workload.layer import LAYER_KINDS, Workload


def compare(
    machine: MachineLike,
    work: Workload,
    schedules: Schedules | None = None,
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

    Of a hybrid those stacks are compared that `tasp_lab.prediction.stack_choice` chooses.

    Parameters
    ----------
    machine, library, without_links, links, overrides, compute, kernel, contention, runtime, engine, options,
    attention : see `tasp_lab.prediction.predict.predict`.
    work : the layer, or the hybrid.
    schedules : those to compare, by name or as objects, see `predict`; by default all names, families at every split
        of the ranks into two factors, and tuned also in all their variants.
    decomposition, fold, lanes, rail_aligned, search_budget : the rings of schedules over rings, see `predict`.
    tune : whether to search the options of each schedule for the shortest time, see `tasp_lab.prediction.tune`.
    measure : how many of the best schedules to run on a fabric, beside the fastest single ring; 0 for none.
    fabric, scale, repeats : of that run, see `tasp_lab.validation.validate.validate`. An emulated fabric scales the
        compute rate like the links, so the ratio of both is that of the prediction.
    samples, seed : of intervals, see `predict`; schedules are compared on the same samples.
    progress : called with lines of progress.
    count : called with each schedule before it is predicted; by default a line of progress.

    A schedule does not apply if the layer or the topology contradicts it; `Candidate.reason` says why. Options apply to
    the schedules that have them, see `tasp_lab.schedules.registry.options_for`.

    Raises `TaspLabError` for invalid inputs, see `predict` and `validate`.

    >>> from tasp_lab.workload.layer import Workload
    >>> compare("full-mesh:4", Workload(4096, heads=4, mask="causal"), ["ring-attention", "ulysses"]).best.schedule
    'ulysses'
    """
    check_arguments(locals(), work="layer")
    options, work = as_options(options, **attention), overridden_layer(work, overrides)
    options.check_layer(work)
    runs = FabricRuns(measure, fabric, scale, repeats)
    runs.check(work, compute)
    machine = chosen_machine(machine, library, compute, kernel, overrides, without_links, links)
    machine = with_runtime(with_compute(with_contention(machine, contention)), runtime)
    machine = with_assumptions(machine, work) if compute is None else machine
    world_size = machine.topology.world_size
    alone = _names_alone(work, world_size) if schedules is None else {}
    chosen: Sequence[AnySchedule]
    chosen = layer_names_on(world_size, work, variants=tune) if schedules is None else as_schedules(schedules)
    check_schedules(chosen, work, options.passes)
    if measure and built_in(chosen):
        name = built_in(chosen)[0].name
        raise ScheduleError(f"measure: schedule {name!r} is an object, but only schedules by name run on a fabric")
    names = names_in(chosen)
    rings = RingOptions(fold, lanes, rail_aligned, search_budget)
    tried, no_rings = _rings(machine, rings, decomposition, [*names, *chain(*alone.values())], progress)
    count = count or count_lines(progress)
    choice = _choice(machine, work, alone, tried, engine, options, count, progress) if alone else None
    chosen = chosen if choice is None else choice.names
    if tune:
        _announce_tuning(names_in(chosen), options, progress)
    uncertainty = Uncertainty(machine, Sampling(samples, seed))
    one = partial(_candidate, machine, work, tried, no_rings, engine, uncertainty, options, tune)
    candidates = _in_order(chosen, one, count)
    measured = runs.of(candidates, machine, work, decomposition, rings, compute, progress) if measure else ()
    candidates = [with_measurement(each, measured) for each in candidates]
    asked: dict[str, object] = {
        "machine": machine_inputs(machine, compute=True),
        "schedules": schedules_inputs(chosen),
        "work": plain(work),
        "options": plain(options),
        "rings": rings_inputs([decomposition]) if decomposition is not None else plain(rings),
        "engine": engine,
        "sampling": plain(uncertainty.sampling),
        **({"searched": plain(SEARCHED)} if tune else {}),
        **overrides_inputs(overrides),
    }
    provenance = Provenance(asked, _constants(machine, candidates), (), _search_complete(tried))
    return Ranking(tuple(candidates), machine, provenance, measured, work.kind, choice)


def _candidate(
    machine: Machine,
    work: Workload,
    tried: Sequence[Decomposition],
    no_rings: str,
    engine: Engine,
    uncertainty: Uncertainty,
    options: AttentionOptions,
    tune: bool,
    schedule: AnySchedule,
) -> Candidate:
    """A schedule with its best rings of those `tried`; `no_rings` is why there are none."""
    takes_rings = isinstance(schedule, str) and uses_rings(schedule)
    rings: Sequence[Decomposition | None] = tried if takes_rings else (None,)
    one = OneCandidate(machine, work, rings, engine, uncertainty)
    if not isinstance(schedule, str):
        return one.given(schedule, options)
    if not rings:
        return Candidate(schedule, work.kind, options_for(schedule, options), reason=no_rings)
    return one.candidate(schedule, options, tune)


def _in_order(
    schedules: Sequence[AnySchedule], one: Callable[[AnySchedule], Candidate], count: CountCallback
) -> list[Candidate]:
    """The candidates by time, each with its order to the first; `count` is told which is next."""
    candidates = []
    for number, schedule in enumerate(schedules):
        count(number, len(schedules), name_of(schedule))
        candidates.append(one(schedule))
    count(len(schedules), len(schedules), "")
    candidates.sort(key=lambda each: each.time_s)
    return [beside_first(each, candidates[0]) for each in candidates]


def _constants(machine: Machine, candidates: Iterable[Candidate]) -> tuple[UsedConstant, ...]:
    """The constants that the predictions of the candidates used."""
    predictions = [each.prediction for each in candidates if each.prediction is not None]
    return machine_constants(machine.constants) + runtime_constants(machine.runtime) + layer_constants(predictions)


def _search_complete(tried: Sequence[Decomposition]) -> bool | None:
    """Whether the search for rings was; None without rings."""
    return all(each.search_complete for each in tried) if tried else None


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
