"""Predictions: the simulated times of named schedules on a machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

from sim.simulate import Engine, engine_of
from tasp_lab.core.errors import QuantityError, ScheduleError
from tasp_lab.core.progress import ProgressCallback, no_progress
from tasp_lab.core.report import Report, Reports, flat
from tasp_lab.core.tables import Part
from tasp_lab.core.units import format_speed
from tasp_lab.machines.libraries.nccl_tuning import Collective
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.sampling import DEFAULT_SAMPLING
from tasp_lab.prediction import captions
from tasp_lab.prediction.answer import Answer
from tasp_lab.prediction.columns import fields_of, refused_table, table_of, view_of
from tasp_lab.prediction.evaluate import answer
from tasp_lab.prediction.inputs import MachineLike, Schedules, WorkLike, as_schedules, check_call
from tasp_lab.prediction.passes import Detail
from tasp_lab.prediction.provenance import Provenance
from tasp_lab.prediction.question import SETTINGS, Question, are_sought, prepare, question_of, with_machine
from tasp_lab.prediction.rank import NEAR
from tasp_lab.schedules.build import check_schedules, names_in
from tasp_lab.schedules.collectives.kinds import CollectiveKind
from tasp_lab.schedules.registry import COLLECTIVES, NOT_APPLICABLE, uses_rings
from tasp_lab.timeline.critical_path import time_by_kind
from tasp_lab.timeline.events import CONTENTION, SEND, Event
from tasp_lab.workload.layer import Workload


def predict(
    machine: MachineLike,
    schedules: Schedules,
    work: WorkLike,
    *,
    engine: Engine = "auto",
    explain: bool = False,
    events: bool | None = None,
    progress: ProgressCallback = no_progress,
    **settings: Any,
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
    engine : ``auto``, ``simpy`` or ``array``, see `sim.simulate.simulate`.
    explain : include what the time was spent on, the times without kernel calls and without contention, and every
        transfer.
    events : keep every event, or none unless it costs nothing; by default timelines of more than
        `tasp_lab.prediction.answer.MANY_EVENTS` have a time only.
    progress : called with stages of searches, and before schedules are built or simulated that take long.
    settings : of the machine, the rings, the intervals and the options of a layer, see
        `tasp_lab.prediction.question.SETTINGS`: ``library="gloo"``, ``overrides=["nic.bandwidth=x2"]``,
        ``passes="both"``.

    Returns an `Answer` per schedule; with the passes ``both`` three: forward, backward, and both together. Schedules
    that do not apply to the work or the topology are in `Predictions.refused`.

    Raises `TaspLabError`: an unknown name (`TopologyError`, `ScheduleError`, `ProfileError`), a text that is no
    quantity (`QuantityError`), a schedule of other work (`ScheduleError`); and if no schedule applies, why.

    >>> [round(p.time_s * 1e6) for p in predict("full-mesh:8", ["ring", "multi-ring"], "1MiB")]
    [154, 28]
    """
    check_call(predict, locals(), SETTINGS)
    chosen = as_schedules(schedules)
    question = question_of(machine, work, settings, DEFAULT_SAMPLING.samples, engine)
    collective = check_schedules(chosen, question.work, question.options.passes)
    for name in ("compute", "kernel", "contention", "stack") if not isinstance(question.work, Workload) else ():
        if getattr(question, name) is not None:
            raise QuantityError(f"{name}: applies to attention layers only, not to collectives")
    on = prepare(question)
    names = names_in(chosen)
    are_sought(question.rings, names)  # raises for options of a search that no schedule needs
    of_machine = with_machine(question, on.machine)
    detail: Detail | None = "bottleneck" if explain else None if events is None else "events" if events else "times"
    answers = [
        answer(replace(of_machine, schedule=each), detail, on=on, progress=progress, collective=collective)
        for each in chosen
    ]
    _check_some_apply(answers)
    items = tuple(each for found in answers if found.applies for each in found.each_pass)
    simulated = next(found.machine or on.machine for found in answers if found.applies)
    has_rings = any(map(uses_rings, names))
    engines = {engine_of(each.schedule, simulated, each.engine) for found in items for each in found.passes}
    provenance = captions.provenance_of(question, chosen, simulated, items, rings=has_rings,
                                        engines=tuple(sorted(engines)),
                                        search_complete=on.search_complete if has_rings else None)  # fmt: skip
    refused = tuple(each for each in answers if not each.applies)
    return Predictions(items, simulated, question, provenance, explain, refused)


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
    question : what was asked of each schedule.
    provenance : version, inputs and their hash, constants, engine, search and date.
    explain : whether `to_dict` and the tables include what the time was spent on.
    refused : the schedules that do not apply.
    is_ranking : whether these are all schedules of a collective, the fastest first.
    """

    items: tuple[Answer, ...]
    machine: Machine
    question: Question
    provenance: Provenance
    explain: bool = False
    refused: tuple[Answer, ...] = ()
    is_ranking: bool = False

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
        ranking = {"collective": self[0].collective, "fastest": self[0].schedule} if self.is_ranking else {}
        rows = self._rows()
        for each, row in zip(self.items, rows, strict=False):
            row |= explanation_fields(each) if self.explain and not each.is_sum else {}
        return {
            **ranking,
            "library": self.library,
            "stack": self.machine.stack or None,
            "changes": list(self.machine.changes),
            "compute": captions.compute_of_passes(self),
            "predictions": rows,
            "provenance": self.provenance.to_dict(),
        }

    def _rows(self) -> list[dict[str, object]]:
        """The fields of each schedule and pass; of a schedule that does not apply the reason in place of numbers."""
        status = {"status": "ok", "reason": None}
        where = {"topology": self.machine.topology.name, "world_size": self.machine.topology.world_size}
        return [
            *(fields_of(each, view_of(each), self.explain) | status for each in self.items),
            *({"schedule": each.schedule, **where, "time_s": None, "status": "does not apply", "reason": each.reason}
              for each in self.refused),
        ]  # fmt: skip

    def records(self) -> list[dict[str, object]]:
        """A row per schedule and pass; of a schedule that does not apply one row without numbers."""
        return [flat(row) | {"library": self.library} for row in self._rows()]

    def _cliff(self, each: Answer) -> str:
        """A line about a size or version near a library's call where the library takes something else."""
        if each.computes or not each.passes[0].schedule.fused:
            return ""
        from sim.library_calls import cliff_near  # calls of the library alone have cliffs

        size_bytes = each.shard_bytes * self.machine.topology.world_size
        return cliff_near(_FUSED[each.collective], self.machine, size_bytes)

    def parts(self) -> list[Part]:
        if not self.items:
            return []
        shown = captions.whole(self.items) or self.items[0]
        first = {each.compared_by: each for each in reversed(self.items)}
        where = f"{shown.topology}, {captions.ranks_text(shown)}{captions.software(self.machine)}"
        table = table_of(captions.title_of(shown, where), view_of(shown), self.items,
                         lambda each: first[each.compared_by], self.explain)  # fmt: skip
        parts: list[Part] = [self._fastest()] if self.is_ranking else []
        parts += [*captions.software_of(shown), table, *self.machine.changes, *captions.assumptions(shown)]
        parts += [captions.interval_line(shown.interval)] if shown.interval is not None else []
        parts += captions.rates_line(self.items)
        parts += dict.fromkeys(line for each in self.items if (line := self._cliff(each)))
        for each in self.items if self.explain else ():
            parts += [] if each.is_sum else captions.explanation_parts(each.timeline, self.machine.topology)
        return [*parts, *([refused_table(self.refused)] if self.refused else [])]

    def _fastest(self) -> str:
        """Which schedule is the fastest, and by how much."""
        first, *others = self
        near = sum(each.time_s <= (1 + NEAR) * first.time_s for each in self)
        if near > 1:
            return f"{first.collective}: {first.schedule} is the fastest ({near} schedules are within {NEAR:.0%})."
        if not others:
            return f"{first.collective}: {first.schedule} is the only one that applies."
        faster = format_speed(float(others[0].time_s / first.time_s), f"the next, {others[0].schedule}")
        return f"{first.collective}: {first.schedule} is {faster}."


