"""A machine measured on running ranks: its links and its launch cost, from messages between pairs of ranks."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from runtime.calibration import Calibration, ClassFit, Spread
from tasp_lab.core.choices import BackendKind, FabricKind
from tasp_lab.core.files import write_whole
from tasp_lab.core.progress import ProgressCallback, no_progress
from tasp_lab.core.report import Report
from tasp_lab.core.tables import Part, Table
from tasp_lab.core.units import format_bandwidth, format_time
from tasp_lab.machines.catalogue import LAUNCH, machine_file
from tasp_lab.machines.constants import CONSTANTS
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.parameters import Constant, Parameters
from tasp_lab.prediction.provenance import Provenance, host_environment, machine_inputs, plain
from tasp_lab.validation.validate import (
    Comparison,
    calibrate_ranks,
    check_backend,
    check_fabric,
    default_scale,
    fabric_constants,
    start_ranks,
)


@dataclass(frozen=True, repr=False)
class FabricCalibration(Report):
    """A machine measured on a fabric.

    `is_reporter` is False on the ranks of a torchrun group that leave the output to rank 0.
    """

    measured: Comparison
    machine: Machine
    provenance: Provenance

    @property
    def is_reporter(self) -> bool:
        """Whether this process is to print the result."""
        return self.measured.is_reporter

    def save(self, path: Path | str) -> None:
        """Write the machine as a topology file, ``.json`` or ``.toml``. Raises `OutputError`."""
        write_whole(Path(path), machine_file(self.machine, Path(path).suffix.lower()))

    def to_dict(self) -> dict[str, object]:
        document = self.measured.to_dict()
        return {
            **{name: document[name] for name in ("fabric", "scale", "calibration", "compute")},
            "launch_s": float(self.measured.calibration.machine.comm_library.launch_s),
            "provenance": self.provenance.to_dict(),
        }

    def records(self) -> list[dict[str, object]]:
        """A row per class of routes."""
        return [
            {
                "pairs": pairs_of(fit),
                "links_per_route": fit.route_class.links,
                "nominal_bandwidth_bytes_per_s": fit.route_class.nominal_bandwidth_bytes_per_s,
                "bandwidth_bytes_per_s": fit.bandwidth_bytes_per_s.value,
                "latency_s": fit.latency_s.value,
                "launch_s": fit.launch_s.value,
            }
            for fit in self.measured.calibration.fits
        ]

    def parts(self) -> list[Part]:
        columns = ("measured", "nominal", "bandwidth", "95 %", "latency", "quartiles", "launch", "quartiles")
        rows = []
        for each in self.measured.calibration.fits:
            rate, nominal = each.bandwidth_bytes_per_s, each.route_class.nominal_bandwidth_bytes_per_s
            rates = (format_bandwidth(nominal), format_bandwidth(rate.value), between(rate, format_bandwidth))
            latency, launch = (
                (format_time(spread.value), between(spread, format_time)) for spread in (each.latency_s, each.launch_s)
            )
            rows.append((pairs_of(each), *rates, *latency, *launch))
        return [Table(self.machine.summary, columns, rows)]


def measure_fabric(
    machine: Machine,
    fabric: FabricKind,
    scale: float | None = None,
    progress: ProgressCallback = no_progress,
    backend: BackendKind = "auto",
) -> FabricCalibration:
    """Measure a machine on a fabric; the errors are those of `measure`."""
    measured = measure(machine, fabric, scale, progress, backend)
    provenance = Provenance(
        {"machine": machine_inputs(machine, compute=False), "fabric": fabric, "scale": plain(scale)},
        fabric_constants(measured.calibration, fabric),
        environment=dict(measured.environment) | {"fabric": fabric, "scale": measured.scale},
    )
    return FabricCalibration(measured, measured_machine(measured, datetime.date.today().isoformat()), provenance)


def measure(
    machine: Machine,
    fabric: FabricKind,
    scale: float | None = None,
    progress: ProgressCallback = no_progress,
    backend: BackendKind = "auto",
) -> Comparison:
    """Calibrate a machine on real processes, as `tasp_lab.validation.validate.validate` does, without running
    schedules.

    Raises `RunError` (a rank failed), `FabricError` (no namespaces) and `QuantityError` (an impossible scale).
    """
    check_fabric(scale, fabric)
    check_backend(backend, fabric)
    topology = machine.topology
    if fabric == "emulated":
        scale = default_scale(topology, math.inf) if scale is None else scale
        topology = topology.scaled(scale)
        progress(f"emulating {topology.name} at scale {scale:.3g}; latencies are not emulated")
    with start_ranks(fabric, topology, backend, machine) as ranks:
        calibration = calibrate_ranks(fabric, topology, ranks, progress)
        environment = {**host_environment(), **ranks.environment}
        return Comparison(fabric, scale or 1.0, calibration, (), ranks.is_reporter, environment=environment)


def measured_machine(measured: Comparison, date: str) -> Machine:
    """The measured machine. Its constants, the launch cost among them, state how they were measured."""
    machine = measured.calibration.machine
    how = f"{measured.fabric} fabric" + (f", scale {measured.scale:.6g}" if measured.fabric == "emulated" else "")
    where = f"on {date}, {how}"
    constants = [_launch(measured.calibration, where), *_of_routes(measured.calibration, where)]
    return replace(
        machine, summary=f"{machine.topology.name} as measured {where}", parameters=Parameters.of_constants(constants)
    )


def _launch(calibration: Calibration, where: str) -> Constant:
    text = CONSTANTS[LAUNCH].format(float(calibration.machine.comm_library.launch_s))
    spreads = ", ".join(between(found.launch_s, format_time) for found in calibration.fits)
    how = "messages of one byte posted back to back, median; quartiles"
    if any(found.posting for found in calibration.fits):
        how = "what a message of one byte adds to a batch on the device, slope by Theil and Sen; 95 %"
    source = f"{how} {spreads or 'none, one rank'}; {where}"
    return Constant(LAUNCH, text, source)


def _of_routes(calibration: Calibration, where: str) -> Iterator[Constant]:
    for found in calibration.fits:
        name = f"route of {found.route_class.links} link{'s' * (found.route_class.links > 1)}"
        rate, latency = found.bandwidth_bytes_per_s, found.latency_s
        how = f"messages {pairs_of(found)} of several sizes, slope of time over bytes by Theil and Sen"
        source = f"{how}, 95 % {between(rate, format_bandwidth)}; {where}"
        yield Constant(f"bandwidth of a {name}", format_bandwidth(rate.value), source)
        how = f"messages {pairs_of(found)} of one byte less the launch, median"
        source = f"{how}, quartiles {between(latency, format_time)}; {where}"
        yield Constant(f"latency of a {name}", format_time(latency.value), source)


def pairs_of(found: ClassFit) -> str:
    """The measured pairs of ranks, as text."""
    return " and ".join(f"{source}->{destination}" for source, destination in found.route_class.pairs)


def between(spread: Spread, format_one: Callable[[float], str]) -> str:
    """The ends of a spread, as text."""
    return f"{format_one(spread.low)} to {format_one(spread.high)}"
