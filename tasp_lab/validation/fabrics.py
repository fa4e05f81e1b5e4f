"""Where ranks run: starting them, calibrating their links, and whether their times can be compared with predictions.

A *fabric* is ``emulated`` (network namespaces with shaped links), ``local`` (plain processes on one host) or
``torchrun`` (this process is one of the ranks)::

    with start_ranks("local", full_mesh(4)) as ranks:
        calibration = calibrate_ranks("local", full_mesh(4), ranks, print)
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from typing import Literal

from runtime.calibration import (
    Calibration,
    ClassFit,
    Spread,
    calibrate,
    calibrate_shared_medium,
    expected_duration_s,
    route_classes,
)
from runtime.linux import host_environment
from runtime.protocol.jobs import RankLocation, Ranks
from runtime.ranks.launcher import launch
from tasp_lab.core.choices import WHAT_IF_DTYPE, BackendKind, FabricKind
from tasp_lab.core.errors import QuantityError, RunError
from tasp_lab.core.process import usable_cores
from tasp_lab.core.progress import ProgressCallback, no_progress
from tasp_lab.core.tables import Table
from tasp_lab.core.units import format_bandwidth, format_time
from tasp_lab.machines.constants import CONSTANTS
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.machine_file import LAUNCH, machine_file
from tasp_lab.machines.overrides import LAYER
from tasp_lab.machines.parameters import Constant, Parameters
from tasp_lab.measure.fit.acceptance import Fitted
from tasp_lab.prediction.provenance import Provenance, machine_constants, machine_inputs, plain
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Work, Workload

LINKS_BYTES_PER_S_PER_CORE = 40e6
"""The bytes per second that one core can forward over all links of an emulated fabric and stay mostly idle.

Two cores carried 140 MB/s over 56 links with 3 % loss of speed, and failed at 220 MB/s.
"""


RUNS_TAKE_S, _START_S = 30.0, 5.0

SLOWEST_LINK_BYTES_PER_S = 250e3
"""A packet of 1500 bytes takes 6 ms on such a link."""


def default_scale(topology: Topology, nominal_s: float) -> float:
    """The scale for an emulated fabric on which all runs together would take `nominal_s` at full speed.

    At most what this machine's cores can feed all links at once. Below that, slow enough for the runs to take
    `RUNS_TAKE_S` together, since a step must be long beside its fixed cost; but no link slower than
    `SLOWEST_LINK_BYTES_PER_S`.

    >>> from tasp_lab.topology.builders import full_mesh
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


def check_fabric(fabric: FabricKind, scale: float | None, backend: BackendKind = "auto", repeats: int = 1) -> None:
    """Raise `QuantityError` for what a fabric does not have, and `RunError` for a missing package."""
    if repeats < 1:
        raise QuantityError(f"repeat: {repeats}, expected 1 or more")
    if scale is not None and not 0 < scale <= 1:
        raise QuantityError(f"scale: {scale}, expected more than 0 and at most 1")
    if scale is not None and fabric != "emulated":
        raise QuantityError(f"scale: only the emulated fabric is scaled, not {fabric!r}")
    for module in ("torch", "pyroute2") if fabric == "emulated" else ("torch",):
        if importlib.util.find_spec(module) is None:
            raise RunError(f"running schedules needs {module}, which is not installed: pip install 'tasp-lab[runtime]'")
    if backend == "nccl" and fabric != "torchrun":  # its processes share no GPUs
        raise QuantityError(f"backend: the {fabric} fabric has gloo, expected nccl with the fabric torchrun only")


def check_work(
    work: Work, rate: Rate, fabric: FabricKind, kernel: str | None = None, overrides: Sequence[str] = ()
) -> None:
    """Raise `QuantityError` for a layer that is only predicted, and for settings that do not determine a run."""
    real, of_layer = is_real(work, rate, fabric), isinstance(work, Workload)
    if isinstance(work, Workload) and work.dtype == WHAT_IF_DTYPE:
        raise QuantityError(f"dtype {work.dtype!r}: is predicted only, expected one of bf16, fp16, fp32 on a fabric")
    if isinstance(work, Workload) and work.kind == "hybrid" and real:  # nothing makes inputs of layers of results
        raise QuantityError(
            f"compute: real kernels of a hybrid on the {fabric} fabric, expected timed:RATE; a model with such layers "
            "runs them: python -m experiments.train_gpt --layers"
        )
    if kernel is not None and (not of_layer or fabric != "emulated"):
        raise QuantityError(
            f"kernel {kernel!r}: the {fabric} fabric executes {'kernels' if of_layer else 'none'}, "
            "expected an attention layer on the emulated fabric, which waits as long as the kernel takes"
        )
    for each in (each for each in overrides if not each.startswith(LAYER)):
        if fabric == "local":
            raise QuantityError(f"override {each!r}: local processes share one medium, whatever the machine is")
        executed = rate == "real" or (rate is None and fabric != "emulated")
        if (executed and ".compute" in each) or (each.startswith("compute") and (executed or rate is not None)):
            raise QuantityError(f"override {each!r}: ranks do not compute at the machine's rate here, expected none")


