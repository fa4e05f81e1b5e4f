"""Answer questions: build the schedules of a question, simulate the ones that may be fastest, return the fastest.

    answer(Question("h100-8", "tasp", Workload(8192, mask="causal"), AttentionOptions("both"))).time_s

There is one evaluator. `predict`, `compare`, studies and their finders build the schedules of a question around each of
the rings that may be fastest and with each value of the options that it leaves open (`build`), simulate them
(`Built.answer`) and read the numbers of an `Answer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from threading import Thread

import numpy as np

from sim.bounds.schedules import least_of_messages_s, least_of_schedule_s
from sim.simulate import engine_of
from tasp_lab.core.choices import Pass
from tasp_lab.core.errors import QuantityError, ScheduleError, TaspLabError
from tasp_lab.core.process import spare_cores
from tasp_lab.core.progress import ProgressCallback, ShareCallback, no_progress, no_share
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.stack import load_stack
from tasp_lab.prediction.answer import DOES_NOT_APPLY, Answer, Status
from tasp_lab.prediction.kept import MANY_KEPT, build_once, keep_steps, number_once
from tasp_lab.prediction.passes import Detail, PassAnswer, label
from tasp_lab.prediction.provenance import sha256
from tasp_lab.prediction.question import PreparedMachine, Question, prepared
from tasp_lab.prediction.rank import Bar, Outcome, rank
from tasp_lab.rings.rings import Decomposition
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import DEFAULT_OPTIONS, OPTIONS, AttentionOptions
from tasp_lab.schedules.build import build_schedules, check_schedules
from tasp_lab.schedules.collectives.kinds import CollectiveKind
from tasp_lab.schedules.registry import NOT_APPLICABLE, check_names, is_own, kind_of, options_of, uses_rings
from tasp_lab.timeline.events import Timeline
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Work, Workload

MANY_RANKS = 256
"""Building and proving a schedule, and its bound, may take more than a few seconds for so many ranks or more."""

MANY_TRANSFERS = {"simpy": 10_000, "array": 200_000}
"""An engine may take more than a few seconds for more transfers than this, which is reported as progress."""

MANY_EVENTS = 20_000
"""A timeline of more events is kept on request only."""

EQUAL = 1e-9
"""Times that differ by this share are equal: both engines agree to it."""

# ------------------------------------------------------------------------------------------------- build schedules


@dataclass(frozen=True, eq=False)
class Candidate:
    """The passes of a schedule with some options, around some rings or none; without, `search_complete` is None.

    `bounds_s` are those of passes on this machine, which candidates of one question have in common.
    """

    passes: tuple[Schedule, ...]
    machine: Machine
    options: AttentionOptions
    search_complete: bool | None = None
    bounds_s: dict[Schedule, float] = field(default_factory=dict)

    @cached_property
    def least_s(self) -> float:
        """A time that these very passes do not fall below."""
        for schedule in self.passes:
            if schedule not in self.bounds_s:
                bound_s = partial(least_of_schedule_s, schedule, self.machine)
                self.bounds_s[schedule] = number_once("bound", schedule, self.machine, bound_s)
        return sum(self.bounds_s[schedule] for schedule in self.passes)

    @cached_property
    def quick_bound_s(self) -> float:
        """The bound by which candidates are simulated first or not at all: of many transfers that of messages alone.

        To count all kernel calls takes an eighth of a simulation, after which they are known, and between dataflows
        the sums of their times hardly differ.
        """
        if sum(schedule.transfers for schedule in self.passes) <= MANY_KEPT:
            return self.least_s
        return sum(least_of_messages_s(schedule, self.machine) for schedule in self.passes)


def build(
    question: Question,
    on: PreparedMachine | None = None,
    progress: ProgressCallback = no_progress,
    collective: CollectiveKind | None = None,
) -> Built:
    """Build the schedules of a question. Raises `TaspLabError` where they contradict the work or the machine.

    `on` is the machine of the question, where it is at hand. `collective` is what a schedule of a collective does;
    a schedule object may be of several kinds, as AllGather and SendRecv are the same on two ranks.
    """
    on = prepared(question) if on is None else on
    work, schedule, options = question.work, question.schedule, question.options
    if isinstance(work, Workload):
        if question.overrides:
            from tasp_lab.machines.overrides import overridden_layer

            work = overridden_layer(work, question.overrides)
        options.check_layer(work)
    machine = on.machine_for(work, question.name, options.passes)
    if not isinstance(schedule, str):
        objects = schedule if isinstance(schedule, tuple) else (schedule,)
        both = len(objects) > 1 and options.passes == "both"
        asked: tuple[Pass, ...] = ("forward", "backward") if both else (options.passes,)
        if len(objects) != len(asked):
            raise ScheduleError(f"{len(objects)} schedules, expected one for each of the passes: {', '.join(asked)}")
        for one, passing in zip(objects, asked, strict=True):
            kind = check_schedules([one], work, passing)
            one.check_routes(machine.topology)
        return Built(question, on, work, (Candidate(objects, machine, options),), collective or kind)
    check_names([schedule], work)
    rings: Sequence[Decomposition | None] = on.rings(progress) if uses_rings(schedule) else [None]
    if (ranks := machine.topology.world_size) >= MANY_RANKS:
        progress(f"building {schedule} for {ranks:,} ranks; this may take a while")
    candidates, errors, bounds_s = list[Candidate](), list[TaspLabError](), dict[Schedule, float]()
    for around, way in product(rings, _ways(question, machine)):
        given = schedule, machine.topology, work, around, way
        try:
            # what builds a schedule of a user may change between two questions
            passes = build_once(*given) if is_own(schedule) else keep_steps(build_schedules(*given))
        except NOT_APPLICABLE as error:  # such as a dataflow that needs links in both directions
            errors.append(error)
            continue
        complete = None if around is None else around.search_complete
        candidates.append(Candidate(passes, machine, way, complete, bounds_s))
    if not candidates:
        raise errors[0]
    return Built(question, on, work, tuple(candidates), None if isinstance(work, Workload) else kind_of([schedule]))


def _ways(question: Question, machine: Machine) -> list[AttentionOptions]:
    """The options of a question: as its stack runs the schedule, else with each value of those that are left open."""
    if not isinstance(question.work, Workload):
        return [question.options]
    names, stated = options_of(question.name), {}
    if "groups" in names and _are_ranks_alike(machine.topology):  # other groups take as long
        names = tuple(name for name in names if name != "groups")
    if machine.stack:
        of_stack = load_stack(machine.stack).options(question.name)
        stated = {name: value for name, value in of_stack.items() if name in names}
    return question.options.with_defaults(stated).opened(names)


def _are_ranks_alike(topology: Topology) -> bool:
    """Whether all groups of ranks are as good: in one node, whose links are equal."""
    one_node = topology.is_complete and len(set(topology.node_of_rank)) == 1
    return one_node and (topology.table.is_mesh or np.ptp(topology.link_bandwidths_bytes_per_s) == 0)


# -------------------------------------------------------------------------------------------------------- simulate


@dataclass(frozen=True, eq=False)
class Built:
    """The schedules of a question: around each of the rings that may be fastest, and with each value of the options
    that it leaves open, in this order. `collective` is what a schedule of a collective does.
    """

    question: Question
    on: PreparedMachine
    work: Work
    candidates: tuple[Candidate, ...]
    collective: CollectiveKind | None = None

    @cached_property
    def digest(self) -> str:
        """The hash of all schedules, by what they are and not by what built them."""
        return sha256([[schedule.digest for schedule in one.passes] for one in self._by(lambda one: one.least_s)])

    def _by(self, bound_s: Callable[[Candidate], float]) -> tuple[Candidate, ...]:
        """The candidates, that with the least bound first; one alone needs no bound."""
        return tuple(sorted(self.candidates, key=bound_s)) if len(self.candidates) > 1 else self.candidates

    @cached_property
    def least_s(self) -> float:
        """A time that no candidate falls below."""
        return min(one.least_s for one in self.candidates)

    def answer(
        self, detail: Detail | None = "times", progress: ProgressCallback = no_progress, known: Answer | None = None
    ) -> Answer:
        """The answer of the fastest candidate, or a `known` one unless that is slower.

        A candidate whose bound is slower is not simulated. Of equally fast ones it is that with the least bound, in
        whatever order they are simulated. Without a `detail` events are kept of schedules with few.
        """
        timelines: dict[Schedule, Timeline] = {}

        def simulate(chosen: Sequence[Candidate], _: Bar) -> Iterator[Outcome[tuple[Candidate, Answer]]]:
            for one in chosen:
                found = self._simulated(one, detail, progress, timelines)
                yield Outcome((one, found), float(found.time_s))

        # below 1: what is as fast at best is not simulated
        margin, least_s = (1 - 1e-12, np.inf) if known is None else (1 - EQUAL, float(known.time_s))
        # one at a time: the first has the least bound, and often excludes all others
        queue = self._by(lambda one: one.quick_bound_s)
        ranked = rank(queue, simulate, margin=margin, bound=lambda one: one.quick_bound_s, size=1, least_s=least_s)
        if not ranked.answers:
            assert known is not None, "without a known answer, the first candidate is simulated"
            return known
        fastest_s = min(found.time_s for _, found in ranked.answers)
        tied = [(one, found) for one, found in ranked.answers if found.time_s == fastest_s]
        if len(tied) > 1:
            tied.sort(key=lambda each: (each[0].least_s, self.candidates.index(each[0])))
        found = tied[0][1]
        return found if known is None or found.time_s < (1 - EQUAL) * known.time_s else known

    def on_changed(self, change: Callable[[Machine], Machine]) -> Built:
        """The same schedules on a changed machine, of which others may be the fastest there."""
        machine, bounds_s = change(self.candidates[0].machine), dict[Schedule, float]()
        changed = (replace(one, machine=machine, bounds_s=bounds_s) for one in self.candidates)
        return replace(self, candidates=tuple(changed))

    def settled(self) -> Answer:
        """The answer that it takes at least `least_s`; nothing is simulated.

        It is that of the candidate with the least bound among those that fit into a GPU, or among all if none does.
        """
        answers = [self._passes(one, "times", no_progress) for one in self._by(lambda one: one.least_s)]
        found = next((each for each in answers if each.fits is not False), answers[0])
        return replace(found, status="settled", least_s=self.least_s)

    def _simulated(
        self, candidate: Candidate, detail: Detail | None, progress: ProgressCallback,
        timelines: dict[Schedule, Timeline],
    ) -> Answer:  # fmt: skip
        """The answer of a candidate; `timelines` are those of passes that it may share with others."""
        found = self._passes(candidate, detail, progress)
        for one in found.passes:
            if one.schedule in timelines:  # both dataflows of a ring have one forward pass
                one.__dict__["timeline"] = timelines[one.schedule]
        long = [one for one in found.passes if one.progress is not no_share and one.schedule not in timelines]
        for one in long:
            what = label(one.schedule, candidate.options)
            progress(f"simulating {one.schedule.transfers:,} transfers of {what}; this may take a while")
        _simulate_at_once(long)
        timelines |= {one.schedule: one.timeline for one in found.passes}
        return found

    def _passes(self, candidate: Candidate, detail: Detail | None, progress: ProgressCallback) -> Answer:
        most = max(schedule.transfers for schedule in candidate.passes)
        passes = []
        for schedule in candidate.passes:
            recorded = detail or ("events" if schedule.transfers <= MANY_EVENTS else "times")
            passes.append(PassAnswer(
                candidate.machine, schedule, self.work, candidate.options, self.question.engine, recorded,
                self.on.uncertainty_for(self.work, candidate.machine), most, self.collective,
                progress=self._shares(schedule, candidate.machine, progress),
            ))  # fmt: skip
        return Answer(self.question, candidate.machine, tuple(passes), chosen=candidate.options,
                      search_complete=candidate.search_complete, applying=_applying(self.question))  # fmt: skip

    def _shares(self, schedule: Schedule, machine: Machine, progress: ProgressCallback) -> ShareCallback:
        """Reports how far a long simulation is; nothing of a short one."""
        engine = engine_of(schedule, machine, self.question.engine)
        if schedule.transfers <= MANY_TRANSFERS[engine]:
            return no_share
        from sim.array.from_schedule import is_ring_schedule  # the array engine is loaded where it simulates

        if engine == "array" and is_ring_schedule(schedule):
            return no_share
        # unlike a closure, it can be pickled with the answer
        return partial(_report_simulated, progress, label(schedule, self.question.options))


def _simulate_at_once(passes: Sequence[PassAnswer]) -> None:
    """Simulate passes that take long, each in a thread: while machine code runs, so may other threads."""
    if len(passes) < 2 or spare_cores() < 2:
        return

    def simulate_one(one: PassAnswer) -> None:
        with suppress(Exception):  # it is raised where the timeline is asked for
            # A cached property would be locked for the other passes meanwhile, in Python 3.11.
            one.__dict__["timeline"] = one._simulated()

    # Daemon threads end with the process: an interrupt does not wait for them.
    threads = [Thread(target=simulate_one, args=(one,), daemon=True) for one in passes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _report_simulated(progress: ProgressCallback, what: str, share: float) -> None:
    progress(f"{what}: {share:.0%} simulated")


# ---------------------------------------------------------------------------------------------------------- answer


def answer(
    question: Question,
    detail: Detail | None = "times",
    *,
    on: PreparedMachine | None = None,
    progress: ProgressCallback = no_progress,
    collective: CollectiveKind | None = None,
) -> Answer:
    """The answer to a question. Never raises for a schedule that does not apply: then `Answer.reason` is why.

    Parameters
    ----------
    question : what is asked.
    detail : what the timeline records, see `Built.answer`.
    on : the machine of the question, where it is at hand; see `tasp_lab.prediction.question.prepared`.
    progress : called before schedules are built or simulated that take long.
    collective : see `build`.

    >>> found = answer(Question("full-mesh:4", "ulysses", Workload(4096, heads=4)))
    >>> found.status, found.time_s > found.compute_s
    ('ok', True)
    >>> answer(Question("full-mesh:4", "ulysses", Workload(4096, heads=3))).status
    'does not apply'
    """
    try:
        on = prepared(question) if on is None else on
        return build(question, on, progress, collective).answer(detail, progress)
    except TaspLabError as error:
        return refusal(question, error, on)


def answers(
    questions: Iterable[Question],
    detail: Detail | None = "times",
    *,
    workers: int = 1,
    progress: ProgressCallback = no_progress,
) -> Iterator[Answer]:
    """The answers to questions, in the order of the questions, each as soon as it and those before it are there.

    Nothing is stored: `tasp_lab.study.run.run_study` keeps the rows of answers in a folder, and goes on after an
    interrupt.

    Parameters
    ----------
    questions : what is asked; those that share a machine are answered fastest one after the other.
    workers : processes; 1 for this one. A script that starts more needs ``if __name__ == "__main__":``.
    detail : see `Built.answer`. Numbers that need further simulations are computed here, when they are read.
    progress : as of `answer`; not called by worker processes.

    Raises `QuantityError` for less than one worker, and `RunError` if a worker ends early.

    >>> layer = Workload(4096, heads=4)
    >>> [found.status for found in answers(Question(f"full-mesh:{ranks}", "ulysses", layer) for ranks in (2, 5, 4))]
    ['ok', 'does not apply', 'ok']
    """
    if workers < 1:
        raise QuantityError(f"workers: {workers}, expected 1 or more")
    if workers == 1:
        return (answer(question, detail, progress=progress) for question in questions)
    return _answers_of_processes(questions, detail, workers)


def _answers_of_processes(questions: Iterable[Question], detail: Detail | None, workers: int) -> Iterator[Answer]:
    from tasp_lab.core.workers import in_order, processes  # a single prediction starts no process

    with processes(workers) as executor:
        yield from in_order(partial(answer, detail=detail), questions, executor, workers)


def refusal(question: Question, error: TaspLabError, on: PreparedMachine | None = None) -> Answer:
    """The answer where there are no numbers, and why."""
    status: Status = "does not apply" if isinstance(error, DOES_NOT_APPLY) else "failed"
    machine = None if on is None else on.machine
    return Answer(question, machine, status=status, error=error, applying=_applying(question))


def _applying(question: Question) -> tuple[str, ...]:
    """The options that apply to a schedule by its name, looked up now: its file may be gone when they are shown."""
    with suppress(ScheduleError):
        if isinstance(question.schedule, str) and isinstance(question.work, Workload):
            return options_of(question.schedule)
    return ()


# ------------------------------------------------------------------------------------------------------------ tune

SEARCHED = {name: option.tried for name, option in OPTIONS.items() if option.tried}
"""The values that are tried of options. Dtypes of messages are not among them: they change what a layer computes."""


def tried_options(question: Question) -> list[AttentionOptions]:
    """The options that tuning tries: all combinations of those that the schedule has and that are left at their
    defaults, those with the fewest changes first.

    >>> [each.arguments for each in tried_options(Question("full-mesh:4", "tasp", 0, AttentionOptions(buffers=2)))]
    ['--buffers 2', '--no-trim --buffers 2']
    """
    asked, free = question.options, dict[str, tuple[object, ...]]()
    for name, values in SEARCHED.items():
        if name in options_of(question.name) and getattr(asked, name) == getattr(DEFAULT_OPTIONS, name):
            free[name] = values
    found = []
    for values in product(*free.values()):
        with suppress(ScheduleError):  # combinations that contradict each other
            found.append(replace(asked, **dict(zip(free, values, strict=True))))  # type: ignore[arg-type]
    return sorted(found, key=lambda way: sum(getattr(way, name) != getattr(asked, name) for name in free))


def tuned(question: Question, on: PreparedMachine | None = None) -> Answer:
    """The answer with the fastest of `tried_options`; of equal times the one with the fewest changes.

    Raises `TaspLabError` as `build` does for the options that are given. What a schedule rounds may depend on what it
    sends: ``kv-and-q-rings`` sends results only if queries travel, by default in the layer's dtype.
    """
    asked, *others = tried_options(question)
    found = first = build(replace(question, options=asked), on).answer()
    for options in others:
        with suppress(*NOT_APPLICABLE):
            found = build(replace(question, options=options), on).answer(known=found)
    return replace(found, untuned_s=float(first.time_s))
