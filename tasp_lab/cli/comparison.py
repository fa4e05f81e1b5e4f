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
from typing import Literal

from runtime.calibration import Calibration, calibrate, calibrate_shared_medium, expected_duration_s, route_classes
from runtime.host import usable_cores
from runtime.jobs import Ranks, RunSchedule
from runtime.launcher import launch
from runtime.records import RankRecord, merge_records
from runtime.setup import Placement
from sim.engine import simulate
from tasp_lab.all_gather import all_gather
from tasp_lab.bound import all_gather_bound_s
from tasp_lab.cli.prediction import Prediction, predict_schedule
from tasp_lab.decomposition import Decomposition
from tasp_lab.errors import QuantityError, RunError
from tasp_lab.machine import Machine
from tasp_lab.quantities import Number, format_bandwidth
from tasp_lab.rings import Say, say_nothing
from tasp_lab.schedule import Schedule
from tasp_lab.timeline import Timeline
from tasp_lab.topology import Topology

FabricKind = Literal["emulated", "local", "torchrun"]

LINKS_BYTES_PER_S_PER_CORE = 40e6
"""What one core can forward over all links of an emulated fabric together and stay mostly idle.

Two cores were seen to feed 140 MB/s over 56 links with 3 % loss of speed, and to fail at 220 MB/s.
"""

RUNS_TAKE_S = 30.0
SLOWEST_LINK_BYTES_PER_S = 250e3
"""A packet of 1500 bytes takes 6 ms on such a link."""

_START_S = 5.0


@dataclass(frozen=True)
class Run:
    """A schedule predicted and measured on one fabric; all times in seconds of the fabric's own clock.

    `prediction` follows from the calibration, its bound and `nominal_s` from the nominal machine (see `validate`);
    `measured` are the repeats. `cpu_busy_share` is the share of the time of all cores of the first rank's host that
    was spent, by anybody, while the repeats ran.
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
    shard_bytes: int,
    *,
    decomposition: Decomposition | None = None,
    fabric: FabricKind = "emulated",
    scale: float | None = None,
    repeats: int = 5,
    transport: str = "auto",
    say: Say = say_nothing,
) -> Comparison:
    """Run AllGather on real processes and compare with its prediction.

    Parameters
    ----------
    machine : what to run on; its bandwidths are scaled on the emulated fabric.
    schedules : names of schedules; the first is the one that others are compared with.
    shard_bytes : bytes per rank.
    decomposition : that of ``multi-ring``, if not the topology's own.
    fabric : ``emulated`` (network namespaces), ``local`` (plain processes) or ``torchrun`` (this process is a rank).
    scale : bandwidth of the emulated fabric over that of the machine; chosen by `default_scale` when None.
    repeats : timed repetitions per schedule, after one to warm up.
    transport : how blocks are sent: ``auto``, ``p2p``, ``batched`` or ``all-to-all``.
    say : called with lines of progress.

    The *nominal* machine is the given one; on the emulated fabric it is scaled and has no latency; local processes
    share one medium whatever the machine, so there it is that medium without latency.

    Raises `RunError` (a rank failed), `FabricError` (no namespaces), `QuantityError`, and what `all_gather` raises.
    """
    _check(repeats, scale, fabric)
    built = [all_gather(name, machine.topology, shard_bytes, decomposition) for name in schedules]
    topology = machine.topology
    if fabric == "emulated":
        at_full_speed_s = (repeats + 1) * sum(_nominal_s(schedule, topology, fabric) for schedule in built)
        scale = default_scale(topology, at_full_speed_s) if scale is None else scale
        topology = topology.scaled(scale)
        _announce(say, topology, scale, at_full_speed_s / scale)
    with _ranks(fabric, topology) as ranks:
        if not _speaks(ranks):
            say = say_nothing
        if ranks.world_size != topology.world_size:
            raise RunError(f"{topology.name} has {topology.world_size} ranks, but {ranks.world_size} were started")
        built = ranks.agree(built)
        calibration = (calibrate_shared_medium if fabric == "local" else calibrate)(topology, ranks, say)
        nominal = _nominal(calibration.machine.topology if fabric == "local" else topology, fabric)
        runs = [_run(ranks, each, shard_bytes, calibration.machine, nominal, repeats, transport, say) for each in built]
        return Comparison(fabric, scale or 1.0, calibration, tuple(runs), _speaks(ranks))


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
    """The machine as it is described; without latency where the fabric has none of its own."""
    if fabric == "torchrun":
        return Machine(topology)
    return Machine(topology.map_links(lambda _, link: replace(link, latency_s=0.0)))


def _nominal_s(schedule: Schedule, topology: Topology, fabric: FabricKind) -> float:
    return float(simulate(schedule, _nominal(topology, fabric)).time_s)


def _announce(say: Say, topology: Topology, scale: float, runs_s: float) -> None:
    """Say what is emulated and how long it takes."""
    seconds = _START_S + expected_duration_s(route_classes(topology)) + runs_s
    slowest = min((link.bandwidth_bytes_per_s for link in topology.links), default=0.0)
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


def _speaks(ranks: Ranks) -> bool:
    """Whether this process is to report: the launcher, or rank 0 of a torchrun group."""
    return getattr(ranks, "rank", 0) == 0


def _run(
    ranks: Ranks,
    schedule: Schedule,
    shard_bytes: int,
    calibrated: Machine,
    nominal: Machine,
    repeats: int,
    transport: str,
    say: Say,
) -> Run:
    """Predict a schedule, run it, and put both side by side."""
    prediction = predict_schedule(calibrated, schedule, shard_bytes)
    prediction = replace(prediction, bound_s=all_gather_bound_s(nominal.topology, shard_bytes))
    say(f"running {schedule.name}: {repeats} times {float(prediction.time_s):.3g} s, and once to warm up")
    job = RunSchedule(schedule, transport, repeats, warm_ups=1)
    results = ranks.perform(job, _longest_silence_s(schedule, prediction))
    records = [[record for record in of_rank if isinstance(record, RankRecord)] for of_rank in results if of_rank]
    measured = [max(of_rank[repeat].time_s for of_rank in records) for repeat in range(repeats)]
    typical = measured.index(statistics.median_low(measured))
    timeline = merge_records([of_rank[typical] for of_rank in records], schedule, prediction.topology)
    busy = statistics.mean(record.busy_share for record in records[0])
    run = Run(prediction, simulate(schedule, nominal).time_s, tuple(measured), timeline, busy)
    say(f"{schedule.name}: predicted {float(prediction.time_s):.4g} s, measured {run.measured_s:.4g} s")
    return run


def _longest_silence_s(schedule: Schedule, prediction: Prediction) -> float:
    """How long a rank may show no progress: far more than a transfer takes, and time to fill and check blocks."""
    longest = max((float(event.end_s - event.start_s) for event in prediction.timeline.events), default=0.0)
    return 5.0 + 5 * longest + int(schedule.block_bytes.sum()) / 50e6