Rate = float | Literal["real"] | None
"""Of kernel calls: FLOP/s of timed waits, executed kernels, or what is usual on a fabric."""


def is_real(work: Work, rate: Rate, fabric: FabricKind) -> bool:
    """Whether kernels are executed."""
    return isinstance(work, Workload) and (rate == "real" or (rate is None and fabric != "emulated"))


def expected_fabric_s(topology: Topology, runs_s: float) -> float:
    """The expected duration of runs on an emulated fabric, with its start and calibration."""
    return _START_S + expected_duration_s(route_classes(topology)) + runs_s


@contextlib.contextmanager
def start_ranks(
    fabric: FabricKind, topology: Topology, backend: BackendKind = "auto", machine: Machine | None = None
) -> Iterator[Ranks]:
    """Start the ranks of a fabric, and end them on exit; `machine` is the one that they stand for.

    Raises `RunError` for another number than the topology's, and for a backend that cannot be used.
    """
    if fabric == "torchrun":
        from runtime.ranks.torchrun import join, started_ranks

        started = started_ranks()
        if started != topology.world_size:  # before joining: a rank that left a group could fail others on their way in
            raise RunError(f"{topology.name} has {topology.world_size} ranks, but {started} were started")
        with join(backend, topology.name if machine is not None and machine.has_accelerators else None) as ranks:
            yield ranks
    elif fabric == "local":
        with launch([RankLocation()] * topology.world_size) as launched:
            yield launched
    else:
        from runtime.fabric.emulated import emulate

        with emulate(topology) as built, launch(built) as launched:
            yield launched


def calibrate_ranks(fabric: FabricKind, topology: Topology, ranks: Ranks, progress: ProgressCallback) -> Calibration:
    """Calibrate the links of a fabric by messages between pairs of its ranks; only the reporter shows progress."""
    measure = calibrate_shared_medium if fabric == "local" else calibrate
    return measure(topology, ranks, progress if ranks.is_reporter else no_progress)


# Whether ranks share cores, so that a prediction that gives each a core of its own is none.
#
# Kernel calls on a host are predicted by a rate of each rank, and messages of local processes by one shared medium.
# Both need cores. With fewer cores than ranks a call lasts as long as other ranks, their copies and their threads of
# communication let it, which depends on what runs at the same moment and on the scheduler. No engine models that.


def why_not_comparable(
    fabric: FabricKind, ranks: int, real_kernels: bool, environment: Mapping[str, object]
) -> str | None:
    """The reason why times measured on a fabric cannot be compared with predictions, or None if they can.

    On the emulated fabric only real kernels need cores; waits and shaped links hardly do. Under torchrun the ranks of
    this host count (``LOCAL_WORLD_SIZE``).
    """
    if environment.get("device", "cpu") != "cpu" or (fabric == "emulated" and not real_kernels):
        return None
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) if fabric == "torchrun" else ranks
    cores = usable_cores()
    if here <= cores:
        return None
    what = "kernels and messages" if real_kernels else "messages"
    return f"{here} ranks share {cores} core{'s' * (cores != 1)} for their {what}, which predictions do not model"


def fit_document(fit: ClassFit) -> dict[str, object]:
    """The fit of a class of routes as JSON; `posting` is the host's time to post a batch."""
    return {name: value for name, value in asdict(fit).items() if value is not None}


