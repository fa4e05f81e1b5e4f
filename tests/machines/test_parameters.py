"""Parameters: numbers that follow each other, and the one way to change them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.change import change
from tasp_lab.machines.constants import CONSTANTS
from tasp_lab.machines.contention import NONE
from tasp_lab.machines.libraries.channels import ChannelLibrary
from tasp_lab.machines.libraries.groups import GroupLibrary
from tasp_lab.machines.machine import IDEAL, Machine
from tasp_lab.machines.parameters import Change, Parameter, Parameters, changed, nearest_possible
from tasp_lab.machines.profile import load_profile, profile_names
from tasp_lab.prediction.inputs import with_pairs

H100 = load_profile("h100").parameters
factors = st.floats(0.01, 100)


def line_and_payload(line: float = 100e9, payload: float = 40e9, at: float = 50e9) -> Parameters:
    """A line rate, and a payload that is stated at another line rate."""
    return Parameters([
        Parameter("nic_bandwidth", line, "a data sheet", low=0.9 * line, high=1.1 * line),
        Parameter("nic_payload", payload, "a log", at=at, low=0.8 * payload, high=1.2 * payload),
    ])  # fmt: skip


@given(st.floats(1e9, 1e12), st.floats(1e9, 1e12), factors)
def test_what_is_stated_at_a_value_of_another_is_proportional_to_it(line: float, at: float, factor: float) -> None:
    parameters = line_and_payload(line, 0.8 * at, at)
    assert parameters.numbers["nic_payload"] == pytest.approx(0.8 * line)
    found = changed(parameters, {"nic_bandwidth": Change(factor)})
    assert found.numbers["nic_payload"] == pytest.approx(0.8 * line * factor)
    assert found["nic_payload"] == parameters["nic_payload"]  # what its file states holds


@given(factors, factors, st.booleans())
def test_a_change_applies_to_what_has_followed_whatever_the_order(line: float, payload: float, first: bool) -> None:
    changes = {"nic_bandwidth": Change(line), "nic_payload": Change(payload)}
    ordered = changes if first else dict(reversed(changes.items()))
    found = changed(line_and_payload(), ordered, clamp=False)
    assert found.numbers["nic_payload"] == pytest.approx(80e9 * line * payload)


@given(st.sampled_from(sorted(H100)), factors)
def test_a_factor_and_its_inverse_leave_the_numbers(name: str, factor: float) -> None:
    there = changed(H100, {name: Change(factor)}, clamp=False)
    back = changed(there, {name: Change(1 / factor)}, clamp=False)
    assert dict(back.numbers) == pytest.approx(dict(H100.numbers))


@pytest.mark.parametrize("same", [Change(), Change(1, 0), Change(1.0)])
def test_no_change_changes_nothing(same: Change) -> None:
    found = changed(H100, dict.fromkeys(H100, same))
    assert found == H100
    assert found.numbers == H100.numbers


def test_an_interval_is_as_wide_beside_the_value_and_a_new_value_has_none() -> None:
    twice = changed(line_and_payload(), {"nic_bandwidth": Change(2)})["nic_bandwidth"]
    assert (twice.value, twice.low, twice.high) == pytest.approx((200e9, 180e9, 220e9))
    new = changed(line_and_payload(), {"nic_bandwidth": Change(0, 70e9)})["nic_bandwidth"]
    assert (new.value, new.low, new.high) == (70e9, None, None)


@given(st.dictionaries(st.sampled_from(sorted(H100)), st.builds(Change, st.floats(0, 1e3), st.floats(0, 1e3))))
def test_changed_numbers_are_possible_and_others_stay(changes: dict[str, Change]) -> None:
    found = changed(H100, changes)
    assert not nearest_possible(found.numbers)
    follows = {name for name in H100 if {CONSTANTS[name].depends_on, CONSTANTS[name].min_constant} & changes.keys()}
    for name in H100.keys() - changes.keys() - follows:
        assert found.numbers[name] == H100.numbers[name]


@given(st.sampled_from(["message_launch", "link_payload", "base_ll"]), st.floats(0.5, 0.9))
def test_a_communicator_per_pair_has_the_changed_numbers(name: str, factor: float) -> None:
    """Whether the numbers change before the host model is known, as in sensitivities, or after it, as in samples."""
    machine = load_machine("h100-4")
    changes = {name: Change(factor)}
    before, after = with_pairs(change(machine, changes)), change(with_pairs(machine), changes)
    assert libraries_of(before) == libraries_of(after) != libraries_of(with_pairs(machine))


def libraries_of(machine: Machine) -> list[ChannelLibrary | None]:
    """The library of the communicator of all ranks, then that of each kind of pair."""
    assert isinstance(machine.comm_library, GroupLibrary)
    return [machine.comm_library.world, *(kind.library for kind in machine.comm_library.kinds)]


def test_a_library_and_a_contention_of_ones_own_stay() -> None:
    machine = replace(load_machine("h100-4"), contention=NONE, comm_library=IDEAL)
    slow = change(machine, {"link_bandwidth": Change(0.5)})
    assert (slow.contention, slow.comm_library) == (NONE, IDEAL)
    assert {link.bandwidth_bytes_per_s for link in slow.topology.links} == {225e9}


@pytest.mark.parametrize("family", profile_names())
@pytest.mark.parametrize("nodes", ["1x{}", "2x{}", "2x{}-rails", "3x1"])
def test_links_in_proportion_are_those_of_a_family_with_these_numbers(family: str, nodes: str) -> None:
    profile = load_profile(family)
    size = nodes.format(profile.ranks_per_node)
    machine = profile.machine(size)
    assert machine.system is not None
    changes = {name: Change(1.1 + place / 7) for place, name in enumerate(machine.system.wires)}
    found = change(machine, changes).topology
    built = profile.with_parameters(changed(profile.parameters, changes)).machine(size).topology
    for ours, theirs in zip([*found.links, *found.shared], [*built.links, *built.shared], strict=True):
        assert ours.name == theirs.name
        assert ours.bandwidth_bytes_per_s == pytest.approx(theirs.bandwidth_bytes_per_s, rel=1e-12)
    assert [each.latency_s for each in found.links] == pytest.approx([each.latency_s for each in built.links])


def test_capacities_that_links_share_follow_their_class() -> None:
    machine = load_machine("rtx4090-4-pcie")
    fast = change(machine, {"link_bandwidth": Change(2)}).topology
    rates = [each.bandwidth_bytes_per_s for each in fast.shared]
    assert rates == pytest.approx([2 * each.bandwidth_bytes_per_s for each in machine.topology.shared])


def test_what_depends_on_a_parameter_that_is_not_there_has_no_number() -> None:
    parameters = Parameters([line_and_payload()["nic_payload"]])
    assert list(parameters) == ["nic_payload"]
    assert not parameters.numbers


@pytest.mark.parametrize("family", profile_names())
def test_texts_are_those_of_the_file_and_are_read_as_the_numbers(family: str) -> None:
    for parameter in load_profile(family).parameters.values():
        assert parameter.written == parameter.text
        assert CONSTANTS[parameter.name].parse(parameter.text) == parameter.value


@given(st.sampled_from([spec.name for spec in CONSTANTS.values() if spec.unit]), st.floats(1e-9, 1e12))
def test_a_computed_number_is_read_as_it_is_printed(name: str, value: float) -> None:
    if CONSTANTS[name].unit != "bytes":  # sizes are whole
        text = Parameter(name, value, "computed").text
        assert CONSTANTS[name].parse(text) == pytest.approx(value, rel=1e-14)
