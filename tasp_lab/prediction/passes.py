"""One pass of a layer, or a collective, on one machine: its time, and what needs further simulations.

    PassAnswer(machine, schedule, work, options).time_s

What is not simulated at once is computed when it is first read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal

import numpy as np

from sim.bounds.collectives import collective_bound_s
from sim.bounds.least import least_s
from sim.bounds.schedules import link_bytes, rates_within
from sim.host import busy_s
from sim.simulate import Engine, engine_of, simulate
from tasp_lab.core.arrays import FloatArray, IntArray
from tasp_lab.core.choices import Pass
from tasp_lab.core.progress import ShareCallback, no_share
from tasp_lab.core.units import Number
from tasp_lab.machines.contention import NONE
from tasp_lab.machines.machine import INSTANT, ComputeRate, Machine
from tasp_lab.prediction.interval import Interval
from tasp_lab.prediction.kept import number_once
from tasp_lab.prediction.uncertainty import Uncertainty, residual_on
from tasp_lab.schedule.schedule import OncePerSchedule, Schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.collectives.kinds import CollectiveKind
from tasp_lab.schedules.registry import kind_of
from tasp_lab.timeline.events import Timeline
from tasp_lab.workload.layer import Work, Workload

Detail = Literal["times", "events", "bottleneck"]
"""How much a simulation records: ``times`` alone; ``events``, the start and end of every transfer and kernel call; or
``bottleneck``, also what each event waited for and was limited by."""

PASS_NAMES: dict[Pass, str] = {"forward": "forward", "backward": "backward", "both": "forward and backward"}


@dataclass(frozen=True, eq=False, repr=False)
class PassAnswer:
    """One pass of a layer, or a collective, on one machine: what an `Answer` adds up. Times are in seconds.

    Numbers without a description are those of `Answer`, of one pass.

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
        schedule, machine = self.schedule, self.machine
        simulated = partial(simulate, schedule, machine, self.engine, explain=self.detail == "bottleneck",
                            events=self.detail != "times", progress=self.progress)  # fmt: skip
        if self.detail == "times" and engine_of(schedule, machine, self.engine) == "array":
            time_s = number_once("time", schedule, machine, lambda: float(simulated().time_s))
            timeline = Timeline("predicted", schedule.name, machine.topology.name, schedule.world_size, (), time_s)
        else:
            timeline = simulated()
        if not isinstance(self.work, Workload):
            return timeline
        return replace(timeline, schedule=label(self.schedule, self.options))

    @property
    def time_s(self) -> Number:
        return self.timeline.time_s

    def on(self, machine: Machine) -> PassAnswer:
        """The answer for this schedule on another machine, simulated for its time only."""
        return PassAnswer(machine, self.schedule, self.work, self.options, self.engine, progress=self.progress)

    @property
    def passing(self) -> Pass:
        return pass_of(self.schedule)

    @cached_property
    def interval(self) -> Interval | None:
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
        return max(self.busy_s)

    @cached_property
    def communication_s(self) -> Number:
        return self.on(replace(self.machine, compute=INSTANT)).time_s

    @cached_property
    def contention_s(self) -> Number | None:
        if not self.machine.contention.slows:
            return None
        return self.time_s - self.on(replace(self.machine, contention=NONE)).time_s

    @cached_property
    def bound_s(self) -> Number:
        machine = self.bound_machine or self.machine
        if isinstance(self.work, Workload):
            return least_s(self.schedule, machine)
        kind = self.collective or kind_of([self.schedule.name])
        in_switch = getattr(machine.comm_library, "nvls", None) is not None
        return collective_bound_s(kind, machine.topology, self.work, in_switch)

    @cached_property
    def rates_within(self) -> float:
        exact = engine_of(self.schedule, self.machine, self.engine) == "simpy"
        return 0.0 if exact else rates_within(self.schedule, self.machine)

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
        from tasp_lab.schedule.buffer_layout import memory_bytes

        return int(memory_bytes(self.schedule).max())

    @cached_property
    def spent(self) -> Mapping[str, float]:
        """The seconds of the critical path by what they were spent on."""
        from tasp_lab.timeline.critical_path import time_by_kind

        explained = any(event.spent for event in self.timeline.events)
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
        rate, busiest_s = self.rate, self.compute_s
        if not busiest_s or not (rate.kernel or self.machine.rank_speeds):
            return rate.flops_per_s
        return flops_by_rank(self.schedule)[self.busy_s.index(busiest_s)] / busiest_s


def pass_of(schedule: Schedule) -> Pass:
    """The pass of a layer that a schedule computes."""
    return "forward" if schedule.task is None else schedule.task.passing


def label(schedule: Schedule, options: AttentionOptions) -> str:
    """The name of a schedule, with its pass unless only a forward pass is requested."""
    return schedule.name if options.passes == "forward" else f"{schedule.name} {PASS_NAMES[pass_of(schedule)]}"


@OncePerSchedule
def flops_by_rank(schedule: Schedule) -> list[int]:
    """The FLOPs of each rank."""
    flops: list[int] = schedule.flops().sum(axis=0).tolist()
    return flops
