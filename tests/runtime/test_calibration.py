from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.calibration import MAX_ROUNDS, RouteClass, calibrate, calibrate_shared_medium, fit, route_classes
from runtime.protocol.jobs import Job, MeasurePair, PairTimes, Result, Value
from tasp_lab.core.errors import RunError
from tasp_lab.topology.builders import full_mesh, nodes, ring, switch
from tasp_lab.topology.graph import Forwarding, Link, Topology

LAUNCH_S, LATENCY_S, CREDIT_S = 1e-5, 2e-4, 1e-4


def pair_times(job: MeasurePair, bandwidth_bytes_per_s: float, latency_s: float = LATENCY_S) -> PairTimes:
    """What a pair would measure on a link of this bandwidth whose token bucket gives a credit of 0.1 ms."""
    one_way = LAUNCH_S + latency_s
    large = [(size, 2 * one_way + size / bandwidth_bytes_per_s - CREDIT_S) for size in job.sizes_bytes] * job.repeats
    return PairTimes(tuple(large), (2 * one_way,) * job.tiny, (LAUNCH_S,) * job.tiny)


class FakeRanks:
    """Ranks whose links are slower than nominal by a factor that depends on the route."""

    is_reporter = True

    def __init__(self, topology: Topology, efficiency: dict[int, float]) -> None:
        self.world_size, self._topology, self._efficiency = topology.world_size, topology, efficiency

    def agree(self, value: Value) -> Value:
        return value

    def perform(self, job: Job, longest_silence_s: float) -> list[Result]:
        assert isinstance(job, MeasurePair), "the collectives are never used to calibrate"
        route = self._topology.route(job.source, job.destination)
        nominal = min(float(self._topology.links[link].bandwidth_bytes_per_s) for link in route.links)
        results: list[Result] = [None] * self.world_size
        results[job.source] = pair_times(job, nominal * self._efficiency[len(route.links)])
        return results


@given(st.floats(1e3, 1e10))
def test_a_fit_recovers_the_link(bandwidth_bytes_per_s: float) -> None:
    """The bucket's credit and the answer's time shift all messages alike, so they do not touch the slope."""
    sizes = tuple(int(bandwidth_bytes_per_s * seconds) for seconds in (0.05, 0.1, 0.2, 0.4))
    job = MeasurePair(0, 1, sizes, 3)
    route_class = RouteClass(((0, 1), (1, 0)), 1, bandwidth_bytes_per_s)
    found = fit(route_class, [pair_times(job, bandwidth_bytes_per_s)] * 2)
    assert found.bandwidth_bytes_per_s.value == pytest.approx(bandwidth_bytes_per_s, rel=1e-6)
    assert found.latency_s.value == pytest.approx(LATENCY_S)
    assert found.launch_s.value == pytest.approx(LAUNCH_S)
    assert found.bandwidth_bytes_per_s.low <= found.bandwidth_bytes_per_s.value <= found.bandwidth_bytes_per_s.high


def test_classes_of_routes() -> None:
    assert [c.pairs for c in route_classes(full_mesh(4))] == [((0, 1), (1, 0))]
    assert [c.links_per_route for c in route_classes(switch(4))] == [2]
    assert [c.pairs[0] for c in route_classes(nodes(2, 4))] == [(0, 1), (0, 4)]
    assert [c.links_per_route for c in route_classes(nodes(2, 4, "full-mesh", "rails"))] == [1, 2, 4]


def test_only_routes_that_exist_are_measured() -> None:
    """A directed ring has no way back, and a link that is slower one way is a class of its own."""
    assert [c.pairs for c in route_classes(ring(4))] == [((0, 1),)]
    assert len(calibrate(ring(4), FakeRanks(ring(4), {1: 1.0})).fits) == 1
    lopsided = Topology("lopsided", 2, (Link(0, 1, 1e6, 0.0), Link(1, 0, 5e4, 0.0)))
    assert [c.pairs for c in route_classes(lopsided)] == [((1, 0),), ((0, 1),)]
    links = calibrate(lopsided, FakeRanks(lopsided, {1: 0.9})).machine.topology.links
    assert [link.bandwidth_bytes_per_s for link in links] == pytest.approx([9e5, 4.5e4], rel=1e-3)


def test_times_that_do_not_grow_give_no_bandwidth() -> None:
    times = PairTimes(((100, 1.0), (200, 0.5), (400, 0.3)), (1e-4,) * 4, (1e-5,) * 4)
    with pytest.raises(RunError, match="calibrating 0 to 1: larger messages did not take longer"):
        fit(RouteClass(((0, 1),), 1, 1e6), [times])


