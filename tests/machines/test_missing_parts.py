"""Machines from which parts are missing: their library is one for what is left, in every prediction and sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasp_lab import predict
from tasp_lab.core.errors import OverrideError, ScheduleError, TaspLabError
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.libraries.channels import ChannelLibrary
from tasp_lab.machines.libraries.nccl_tuning import Tuner
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.overrides import overridden
from tasp_lab.machines.profile import load_profile
from tasp_lab.machines.sampling import Sampling, machine_samples
from tasp_lab.prediction.inputs import with_pairs
from tasp_lab.schedules.collectives.library_rings import library_rings
from tasp_lab.workload.layer import Workload

COLLECTIVES = (
    "ring", "direct", "library-ring", "library-ring-reduce-scatter", "library-ring-all-reduce", "multi-ring",
)  # fmt: skip
LAYER = Workload(16 * 7 * 1024, heads=56, kv_heads=56, mask="full")
LAYERS = ("ulysses", "ring-attention", "kv-all-gather", "tasp")


def times_s(machine: Machine, names: Sequence[str], work: Workload | int) -> list[float]:
    return [float(predict(machine, [name], work, samples=0)[0].time_s) for name in names]


def channels(machine: Machine) -> ChannelLibrary:
    library = machine.comm_library
    assert isinstance(library, ChannelLibrary)
    return library


@pytest.mark.parametrize("family", ["h100", "mi300x"])
@pytest.mark.parametrize("missing", range(8))
def test_a_machine_without_a_gpu_is_the_member_of_seven(family: str, missing: int) -> None:
    broken, seven = load_machine(f"{family}-8").without([f"gpu.{missing}"]), load_machine(f"{family}-7")
    assert broken.comm_library == seven.comm_library
    assert broken.contention == seven.contention
    assert times_s(broken, COLLECTIVES[:5], 2**22) == times_s(seven, COLLECTIVES[:5], 2**22)


def test_layers_take_as_long_on_seven_gpus_of_eight() -> None:
    broken, seven = load_machine("h100-8").without(["gpu.5"]), load_machine("h100-7")
    assert times_s(broken, LAYERS, LAYER) == times_s(seven, LAYERS, LAYER)


@pytest.mark.parametrize("change", ["nics=4", "nics=x0.5"])
def test_half_of_the_nics_are_those_of_a_family_in_which_two_gpus_share_one(change: str) -> None:
    half = msgspec.structs.replace(load_profile("h100"), ranks_per_nic=2).machine("4x8")
    every_second = [f"nic.{at}" for at in range(1, 32, 2)]
    for found in (overridden(load_machine("h100-4x8"), [change]), load_machine("h100-4x8").without(every_second)):
        assert found.comm_library == half.comm_library
        assert found.contention == half.contention
        assert times_s(found, COLLECTIVES[:5], 2**22) == times_s(half, COLLECTIVES[:5], 2**22)
        assert times_s(found, ("ulysses",), Workload(2**16)) == times_s(half, ("ulysses",), Workload(2**16))


def test_pairs_of_ranks_know_their_domains_too() -> None:
    whole = with_pairs(load_machine("h100-2x4"))
    broken = whole.without(["gpu.1"]).comm_library
    source, destination = np.divmod(np.arange(49), 7)
    apart = (source < 3) != (destination < 3)
    assert (broken.places(source, destination) % 2 == apart)[source != destination].all()


@given(st.sets(st.integers(0, 15), min_size=1, max_size=7), st.sampled_from(COLLECTIVES[:5]))
def test_no_schedule_is_faster_without_nics(missing: set[int], name: str) -> None:
    whole = load_machine("h100-2x8")
    broken = whole.without([f"nic.{at}" for at in missing])
    assert times_s(broken, [name], 2**24)[0] >= times_s(whole, [name], 2**24)[0] * (1 - 1e-9)


@given(st.sets(st.integers(0, 15), min_size=1, max_size=7))
def test_rings_are_as_many_as_the_nics_of_the_poorest_node(missing: set[int]) -> None:
    broken = load_machine("h100-2x8").without([f"nic.{at}" for at in missing])
    left = min(8 - sum(at // 8 == node for at in missing) for node in (0, 1))
    assert len(library_rings(broken.topology)) == left
    most = left * broken.parameters.numbers["nic_ring_rate"]
    assert channels(broken).ring_bytes_per_s == min(channels(load_machine("h100-2x8")).ring_bytes_per_s, most)


def test_domains_of_different_sizes() -> None:
    """NCCL counts on the mean of ranks per node, rounded down, and on all ranks (src/graph/tuning.cc)."""
    library = channels(load_machine("h100-4x8").without(["gpu.5", "nic.9"]))
    assert library.sizes == (7, 8, 8, 8)
    assert isinstance(library.tuner, Tuner)
    assert (library.tuner.domains, library.tuner.ranks, library.tuner.more) == (4, 7, 3)
    domain = np.repeat(np.arange(4), library.sizes)
    for rank in range(31):
        assert library.places(np.full(31, rank), np.arange(31)).tolist() == (domain != domain[rank]).tolist()
    for name in ("ring", "library-ring", "direct", "multi-ring"):
        assert times_s(load_machine("h100-4x8").without(["gpu.5"]), [name], 2**20)[0] > 0
    with pytest.raises(ScheduleError, match="nodes of equal numbers of ranks"):
        times_s(load_machine("h100-4x8").without(["gpu.5"]), ["library-tree-all-reduce"], 2**20)


def test_a_domain_that_is_gone_leaves_a_machine_of_one() -> None:
    broken = load_machine("h100-2x8").without([f"gpu.{rank}" for rank in range(8, 16)])
    assert channels(broken) == load_machine("h100-8").comm_library
    assert times_s(broken, ("ring", "library-ring", "direct"), 2**22) == times_s(
        load_machine("h100-8"), ("ring", "library-ring", "direct"), 2**22
    )


def test_samples_lack_the_same_parts() -> None:
    machine = overridden(load_machine("h100-2x8"), ["nics=4"]).without(
        ["nic.1", "gpu.5", "link.0>node0", "link.node0>0"]
    )
    for sample in machine_samples(machine, Sampling(4)).machines:
        assert sample.topology.labels == machine.topology.labels
        assert {each.name for each in sample.topology.shared} == {each.name for each in machine.topology.shared}
        assert channels(sample).sizes == (7, 8)
        assert sample.system is not None
        assert sample.system.nics == 3


def test_speeds_of_ranks_stay_theirs() -> None:
    broken = overridden(load_machine("h100-4"), ["rank.2.compute=x0.5"]).without(["gpu.1"])
    assert [float(speed) for speed in broken.rank_speeds] == [1, 0.5, 1]


def test_the_rate_of_a_nic_that_is_shared_is_one_number() -> None:
    """Of half as many NICs, one at half its rate is as fast as its two links and the capacity that they share."""
    half = overridden(load_machine("h100-2x8"), ["nics=4"])
    slow = overridden(half, ["nic.1.bandwidth=x0.5"]).topology
    rates = {each.name: each.bandwidth_bytes_per_s for each in slow.constraints}
    named = {name: rate for name, rate in rates.items() if rate == 25e9}
    assert {*named} == {
        "2->network", "network->2", "3->network", "network->3", "nic 1 of node 0, out", "nic 1 of node 0, in",
    }  # fmt: skip
    own = overridden(load_machine("h100-2x8"), ["nic.3.bandwidth=x0.5"]).topology
    of_rank = overridden(load_machine("h100-2x8"), ["rank.3.nic.bandwidth=x0.5"]).topology
    assert own.links == of_rank.links
    late = overridden(load_machine("h100-2x8"), ["nic.3.latency=+1us"]).topology
    assert late.route(3, 8).latency_s == pytest.approx(load_machine("h100-2x8").topology.route(3, 8).latency_s + 1e-6)


@pytest.mark.parametrize(
    ("machine", "override", "message"),
    [
        ("h100-2x8", "nics=9", "a node of h100-2x8 has 8 NICs, expected a whole number up to 8"),
        ("h100-2x8", "nics=x0.3", "expected a whole number up to 8"),
        ("h100-8", "nics=4", "h100-8 has no NICs"),
        ("fat-tree:2x4", "nics=2", "has no NICs at its ranks"),
        ("h100-2x8", "nic.16.bandwidth=x0.5", "has NICs 0 to 15"),
        ("h100-2x8", "nic.3.bandwidth=0GB/s", "expected more than 0, or the part left out: --without nic.3"),
        ("h100-2x8", "rank.3.nic.bandwidth=x0", "--without nic.3"),
        ("mi300x-8", "link.0-3=0", "--without link.0-3"),
        ("h100-8", "rank.3.compute=x0", "--without gpu.3"),
    ],
)
def test_numbers_that_parts_cannot_have(machine: str, override: str, message: str) -> None:
    with pytest.raises(OverrideError, match=message):
        overridden(load_machine(machine), [override])


def test_a_layer_that_31_ranks_cannot_divide_is_refused() -> None:
    with pytest.raises(TaspLabError, match="31"):
        predict(load_machine("h100-4x8").without(["gpu.5"]), ["ulysses"], Workload(2**15, heads=8), samples=0)


def test_lines_of_a_prediction_name_what_is_assumed() -> None:
    machine = overridden(load_machine("h100-2x8"), ["nic.bandwidth=x2"])
    found = predict(machine, ["ring"], 2**20, without=["gpu.5", "nic.3"], samples=0)
    assert found.machine.changes[-2:] == (
        "without gpu.5, nic.3: NICs: rank 3 uses that of rank 2; assumed: the nearest, as NCCL takes the shortest path",
        "without gpu.5, nic.3: ranks 5 to 14 are GPUs 6 to 15",
    )
    assert found.machine.topology.name == "h100-2x8 with nic.bandwidth=x2 without gpu.5, nic.3"
    assert replace(machine, topology=machine.topology).without([]) == machine
