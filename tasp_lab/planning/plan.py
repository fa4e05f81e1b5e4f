"""Which layout trains a model on a machine fastest, and which fits::

    found = plan("h100-4x8", "llama-3-70b", sequence=2**19, batch_tokens=2**22)
    found.best.layout, found.best.tokens_per_s, found.expected_regret

All layouts (tensor, context, pipeline and data parallelism, ZeRO stages, checkpointing) and attention schedules are
searched (`tasp_lab.planning.search`). Of the layouts within `TIE` of the fastest the one that needs least memory, to a
percent, is recommended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tasp_lab.core.choices import Checkpointing, MatrixDtype
from tasp_lab.core.errors import ModelError, ScheduleError, of_type
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
from tasp_lab.machines.machine import Machine
from tasp_lab.planning.changes import SIMULATIONS, Asked, Bought, Job, bought, check_numbers, ways_to_fit
from tasp_lab.planning.changes import changes as changes_of
from tasp_lab.planning.flags import Flags, flags_of
from tasp_lab.planning.search import Candidate, Found, Search, Setting
from tasp_lab.prediction.columns import Column
from tasp_lab.prediction.inputs import ComputeLike, MachineLike, SequenceLike, as_names, check_call
from tasp_lab.prediction.interval import DECIDED
from tasp_lab.prediction.paired import Rival, is_measured, paired_errors, setting_of
from tasp_lab.prediction.predict_step import STEP_SETTINGS, machine_settings
from tasp_lab.prediction.rank import TIE, Odds
from tasp_lab.prediction.step_results import LESS_CHECKED, StepPrediction
from tasp_lab.prediction.training_step.layout import describe
from tasp_lab.schedules.registry import check_names
from tasp_lab.workload.models.catalogue import load_model
from tasp_lab.workload.models.model import Model

SHOWN_TOO_LARGE = 5
"""Layouts that are shown where none fits."""

ANY = "any"
"""The attention schedule of a question that leaves the choice to the plan."""


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
    simulations: int | None = SIMULATIONS,
    every: bool = False,
    changes: bool = True,
    workers: int = 1,
    progress: ProgressCallback = no_progress,
    count: CountCallback | None = None,
    **settings: Any,
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
    matrix_dtype, matrix_rate, settings : see `predict_step`.
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
    check_call(plan, locals(), STEP_SETTINGS)
    sequence, batch_tokens = count_of(sequence, "sequence"), count_of(batch_tokens, "batch tokens")
    check_numbers(sequence=sequence, batch_tokens=batch_tokens, simulations=simulations, workers=workers)
    model = load_model(model) if isinstance(model, str) else model
    if names is not None:
        check_names(list(names), model.layer(sequence))
    job = Job(model, batch_tokens, checkpointing, logit_chunks, offload, matrix_dtype, simulations)
    asked = Asked(job, sequence, names, matrix_rate, machine_settings(settings))
    machine_name = machine if isinstance(machine, str) else ""
    setting = asked.on(machine)
    plans = asked.layouts(setting.machine)
    if not plans:
        raise ScheduleError(_indivisible(setting.machine, model, sequence, batch_tokens))
    with processes(workers) as executor:
        search = Search(setting, simulations, every, executor, workers, count or count_lines(progress))
        found = search.run(plans)
        if not found.steps and not found.too_large:
            raise ScheduleError(f"no layout applies: {found.refused[0]}")
        answer = Plan(setting, model, sequence, batch_tokens, found)
        if not changes:
            return answer
        if not found.steps:
            return replace(answer, would_fit=tuple(ways_to_fit(asked, setting, machine_name)))
        of_changes = [(change, answer.best, found.steps, search.rankings)
                      for change in changes_of(asked, setting, answer.best, machine_name)]  # fmt: skip
        progress(f"what {len(of_changes)} changes buy: {', '.join(change.name for change, *_ in of_changes)}")
        return replace(answer, changes=tuple(in_order(bought, of_changes, executor, workers)))


def _indivisible(machine: Machine, model: Model, sequence: int, batch_tokens: int) -> str:
    sequences = batch_tokens // sequence
    return (
        f"{model.name} on the {machine.topology.world_size} ranks of {machine.topology.name}: no product of tp, cp, pp "
        f"and dp divides {model.attention.heads} heads, {len(model.pattern)} layers, {format_count(sequence)} "
        f"positions and {sequences} sequence{'s' * (sequences > 1)} of a step, expected other batch tokens or ranks"
    )


# ------------------------------------------------------------------------------------------------- the answer


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
        step, found = self.best, self.found
        mfu = "" if step.mfu is None else f", MFU {step.mfu:.1%}"
        # of the layouts that were not simulated
        gain = format_speed(1 / self.least_left) if self.least_left < 1 else ""
        faster = f"; others may be up to {gain} by their bounds" if gain else ""
        left = f", {len(found.left)} were not simulated (--simulations)" if found.left else ""
        per_gpu = format_four_digits(step.tokens_per_s_per_gpu)
        lines = [
            f"Use {describe(step.plan)}: {per_gpu} tokens/s per GPU{mfu}, {step.memory_text}.",
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
        spent = sorted(self.shares.items(), key=lambda each: -each[1])
        lines.append(f"Bound by {', '.join(f'{name} ({share:.1%})' for name, share in spent if share >= 0.001)}.")
        lines.append(
            f"Of {found.layouts} layouts {len(found.too_large)} do not fit, {found.bounded} are slower by their "
            f"bounds, {len(found.steps)} were simulated{left}."
        )
        if self.model.experts is not None:
            lines.append("Experts are divided as all parameters are: expert parallelism is not searched.")
        return lines + [f"{each.library}: {each.text}" for each in self.flags]

    def parts(self) -> list[Part]:
        if not self.fits:
            usable = self.setting.rates.usable_bytes or 0
            ways = Table.of("What would fit, memory without attention buffers", self.would_fit, WAYS, (0, 2))
            smallest = Table.of("Layouts that need least memory", self.records(), {
                "layout": "{layout}",
                "memory": lambda row: format_size_about(row["memory_bytes"]),
                "too much": lambda row: format_size_about(row["memory_bytes"] - usable),
            })  # fmt: skip
            return [f"{self.nothing_fits}.", *ways, *smallest]
        recommended = describe(self.best.plan)
        changes: Formats = {
            "change": "{change}",
            "tokens/s per GPU": lambda row: _signed(row["over_as_is"] - 1) if row["layout"] else "",
            "layout": lambda row: "the same" if row["layout"] == recommended else row["layout"] or row["reason"],
        }
        buys = Table.of("What each change buys", [each.record for each in self.changes], changes, (0, 2))
        return [*self.lines(), *buys, self._steps_table(), self.best.memory_table(), LESS_CHECKED]

    def _steps_table(self) -> Table:
        rows = []
        for step in self.steps:
            mfu = "" if step.mfu is None else f"{step.mfu:.1%}"
            rows.append((format_four_digits(step.tokens_per_s_per_gpu), format_time(step.time_s), mfu,
                         format_size_about(step.memory.total), describe(step.plan)))  # fmt: skip
        title = (
            f"{self.model.name}, {format_count(self.sequence)} positions, {format_count(self.batch_tokens)} tokens per "
            f"step, on {self.setting.machine.topology.name}"
        )
        return Table(title, ("tokens/s per GPU", "step", "MFU", "memory", "layout"), rows, texts=(4,))

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
                             "smallest": self.records()}  # fmt: skip
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
        """A row per simulated layout, the recommended one first; if nothing fits, one for each of the smallest.

        Those are layouts of different products of degrees.
        """
        if self.fits:
            return [flat(each.to_dict()) for each in self.steps]
        smallest: dict[tuple[object, ...], Candidate] = {}
        for each in self.found.too_large:
            layout = each.plan.layout
            smallest.setdefault((layout.tp, layout.cp, layout.pp, layout.dp), each)
        shown = list(smallest.values())[:SHOWN_TOO_LARGE]
        return [{"layout": describe(each.plan), "memory_bytes": each.memory.total} for each in shown]


WAYS: Formats = {
    "with": "{change}", "memory": lambda row: format_size_about(row["memory_bytes"]), "layout": "{layout}",
}  # fmt: skip


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
    Column("tokens_per_s_per_gpu", "of the recommended layout", lambda plan: plan.best.tokens_per_s_per_gpu,
           when=_fits),
    Column("mfu", "likewise, or null", lambda plan: plan.best.mfu, when=_fits),
)  # fmt: skip
"""What the object of ``plan --json`` and the rows of studies have; those with `when` only if a layout fits."""


def plan_fields(found: Plan) -> dict[str, Any]:
    """The values of `PLAN_COLUMNS`."""
    return {each.name: each.of(found) for each in PLAN_COLUMNS if each.when is None or each.when(found)}


def _signed(share: float) -> str:
    """A share with its sign; zero without.

    >>> _signed(0.0123), _signed(-0.0001)
    ('+1.2%', '0.0%')
    """
    return "0.0%" if abs(share) < 0.0005 else f"{share:+.1%}"


def _rival(step: StepPrediction) -> Rival:
    times, measured = step.times, is_measured(step.plan.schedule, step.machine, "both")
    return Rival.of(step.plan.schedule, step.time_s, times.exposed_s + times.pipeline_s, measured=measured)