@pytest.mark.parametrize("spoilt", [1, MAX_ROUNDS])
def test_a_measurement_that_a_busy_host_spoils_is_repeated(spoilt: int) -> None:
    topology = full_mesh(2, 1e6)

    class Busy(FakeRanks):
        measured = 0

        def perform(self, job: Job, longest_silence_s: float) -> list[Result]:
            results = super().perform(job, longest_silence_s)
            assert isinstance(job, MeasurePair)
            if len(job.sizes_bytes) > 1:
                self.measured += 1
                times = results[job.source]
                assert isinstance(times, PairTimes)
                if self.measured <= 2 * spoilt:  # both directions
                    falling = tuple((size, 1 / size) for size, _ in times.answered_s)
                    results[job.source] = times._replace(answered_s=falling)
            return results

    ranks = Busy(topology, {1: 1.0})
    if spoilt == MAX_ROUNDS:
        with pytest.raises(RunError, match="larger messages did not take longer"):
            calibrate(topology, ranks)
        assert ranks.measured == 2 * MAX_ROUNDS
    else:
        (found,) = calibrate(topology, ranks).fits
        assert found.bandwidth_bytes_per_s.low > 0
        assert ranks.measured > 2, "one measurement more, at least"


def test_a_route_gets_the_latency_that_was_measured_on_it() -> None:
    topology = nodes(2, 2, "switch", "rails")
    machine = calibrate(topology, FakeRanks(topology, {2: 1.0, 4: 1.0})).machine
    for pair in ((0, 1), (0, 2), (0, 3)):
        assert machine.topology.route(*pair).latency_s == pytest.approx(LATENCY_S)


def test_each_class_gets_its_own_fit() -> None:
    topology = nodes(2, 2, link_bandwidth_bytes_per_s=1e6, nic_bandwidth_bytes_per_s=5e5)
    machine = calibrate(topology, FakeRanks(topology, {1: 0.9, 2: 0.8})).machine
    inside, across = machine.topology.route(0, 1), machine.topology.route(0, 2)
    bandwidths = [machine.topology.links[index].bandwidth_bytes_per_s for index in (*inside.links, *across.links)]
    assert bandwidths == pytest.approx([9e5, 4e5, 4e5], rel=1e-6)
    assert inside.latency_s == pytest.approx(LATENCY_S)
    assert across.latency_s == pytest.approx(LATENCY_S)
    assert machine.comm_library.launch_s == pytest.approx(LAUNCH_S)


def test_a_noisy_latency_does_not_change_routes() -> None:
    """Inside a node two links over its switch, between nodes two over the network, here measured to be the faster."""
    topology = nodes(2, 2, "switch")

    class Noisy(FakeRanks):
        def perform(self, job: Job, longest_silence_s: float) -> list[Result]:
            assert isinstance(job, MeasurePair)
            inside = job.source // 2 == job.destination // 2
            results: list[Result] = [None] * self.world_size
            results[job.source] = pair_times(job, 1e9, LATENCY_S if inside else LATENCY_S / 2)
            return results

    fitted = calibrate(topology, Noisy(topology, {})).machine.topology
    for pair in topology.rank_pairs():
        assert fitted.route(*pair).links == topology.route(*pair).links


def test_local_processes_share_one_medium() -> None:
    topology = full_mesh(4)
    machine = calibrate_shared_medium(topology, FakeRanks(topology, {1: 0.1})).machine
    assert [shared.name for shared in machine.topology.shared] == ["memory"]
    assert machine.topology.shared[0].bandwidth_bytes_per_s == pytest.approx(5e9, rel=1e-6)


def test_local_processes_send_without_others() -> None:
    """Whatever links the topology has: on a ring each way around is one link of the medium."""
    medium = calibrate_shared_medium(ring(4), FakeRanks(ring(4), {1: 1.0})).machine.topology
    assert medium.is_complete
    assert medium.route(1, 0).latency_s == medium.route(0, 1).latency_s == pytest.approx(LATENCY_S)
    direct = replace(ring(4), forwarding=Forwarding(0, software="test"))
    medium = calibrate_shared_medium(direct, FakeRanks(direct, {1: 1.0})).machine.topology
    assert [link.name for link in medium.links] == ["0->1", "1->2", "2->3", "3->0"]


def test_a_world_of_one_needs_no_calibration() -> None:
    alone = full_mesh(1)
    assert calibrate(alone, FakeRanks(alone, {})).fits == ()
    assert calibrate_shared_medium(alone, FakeRanks(alone, {})).fits == ()