_FUSED: Mapping[CollectiveKind, Collective] = {
    "AllGather": "all_gather", "ReduceScatter": "reduce_scatter", "AllReduce": "all_reduce",
}  # fmt: skip
"""The collectives that a library runs as one call, by its names."""


def explanation_fields(found: Answer) -> dict[str, object]:
    """The fields of `--json --explain` of one pass: the parts of the critical path, every transfer and kernel call."""

    def fields(event: Event, *names: str) -> dict[str, object]:
        row = {name: list(event.blocks) if name == "blocks" else getattr(event, name) for name in names}
        return row | {"start_s": float(event.start_s), "end_s": float(event.end_s)}

    of_transfer = ("step", "rank", "peer", "lane", "block", "bytes", "bound_by", "waited_for", "blocks")
    transfers, calls = list[dict[str, object]](), list[dict[str, object]]()
    for event in found.timeline.events:
        spent = {what: float(seconds) for what, seconds in event.spent}
        if event.kind == SEND:
            parts = [{"what": what, "seconds": float(seconds)} for what, seconds in event.spent]
            transfers.append(fields(event, *of_transfer) | {"spent": parts})
        else:
            lost = {"contention_s": spent.get(CONTENTION, 0.0)}
            calls.append(fields(event, "step", "rank", "flops", "waited_for") | lost)
    path = time_by_kind(found.timeline, found.on.topology)
    explained: dict[str, object] = {
        "explanation": [{"kind": kind, "seconds": seconds} for kind, seconds in path],
        "transfers": transfers,
    }
    return explained | ({"calls": calls} if found.computes else {})


