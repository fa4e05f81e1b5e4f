"""Rank the schedules of a layer on a machine by predicted time.

    compare("h100-8", Workload(65536, heads=32, mask="causal"), passes="both").recommendation.schedule

Of a hybrid, only stacks of the schedules that are fastest for single layers are compared: eight ranks have 168 pairs of
a linear and a softmax schedule, and a stack takes as long to simulate as all its layers. So the schedules of each kind
are predicted for one layer alone, and the `FASTEST` of each kind are combined. The fastest softmax schedule without a
re-layout and LASP-2H, the published stack, are added. The choice is deterministic, but need not include the fastest
pair, because re-layouts occur in stacks only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, zip_longest
from math import inf
from typing import Any, NamedTuple

from sim.simulate import Engine
from tasp_lab.core.choices import AttentionKind, Preference
from tasp_lab.core.errors import NoDecompositionError, ScheduleError, WorkloadError, of_type
from tasp_lab.core.progress import CountCallback, ProgressCallback, count_lines, no_progress
from tasp_lab.core.report import Report, Reports, flat
from tasp_lab.core.tables import Part
from tasp_lab.core.units import format_size_about
from tasp_lab.core.workers import deal
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.sampling import NO_SAMPLES
from tasp_lab.machines.stack import load_stack
from tasp_lab.prediction import captions
from tasp_lab.prediction.answer import Answer
from tasp_lab.prediction.columns import fields_of, refused_table, table_of
from tasp_lab.prediction.evaluate import SEARCHED, answer, build, refusal, tried_options, tuned
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
from tasp_lab.prediction.kept import keep_of_copy
from tasp_lab.prediction.paired import paired_errors, setting_of
from tasp_lab.prediction.provenance import Provenance, plain
from tasp_lab.prediction.question import (
    SETTINGS,
    PreparedMachine,
    Question,
    are_sought,
    prepare,
    question_of,
    with_machine,
)
from tasp_lab.prediction.rank import NEAR, Bar, Outcome, rank
from tasp_lab.prediction.recommend import Recommendation
from tasp_lab.prediction.versus import Versus, change_name, changed_question, versus_table
from tasp_lab.schedules import registry
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import AnySchedule, attention_layout, check_schedules, names_in
from tasp_lab.schedules.hybrid.stack import layouts_differ
from tasp_lab.schedules.linear.task import chunk_layout
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import LAYER_KINDS, Workload
from tasp_lab.workload.models.catalogue import load_model
from tasp_lab.workload.models.model import Model

SINGLE_RINGS = tuple(registry.baselines())
"""The schedules over one ring; speed-ups are over the fastest of them, of hybrids over LASP-2H."""

COMPUTES: Mapping[AttentionKind, str] = {
    "softmax": "softmax attention",
    "linear": "linear attention",
    "hybrid": "hybrid",
}
"""What the schedules of a ranking compute."""

FASTEST = 3
"""Schedules of each kind of layer that are stacked."""

# -------------------------------------------------------------------------------------------------------- candidates


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
    tune : whether to search the options of each schedule for the shortest time, see
        `tasp_lab.prediction.evaluate.tuned`.
    screen : whether schedules are not simulated that do not fit into a GPU, or whose lower bound is so far above the
        time of the fastest one that they cannot be recommended (`tasp_lab.prediction.paired.PairedErrors.margin`). Only
        where all names are compared, with the options that are given.
    prefer : what decides between schedules that are expected to be equally fast (`tasp_lab.prediction.recommend`).
    versus : changes to compare with: overrides such as ``nic.bandwidth=x0.5`` and missing parts such as ``without
        nic.3``, several with commas, in addition to those of the question; or other machines, which overrides of the
        layer alone apply to.
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
    given, count = work, count or count_lines(progress)
    asked = question_of(machine, work, settings, NO_SAMPLES.samples, engine)
    if not isinstance(asked.work, Workload):
        raise WorkloadError(
            f"work {work!r}: bytes of a collective, expected an attention layer; see compare_collectives"
        )
    changed = [changed_question(change, machine, asked.overrides, asked.without) for change in versus]
    for other, own in changed:  # wrong ones are refused before anything is simulated
        prepare(question_of(other, work, settings | own))
    asked = replace(asked, sampling=asked.sampling or NO_SAMPLES)
    work, options = asked.layer, asked.options
    options.check_layer(work)
    on = prepare(asked)
    machine, question = on.machine_for(work), with_machine(asked, on.machine)
    chosen: Sequence[AnySchedule]
    alone: dict[AttentionKind, list[str]] = {}
    left_out = 0
    if schedules is None:
        chosen, left_out = shipped_names(work, on, options, variants=tune)
        for letter, kind in LAYER_KINDS.items() if work.kind == "hybrid" else ():
            if letter in work.layers:
                alone[kind], _ = shipped_names(work.of(letter), on, options)
    else:
        chosen = as_schedules(schedules)
    check_schedules(chosen, work, options.passes)
    _find_rings(question, on, [*names_in(chosen), *chain(*alone.values())], progress)
    choice = _choice(question, on, alone, count, progress) if alone else None
    chosen = chosen if choice is None else choice.names
    questions = [replace(question, schedule=each) for each in chosen]
    if tune:
        names = names_in(chosen)
        most = sum(len(tried_options(_with_applying(each))) for each in questions if isinstance(each.schedule, str))
        plural = "" if len(names) == 1 else "s"
        progress(f"tuning {len(names)} schedule{plural}: combinations of options to simulate: at most {most}")
    screens = screen and schedules is None and choice is None and not tune
    # a search answers the same question for its named schedules first
    there = {} if tune else {each.question.name: each for each in known}
    new = [each for each in questions if each.name not in there]
    answers, settled = _simulated(new, on, tune, screens, count, jobs)
    answers += [there[each.name] for each in questions if each.name in there]
    answers.sort(key=lambda each: (not each.applies, is_too_large(each), each.time_s))
    recommendation = None
    if applying := [each for each in answers if each.applies]:
        fitting = tuple(each for each in applying if not is_too_large(each))
        behind = tuple(each for each in settled if not is_too_large(each))
        recommendation = Recommendation(fitting or tuple(applying), prefer, on, behind)
        odds = zip_longest(applying, recommendation.expected_regrets, recommendation.odds.tied)
        ranked = [replace(each, first=None if each is applying[0] else applying[0], expected_regret=regret,
                          is_tied=bool(tied)) for each, regret, tied in odds]  # fmt: skip
        answers[: len(ranked)] = ranked  # those that do not apply are last
    provenance = captions.provenance_of(
        asked, chosen, machine, answers, rings=True, search_complete=on.search_complete,
        more={"searched": plain(SEARCHED)} if tune else {},
    )  # fmt: skip
    others = []
    for change, (other, own) in zip(versus, changed, strict=True):
        if recommendation is None:
            break
        progress(f"versus {change_name(change)}")
        found = compare(other, given, schedules, engine=engine, tune=tune, screen=screen, prefer=prefer,
                        jobs=jobs, progress=progress, count=count, **(settings | own))  # fmt: skip
        others.append(Versus.of(change_name(change), recommendation, found.recommendation, found.candidates[0].reason))
    model = load_model(given) if isinstance(given, str) else None
    return Ranking(question, tuple(answers), machine, provenance, choice, recommendation=recommendation,
                   versus=tuple(others), settled=tuple(settled), left_out=left_out, model=model)  # fmt: skip


def shipped_names(
    work: Workload, on: PreparedMachine, options: AttentionOptions, variants: bool = False
) -> tuple[list[str], int]:
    """The schedules that the stack of a machine runs for a layer, and how many others there are; without a stack all.

    Raises `ScheduleError` if it runs none.
    """
    ranks, stack = on.machine.topology.world_size, on.machine.stack
    names = registry.layer_names_on(ranks, work, variants=variants)
    if not stack:
        return names, 0
    reasons = {name: load_stack(stack).refusal(name, work, ranks, options.passes) for name in names}
    found = [name for name, why in reasons.items() if not why]
    if not found:
        limited = next((why for why in reasons.values() if "does not ship" not in why), "")
        raise ScheduleError(limited or f"the stack {stack} ships no schedule of this layer")
    return found, len(names) - len(found)


def _find_rings(question: Question, on: PreparedMachine, names: Sequence[str], progress: ProgressCallback) -> None:
    """Find the rings that some schedule needs. Raises `TaspLabError` for rings and options that cannot be used."""
    topology, rings = on.machine.topology, question.rings
    for given in rings if isinstance(rings, tuple) else ():
        if given.world_size != topology.world_size:
            where = f"{topology.name} has {topology.world_size}"
            raise ScheduleError(f"decomposition: rings of {given.world_size} ranks, {where}")
    if are_sought(rings, names):
        try:
            on.rings(progress)
        except NoDecompositionError:
            return  # schedules over rings do not apply, others may


def is_too_large(answer: Answer) -> bool:
    """Whether a schedule applies, and is known not to fit into the memory of a GPU."""
    return answer.applies and answer.fits is False


def _simulated(
    questions: Sequence[Question], on: PreparedMachine, tune: bool, screens: bool, count: CountCallback, jobs: int
) -> tuple[list[Answer], list[Answer]]:
    """The answers; and with `screens` those that are not simulated: they do not fit into a GPU, or their bounds are
    more than a margin above the least time of one that does. If none fits all are simulated.
    """
    place = {each.name: number for number, each in enumerate(questions)}
    # Alternately a family of groups, which has few messages, so that a short time is known soon that others are beyond;
    # and another schedule, lest one of the longest simulations begins last.
    families, others = [name for name in place if ":" in name], [name for name in place if ":" not in name]
    turns = [name for pair in zip_longest(reversed(families), reversed(others)) for name in pair if name is not None]

    def answer_all(questions: Sequence[Question], bar: Bar, screens: bool = screens) -> list[Outcome[Answer]]:
        total, work = len(questions), questions[0].work
        shared = [on, on.machine, on.machine.topology, on.uncertainty_for(work), work]
        found = deal(lambda each: outcome_of(each, on, bar, tune, screens), questions, jobs, shared,
                     lambda number: count(number, total, questions[number].name), keep_of_copy())  # fmt: skip
        count(total, total, "")
        return found

    if screens:
        # what is that far behind has no part in the regret, and is not near the fastest either
        margin = (1 + NEAR) * paired_errors().margin(setting_of(on.machine))
        ranked = rank(questions, answer_all, margin=margin, order=lambda each: turns.index(each.name), shared=jobs > 1)
        answers, settled = (sorted(each, key=lambda found: place[found.schedule]) for each in ranked[:2])
        if any(each.status != "settled" and not is_too_large(each) for each in answers):
            return answers, sorted(settled, key=lambda each: each.rank_s)
    return rank(questions, partial(answer_all, screens=False)).answers, []


def _with_applying(question: Question) -> Question:
    """The question with those of its options that the schedule has."""
    name, options = question.schedule, question.options
    applying = registry.options_for(name, options) if isinstance(name, str) else AttentionOptions(options.passes)
    return replace(question, options=applying)


def outcome_of(
    question: Question, on: PreparedMachine, bar: Bar, tune: bool = False, screens: bool = False
) -> Outcome[Answer]:
    """The answer for a schedule, with `tune` with its best options. Raises an error that is no matter of the schedule.

    With `screens` one that the bar excludes is settled, and one that does not fit into a GPU.
    """
    asked, settled = _with_applying(question), None
    try:
        if tune and isinstance(asked.schedule, str):
            found = tuned(asked, on)
        else:
            built = build(asked, on)
            # single rings are always simulated: speed-ups are over the fastest of them
            settled = built.settled() if screens and asked.name not in SINGLE_RINGS else None
            if settled is not None and (is_too_large(settled) or bar.excludes(settled.rank_s)):
                return Outcome(settled, bound_s=inf if is_too_large(settled) else settled.rank_s)
            found = built.answer()
    except registry.NOT_APPLICABLE as error:
        return Outcome(refusal(asked, error, on))
    time_s = inf if is_too_large(found) else float(found.time_s)
    bar.lower(time_s)  # at once, for those of this round that are still to be answered
    return Outcome(found, time_s, 0.0 if settled is None else settled.rank_s, settled)


def compare_kinds(
    machine: MachineLike, layers: Sequence[Workload], schedules: ScheduleNames | None = None, **settings: Any
) -> Reports[Ranking]:
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
    given = None if schedules is None else registry.by_kind(as_names(schedules), kinds)
    chosen = [each for each in layers if given is None or given[each.kind]]
    return Reports(compare(machine, each, None if given is None else given[each.kind], **settings) for each in chosen)


# ----------------------------------------------------------------------------------------------------------- ranking


@dataclass(frozen=True, repr=False)
class Ranking(Report):
    """All answers, the fastest first; then those that do not fit into a GPU, and those that do not apply last.

    Parameters
    ----------
    question : what was asked of each schedule.
    choice : of a hybrid, which stacks of layers are compared; None if they were given.
    fabric : the comparisons of the schedules that were run, one for each set of options.
    is_reporter : False on the ranks of a torchrun group that leave the output to rank 0.
    recommendation : None if no schedule applies. `versus` are the changes that it is compared with.
    settled : those that are not simulated (see `compare`), the least bound first.
    left_out : how many schedules the stack does not run.
    model : whose layer it is, if known.
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

    @property
    def _applying(self) -> list[Answer]:
        return [each for each in self.candidates if each.applies]

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

    def to_dict(self) -> dict[str, object]:
        return {
            "computes": COMPUTES[self.kind],
            "library": self.machine.comm_library.name,
            "stack": self.machine.stack or None,
            "changes": list(self.machine.changes),
            **({} if self.recommendation is None else self.recommendation.record),
            **({} if self.choice is None else {"layer_schedules": self.choice.records()}),
            "model_does_not_fit": self._model_does_not_fit or None,
            "versus": [each.record for each in self.versus],
            "results": [fields_of(each, "ranking") for each in self.candidates],
            "not_simulated": self._not_simulated,
            "fabric": [each.to_dict() for each in self.fabric],
            "provenance": self.provenance.to_dict(),
        }

    @property
    def _not_simulated(self) -> list[dict[str, object]]:
        return [{"schedule": each.schedule, "least_s": each.least_s, "fits": each.fits} for each in self.settled]

    def records(self) -> list[dict[str, object]]:
        """A row per schedule as in `parts`; of one that is not simulated its least time, and whether it fits."""
        rows = [flat(fields_of(each, "ranking")) | {"options": each.options.arguments} for each in self.candidates]
        return rows + self._not_simulated

    def parts(self) -> list[Part]:
        found: list[Part] = []
        best, applying = self.best, self._applying
        too_large = [each for each in (*applying, *self.settled) if is_too_large(each)]
        if applying and all(map(is_too_large, applying)):
            least, too_large = min(applying, key=lambda each: each.memory_bytes), []
            size = format_size_about(least.memory_bytes)
            found.append(f"No schedule fits into a GPU: {least.schedule} needs {size}, the least.")
        if self.recommendation is not None:
            # the software it is for follows what to use and how sure that is
            lines = self.recommendation.lines()
            model = [self._model_does_not_fit] if self._model_does_not_fit else []
            found += [*lines[:2], *model, *captions.software_of(self.recommendation.answer), *lines[2:]]
        found += [versus_table(self.versus)] if self.versus else []
        if best.applies:
            where = f"{best.topology}, {captions.ranks_text(best)}{captions.software(self.machine)}"
            rows = [*applying, *self.settled]
            found.append(table_of(captions.title_of(best, where), "ranking", rows, lambda _: self.single_ring))
            if too_large:
                found.append(f"do not fit into a GPU: {', '.join(each.schedule for each in too_large)}")
            if count := len(self.settled):
                last = "the last row" if count == 1 else f"the last {count} rows"
                why = ["they do not fit"] if len(too_large) > sum(map(is_too_large, applying)) else []
                if behind := [each for each in self.settled if not is_too_large(each)]:
                    beyond = behind[0].rank_s / float(best.time_s)
                    why.insert(0, f"bounds are at least {beyond:.2f} times the time of {best.schedule}")
                found.append(f"not simulated, as {' or '.join(why)}: {last}")
            if self.left_out:
                stack = f"as {self.machine.stack} does not run them for this layer"
                found.append(f"left out, {stack}: {self.left_out} schedules")
            found += [*self.machine.changes, *([] if self.choice is None else [str(self.choice)])]
            found += captions.assumptions(best)
            found += [] if best.interval is None else [captions.interval_line(best.interval)]
            found += captions.rates_line(applying)
        refused = [each for each in self.candidates if not each.applies]
        return [*found, *([refused_table(refused)] if refused else [])]

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


