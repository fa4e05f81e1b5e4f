"""Predictions: the simulated times of named schedules on a machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, overload

from sim.simulate import Engine, engine_of
from tasp_lab.core.errors import QuantityError, ScheduleError
from tasp_lab.core.progress import ProgressCallback, no_progress
from tasp_lab.core.report import Report, flat
from tasp_lab.core.tables import Part
from tasp_lab.core.units import format_speed
from tasp_lab.machines.libraries.nccl_tuning import Collective
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.sampling import DEFAULT_SAMPLING
from tasp_lab.prediction.answer import Answer, Detail, answer
from tasp_lab.prediction.captions import (
    assumptions,
    compute_of_passes,
    explanation_parts,
    interval_line,
    provenance_of,
    ranks_text,
    software,
    software_of,
    title_of,
    whole,
)
from tasp_lab.prediction.columns import fields_of, refused_table, table_of, view_of
from tasp_lab.prediction.inputs import (
    MachineLike,
    Schedules,
    WorkLike,
    as_schedules,
    check_call,
)
from tasp_lab.prediction.provenance import Provenance
from tasp_lab.prediction.question import SETTINGS, Question, are_sought, prepare, question_of, with_machine
from tasp_lab.prediction.rank import NEAR
from tasp_lab.prediction.recommend import RINGS, TunedRing, has_few_channels, tuned_ring
from tasp_lab.schedules.build import check_schedules, names_in
from tasp_lab.schedules.collectives.kinds import CollectiveKind
from tasp_lab.schedules.registry import COLLECTIVES, NOT_APPLICABLE, options_for, uses_rings
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
    _check_layer_only(question)
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
    provenance = provenance_of(
        question, chosen, simulated, items,
        rings=has_rings,
        engines=tuple(sorted({engine_of(each.schedule, simulated, each.engine)
                              for found in items for each in found.passes})),
        search_complete=on.search_complete if has_rings else None,
    )  # fmt: skip
    return Predictions(
        items, simulated, question, provenance, explain, tuple(each for each in answers if not each.applies)
    )


def _check_layer_only(question: Question) -> None:
    """Raise `QuantityError` for a collective with settings of layers."""
    if isinstance(question.work, Workload):
        return
    for name in ("compute", "kernel", "contention", "stack"):
        if getattr(question, name) is not None:
            raise QuantityError(f"{name}: applies to attention layers only, not to collectives")


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
    """

    items: tuple[Answer, ...]
    machine: Machine
    question: Question
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
            "stack": self.machine.stack or None,
            "changes": list(self.machine.changes),
            "compute": compute_of_passes(self),
            "predictions": [*map(self._fields, self.items), *map(self._refused_fields, self.refused)],
            "provenance": self.provenance.to_dict(),
        }

    def _fields(self, each: Answer) -> dict[str, object]:
        explanation = explanation_fields(each) if self.explain and not each.is_sum else {}
        if self.explain and each.is_all and each.computes:
            ring = self._tuned_rings.get(each)
            explanation["tuned_ring"] = None if ring is None else ring.to_dict()
        return fields_of(each, view_of(each), self.explain) | {"status": "ok", "reason": None} | explanation

    def _refused_fields(self, each: Answer) -> dict[str, object]:
        where = {"topology": self.machine.topology.name, "world_size": self.machine.topology.world_size}
        return {"schedule": each.schedule, **where, "time_s": None, "status": "does not apply", "reason": each.reason}

    def records(self) -> list[dict[str, object]]:
        """A row per schedule and pass; of a schedule that does not apply one row without numbers."""
        rows = [fields_of(each, view_of(each), self.explain) | {"status": "ok", "reason": None} for each in self.items]
        rows += map(self._refused_fields, self.refused)
        return [flat(row) | {"library": self.library} for row in rows]

    @cached_property
    def _tuned_rings(self) -> dict[Answer, TunedRing | None]:
        """What remains of the gain of each schedule of softmax attention over single rings."""
        compared = [each for each in self.items if each.is_all and each.computes and each.layer.kind == "softmax"]
        return {each: tuned_ring(each, self._rings) for each in compared if has_few_channels(self.machine)}

    @cached_property
    def _rings(self) -> list[Answer]:
        """All single rings; those that were not asked are predicted, without an interval."""
        known = {found.schedule: found for found in self.items if found.is_all}
        given = self.question.options
        asked = [
            replace(self.question, sampling=None, schedule=name, options=options_for(name, given)) for name in RINGS
        ]
        return [known.get(each.name) or answer(each) for each in asked]

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
        shown = whole(self.items) or self.items[0]
        first = {each.compared_by: each for each in reversed(self.items)}
        title = title_of(shown, f"{shown.topology}, {ranks_text(shown)}{software(self.machine)}")
        table = table_of(title, view_of(shown), self.items, lambda each: first[each.compared_by], self.explain)
        parts: list[Part] = [*software_of(shown), table, *self.machine.changes, *assumptions(shown)]
        parts += [interval_line(shown.interval)] if shown.interval is not None else []
        parts += dict.fromkeys(line for each in self.items if (line := self._cliff(each)))
        if self.explain:
            for each in self.items:
                parts += [] if each.is_sum else explanation_parts(each.timeline, self.machine.topology)
                if (ring := self._tuned_rings.get(each)) is not None:
                    parts.append(ring.line)
        if self.refused:
            parts.append(refused_table(self.refused))
        return parts


