"""Rank the schedules of a layer on a machine by predicted time.

Of a hybrid, only stacks of the schedules that are fastest for single layers are compared: eight ranks have 168 pairs of
a linear and a softmax schedule, and a stack takes as long to simulate as all its layers. So the schedules of each kind
are predicted for one layer alone, and the `FASTEST` of each kind are combined. The fastest softmax schedule without a
re-layout and LASP-2H, the published stack, are added. The choice is deterministic, but need not include the fastest
pair, because re-layouts occur in stacks only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import c_double
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, repeat, zip_longest
from math import inf
from multiprocessing.sharedctypes import RawValue
from typing import Any, TypeVar, overload

from sim.simulate import Engine
from tasp_lab.core.choices import AttentionKind, Pass, Preference
from tasp_lab.core.errors import NoDecompositionError, ScheduleError, WorkloadError, of_type
from tasp_lab.core.progress import CountCallback, ProgressCallback, count_lines, no_progress
from tasp_lab.core.report import Report, flat
from tasp_lab.core.tables import Part
from tasp_lab.core.units import format_size_about
from tasp_lab.core.workers import deal
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.sampling import NO_SAMPLES
from tasp_lab.machines.stack import load_stack
from tasp_lab.prediction.answer import Answer, answer, build, refusal
from tasp_lab.prediction.captions import (
    assumptions,
    interval_line,
    provenance_of,
    ranks_text,
    software,
    software_of,
    title_of,
)
from tasp_lab.prediction.columns import fields_of, refused_table, table_of
from tasp_lab.prediction.explain import Explanation
from tasp_lab.prediction.inputs import (
    LayerLike,
    MachineLike,
    ScheduleNames,
    Schedules,
    as_names,
    as_schedules,
    check_call,
)
from tasp_lab.prediction.paired import paired_errors, setting_of
from tasp_lab.prediction.provenance import Provenance, plain
from tasp_lab.prediction.question import (
    SETTINGS,
    PreparedMachine,
    Question,
    Rings,
    are_sought,
    prepare,
    question_of,
    with_machine,
)
from tasp_lab.prediction.recommend import NEAR, Recommendation
from tasp_lab.prediction.tune import SEARCHED, axes_of, most_trials, search
from tasp_lab.prediction.versus import Versus, change_name, changed_question, versus_table
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import AnySchedule, attention_layout, check_schedules, names_in
from tasp_lab.schedules.hybrid.stack import layouts_differ
from tasp_lab.schedules.linear.task import chunk_layout
from tasp_lab.schedules.registry import (
    LASP_2H,
    NOT_APPLICABLE,
    baselines,
    by_kind,
    check_names,
    layer_names_on,
    names_of,
    options_for,
    reason_of,
)
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import LAYER_KINDS, Workload
from tasp_lab.workload.models.catalogue import load_model
from tasp_lab.workload.models.model import Model

SINGLE_RINGS = tuple(baselines())
"""The schedules over one ring; speed-ups are over the fastest of them, of hybrids over LASP-2H."""

COMPUTES: Mapping[AttentionKind, str] = {
    "softmax": "softmax attention",
    "linear": "linear attention",
    "hybrid": "hybrid",
}
"""What the schedules of a ranking compute."""

FASTEST = 3
"""Schedules of each kind of layer that are stacked."""

Found = TypeVar("Found")

TimeOf = Callable[[Workload, str], float | None]
"""The time of a schedule of a single layer in seconds; None if it does not apply."""


def compare(
    machine: MachineLike,
    work: LayerLike,
    schedules: Schedules | None = None,
    *,
    engine: Engine = "auto",
    tune: bool = False,
    screen: bool = False,
    progress: ProgressCallback = no_progress,
    count: CountCallback | None = None,
    prefer: Preference = "memory",
    versus: Sequence[MachineLike] = (),
    jobs: int = 1,
    known: Sequence[Answer] = (),
    **settings: Any,
) -> Ranking:
    """Predict every schedule of attention that applies to a layer on a machine, rank them by time, and recommend one.

    Of a hybrid those stacks are compared that `choose_stacks` chooses.

    Parameters
    ----------
    machine, engine, settings : see `tasp_lab.prediction.predict.predict`; without `samples`, intervals are those of
        measured errors alone. The order of schedules does not depend on them (`tasp_lab.prediction.paired`).
    work : the layer, or the hybrid; or the name of a model, beside a `sequence`.
    schedules : those to compare, by name or as objects, see `predict`; by default all names, families at every split
        of the ranks into two factors, and tuned also in all their variants.
    tune : whether to search the options of each schedule for the shortest time, see `tasp_lab.prediction.tune`.
    screen : whether schedules are left out whose lower bound is so far above the time of the fastest one that they
        cannot be recommended (`tasp_lab.prediction.paired.PairedErrors.margin`). Only where all names are compared,
        with the options that are given.
    prefer : what decides between schedules that are expected to be equally fast (`tasp_lab.prediction.recommend`).
    versus : changes to compare with: overrides such as ``nic.bandwidth=x0.5``, several with commas, in addition to
        those of the question; or other machines, which overrides of the layer alone apply to.
    jobs : processes, copies of this one: more than one only where nothing runs in other threads.
    known : answers to the same question, of which none is predicted again; not for tuned ones.
    progress : called with lines of progress.
    count : called with each schedule before it is predicted; by default a line of progress.

    A schedule does not apply if the layer or the topology contradicts it; `Answer.reason` says why. Options apply to
    the schedules that have them, see `tasp_lab.schedules.registry.options_for`.

    `tasp_lab.validation.fabric_runs.run_best` runs the best schedules of a ranking on a fabric.

    Raises `TaspLabError` for invalid inputs, see `predict`.

    >>> from tasp_lab.workload.layer import Workload
    >>> compare("full-mesh:4", Workload(4096, heads=4, mask="causal"), ["ring-attention", "ulysses"]).best.schedule
    'ulysses'
    """
    check_call(compare, locals(), SETTINGS)
    given = work
    asked = question_of(machine, work, settings, NO_SAMPLES.samples, engine)
    if not isinstance(asked.work, Workload):
        raise WorkloadError(
            f"work {work!r}: bytes of a collective, expected an attention layer; see compare_collectives"
        )
    model = load_model(work) if isinstance(work, str) else None
    changed = [changed_question(each, machine, asked.overrides) for each in versus]
    for other, overrides in changed:  # wrong ones are refused before anything is simulated
        prepare(question_of(other, work, settings | {"overrides": overrides}))
    asked = replace(asked, sampling=asked.sampling or NO_SAMPLES)
    work, options = asked.layer, asked.options
    options.check_layer(work)
    on = prepare(asked)
    machine, world_size = on.machine_for(work), on.machine.topology.world_size
    question = with_machine(asked, on.machine)
    alone = _names_alone(work, world_size) if schedules is None else {}
    chosen: Sequence[AnySchedule]
    chosen = layer_names_on(world_size, work, variants=tune) if schedules is None else as_schedules(schedules)
    left_out = 0
    if schedules is None and machine.stack:
        every, chosen = chosen, _shipped(machine.stack, names_in(chosen), work, world_size, options.passes)
        alone = {
            kind: _shipped(machine.stack, names, work, world_size, options.passes) for kind, names in alone.items()
        }
        left_out = len(every) - len(chosen)
    check_schedules(chosen, work, options.passes)
    _find_rings(on, asked.rings, [*names_in(chosen), *chain(*alone.values())], progress)
    count = count or count_lines(progress)
    choice = _choice(question, on, alone, count, progress) if alone else None
    chosen = chosen if choice is None else choice.names
    if tune:
        _announce_tuning(names_in(chosen), options, progress)
    questions = [replace(question, schedule=each) for each in chosen]
    settled: list[Answer] = []
    if screen and schedules is None and choice is None and not tune:
        answers, settled = _screened(questions, on, count, jobs)
    else:
        there = (
            {}
            if tune
            else {each.question.name: replace(each, first=None, expected_regret=None, is_tied=False) for each in known}
        )
        asked_now = [each for each in questions if each.name not in there]
        answers = _deal(lambda each: _answer(each, on, tune), asked_now, on, count, jobs)
        answers += [there[each.name] for each in questions if each.name in there]
    answers.sort(key=lambda each: (not each.applies, is_too_large(each), each.time_s))
    recommendation = None
    if applying := [each for each in answers if each.applies]:
        fitting = tuple(each for each in applying if not is_too_large(each))
        recommendation = Recommendation(fitting or tuple(applying), prefer, on, tuple(settled))
        regrets = chain(recommendation.expected_regrets, repeat(None))
        tied = chain(recommendation.tied, repeat(False))
        answers = [
            replace(each, first=None if each is applying[0] else applying[0], expected_regret=next(regrets),
                    is_tied=next(tied))
            if each.applies else each
            for each in answers
        ]  # fmt: skip
    provenance = provenance_of(asked, chosen, machine, answers, rings=True, search_complete=on.search_complete,
                               more={"searched": plain(SEARCHED)} if tune else {})  # fmt: skip
    others = []
    for change, (other, overrides) in zip(versus, changed, strict=True):
        if recommendation is None:
            break
        progress(f"versus {change_name(change)}")
        found = compare(other, given, schedules, engine=engine, tune=tune, screen=screen, prefer=prefer,
                        jobs=jobs, progress=progress, count=count, **(settings | {"overrides": overrides}))  # fmt: skip
        others.append(Versus.of(change_name(change), recommendation, found.recommendation, found.candidates[0].reason))
    return Ranking(question, tuple(answers), machine, provenance, choice, recommendation=recommendation,
                   versus=tuple(others), settled=tuple(settled), left_out=left_out, model=model)  # fmt: skip


def _shipped(stack: str, names: Sequence[str], work: Workload, ranks: int, passes: Pass) -> list[str]:
    """The schedules that a stack runs for a layer. Raises `ScheduleError` if there are none."""
    reasons = {name: load_stack(stack).refusal(name, work, ranks, passes) for name in names}
    found = [name for name, why in reasons.items() if not why]
    if not found:
        limited = next((why for why in reasons.values() if "does not ship" not in why), "")
        raise ScheduleError(limited or f"the stack {stack} ships no schedule of this layer")
    return found


def _screened(
    questions: Sequence[Question], on: PreparedMachine, count: CountCallback, jobs: int
) -> tuple[list[Answer], list[Answer]]:
    """The answers; and those that a bound settled, since it is more than a margin above the least time that fits.

    Single rings are always simulated: speed-ups are over the fastest of them.
    """
    collective = not any(isinstance(each.work, Workload) for each in questions)
    margin = (1 + NEAR) * paired_errors().margin(setting_of(on.machine), measured=collective)
    best_s = RawValue("d", inf) if jobs > 1 else c_double(inf)  # of all processes; an update may be lost

    def answer_of(question: Question) -> tuple[Answer, Answer | None]:
        """The answer, and what it is if a bound settles it; only that if the bound is beyond the margin already."""
        start = replace(question, options=options_for(question.name, question.options))
        try:
            built = build(start, on)
        except NOT_APPLICABLE as error:
            return refusal(start, error, on), None
        settled = None if question.name in SINGLE_RINGS else built.settled()
        if settled is not None and settled.rank_s > margin * best_s.value:
            return settled, settled
        found = built.answer()
        if not is_too_large(found):
            best_s.value = min(best_s.value, float(found.time_s))
        return found, settled

    # Alternately a family of groups, which has few messages, so that a short time is known soon that others are beyond;
    # and another schedule, lest one of the longest simulations begins last.
    families = [number for number, each in enumerate(questions) if ":" in each.name]
    others = [number for number, each in enumerate(questions) if ":" not in each.name]
    pairs = zip_longest(reversed(families), others)
    order = [number for pair in pairs for number in pair if number is not None]
    dealt = _deal(answer_of, [questions[number] for number in order], on, count, jobs)
    found = [result for _, result in sorted(zip(order, dealt, strict=True), key=lambda each: each[0])]
    # which ones were simulated depends on the order, what is shown does not
    least_s = min(
        (float(each.time_s) for each, _ in found if each.status == "ok" and not is_too_large(each)), default=inf
    )
    is_settled = [settled is not None and settled.rank_s > margin * least_s for _, settled in found]
    answers = [each for (each, _), left_out in zip(found, is_settled, strict=True) if not left_out]
    settled = [each for (_, each), left_out in zip(found, is_settled, strict=True) if left_out and each is not None]
    return answers, sorted(settled, key=lambda each: each.rank_s)


def is_too_large(answer: Answer) -> bool:
    """Whether a schedule applies, and is known not to fit into the memory of a GPU."""
    return answer.status == "ok" and answer.fits is False


def _deal(
    function: Callable[[Question], Found], questions: Sequence[Question], on: PreparedMachine, count: CountCallback,
    jobs: int,
) -> list[Found]:  # fmt: skip
    """What `function` finds for each question, in this process and copies of it."""
    total, work = len(questions), questions[0].work if questions else 0
    shared = [on, on.machine, on.machine.topology, on.uncertainty_for(work), work]
    found = deal(function, questions, jobs, shared, lambda number: count(number, total, questions[number].name))
    count(total, total, "")
    return found


def _answer(question: Question, on: PreparedMachine, tune: bool) -> Answer:
    """The answer for a schedule with those of the options that apply to it; with `tune` with the best options."""
    if not isinstance(question.schedule, str):
        return _unless_refused(replace(question, options=AttentionOptions(question.options.passes)), on)
    name, options = question.schedule, question.options
    start = replace(question, options=options_for(name, options))
    if not tune:
        return _unless_refused(start, on)
    times_s: dict[str, float] = {}

    def time_s(changed: AttentionOptions) -> float:
        return build(replace(question, options=changed), on).time_s(times_s)

    try:
        tuned = search(time_s, start.options, axes_of(name, options))
    except NOT_APPLICABLE as error:
        return refusal(start, error, on)
    found = _unless_refused(replace(question, options=tuned.options), on)
    return replace(found, untuned_s=tuned.untuned_s)


def _unless_refused(question: Question, on: PreparedMachine) -> Answer:
    """The answer. Raises an error that is no matter of the schedule."""
    found = answer(question, on=on)
    if found.error is not None and not isinstance(found.error, NOT_APPLICABLE):
        raise found.error
    return found


def _find_rings(on: PreparedMachine, rings: Rings, names: Sequence[str], progress: ProgressCallback) -> None:
    """Find the rings that some schedule needs. Raises `TaspLabError` for rings and options that cannot be used."""
    topology = on.machine.topology
    for each in rings if isinstance(rings, tuple) else ():
        if each.world_size != topology.world_size:
            where = f"{topology.name} has {topology.world_size}"
            raise ScheduleError(f"decomposition: rings of {each.world_size} ranks, {where}")
    if are_sought(rings, names):
        try:
            on.rings(progress)
        except NoDecompositionError:
            return  # schedules over rings do not apply, others may


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
    chosen = [each for each in layers if given is None or given[each.kind]]
    return Rankings(
        tuple(compare(machine, each, None if given is None else given[each.kind], **settings) for each in chosen)
    )


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
    question: Question,
    on: PreparedMachine,
    alone: Mapping[AttentionKind, list[str]],
    count: CountCallback,
    progress: ProgressCallback,
) -> StackChoice:
    """Choose the stacks of a hybrid to compare, by the times of all schedules of its layers."""
    total, work = sum(map(len, alone.values())), question.layer
    progress(f"hybrid {work.layers}: {total} schedules of its layers are predicted alone, the fastest are stacked")
    numbers = iter(range(total))

    def time_of(layer: Workload, name: str) -> float | None:
        count(next(numbers), total, f"one layer by {name}")
        options = options_for(name, question.options)
        found = _unless_refused(replace(question, schedule=name, work=layer, options=options), on)
        return float(found.time_s) if found.applies else None

    choice = choose_stacks(work, on.machine.topology, alone, question.options, time_of)
    count(total, total, "")
    progress(str(choice))
    return choice


def question_about(schedule: str, question: Question, on: PreparedMachine | None = None) -> Question:
    """The question about a schedule that is to be explained, which need not be among those that were compared.

    Raises `ScheduleError` for an unknown name, and for a schedule that does not apply.
    """
    check_names([schedule], question.layer)
    asked = replace(question, schedule=schedule, options=options_for(schedule, question.options))
    try:
        build(asked, on)
    except NOT_APPLICABLE as error:
        raise ScheduleError(f"explain: {schedule} does not apply: {reason_of(error, schedule)}") from error
    return asked


@dataclass(frozen=True, repr=False)
class Ranking(Report):
    """All answers, the fastest first; then those that do not fit into a GPU, and those that do not apply last.

    `settled` are those that a bound settled (see `compare`), the least bound first, and `left_out` is how many the
    stack does not run. `model` is whose layer it is, if known. `question` is what was asked of each schedule. Of a
    hybrid `choice` says which stacks of layers are compared, None if they were given. `recommendation` is None if no
    schedule applies; `versus` are the changes that it is compared with. `fabric` are the comparisons of the schedules
    that were run, one for each set of options. `is_reporter` is False on the ranks of a torchrun group that leave the
    output to rank 0.
    """

    question: Question
    candidates: tuple[Answer, ...]
    machine: Machine
    provenance: Provenance
    choice: StackChoice | None = None
    fabric: tuple[Report, ...] = ()
    is_reporter: bool = True
    recommendation: Recommendation | None = None
    versus: tuple[Versus, ...] = ()
    settled: tuple[Answer, ...] = ()
    left_out: int = 0
    model: Model | None = None

    @property
    def kind(self) -> AttentionKind:
        """What the layers are that all candidates compute."""
        return self.question.layer.kind

    @property
    def best(self) -> Answer:
        """The fastest schedule."""
        return self.candidates[0]

    @property
    def single_ring(self) -> Answer | None:
        """The fastest schedule over one ring; None if none applies."""
        by_name = (each for each in self._applying if isinstance(each.question.schedule, str))
        return next((each for each in by_name if each.schedule in SINGLE_RINGS), None)

    @property
    def single_ring_s(self) -> float | None:
        """Its time in seconds."""
        return None if self.single_ring is None else float(self.single_ring.time_s)

    def explain(self, schedule: str) -> Explanation:
        """Where a schedule spends its time, beside the recommended one; that beside the fastest other one.

        The schedule need not be among those that were compared. Raises `ScheduleError` for an unknown name, and for a
        schedule that does not apply.
        """
        if not isinstance(schedule, str):
            raise ScheduleError(of_type("schedule", schedule, "the name of a schedule"))
        known = {each.schedule: each for each in reversed(self.candidates) if each.applies}
        on = None if self.recommendation is None else self.recommendation.on
        found = known.get(schedule) or answer(question_about(schedule, self.question, on), on=on)
        if found.error is not None:
            raise found.error
        if self.recommendation is None:
            raise ScheduleError(f"explain: no other schedule than {schedule} applies, expected one that is recommended")
        best = self.recommendation.answer
        if schedule == best.schedule:
            rest = [each for each in self._applying if each.schedule != schedule]
            return Explanation(best, rest[0] if rest else None, schedule)
        return Explanation(best, found, schedule)

    @property
    def _applying(self) -> list[Answer]:
        return [each for each in self.candidates if each.applies]

    def to_dict(self) -> dict[str, object]:
        return {
            "computes": COMPUTES[self.kind],
            "library": self.machine.comm_library.name,
            "stack": self.machine.stack or None,
            "changes": list(self.machine.changes),
            **({} if self.recommendation is None else self.recommendation.to_dict()),
            **({} if self.choice is None else {"layer_schedules": self.choice.to_dict()}),
            "model_does_not_fit": self._model_does_not_fit or None,
            "versus": [each.to_dict() for each in self.versus],
            "results": [fields_of(each, "ranking") for each in self.candidates],
            "not_simulated": [{"schedule": each.schedule, "least_s": each.least_s} for each in self.settled],
            "fabric": [each.to_dict() for each in self.fabric],
            "provenance": self.provenance.to_dict(),
        }

    def records(self) -> list[dict[str, object]]:
        """A row per schedule as in `parts`; of one that a bound settled its least time alone."""
        rows = [flat(fields_of(each, "ranking")) | {"options": each.options.arguments} for each in self.candidates]
        return rows + [{"schedule": each.schedule, "least_s": each.least_s} for each in self.settled]

    def parts(self) -> list[Part]:
        found: list[Part] = []
        first = self.best
        found += [self._none_fits] if self._none_fits else []
        found += self._decision
        found += [versus_table(self.versus)] if self.versus else []
        if first.applies:
            title = title_of(first, f"{first.topology}, {ranks_text(first)}{software(self.machine)}")
            rows = [*self._applying, *self.settled]
            found.append(table_of(title, "ranking", rows, lambda _: self.single_ring))
            found += [self._too_large] if self._too_large else []
            found += [self._settled_line] if self.settled else []
            found += [self._left_out_line] if self.left_out else []
            found += self.machine.changes
            found += [] if self.choice is None else [str(self.choice)]
            found += assumptions(first)
            found += [] if first.interval is None else [interval_line(first.interval)]
        refused = [each for each in self.candidates if not each.applies]
        if refused:
            found.append(refused_table(refused))
        return found

    @property
    def _decision(self) -> list[str]:
        """The recommendation; the software it is for follows the first two lines, what to use and how sure that is."""
        if self.recommendation is None:
            return []
        lines = self.recommendation.lines()
        too_large = [self._model_does_not_fit] if self._model_does_not_fit else []
        return [*lines[:2], *too_large, *software_of(self.recommendation.answer), *lines[2:]]

    @cached_property
    def _model_does_not_fit(self) -> str:
        """That a step of the model needs more memory than a GPU has, as `predict_step` lays it out by default."""
        from tasp_lab.prediction.training_step.layout import Layout, StepPlan
        from tasp_lab.prediction.training_step.memory import least_memory
        from tasp_lab.prediction.training_step.rates import step_rates

        usable = step_rates(self.machine).usable_bytes
        if self.model is None or self.recommendation is None or usable is None:
            return ""
        work, ranks, best = self.question.layer, self.machine.topology.world_size, self.recommendation.answer
        trains = self.question.options.passes != "forward"
        options = replace(self.question.options, passes="both" if trains else "forward")
        plan = StepPlan(self.model, work.sequence, best.schedule, Layout().on(ranks), work.batch, options)
        needed = least_memory(plan, best.buffer_bytes).total
        if needed <= usable:
            return ""
        step = "a training step with FSDP and full checkpointing" if trains else "a forward pass with FSDP"
        return (
            f"{self.model.name} does not fit: {step} over all {ranks} GPUs needs {format_size_about(needed)} of "
            f"{format_size_about(usable)} per GPU; ask tasp-lab plan for a layout that does."
        )

    @property
    def _none_fits(self) -> str:
        """That no schedule fits into the memory of a GPU, and what the smallest one needs; empty if one does."""
        if not self._applying or not all(map(is_too_large, self._applying)):
            return ""
        least = min(self._applying, key=lambda each: each.memory_bytes)
        return (
            f"No schedule fits into a GPU: {least.schedule} needs {format_size_about(least.memory_bytes)}, the least."
        )

    @property
    def _too_large(self) -> str:
        """Which schedules do not fit into the memory of a GPU beside some that do; empty if all fit, or none."""
        names = [each.schedule for each in self._applying if is_too_large(each)]
        return "" if self._none_fits or not names else f"do not fit into a GPU: {', '.join(names)}"

    @property
    def _settled_line(self) -> str:
        """How many schedules were not simulated, and why."""
        times, count = self.settled[0].rank_s / float(self.best.time_s), len(self.settled)
        rows = "the last row" if count == 1 else f"the last {count} rows"
        return f"not simulated, as bounds are at least {times:.2f} times the time of {self.best.schedule}: {rows}"

    @property
    def _left_out_line(self) -> str:
        """How many schedules the stack does not run."""
        return f"left out, as {self.machine.stack} does not run them for this layer: {self.left_out} schedules"


@dataclass(frozen=True, repr=False)
class Rankings(Report, Sequence[Ranking]):
    """A ranking for each kind of attention."""

    items: tuple[Ranking, ...]

    @overload
    def __getitem__(self, index: int) -> Ranking: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Ranking, ...]: ...
    def __getitem__(self, index: int | slice) -> Ranking | tuple[Ranking, ...]:
        return self.items[index]

    def __len__(self) -> int:
        return len(self.items)

    @property
    def is_reporter(self) -> bool:
        """False on the ranks of a torchrun group that leave the output to rank 0."""
        return all(each.is_reporter for each in self.items)

    def to_dict(self) -> dict[str, object]:
        return {"parts": [each.to_dict() for each in self.items]}

    def records(self) -> list[dict[str, object]]:
        return [row for each in self.items for row in each.records()]

    def parts(self) -> list[Part]:
        return [part for each in self.items for part in each.parts()]


@dataclass(frozen=True)
class StackChoice:
    """The schedules of single layers by kind, the fastest first, with their times in seconds, and the chosen stacks.

    The time of a schedule that does not apply is None.
    """

    alone: Mapping[AttentionKind, tuple[tuple[str, float | None], ...]]
    names: tuple[str, ...]

    @property
    def stacked(self) -> Mapping[AttentionKind, tuple[str, ...]]:
        """The schedules of each kind that are in a stack, the fastest first."""
        sides = [names_of(name) for name in self.names]
        used = {"linear": {each.linear for each in sides}, "softmax": {each.softmax for each in sides}}
        return {kind: tuple(name for name, _ in rows if name in used[kind]) for kind, rows in self.alone.items()}

    def to_dict(self) -> dict[str, object]:
        """The field `layer_schedules` of ``--json``."""
        return {
            kind: [{"schedule": name, "time_s": time_s, "stacked": name in self.stacked[kind]} for name, time_s in rows]
            for kind, rows in self.alone.items()
        }

    def __str__(self) -> str:
        """What was chosen, on one line."""
        of_kinds = (f"{', '.join(names)} of {kind} layers" for kind, names in self.stacked.items())
        return (
            f"stacks of the schedules that are fastest for a layer alone, {FASTEST} of each kind, of the fastest "
            f"without a re-layout, and {LASP_2H}: {'; '.join(of_kinds)}"
        )


def choose_stacks(
    work: Workload,
    topology: Topology,
    names: Mapping[AttentionKind, Sequence[str]],
    options: AttentionOptions,
    time_of: TimeOf,
) -> StackChoice:
    """The stacks to compare for a hybrid.

    Parameters
    ----------
    work : the hybrid; kinds without a layer in it have the schedule of LASP-2H.
    topology, options : they decide the sequence layouts of families with groups.
    names : the schedules of each kind of layer.
    time_of : how long one takes for one layer.
    """
    alone: dict[AttentionKind, tuple[tuple[str, float | None], ...]] = {}
    chosen: dict[str, list[str]] = {}
    published = names_of(LASP_2H)
    for letter, kind in LAYER_KINDS.items():
        if letter not in work.layers:
            chosen[letter] = [published.of(letter)]
            continue
        layer = work.of(letter)
        times_s = {name: time_of(layer, name) for name in names[kind]}
        rows = sorted(times_s.items(), key=lambda row: inf if row[1] is None else row[1])
        alone[kind] = tuple(rows)
        applying = [name for name, time_s in rows if time_s is not None]
        chosen[letter] = applying[:FASTEST]
        if letter == "S" and "L" in work.layers:
            chosen[letter] += [name for name in applying if not _moves(name, work, topology, options)][:1]
    stacks = [f"{linear}+{softmax}" for linear in chosen["L"] for softmax in chosen["S"]]
    return StackChoice(alone, tuple(dict.fromkeys([*stacks, LASP_2H])))


def _moves(name: str, work: Workload, topology: Topology, options: AttentionOptions) -> bool:
    """Whether hidden states move between linear layers and those of this schedule."""
    layout = attention_layout(name, work.of("S"), topology, options)
    return layouts_differ(chunk_layout(work, topology.world_size), layout)
