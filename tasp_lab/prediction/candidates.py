"""One schedule of a comparison: its prediction with its best rings and, tuned, its best options."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from sim.simulate import Engine, simulate
from tasp_lab.machines.kernel_compute import PARTS
from tasp_lab.machines.machine import Machine
from tasp_lab.prediction.link_bytes import busiest_link_bytes
from tasp_lab.prediction.predict import MANY_EVENTS, predict_schedule
from tasp_lab.prediction.ranking import Candidate
from tasp_lab.prediction.results import LayerPrediction, together
from tasp_lab.prediction.tune import axes_of, search
from tasp_lab.prediction.uncertainty import Uncertainty
from tasp_lab.rings.decompose import Decomposition
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import build_schedules
from tasp_lab.schedules.registry import NOT_APPLICABLE, options_for, reason_of
from tasp_lab.timeline.critical_path import time_by_kind
from tasp_lab.workload.layer import Workload


@dataclass(frozen=True)
class OneCandidate:
    """Predicts one schedule, with the fastest of these rings; `times_s` are those of schedules by digest."""

    machine: Machine
    work: Workload
    rings: Sequence[Decomposition | None]
    engine: Engine
    uncertainty: Uncertainty
    times_s: dict[str, float] = field(default_factory=dict)

    def candidate(self, name: str, options: AttentionOptions, tune: bool) -> Candidate:
        """A schedule by name, or the reason why it does not apply."""
        start = options_for(name, options)
        try:
            if not tune:
                return self._predicted(name, start)
            tuned = search(partial(self.time_s, name), start, axes_of(name, options))
            return replace(self._predicted(name, tuned.options), untuned_s=tuned.untuned_s)
        except NOT_APPLICABLE as error:
            return Candidate(name, self.work.kind, start, reason=reason_of(error, name))

    def time_alone_s(self, name: str, options: AttentionOptions) -> float | None:
        """The time of all passes with those of the options that apply to it, in seconds; None if it does not apply."""
        try:
            return self.time_s(name, options_for(name, options))
        except NOT_APPLICABLE:
            return None

    def time_s(self, name: str, options: AttentionOptions) -> float:
        """The time of all passes; a pass that several options have in common is simulated once."""
        return min(sum(map(self._pass_s, self._schedules(name, options, found))) for found in self.rings)

    def _pass_s(self, schedule: Schedule) -> float:
        if schedule.digest not in self.times_s:
            timeline = simulate(schedule, self.machine, self.engine, events=False)
            self.times_s[schedule.digest] = float(timeline.time_s)
        return self.times_s[schedule.digest]

    def _schedules(self, name: str, options: AttentionOptions, found: Decomposition | None) -> tuple[Schedule, ...]:
        return build_schedules(name, self.machine.topology, self.work, found, options)

    def given(self, schedule: Schedule, options: AttentionOptions) -> Candidate:
        """A schedule that was given as an object, or the reason why it does not apply."""
        name, options = schedule.name, AttentionOptions(options.passes)
        try:
            schedule.check_routes(self.machine.topology)
            return replace(self._fastest(name, [(schedule,)], options), is_object=True)
        except NOT_APPLICABLE as error:
            return Candidate(name, self.work.kind, options, reason=reason_of(error, name), is_object=True)

    def _predicted(self, name: str, options: AttentionOptions) -> Candidate:
        return self._fastest(name, (self._schedules(name, options, found) for found in self.rings), options)

    def _fastest(self, name: str, tried: Iterable[tuple[Schedule, ...]], options: AttentionOptions) -> Candidate:
        """The fastest of the forms of a schedule, each of which has a schedule per pass."""
        machine, simulated = self.machine, []
        for schedules in tried:
            predictions = [
                predict_schedule(machine, each, self.work, options, self.engine, events=False) for each in schedules
            ]
            simulated.append((sum(float(each.time_s) for each in predictions), schedules, predictions))
        _, schedules, predictions = min(simulated, key=lambda each: each[0])
        most = max(each.transfers for each in schedules)
        layers = [
            replace(each, interval=self.uncertainty.interval(schedule, float(each.time_s), most))
            for schedule, each in zip(schedules, predictions, strict=True)
            if isinstance(each, LayerPrediction)
        ]
        return Candidate(
            name,
            self.work.kind,
            options,
            replace(together(*layers) if len(layers) > 1 else layers[0], schedule=name),
            sent_bytes=int(sum(each.bytes_sent().sum(axis=(0, 2)) for each in schedules).max()),
            link_bytes=busiest_link_bytes(schedules, machine.topology),
            bound_by=_bound_by(machine, schedules, layers),
        )


def _bound_by(machine: Machine, schedules: Sequence[Schedule], layers: Sequence[LayerPrediction]) -> str:
    """What most of the time was spent on; only computing or communicating where there are too many events to tell."""
    if sum(each.transfers for each in schedules) > MANY_EVENTS:
        compute_s, communication_s = (sum(float(x) for x in each) for each in zip(
            *((p.compute_s, p.communication_s) for p in layers), strict=True))  # fmt: skip
        return "compute" if compute_s >= communication_s else "communication"
    spent: dict[str, float] = {}
    for schedule in schedules:
        for part, seconds in time_by_kind(simulate(schedule, machine, explain=True), machine.topology):
            kind = "compute" if part in PARTS.values() else part
            spent[kind] = spent.get(kind, 0.0) + seconds
    return max(spent, key=lambda kind: spent[kind]) if spent else "nothing"