def question_about(schedule: str, question: Question, on: PreparedMachine | None = None) -> Question:
    """The question about a schedule that is to be explained, which need not be among those that were compared.

    Raises `ScheduleError` for an unknown name, and for a schedule that does not apply.
    """
    registry.check_names([schedule], question.layer)
    asked = _with_applying(replace(question, schedule=schedule))
    try:
        build(asked, on)
    except registry.NOT_APPLICABLE as error:
        raise ScheduleError(f"explain: {schedule} does not apply: {registry.reason_of(error, schedule)}") from error
    return asked


# ------------------------------------------------------------------------------------------------- stacks of hybrids


class StackChoice(NamedTuple):
    """The schedules of single layers by kind, the fastest first, with their times in seconds, and the chosen stacks.

    The time of a schedule that does not apply is None.
    """

    alone: Mapping[AttentionKind, tuple[tuple[str, float | None], ...]]
    names: tuple[str, ...]

    def records(self) -> dict[str, list[dict[str, object]]]:
        """The field `layer_schedules` of ``--json``."""
        used = {getattr(registry.names_of(stack), kind) for stack in self.names for kind in ("linear", "softmax")}
        return {
            kind: [{"schedule": name, "time_s": time_s, "stacked": name in used} for name, time_s in rows]
            for kind, rows in self.alone.items()
        }

    def __str__(self) -> str:
        """What was chosen, on one line."""
        stacked = {
            kind: [str(row["schedule"]) for row in rows if row["stacked"]] for kind, rows in self.records().items()
        }
        of_kinds = (f"{', '.join(names)} of {kind} layers" for kind, names in stacked.items())
        return (
            f"stacks of the schedules that are fastest for a layer alone, {FASTEST} of each kind, of the fastest "
            f"without a re-layout, and {registry.LASP_2H}: {'; '.join(of_kinds)}"
        )


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
        found = outcome_of(replace(question, schedule=name, work=layer), on, Bar()).answer
        return float(found.time_s) if found.applies else None

    choice = choose_stacks(work, on.machine.topology, alone, question.options, time_of)
    count(total, total, "")
    progress(str(choice))
    return choice