def measure_fabric(
    machine: Machine,
    fabric: FabricKind,
    scale: float | None = None,
    progress: ProgressCallback = no_progress,
    backend: BackendKind = "auto",
) -> Fitted[Machine]:
    """Calibrate a machine on real processes, as `tasp_lab.validation.validate.validate` does before it runs schedules.

    The constants of the measured machine, the launch cost among them, state how they were measured.

    Raises `RunError` (a rank failed), `FabricError` (no namespaces) and `QuantityError` (an impossible scale).
    """
    check_fabric(fabric, scale, backend)
    inputs = {"machine": machine_inputs(machine, compute=False), "fabric": fabric, "scale": plain(scale)}
    topology = machine.topology
    if fabric == "emulated":
        scale = default_scale(topology, math.inf) if scale is None else scale
        topology = topology.scaled(scale)
        progress(f"emulating {topology.name} at scale {scale:.3g}; latencies are not emulated")
    with start_ranks(fabric, topology, backend, machine) as ranks:
        calibration = calibrate_ranks(fabric, topology, ranks, progress)
        environment = {**host_environment(), **ranks.environment, "fabric": fabric, "scale": scale or 1.0}
        is_reporter = ranks.is_reporter
    how = f"{fabric} fabric" + (f", scale {scale or 1.0:.6g}" if fabric == "emulated" else "")
    measured = measured_machine(calibration, f"on {datetime.date.today().isoformat()}, {how}")
    provenance = Provenance(inputs, machine_constants(measured.parameters.values()), environment=environment)
    documents = list(map(fit_document, calibration.fits))
    document = {
        "fabric": fabric, "scale": scale or 1.0, "calibration": documents, "compute": None,
        "launch_s": float(measured.comm_library.launch_s), "provenance": provenance.to_dict(),
    }  # fmt: skip
    columns = ("measured", "nominal", "bandwidth", "95 %", "latency", "quartiles", "launch", "quartiles")
    cells = []
    for fit in calibration.fits:
        rate = fit.bandwidth_bytes_per_s
        rates = (fit.nominal_bandwidth_bytes_per_s, rate.value)
        times = ((format_time(each.value), _ends(each, format_time)) for each in (fit.latency_s, fit.launch_s))
        cells.append([_pairs(fit), *map(format_bandwidth, rates), _ends(rate, format_bandwidth), *chain(*times)])
    rows = [
        {name: value["value"] if isinstance(value, dict) else value for name, value in found.items()
         if name != "posting"} | {"pairs": _pairs(fit)}
        for fit, found in zip(calibration.fits, documents, strict=True)
    ]  # fmt: skip
    return Fitted(
        document, rows, [Table(measured.summary, columns, cells)], measured,
        lambda ending: machine_file(measured, ending), is_reporter=is_reporter,
    )  # fmt: skip


def measured_machine(calibration: Calibration, where: str) -> Machine:
    """The machine that was measured, with constants whose sources state how, and `where`: a date and a fabric."""
    how = "messages of one byte posted back to back, median; quartiles"
    if any(found.posting for found in calibration.fits):
        how = "what a message of one byte adds to a batch on the device, slope by Theil and Sen; 95 %"
    spreads = ", ".join(_ends(found.launch_s, format_time) for found in calibration.fits) or "none, one rank"
    launch = CONSTANTS[LAUNCH].format(float(calibration.machine.comm_library.launch_s))
    constants = [Constant(LAUNCH, launch, f"{how} {spreads}; {where}")]
    for found in calibration.fits:
        route = f"a route of {found.links_per_route} link{'s' * (found.links_per_route > 1)}"
        rate, latency, messages = found.bandwidth_bytes_per_s, found.latency_s, f"messages {_pairs(found)}"
        how = f"of several sizes, slope of time over bytes by Theil and Sen, 95 % {_ends(rate, format_bandwidth)}"
        constants.append(Constant(f"bandwidth of {route}", format_bandwidth(rate.value), f"{messages} {how}; {where}"))
        how = f"of one byte less the launch, median, quartiles {_ends(latency, format_time)}"
        constants.append(Constant(f"latency of {route}", format_time(latency.value), f"{messages} {how}; {where}"))
    summary = f"{calibration.machine.topology.name} as measured {where}"
    return replace(calibration.machine, summary=summary, parameters=Parameters.of_constants(constants))


def _pairs(fit: ClassFit) -> str:
    """The measured pairs of ranks, as text."""
    return " and ".join(f"{source}->{destination}" for source, destination in fit.pairs)


def _ends(spread: Spread, format_one: Callable[[float], str]) -> str:
    """The ends of a spread, as text."""
    return f"{format_one(spread.low)} to {format_one(spread.high)}"
