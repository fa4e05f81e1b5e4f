"""Calibration: what a fabric's links do, from messages between pairs of ranks only.

Routes of equal nominal bandwidth, latency and number of links form a *class*. Of each class one pair is measured,
in both directions: messages of several sizes give the bandwidth (the slope of time over bytes, by Theil and Sen's
estimator, which a few disturbed messages cannot pull away), one-byte messages the sum of launch cost and latency,
one-byte messages posted back to back the launch cost. The collectives that are to be predicted are never used.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from scipy.stats import theilslopes

from runtime.jobs import MeasurePair, PairTimes, Ranks
from tasp_lab.errors import RunError
from tasp_lab.machine import Machine, Transport
from tasp_lab.quantities import Number
from tasp_lab.topology import Link, SharedCapacity, Topology

LONGEST_MESSAGE_S = 0.4
"""How long the longest of the messages that give the bandwidth takes; `LARGEST_MESSAGE_BYTES` may cut it short."""

LARGEST_MESSAGE_BYTES = 64 * 2**20
REPEATS = 3
LONGEST_SILENCE_S = 10.0
_FRACTIONS = (8, 4, 2, 1)
_PROBE_S = 0.05


@dataclass(frozen=True)
class Spread:
    """A fitted value with the range of its estimates: 95 % confidence for slopes, quartiles for times."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class RouteClass:
    """Routes alike: `pairs` stand for all of them, the first one and, if it is alike, its reverse."""

    pairs: tuple[tuple[int, int], ...]
    links: int
    nominal_bandwidth_bytes_per_s: float
    nominal_latency_s: float


@dataclass(frozen=True)
class ClassFit:
    """What was measured on a class of routes."""

    route_class: RouteClass
    bandwidth_bytes_per_s: Spread
    latency_s: Spread
    launch_s: Spread


@dataclass(frozen=True)
class Calibration:
    """All classes of a topology, and the machine that follows from them."""

    fits: tuple[ClassFit, ...]
    machine: Machine


def route_classes(topology: Topology) -> list[RouteClass]:
    """The classes of a topology's routes, the shortest first; each is represented by its first pair."""
    found: dict[_Likeness, RouteClass] = {}
    for source, destination in topology.rank_pairs():
        likeness = _likeness(topology, source, destination)
        if likeness not in found:
            back = topology.has_route(destination, source) and _likeness(topology, destination, source) == likeness
            pairs = ((source, destination), (destination, source)) if back else ((source, destination),)
            found[likeness] = RouteClass(pairs, *likeness)
    return [found[likeness] for likeness in sorted(found)]


_Likeness = tuple[int, float, float]
"""Number of links, nominal bandwidth and nominal latency of a route."""


def _likeness(topology: Topology, source: int, destination: int) -> _Likeness:
    route = topology.route(source, destination)
    bandwidth = float(min(topology.links[link].bandwidth_bytes_per_s for link in route.links))
    return len(route.links), bandwidth, float(route.latency_s)


def calibrate(topology: Topology, ranks: Ranks, progress: Callable[[str], None] = lambda _: None) -> Calibration:
    """Measure every class of routes of a topology whose bandwidths are those of the fabric's own clock."""
    fits = [_measure(route_class, ranks, progress) for route_class in route_classes(topology)]
    return Calibration(tuple(fits), Machine(_apply(topology, fits), _transport(fits)))


def calibrate_shared_medium(
    topology: Topology, ranks: Ranks, progress: Callable[[str], None] = lambda _: None
) -> Calibration:
    """Calibrate processes of one machine: whatever the topology, all transfers share the machine's memory and cores.

    The topology's bandwidths say nothing here.
    """
    classes = route_classes(topology)[:1]
    fits = [_measure(each, ranks, progress) for each in classes]
    if not fits:
        return Calibration((), Machine(topology))
    bandwidth, latency = fits[0].bandwidth_bytes_per_s.value, fits[0].latency_s.value
    links = tuple(Link(source, destination, bandwidth, latency) for source, destination in topology.rank_pairs())
    memory = SharedCapacity("memory", bandwidth, tuple(link.name for link in links))
    medium = Topology(topology.name, topology.world_size, links, (memory,))
    return Calibration(tuple(fits), Machine(medium, _transport(fits)))


def _measure(route_class: RouteClass, ranks: Ranks, progress: Callable[[str], None]) -> ClassFit:
    times: list[PairTimes] = []
    for source, destination in route_class.pairs:
        progress(f"calibrating {source} to {destination}")
        sizes = _message_sizes(route_class, source, destination, ranks)
        times += _perform(MeasurePair(source, destination, sizes, REPEATS), ranks)
    return fit(route_class, times)


