"""Prediction against measurement: the place where both engines meet.

`validate` starts real ranks on a fabric, calibrates it point to point, predicts each schedule from the calibration,
executes the very same schedule, and puts the two side by side.
"""

from __future__ import annotations

import contextlib
import importlib.util
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import add
from typing import Literal

from runtime.calibration import Calibration, calibrate, calibrate_shared_medium, expected_duration_s, route_classes
from runtime.host import usable_cores
from runtime.jobs import MeasureCompute, Ranks, RunSchedule
from runtime.launcher import launch
from runtime.records import merge_records
from runtime.setup import Placement
from sim.engine import simulate
from tasp_lab.attention_bound import rank_flops
from tasp_lab.cli.options import FabricKind
from tasp_lab.cli.predicted import label, one_after_the_other, together
from tasp_lab.cli.prediction import LayerPrediction, Prediction, bound_s, predict_schedule, with_compute
from tasp_lab.decomposition import Decomposition
from tasp_lab.errors import QuantityError, RunError
from tasp_lab.machine import INSTANT, Compute, Machine
from tasp_lab.quantities import Number, format_bandwidth, format_flops
from tasp_lab.rings import Say, say_nothing
from tasp_lab.schedule import Schedule
from tasp_lab.schedules import USUAL_OPTIONS, AttentionOptions, Work, build_schedules, check_names
from tasp_lab.timeline import Timeline
from tasp_lab.topology import Topology
from tasp_lab.workload import Workload

ComputeKind = Literal["timed", "real"]

LINKS_BYTES_PER_S_PER_CORE = 40e6
"""What one core can forward over all links of an emulated fabric together and stay mostly idle.

Two cores were seen to feed 140 MB/s over 56 links with 3 % loss of speed, and to fail at 220 MB/s.
"""

RUNS_TAKE_S = 30.0
SLOWEST_LINK_BYTES_PER_S = 250e3
"""A packet of 1500 bytes takes 6 ms on such a link."""

SLOWEST_KERNEL_FLOPS_PER_S = 5e8
"""A rank whose real kernel calls are slower than that on average is taken to hang."""

_START_S = 5.0


@dataclass(frozen=True)
class Run:
    """A schedule predicted and measured on one fabric; all times in seconds of the fabric's own clock.

    `prediction` follows from the calibration, its bound and `nominal_s` from the nominal machine (see `validate`);
    `measured` are the repeats. `cpu_busy_share` is the share of the time of all cores of the first rank's host that
    was spent, by anybody, while the repeats ran. `compute` says how a layer's kernel calls were made: as timed waits
    or for real.
    """

    prediction: Prediction
    nominal_s: Number
    measured: tuple[float, ...]
    measured_timeline: Timeline
    cpu_busy_share: float
    compute: ComputeKind = "timed"

    @property
    def measured_s(self) -> float:
        """The median of the repeats."""
        return statistics.median(self.measured)

    @property
    def measured_spread_s(self) -> float:
        """The slowest repeat minus the fastest."""
        return max(self.measured) - min(self.measured)

    @property
    def relative_error(self) -> float:
        """Predicted / measured - 1."""
        return float(self.prediction.time_s) / self.measured_s - 1 if self.measured_s else 0.0


@dataclass(frozen=True)
class Comparison:
    """All runs on one fabric, and how it was calibrated."""

    fabric: FabricKind
    scale: float
    calibration: Calibration
    runs: tuple[Run, ...]
    speaks: bool = True
    """False on the ranks of a torchrun group that leave the talking to rank 0."""


def runs_together(forward: Run, backward: Run) -> Run:
    """Both passes of a schedule as one run, one after the other.

    Its repeats are the k-th fastest of both passes, added for each k, so medians and spreads add up too.
    """
    prediction = together(forward.prediction, backward.prediction)
    timelines = forward.measured_timeline, backward.measured_timeline
    measured_s = forward.measured_s + backward.measured_s
    busy_s = sum(run.cpu_busy_share * run.measured_s for run in (forward, backward))
    return Run(
        prediction,
        forward.nominal_s + backward.nominal_s,
        tuple(map(add, sorted(forward.measured), sorted(backward.measured))),
        one_after_the_other(*timelines, prediction.timeline.schedule),
        busy_s / measured_s if measured_s else 0.0,
        forward.compute,
    )


