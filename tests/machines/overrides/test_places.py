"""Overrides of the spine, of nodes and of ranks: closed forms, and what does not exist."""

from __future__ import annotations

from fractions import Fraction
from itertools import permutations

import pytest

from runtime.protocol.jobs import RunSchedule
from sim.host import busy_s
from sim.simulate import simulate
from tasp_lab import Workload, predict
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.machine import ComputeRate, Machine
from tasp_lab.machines.overrides import overridden
from tasp_lab.schedule.dependencies import shapes_by_rank
from tasp_lab.schedules.attention.forward import attention
from tasp_lab.schedules.build import collective
from tasp_lab.topology.builders import Network, full_mesh, nodes
from tasp_lab.topology.cuts import all_gather_cut

LAYER = Workload(4096, heads=16, kv_heads=8, mask="causal")
MIB = 2**20


def two_nodes(network: Network = "fabric") -> Machine:
    """Nodes of four, 8 bytes/s inside and 1 byte/s through each NIC, without latency; exact."""
    numbers = {"link_bandwidth_bytes_per_s": Fraction(8), "nic_bandwidth_bytes_per_s": Fraction(1)}
    none = {"link_latency_s": Fraction(0), "nic_latency_s": Fraction(0)}
    return Machine(nodes(2, 4, "full-mesh", network, **numbers, **none))


def all_to_all_s(machine: Machine) -> Fraction:
    """AllToAll of 8 bytes from each rank to each: 16 x 8 bytes cross from node to node."""
    return Fraction(simulate(collective("direct", machine.topology, 8), machine).time_s)


@pytest.mark.parametrize("ratio", ["1", "2", "4", "2.5"])
def test_an_oversubscribed_spine_carries_its_part(ratio: str) -> None:
    """Every rank sends its 8 bytes to four of the other node: 4 x 32 bytes through 4 bytes/s over the ratio."""
    machine = overridden(two_nodes(), [f"spine.oversubscription={ratio}"])
    assert all_to_all_s(machine) == 32 * Fraction(ratio)
    cut = all_gather_cut(machine.topology)
    assert Fraction(cut.ranks_inside) / cut.bandwidth_bytes_per_s == Fraction(ratio)


def test_traffic_along_rails_passes_no_spine() -> None:
    """With rails the spine joins rails: ranks of equal number reach each other as before, others do not."""
    plain, thin = two_nodes("rails"), overridden(two_nodes("rails"), ["spine.oversubscription=8"])
    rates = {link.name: link.bandwidth_bytes_per_s for link in thin.topology.links}
    assert (rates["0->rail0"], rates["rail0->spine"]) == (1, Fraction(2, 8))
    assert all_to_all_s(thin) > all_to_all_s(plain)
    bottleneck = [
        min(thin.topology.constraints[each].bandwidth_bytes_per_s for each in thin.topology.route(0, other).constraints)
        for other in (4, 5)
    ]
    assert bottleneck == [1, Fraction(1, 4)]


def test_a_spine_follows_the_nics_and_no_single_one() -> None:
    texts = ["spine.oversubscription=4", "nic.bandwidth=x3", "rank.0.nic.bandwidth=x0.5", "link.1-network=x0.1"]
    for order in permutations(texts):
        shared = overridden(two_nodes(), order).topology.shared
        assert [each.bandwidth_bytes_per_s for each in shared] == [3] * 4


def test_a_node_or_a_rank_differs_from_the_others() -> None:
    machine = overridden(
        two_nodes(), ["node.1.nic.bandwidth=x0.5", "rank.3.link.bandwidth=1GB/s", "rank.0.nic.latency=+1s"]
    )
    rates = {link.name: (link.bandwidth_bytes_per_s, link.latency_s) for link in machine.topology.links}
    assert rates["4->network"] == rates["network->7"] == (Fraction(1, 2), 0)
    assert rates["3->network"] == (1, 0)
    assert rates["0->network"] == (1, 1)
    assert rates["3->0"] == rates["1->3"] == (10**9, 0)
    assert rates["2->1"] == rates["4->7"] == (8, 0)


def test_a_slow_node_is_ranks_that_are_slow() -> None:
    """Also beside a rank of its own factor, and in every kind of compute."""
    for text in ("h100-2x4", "nodes:2x4"):
        whole = overridden(load_machine(text), ["node.1.compute=x0.5", "rank.5.compute=x0.5"])
        assert whole.rank_speeds == (1, 1, 1, 1, Fraction(1, 2), Fraction(1, 4), Fraction(1, 2), Fraction(1, 2))
    same = overridden(load_machine("h100-8"), ["rank.3.compute=x1"])
    assert same.rank_speeds == ()


def test_a_slow_rank_makes_a_layer_slower_and_its_bound_holds() -> None:
    """Without contention: messages of a fast rank begin earlier, beside kernel calls of others, and slow these."""
    plain, slow, fast = (
        predict("h100-8", "ulysses", LAYER, overrides=each, samples=0, contention=False)[0]
        for each in ((), ("rank.3.compute=x0.5",), ("rank.3.compute=x4",))
    )
    assert slow.compute_s == pytest.approx(2 * plain.compute_s)  # type: ignore[attr-defined]
    assert plain.time_s + 0.4 * plain.compute_s < slow.time_s  # type: ignore[attr-defined]
    assert fast.time_s <= plain.time_s
    for each in (plain, slow, fast):
        assert each.bound_s <= each.time_s
    document = predict("h100-8", "ulysses", LAYER, overrides=("rank.3.compute=x0.5",), samples=0).to_dict()[
        "provenance"
    ]
    assert document["inputs"]["machine"]["rank_speeds"] == [1, 1, 1, 0.5, 1, 1, 1, 1]  # type: ignore[index]
    assert {"name": "rank.3.compute", "value": "x0.5", "source": "given: rank.3.compute=x0.5", "assumed": False} in (
        document["constants"]  # type: ignore[index]
    )


def test_ranks_that_are_run_wait_as_long_as_they_are_predicted_to() -> None:
    topology = full_mesh(2)
    schedule = attention("ring-attention", topology, Workload(64, heads=1, mask="full"))
    machine = Machine(topology, compute=ComputeRate(1e9), rank_speeds=(Fraction(1), Fraction(1, 4)))
    job = RunSchedule(schedule, "auto", 1, 1, machine.compute, machine.rank_speeds)
    for rank, busy in enumerate(busy_s(schedule, machine.compute, machine.rank_speeds)):
        compute = job.compute_of(rank)
        assert compute is not None
        shapes = shapes_by_rank(schedule)[rank]
        assert sum(count * compute.time_s(shape) for shape, count in shapes.items()) == pytest.approx(busy)