def choose_stacks(
    work: Workload,
    topology: Topology,
    names: Mapping[AttentionKind, Sequence[str]],
    options: AttentionOptions,
    time_of: Callable[[Workload, str], float | None],
) -> StackChoice:
    """The stacks to compare for a hybrid.

    Parameters
    ----------
    work : the hybrid; kinds without a layer in it have the schedule of LASP-2H.
    topology, options : they decide the sequence layouts of families with groups.
    names : the schedules of each kind of layer.
    time_of : the time of a schedule of a single layer in seconds; None if it does not apply.
    """
    alone: dict[AttentionKind, tuple[tuple[str, float | None], ...]] = {}
    chosen: dict[str, list[str]] = {}
    chunks = chunk_layout(work, topology.world_size)
    for letter, kind in LAYER_KINDS.items():
        if letter not in work.layers:
            chosen[letter] = [registry.names_of(registry.LASP_2H).of(letter)]
            continue
        layer = work.of(letter)
        rows = [(name, time_of(layer, name)) for name in names[kind]]
        alone[kind] = tuple(sorted(rows, key=lambda row: inf if row[1] is None else row[1]))
        applying = [name for name, time_s in alone[kind] if time_s is not None]
        chosen[letter] = applying[:FASTEST]
        if letter == "S" and "L" in work.layers:
            # re-layouts occur in stacks only, so a slower layer without one may make the faster stack
            layouts = {name: attention_layout(name, layer, topology, options) for name in applying}
            chosen[letter] += [name for name in applying if not layouts_differ(chunks, layouts[name])][:1]
    stacks = [f"{linear}+{softmax}" for linear in chosen["L"] for softmax in chosen["S"]]
    return StackChoice(alone, tuple(dict.fromkeys([*stacks, registry.LASP_2H])))
