"""The interval of a prediction, 5 to 95 %: samples of the machine's parameters, times errors of earlier predictions.

Finish times over shared links are not monotone in the parameters, so each sample of the parameters is simulated. Each
sampled time is multiplied by a log-normal factor, fitted to the prediction errors of the same error class, less the
part that the intervals of parameters explain. So the interval is that of a mixture of log-normal distributions, found
by bisection, and equal seeds give equal intervals.

Links that are stated without a machine (`Machine.has_ideal_links`) are exact: no measured time could differ from them.
There samples of kernel rates are all that is uncertain.

The order of two schedules follows from the errors that they do not share instead (`tasp_lab.prediction.paired`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from sim.simulate import times_on
from tasp_lab.core.arrays import FloatArray
from tasp_lab.machines.machine import ComputeRate, Machine
from tasp_lab.machines.sampling import MachineSamples, Sampling, machine_samples
from tasp_lab.prediction.interval import Interval
from tasp_lab.prediction.residuals import EXACT, KERNELS, Residual, regime_of, residual_of
from tasp_lab.schedule.schedule import Schedule

MAX_TRANSFERS = 20_000
"""The most transfers that all samples of a schedule simulate together, about half a second."""

MIN_SAMPLES = 8
"""With fewer samples constants are not sampled, and the residual stands alone: it has their errors in it."""


def residual_on(
    machine: Machine, schedule: Schedule, time_s: float, without: str = "", *, sampled: bool = False
) -> Residual:
    """The residual of a schedule on a machine, `without` those of a source or provider.

    On ideal links there is none, unless kernels have measured rates that are not `sampled`: then that of kernels.
    """
    if not machine.has_ideal_links:
        return residual_of(regime_of(machine, schedule, time_s), without)
    task = schedule.task
    exact = sampled or task is None or not _is_measured(machine.compute.rate(task.dtype, task.passing))
    return EXACT if exact else residual_of(KERNELS, without)


def _is_measured(rate: ComputeRate) -> bool:
    """Whether a rate has an interval that was measured: that of a kernel, on the GPU that it is for."""
    return rate.interval is not None and not rate.assumed


@dataclass
class Uncertainty:
    """Intervals of schedules on one machine, whose samples are made once.

    Residuals are `without` those of a source or provider, which is judged.
    """

    machine: Machine
    sampling: Sampling
    without: str = ""
    _made: dict[int, MachineSamples] = field(default_factory=dict)

    def interval(self, schedule: Schedule, time_s: float, transfers: int = 0) -> Interval | None:
        """The interval of a schedule that takes `time_s`; None if no samples were asked for.

        There are as many samples as for a schedule of `transfers`, if it has less: passes are added sample by sample.
        """
        return self.intervals([schedule], [time_s], transfers)[0]

    def intervals(
        self, schedules: Sequence[Schedule], times_s: Sequence[float], transfers: int = 0
    ) -> list[Interval | None]:
        """The interval of each schedule, see `interval`; schedules that differ in sizes alone are sampled together."""
        found: list[Interval | None] = [None] * len(schedules)
        if not self.sampling.samples:
            return found
        sampled = self.samples_s(schedules, transfers)
        for place, (schedule, time_s, samples_s) in enumerate(zip(schedules, times_s, sampled, strict=True)):
            if time_s > 0 and math.isfinite(time_s):
                residual = residual_on(self.machine, schedule, time_s, self.without, sampled=bool(len(samples_s)))
                found[place] = Interval(time_s, samples_s, residual)
        return found

    def samples_s(self, schedules: Sequence[Schedule], transfers: int = 0) -> list[FloatArray]:
        """The times of each schedule with samples of the constants, shape (samples,); empty where it is too large."""
        found = [np.zeros(0)] * len(schedules)
        together: dict[int, tuple[tuple[Machine, ...], list[int]]] = {}
        for place, schedule in enumerate(schedules):
            if machines := self._machines(schedule, transfers):
                # the same samples of one machine, of sizes of one schedule, are simulated at once
                together.setdefault(id(machines), (machines, []))[1].append(place)
        for machines, places in together.values():
            of_places = times_on(machines, [schedules[place] for place in places])
            for place, samples_s in zip(places, of_places.T, strict=True):
                found[place] = samples_s
        return found

    def _machines(self, schedule: Schedule, transfers: int) -> tuple[Machine, ...]:
        """The samples of the machine for a schedule; none where it is too large, or where nothing is uncertain."""
        sampling = self.sampling.of(MAX_TRANSFERS // max(schedule.transfers, transfers, 1))
        if sampling.samples < min(MIN_SAMPLES, self.sampling.samples):
            return ()
        made, task = self._samples(sampling), schedule.task
        if task is None:
            return made.machines
        rate = self.machine.compute.rate(task.dtype, task.passing)
        if self.machine.has_ideal_links and not _is_measured(rate):
            return ()
        factors = made.of_rate(rate, task.dtype, task.passing)
        if not made.machines and (factors == 1).all():
            return ()
        machines = made.machines or (self.machine,) * sampling.samples
        return tuple(
            replace(machine, compute=machine.compute.scaled(float(factor)))
            for machine, factor in zip(machines, factors, strict=True)
        )

    def _samples(self, sampling: Sampling) -> MachineSamples:
        if sampling.samples not in self._made:
            self._made[sampling.samples] = machine_samples(self.machine, sampling)
        return self._made[sampling.samples]
