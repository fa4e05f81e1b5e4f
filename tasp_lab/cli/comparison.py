"""Prediction against measurement: the place where both engines meet.

`predict` asks the simulator. `validate` starts real ranks on a fabric, calibrates it point to point, predicts each
schedule from the calibration, executes the very same schedule, and puts the two side by side.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from runtime.calibration import Calibration, calibrate, calibrate_shared_medium, expected_duration_s, route_classes
from runtime.jobs import Ranks, RunSchedule
from runtime.launcher import launch
from runtime.records import RankRecord, merge_records
from runtime.setup import Placement
from sim.engine import simulate
from tasp_lab.all_gather import all_gather
from tasp_lab.bound import all_gather_bound_s, busbw_bytes_per_s
from tasp_lab.errors import QuantityError, RunError
from tasp_lab.machine import Machine
from tasp_lab.quantities import Number, format_bandwidth, format_time
from tasp_lab.schedule import Schedule
from tasp_lab.timeline import Timeline
from tasp_lab.topology import Topology

FabricKind = Literal["emulated", "local", "torchrun"]
Say = Callable[[str], None]


def _say_nothing(_: str) -> None:
    pass


def _speaks(ranks: Ranks) -> bool:
    """Whether this process is to report: the launcher, or rank 0 of a torchrun group."""
    return getattr(ranks, "rank", 0) == 0


LINKS_BYTES_PER_S_PER_CORE = 40e6
"""What one core can forward over all links of an emulated fabric together and stay mostly idle.

Two cores were seen to feed 140 MB/s over 56 links with 3 % loss of speed, and to fail at 220 MB/s.
"""

MANY_TRANSFERS, TRANSFERS_PER_S = 1_000_000, 100_000
"""From how many transfers on a simulation takes long, and about how many the engine simulates per second."""

_START_S = 5.0


@dataclass(frozen=True)
class Prediction:
    """A schedule on a machine: times in seconds, `timeline` for the details."""

    schedule: str
    topology: str
    world_size: int
    shard_bytes: int
    time_s: Number
    bound_s: Number
    timeline: Timeline

    @property
    def busbw_bytes_per_s(self) -> float:
        """Bus bandwidth as nccl-tests defines it."""
        return busbw_bytes_per_s(self.world_size, self.shard_bytes, self.time_s)


@dataclass(frozen=True)
class Run:
    """A schedule predicted and measured on one fabric; all times in seconds of the fabric's own clock.

    `prediction` follows from the calibration, `nominal_s` from the scaled bandwidths without latency; `measured`
    are the repeats. `cpu_busy_share` is the share of all cores' time that was spent while they ran.
    """

    prediction: Prediction
    nominal_s: Number
    measured: tuple[float, ...]
    measured_timeline: Timeline
    cpu_busy_share: float

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


def predict(
    machine: Machine, schedules: Sequence[str], shard_bytes: int, *, say: Say = _say_nothing
) -> list[Prediction]:
    """Predict AllGather of `shard_bytes` per rank by each of the named schedules; `say` is told of long ones.

    >>> from tasp_lab.catalogue import load_machine
    >>> [round(p.time_s * 1e6) for p in predict(load_machine("full-mesh:8"), ["ring", "multi-ring"], 2**20)]
    [154, 28]
    """
    predictions = []
    for name in schedules:
        schedule = all_gather(name, machine.topology, shard_bytes)
        if schedule.transfers > MANY_TRANSFERS:
            seconds = schedule.transfers / TRANSFERS_PER_S
            say(f"simulating {schedule.transfers:,} transfers of {name}, about {format_time(seconds)}")
        predictions.append(_predict(machine, schedule, shard_bytes))
    return predictions


def _predict(machine: Machine, schedule: Schedule, shard_bytes: int) -> Prediction:
    timeline = simulate(schedule, machine)
    bound = all_gather_bound_s(machine.topology, shard_bytes)
    topology = machine.topology
    return Prediction(schedule.name, topology.name, topology.world_size, shard_bytes, timeline.time_s, bound, timeline)


def default_scale(topology: Topology) -> float:
    """The scale at which this machine's cores can feed all links of an emulated fabric at once; at most 1."""
    total = sum(float(link.bandwidth_bytes_per_s) for link in topology.links)
    return min(1.0, LINKS_BYTES_PER_S_PER_CORE * usable_cores() / total) if total else 1.0