# Rankings of collectives: `compare` of sizes instead of layers.


def compare_collectives(
    machine: MachineLike,
    size: int | str,
    schedules: Schedules | None = None,
    *,
    progress: ProgressCallback = no_progress,
    **settings: Any,
) -> Reports[Predictions]:
    """Predict collectives of one size per rank by all their schedules, or by some of one collective.

    Schedules of others, such as files in MSCCL XML, are ranked as those of their collective that are given beside them.

    Parameters
    ----------
    machine, settings : see `tasp_lab.prediction.predict.predict`.
    size : bytes per rank, a number or text such as ``"64MiB"``.
    schedules : by default all of each collective with several that apply, those of the library among them.
    progress : called with lines of progress.

    Raises what `predict` raises for schedules that are given, and `ScheduleError` if nothing applies.

    >>> found = compare_collectives("full-mesh:4", "1MiB", ["ring", "multi-ring"])
    >>> [each.schedule for each in found[0]]
    ['multi-ring', 'ring']
    """

    def ranked(schedules: Schedules) -> Predictions:
        found = predict(machine, schedules, size, progress=progress, **settings)
        return replace(found, items=tuple(sorted(found, key=lambda each: float(each.time_s))), is_ranking=True)

    if schedules is not None:
        return Reports((ranked(schedules),))
    by_kind: dict[str, list[str]] = {}
    for name, spec in COLLECTIVES.items():
        by_kind.setdefault(str(spec.kind), []).append(name)
    rankings, reasons = [], []
    for names in by_kind.values():
        if len(names) > 1:
            try:
                rankings.append(ranked(names))
            except NOT_APPLICABLE as error:
                reasons.append(str(error))
    if not rankings:
        raise ScheduleError(reasons[0])
    return Reports(rankings)
