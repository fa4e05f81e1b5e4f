"""Overrides of machines: x1 changes nothing, an absolute value is the relative one, as is a profile file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import permutations
from math import isclose

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasp_lab import Workload, predict
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.change import constants_of
from tasp_lab.machines.compute import ASSUMED_COMPUTE, with_kernel
from tasp_lab.machines.constants import CONSTANTS
from tasp_lab.machines.intervals import log_ends
from tasp_lab.machines.machine import INSTANT, Machine
from tasp_lab.machines.overrides import overridden, override_names
from tasp_lab.machines.parameters import NO_PARAMETERS, Parameter
from tasp_lab.machines.profile import Profile, load_profile
from tasp_lab.machines.sampling import Sampling, machine_samples
from tasp_lab.prediction.columns import fields_of
from tasp_lab.prediction.inputs import chosen_machine
from tasp_lab.prediction.settings import MachineSettings
from tasp_lab.prediction.uncertainty import Uncertainty
from tasp_lab.topology.builders import full_mesh, nodes, switch
from tasp_lab.workload.kernel_shapes import Passing
from tests.support.links import with_links

LAYER = Workload(4096, heads=16, kv_heads=8, mask="causal")
MIB = 2**20
PASSES: tuple[Passing, ...] = ("forward", "backward")
MACHINES = ("h100-8", "h100-2x4", "mi300x-2x2", "gb200-2x4", "h100-2x2-rails")


def time_s(machine: Machine | str, overrides: Sequence[str] = (), work: Workload | int = MIB) -> float:
    names = ["ulysses"] if isinstance(work, Workload) else ["direct"]
    return float(predict(machine, names, work, overrides=overrides, samples=0)[0].time_s)


def number(machine: Machine, name: str) -> float:
    return machine.parameters[name].number


def flops_per_s(machine: Machine) -> list[object]:
    compute = ASSUMED_COMPUTE if machine.compute == INSTANT else machine.compute
    return [compute.rate(dtype, passing).flops_per_s for dtype in ("bf16", "fp32") for passing in PASSES]


@pytest.mark.parametrize("text", [*MACHINES, "full-mesh:4", "switch:4", "nodes:2x4:rails", "a10-4-pcie", "gaudi2-8"])
def test_x1_and_plus_0_change_nothing_of_any_name(text: str) -> None:
    """Not one bit of any number, and not the intervals."""
    machine = load_machine(text)
    for name in override_names(machine):
        for change in ("x1", "x1.0", *([] if name == "compute.rate" else ["+0", "-0.0"])):
            found = overridden(machine, [f"{name}={change}"])
            assert replace(found.topology, name="") == replace(machine.topology, name=""), name
            assert (found.comm_library, found.contention) == (machine.comm_library, machine.contention), name
            assert flops_per_s(found) == flops_per_s(machine), name
            known = zip(found.parameters.values(), machine.parameters.values(), strict=False)
            assert all(log_ends(one) == log_ends(other) and one.value == other.value for one, other in known), name
    assert time_s(text, ["link.latency=x1", "compute.rate=x1"], LAYER) == time_s(text, (), LAYER)


@pytest.mark.parametrize("text", [*MACHINES, "switch:4"])
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_a_factor_and_its_inverse_change_nothing_but_rounding(text: str, data: st.DataObject) -> None:
    machine = load_machine(text)
    name = data.draw(st.sampled_from(override_names(machine)))
    if CONSTANTS.get(name.replace(".", "_"), CONSTANTS["link_latency"]).unit == "":
        return  # counts and shares
    factors = ("x2", "x0.5") if "latency" in name or "_hop_" in name else ("x0.5", "x2")  # what is possible
    back = overridden(overridden(machine, [f"{name}={factors[0]}"]), [f"{name}={factors[1]}"])
    work = LAYER if name.startswith("compute") else MIB
    assert isclose(time_s(back, (), work), time_s(machine, (), work), rel_tol=1e-12)


def in_a_file(profile: Profile, name: str, value: str) -> Machine:
    """A member of the profile whose file has another value of a constant."""
    stated = Parameter.parse(name, value, "a data sheet")
    return profile.stating([stated]).machine("2x4", "h100-2x4")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("nic_bandwidth", "800Gbit/s"),
        ("link_bandwidth", "900GB/s"),
        ("nic_payload", "45GB/s"),
        ("nic_channel_rate", "20GB/s"),
        ("nic_channels_per_peer", "2"),
        ("message_launch", "30us"),
        ("sms", "66"),
        ("nic_chunk", "256KiB"),
    ],
)
def test_an_override_is_a_profile_file_with_that_constant(name: str, value: str) -> None:
    machine = load_machine("h100-2x4")
    found, wanted = overridden(machine, [f"{name}={value}"]), in_a_file(load_profile("h100"), name, value)
    assert (found.comm_library, found.contention) == (wanted.comm_library, wanted.contention)
    assert found.topology.links == wanted.topology.links
    for work in (MIB, LAYER):
        assert time_s(found, (), work) == time_s(wanted, (), work)


def test_absolute_and_relative_and_added_values_agree() -> None:
    for text, relative, absolute, added in (
        ("h100-2x4", "nic.bandwidth=x2", "nic_bandwidth=800Gbit/s", "nic.bandwidth=+400Gbit/s"),
        ("h100-2x4", "port.latency=x2", "link.latency=1.2us", "link_latency=+0.6us"),
        ("full-mesh:4", "link.bandwidth=x0.5", "link.bandwidth=25GB/s", "link.bandwidth=-25GB/s"),
        ("switch:4", "port.latency=x3", "link.latency=3us", "port.latency=+2us"),
        ("nodes:2x3:rails", "nic.latency=x2", "nic.latency=10us", "nic.latency=+5us"),
    ):
        one, two, three = (time_s(text, [each]) for each in (relative, absolute, added))
        assert isclose(one, two, rel_tol=1e-12)
        assert isclose(one, three, rel_tol=1e-12)


def test_expressions_with_other_numbers_are_overrides() -> None:
    for found, wanted in (
        (("full-mesh:4", "link.bandwidth=80GB/s"), full_mesh(4, 80e9)),
        (("switch:4", "port.bandwidth=80GB/s"), switch(4, 80e9)),
        (("switch:4", "port.latency=3us"), switch(4, latency_s=3e-6)),
        (("nodes:2x3:rails", "nic.bandwidth=10GB/s"), nodes(2, 3, network="rails", nic_bandwidth_bytes_per_s=10e9)),
        (("nodes:2x3:rails", "nic.latency=1us"), nodes(2, 3, network="rails", nic_latency_s=1e-6)),
    ):
        topology = overridden(load_machine(found[0]), [found[1]]).topology
        assert replace(topology, name=wanted.name) == wanted


def test_exact_numbers_stay_exact() -> None:
    mesh = Machine(full_mesh(3, Fraction(3), Fraction(1, 7)))
    found = overridden(mesh, ["link.bandwidth=x1/3", "link.latency=+1s", "link.0-1=x2"]).topology.links
    assert [(each.bandwidth_bytes_per_s, each.latency_s) for each in found[:2]] == [
        (Fraction(2), Fraction(8, 7)),
        (Fraction(1), Fraction(8, 7)),
    ]


def test_what_hangs_together_moves_together() -> None:
    """Payloads follow the line rate; the latency of a hop has the wire's in it."""
    machine = overridden(load_machine("h100-2x4"), ["nic.bandwidth=x2", "nic.latency=+1us", "nic_hop_ll128=x2"])
    assert [machine.parameters.numbers[name] for name in ("nic_payload", "nic_ring_rate")] == [94e9, 96e9]
    names = ("nic_latency", "nic_hop_ll", "nic_hop_ll128", "nic_hop_simple", "link_hop_ll")
    assert [number(machine, name) * 1e6 for name in names] == pytest.approx([3.7, 3.7, 10, 15, 0.7248])