_FUSED: Mapping[CollectiveKind, Collective] = {
    "AllGather": "all_gather", "ReduceScatter": "reduce_scatter", "AllReduce": "all_reduce",
}  # fmt: skip
"""The collectives that a library runs as one call, by its names."""


def explanation_fields(found: Answer) -> dict[str, object]:
    """The fields of `--json --explain` of one pass: the parts of the critical path, every transfer and kernel call."""
    from tasp_lab.timeline.critical_path import time_by_kind

    spent = time_by_kind(found.timeline, found.passes[0].machine.topology)
    sends = [event for event in found.timeline.events if event.kind == SEND]
    calls = [event for event in found.timeline.events if event.kind != SEND]
    explained: dict[str, object] = {
        "explanation": [{"kind": kind, "seconds": seconds} for kind, seconds in spent],
        "transfers": [
            _event_fields(each, "step", "rank", "peer", "lane", "block", "bytes", "bound_by", "waited_for", "blocks")
            | {"spent": [{"what": what, "seconds": float(s)} for what, s in each.spent]}
            for each in sends
        ],
    }
    if found.computes:
        explained["calls"] = [
            _event_fields(each, "step", "rank", "flops", "waited_for")
            | {"contention_s": float(dict(each.spent).get(CONTENTION, 0))}
            for each in calls
        ]
    return explained


def _event_fields(event: Event, *names: str) -> dict[str, object]:
    found = {name: list(event.blocks) if name == "blocks" else getattr(event, name) for name in names}
    return found | {"start_s": float(event.start_s), "end_s": float(event.end_s)}


# Rankings of collectives: `compare` of sizes instead of layers.


class CollectiveRankings(Report, tuple[Predictions, ...]):
    """The predictions of each collective, the fastest first."""

    def to_dict(self) -> dict[str, object]:
        return {
            "parts": [{"collective": each[0].collective, "fastest": each[0].schedule} | each.to_dict() for each in self]
        }

    def records(self) -> list[dict[str, object]]:
        return [row for each in self for row in each.records()]

    def parts(self) -> list[Part]:
        return [part for each in self for part in (_line(each), *each.parts())]


def _line(found: Predictions) -> str:
    """Which schedule is the fastest, and by how much."""
    first, *others = found
    fastest = f"{first.collective}: {first.schedule} is the"
    near = sum(each.time_s <= (1 + NEAR) * first.time_s for each in found)
    if near > 1:
        return f"{fastest} fastest ({near} schedules are within {NEAR:.0%})."
    if not others:
        return f"{fastest} only one that applies."
    faster = format_speed(float(others[0].time_s / first.time_s), f"the next, {others[0].schedule}")
    return f"{first.collective}: {first.schedule} is {faster}."


def compare_collectives(
    machine: MachineLike,
    size: int | str,
    schedules: Schedules | None = None,
    *,
    progress: ProgressCallback = no_progress,
    **settings: Any,
) -> CollectiveRankings:
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
    if schedules is not None:
        return CollectiveRankings((_ranked(predict(machine, schedules, size, progress=progress, **settings)),))
    by_kind: dict[str, list[str]] = {}
    for name, spec in COLLECTIVES.items():
        by_kind.setdefault(str(spec.kind), []).append(name)
    rankings, reasons = [], []
    for names in by_kind.values():
        if len(names) > 1:
            try:
                rankings.append(_ranked(predict(machine, names, size, progress=progress, **settings)))
            except NOT_APPLICABLE as error:
                reasons.append(str(error))
    if not rankings:
        raise ScheduleError(reasons[0])
    return CollectiveRankings(rankings)


def _ranked(found: Predictions) -> Predictions:
    return replace(found, items=tuple(sorted(found, key=lambda each: float(each.time_s))))
