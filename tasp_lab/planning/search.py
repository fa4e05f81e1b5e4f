"""The search of `plan`: layouts that fit are simulated, the most promising first, until bounds exclude the others.

    search = Search(Setting(load_machine("h100-2x8")), simulations=8)
    found = search.run(list(candidates(model, 131072, 2**20, 16, 8)))

A layout is *excluded* by its memory without attention buffers, or by a lower bound of its time above that of the
fastest simulated step. The attention schedule of a context group is the first in the ranking of its layer alone
(`compare`) whose buffers fit. Layouts are simulated in rounds of a fixed size, so the result does not
depend on the workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from itertools import count
from typing import NamedTuple

from tasp_lab.core.choices import MatrixDtype
from tasp_lab.core.errors import TaspLabError, first_line
from tasp_lab.core.progress import CountCallback
from tasp_lab.core.workers import in_order
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.stack import load_stack
from tasp_lab.planning.candidates import Speeds, bounds_of
from tasp_lab.prediction.compare import compare
from tasp_lab.prediction.inputs import ComputeLike
from tasp_lab.prediction.predict_step import predict_step
from tasp_lab.prediction.rank import TIE, Bar, Outcome, rank
from tasp_lab.prediction.step_results import StepPrediction
from tasp_lab.prediction.training_step.layout import StepPlan, describe
from tasp_lab.prediction.training_step.memory import MemoryUse, least_memory
from tasp_lab.prediction.training_step.rates import StepRates
from tasp_lab.prediction.training_step.simulation import context_machine
from tasp_lab.schedules.registry import layer_names_on
from tasp_lab.workload.layer import Workload

LAYERS = 4
"""Layers of each step that are simulated; with 8 times differ by less than 0.01 % in the layouts that were tried."""

ROUND = 2
"""Layouts that are simulated before bounds are compared again."""

CONTEXT_STACKS = ("megatron", "torch")
"""Those that train with tensor and pipeline parallelism: NeMo has the context parallelism of Megatron-Core."""

ALONE = "ulysses"
"""The attention schedule of context groups of one rank, which exchange nothing: all are equal there."""


Schedules = tuple[tuple[str, int], ...]
"""Attention schedules with their buffers in bytes, the recommended one first."""

Rankings = dict[tuple[Workload, int, int], Schedules | str]
"""The schedules by what their ranking depends on: the layer of a context group, its distance in ranks, and its ranks.
Where none applies, the reason."""


@dataclass(frozen=True)
class Setting:
    """Where and how steps are predicted.

    Parameters
    ----------
    machine : with its kernel, contention and overrides.
    rates : what is no attention, and the memory of a GPU.
    schedules : of attention, to choose from; those of `CONTEXT_STACKS`, or of the stack of the machine, if None.
    matrix_dtype, matrix_rate : see `tasp_lab.prediction.predict_step.predict_step`.
    """

    machine: Machine
    rates: StepRates
    schedules: tuple[str, ...] | None = None
    matrix_dtype: MatrixDtype = "bf16"
    matrix_rate: ComputeLike | None = None


class Candidate(NamedTuple):
    """A layout with its memory, without attention buffers unless they exceed a GPU; and its bounds, if it fits.

    `least_s` and `expected_s` are those of `bounds_of`.
    """

    plan: StepPlan
    memory: MemoryUse
    least_s: float = 0.0
    expected_s: float = math.inf


@dataclass(frozen=True)
class Found:
    """What a search found.

    Parameters
    ----------
    steps : simulated steps that fit, the fastest first.
    too_large : layouts that do not fit, those that need least memory first.
    refused : why no schedule or link allows some layouts.
    layouts : how many there are.
    bounded : how many were excluded by the bound of their time.
    left : those that were neither excluded nor simulated, as the number of simulations is limited.
    """

    steps: tuple[StepPrediction, ...]
    too_large: tuple[Candidate, ...] = ()
    refused: tuple[str, ...] = ()
    layouts: int = 0
    bounded: int = 0
    left: tuple[Candidate, ...] = ()

    @property
    def fastest(self) -> StepPrediction:
        """The step with the shortest time."""
        return self.steps[0]

    @property
    def least_left_s(self) -> float:
        """No layout that was left can take less; infinite if none was left."""
        return min((each.least_s for each in self.left), default=math.inf)


@dataclass
class Search:
    """Searches the layouts of one setting; `simulations` of None simulates all that are not excluded.

    `every` simulates also what bounds exclude; `rankings` are those of attention schedules on this machine.
    """

    setting: Setting
    simulations: int | None = 8
    every: bool = False
    executor: Executor | None = None
    workers: int = 1
    count: CountCallback = lambda done, total, what: None
    rankings: Rankings = field(default_factory=dict)

    def run(self, plans: Iterable[StepPlan], known: Sequence[StepPrediction] = ()) -> Found:
        """Search these layouts; `known` are steps of others, which bounds are compared with, too."""
        fits, too_large = self.candidates(plans)
        layouts, total = len(fits) + len(too_large), self.simulations or len(fits)
        steps, refused, late, done = list(known), list[str](), dict[int, float](), count()

        def simulate(chosen: Sequence[Candidate], _: Bar) -> Iterator[Outcome[StepPrediction | None]]:
            self._rank([each.plan for each in chosen])  # at once, on all workers
            scheduled = dict[StepPlan, Candidate]()
            for each in chosen:
                plan = self._with_schedule(each.plan)
                if isinstance(plan, StepPlan):
                    self.count(next(done), total, describe(plan))
                    scheduled[plan] = each
                else:
                    leave_out(each.plan, plan)
            tasks = [(self.setting, plan) for plan in scheduled]
            results = in_order(simulated, tasks, self.executor, self.workers)
            for (plan, each), result in zip(scheduled.items(), results, strict=True):
                if isinstance(result, StepPrediction):
                    # closed forms of layouts that are alike are short by about the same factor
                    late[_alike(plan)] = min(result.time_s / each.expected_s, late.get(_alike(plan), math.inf))
                    steps.append(result)
                    yield Outcome(result, result.time_s)
                else:
                    leave_out(plan, result)
                    yield Outcome(None)

        def leave_out(plan: StepPlan, why: MemoryUse | str) -> None:
            if isinstance(why, str):
                refused.append(why)
            else:
                too_large.append(Candidate(plan, why))

        ranked = rank(
            fits, simulate, margin=1 + TIE, bound=lambda each: 0.0 if self.every else each.least_s,
            order=lambda each: promise(each, late.get(_alike(each.plan), 1.0)), size=ROUND, most=self.simulations,
            least_s=min((each.time_s for each in known), default=math.inf),
        )  # fmt: skip
        self.count(total, total, "")
        too_large.sort(key=lambda each: (each.memory.total, divided(each.plan)))
        return Found(tuple(sorted(steps, key=lambda step: step.time_s)), tuple(too_large), tuple(refused), layouts,
                     len(ranked.beyond), tuple(ranked.left))  # fmt: skip

    def _rank(self, plans: Sequence[StepPlan]) -> None:
        """Rank the attention schedules of the context groups of these layouts, unless that was done before."""
        new = {_context(plan): plan for plan in plans if _context(plan) not in self.rankings}
        tasks = [(self.setting, plan) for plan in new.values()]
        self.rankings |= zip(new, in_order(ranked_schedules, tasks, self.executor, self.workers), strict=True)

    def _with_schedule(self, plan: StepPlan) -> StepPlan | MemoryUse | str:
        """The layout with the first schedule whose buffers fit; the least memory with buffers where none do; the
        reason where no schedule applies.
        """
        ranked, rates = self.rankings[_context(plan)], self.setting.rates
        if isinstance(ranked, str):
            return ranked
        needed = {name: least_memory(replace(plan, schedule=name), size) for name, size in ranked}
        fitting = (name for name, memory in needed.items() if rates.holds(memory.total) is not False)
        name = next(fitting, None)
        return min(needed.values(), key=sum) if name is None else replace(plan, schedule=name)

    def candidates(self, plans: Iterable[StepPlan]) -> tuple[list[Candidate], list[Candidate]]:
        """The layouts that fit without attention buffers, with their bounds; and the others."""
        speeds: Speeds | None = None
        fits, too_large = list[Candidate](), list[Candidate]()
        for plan in plans:
            memory = least_memory(plan)
            if self.setting.rates.holds(memory.total) is False:
                too_large.append(Candidate(plan, memory))
                continue
            speeds = speeds or Speeds.of(self.setting.machine, self.setting.rates, plan.layer)
            fits.append(Candidate(plan, memory, *bounds_of(plan, speeds)))
        return fits, too_large


def _alike(plan: StepPlan) -> int:
    """Layouts whose times miss the closed form by about as much: messages of FSDP are the least certain."""
    return plan.layout.zero


def promise(candidate: Candidate, late: float = 1.0) -> tuple[float, ...]:
    """What is simulated first: what is expected to be fast, if it takes `late` times as long as its closed form.

    Where that is within `TIE`, what divides a sequence least, and so has the fewest messages, then what needs little
    memory.
    """
    expected_s = late * candidate.expected_s
    tied = math.floor(math.log(expected_s) / math.log1p(TIE))
    return tied, divided(candidate.plan), expected_s, candidate.memory.total


def divided(plan: StepPlan) -> int:
    """Into how many parts a sequence, its layers and its matrices are divided."""
    return plan.layout.tp * (plan.layout.cp or 1) * plan.layout.pp


def _context(plan: StepPlan) -> tuple[Workload, int, int]:
    return plan.layer, plan.layout.tp, plan.layout.cp or 1


def simulated(task: tuple[Setting, StepPlan]) -> StepPrediction | MemoryUse | str:
    """The step of a layout; its memory where it does not fit; the reason where there is none."""
    setting, plan = task
    try:
        step = predict_step(setting.machine, plan.model, plan.sequence, plan.schedule, layout=plan.layout,
                            batch=plan.batch, matrix_dtype=setting.matrix_dtype, matrix_rate=setting.matrix_rate,
                            layers=LAYERS)  # fmt: skip
    except TaspLabError as error:
        return first_line(error)
    step = replace(step, rates=setting.rates)  # of a change, GPUs have other memory than those of the machine
    return step.memory if step.fits is False else step


def ranked_schedules(task: tuple[Setting, StepPlan]) -> Schedules | str:
    """The attention schedules of a context group, ranked by one layer alone; the reason where none applies."""
    (setting, plan), names = task, task[0].schedules
    cp, layer = plan.layout.cp or 1, plan.layer
    if cp == 1 and layer.kind == "softmax":
        return ((ALONE if names is None else names[0], 0),)
    if names is None:
        stacks = (setting.machine.stack,) if setting.machine.stack else CONTEXT_STACKS
        names = tuple(name for name in layer_names_on(cp, layer) if is_shipped(name, plan.windowed_layer, cp, stacks))
    try:
        part = context_machine(setting.machine, replace(plan.layout, pp=1, interleave=1, dp=None))
        ranking = compare(part, layer, names or None, passes="both")
    except TaspLabError as error:
        return first_line(error)
    best = ranking.recommendation
    if best is None:
        return ranking.best.reason
    others = [each for each in best.answers if each is not best.answer]
    return tuple((each.schedule, int(each.buffer_bytes)) for each in (best.answer, *others))


def is_shipped(name: str, layer: Workload, ranks: int, stacks: Sequence[str] = CONTEXT_STACKS) -> bool:
    """Whether one of these stacks, by default those of tensor and pipeline parallelism, runs a schedule of a layer.

    >>> layer = Workload(8192, mask="causal")
    >>> is_shipped("usp:2x4", layer, 8), is_shipped("tasp", layer, 8)
    (True, False)
    """
    return any(load_stack(each).shipped(name, layer, ranks, "both") is not None for each in stacks)