def default_scale(topology: Topology, nominal_s: float) -> float:
    """The scale for an emulated fabric on which all runs together would take `nominal_s` at full speed.

    At most what this machine's cores can feed all links at once. Below that, slow enough for the runs to take
    `RUNS_TAKE_S` together, since a step must be long beside its fixed cost; but no link slower than
    `SLOWEST_LINK_BYTES_PER_S`.

    >>> from tasp_lab.builders import full_mesh
    >>> round(default_scale(full_mesh(8), nominal_s=1.0) * 56 * 50e9 / usable_cores())
    40000000
    >>> round(default_scale(full_mesh(8), nominal_s=0.0003), 9)
    1e-05
    """
    bandwidths = [float(link.bandwidth_bytes_per_s) for link in topology.links]
    if not bandwidths:
        return 1.0
    slow_enough = max(nominal_s / RUNS_TAKE_S, SLOWEST_LINK_BYTES_PER_S / min(bandwidths))
    return min(1.0, LINKS_BYTES_PER_S_PER_CORE * usable_cores() / sum(bandwidths), slow_enough)


def validate(
    machine: Machine,
    schedules: Sequence[str],
    work: Work,
    *,
    decomposition: Decomposition | None = None,
    options: AttentionOptions = USUAL_OPTIONS,
    compute: float | Literal["real"] | None = None,
    fabric: FabricKind = "emulated",
    scale: float | None = None,
    repeats: int = 5,
    transport: str = "auto",
    say: Say = say_nothing,
) -> Comparison:
    """Run a collective or an attention layer on real processes and compare with its prediction.

    Parameters
    ----------
    machine : what to run on; its bandwidths are scaled on the emulated fabric.
    schedules : names of schedules; the first is the one that others are compared with.
    work : bytes per rank, or the layer.
    decomposition, options : see `tasp_lab.schedules.build_schedules`. Each pass is a run of its own; both together
        are one more, see `runs_together`.
    compute : of a layer. A rate in FLOP/s for both passes, on the fabric's own clock: kernel calls are waits of as
        long as they take then. ``real``: kernels are real, and a rate for each schedule is calibrated from its kernel
        calls, alone and without communication. By default the emulated fabric has waits at the machine's rate times
        the scale, which leaves the ratio of compute to communication as it is; the others are ``real``.
    fabric : ``emulated`` (network namespaces), ``local`` (plain processes) or ``torchrun`` (this process is a rank).
    scale : bandwidth of the emulated fabric over that of the machine; chosen by `default_scale` when None.
    repeats : timed repetitions per schedule, after one to warm up.
    transport : how blocks are sent: ``auto``, ``p2p``, ``batched`` or ``all-to-all``.
    say : called with lines of progress.

    The *nominal* machine is the given one; on the emulated fabric it is scaled and has no latency; local processes
    share one medium whatever the machine, so there it is that medium without latency. Its ranks compute as fast as
    those of the prediction.

    Raises `RunError` (a rank failed), `FabricError` (no namespaces), `QuantityError`, and what `build_schedules`
    raises.
    """
    if repeats < 1:
        raise QuantityError(f"repeat: {repeats}, expected 1 or more")
    check_fabric(scale, fabric)
    check_names(schedules, work)
    built = [
        schedule
        for name in schedules
        for schedule in build_schedules(name, machine.topology, work, decomposition, options)
    ]
    topology = machine.topology
    real = isinstance(work, Workload) and (compute == "real" or (compute is None and fabric != "emulated"))
    timed = Compute(float(compute)) if isinstance(compute, (int, float)) else INSTANT
    if fabric == "emulated":
        own = with_compute(machine).compute if compute is None else INSTANT
        at_full_speed_s = (repeats + 1) * _nominal_s(built, _nominal(topology, fabric, own))
        scale = default_scale(topology, at_full_speed_s) if scale is None else scale
        topology, runs_s = topology.scaled(scale), at_full_speed_s / scale
        if timed == INSTANT:
            timed = _slower(own, scale)
        else:
            runs_s = (repeats + 1) * _nominal_s(built, _nominal(topology, fabric, timed))
        _announce(say, topology, scale, runs_s, real)
    with start_ranks(fabric, topology) as ranks:
        if not speaks(ranks):
            say = say_nothing
        built = ranks.agree(built)
        calibration = calibrate_ranks(fabric, topology, ranks, say)
        nominal = _nominal(calibration.machine.topology if fabric == "local" else topology, fabric)
        trials = _Trials(ranks, work, options, timed, real, calibration.machine, nominal, repeats, transport, say)
        return Comparison(fabric, scale or 1.0, calibration, tuple(trials.run_all(built)), speaks(ranks))