@pytest.mark.parametrize("text", ["h100-2x4", "nodes:2x4:switch"])
def test_the_order_does_not_matter(text: str) -> None:
    texts = ["nic.bandwidth=x2", "link.0-node0=x0.5", "nic.latency=+1us", "link.bandwidth=x3", "compute.rate=x0.9"]
    first, *others = (overridden(load_machine(text), order) for order in permutations(texts))
    for other in others:
        assert replace(
            other, topology=replace(other.topology, name=first.topology.name), parameters=NO_PARAMETERS
        ) == replace(first, parameters=NO_PARAMETERS)
        assert other.parameters == first.parameters


@pytest.mark.parametrize("text", ["h100-2x2", "mi300x-4", "nodes:2x2:switch", "torus:2x3"])
@pytest.mark.parametrize("factor", ["x1.1", "x3.7"])
def test_nothing_faster_makes_the_best_prediction_slower(text: str, factor: str) -> None:
    """The best of schedules that need no search; `tests.prediction.test_faster_links` has those that do."""
    names = ["ring-attention"] if text.startswith("torus") else ["ring-attention", "ulysses", "kv-all-gather"]

    def best_s(*overrides: str) -> float:
        return min(float(each.time_s) for each in predict(text, names, LAYER, overrides=overrides, samples=0))

    before_s = best_s()
    for name in override_names(load_machine(text)):
        if name.endswith("bandwidth") or name == "compute.rate":
            assert best_s(f"{name}={factor}") <= before_s * (1 + 1e-4), name


