"""A machine as it runs: its links and its launch cost, measured between pairs of ranks, as a machine file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from runtime.calibration import Calibration, ClassFit, Spread
from tasp_lab.calibrate import constant_text
from tasp_lab.catalogue import LAUNCH
from tasp_lab.cli.comparison import Comparison, calibrate_ranks, check_fabric, default_scale, speaks, start_ranks
from tasp_lab.cli.options import FabricKind
from tasp_lab.machine import Constant, Machine
from tasp_lab.quantities import format_bandwidth, format_time
from tasp_lab.rings import Say, say_nothing


def measure(machine: Machine, fabric: FabricKind, scale: float | None = None, say: Say = say_nothing) -> Comparison:
    """Calibrate a machine on real processes, as `tasp_lab.cli.comparison.validate` does, and run nothing on it.

    Raises `RunError` (a rank failed), `FabricError` (no namespaces) and `QuantityError` (a scale that makes no sense).
    """
    check_fabric(scale, fabric)
    topology = machine.topology
    if fabric == "emulated":
        scale = default_scale(topology, math.inf) if scale is None else scale
        topology = topology.scaled(scale)
        say(f"emulating {topology.name} at scale {scale:.3g}; latencies are not emulated")
    with start_ranks(fabric, topology) as ranks:
        return Comparison(fabric, scale or 1.0, calibrate_ranks(fabric, topology, ranks, say), (), speaks(ranks))


def measured_machine(measured: Comparison, date: str) -> Machine:
    """The machine that was found. Its constants, the launch cost among them, say from what: a file of it has them."""
    machine = measured.calibration.machine
    how = f"{measured.fabric} fabric" + (f", scale {measured.scale:.6g}" if measured.fabric == "emulated" else "")
    where = f"on {date}, {how}"
    constants = (_launch(measured.calibration, where), *_of_routes(measured.calibration, where))
    return replace(machine, summary=f"{machine.topology.name} as measured {where}", constants=constants)


def _launch(calibration: Calibration, where: str) -> Constant:
    text = constant_text(LAUNCH, float(calibration.machine.transport.launch_s))
    spreads = ", ".join(between(found.launch_s, format_time) for found in calibration.fits)
    source = f"messages of one byte posted back to back, median; quartiles {spreads or 'none, one rank'}; {where}"
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
    """The pairs of ranks that were measured, for people."""
    return " and ".join(f"{source}->{destination}" for source, destination in found.route_class.pairs)


def between(spread: Spread, format_one: Callable[[float], str]) -> str:
    """The ends of a spread, for people."""
    return f"{format_one(spread.low)} to {format_one(spread.high)}"
