"""Calibration of a fabric's links from point-to-point messages.

Routes of equal nominal bandwidth, latency and number of links form a *class*. One pair of each class is measured in
both directions: messages of several sizes give the bandwidth (the slope of time over bytes by the Theil-Sen estimator,
which is robust to outliers), one-byte messages the sum of launch cost and latency, and one-byte messages posted back to
back the launch cost. The collectives to be predicted are never measured.

On GPUs messages are sent in batches, which cost something per batch and something per message; batches of one to eight
one-byte messages give both. Predictions post the messages of a rank one after another, and latencies overlap. So the
launch of a message is what one more message adds to a batch, and the cost of a batch is part of the latency. Both are
times of the device. What the host takes to post a batch is reported beside: it is hidden while the host runs ahead.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from scipy.stats import theilslopes

from runtime.protocol.jobs import MeasurePair, PairTimes, Ranks
from tasp_lab.core.errors import RunError
from tasp_lab.core.units import Number
from tasp_lab.machines.machine import CommLibrary, Machine
from tasp_lab.topology.graph import Link, SharedCapacity, Topology

MAX_MESSAGE_S = 0.4
"""Target duration of the largest bandwidth message, unless `MAX_MESSAGE_BYTES` limits its size."""

MAX_MESSAGE_BYTES = 64 * 2**20
REPEATS = 3
MAX_ROUNDS = 4
"""Measurements of a class, all of them fitted together, before no bandwidth is found: a busy host may spoil one."""

MAX_SILENCE_S = 10.0
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
    """A class of equivalent routes, represented by `pairs`: one pair and, if in the same class, its reverse."""

    pairs: tuple[tuple[int, int], ...]
    links_per_route: int
    nominal_bandwidth_bytes_per_s: float


@dataclass(frozen=True)
class Posting:
    """The host's time to post a batch: for the batch, and for each of its messages."""

    batch_s: Spread
    message_s: Spread


@dataclass(frozen=True)
class ClassFit(RouteClass):
    """A class of routes with the constants fitted for it; on GPUs with the time of the host."""

    bandwidth_bytes_per_s: Spread
    latency_s: Spread
    launch_s: Spread
    posting: Posting | None = None


@dataclass(frozen=True)
class Calibration:
    """The fits of all classes of a topology, and the resulting machine."""

    fits: tuple[ClassFit, ...]
    machine: Machine


def route_classes(topology: Topology) -> list[RouteClass]:
    """The classes of a topology's routes, shortest routes first; each is represented by its first pair."""
    found: dict[_RouteKey, RouteClass] = {}
    for source, destination in topology.rank_pairs():
        route_key = _route_key(topology, source, destination)
        if route_key not in found:
            back = topology.has_route(destination, source) and _route_key(topology, destination, source) == route_key
            pairs = ((source, destination), (destination, source)) if back else ((source, destination),)
            found[route_key] = RouteClass(pairs, *route_key[:2])
    return [found[route_key] for route_key in sorted(found)]


_RouteKey = tuple[int, float, float]
"""Number of links, nominal bandwidth and nominal latency of a route."""


def _route_key(topology: Topology, source: int, destination: int) -> _RouteKey:
    route = topology.route(source, destination)
    bandwidth = float(min(topology.links[link].bandwidth_bytes_per_s for link in route.links))
    return len(route.links), bandwidth, float(route.latency_s)


def calibrate(topology: Topology, ranks: Ranks, progress: Callable[[str], None] = lambda _: None) -> Calibration:
    """Measure every class of routes of a topology whose bandwidths are already scaled to the fabric."""
    fits = _in_order(topology, [_measure(route_class, ranks, progress) for route_class in route_classes(topology)])
    return Calibration(tuple(fits), Machine(_apply(topology, fits), _comm_library(fits)))


def _in_order(topology: Topology, fits: Sequence[ClassFit]) -> list[ClassFit]:
    """The fits, in which a route is slower than a nominally faster one of as many links.

    Latency decides between routes of as many links. If noise swapped two latencies, the fitted topology would have
    other routes than the one that was measured.
    """
    floor_s: dict[int, float] = {}
    ordered: dict[int, ClassFit] = {}
    for at in sorted(range(len(fits)), key=lambda each: topology.route(*fits[each].pairs[0]).latency_s):
        links, latency = fits[at].links_per_route, fits[at].latency_s
        value = max(latency.value, floor_s.get(links, 0.0))
        floor_s[links] = value + 1e-12
        ordered[at] = replace(fits[at], latency_s=replace(latency, value=value, high=max(value, latency.high)))
    return [ordered[at] for at in range(len(fits))]


def calibrate_shared_medium(
    topology: Topology, ranks: Ranks, progress: Callable[[str], None] = lambda _: None
) -> Calibration:
    """Calibrate processes of one host, where all transfers share its memory and cores.

    The bandwidths of the topology are ignored.
    """
    classes = route_classes(topology)[:1]
    fits = [_measure(each, ranks, progress) for each in classes]
    if not fits:
        return Calibration((), Machine(topology))
    bandwidth, latency = fits[0].bandwidth_bytes_per_s.value, fits[0].latency_s.value
    pairs = permutations(range(topology.world_size), 2)  # no process forwards: each reaches every other by itself
    links = tuple(Link(*pair, bandwidth, latency) for pair in pairs if topology.has_route(*pair))
    memory = SharedCapacity("memory", bandwidth, tuple(link.name for link in links))
    medium = Topology(topology.name, topology.world_size, links, (memory,))
    return Calibration(tuple(fits), Machine(medium, _comm_library(fits)))