def test_intervals_are_those_of_the_overridden_constants() -> None:
    """A changed constant is as uncertain as before, a given one is exact, and samples keep edited links."""
    machine, sampling = load_machine("h100-2x4"), Sampling(8)
    ends = {}
    for change in ("x1", "x0.5", "23.5GB/s"):
        found = overridden(machine, [f"nic_payload={change}"])
        ends[change] = log_ends(found.parameters["nic_payload"])
    assert ends["x1"] == pytest.approx(ends["x0.5"], rel=1e-9)
    assert (ends["x1"][1], ends["23.5GB/s"]) == (pytest.approx(0.02105, rel=1e-3), (0, 0))
    slow = overridden(machine, ["link.0-node0=x0.5", "message_launch=x2"])
    for one, other in zip(
        machine_samples(slow, sampling).machines, machine_samples(machine, sampling).machines, strict=True
    ):
        assert one.topology == slow.topology
        assert number_of_launch(one) == pytest.approx(2 * number_of_launch(other), rel=1e-12)
    assert Uncertainty(slow, sampling).machine is slow


def number_of_launch(machine: Machine) -> float:
    media = machine.comm_library.media  # type: ignore[attr-defined]
    return float(media[0].launch_s)


def test_samples_of_uncertain_wires_keep_edited_links() -> None:
    """An interval of a wire is rare; links that failed must not come back with it."""
    profile = load_profile("h100")
    wire = replace(profile.parameters["link_bandwidth"], low=400e9, high=500e9)
    uncertain = profile.with_parameters(profile.parameters.with_parameters([wire]))
    settings = MachineSettings(overrides=("link.0-switch=x0.5", "link.1-switch=1GB/s"))
    machine = chosen_machine(uncertain.machine("1x4"), settings)
    for sample in machine_samples(machine, Sampling(8)).machines:
        rates = {link.name: link.bandwidth_bytes_per_s for link in sample.topology.links}
        assert rates["1->switch"] == 1e9
        assert rates["0->switch"] == pytest.approx(rates["2->switch"] / 2)
        assert rates["2->switch"] != 450e9