def usable_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def validate(
    machine: Machine,
    schedules: Sequence[str],
    shard_bytes: int,
    *,
    fabric: FabricKind = "emulated",
    scale: float | None = None,
    repeats: int = 5,
    transport: str = "p2p",
    say: Say = _say_nothing,
) -> Comparison:
    """Run the schedules on real processes and compare with their prediction.

    Parameters
    ----------
    machine : what to run on; its bandwidths are scaled on the emulated fabric.
    schedules : names of schedules; the first is the one that others are compared with.
    shard_bytes : bytes per rank.
    fabric : ``emulated`` (network namespaces), ``local`` (plain processes) or ``torchrun`` (this process is a rank).
    scale : bandwidth of the emulated fabric over that of the machine; chosen by `default_scale` when None.
    repeats : timed repetitions per schedule.
    transport : how blocks are sent: ``p2p``, ``batched`` or ``all-to-all``.
    say : called with lines of progress.

    Raises `RunError` (a rank failed), `FabricError` (no namespaces), `QuantityError`, and what `all_gather` raises.
    """
    _check(repeats, scale, fabric)
    if scale is None:
        scale = default_scale(machine.topology) if fabric == "emulated" else 1.0
    topology = machine.topology.scaled(scale) if fabric == "emulated" else machine.topology
    built = [all_gather(name, topology, shard_bytes) for name in schedules]
    nominal = [float(simulate(schedule, _nominal(topology, fabric)).time_s) for schedule in built]
    _announce(say, topology, fabric, scale, nominal, repeats)
    with _ranks(fabric, topology) as ranks:
        if not _speaks(ranks):
            say = _say_nothing
        say(f"ranks up: {ranks.world_size}")
        if ranks.world_size != topology.world_size:
            raise RunError(f"{topology.name} has {topology.world_size} ranks, but {ranks.world_size} were started")
        calibration = (calibrate_shared_medium if fabric == "local" else calibrate)(topology, ranks, say)
        runs: list[Run] = []
        for schedule, nominal_s in zip(built, nominal, strict=True):
            prediction = _predict(calibration.machine, schedule, shard_bytes)
            prediction = replace(
                prediction, bound_s=all_gather_bound_s(_nominal(topology, fabric).topology, shard_bytes)
            )
            say(f"running {schedule.name}: {repeats} times {float(prediction.time_s):.3g} s, and once to warm up")
            runs.append(_run(ranks, schedule, prediction, nominal_s, repeats, transport))
            say(f"{schedule.name}: predicted {float(prediction.time_s):.4g} s, measured {runs[-1].measured_s:.4g} s")
        return Comparison(fabric, scale, calibration, tuple(runs), _speaks(ranks))


def _check(repeats: int, scale: float | None, fabric: FabricKind) -> None:
    if repeats < 1:
        raise QuantityError(f"repeat: {repeats}, expected 1 or more")
    if scale is not None and not 0 < scale <= 1:
        raise QuantityError(f"scale: {scale}, expected more than 0 and at most 1")
    if scale is not None and fabric != "emulated":
        raise QuantityError(f"scale: only the emulated fabric is scaled, not {fabric!r}")
    for module in ("torch", "pyroute2") if fabric == "emulated" else ("torch",):
        if importlib.util.find_spec(module) is None:
            raise RunError(f"running schedules needs {module}, which is not installed: pip install 'tasp-lab[runtime]'")


def _nominal(topology: Topology, fabric: FabricKind) -> Machine:
    """The machine as it is described. The emulated fabric has no latency of its own."""
    if fabric != "emulated":
        return Machine(topology)
    return Machine(topology.map_links(lambda _, link: replace(link, latency_s=0.0)))


def _announce(
    say: Say, topology: Topology, fabric: FabricKind, scale: float, nominal: Sequence[float], repeats: int
) -> None:
    if fabric != "emulated":
        return
    slowest = min((link.bandwidth_bytes_per_s for link in topology.links), default=0.0)
    seconds = _START_S + expected_duration_s(len(route_classes(topology))) + (repeats + 1) * sum(nominal)
    say(
        f"emulating {topology.name} at scale {scale:.3g} (slowest link {format_bandwidth(slowest)}, "
        f"latencies are not emulated); this takes about {seconds:.0f} s"
    )


@contextlib.contextmanager
def _ranks(fabric: FabricKind, topology: Topology) -> Iterator[Ranks]:
    """The ranks of a fabric, gone when the block is left."""
    if fabric == "torchrun":
        from runtime.torchrun import join

        with join() as ranks:
            yield ranks
    elif fabric == "local":
        with launch([Placement()] * topology.world_size) as launched:
            yield launched
    else:
        from runtime.fabric import emulate

        with emulate(topology) as built, launch(built.placements) as launched:
            yield launched


def _run(
    ranks: Ranks, schedule: Schedule, prediction: Prediction, nominal_s: float, repeats: int, transport: str
) -> Run:
    busy_before = _cpu_seconds()
    job = RunSchedule(schedule, transport, repeats, warm_ups=1)
    results = ranks.perform(job, _longest_silence_s(schedule, prediction))
    busy_after = _cpu_seconds()
    records = [[record for record in of_rank if isinstance(record, RankRecord)] for of_rank in results if of_rank]
    measured = [max(of_rank[repeat].time_s for of_rank in records) for repeat in range(repeats)]
    typical = measured.index(statistics.median_low(measured))
    timeline = merge_records([of_rank[typical] for of_rank in records], schedule, prediction.topology)
    busy = (busy_after[0] - busy_before[0]) / max(busy_after[1] - busy_before[1], 1e-9)
    return Run(prediction, nominal_s, tuple(measured), timeline, busy)


def _longest_silence_s(schedule: Schedule, prediction: Prediction) -> float:
    """How long a rank may show no progress: far more than a transfer takes, and time to fill and check blocks."""
    longest = max((float(event.end_s - event.start_s) for event in prediction.timeline.events), default=0.0)
    return 5.0 + 5 * longest + int(schedule.block_bytes.sum()) / 50e6


def _cpu_seconds() -> tuple[float, float]:
    """Ticks that all cores of this machine were busy, and all their ticks, since it started; zeros without Linux."""
    if not os.path.exists("/proc/stat"):
        return 0.0, 0.0
    with open("/proc/stat") as stream:
        ticks = [int(value) for value in stream.readline().split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)
