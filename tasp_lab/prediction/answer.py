"""Answers: what the simulator predicts for a question.

    answer(Question("h100-8", "tasp", Workload(8192, mask="causal"), AttentionOptions("both"))).time_s

There is one evaluator. `predict`, `compare`, tuning, studies and their finders build the schedules of a question around
each of the rings that may be fastest (`build`), simulate them (`Built.answer`) and read the numbers of an `Answer`.
Only the time is simulated at once. What needs further simulations is computed when it is first read: the time without
compute, the time without contention, the interval, and what the critical path was spent on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, reduce
from itertools import product
from operator import add
from threading import Thread
from typing import TYPE_CHECKING, Literal

import numpy as np

from sim.bounds.collectives import collective_bound_s
from sim.bounds.least import least_s
from sim.bounds.schedules import busiest_link_bytes, least_of_schedule_s, link_bytes
from sim.host import busy_s
from sim.simulate import Engine, engine_of, simulate
from tasp_lab.core.arrays import FloatArray, IntArray
from tasp_lab.core.choices import Dataflow, Pass
from tasp_lab.core.errors import (
    OverrideError,
    ProfileError,
    QuantityError,
    ScheduleError,
    TaspLabError,
    TopologyError,
    WorkloadError,
)
from tasp_lab.core.lazy import from_above
from tasp_lab.core.process import spare_cores
from tasp_lab.core.progress import ProgressCallback, ShareCallback, no_progress, no_share
from tasp_lab.core.tables import brief, to_html
from tasp_lab.core.units import Number, format_time
from tasp_lab.machines.compute import MERGE, PARTS
from tasp_lab.machines.contention import NONE
from tasp_lab.machines.machine import INSTANT, ComputeRate, Machine
from tasp_lab.machines.stack import load_stack
from tasp_lab.prediction.interval import Interval
from tasp_lab.prediction.kept import build_once, keep_steps
from tasp_lab.prediction.paired import Rival, is_measured, paired_errors, setting_of
from tasp_lab.prediction.provenance import sha256
from tasp_lab.prediction.question import PreparedMachine, Question, prepared
from tasp_lab.prediction.rank import Bar, Outcome, rank
from tasp_lab.prediction.uncertainty import Uncertainty, residual_on
from tasp_lab.rings.rings import Decomposition
from tasp_lab.schedule.schedule import OncePerSchedule, Schedule
from tasp_lab.schedules.attention.options import DEFAULT_OPTIONS, OPTIONS, AttentionOptions
from tasp_lab.schedules.build import build_schedules, check_schedules
from tasp_lab.schedules.collectives.kinds import CollectiveKind, busbw_bytes_per_s
from tasp_lab.schedules.registry import (
    NOT_APPLICABLE,
    check_names,
    is_own,
    kind_of,
    options_of,
    reason_of,
    uses_rings,
)
from tasp_lab.timeline.events import Event, Timeline
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Work, Workload

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Detail = Literal["times", "events", "bottleneck"]
"""How much a simulation records: ``times`` alone; ``events``, the start and end of every transfer and kernel call; or
``bottleneck``, also what each event waited for and was limited by."""

Status = Literal["ok", "settled", "does not apply", "failed"]
"""``ok``: simulated. ``settled``: a bound decided, there is no time. ``does not apply``: the machine, the layer or the
options contradict the schedule, so there is nothing to predict. ``failed``: something went wrong. There is a reason for
the last two."""

PASS_NAMES: dict[Pass, str] = {"forward": "forward", "backward": "backward", "both": "forward and backward"}

DOES_NOT_APPLY = (*NOT_APPLICABLE, OverrideError, ProfileError, QuantityError, TopologyError, WorkloadError)
"""Raised while machine, layer and schedules are made: they contradict each other, so there is nothing to predict."""

MANY_RANKS = 256
"""Building and proving a schedule, and its bound, may take more than a few seconds for so many ranks or more."""

MANY_TRANSFERS = {"simpy": 10_000, "array": 200_000}
"""An engine may take more than a few seconds for more transfers than this, which is reported as progress."""

MANY_EVENTS = 20_000
"""A timeline of more events is kept on request only."""

MANY_EXPLAINED = 5_000
"""With more transfers than this, `Answer.bottleneck` is just ``compute`` or ``communication``."""


@dataclass(frozen=True, eq=False, repr=False)
class PassAnswer:
    """One pass of a layer, or a collective, on one machine. Times are in seconds.

    Parameters
    ----------
    machine, schedule, work, options : what was simulated.
    engine : simulates the schedule, also where other numbers need it again.
    detail : what the timeline records.
    uncertainty : of the interval; None without one. `transfers` are those of the longest pass, by which all passes have
        equally many samples, so that they can be added sample by sample.
    collective : what a schedule of a collective does.
    bound_machine : the machine of the lower bound, if that is another one: of a fabric it is the one that it emulates.
    progress : called with the share of a simulation that is done.
    """

    machine: Machine
    schedule: Schedule
    work: Work
    options: AttentionOptions
    engine: Engine = "auto"
    detail: Detail = "times"
    uncertainty: Uncertainty | None = None
    transfers: int = 0
    collective: CollectiveKind | None = None
    bound_machine: Machine | None = None
    progress: ShareCallback = no_share

    @cached_property
    def timeline(self) -> Timeline:
        """What happened; with the detail ``times`` only its total time."""
        return self._simulated()

    def _simulated(self) -> Timeline:
        timeline = simulate(self.schedule, self.machine, self.engine, explain=self.detail == "bottleneck",
                            events=self.detail != "times", progress=self.progress)  # fmt: skip
        if not isinstance(self.work, Workload):
            return timeline
        return replace(timeline, schedule=label(self.schedule, self.options))

    @property
    def time_s(self) -> Number:
        """When the last transfer or kernel call ends."""
        return self.timeline.time_s

    def on(self, machine: Machine) -> PassAnswer:
        """The answer for this schedule on another machine, simulated for its time only."""
        return PassAnswer(machine, self.schedule, self.work, self.options, self.engine, progress=self.progress)

    @property
    def passing(self) -> Pass:
        """The pass of the layer."""
        return pass_of(self.schedule)

    @cached_property
    def interval(self) -> Interval | None:
        """The interval of the time on a real machine; None where none was asked for."""
        time_s = float(self.time_s)
        if self.uncertainty is None or not time_s > 0:
            return None
        if not self.uncertainty.sampling.samples:
            return Interval(time_s, np.zeros(0), residual_on(self.uncertainty.machine, self.schedule, time_s))
        return self.uncertainty.interval(self.schedule, time_s, self.transfers)

    @cached_property
    def busy_s(self) -> list[Number]:
        """The time of all kernel calls of each rank."""
        return list(busy_s(self.schedule, self.machine.compute, self.machine.rank_speeds))

    @property
    def compute_s(self) -> Number:
        """The compute time of the busiest rank."""
        return max(self.busy_s)

    @cached_property
    def communication_s(self) -> Number:
        """The time of the same schedule with instant compute."""
        return self.on(replace(self.machine, compute=INSTANT)).time_s

    @cached_property
    def contention_s(self) -> Number | None:
        """By how much the time would be less without contention; None if messages slow nothing."""
        if not self.machine.contention.slows:
            return None
        return self.time_s - self.on(replace(self.machine, contention=NONE)).time_s

    @cached_property
    def bound_s(self) -> Number:
        """The lower bound of the time of all schedules; of a layer of those with the same start."""
        machine = self.bound_machine or self.machine
        if isinstance(self.work, Workload):
            return least_s(self.schedule, machine)
        kind = self.collective or kind_of([self.schedule.name])
        in_switch = getattr(machine.comm_library, "nvls", None) is not None
        return collective_bound_s(kind, machine.topology, self.work, in_switch)

    @cached_property
    def bytes_sent(self) -> IntArray:
        """The bytes that each rank sends, an int array (ranks,)."""
        return self.schedule.bytes_by_rank()

    @cached_property
    def link_bytes(self) -> FloatArray:
        """The bytes on each constraint of the topology, a float array (constraints,)."""
        return link_bytes(self.schedule, self.machine.topology)

    @cached_property
    def buffer_bytes(self) -> int:
        """The largest memory of a rank for blocks of others and sums that are sent."""
        from tasp_lab.schedule.buffer_layout import memory_bytes

        return int(memory_bytes(self.schedule).max())

    @cached_property
    def spent(self) -> Mapping[str, float]:
        """The seconds of the critical path by what they were spent on."""
        from tasp_lab.timeline.critical_path import time_by_kind

        events = self.timeline.events
        explained = bool(events) and any(event.spent for event in events)
        timeline = self.timeline if explained else simulate(self.schedule, self.machine, explain=True)
        return dict(time_by_kind(timeline, self.machine.topology))

    @property
    def rate(self) -> ComputeRate:
        """The compute rate of a rank in this pass."""
        assert isinstance(self.work, Workload), "collectives do not compute"
        assert self.passing != "both", "a schedule is of one pass"
        return self.machine.rate_of(self.work, self.passing)

    @property
    def compute_flops_per_s(self) -> Number | None:
        """The FLOP/s of the busiest rank; the rate itself where it is the same for all calls of equal ranks."""
        rate, busy_s = self.rate, self.compute_s
        if not busy_s or not (rate.kernel or self.machine.rank_speeds):
            return rate.flops_per_s
        return flops_by_rank(self.schedule)[self.busy_s.index(busy_s)] / busy_s


@dataclass(frozen=True, eq=False, repr=False)
class Answer:
    """The answer to a question: its passes, or why there are none. Times are in seconds, and sums over the passes.

    Parameters
    ----------
    question : what was asked.
    machine : as it was simulated: with changed links and compute rates; None where it does not exist.
    passes : in the order of execution; later layers run between a forward and a backward pass.
    chosen : the options with which they are fastest; None where there are none, and of schedules given as objects.
    status, error : whether there is an answer, and if not, why.
    least_s : of a settled answer: the bound. Its passes are simulated as soon as their times are read.
    search_complete : whether a larger search budget would give the same rings; None where no rings were used.
    applying : the names of the options that apply to the schedule; none of one that was given as an object.
    untuned_s : the time with the options as they were given, where they were tuned.
    first, expected_regret : the fastest answer of the ranking that this one is part of, and how much longer than the
        fastest one this schedule is expected to take, as a share (`tasp_lab.prediction.recommend`).
    measured_s, measured_prediction_s : the median time on a fabric, and what was predicted for it there; None unless it
        was run. `not_comparable` is why these two cannot be compared, if so.
    """

    question: Question
    machine: Machine | None
    passes: tuple[PassAnswer, ...] = ()
    chosen: AttentionOptions | None = None
    status: Status = "ok"
    error: TaspLabError | None = None
    least_s: float | None = None
    search_complete: bool | None = None
    applying: tuple[str, ...] = ()
    untuned_s: float | None = None
    first: Answer | None = None
    expected_regret: float | None = None
    is_tied: bool = False
    measured_s: float | None = None
    measured_prediction_s: float | None = None
    not_comparable: str | None = None

    def __repr__(self) -> str:
        if not self.passes:
            return brief(self, self.schedule, f"{self.status}: {self.reason}")
        passing = f" {self.passing}" if self.computes else ""
        return brief(self, f"{self.schedule}{passing} on {self.topology}", format_time(self.time_s))

    def _repr_html_(self) -> str:
        """The row of its table, in a notebook."""
        if not self.passes:
            return to_html([repr(self)])
        return to_html([from_above("tabulate an answer")(self)])

    def plot(self) -> Figure:
        """A picture of its timeline, both passes one after the other, see `tasp_lab.plots.timelines`.

        Raises `OutputError` for one whose events were not kept, and `ScheduleError` for a schedule that does not apply.
        """
        if self.error is not None:
            raise self.error
        return self.timeline.plot()

    # What was asked.

    @property
    def schedule(self) -> str:
        """The name of the schedule."""
        return self.question.name

    @property
    def options(self) -> AttentionOptions:
        """The options that were asked for, with the chosen ones in place of those that were left open."""
        return self.chosen or self.question.options

    @property
    def had_choice(self) -> bool:
        """Whether it may be the fastest of several: by options that were left open, or by rings."""
        asked = self.question.options
        free = [name for name in self.applying if getattr(asked, name) == getattr(DEFAULT_OPTIONS, name)]
        return self.search_complete is not None or any(OPTIONS[name].open for name in free)

    @property
    def computes(self) -> bool:
        """Whether ranks compute, so that a rate and kernels matter: in a layer, not in a collective."""
        return isinstance(self.question.work, Workload)

    @property
    def layer(self) -> Workload:
        """The layer, with its overrides."""
        work = self.passes[0].work if self.passes else self.question.work
        assert isinstance(work, Workload), "an answer about a layer"
        return work

    @property
    def shard_bytes(self) -> int:
        """The bytes that a rank has of a collective."""
        assert not isinstance(self.question.work, Workload), "an answer about a collective"
        return self.question.work

    @property
    def collective(self) -> CollectiveKind:
        """What the schedule of a collective does."""
        return self.passes[0].collective or kind_of([self.schedule])

    @property
    def topology(self) -> str:
        """The name of the topology."""
        return self._topology.name

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._topology.world_size

    @property
    def _topology(self) -> Topology:
        assert self.machine is not None, "the machine exists"
        return self.machine.topology

    @property
    def applies(self) -> bool:
        """Whether the schedule applies to the work and the machine, so that there are numbers."""
        return bool(self.passes)

    @property
    def reason(self) -> str:
        """Why there is no answer, on one line; empty where there is one."""
        return "" if self.error is None else reason_of(self.error, self.schedule)

    # Which passes it covers.

    @property
    def each_pass(self) -> tuple[Answer, ...]:
        """The answer for each pass alone, and then this one, if there are several passes."""
        if len(self.passes) < 2:
            return (self,)
        return (*(replace(self, passes=(each,)) for each in self.passes), self)

    @property
    def passing(self) -> Pass:
        """The pass of the layer that it covers."""
        return "both" if len(self.passes) > 1 else self.passes[0].passing

    @property
    def is_all(self) -> bool:
        """Whether it covers all requested passes, not one of two."""
        return not self.computes or self.passing == self.options.passes

    @property
    def is_sum(self) -> bool:
        """Whether it is the sum of two passes, one after the other."""
        return len(self.passes) > 1

    @property
    def compared_by(self) -> str:
        """A key: speed-ups are over the first prediction with the same key."""
        return self.passing if self.computes else ""

    # Times.

    @cached_property
    def time_s(self) -> Number:
        """When the last transfer or kernel call ends; infinite where the schedule does not apply."""
        return sum(each.time_s for each in self.passes) if self.passes else float("inf")

    @cached_property
    def interval(self) -> Interval | None:
        """The time of a real machine in 90 of 100 cases; None where it was not asked for."""
        known = [each.interval for each in self.passes if each.interval is not None]
        return reduce(add, known) if known and len(known) == len(self.passes) else None

    @property
    def time_low_s(self) -> float | None:
        """The 5 % point of the time on a real machine; None without an interval."""
        return None if self.interval is None else self.interval.low_s

    @property
    def time_high_s(self) -> float | None:
        """The 95 % point."""
        return None if self.interval is None else self.interval.high_s

    @property
    def bound_s(self) -> Number:
        """The lower bound of the time of all schedules; of a layer of those with the same start."""
        return sum(each.bound_s for each in self.passes)

    @property
    def compute_s(self) -> Number:
        """The compute time of the busiest rank."""
        return sum(each.compute_s for each in self.passes)

    @property
    def communication_s(self) -> Number:
        """The time of the same schedule with instant compute."""
        return sum(each.communication_s for each in self.passes)

    @property
    def exposed_s(self) -> Number:
        """What messages add to the compute time of the busiest rank."""
        return self.time_s - self.compute_s

    @property
    def contention_s(self) -> Number | None:
        """By how much the time would be less without contention; None if messages slow nothing."""
        lost = [each.contention_s for each in self.passes]
        return sum(each for each in lost if each is not None) if lost[-1] is not None else None

    @property
    def ccr(self) -> float | None:
        """Compute time over communication time; None when there is no communication."""
        return float(self.compute_s / self.communication_s) if self.communication_s else None

    @property
    def first_is_faster(self) -> float | None:
        """The probability that the first schedule of a ranking is faster, by the errors that they do not share.

        None of the first itself.
        """
        if self.first is None:
            return None
        return paired_errors().first_is_faster(self.first.rival, self.rival, setting_of(self.passes[0].machine))

    @property
    def rank_s(self) -> float:
        """What answers are ranked by: the time, or the bound of a settled one."""
        return float(self.time_s) if self.least_s is None else self.least_s

    @property
    def rival(self) -> Rival:
        """What comparisons with other answers need."""
        exposed_s = self.rank_s - float(self.compute_s)
        return Rival.of(self.schedule, max(self.rank_s, 1e-30), exposed_s, self.steps, self.is_measured)

    @property
    def is_measured(self) -> bool:
        """Whether layers with the same kernel calls and host were measured; collectives are all alike."""
        on = self.passes[0]
        return not isinstance(on.work, Workload) or is_measured(self.schedule, on.machine, self.passing)

    @property
    def steps(self) -> int:
        """The steps of all passes."""
        return sum(len(each.schedule.steps) for each in self.passes)

    # What it takes.

    @property
    def busbw_bytes_per_s(self) -> float:
        """Bus bandwidth of a collective as nccl-tests defines it."""
        return busbw_bytes_per_s(self.world_size, self.shard_bytes, self.time_s, self.collective)

    @property
    def bytes_sent(self) -> int:
        """The bytes that all ranks send."""
        return sum(int(each.bytes_sent.sum()) for each in self.passes)

    @property
    def bytes_per_rank(self) -> int:
        """The most bytes that a rank sends."""
        return int(reduce(add, (each.bytes_sent for each in self.passes)).max())

    @property
    def link_bytes(self) -> int:
        """The bytes on the link that all transfers together occupy longest."""
        return busiest_link_bytes((each.link_bytes for each in self.passes), self._topology)

    @property
    def buffer_bytes(self) -> int:
        """The largest memory of a rank for blocks of others and sums that are sent; the larger one of two passes."""
        return max(each.buffer_bytes for each in self.passes)

    @property
    def memory_bytes(self) -> int:
        """The memory of the rank with the most positions: tensors of the layer, their gradients, and buffers."""
        layer, positions = self.layer, -(-self.layer.sequence // self.world_size)
        tensors = 2 * layer.query_bytes_per_position + layer.kv_bytes_per_position  # queries, results, keys and values
        sums = 4 * layer.batch * layer.heads  # log-sum-exp in float32
        copies = 1 if self.options.passes == "forward" else 2  # gradients of all four
        return positions * (copies * tensors + sums) + self.buffer_bytes

    @property
    def fits(self) -> bool | None:
        """Whether a GPU has `memory_bytes`; None where its memory is unknown."""
        from tasp_lab.prediction.training_step.rates import step_rates  # which a prediction of times does not need

        return step_rates(self.passes[0].machine).holds(self.memory_bytes)

    @property
    def relayout_bytes(self) -> int | None:
        """Those of `bytes_sent` that re-layouts of a hybrid send; None of a layer."""
        if not self.computes or self.layer.kind != "hybrid":
            return None
        from tasp_lab.schedules.hybrid.stack import relayout_bytes

        return sum(relayout_bytes(each.schedule) for each in self.passes)

    @property
    def flops(self) -> int:
        """The FLOPs of all ranks."""
        return sum(sum(flops_by_rank(each.schedule)) for each in self.passes)

    @property
    def rates(self) -> dict[str, ComputeRate]:
        """The compute rate of each pass; with a kernel the highest one."""
        return {each.passing: each.rate for each in self.passes} if self.computes else {}

    @property
    def compute_flops_per_s(self) -> Number | None:
        """The rate of a rank, with a kernel what its busiest rank reaches; None when computing takes no time.

        Of two passes the rate at which they take as long together.
        """
        rates = [each.compute_flops_per_s for each in self.passes]
        if len(set(rates)) == 1 or None in rates:
            return rates[0]
        flops = [sum(flops_by_rank(each.schedule)) for each in self.passes]
        return sum(flops) / sum(count / rate for count, rate in zip(flops, rates, strict=True) if rate is not None)

    @property
    def dataflow(self) -> Dataflow | None:
        """What circulates in the backward pass of softmax attention, if one side does."""
        from tasp_lab.schedules.attention.backward import dataflow_of
        from tasp_lab.schedules.attention.task import AttentionTask

        last = self.passes[-1].schedule
        return dataflow_of(last) if isinstance(last.task, AttentionTask) and last.task.is_backward else None

    @property
    def gradient_dtype(self) -> str | None:
        """The dtype of gradients that are sent, None forward; of a hybrid that of softmax layers, if there are any."""
        from tasp_lab.schedules.hybrid.stack import gradient_dtype_of

        return gradient_dtype_of(self.passes[-1].schedule)

    @property
    def bottleneck(self) -> str:
        """``compute`` where that takes at least half of the time, else what the critical path spends most on.

        Of very long schedules just ``communication``.
        """
        if self.compute_s >= self.time_s / 2:
            return "compute"
        if sum(each.schedule.transfers for each in self.passes) > MANY_EXPLAINED:
            return "communication"
        spent: dict[str, float] = {}
        for part, seconds in (part for each in self.passes for part in each.spent.items()):
            kind = "compute" if part in PARTS.values() or part == MERGE else part
            spent[kind] = spent.get(kind, 0.0) + seconds
        return max(spent, key=lambda kind: spent[kind], default="nothing")

    @property
    def timeline(self) -> Timeline:
        """What happened; of two passes one after the other."""
        if not self.is_sum:
            return self.passes[0].timeline
        both = f"{self.schedule} {PASS_NAMES['both']}"
        return reduce(partial(one_after_the_other, schedule=both), (each.timeline for each in self.passes))


def together(forward: Answer, backward: Answer) -> Answer:
    """Both passes of a schedule, one after the other: later layers run between them."""
    return replace(forward, passes=(*forward.passes, *backward.passes))


# Simulations.


def answer_schedule(
    machine: Machine,
    schedule: Schedule,
    work: Work,
    options: AttentionOptions = DEFAULT_OPTIONS,
    engine: Engine = "auto",
    detail: Detail = "events",
    *,
    bound_machine: Machine | None = None,
) -> Answer:
    """Simulate a schedule of this work that was built with these `options`, on a machine as it is.

    `bound_machine` is that of the lower bound, if it is another one.
    """
    question = Question(machine, schedule, work, options, sampling=None, engine=engine)
    found = PassAnswer(machine, schedule, work, options, engine, detail, bound_machine=bound_machine)
    _ = found.timeline  # errors are raised here
    return Answer(question, machine, (found,))


# Questions.


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
        for each in self.passes:
            if each not in self.bounds_s:
                self.bounds_s[each] = least_of_schedule_s(each, self.machine)
        return sum(self.bounds_s[each] for each in self.passes)


@dataclass(frozen=True, eq=False)
class Built:
    """The schedules of a question: around each of the rings that may be fastest, and with each value of the options
    that it leaves open. First that with the least bound.

    `collective` is what a schedule of a collective does.
    """

    question: Question
    on: PreparedMachine
    work: Work
    candidates: tuple[Candidate, ...]
    collective: CollectiveKind | None = None

    @cached_property
    def digest(self) -> str:
        """The hash of all schedules, by what they are and not by what built them."""
        return sha256([[each.digest for each in found.passes] for found in self.candidates])

    @cached_property
    def least_s(self) -> float:
        """A time that no candidate falls below."""
        return min(each.least_s for each in self.candidates)

    def answer(self, detail: Detail | None = "times", progress: ProgressCallback = no_progress) -> Answer:
        """The answer of the fastest candidate; one whose bound is slower is not simulated.

        Without a `detail` events are kept of schedules with few.
        """
        timelines: dict[Schedule, Timeline] = {}

        def simulate(chosen: Sequence[Candidate], _: Bar) -> Iterator[Outcome[Answer]]:
            for each in chosen:
                found = self._simulated(each, detail, progress, timelines)
                yield Outcome(found, float(found.time_s))

        # below 1: what is as fast at best is not simulated
        ranked = rank(self.candidates, simulate, margin=1 - 1e-12, bound=lambda each: each.least_s, size=1)
        return min(ranked.answers, key=lambda found: found.time_s)

    def on_changed(self, change: Callable[[Machine], Machine]) -> Built:
        """The same schedules on a changed machine, of which others may be the fastest there."""
        machine, bounds_s = change(self.candidates[0].machine), dict[Schedule, float]()
        changed = (replace(each, machine=machine, bounds_s=bounds_s) for each in self.candidates)
        return replace(self, candidates=_by_bound(changed))

    def settled(self) -> Answer:
        """The answer that it takes at least `least_s`, of the candidate with that bound; nothing is simulated."""
        found = self._passes(min(self.candidates, key=lambda each: each.least_s), "times", no_progress)
        return replace(found, status="settled", least_s=self.least_s)

    def time_s(self, times_s: dict[str, float]) -> float:
        """The time alone; `times_s` has those of passes by digest, for passes that several questions have in common."""

        def pass_s(schedule: Schedule, machine: Machine) -> float:
            if schedule.digest not in times_s:
                found = PassAnswer(machine, schedule, self.work, self.question.options, self.question.engine)
                times_s[schedule.digest] = float(found.time_s)
            return times_s[schedule.digest]

        return min(sum(pass_s(each, found.machine) for each in found.passes) for found in self.candidates)

    def _simulated(
        self,
        candidate: Candidate,
        detail: Detail | None,
        progress: ProgressCallback,
        timelines: dict[Schedule, Timeline],
    ) -> Answer:
        """The answer of a candidate; `timelines` are those of passes that it may share with others."""
        found = self._passes(candidate, detail, progress)
        for each in found.passes:
            if each.schedule in timelines:
                each.__dict__["timeline"] = timelines[each.schedule]
        long = [each for each in found.passes if each.progress is not no_share and each.schedule not in timelines]
        for each in long:
            what = label(each.schedule, candidate.options)
            progress(f"simulating {each.schedule.transfers:,} transfers of {what}; this may take a while")
        _simulate_at_once(long)
        timelines |= {each.schedule: each.timeline for each in found.passes}
        return found

    def _passes(self, candidate: Candidate, detail: Detail | None, progress: ProgressCallback) -> Answer:
        most = max(each.transfers for each in candidate.passes)
        passes = []
        for schedule in candidate.passes:
            few = schedule.transfers <= MANY_EVENTS
            recorded = detail or ("events" if few else "times")
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
    threads = [Thread(target=simulate_one, args=(each,), daemon=True) for each in passes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _report_simulated(progress: ProgressCallback, what: str, share: float) -> None:
    progress(f"{what}: {share:.0%} simulated")


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
        for each, passing in zip(objects, asked, strict=True):
            kind = check_schedules([each], work, passing)
            each.check_routes(machine.topology)
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
    return Built(question, on, work, _by_bound(candidates), None if isinstance(work, Workload) else kind_of([schedule]))


def _by_bound(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """That with the least bound first; one alone needs no bound."""
    found = tuple(candidates)
    return tuple(sorted(found, key=lambda each: each.least_s)) if len(found) > 1 else found


def _ways(question: Question, machine: Machine) -> list[AttentionOptions]:
    """The options of a question: as its stack runs the schedule, else with each value of those that are left open."""
    if not isinstance(question.work, Workload):
        return [question.options]
    names, stated = options_of(question.name), {}
    if "groups" in names and _are_ranks_alike(machine.topology):
        names = tuple(each for each in names if each != "groups")
    if machine.stack:
        stated = {
            name: value for name, value in load_stack(machine.stack).options(question.name).items() if name in names
        }
    return question.options.with_defaults(stated).opened(names)


def _are_ranks_alike(topology: Topology) -> bool:
    """Whether all groups of ranks are as good: in one node, whose links are equal."""
    one_node = topology.is_complete and len(set(topology.node_of_rank)) == 1
    return one_node and (topology.table.is_mesh or np.ptp(topology.link_bandwidths_bytes_per_s) == 0)


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
    >>> [found.status for found in answers(Question(f"full-mesh:{ranks}", "ulysses", layer) for ranks in (2, 3, 4))]
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


# Parts of answers.


def pass_of(schedule: Schedule) -> Pass:
    """The pass of a layer that a schedule computes."""
    return "forward" if schedule.task is None else schedule.task.passing


def label(schedule: Schedule, options: AttentionOptions) -> str:
    """The name of a schedule, with its pass unless only a forward pass is requested."""
    return schedule.name if options.passes == "forward" else f"{schedule.name} {PASS_NAMES[pass_of(schedule)]}"


def one_after_the_other(first: Timeline, second: Timeline, schedule: str) -> Timeline:
    """Two timelines as one, with the given name of a schedule. The steps of the second follow those of the first.

    >>> from tasp_lab.timeline.events import SEND
    >>> one = Timeline("predicted", "a", "pair", 2, (Event(0, 0, 0, SEND, 1, 0, 8, 1.0, 3.0, "0->1", ""),))
    >>> [(event.step, event.start_s, event.end_s) for event in one_after_the_other(one, one, "twice").events]
    [(0, 1.0, 3.0), (1, 4.0, 6.0)]
    """
    steps = 1 + max((event.step for event in first.events), default=-1)
    time_s = first.time_s  # a maximum over all events

    def later(event: Event) -> Event:
        return event._replace(step=event.step + steps, start_s=event.start_s + time_s, end_s=event.end_s + time_s)

    total_s = None if first.total_s is None and second.total_s is None else time_s + second.time_s
    return replace(first, schedule=schedule, events=first.events + tuple(map(later, second.events)), total_s=total_s)


@OncePerSchedule
def flops_by_rank(schedule: Schedule) -> list[int]:
    """The FLOPs of each rank."""
    flops: list[int] = schedule.flops().sum(axis=0).tolist()
    return flops