def test_the_result_names_its_overrides() -> None:
    given = ("nic.bandwidth=x2", "link.0-node0 = 100GB/s", "compute.rate=x0.9")
    found = predict("h100-2x4", "ulysses", LAYER, overrides=given, samples=0)
    document = found.to_dict()["provenance"]
    assert isinstance(document, dict)
    assert document["inputs"]["overrides"] == ["nic.bandwidth=x2", "link.0-node0=100GB/s", "compute.rate=x0.9"]
    constants = {each["name"]: each for each in document["constants"]}
    assert constants["nic_bandwidth"]["value"] == "100GB/s"
    assert constants["nic_bandwidth"]["source"].startswith("nic.bandwidth x2, was 50GB/s (NDR InfiniBand")
    assert constants["link.0-node0"]["source"] == "given: link.0-node0 100GB/s, was 450GB/s (0->node0 of the machine)"
    assert constants["compute.rate"]["value"] == "x0.9"
    assert found[0].topology == "h100-2x4 with nic.bandwidth=x2, link.0-node0=100GB/s, compute.rate=x0.9"
    plain = predict("h100-2x4", "ulysses", LAYER, samples=0).to_dict()["provenance"]
    assert isinstance(plain, dict)
    assert "overrides" not in plain["inputs"]


def test_all_names_can_be_set_and_matter_alone() -> None:
    machine = load_machine("mi300x-2x2")
    assert {"link_latency", "nic_payload", "sms", "nic_chunk"} <= {*constants_of(machine)}
    assert "lone_hop_ll" not in constants_of(machine)  # of machines with one GPU per node
    for name in override_names(machine):
        assert overridden(machine, [f"{name}=x1"]).topology.name.endswith("=x1")


def test_links_that_changed_before_are_not_lost() -> None:
    machine = load_machine("h100-2x4")
    by_hand = replace(machine, topology=with_links(machine.topology, ["0-node0=1GB/s"]))
    for edited in (by_hand, overridden(machine, ["link.0-node0=1GB/s"])):
        again = overridden(edited, ["nic.bandwidth=x2"]).topology
        rates = {each.name: each.bandwidth_bytes_per_s for each in again.links}
        assert (rates["0->node0"], rates["1->node0"], rates["0->network"]) == (1e9, 450e9, 100e9)


def test_a_factor_of_compute_holds_for_every_kernel() -> None:
    """Whether the kernel is chosen before the override or after it."""
    after = with_kernel(overridden(load_machine("h100-8"), ["compute.rate=x0.5"]), "flash-attention-3")
    before = overridden(with_kernel(load_machine("h100-8"), "flash-attention-3"), ["compute.rate=x0.5"])
    assert after.compute == before.compute
    plain, slow = (
        fields_of(
            predict("h100-8", "ulysses", LAYER, kernel="flash-attention-3", overrides=each, samples=0)[0], "layer"
        )
        for each in ((), ("compute.rate=x0.5",))
    )
    assert slow["compute_s"] == pytest.approx(2 * plain["compute_s"])  # type: ignore[operator]


@pytest.mark.parametrize(
    ("machine", "override", "line"),
    [
        ("h100-2x8", "nic.bandwidth=-5GB/s", "nic.bandwidth 50GB/s → 45GB/s (-5GB/s)"),
        ("h100-2x8", "nic.bandwidth=+5GB/s", "nic.bandwidth 50GB/s → 55GB/s (+5GB/s)"),
        ("h100-2x8", "nic.bandwidth=x2", "nic.bandwidth 50GB/s → 100GB/s (x2)"),
        ("h100-2x8", "nic.bandwidth=40GB/s", "nic.bandwidth 50GB/s → 40GB/s"),
        ("h100-2x8", "message_launch=-1us", "message_launch 6.718us → 5.718us (-1us)"),
        ("full-mesh:4", "link.latency=+1us", "link.latency 1us → 2us (+1us)"),
        ("full-mesh:4", "link.0-1=-10GB/s", "link.0-1 50GB/s → 40GB/s (-10GB/s)"),
        ("nodes:2x4", "node.1.nic.bandwidth=-10GB/s", "node.1.nic.bandwidth 50GB/s → 40GB/s (-10GB/s)"),
        ("nodes:2x4", "rank.3.compute=x0.5", "rank.3.compute x0.5"),
    ],
)
def test_signs_and_factors_show_what_became_of_the_number(machine: str, override: str, line: str) -> None:
    """One rule: a sign adds or takes away, x multiplies, and all else is the new value."""
    assert overridden(load_machine(machine), [override]).changes == (line,)
