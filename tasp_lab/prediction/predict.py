"""Predictions: the simulated times of named schedules on a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Unpack, overload

from sim.library_calls import cliff_near
from sim.simulate import Engine, engine_of
from tasp_lab.core.errors import QuantityError, ScheduleError
from tasp_lab.core.progress import ProgressCallback, no_progress
from tasp_lab.core.report import Report, flat
from tasp_lab.core.tables import Part
from tasp_lab.machines.host_model.runtime import Runtime
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.overrides import overridden_layer
from tasp_lab.machines.sampling import DEFAULT_SAMPLING, Sampling
from tasp_lab.prediction.answer import Answer, Detail, answer
from tasp_lab.prediction.captions import (
    assumptions,
    compute_of_passes,
    explanation_parts,
    interval_line,
    ranks_text,
    software,
    title_of,
    used_constants,
    whole,
)
from tasp_lab.prediction.columns import fields_of, refused_table, table_of, view_of
from tasp_lab.prediction.inputs import (
    AttentionKeywords,
    ComputeLike,
    MachineLike,
    Schedules,
    WorkLike,
    as_options,
    as_schedules,
    as_work,
    check_arguments,
)
from tasp_lab.prediction.provenance import (
    Provenance,
    machine_inputs,
    overrides_inputs,
    plain,
    rings_inputs,
    schedules_inputs,
)
from tasp_lab.prediction.question import PreparedMachine, Question, machine_of, with_machine
from tasp_lab.prediction.ring_choice import RingOptions
from tasp_lab.rings.decompose import Decomposition
from tasp_lab.rings.search_budget import DEFAULT_SEARCH_BUDGET
from tasp_lab.schedules.attention.options import DEFAULT_OPTIONS, AttentionOptions
from tasp_lab.schedules.objects import check_schedules, names_in
from tasp_lab.schedules.registry import COLLECTIVES, NOT_APPLICABLE, uses_rings
from tasp_lab.timeline.critical_path import time_by_kind
from tasp_lab.timeline.events import CONTENTION, SEND, Timeline
from tasp_lab.workload.layer import Work, Workload


def predict(
    machine: MachineLike,
    schedules: Schedules,
    work: WorkLike,
    *,
    library: str = "auto",
    without_links: Sequence[str] = (),
    links: Sequence[str] = (),
    overrides: Sequence[str] = (),
    decomposition: Decomposition | Sequence[Decomposition] | None = None,
    fold: int | None = None,
    lanes: int | None = None,
    rail_aligned: bool | None = None,
    search_budget: int = DEFAULT_SEARCH_BUDGET,
    compute: ComputeLike | None = None,
    kernel: str | None = None,
    contention: bool | None = None,
    runtime: str | Runtime | None = None,
    engine: Engine = "auto",
    explain: bool = False,
    events: bool | None = None,
    samples: int = DEFAULT_SAMPLING.samples,
    seed: int = DEFAULT_SAMPLING.seed,
    progress: ProgressCallback = no_progress,
    options: AttentionOptions = DEFAULT_OPTIONS,
    **attention: Unpack[AttentionKeywords],
) -> Predictions:
    """Predict a collective, an attention layer or a hybrid by each of the schedules.

    Parameters
    ----------
    machine : a machine, or its name; ranks without compute rates have `ASSUMED_COMPUTE`, in every dtype and pass.
        A `Topology` has no communication library.
    schedules : a schedule, or several: a name of `tasp_lab.schedules.registry`, or a
        `tasp_lab.schedule.schedule.Schedule` that computes this work, of a layer in the one requested pass. Options of
        layers and rings apply to schedules by name.
    work : the bytes per rank of a collective, a number or text such as ``"64MiB"``, or an attention layer or
        a hybrid, a stack of them.
    library : of a machine given by name, see `tasp_lab.machines.catalogue.load_machine`.
    without_links, links : links to remove (``"0-3"``) and bandwidths to change (``"0-3=10GB/s"``), see
        `tasp_lab.topology.derived`.
    overrides : texts such as ``"nic.bandwidth=x2"``, see `tasp_lab.machines.overrides`; `without_links` and `links`
        apply to the overridden machine.
    decomposition : the rings of schedules over rings; the fastest of several, which the simulation finds. By default
        those of `tasp_lab.prediction.ring_choice.ring_candidates`.
    fold, lanes, rail_aligned, search_budget : which rings are sought, see `tasp_lab.rings.decompose.decompose`.
    compute : the compute rate of a rank in FLOP/s, or ``"timed:RATE"``; by default the machine's own kernel or rates.
    kernel : a kernel of the machine's accelerator by name, as ``tasp-lab profile show`` lists them.
    contention : whether messages slow the kernel calls beside them (`tasp_lab.machines.contention`); by default where
        the machine has constants of it.
    runtime : what the library that runs a layer takes on the host, a name of `tasp_lab.machines.host_model.runtime`.
    engine : ``auto``, ``simpy`` or ``array``, see `sim.simulate.simulate`.
    explain : include what the time was spent on, and every transfer.
    events : keep every event, or none unless it costs nothing; by default timelines of more than
        `tasp_lab.prediction.answer.MANY_EVENTS` have a time only.
    samples, seed : of the constants, from which intervals are made, see `tasp_lab.prediction.uncertainty`; 0 samples
        for none.
    progress : called with stages of searches, and before schedules are built or simulated that take long.
    options, attention : `AttentionOptions` of a layer, and its fields as keywords: ``passes="both"``.

    Returns an `Answer` per schedule; with the passes ``both`` three: forward, backward, and both together. Schedules
    that do not apply to the work or the topology are in `Predictions.refused`.

    Raises `TaspLabError`: an unknown name (`TopologyError`, `ScheduleError`, `ProfileError`), a text that is no
    quantity (`QuantityError`), a schedule of other work (`ScheduleError`); and if no schedule applies, why.

    >>> [round(p.time_s * 1e6) for p in predict("full-mesh:8", ["ring", "multi-ring"], "1MiB")]
    [154, 28]
    """
    check_arguments(locals())
    sampling = Sampling(samples, seed)
    chosen, options = as_schedules(schedules), as_options(options, **attention)
    work = overridden_layer(as_work(work), overrides)
    collective = check_schedules(chosen, work, options.passes)
    _check_layer_only(work, compute=compute, kernel=kernel, contention=contention, runtime=runtime)
    given = (decomposition,) if isinstance(decomposition, Decomposition) else tuple(decomposition or ())
    rings = RingOptions(fold, lanes, rail_aligned, search_budget)
    names = names_in(chosen)
    question = Question(
        machine, chosen[0], work, options, library, kernel, runtime, contention, tuple(overrides),
        sampling if samples else None, compute, tuple(without_links), tuple(links), given or rings, engine,
    )  # fmt: skip
    on = PreparedMachine(machine_of(question), question.rings, question.sampling, compute is None)
    sought = rings.check_needed(names, given=bool(given))
    questions = [replace(with_machine(question, on.machine), schedule=each) for each in chosen]
    detail: Detail | None = "bottleneck" if explain else None if events is None else "events" if events else "times"
    answers = [
        answer(each, detail, on=on, progress=progress, all_times=True, collective=collective) for each in questions
    ]
    _check_some_apply(answers)
    applying = [each for each in answers if each.applies]
    machine = applying[0].machine or on.machine
    items = tuple(each for found in applying for each in found.each_pass)
    provenance = Provenance(
        {
            "machine": machine_inputs(machine, compute=isinstance(work, Workload)),
            "schedules": schedules_inputs(chosen),
            "work": plain(work),
            "options": plain(options) if isinstance(work, Workload) else None,
            "rings": rings_inputs(given) if given else plain(rings) if sought else None,
            "engine": engine,
            "sampling": plain(sampling),
            **overrides_inputs(overrides),
        },
        used_constants(machine, items),
        tuple(sorted({engine_of(each.schedule, machine, each.engine) for found in applying for each in found.passes})),
        on.search_complete if any(map(uses_rings, names)) else None,
    )
    return Predictions(items, machine, provenance, explain, tuple(each for each in answers if not each.applies))


def _check_layer_only(work: Work, **given: object) -> None:
    """Raise `QuantityError` for what is given although the work is a collective."""
    for what, value in given.items():
        if value is not None and not isinstance(work, Workload):
            raise QuantityError(f"{what}: applies to attention layers only, not to collectives")


def _check_some_apply(answers: Sequence[Answer]) -> None:
    """Raise why no schedule applies, if so; and any error that is no matter of the schedule."""
    errors = [each.error for each in answers if each.error is not None]
    for error in errors:
        if not isinstance(error, NOT_APPLICABLE):
            raise error
    if len(errors) < len(answers):
        return
    if len({str(error) for error in errors}) == 1:
        raise errors[0]
    reasons = "; ".join(f"{each.schedule}: {each.reason}" for each in answers)
    raise ScheduleError(f"no schedule applies: {reasons}")


@dataclass(frozen=True, repr=False)
class Predictions(Report, Sequence[Answer]):
    """The predictions of one work on one machine, a sequence of `Answer`; with two passes, one for each and their sum.

    Parameters
    ----------
    items : in the order of the schedules, without those that do not apply.
    machine : as it was simulated: with changed links and compute rates.
    provenance : version, inputs and their hash, constants, engine, search and date.
    explain : whether `to_dict` and the tables include what the time was spent on.
    refused : the schedules that do not apply.
    """

    items: tuple[Answer, ...]
    machine: Machine
    provenance: Provenance
    explain: bool = False
    refused: tuple[Answer, ...] = ()

    @overload
    def __getitem__(self, index: int) -> Answer: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Answer, ...]: ...
    def __getitem__(self, index: int | slice) -> Answer | tuple[Answer, ...]:
        return self.items[index]

    def __len__(self) -> int:
        return len(self.items)

    @property
    def library(self) -> str:
        """The name of the communication library."""
        return self.machine.comm_library.name

    def to_dict(self) -> dict[str, object]:
        return {
            "library": self.library,
            "runtime": self.machine.runtime.name,
            "changes": list(self.machine.changes),
            "compute": compute_of_passes(self),
            "predictions": [*map(self._fields, self.items), *map(self._refused_fields, self.refused)],
            "provenance": self.provenance.to_dict(),
        }

    def _fields(self, each: Answer) -> dict[str, object]:
        explained = self.explain and not each.is_sum
        explanation = explanation_fields(each) if explained else {}
        return fields_of(each, view_of(each)) | {"status": "ok", "reason": None} | explanation

    def _refused_fields(self, each: Answer) -> dict[str, object]:
        where = {"topology": self.machine.topology.name, "world_size": self.machine.topology.world_size}
        return {"schedule": each.schedule, **where, "time_s": None, "status": "does not apply", "reason": each.reason}

    def records(self) -> list[dict[str, object]]:
        """A row per schedule and pass; of a schedule that does not apply one row without numbers."""
        rows = [fields_of(each, view_of(each)) | {"status": "ok", "reason": None} for each in self.items]
        rows += map(self._refused_fields, self.refused)
        return [flat(row) | {"library": self.library} for row in rows]

    def _cliff(self, each: Answer) -> str:
        """A line about a size or version near a library's call where the library takes something else."""
        spec = COLLECTIVES.get(each.schedule)
        if spec is None or spec.library_call not in ("all_gather", "reduce_scatter", "all_reduce"):
            return ""
        return cliff_near(spec.library_call, self.machine, each.shard_bytes * self.machine.topology.world_size)

    def parts(self) -> list[Part]:
        if not self.items:
            return []
        shown = whole(self.items) or self.items[0]
        first = {each.compared_by: each for each in reversed(self.items)}
        title = title_of(shown, f"{shown.topology}, {ranks_text(shown)}{software(self.machine)}")
        table = table_of(title, view_of(shown), self.items, lambda each: first[each.compared_by])
        parts: list[Part] = [table, *self.machine.changes, *assumptions(shown)]
        parts += [interval_line(shown.interval)] if shown.interval is not None else []
        parts += dict.fromkeys(line for each in self.items if (line := self._cliff(each)))
        if self.explain:
            for each in self.items:
                parts += [] if each.is_sum else explanation_parts(each.timeline, self.machine.topology)
        if self.refused:
            parts.append(refused_table(self.refused))
        return parts


