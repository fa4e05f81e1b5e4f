"""Which layout trains a model on a machine fastest, and which fits::

    found = plan("h100-4x8", "llama-3-70b", sequence=2**19, batch_tokens=2**22)
    found.best.layout, found.best.tokens_per_s, found.expected_regret

All layouts (tensor, context, pipeline and data parallelism, ZeRO stages, checkpointing) and attention schedules are
searched (`tasp_lab.planning.search`). Of the layouts within `TIE` of the fastest the one that needs least memory, to a
percent, is recommended.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import combinations
from operator import itemgetter, mul
from typing import Any, NamedTuple, get_args

from tasp_lab.core.choices import Checkpointing, MatrixDtype
from tasp_lab.core.errors import ModelError, ScheduleError, TaspLabError, WorkloadError, first_line, of_type
from tasp_lab.core.progress import CountCallback, ProgressCallback, count_lines, no_progress
from tasp_lab.core.report import Report, flat
from tasp_lab.core.tables import Formats, Part, Table
from tasp_lab.core.units import (
    count_of,
    format_count,
    format_four_digits,
    format_regret,
    format_size_about,
    format_speed,
    format_time,
)
from tasp_lab.core.workers import in_order, processes
from tasp_lab.machines.change import has_nics
from tasp_lab.machines.compute import KernelCompute, with_kernel
from tasp_lab.machines.kernel_model.catalogue import attention_kernel, kernel_names
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.overrides import overridden
from tasp_lab.machines.stack import DEFAULT_STACK, load_stack
from tasp_lab.planning.candidates import CHECKPOINTINGS, candidates, domain_of
from tasp_lab.planning.flags import Flags, flags_of
from tasp_lab.planning.search import Candidate, Found, Rankings, Search, Setting, describe, promise, simulated
from tasp_lab.prediction.columns import Column
from tasp_lab.prediction.inputs import (
    ComputeLike,
    Kernel,
    Library,
    MachineLike,
    Overrides,
    SequenceLike,
    StackName,
    as_names,
    check_call,
    chosen_machine,
    parse_compute,
)
from tasp_lab.prediction.interval import DECIDED
from tasp_lab.prediction.paired import Rival, is_measured, paired_errors, setting_of
from tasp_lab.prediction.rank import TIE, Odds
from tasp_lab.prediction.step_results import LESS_CHECKED, LOGIT_CHUNKS, StepPrediction
from tasp_lab.prediction.training_step.layout import StepPlan
from tasp_lab.prediction.training_step.rates import RESERVED_BYTES, of_machine, step_rates, with_memory
from tasp_lab.schedules.registry import check_names
from tasp_lab.workload.models.catalogue import load_model
from tasp_lab.workload.models.model import Model

SIMULATIONS = 6
"""Layouts that are simulated unless bounds exclude all others before."""

CHANGE_SIMULATIONS = 1
"""Layouts that are simulated for each change, beside the recommended one."""

SHOWN_TOO_LARGE = 5
"""Layouts that are shown where none fits."""

MOST_DOUBLED = 512
"""Machines of more GPUs are not doubled any more to find what would fit."""

MOST_SIMULATED = 128
"""On more GPUs twice the nodes are not simulated where one more node has no layout."""


ANY = "any"
"""The attention schedule of a question that leaves the choice to the plan."""


@dataclass(frozen=True)
class Job:
    """What is trained, beside the length of a sequence: what a study of plans asks, see `plan`."""

    model: Model
    batch_tokens: int
    checkpointing: Checkpointing | None = None
    logit_chunks: int = 1
    offload: bool = False
    matrix_dtype: MatrixDtype = "bf16"
    simulations: int = SIMULATIONS

    def __post_init__(self) -> None:
        _check_numbers(1, self.batch_tokens, self.simulations, self.logit_chunks, self.checkpointing)
        if not isinstance(self.offload, bool):
            raise WorkloadError(of_type("offload", self.offload, "true or false"))
        if self.matrix_dtype not in get_args(MatrixDtype):
            known = ", ".join(get_args(MatrixDtype))
            raise WorkloadError(f"matrix dtype: {self.matrix_dtype!r}, expected one of {known}")


def plan(
    machine: MachineLike,
    model: Model | str,
    sequence: SequenceLike,
    batch_tokens: int | str,
    *,
    schedules: str | Sequence[str] | None = None,
    checkpointing: Checkpointing | None = None,
    logit_chunks: int = 1,
    offload: bool = False,
    matrix_dtype: MatrixDtype = "bf16",
    matrix_rate: ComputeLike | None = None,
    library: Library = "auto",
    compute: ComputeLike | None = None,
    kernel: Kernel = None,
    stack: StackName = None,
    contention: bool | None = None,
    overrides: Overrides = (),
    simulations: int | None = SIMULATIONS,
    every: bool = False,
    changes: bool = True,
    workers: int = 1,
    progress: ProgressCallback = no_progress,
    count: CountCallback | None = None,
) -> Plan:
    """Find the fastest layout of a training step that fits.

    Parameters
    ----------
    machine, model : see `tasp_lab.prediction.predict_step.predict_step`.
    sequence, batch_tokens : positions of a sequence, and of a step over all sequences: numbers, or text such as
        ``"128Ki"``.
    schedules : of attention, to choose from; by default those that the stack, or Megatron-Core or PyTorch ships.
    checkpointing : what is computed again; by default all choices are searched, ``offload`` where nothing else fits.
    logit_chunks, offload : see `tasp_lab.prediction.training_step.layout.Layout`.
    matrix_dtype, matrix_rate, library, compute, kernel, stack, contention, overrides : see `predict_step`.
    simulations : the most layouts that are simulated; None for all that bounds do not exclude.
    every : whether layouts that bounds exclude are simulated, too.
    changes : whether to search again with more memory, faster NICs, another kernel and one node more.
    workers : processes that simulate. The answer does not depend on them.
    progress, count : called with what is simulated.

    Raises `TaspLabError` for wrong arguments, for a batch that no layout divides, and where no layout applies. A model
    that fits nowhere is no error: see `Plan.best`.

    >>> found = plan("full-mesh:2", "llama-3-8b", 1024, 2048, schedules="ulysses", changes=False, simulations=2)
    >>> found.best.fits is None, found.best.tokens    # the memory of its GPUs is unknown
    (True, 2048)
    """
    if not isinstance(model, Model | str):
        raise ModelError(of_type("model", model, "a model or the name of one"))
    names = None if schedules is None else as_names(schedules)
    check_call(plan, locals())
    sequence, batch_tokens = count_of(sequence, "sequence"), count_of(batch_tokens, "batch tokens")
    _check_numbers(sequence, batch_tokens, simulations, workers, checkpointing)
    model = load_model(model) if isinstance(model, str) else model
    if names is not None:
        check_names(list(names), model.layer(sequence))
    count = count or count_lines(progress)

    def on(machine: MachineLike) -> Setting:
        own = of_machine(overrides)
        found = chosen_machine(machine, library, compute, kernel, own, contention=contention, stack=stack)
        rate = parse_compute(matrix_rate)
        rates = with_memory(step_rates(found, matrix_dtype, rate if isinstance(rate, float) else None), overrides)
        return Setting(found, rates, names, matrix_dtype, matrix_rate)

    def layouts(
        machine: Machine,
        logit_chunks: int = logit_chunks,
        offload: bool = offload,
        checkpointing: Checkpointing | None = checkpointing,
    ) -> list[StepPlan]:
        topology = machine.topology
        chosen = CHECKPOINTINGS if checkpointing is None else (checkpointing,)
        software = load_stack(machine.stack or DEFAULT_STACK).step
        found = candidates(model, sequence, batch_tokens, topology.world_size, domain_of(topology),
                           checkpointings=chosen, matrix_dtype=matrix_dtype, logit_chunks=logit_chunks,
                           offload=offload)  # fmt: skip
        return [replace(each, software=software) for each in found]

    machine_name = machine if isinstance(machine, str) else ""
    setting = on(machine)
    plans = layouts(setting.machine)
    if not plans:
        raise ScheduleError(_indivisible(setting.machine, model, sequence, batch_tokens))
    with processes(workers) as executor:
        search = Search(setting, simulations, every, executor, workers, count)
        found = search.run(plans)
        if not found.steps and not found.too_large:
            raise ScheduleError(f"no layout applies: {found.refused[0]}")
        answer = Plan(setting, model, sequence, batch_tokens, found)
        if not changes:
            return answer
        if not found.steps:
            ways = _would_fit(setting, machine_name, on, layouts, logit_chunks, offload, checkpointing)
            return replace(answer, would_fit=tuple(ways))
        asked = [(change, answer.best, found.steps, search.rankings)
                 for change in _changes(setting, answer.best, layouts, machine_name, on)]  # fmt: skip
        progress(f"what {len(asked)} changes buy: {', '.join(change.name for change, *_ in asked)}")
        return replace(answer, changes=tuple(in_order(_bought, asked, executor, workers)))


def _check_numbers(
    sequence: int, batch_tokens: int, simulations: int | None, workers: int, checkpointing: str | None
) -> None:
    named = {"sequence": sequence, "batch tokens": batch_tokens, "simulations": simulations, "workers": workers}
    for name, value in named.items():
        if value is not None and (not isinstance(value, int) or value < 1):
            raise WorkloadError(f"{name}: {value}, expected 1 or more")
    if checkpointing is not None and checkpointing not in get_args(Checkpointing):
        raise WorkloadError(f"checkpointing: {checkpointing!r}, expected one of {', '.join(get_args(Checkpointing))}")


def _indivisible(machine: Machine, model: Model, sequence: int, batch_tokens: int) -> str:
    sequences = batch_tokens // sequence
    return (
        f"{model.name} on the {machine.topology.world_size} ranks of {machine.topology.name}: no product of tp, cp, pp "
        f"and dp divides {model.attention.heads} heads, {len(model.pattern)} layers, {format_count(sequence)} "
        f"positions and {sequences} sequence{'s' * (sequences > 1)} of a step, expected other batch tokens or ranks"
    )


# ------------------------------------------------------------------------------------------------- the answer


class Bought(NamedTuple):
    """What a change buys: the fastest layout with it, or the reason why there is none.

    Attributes
    ----------
    change : such as ``memory=x2`` or ``nic.bandwidth=x2``.
    step : the fastest step found with the change; None without one.
    share : its tokens per second and GPU over those as is; 0 without one.
    reason : why there is none.
    """

    change: str
    step: StepPrediction | None
    share: float = 0.0
    reason: str = ""

    @property
    def record(self) -> dict[str, Any]:
        """The object of ``--json``."""
        layout = None if self.step is None else describe(self.step.plan)
        per_gpu = None if self.step is None else _per_gpu(self.step)
        return {"change": self.change, "layout": layout, "tokens_per_s_per_gpu": per_gpu,
                "over_as_is": self.share or None, "reason": self.reason}  # fmt: skip


@dataclass(frozen=True, repr=False)
class Plan(Report):
    """The answer: simulated layouts, the recommended one, and what would help.

    Parameters
    ----------
    setting, model, sequence, batch_tokens : the question.
    found : what the search found.
    changes : what each change buys.
    would_fit : where no layout fits, changes with which one does: the most promising one by its closed form, and its
        memory without attention buffers, as in ``--json``.
    """

    setting: Setting
    model: Model
    sequence: int
    batch_tokens: int
    found: Found
    changes: tuple[Bought, ...] = ()
    would_fit: tuple[dict[str, Any], ...] = ()

    @cached_property
    def steps(self) -> tuple[StepPrediction, ...]:
        """Simulated steps that fit, the recommended one first, then by time."""
        best = self.best
        return (best, *(each for each in self.found.steps if each is not best))

    @cached_property
    def best(self) -> StepPrediction:
        """The recommended step. Raises `ScheduleError` if no layout fits."""
        if not self.found.steps:
            raise ScheduleError(self.nothing_fits)
        tied = [each for each in self.found.steps if each.time_s <= (1 + TIE) * self.found.fastest.time_s]
        largest = max(each.memory.total for each in tied)
        return min(tied, key=lambda step: (round(100 * step.memory.total / largest), step.time_s))

    @property
    def fits(self) -> bool:
        """Whether some layout fits, or may fit where the memory is unknown."""
        return bool(self.found.steps)

    @property
    def flags(self) -> list[Flags]:
        """The flags of the recommended layout in each library."""
        return flags_of(self.best.plan, self.batch_tokens // self.sequence)

    @cached_property
    def expected_regret(self) -> float:
        """How much longer than the fastest simulated layout the recommended one is expected to take, as a share.

        By the errors of ratios of attention schedules (`tasp_lab.prediction.paired`), as those of layouts were not
        measured.
        """
        return Odds([_rival(each) for each in self.steps], setting_of(self.setting.machine)).expected_regrets[0]

    @property
    def is_decided(self) -> bool:
        """Whether that, and what a layout that was not simulated may gain, is at most `DECIDED`."""
        return self.expected_regret <= DECIDED and self.least_left >= 1 - DECIDED

    @property
    def least_left(self) -> float:
        """The least time of a layout that was neither simulated nor excluded over that of the recommended one, by its
        bound; infinite if none is left.
        """
        return self.found.least_left_s / self.best.time_s

    # In words.

    @property
    def nothing_fits(self) -> str:
        """Why no layout fits, where that is so."""
        usable = self.setting.rates.usable_bytes or 0
        least = self.found.too_large[0]
        return (
            f"{self.model.name} with {format_count(self.sequence)} positions fits nowhere on "
            f"{self.setting.machine.topology.name}: the smallest layout needs {format_size_about(least.memory.total)}, "
            f"a GPU has {format_size_about(usable)} for it"
        )

    def lines(self) -> list[str]:
        """The recommendation as lines: what to use, how sure that is, what binds, and the flags."""
        step = self.best
        usable = self.setting.rates.usable_bytes
        mfu = "" if step.mfu is None else f", MFU {step.mfu:.1%}"
        room = "" if usable is None else f" of {format_size_about(usable)}"
        # of the layouts that were not simulated
        gain = format_speed(1 / self.least_left) if self.least_left < 1 else ""
        faster = f"; others may be up to {gain} by their bounds" if gain else ""
        found = self.found
        left = f", {len(found.left)} were not simulated (--simulations)" if found.left else ""
        lines = [
            f"Use {describe(step.plan)}: {format_four_digits(_per_gpu(step))} tokens/s per GPU{mfu}, "
            f"{format_size_about(step.memory.total)}{room} per GPU.",
            f"{'Decided' if self.is_decided else 'Open'}: expected regret {format_regret(self.expected_regret)} over "
            f"{len(self.steps)} simulated layouts{faster}.",
        ]
        if len(self.steps) > 1:
            second = self.steps[1]
            speed = format_speed(step.time_s / second.time_s)
            more = format_size_about(second.memory.total - step.memory.total)
            tie = "" if second.time_s >= step.time_s else f", which is a tie, with {more} more memory"
            low, high = paired_errors().ratio(_rival(second), _rival(step), setting_of(self.setting.machine))
            takes = f"It takes {low:.2f} to {high:.2f} times as long."
            lines.append(f"Next best: {describe(second.plan)}, {speed}{tie}. {takes}")
        lines.append(f"Bound by {self.bottleneck}.")
        lines.append(
            f"Of {found.layouts} layouts {len(found.too_large)} do not fit, {found.bounded} are slower by their "
            f"bounds, {len(found.steps)} were simulated{left}."
        )
        if self.model.experts is not None:
            lines.append("Experts are divided as all parameters are: expert parallelism is not searched.")
        return lines + [f"{each.library}: {each.text}" for each in self.flags]

    @property
    def shares(self) -> dict[str, float]:
        """The shares of the time of the recommended step: kernel calls, exposed messages, pipeline, optimizer."""
        times = self.best.times
        whole_s = times.total_s
        waiting_s = max(0.0, times.forward_s + times.backward_s - times.compute_s)
        return {
            "kernel calls": (times.forward_s + times.backward_s - waiting_s) / whole_s,
            "messages": (waiting_s + times.embedding_s) / whole_s,
            "waiting in the pipeline": times.pipeline_s / whole_s,
            "the optimizer": times.optimizer_s / whole_s,
        }

    @property
    def bottleneck(self) -> str:
        """What the time of the recommended step is spent on, the largest share first."""
        shown = sorted(self.shares.items(), key=lambda each: -each[1])
        return ", ".join(f"{name} ({share:.1%})" for name, share in shown if share >= 0.001)

    def parts(self) -> list[Part]:
        if not self.fits:
            columns: Formats = {
                "with": "{change}",
                "memory": lambda row: format_size_about(row["memory_bytes"]),
                "layout": "{layout}",
            }
            ways = Table.of("What would fit, memory without attention buffers", self.would_fit, columns, (0, 2))
            return [f"{self.nothing_fits}.", *ways, self._too_large_table()]
        recommended = describe(self.best.plan)
        changes: Formats = {
            "change": "{change}",
            "tokens/s per GPU": lambda row: _signed(row["over_as_is"] - 1) if row["layout"] else "",
            "layout": lambda row: "the same" if row["layout"] == recommended else row["layout"] or row["reason"],
        }
        bought = Table.of("What each change buys", [each.record for each in self.changes], changes, (0, 2))
        return [*self.lines(), *bought, self._steps_table(), self._memory_table(), LESS_CHECKED]

    def _steps_table(self) -> Table:
        rows = []
        for step in self.steps:
            mfu = "" if step.mfu is None else f"{step.mfu:.1%}"
            rows.append((format_four_digits(_per_gpu(step)), format_time(step.time_s), mfu,
                         format_size_about(step.memory.total), describe(step.plan)))  # fmt: skip
        title = (
            f"{self.model.name}, {format_count(self.sequence)} positions, {format_count(self.batch_tokens)} tokens per "
            f"step, on {self.setting.machine.topology.name}"
        )
        return Table(title, ("tokens/s per GPU", "step", "MFU", "memory", "layout"), rows, texts=(4,))

    def _memory_table(self) -> Table:
        memory = self.best.memory
        parts = {name.replace("_", " "): size for name, size in memory._asdict().items() if size}
        parts["all"] = memory.total
        if (capacity_bytes := self.setting.rates.capacity_bytes) is not None:
            parts |= {"context and communication library": RESERVED_BYTES, "the GPU has": capacity_bytes}
        rows = [(name, format_size_about(size)) for name, size in parts.items()]
        return Table("Memory of the fullest GPU", ("part", "size"), rows)

    def _too_large_table(self) -> Table:
        usable = self.setting.rates.usable_bytes or 0
        rows = [
            (describe(each.plan), format_size_about(each.memory.total), format_size_about(each.memory.total - usable))
            for each in _varied(self.found.too_large)
        ]
        return Table("Layouts that need least memory", ("layout", "memory", "too much"), rows)

    def to_dict(self) -> dict[str, object]:
        common: dict[str, object] = {
            "model": self.model.name,
            "topology": self.setting.machine.topology.name,
            "seq": self.sequence,
            "batch_tokens": self.batch_tokens,
            "fits": self.fits,
            **plan_fields(self),
        }
        if not self.fits:
            return common | {"capacity_bytes": self.setting.rates.capacity_bytes, "would_fit": list(self.would_fit),
                             "smallest": self._smallest()}  # fmt: skip
        return common | {
            "recommended": describe(self.best.plan),
            "is_decided": self.is_decided,
            "shares": self.shares,
            "flags": [each._asdict() for each in self.flags],
            "changes": [each.record for each in self.changes],
            "steps": [
                {key: value for key, value in each.to_dict().items() if key != "provenance"} for each in self.steps
            ],
            "provenance": self.best.provenance.to_dict(),
        }

    def records(self) -> list[dict[str, object]]:
        """A row per simulated layout, the recommended one first; if nothing fits, one for each of the smallest."""
        return [flat(each.to_dict()) for each in self.steps] if self.fits else self._smallest()

    def _smallest(self) -> list[dict[str, object]]:
        """The layouts that need least memory."""
        smallest = _varied(self.found.too_large)
        return [{"layout": describe(each.plan), "memory_bytes": each.memory.total} for each in smallest]


def _fits(found: Plan) -> bool:
    return found.fits


PLAN_COLUMNS: tuple[Column[Plan], ...] = (
    Column("layouts", "how many there are", lambda plan: plan.found.layouts),
    Column("too_large", "those that do not fit", lambda plan: len(plan.found.too_large)),
    Column("slower_by_bounds", "those that bounds exclude", lambda plan: plan.found.bounded),
    Column("left", "those that were neither excluded nor simulated", lambda plan: len(plan.found.left)),
    Column("expected_regret", "of the recommended one over those that were simulated", when=_fits),
    Column("least_left_over_best", "least time of a layout that is left, by its bound, over that of the recommended "
           "one; null if none is left", lambda plan: plan.least_left if plan.found.left else None, when=_fits),
    Column("tokens_per_s_per_gpu", "of the recommended layout", lambda plan: _per_gpu(plan.best), when=_fits),
    Column("mfu", "likewise, or null", lambda plan: plan.best.mfu, when=_fits),
)  # fmt: skip
"""What the object of ``plan --json`` and the rows of studies have; those with `when` only if a layout fits."""


def plan_fields(found: Plan) -> dict[str, Any]:
    """The values of `PLAN_COLUMNS`."""
    return {each.name: each.of(found) for each in PLAN_COLUMNS if each.when is None or each.when(found)}


def _per_gpu(step: StepPrediction) -> float:
    return step.tokens_per_s / step.ranks


def _signed(share: float) -> str:
    """A share with its sign; zero without.

    >>> _signed(0.0123), _signed(-0.0001)
    ('+1.2%', '0.0%')
    """
    return "0.0%" if abs(share) < 0.0005 else f"{share:+.1%}"


def _rival(step: StepPrediction) -> Rival:
    times, measured = step.times, is_measured(step.plan.schedule, step.machine, "both")
    return Rival.of(step.plan.schedule, step.time_s, times.exposed_s + times.pipeline_s, measured=measured)


def _varied(too_large: Sequence[Candidate]) -> list[Candidate]:
    """The smallest layouts, one of each product of degrees."""
    found: dict[tuple[object, ...], Candidate] = {}
    for each in too_large:
        layout = each.plan.layout
        found.setdefault((layout.tp, layout.cp, layout.pp, layout.dp), each)
    return list(found.values())[:SHOWN_TOO_LARGE]


# ------------------------------------------------------------------------------------------- what changes buy


class _Change(NamedTuple):
    """A change: the setting with it, and the layouts there, or the reason why there is none.

    `keeps_times`: whether layouts that were simulated as is take as long with it.
    """

    name: str
    setting: Setting | None
    plans: Sequence[StepPlan] = ()
    reason: str = ""
    keeps_times: bool = False


def _changes(
    setting: Setting,
    best: StepPrediction,
    layouts: Callable[..., list[StepPlan]],
    name: str,
    on: Callable[[str], Setting],
) -> Iterator[_Change]:
    """More memory, logits in parts, faster NICs, a faster kernel, one node more: those that the machine has."""
    rates = setting.rates
    if rates.capacity_bytes is not None:
        roomy = replace(setting, rates=replace(rates, capacity_bytes=2 * rates.capacity_bytes))
        yield _Change("memory=x2", roomy, layouts(setting.machine), keeps_times=True)
    if best.plan.layout.logit_chunks == 1 and best.memory.logits > best.memory.total / 20:
        plans = layouts(setting.machine, LOGIT_CHUNKS)
        yield _Change(f"logits in {LOGIT_CHUNKS} parts", setting, plans, keeps_times=True)
    if has_nics(setting.machine):
        faster = replace(setting, machine=overridden(setting.machine, ["nic.bandwidth=x2"]))
        yield _Change("nic.bandwidth=x2", faster, layouts(setting.machine))
    if (faster_kernel := _faster_kernel(setting, best)) is not None:
        kernel, other = faster_kernel
        yield _Change(f"kernel {kernel}", other, layouts(setting.machine))
    ranks, reason = setting.machine.topology.world_size, ""
    for nodes in (lambda count: count + 1), (lambda count: 2 * count):
        if not (larger := _more_nodes(name, nodes)):
            return
        try:
            other = on(larger)
            plans = layouts(other.machine)
        except TaspLabError as error:
            reason = first_line(error)
        else:
            fits, _ = Search(other).candidates(plans)
            if fits:
                yield _Change(larger, other, [each.plan for each in fits])
                return
            reason = "no layout fits" if plans else "no layout divides the batch"
        yield _Change(larger, None, reason=reason)
        if ranks > MOST_SIMULATED:
            return


def _would_fit(
    setting: Setting,
    name: str,
    on: Callable[[str], Setting],
    layouts: Callable[..., list[StepPlan]],
    logit_chunks: int,
    offload: bool,
    checkpointing: Checkpointing | None,
) -> Iterator[dict[str, Any]]:
    """What makes a layout fit, the fewest GPUs first: of each number of nodes, by doubling, the fewest options that do,
    until no option is needed.
    """
    options: dict[str, dict[str, Any]] = {}
    if logit_chunks < LOGIT_CHUNKS:
        options[f"--logit-chunks {LOGIT_CHUNKS}"] = {"logit_chunks": LOGIT_CHUNKS}
    if not offload:
        options["--offload"] = {"offload": True}
    if checkpointing is None:
        options["--checkpointing offload"] = {"checkpointing": "offload"}
    ways = [names for count in range(len(options) + 1) for names in combinations(options, count)]
    more, factor = "", 1
    while True:
        for names in ways:
            changed = {key: value for name in names for key, value in options[name].items()}
            fits, _ = Search(setting).candidates(layouts(setting.machine, **changed))
            if fits and (more or names):  # else only attention buffers do not fit
                best = min(fits, key=promise)
                change = " ".join([more, *names]).strip()
                yield {"change": change, "layout": describe(best.plan), "memory_bytes": best.memory.total}
                if not names:
                    return
                break
        factor *= 2
        more = _more_nodes(name, partial(mul, factor))
        if not more or setting.machine.topology.world_size > MOST_DOUBLED:
            return
        setting = on(more)


def _bought(asked: tuple[_Change, StepPrediction, Sequence[StepPrediction], Rankings]) -> Bought:
    """What a change buys over the recommended step; further steps, and rankings of schedules, are those as is."""
    change, best, steps, rankings = asked
    if change.setting is None or not change.plans:
        return Bought(change.name, None, reason=change.reason)
    search = Search(change.setting, CHANGE_SIMULATIONS, rankings=dict(rankings) if change.keeps_times else {})
    known = steps if change.keeps_times else (best,)
    simulated = {replace(each.plan, schedule="") for each in known}
    if not change.keeps_times:
        known = search.run(each for each in change.plans if each in simulated).steps
    found = search.run((each for each in change.plans if each not in simulated), known)
    if not found.steps:
        return Bought(change.name, None, reason="no layout fits")
    step = found.fastest
    return Bought(change.name, step, _per_gpu(step) / _per_gpu(best))


def _faster_kernel(setting: Setting, best: StepPrediction) -> tuple[str, Setting] | None:
    """The measured kernel of this GPU with which the recommended step takes least, if it takes less than as it is."""
    machine = setting.machine
    if not isinstance(machine.compute, KernelCompute):
        return None
    faster = []
    for name in kernel_names(str(machine.accelerator)):
        kernel = attention_kernel(str(machine.accelerator), name)
        serves = any(variant.design.key_bytes for variant in kernel.file.variants)  # copies keys into a cache
        if kernel.note or serves:
            continue
        other = replace(setting, machine=with_kernel(machine, name))
        step = simulated((other, best.plan))
        if isinstance(step, StepPrediction) and 1.05 * step.time_s < best.time_s:
            faster.append((step.time_s, name, other))
    return min(faster, key=itemgetter(0))[1:] if faster else None


def _more_nodes(name: str, nodes: Callable[[int], int]) -> str:
    """The name of the machine of the same family with other nodes; empty for machines of no family.

    >>> _more_nodes("h100-4x8", lambda count: count + 1), _more_nodes("h100-8", lambda count: 2 * count)
    ('h100-5x8', 'h100-2x8')
    >>> _more_nodes("gb200-2x1x4", lambda count: count + 1)
    'gb200-3x1x4'
    >>> _more_nodes("full-mesh:8", lambda count: count + 1)
    ''
    """
    match = re.fullmatch(r"([a-z][a-z0-9_]*)-(?:(\d+)x)?((?:1x)?\d+)((?:-rails)?)", name)
    if match is None:
        return ""
    family, count, ranks, rest = match.groups()
    return f"{family}-{nodes(int(count or 1))}x{ranks}{rest}"
