"""Answers: what the simulator predicts for a question.

    found = answer(Question("h100-8", "tasp", Workload(8192, mask="causal"), AttentionOptions("both")))
    found.time_s, found.interval, found.bottleneck

`tasp_lab.prediction.evaluate` makes them. Only the time is simulated at once. What needs further simulations is
computed when it is first read: the time without compute, the time without contention, the interval, and what the
critical path was spent on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce
from operator import add
from typing import TYPE_CHECKING, Literal

from sim.bounds.schedules import busiest_link_bytes
from sim.simulate import Engine
from tasp_lab.core.choices import Dataflow, Pass
from tasp_lab.core.errors import OverrideError, ProfileError, QuantityError, TaspLabError, TopologyError, WorkloadError
from tasp_lab.core.lazy import from_above
from tasp_lab.core.tables import brief, to_html
from tasp_lab.core.units import Number, format_time
from tasp_lab.machines.compute import MERGE, PARTS
from tasp_lab.machines.machine import ComputeRate, Machine
from tasp_lab.prediction.interval import Interval
from tasp_lab.prediction.paired import Rival, is_measured, paired_errors, setting_of
from tasp_lab.prediction.passes import PASS_NAMES, Detail, PassAnswer, flops_by_rank
from tasp_lab.prediction.question import Question
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import DEFAULT_OPTIONS, OPTIONS, AttentionOptions
from tasp_lab.schedules.collectives.kinds import CollectiveKind, busbw_bytes_per_s
from tasp_lab.schedules.registry import NOT_APPLICABLE, kind_of, reason_of
from tasp_lab.timeline.events import Event, Timeline
from tasp_lab.workload.layer import Work, Workload

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Status = Literal["ok", "settled", "does not apply", "failed"]
"""``ok``: simulated. ``settled``: a bound decided, there is no time. ``does not apply``: the machine, the layer or the
options contradict the schedule, so there is nothing to predict. ``failed``: something went wrong. There is a reason for
the last two."""

DOES_NOT_APPLY = (*NOT_APPLICABLE, OverrideError, ProfileError, QuantityError, TopologyError, WorkloadError)
"""Raised while machine, layer and schedules are made: they contradict each other, so there is nothing to predict."""

MANY_EXPLAINED = 5_000
"""With more transfers than this, `Answer.bottleneck` is just ``compute`` or ``communication``."""


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
        return to_html([from_above("tabulate an answer")(self) if self.passes else repr(self)])

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
    def on(self) -> Machine:
        """The machine as its passes ran on it: with the kernel and the host model of the schedule."""
        machine = self.passes[0].machine if self.passes else self.machine
        assert machine is not None, "the machine exists"
        return machine

    @property
    def topology(self) -> str:
        """The name of the topology."""
        return self.on.topology.name

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.on.topology.world_size

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
        return (*(replace(self, passes=(one,)) for one in self.passes), self) if self.is_sum else (self,)

    @property
    def passing(self) -> Pass:
        """The pass of the layer that it covers."""
        return "both" if self.is_sum else self.passes[0].passing

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
        return sum(one.time_s for one in self.passes) if self.passes else float("inf")

    @cached_property
    def interval(self) -> Interval | None:
        """The time of a real machine in 90 of 100 cases; None where it was not asked for."""
        known = [one.interval for one in self.passes if one.interval is not None]
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
        return sum(one.bound_s for one in self.passes)

    @property
    def rates_within(self) -> float:
        """By what share of a capacity rates of messages may miss their fair ones (`sim.bounds.schedules`)."""
        return max(one.rates_within for one in self.passes)

    @property
    def compute_s(self) -> Number:
        """The compute time of the busiest rank of each pass."""
        return sum(one.compute_s for one in self.passes)

    @property
    def communication_s(self) -> Number:
        """The time of the same schedule with instant compute."""
        return sum(one.communication_s for one in self.passes)

    @property
    def exposed_s(self) -> Number:
        """What messages add to the compute time of the busiest rank."""
        return self.time_s - self.compute_s

    @property
    def contention_s(self) -> Number | None:
        """By how much the time would be less without contention; None if messages slow nothing."""
        lost = [one.contention_s for one in self.passes]
        return sum(each for each in lost if each is not None) if lost[-1] is not None else None

    @property
    def ccr(self) -> float | None:
        """Compute time over communication time; None when there is no communication."""
        return float(self.compute_s / self.communication_s) if self.communication_s else None

    # Beside other answers.

    @property
    def first_is_faster(self) -> float | None:
        """The probability that the first schedule of a ranking is faster, by the errors that they do not share.

        None of the first itself.
        """
        if self.first is None:
            return None
        return paired_errors().first_is_faster(self.first.rival, self.rival, setting_of(self.on))

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
        return not self.computes or is_measured(self.schedule, self.on, self.passing)

    # What it takes.

    @property
    def steps(self) -> int:
        """The steps of all passes."""
        return sum(len(one.schedule.steps) for one in self.passes)

    @property
    def busbw_bytes_per_s(self) -> float:
        """Bus bandwidth of a collective as nccl-tests defines it."""
        return busbw_bytes_per_s(self.world_size, self.shard_bytes, self.time_s, self.collective)

    @property
    def bytes_sent(self) -> int:
        """The bytes that all ranks send."""
        return sum(int(one.bytes_sent.sum()) for one in self.passes)

    @property
    def bytes_per_rank(self) -> int:
        """The most bytes that a rank sends."""
        return int(reduce(add, (one.bytes_sent for one in self.passes)).max())

    @property
    def link_bytes(self) -> int:
        """The bytes on the link that all transfers together occupy longest."""
        return busiest_link_bytes((one.link_bytes for one in self.passes), self.on.topology)

    @property
    def buffer_bytes(self) -> int:
        """The largest memory of a rank for blocks of others and sums that are sent; the larger one of two passes."""
        return max(one.buffer_bytes for one in self.passes)

    @property
    def memory_bytes(self) -> int:
        """The memory of the rank with the most positions: tensors of the layer, their gradients, and buffers."""
        if self.layer.decode:
            cache, copied = self._cache()
            own = self.layer.query_bytes_per_position + self.layer.output_bytes_per_position
            return cache - copied + -(-own // self.world_size) + self.buffer_bytes
        layer, positions = self.layer, -(-self.layer.sequence // self.world_size)
        tensors = layer.query_bytes_per_position + layer.output_bytes_per_position + layer.kv_bytes_per_position
        sums = 4 * layer.batch * layer.heads  # log-sum-exp in float32
        copies = 1 if self.options.passes == "forward" else 2  # gradients of all four
        return positions * (copies * tensors + sums) + self.buffer_bytes

    @property
    def cache_bytes(self) -> int | None:
        """The most keys and values that a rank of a decode layer has, in bytes; None of other layers."""
        return self._cache()[0] if self.computes and self.layer.decode else None

    def _cache(self) -> tuple[int, int]:
        """The most bytes of keys and values that a rank has, and those that it has beside their owner."""
        from tasp_lab.schedules.attention.task import KEYS, AttentionTask  # which collectives do not need

        (schedule,) = (one.schedule for one in self.passes)
        assert isinstance(schedule.task, AttentionTask), "a decode layer attends"
        keys = schedule.task.blocks_of(KEYS)
        held, own = schedule.initial[:, keys], schedule.task.owned(KEYS)[:, keys]
        cache, copied = ((each @ schedule.block_bytes[keys]).max() for each in (held, held & ~own))
        return int(cache), int(copied)

    @property
    def fits(self) -> bool | None:
        """Whether a GPU has `memory_bytes`; None where its memory is unknown."""
        from tasp_lab.prediction.training_step.rates import step_rates  # which a prediction of times does not need

        return step_rates(self.on).holds(self.memory_bytes)

    @property
    def relayout_bytes(self) -> int | None:
        """Those of `bytes_sent` that re-layouts of a hybrid send; None of a layer."""
        if not self.computes or self.layer.kind != "hybrid":
            return None
        from tasp_lab.schedules.hybrid.stack import relayout_bytes

        return sum(relayout_bytes(one.schedule) for one in self.passes)

    @property
    def flops(self) -> int:
        """The FLOPs of all ranks."""
        return sum(sum(flops_by_rank(one.schedule)) for one in self.passes)

    @property
    def rates(self) -> dict[str, ComputeRate]:
        """The compute rate of each pass; with a kernel the highest one."""
        return {one.passing: one.rate for one in self.passes} if self.computes else {}

    @property
    def compute_flops_per_s(self) -> Number | None:
        """The rate of a rank, with a kernel what its busiest rank reaches; None when computing takes no time.

        Of two passes the rate at which they take as long together.
        """
        rates = [one.compute_flops_per_s for one in self.passes]
        if len(set(rates)) == 1 or None in rates:
            return rates[0]
        flops = [sum(flops_by_rank(one.schedule)) for one in self.passes]
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
        if sum(one.schedule.transfers for one in self.passes) > MANY_EXPLAINED:
            return "communication"
        spent: dict[str, float] = {}
        for part, seconds in (part for one in self.passes for part in one.spent.items()):
            kind = "compute" if part in PARTS.values() or part == MERGE else part
            spent[kind] = spent.get(kind, 0.0) + seconds
        return max(spent, key=lambda kind: spent[kind], default="nothing")

    @property
    def timeline(self) -> Timeline:
        """What happened; of two passes one after the other."""
        if not self.is_sum:
            return self.passes[0].timeline
        both = f"{self.schedule} {PASS_NAMES['both']}"
        return reduce(partial(one_after_the_other, schedule=both), (one.timeline for one in self.passes))


def together(forward: Answer, backward: Answer) -> Answer:
    """Both passes of a schedule, one after the other: later layers run between them."""
    return replace(forward, passes=(*forward.passes, *backward.passes))


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