def explanation_fields(found: Answer) -> dict[str, object]:
    """The fields of `--json --explain` of one pass: the parts of the critical path, every transfer and kernel call."""
    spent = time_by_kind(found.timeline, found.passes[0].machine.topology)
    explained: dict[str, object] = {
        "explanation": [{"kind": kind, "seconds": seconds} for kind, seconds in spent],
        "transfers": _transfers(found.timeline),
    }
    return explained | ({"calls": _calls(found.timeline)} if found.computes else {})


def _transfers(timeline: Timeline) -> list[dict[str, object]]:
    return [
        {
            "step": e.step,
            "rank": e.rank,
            "peer": e.peer,
            "lane": e.lane,
            "block": e.block,
            "blocks": list(e.blocks),
            "bytes": e.bytes,
            "start_s": float(e.start_s),
            "end_s": float(e.end_s),
            "bound_by": e.bound_by,
            "waited_for": e.waited_for,
            "spent": [{"what": what, "seconds": float(seconds)} for what, seconds in e.spent],
        }
        for e in timeline.events
        if e.kind == SEND
    ]


def _calls(timeline: Timeline) -> list[dict[str, object]]:
    return [
        {
            "step": e.step,
            "rank": e.rank,
            "start_s": float(e.start_s),
            "end_s": float(e.end_s),
            "contention_s": float(dict(e.spent).get(CONTENTION, 0)),
            "flops": e.flops,
            "waited_for": e.waited_for,
        }
        for e in timeline.events
        if e.kind != SEND
    ]