def _measure(route_class: RouteClass, ranks: Ranks, progress: Callable[[str], None]) -> ClassFit:
    times: list[PairTimes] = []
    for _ in range(MAX_ROUNDS):
        for source, destination in route_class.pairs:
            progress(f"calibrating {source} to {destination}")
            sizes = _message_sizes(route_class, source, destination, ranks)
            times += _perform(MeasurePair(source, destination, sizes, REPEATS), ranks)
        if _seconds_per_byte(times).low > 0:
            break
    return fit(route_class, times)


def _message_sizes(route_class: RouteClass, source: int, destination: int, ranks: Ranks) -> tuple[int, ...]:
    """Four sizes, each twice the previous, chosen from the duration of a probe, as links may be far from nominal."""
    nominal = route_class.nominal_bandwidth_bytes_per_s
    probe_bytes = max(int(min(nominal * _PROBE_S, MAX_MESSAGE_BYTES / 64)), 1)
    probed = _perform(MeasurePair(source, destination, (probe_bytes,), REPEATS, tiny=2), ranks)
    fastest_s = min(seconds for times in probed for _, seconds in times.answered_s)
    bandwidth = min(nominal, probe_bytes / fastest_s)
    largest_bytes = max(int(min(bandwidth * MAX_MESSAGE_S, MAX_MESSAGE_BYTES)), max(_FRACTIONS))
    return tuple(largest_bytes // fraction for fraction in _FRACTIONS)


def _perform(job: MeasurePair, ranks: Ranks) -> list[PairTimes]:
    return [result for result in ranks.perform(job, MAX_SILENCE_S) if isinstance(result, PairTimes)]


def fit(route_class: RouteClass, times: Sequence[PairTimes]) -> ClassFit:
    """Fit bandwidth, latency and launch cost to the times of both directions together.

    The one-byte answer takes as long as a one-byte message, so it does not affect the slope.
    """
    slope = _seconds_per_byte(times)
    if slope.low <= 0:
        pair = " to ".join(str(rank) for rank in route_class.pairs[0])
        raise RunError(f"calibrating {pair}: larger messages did not take longer, so no bandwidth can be fitted")
    bandwidth = Spread(1 / slope.value, 1 / slope.high, 1 / slope.low)
    batches, posting = [each for direction in times for each in direction.batches], None
    if batches:
        launch = _not_negative(_slope([(each.messages, each.answered_s) for each in batches]))
        message = _not_negative(_slope([(each.messages, each.posted_s) for each in batches]))
        batch = _quartiles([each.posted_s - each.messages * message.value for each in batches])
        posting = Posting(_not_negative(batch), message)
    else:
        launch = _quartiles([seconds for direction in times for seconds in direction.tiny_posted_s])
    one_way_s = [seconds / 2 for direction in times for seconds in direction.tiny_answered_s]
    latency = _not_negative(_quartiles([seconds - launch.value for seconds in one_way_s]))
    return ClassFit(
        **vars(route_class), bandwidth_bytes_per_s=bandwidth, latency_s=latency, launch_s=launch, posting=posting
    )


def _seconds_per_byte(times: Sequence[PairTimes]) -> Spread:
    return _slope([point for direction in times for point in direction.answered_s])


def _slope(points: Sequence[tuple[int, float]]) -> Spread:
    """The slope of times over sizes or counts, by the Theil-Sen estimator."""
    estimate = theilslopes([seconds for _, seconds in points], [each for each, _ in points])
    return Spread(*(float(estimate[position]) for position in (0, 2, 3)))


def _not_negative(spread: Spread) -> Spread:
    return Spread(max(spread.value, 0.0), max(spread.low, 0.0), max(spread.high, 0.0))


def _quartiles(values: Sequence[float]) -> Spread:
    low, middle, high = statistics.quantiles(values, n=4)
    return Spread(middle, low, high)


def _comm_library(fits: Sequence[ClassFit]) -> CommLibrary:
    return CommLibrary("calibrated", statistics.median(fit.launch_s.value for fit in fits) if fits else 0)


def _apply(topology: Topology, fits: Sequence[ClassFit]) -> Topology:
    """The topology with fitted links: each has the efficiency of the first class whose routes use it.

    Classes with fewer links are applied first. The latency of a longer route, minus that already assigned to its links,
    is divided equally among its remaining links.
    """
    route_key = {pair: _route_key(topology, *pair) for pair in topology.rank_pairs()}
    fit_of = {route_key[found.pairs[0]]: found for found in fits}
    assigned: dict[int, tuple[float, float]] = {}
    for pair in sorted(route_key, key=route_key.__getitem__):
        links, found = topology.route(*pair).links, fit_of[route_key[pair]]
        new = [link for link in links if link not in assigned]
        efficiency = found.bandwidth_bytes_per_s.value / found.nominal_bandwidth_bytes_per_s
        remaining_s = found.latency_s.value - sum(assigned[link][1] for link in links if link in assigned)
        assigned.update({link: (efficiency, max(remaining_s, 0.0) / len(new)) for link in new})

    def calibrated(index: int, link: Link) -> Link:
        efficiency, latency_s = assigned.get(index, (1.0, 0.0))
        bandwidth: Number = link.bandwidth_bytes_per_s * efficiency
        return replace(link, bandwidth_bytes_per_s=bandwidth, latency_s=latency_s)

    return topology.map_links(calibrated)


def expected_duration_s(classes: Sequence[RouteClass]) -> float:
    """The approximate duration of `calibrate` for these classes of routes."""
    messages_s = sum(MAX_MESSAGE_S / fraction for fraction in _FRACTIONS) + _PROBE_S
    return sum(len(each.pairs) for each in classes) * REPEATS * messages_s
