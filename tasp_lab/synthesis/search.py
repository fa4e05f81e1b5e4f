"""Find a schedule for a question: `search`.

>>> import tasp_lab
>>> layer = tasp_lab.Workload(8192, heads=8, kv_heads=2, mask="causal")
>>> found = tasp_lab.search("full-mesh:4", layer, effort=40)
>>> found.time_s <= found.named.time_s
True

The bound comes first, then every named schedule (`tasp_lab.prediction.compare`): the best one is always a candidate, so
what is found is never worse. Then constructions (`tasp_lab.synthesis.moves.starts`) are simulated for each pass alone,
with each number of ranks that may share out the heads; and the best of them are changed, decision by decision, while
effort is left. A worse plan is taken now and then, less often towards the end.

Effort counts simulated passes. Changes are drawn in batches, whose results are used when all are there, so the result
does not depend on the number of workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from operator import itemgetter
from pathlib import Path
from threading import active_count
from typing import Any, NamedTuple

import numpy as np

from sim.simulate import simulate
from tasp_lab.core.errors import QuantityError, ScheduleError, TopologyError
from tasp_lab.core.progress import ProgressCallback, no_progress
from tasp_lab.core.report import Report, flat
from tasp_lab.core.tables import Part
from tasp_lab.core.units import format_regret, format_size_about, format_speed, format_time
from tasp_lab.core.version import MODEL_VERSION
from tasp_lab.core.workers import in_order, processes
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.sampling import Sampling
from tasp_lab.prediction.answer import Answer
from tasp_lab.prediction.captions import layer_text, provenance_of, title_of
from tasp_lab.prediction.columns import fields_of, table_of
from tasp_lab.prediction.compare import Ranking, compare, is_too_large
from tasp_lab.prediction.evaluate import answer
from tasp_lab.prediction.evaluate import build as build_question
from tasp_lab.prediction.inputs import MachineLike
from tasp_lab.prediction.passes import Detail
from tasp_lab.prediction.question import (
    PreparedMachine,
    Question,
    prepare,
    question_of,
    with_machine,
)
from tasp_lab.prediction.recommend import Recommendation
from tasp_lab.prediction.training_step.rates import step_rates
from tasp_lab.schedule.buffer_layout import memory_bytes
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.attention.program import APPLYING, Known, Plan, Program, build, build_pass, save
from tasp_lab.schedules.registry import NOT_APPLICABLE
from tasp_lab.synthesis.explain import explained
from tasp_lab.synthesis.moves import has_routes, neighbour, starts
from tasp_lab.topology.derived import between_groups
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload

DEFAULT_EFFORT = 400
"""Simulated passes: about a minute for two nodes of eight GPUs."""

CHOICES = 3
"""The best schedules of so many frames, and the best named one, are compared by their expected regret."""

BATCH = 8
"""Changes that are simulated together."""

NAME = "found"
"""The name of a schedule that was found and is not in a file."""

WORSE = 0.01
"""By how much of its time a plan may be worse that is taken at the beginning; it falls to 0."""

FIRST_PLANS, BEHIND = 4, 0.2
"""The constructions of every frame that are simulated, and by how much of the best time others may be slower so far."""

AT_BOUND = 1e-3
"""A time this close to its bound, as a share, is not searched any further."""


class Frame(NamedTuple):
    """What both passes have in common: the first fields of `Program`."""

    layout: str
    shape: tuple[int, ...]
    members: int
    keep: bool = False


class _Trial(NamedTuple):
    frame: Frame
    plan: Plan
    backward: bool


def search(
    machine: MachineLike,
    work: Workload,
    *,
    effort: int = DEFAULT_EFFORT,
    workers: int = 1,
    progress: ProgressCallback = no_progress,
    events: bool = False,
    name: str = NAME,
    **settings: Any,
) -> Found:
    """Find a schedule of softmax attention for a layer on a machine.

    Parameters
    ----------
    machine, settings : see `tasp_lab.prediction.predict.predict`; `seed` is also that of the changes that are tried.
    work : the layer.
    effort : the most passes that are simulated, besides those of the named schedules.
    workers : processes; the result does not depend on their number.
    progress : called with the best time so far and its gap to the bound.
    events : whether the timelines of the answers have their events, for plots.
    name : of the schedule that is found: the file that it will be in.

    An interrupt (Ctrl-C) ends the search early, with the best so far. Raises `ScheduleError` for layers of linear
    attention and hybrids, `QuantityError` for an effort below 1, and what `compare` raises.
    """
    if effort < 1:
        raise QuantityError(f"effort: {effort}, expected 1 or more simulated passes")
    if workers < 1:
        raise QuantityError(f"workers: {workers}, expected 1 or more")
    asked = question_of(machine, work, settings)
    asked = replace(asked, sampling=asked.sampling or Sampling(0, settings.get("seed", 0)))
    if asked.stack is not None:
        raise ScheduleError(f"stack {asked.stack!r}: no stack ships what a search finds, expected none; see --kernel")
    if not isinstance(asked.work, Workload) or asked.work.kind != "softmax" or asked.work.decode:
        kind = "a collective"
        if isinstance(asked.work, Workload):
            kind = "decode" if asked.work.decode else asked.work.kind
        raise ScheduleError(f"search is for layers of softmax attention, not {kind}; tasp-lab compare ranks others")
    on = prepare(asked)
    settings.setdefault("samples", 0)
    # copies of a process would lack its other threads
    ranking = compare(machine, work, jobs=workers if active_count() == 1 else 1, **settings)
    if not ranking.best.applies and on.machine.topology.world_size == 1:
        raise ScheduleError("no schedule applies")
    run = _Search(replace(with_machine(asked, on.machine), engine="auto"), on, ranking, effort, progress, name)
    with processes(workers) as executor:
        run.run(executor, workers)
    return run.found("events" if events else "times")


def _time_s(
    machine: Machine, work: Workload, options: AttentionOptions, room_bytes: int | None, trial: _Trial
) -> float:
    """The time of a pass; infinite if it cannot be built here, or needs more room for buffers."""
    program = Program(*trial.frame, forward=trial.plan, backward=trial.plan)
    try:
        schedule = build_pass(program, NAME, machine.topology, work, options, trial.backward)
        if room_bytes is not None and memory_bytes(schedule).max() > room_bytes:
            return inf
        return float(simulate(schedule, machine, "array", events=False).time_s)
    except NOT_APPLICABLE:
        return inf


class _Search:
    """The state of a search: what was simulated, and the best plan of each frame and pass."""

    def __init__(
        self, question: Question, on: PreparedMachine, ranking: Ranking, effort: int,
        progress: ProgressCallback, name: str = NAME,
    ) -> None:  # fmt: skip
        self.question, self.on, self.ranking, self.effort, self.progress = question, on, ranking, effort, progress
        self.name = name
        self.machine, self.work, self.options = on.machine_for(question.layer), question.layer, question.options
        applying = [each for each in ranking.candidates if each.applies]
        self.room_bytes = _room_bytes(applying[0]) if applying else None
        self.applying = [each for each in applying if not is_too_large(each)]
        self.named = self.applying[0] if self.applying else None
        assert question.sampling is not None, "it has the seed"
        self.random = np.random.default_rng(question.sampling.seed)
        self.times_s: dict[_Trial, float] = {}
        passes = self.options.passes
        self.backward = {"forward": (False,), "backward": (True,), "both": (False, True)}[passes]
        self.best: dict[tuple[Frame, bool], tuple[float, Plan]] = {}
        self.exhausted: set[Frame] = set()
        self.topologies: dict[int, Topology] = {}
        self.spent, self.interrupted = 0, False
        self.reported_s = inf

    # -- simulations --------------------------------------------------------------------------------------------------
    def simulate(self, trials: Sequence[_Trial], executor: Executor | None, workers: int) -> None:
        """Simulate those that are new, as far as effort is left."""
        new = [each for each in dict.fromkeys(trials) if each not in self.times_s][: self.effort - self.spent]
        function = partial(_time_s, self.machine, self.work, self.options, self.room_bytes)
        for trial, time_s in zip(new, in_order(function, new, executor, workers), strict=True):
            self.times_s[trial] = time_s
            self.spent += 1
            key = trial.frame, trial.backward
            if time_s < self.best.get(key, (inf, None))[0]:
                self.best[key] = time_s, trial.plan
        if (best_s := self.best_s) < self.reported_s:
            self.reported_s = best_s
            named_s = inf if self.named is None else float(self.named.time_s)
            gap = f", {format_speed(self.bound_s / best_s, 'the bound')}" if self.bound_s else ""
            beside = "" if named_s == inf else f"; {self.named_name} {format_time(named_s)}"
            self.progress(f"{self.spent} of {self.effort} simulated: {format_time(best_s)}{gap}{beside}")

    @property
    def named_name(self) -> str:
        return "" if self.named is None else self.named.schedule

    @property
    def bound_s(self) -> float:
        return float(self.ranking.best.bound_s) if self.ranking.best.applies else 0.0

    def frame_s(self, frame: Frame) -> float:
        """The best time of all passes of a frame."""
        return sum(self.best.get((frame, each), (inf, None))[0] for each in self.backward)

    @property
    def frames_by_time(self) -> list[Frame]:
        """The frames for which each pass has a plan, the fastest first."""
        known = dict.fromkeys(frame for frame, _ in self.best if self.frame_s(frame) < inf)
        return sorted(known, key=self.frame_s)

    @property
    def best_s(self) -> float:
        return min(map(self.frame_s, self.frames_by_time), default=inf)

    # -- the search ---------------------------------------------------------------------------------------------------
    def run(self, executor: Executor | None, workers: int) -> None:
        """Search until the effort is spent, nothing can be gained, or an interrupt."""
        named_s = inf if self.named is None else float(self.named.time_s)
        if self.bound_s and named_s <= self.bound_s * (1 + AT_BOUND):
            self.progress(f"{self.named_name} takes {format_time(named_s)}, its bound is {format_time(self.bound_s)}: "
                          "nothing to gain")  # fmt: skip
            return
        if (self.room_bytes or 0) < 0:  # the tensors of the layer alone do not fit
            return
        try:
            self._construct(executor, workers)
            while self.spent < self.effort and self.best_s > self.bound_s * (1 + AT_BOUND):
                open_frames = [each for each in self.frames_by_time if each not in self.exhausted]
                if not open_frames:  # every change is known
                    return
                self._climb(open_frames[:2], executor, workers)
        except KeyboardInterrupt:
            self.interrupted = True
            self.progress(f"interrupted after {self.spent} of {self.effort} simulated passes")

    def _construct(self, executor: Executor | None, workers: int) -> None:
        """Simulate the constructions of all frames in turns; of frames that fall behind no more are."""
        queues: dict[tuple[Frame, bool], list[_Trial]] = {}
        for frame in frames(self.machine.topology, self.work, both=len(self.backward) > 1):
            try:
                topology = self.topologies.setdefault(frame.members, between(self.machine.topology, frame.members))
            except TopologyError:  # some groups do not reach each other
                continue
            for backward in self.backward:
                plans = starts(topology, frame.shape, backward=backward, kept=frame.keep)
                queues[frame, backward] = [_Trial(frame, plan, backward) for plan in plans]
        begin = 0
        for end, behind in (
            (FIRST_PLANS, inf),
            (3 * FIRST_PLANS, BEHIND),
            (len(max(queues.values(), key=len)), BEHIND / 2),
        ):
            best_s = self.best_s
            alive = [key for key in queues if not begin or self.frame_s(key[0]) <= best_s * (1 + behind)]
            trials = [queues[key][turn] for turn in range(begin, end) for key in alive if turn < len(queues[key])]
            left = max(self.effort // 2 - self.spent, 0) if begin else self.effort
            self.simulate(trials[:left], executor, workers)
            begin = end

    def _climb(self, first: Sequence[Frame], executor: Executor | None, workers: int) -> None:
        """Change the plans of some frames by batches, each pass in turn."""
        current = {(frame, each): self.best[frame, each] for frame in first for each in self.backward}
        rounds = max(1, (self.effort - self.spent) // (2 * BATCH * len(current)))
        for _ in range(rounds):
            for key, (now_s, plan) in current.items():
                trials = self._changes(*key, plan)
                if not trials:
                    self.exhausted.add(key[0])
                self.simulate(trials, executor, workers)
                times = [(self.times_s[each], place, each.plan) for place, each in enumerate(trials)
                         if each in self.times_s]  # fmt: skip
                left = 1 - self.spent / self.effort
                if times and min(times)[0] <= now_s * (1 + WORSE * left):
                    current[key] = min(times)[0], min(times)[2]
                if current[key][0] > self.best[key][0] * (1 + 2 * WORSE * left):
                    current[key] = self.best[key]

    def _changes(self, frame: Frame, backward: bool, plan: Plan) -> list[_Trial]:
        """Up to `BATCH` changes of a plan that are new, and whose transfers have routes."""
        trials, topology = dict[_Trial, None](), self.topologies[frame.members]
        for _ in range(8 * BATCH):
            other = neighbour(plan, frame.shape, self.random, backward=backward, kept=frame.keep)
            trial = _Trial(frame, other, backward)
            if trial not in self.times_s and has_routes(
                topology, other, frame.shape, backward=backward, kept=frame.keep
            ):
                trials[trial] = None
                if len(trials) == BATCH:
                    break
        return list(trials)

    # -- the result ---------------------------------------------------------------------------------------------------
    def found(self, detail: Detail) -> Found:
        """The one of the least expected regret: the best named schedule, or one that is faster and fits as it does."""
        named = self.named
        if named is not None and detail == "events":
            named = answer(replace(self.question, schedule=named.question.schedule, options=named.options), detail,
                           on=self.on)  # fmt: skip
        question = {
            "machine": self.machine.topology.name,
            "layer": layer_text(self.work, self.options.passes),
            "pass": self.options.passes,
            "models": str(MODEL_VERSION),
        }
        choices: list[tuple[Answer, Program | None]] = []
        for frame in self.frames_by_time[:CHOICES]:
            plans = {each: self.best[frame, each][1] for each in self.backward}
            built_from = Program(*frame, forward=plans.get(False), backward=plans.get(True), question=question)
            one = self._answer(built_from, detail)
            is_faster = named is None or one.time_s < named.time_s
            if is_faster and one.fits is not False:
                choices.append((one, built_from))
        choices += [] if named is None else [(named, None)]
        if not choices:
            raise ScheduleError(f"no schedule was found in {self.spent} simulated passes, and none that has a name "
                                f"{self._why_none()}")  # fmt: skip
        others = [each for each in self.applying if each.schedule != self.named_name]
        regrets = Recommendation((*(each for each, _ in choices), *others)).expected_regrets
        regret, (best, program) = min(zip(regrets, choices, strict=False), key=itemgetter(0))
        best = replace(best, expected_regret=regret)
        if program is None:
            named, name, default = best, best.question.schedule, AttentionOptions()
            assert isinstance(name, str), "compare ranked names"
            computed = ("passes", "gradient_dtype", "result_dtype")
            options = {key: value for key, value in vars(best.options).items()
                       if key not in computed and value != getattr(default, key)}  # fmt: skip
            program = Program(known=Known(name, options), question=question)
        return Found(self.question, program, best, named, self.ranking, self.spent, self.effort, self.interrupted)

    def _why_none(self) -> str:
        """Why no named schedule can be used."""
        applying = [each for each in self.ranking.candidates if each.applies]
        if not applying:
            return f"applies: {self.ranking.best.reason}"
        least = min(applying, key=lambda each: each.memory_bytes)
        has = step_rates(self.machine).usable_bytes or 0
        return (f"fits: {least.schedule} needs {format_size_about(least.memory_bytes)}, the least of all, "
                f"and a GPU has {format_size_about(has)}")  # fmt: skip

    def _answer(self, program: Program, detail: Detail) -> Answer:
        schedules = build(program, self.name, self.machine.topology, self.work, self.options)
        found = build_question(replace(self.question, schedule=schedules), self.on).answer(detail)
        return replace(found, applying=APPLYING)


def _room_bytes(one: Answer) -> int | None:
    """The memory for buffers of a schedule; None if it is unknown, or all tensors of the layer fit on each GPU."""
    usable = step_rates(one.on).usable_bytes
    own = one.memory_bytes - one.buffer_bytes
    # gradients may be of twice the bytes
    return None if usable is None or usable > 2 * own * one.world_size else usable - own


def frames(topology: Topology, work: Workload, *, both: bool) -> list[Frame]:
    """The layouts, groups and grids to search, those with whole heads first."""
    n, found = topology.world_size, []
    layout = work.visible.balanced_layout
    nodes = topology.node_of_rank
    count = max(nodes) + 1
    alike = n % count == 0 and list(nodes) == [rank // (n // count) for rank in range(n)]
    for members in (each for each in range(1, n + (n > 1)) if n % each == 0):
        if members > 1 and (work.heads % members or (
            work.kv_head_count % members and members % work.kv_head_count)):  # fmt: skip
            continue
        groups, shapes = n // members, list[tuple[int, ...]]()
        if alike and count > 1 and (n // count) % members == 0 and n // count > members:
            shapes.append((count, n // count // members))
        elif not topology.is_complete and members == 1:
            shapes += [(each, groups // each) for each in range(2, groups) if groups % each == 0 and each**2 <= groups]
        if not shapes or not topology.is_complete:
            shapes.append((groups,))
        found += [Frame(layout if groups > 1 else "contiguous", shape, members, keep)
                  for keep in ((False, True) if both else (False,)) for shape in shapes]  # fmt: skip
    return found


def between(topology: Topology, members: int) -> Topology:
    """The topology of groups of ranks."""
    return topology if members == 1 else between_groups(topology, members)


@dataclass(frozen=True, repr=False)
class Found(Report):
    """What was found: `answer` is the prediction of it, `named` that of the best named schedule, None without one.

    `program` is a record of its decisions, `spent` the simulated passes of `effort`.
    """

    question: Question
    program: Program
    answer: Answer
    named: Answer | None
    ranking: Ranking
    spent: int
    effort: int
    interrupted: bool = False

    @property
    def time_s(self) -> float:
        """The predicted time of all passes."""
        return float(self.answer.time_s)

    @property
    def bound_s(self) -> float:
        """The least time of any schedule."""
        return float(self.answer.bound_s)

    @property
    def gain(self) -> float | None:
        """The share of the time of the best named schedule that is saved, 0 if that is the result; None without one."""
        return None if self.named is None else 1 - self.time_s / float(self.named.time_s)

    @property
    def answers(self) -> list[Answer]:
        """What was found, and the best named schedule if that is another one."""
        return [self.answer] if self.named in (None, self.answer) else [self.answer, self.named]

    @property
    def explained(self) -> list[str]:
        """The schedule in words, line by line."""
        return explained(self.program)

    def save(self, path: str | Path) -> None:
        """Write the decisions to a file, which is a name of a schedule in every command."""
        save(self.program, Path(path))

    def to_dict(self) -> dict[str, object]:
        return {
            "found": fields_of(self.answer, "ranking"),
            "best_named": None if self.named is None else fields_of(self.named, "ranking"),
            "bound_s": self.bound_s,
            "gain": self.gain,
            "gap_to_bound": self.time_s / self.bound_s - 1 if self.bound_s else None,
            "simulated_passes": self.spent,
            "effort": self.effort,
            "interrupted": self.interrupted,
            "explained": self.explained,
            "provenance": provenance_of(self.question, [], self.answer.on, self.answers, rings=False,
                                        more={"effort": self.effort}).to_dict(),
        }  # fmt: skip

    def records(self) -> list[dict[str, object]]:
        return [flat(fields_of(each, "ranking")) for each in self.answers]

    def parts(self) -> list[Part]:
        return [self._verdict(), *self.explained, self._table()]

    def _verdict(self) -> str:
        bound = f"the bound of {format_time(self.bound_s)}"
        gap = format_speed(self.bound_s / self.time_s, bound) if self.bound_s else "no bound is known"
        effort = f"{self.spent} of {self.effort} passes simulated" + (", interrupted" if self.interrupted else "")
        if self.named is None:
            return f"found: {format_time(self.time_s)}, where no named schedule applies and fits; {gap} ({effort})"
        if self.named is self.answer:
            return f"found nothing better than {self.answer.schedule}: {format_time(self.time_s)}, {gap} ({effort})"
        regret = f"expected regret {format_regret(self.answer.expected_regret or 0)}"
        return (f"found: {format_time(self.time_s)}, {self.gain:.1%} less than {self.named.schedule} "
                f"({format_time(float(self.named.time_s))}), {regret}; {gap} ({effort})")  # fmt: skip

    def _table(self) -> Part:
        return table_of(title_of(self.answer, self.answer.topology), "ranking", self.answers, lambda _: self.named)