def _message_sizes(route_class: RouteClass, source: int, destination: int, ranks: Ranks) -> tuple[int, ...]:
    """Four sizes, each twice the one before, chosen by how long a probe takes: links may be far from nominal."""
    nominal = route_class.nominal_bandwidth_bytes_per_s
    probe_bytes = max(int(min(nominal * _PROBE_S, LARGEST_MESSAGE_BYTES / 64)), 1)
    probed = _perform(MeasurePair(source, destination, (probe_bytes,), REPEATS, tiny=2), ranks)
    fastest_s = min(seconds for times in probed for _, seconds in times.answered_s)
    bandwidth = min(nominal, probe_bytes / fastest_s)
    largest_bytes = max(int(min(bandwidth * LONGEST_MESSAGE_S, LARGEST_MESSAGE_BYTES)), max(_FRACTIONS))
    return tuple(largest_bytes // fraction for fraction in _FRACTIONS)


def _perform(job: MeasurePair, ranks: Ranks) -> list[PairTimes]:
    return [result for result in ranks.perform(job, LONGEST_SILENCE_S) if isinstance(result, PairTimes)]


def fit(route_class: RouteClass, times: Sequence[PairTimes]) -> ClassFit:
    """Fit bandwidth, latency and launch cost to what the sources measured, both directions together.

    The one-byte answer takes as long as a one-byte message; it does not touch the slope.
    """
    points = [point for direction in times for point in direction.answered_s]
    estimate = theilslopes([seconds for _, seconds in points], [size for size, _ in points])
    slope, low, high = (float(estimate[position]) for position in (0, 2, 3))
    if low <= 0:
        pair = " to ".join(str(rank) for rank in route_class.pairs[0])
        raise RunError(f"calibrating {pair}: larger messages took no longer, so there is no bandwidth to be found")
    tiny = [seconds / 2 for direction in times for seconds in direction.tiny_answered_s]
    launch = _quartiles([seconds for direction in times for seconds in direction.tiny_posted_s])
    one_way = _quartiles(tiny)
    latency = Spread(*(max(value - launch.value, 0.0) for value in (one_way.value, one_way.low, one_way.high)))
    return ClassFit(route_class, Spread(1 / slope, 1 / high, 1 / low), latency, launch)


def _quartiles(values: Sequence[float]) -> Spread:
    low, middle, high = statistics.quantiles(values, n=4)
    return Spread(middle, low, high)


def _transport(fits: Sequence[ClassFit]) -> Transport:
    return Transport("calibrated", statistics.median(fit.launch_s.value for fit in fits) if fits else 0)


def _apply(topology: Topology, fits: Sequence[ClassFit]) -> Topology:
    """Give every link the efficiency of the first class whose routes pass it, and what latency that class has left.

    Classes with fewer links come first. A longer route shares the latency that its measured class adds to what its
    links have already been given among the links that are its own.
    """
    likeness = {pair: _likeness(topology, *pair) for pair in topology.rank_pairs()}
    fit_of = {likeness[found.route_class.pairs[0]]: found for found in fits}
    given: dict[int, tuple[float, float]] = {}
    for pair in sorted(likeness, key=likeness.__getitem__):
        _give(given, topology.route(*pair).links, fit_of[likeness[pair]])

    def calibrated(index: int, link: Link) -> Link:
        efficiency, latency_s = given.get(index, (1.0, 0.0))
        bandwidth: Number = link.bandwidth_bytes_per_s * efficiency
        return replace(link, bandwidth_bytes_per_s=bandwidth, latency_s=latency_s)

    return topology.map_links(calibrated)


def _give(given: dict[int, tuple[float, float]], links: Sequence[int], found: ClassFit) -> None:
    """Give the links of a route that have nothing yet their efficiency and latency."""
    new = [link for link in links if link not in given]
    efficiency = found.bandwidth_bytes_per_s.value / found.route_class.nominal_bandwidth_bytes_per_s
    left_s = found.latency_s.value - sum(given[link][1] for link in links if link in given)
    given.update({link: (efficiency, max(left_s, 0.0) / len(new)) for link in new})


def expected_duration_s(classes: Sequence[RouteClass]) -> float:
    """About how long `calibrate` takes for these classes of routes."""
    messages_s = sum(LONGEST_MESSAGE_S / fraction for fraction in _FRACTIONS) + _PROBE_S
    return sum(len(each.pairs) for each in classes) * REPEATS * messages_s
