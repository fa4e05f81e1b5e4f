"""The numbers of a layer by one schedule on one machine, for rows of studies: times, bytes, memory and what binds.

`predict` and `compare` tell more about each schedule. Here thousands are predicted: a machine and its rings are
prepared once, the array engine simulates every schedule without events, and each schedule is enumerated once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from operator import add

import numpy as np

from sim.host import busy_s
from sim.simulate import simulate
from tasp_lab.machines.kernel_compute import MERGE, PARTS
from tasp_lab.machines.machine import INSTANT, Machine
from tasp_lab.machines.sampling import Sampling
from tasp_lab.prediction.inputs import as_machine, computing, with_contention, with_runtime
from tasp_lab.prediction.interval import Interval
from tasp_lab.prediction.link_bytes import link_bytes, link_rates
from tasp_lab.prediction.predict import bound_s, with_assumptions, with_compute
from tasp_lab.prediction.provenance import machine_content, sha256
from tasp_lab.prediction.ring_choice import RingOptions, ring_candidates
from tasp_lab.prediction.uncertainty import Uncertainty, residual_on
from tasp_lab.rings.decompose import Decomposition
from tasp_lab.schedule.buffer_layout import memory_bytes
from tasp_lab.schedule.model import LazySteps
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import build_schedules
from tasp_lab.schedules.registry import check_names, uses_rings
from tasp_lab.timeline.critical_path import time_by_kind
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload

MANY_KEPT = 200_000
"""Steps of a schedule with more transfers are made anew each time they are needed: they take too much memory."""

MANY_EXPLAINED = 5_000
"""Of a schedule with more transfers only computing and communicating are told apart in what binds."""


@dataclass(frozen=True)
class LayerTimes:
    """The numbers of a row; times in seconds, of all passes.

    `compute_s` is that of the busiest rank, `communication_s` the time with instant compute. `bytes_per_rank` are the
    most that a rank sends, `buffer_bytes` the most memory of a rank for blocks of others and sums that are sent.
    `binds` is ``compute`` where that takes at least half of the time, else what the critical path spends most on.
    """

    time_s: float
    interval: Interval | None
    compute_s: float
    communication_s: float
    bound_s: float
    bytes_per_rank: int
    buffer_bytes: int
    binds: str
    search_complete: bool | None


def schedules_sha256(candidates: Iterable[Candidate]) -> str:
    """The hash of all schedules of some candidates, by what they are and not by what built them."""
    return sha256([[each.digest for each in found.passes] for found in candidates])


@dataclass(frozen=True, eq=False)
class Candidate:
    """The passes of a schedule around some rings (or none), on a machine with the assumptions for this layer.

    `search_complete` is None without rings.
    """

    passes: tuple[Schedule, ...]
    search_complete: bool | None
    machine: Machine
    layer: Workload

    @property
    def transfers(self) -> int:
        """The number of transfers of all passes."""
        return sum(each.transfers for each in self.passes)

    @cached_property
    def least_s(self) -> float:
        """A time that these very passes do not fall below: of the busiest rank, and of the busiest link."""
        topology = self.machine.topology
        return sum(max(_compute_s(each, self.machine), link_busy_s(each, topology)) for each in self.passes)


class PreparedMachine:
    """A machine as layers run on it, with its rings and the samples of its constants, found once.

    Parameters: see `tasp_lab.prediction.predict.predict`.
    """

    def __init__(
        self,
        machine: Machine,
        kernel: str | None = None,
        contention: bool | None = None,
        runtime: str | None = None,
        sampling: Sampling | None = None,
    ) -> None:
        computes = with_compute(computing(as_machine(machine), None, kernel))
        self.machine = with_runtime(with_contention(computes, contention), runtime)
        self._sampling = sampling or Sampling(0)

    @cached_property
    def rings(self) -> Sequence[Decomposition]:
        """The rings that may be fastest, see `tasp_lab.prediction.ring_choice`."""
        return ring_candidates(self.machine, RingOptions().find)

    @cached_property
    def constants_sha256(self) -> str:
        """The hash of all of this machine that answers follow from."""
        return sha256(machine_content(self.machine))

    def times(self, name: str, layer: Workload, options: AttentionOptions) -> LayerTimes:
        """The numbers of a layer by a schedule. Raises `TaspLabError` where it does not apply."""
        return self.fastest(self.candidates(name, layer, options))

    def candidates(self, name: str, layer: Workload, options: AttentionOptions) -> list[Candidate]:
        """A schedule around each of the rings that may be fastest, that with the fewest transfers first.

        Raises `TaspLabError` where it does not apply.
        """
        machine, schedules = with_assumptions(self.machine, layer), self.schedules(name, layer, options)
        found = [Candidate(passes, complete, machine, layer) for passes, complete in schedules]
        return sorted(found, key=lambda each: each.transfers)

    def fastest(self, candidates: Sequence[Candidate]) -> LayerTimes:
        """The numbers of the fastest of one or more candidates; one whose bound is slower is not simulated."""
        first, *others = candidates
        best = self._times(first)
        for each in others:
            if each.least_s <= best.time_s:
                best = min(best, self._times(each), key=lambda found: found.time_s)
        return best

    def schedules(
        self, name: str, layer: Workload, options: AttentionOptions
    ) -> Iterator[tuple[tuple[Schedule, ...], bool | None]]:
        """The passes of a schedule, around each of the rings that may be fastest; and whether their search was done."""
        check_names([name], layer)
        options.check_layer(layer)
        rings: Sequence[Decomposition | None] = self.rings if uses_rings(name) else [None]
        for found in rings:
            passes = build_schedules(name, self.machine.topology, layer, found, options)
            for each in passes:
                if isinstance(each.steps, LazySteps) and each.transfers <= MANY_KEPT:
                    each.steps.keep()
            yield passes, None if found is None else found.search_complete

    def _times(self, candidate: Candidate) -> LayerTimes:
        machine, passes = candidate.machine, candidate.passes
        alone = replace(machine, compute=INSTANT)
        # both simulations of a pass follow each other: they share what waits for what
        simulated = [(_time_s(each, machine), _time_s(each, alone)) for each in passes]
        time_s, communication_s = map(sum, zip(*simulated, strict=True))
        compute_s = sum(_compute_s(each, machine) for each in passes)
        intervals = [self._interval(each, seconds) for each, (seconds, _) in zip(passes, simulated, strict=True)]
        return LayerTimes(
            time_s,
            reduce(add, intervals) if all(intervals) else None,
            compute_s,
            communication_s,
            sum(float(bound_s(machine, each, candidate.layer)) for each in passes),
            int(sum(each.bytes_sent().sum(axis=(0, 2)) for each in passes).max()),
            max(int(memory_bytes(each).max()) for each in passes),
            _binds(machine, passes, time_s, compute_s),
            candidate.search_complete,
        )

    def _interval(self, schedule: Schedule, time_s: float) -> Interval | None:
        if not time_s > 0:
            return None
        if self._sampling.samples:
            return self._uncertainty.interval(schedule, time_s)
        return Interval(time_s, np.zeros(0), residual_on(self.machine, schedule, time_s))

    @cached_property
    def _uncertainty(self) -> Uncertainty:
        return Uncertainty(self.machine, self._sampling)


def _time_s(schedule: Schedule, machine: Machine) -> float:
    return float(simulate(schedule, machine, "array", events=False).time_s)


def _compute_s(schedule: Schedule, machine: Machine) -> float:
    """The compute time of the busiest rank."""
    return max(map(float, busy_s(schedule, machine.compute, machine.rank_speeds)))


def link_busy_s(schedule: Schedule, topology: Topology) -> float:
    """How long the busiest link or shared capacity carries the bytes of a schedule at its line rate, in seconds."""
    return float((link_bytes([schedule], topology) / link_rates(topology)).max(initial=0.0))


def _binds(machine: Machine, passes: Sequence[Schedule], time_s: float, compute_s: float) -> str:
    if compute_s >= time_s / 2:
        return "compute"
    if sum(each.transfers for each in passes) > MANY_EXPLAINED:
        return "communication"
    spent: dict[str, float] = {}
    for schedule in passes:
        for part, seconds in time_by_kind(simulate(schedule, machine, "array", explain=True), machine.topology):
            kind = "compute" if part in PARTS.values() or part == MERGE else part
            spent[kind] = spent.get(kind, 0.0) + seconds
    return max(spent, key=lambda kind: spent[kind], default="nothing")
