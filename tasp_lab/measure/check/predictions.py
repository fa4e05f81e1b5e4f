"""What a healthy machine and one with each effect should take for some calls.

Causes cost a simulation of every call on every changed machine. So what does not depend on numbers is found once for
all machines on which the library chooses alike, and of tables with many rows only some are simulated for causes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from sim.array.repeated import RepeatedRun, RepeatedRuns
from sim.library_calls import algorithm_of, library_call
from tasp_lab.core.arrays import FloatArray
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.sampling import NORMAL_95
from tasp_lab.measure.check.causes import Effect, effects_on
from tasp_lab.measure.check.errors import Errors
from tasp_lab.prediction.residuals import regime_of, residual_of
from tasp_lab.schedules.collectives.kinds import NcclTestsName
from tasp_lab.schedules.collectives.library_rings import library_rings

MOST_ROWS, MANY_RANKS, FEW_ROWS = 8, 24, 4
"""Rows of a collective that are simulated for causes, and on machines of more than so many ranks, where trees take
long; of more, every second one or fewer."""

NOTHING = 1e-3
"""An effect that changes no time by more than this explains nothing."""

Call = tuple[NcclTestsName, int]
"""A collective and its size in bytes, as nccl-tests defines it."""


class Variant(NamedTuple):
    """The machine with an effect of some severity, and the predicted times of all calls there, an array (calls,)."""

    effect: Effect
    severity: float | None
    times_s: FloatArray


class Predictions:
    """The times of calls on a machine, if it is healthy and if it is not.

    Parameters
    ----------
    machine, calls : what is measured on what.
    """

    def __init__(self, machine: Machine, calls: Sequence[Call]) -> None:
        self.machine, self.calls, self._rings = machine, calls, library_rings(machine.topology)
        self._runs: dict[tuple[int, str], RepeatedRun] = {}
        self._together: dict[tuple[tuple[int, str], ...], RepeatedRuns] = {}
        self.healthy_s = self.times_s([machine])[0]
        runs = [self._run(place, self._algorithm(machine, place)) for place in range(len(calls))]
        self.residuals = [
            residual_of(regime_of(machine, run.schedule, time_s))
            for run, time_s in zip(runs, self.healthy_s, strict=True)
        ]
        self.middle = np.array([each.middle for each in self.residuals])
        self.expected_s = self.healthy_s * self.middle
        self.width = np.exp(NORMAL_95 * np.array([each.spread for each in self.residuals]))

    @cached_property
    def chosen(self) -> list[int]:
        """The calls that are simulated for causes, the largest among them."""
        found, most = list[int](), MOST_ROWS if self.machine.topology.world_size <= MANY_RANKS else FEW_ROWS
        for collective in dict.fromkeys(collective for collective, _ in self.calls):
            own = sorted((call[1], place) for place, call in enumerate(self.calls) if call[0] == collective)
            found += [place for _, place in own[:: -max(1, -(-len(own) // most))]]
        return sorted(found)

    @cached_property
    def errors(self) -> Errors:
        """The errors of the chosen calls on a healthy machine."""
        return self.errors_of(self.chosen)

    def errors_of(self, places: Sequence[int]) -> Errors:
        """The errors of some calls on a healthy machine."""
        collectives, sizes = zip(*(self.calls[place] for place in places), strict=True)
        times_s = self.expected_s[list(places)]
        return Errors(collectives, sizes, times_s, [self.residuals[place] for place in places])

    @cached_property
    def variants(self) -> list[Variant]:
        """The machine with each effect, as severe as it may be."""
        return [variant for effect in effects_on(self.machine) for variant in self._variants(effect)]

    def times_s(self, machines: Sequence[Machine], places: Sequence[int] | None = None) -> FloatArray:
        """The time of calls on machines, by default of all calls; a float array (machines, calls), in seconds."""
        chosen = range(len(self.calls)) if places is None else places
        found = np.zeros((len(machines), len(chosen)))
        for number, machine in enumerate(machines):
            key = tuple((place, self._algorithm(machine, place)) for place in chosen)
            if key not in self._together:
                self._together[key] = RepeatedRuns([self._run(*each) for each in key])
            found[number] = self._together[key].times_s(machine)
        return found

    def with_effect_s(self, effect: Effect, machine: Machine) -> Iterator[FloatArray]:
        """The times of all calls on a machine with an effect; once for each size from which on it may begin."""
        yield from (times_s for each in self._changed_s(effect, [machine]) for times_s in each)

    def _variants(self, effect: Effect) -> Iterator[Variant]:
        if made := list(effect.variants(self.machine)):
            for (severity, _), each in zip(
                made, self._changed_s(effect, [machine for _, machine in made]), strict=True
            ):
                yield from (Variant(effect, severity, times_s) for times_s in each)

    def _changed_s(self, effect: Effect, machines: Sequence[Machine]) -> Iterator[list[FloatArray]]:
        """For each machine with an effect the times of all calls: those that it does not reach are as fast as ever."""
        own, healthy_s = [self.calls[place] for place in self.chosen], self.healthy_s[self.chosen]
        sizes = np.array([size_bytes for _, size_bytes in own])
        felt = np.array([not effect.collectives or collective in effect.collectives for collective, _ in own])
        for times_s in self.times_s(machines, self.chosen):
            ratios = [
                np.where(felt & (sizes >= least), times_s / healthy_s, 1.0) for least in effect.from_bytes or (0,)
            ]
            yield [self._of_all(each) for each in ratios if (abs(each - 1) > NOTHING).any()]

    def _of_all(self, ratios: FloatArray) -> FloatArray:
        """The times of all calls, from how much longer the chosen ones take: others lie between their neighbours."""
        found: FloatArray = self.healthy_s.copy()
        factor = dict(zip(self.chosen, np.log(ratios), strict=True))
        for collective in dict.fromkeys(collective for collective, _ in self.calls):
            own = [place for place, call in enumerate(self.calls) if call[0] == collective]
            known = sorted((np.log(self.calls[place][1]), factor[place]) for place in own if place in factor)
            sizes = np.log([self.calls[place][1] for place in own])
            found[own] *= np.exp(np.interp(sizes, *np.array(known).T))
        return found

    def _algorithm(self, machine: Machine, place: int) -> str:
        collective, size_bytes = self.calls[place]
        return algorithm_of(collective, machine, size_bytes)

    def _run(self, place: int, algorithm: str) -> RepeatedRun:
        if (place, algorithm) not in self._runs:
            collective, size_bytes = self.calls[place]
            schedule = library_call(collective, self.machine, size_bytes, self._rings, algorithm)
            self._runs[place, algorithm] = RepeatedRun(schedule, self.machine)
        return self._runs[place, algorithm]