def check_fabric(scale: float | None, fabric: FabricKind) -> None:
    """Raise `QuantityError` for a scale that makes no sense there, and `RunError` for what is not installed."""
    if scale is not None and not 0 < scale <= 1:
        raise QuantityError(f"scale: {scale}, expected more than 0 and at most 1")
    if scale is not None and fabric != "emulated":
        raise QuantityError(f"scale: only the emulated fabric is scaled, not {fabric!r}")
    for module in ("torch", "pyroute2") if fabric == "emulated" else ("torch",):
        if importlib.util.find_spec(module) is None:
            raise RunError(f"running schedules needs {module}, which is not installed: pip install 'tasp-lab[runtime]'")


def _nominal(topology: Topology, fabric: FabricKind, compute: Compute = INSTANT) -> Machine:
    """The machine as it is described; without latency where the fabric has none of its own."""
    if fabric == "torchrun":
        return Machine(topology, compute=compute)
    return Machine(topology.map_links(lambda _, link: replace(link, latency_s=0.0)), compute=compute)


def _nominal_s(schedules: Sequence[Schedule], machine: Machine) -> float:
    """How long all schedules together take, each once."""
    return sum(float(simulate(schedule, machine).time_s) for schedule in schedules)


def _slower(compute: Compute, scale: float) -> Compute:
    """The same in slow motion."""
    return INSTANT if compute.flops_per_s is None else Compute(compute.flops_per_s * scale)


def _announce(say: Say, topology: Topology, scale: float, runs_s: float, real: bool) -> None:
    """Say what is emulated and how long it takes."""
    seconds = _START_S + expected_duration_s(route_classes(topology)) + runs_s
    slowest = min((link.bandwidth_bytes_per_s for link in topology.links), default=0.0)
    say(
        f"emulating {topology.name} at scale {scale:.3g} (slowest link {format_bandwidth(slowest)}, "
        f"latencies are not emulated); this takes about {seconds:.0f} s"
        + (" and what real attention takes" if real else "")
    )


@contextlib.contextmanager
def start_ranks(fabric: FabricKind, topology: Topology) -> Iterator[Ranks]:
    """The ranks of a fabric, gone when the block is left. Raises `RunError` unless as many run as the topology has."""
    if fabric == "torchrun":
        from runtime.torchrun import join

        with join() as ranks:
            if ranks.world_size != topology.world_size:
                raise RunError(f"{topology.name} has {topology.world_size} ranks, but {ranks.world_size} were started")
            yield ranks
    elif fabric == "local":
        with launch([Placement()] * topology.world_size) as launched:
            yield launched
    else:
        from runtime.fabric import emulate

        with emulate(topology) as built, launch(built.placements) as launched:
            yield launched


def calibrate_ranks(fabric: FabricKind, topology: Topology, ranks: Ranks, say: Say) -> Calibration:
    """What the fabric's links do, from messages between pairs of its ranks; only the process that speaks says so."""
    measure = calibrate_shared_medium if fabric == "local" else calibrate
    return measure(topology, ranks, say if speaks(ranks) else say_nothing)


def speaks(ranks: Ranks) -> bool:
    """Whether this process is to report: the launcher, or rank 0 of a torchrun group."""
    return getattr(ranks, "rank", 0) == 0


@dataclass(frozen=True)
class _Trials:
    """How every schedule is predicted and run: kernel calls are waits at the rate `timed`, or `real`."""

    ranks: Ranks
    work: Work
    options: AttentionOptions
    timed: Compute
    real: bool
    calibrated: Machine
    nominal: Machine
    repeats: int
    transport: str
    say: Say

    def run_all(self, schedules: Sequence[Schedule]) -> Iterator[Run]:
        """The runs of all schedules; where both passes are asked for, after each two of them both together."""
        if self.options.passes != "both":
            yield from map(self.run, schedules)
            return
        for forward, backward in zip(schedules[::2], schedules[1::2], strict=True):
            passes = self.run(forward), self.run(backward)
            yield from (*passes, runs_together(*passes))

    def run(self, schedule: Schedule) -> Run:
        """Predict a schedule, run it, and put both side by side."""
        rate = self._compute_of(schedule)
        nominal = replace(self.nominal, compute=rate)
        prediction = predict_schedule(replace(self.calibrated, compute=rate), schedule, self.work, self.options)
        prediction = replace(prediction, bound_s=bound_s(nominal, schedule, self.work))
        name = label(schedule, self.options)
        self.say(f"running {name}: {self.repeats} times {float(prediction.time_s):.3g} s, and once to warm up")
        waits = None if self.real or rate.flops_per_s is None else float(rate.flops_per_s)
        job = RunSchedule(schedule, self.transport, self.repeats, warm_ups=1, flops_per_s=waits)
        results = self.ranks.perform(job, self._longest_silence_s(schedule, prediction))
        records = [of_rank for of_rank in results if isinstance(of_rank, list)]
        measured = [max(of_rank[repeat].time_s for of_rank in records) for repeat in range(self.repeats)]
        typical = measured.index(statistics.median_low(measured))
        merged = merge_records([of_rank[typical] for of_rank in records], schedule, prediction.topology)
        timeline = replace(merged, schedule=name)
        busy = statistics.mean(record.busy_share for record in records[0])
        nominal_s = simulate(schedule, nominal).time_s
        run = Run(prediction, nominal_s, tuple(measured), timeline, busy, "real" if self.real else "timed")
        self.say(f"{name}: predicted {float(prediction.time_s):.4g} s, measured {run.measured_s:.4g} s")
        return run

    def _compute_of(self, schedule: Schedule) -> Compute:
        """The rate of a schedule's kernel calls; it depends on their shapes, so each schedule's own is measured."""
        if not self.real:
            return self.timed
        name = label(schedule, self.options)
        self.say(f"calibrating the kernels of {name}")
        seconds = self.ranks.perform(MeasureCompute(schedule, _COMPUTE_REPEATS), _slow_compute_s(schedule))
        flops = _flops(schedule)
        rates = [each / s for each, s in zip(flops, seconds, strict=True) if each and isinstance(s, float)]
        rate = statistics.median(rates)
        self.say(f"kernels of {name}: {format_flops(rate)}")
        return Compute(rate)

    def _longest_silence_s(self, schedule: Schedule, prediction: Prediction) -> float:
        """How long a rank may show no progress: far more than an event takes, and time to fill and check blocks.

        A rank may have to wait until others have computed.
        """
        longest = max((float(event.end_s - event.start_s) for event in prediction.timeline.events), default=0.0)
        computing = 2 * float(prediction.compute_s) if isinstance(prediction, LayerPrediction) else 0.0
        return 5.0 + 5 * longest + _filling_s(schedule) + computing + (_slow_compute_s(schedule) if self.real else 0.0)


_COMPUTE_REPEATS = 3


def _flops(schedule: Schedule) -> list[int]:
    """The FLOPs of each rank."""
    assert schedule.task is not None, "a schedule of a layer has a task"
    return rank_flops(schedule.task)


def _filling_s(schedule: Schedule) -> float:
    """Time to fill and check: each part that a rank starts with, where blocks are sums on every rank."""
    return int(schedule.initial.sum(axis=0) @ schedule.block_bytes) / 50e6


def _slow_compute_s(schedule: Schedule) -> float:
    """Longer than a rank needs to draw a layer, and to compute or check its part of it."""
    return 30.0 + _filling_s(schedule) + 2 * max(_flops(schedule)) / SLOWEST_KERNEL_FLOPS_PER_S
