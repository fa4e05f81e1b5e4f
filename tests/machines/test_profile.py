"""Profiles: families of machines with their library, files of one's own, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from sim.simulate import simulate
from tasp_lab.core.errors import ProfileError
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.constants import CONSTANTS
from tasp_lab.machines.intervals import source_kind
from tasp_lab.machines.libraries.channels import ChannelLibrary
from tasp_lab.machines.machine import IDEAL
from tasp_lab.machines.overrides import overridden
from tasp_lab.machines.profile import (
    Profile,
    find_profile,
    listed_members,
    load_profile,
    member,
    profile_document,
    profile_names,
)
from tasp_lab.schedule.blocks import Blocks
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.schedule import Schedule

OWN = """
name = "mine"
summary = "two GPUs"
library = "gloo"
inside = "full-mesh"
ranks_per_node = 2

[[constants]]
name = "link_bandwidth"
value = "1GB/s"
source = "read off the box"

[[constants]]
name = "link_latency"
value = "10us"
source = "ping"
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(OWN)
    return path


@pytest.mark.parametrize("name", profile_names())
def test_every_constant_can_be_read_and_has_a_source(name: str) -> None:
    profile = load_profile(name)
    for constant in profile.parameters.values():
        assert constant.number >= 0
        assert re.search(r"[A-Za-z]/[A-Za-z]|#[0-9]|\d{4}|RFC|assumption", constant.source), constant.name


@pytest.mark.parametrize("name", profile_names())
def test_payload_is_less_than_the_line_and_hops_are_no_shorter_than_the_wire(name: str) -> None:
    of = load_profile(name).parameters.numbers.__getitem__
    assert of("link_many_payload") <= of("link_payload") <= of("link_bandwidth")
    assert of("nic_ring_rate") <= of("nic_bandwidth")
    assert of("nic_payload") <= of("nic_bandwidth")
    for protocol in ("ll", "ll128", "simple"):
        assert of(f"link_hop_{protocol}") >= of("link_latency")
        assert of(f"nic_hop_{protocol}") >= of("nic_latency")


@pytest.mark.parametrize("name", listed_members())
def test_members_that_a_profile_lists_have_a_summary_of_their_own(name: str) -> None:
    found = member(name)
    assert found is not None
    assert found.summary != load_profile(name.partition("-")[0]).summary


@pytest.mark.parametrize("nodes", [1, 2, 17, 18])
def test_a_rack_is_one_domain(nodes: int) -> None:
    found = member(f"gb200-{nodes}x4")
    assert found is not None
    assert isinstance(found.comm_library, ChannelLibrary)
    assert found.comm_library.domain_ranks == 4 * nodes
    assert len(found.comm_library.media) == 1


def test_two_racks_are_two_domains() -> None:
    found = member("gb200-36x4")
    assert found is not None
    assert isinstance(found.comm_library, ChannelLibrary)
    assert found.comm_library.domain_ranks == 72
    assert len(found.comm_library.media) == 2
    rack = member("gb200-nvl72")
    assert rack is not None
    assert rack.topology.world_size == 72


@pytest.mark.parametrize(("size", "domains", "ranks"), [("2x1x4", 2, 4), ("4x1x4", 4, 4), ("2x2x4", 2, 8)])
def test_a_size_of_three_numbers_begins_with_the_domains(size: str, domains: int, ranks: int) -> None:
    for family, nic in ("gb200", 50e9), ("gb300", 100e9):
        found = load_machine(f"{family}-{size}")
        assert found.system is not None
        assert (found.system.domains, found.system.ranks) == (domains, ranks)
        assert isinstance(found.comm_library, ChannelLibrary)
        assert len(found.comm_library.media) == 2
        assert {link.bandwidth_bytes_per_s for link in found.topology.links if "network" in link.name} == {nic}


@pytest.mark.parametrize(("long", "short"), [("gb200-2x18x4-rails", "gb200-36x4-rails"), ("h100-2x1x8", "h100-2x8")])
def test_full_domains_are_those_of_the_shorter_name(long: str, short: str) -> None:
    assert load_machine(long).topology.links == load_machine(short).topology.links


def test_one_node_of_a_file_and_several(own: Path) -> None:
    found = member(str(own))
    assert found is not None
    assert (found.topology.world_size, found.comm_library.name) == (2, "gloo")
    with pytest.raises(ProfileError, match="constant 'nic_bandwidth' is missing"):
        member(f"{own}:2x2")
    profile, machine = find_profile(str(own))
    assert profile.name == "mine"
    assert machine.topology.world_size == 2


@pytest.mark.parametrize("name", profile_names())
def test_a_profile_written_is_the_profile_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / "copy.toml"
    path.write_text(profile_document(load_profile(name)))
    assert load_profile(str(path)) == load_profile(name)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('inside = "full-mesh"', 'inside = "full-mesh"\ncolour = "red"', "unknown field `colour`"),
        ('source = "ping"', "", "missing required field `source`"),
        ('source = "ping"', 'source = " "', "source"),
        ('name = "link_latency"', 'name = "latency"', "unknown constant 'latency', expected one of link_bandwidth"),
        ('name = "link_latency"', 'name = "link_bandwidth"', "constant 'link_bandwidth' occurs twice"),
        ('"10us"', '"10us"\nat = "link_bandwidth = 1GB/s"', "constant 'link_latency' does not depend on another"),
        ('"10us"', '"10"', "time '10': expected a number and a unit"),
        ('"1GB/s"', '"-1GB/s"', "expected more than 0"),
        ('library = "gloo"', 'library = "mpi"', "Invalid enum value 'mpi'"),
        ("ranks_per_node = 2", "ranks_per_node = 0", "ranks_per_node"),
        ('name = "mine"', "name = 3", "name"),
        (
            "[[constants]]",
            '[machines]\n"2y8" = "two"\n\n[[constants]]',
            "'2y8' is not a size, expected one like 8, 2x8",
        ),
        ("[[constants]]", '[aliases]\npair = "one"\n\n[[constants]]', "'one' is not a size, expected one like 8, 2x8"),
        ('source = "ping"', 'source = "ping\\u202e"', "`source` has the character"),
        ('"two GPUs"', '"two\\nGPUs"', "`summary` has the character"),
        ("[[constants]]", "[[constants", "Unclosed array"),
    ],
)
def test_what_is_wrong_in_a_file_is_one_line(own: Path, old: str, new: str, expected: str) -> None:
    own.write_text(OWN.replace(old, new, 1))
    with pytest.raises(ProfileError) as caught:
        load_profile(str(own))
    message = str(caught.value)
    assert str(own) in message
    assert "\n" not in message
    if "Unclosed" not in expected:
        assert re.search(re.escape(expected), message), message


def test_payload_beyond_the_line_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "fast.toml"
    path.write_text(profile_document(load_profile("h100")).replace("370.8GB/s", "451GB/s"))
    with pytest.raises(ProfileError, match=r"fast\.toml': link_payload is more than link_bandwidth"):
        load_profile(str(path))


def test_meanings_are_sentences_without_a_full_stop() -> None:
    assert all(spec.meaning and not spec.meaning.endswith(".") for spec in CONSTANTS.values())
    json.dumps({name: spec.unit for name, spec in CONSTANTS.items()})


def test_without_the_library_its_constants_are_not_needed(own: Path) -> None:
    own.write_text(OWN.replace('"gloo"', '"nccl"'))
    wires = load_machine(str(own), library="ideal")
    assert wires.comm_library == IDEAL
    assert {*wires.parameters} == {"link_bandwidth", "link_latency"}
    assert load_machine(str(own), library="gloo").comm_library.name == "gloo"
    with pytest.raises(ProfileError, match="is missing; nccl needs it here"):
        load_machine(str(own))


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        ("nic_bandwidth = 1GB/s", "link_payload depends on link_bandwidth, expected `link_bandwidth = ...`"),
        ("link_bandwidth = fast", "bandwidth 'fast'"),
        ("1GB/s", "link_payload depends on link_bandwidth"),
    ],
)
def test_a_constant_is_stated_at_a_value_of_the_one_it_depends_on(own: Path, at: str, expected: str) -> None:
    constant = f'\n[[constants]]\nname = "link_payload"\nvalue = "900MB/s"\nsource = "a run"\nat = "{at}"\n'
    own.write_text(OWN + constant)
    with pytest.raises(ProfileError, match=re.escape(expected)):
        load_profile(str(own))


def test_a_base_gives_what_a_profile_does_not_state(tmp_path: Path) -> None:
    """Constants that depend on another follow it; those of the accelerator come before those of the base."""
    path = tmp_path / "slow.toml"
    path.write_text(
        'name = "slow"\nsummary = "H100 with slow NICs"\nlibrary = "nccl"\ninside = "switch"\nbase = "h100"\n'
        'accelerator = "h800"\n[[constants]]\nname = "nic_bandwidth"\nvalue = "200Gbit/s"\nsource = "a data sheet"\n'
    )
    slow, h100 = load_profile(str(path)), load_profile("h100")
    assert slow.parameters.numbers["link_payload"] == h100.parameters.numbers["link_payload"]
    assert slow.parameters.numbers["nic_payload"] == h100.parameters.numbers["nic_payload"] / 2
    assert slow.parameters.numbers["compute_rate"] == load_profile("h800").parameters.numbers["compute_rate"]


@pytest.mark.parametrize("family", ["h100_p5", "h100_a3mega", "b200_p6"])
def test_a_slower_network_of_a_cloud_is_an_override_of_its_base(family: str) -> None:
    """What the wire takes longer, every hop over it takes longer; how much of that is its own nobody measured."""
    cloud, base = load_profile(family), load_profile(family.partition("_")[0])
    slower = overridden(base.machine("2x8"), [f"nic.latency={cloud.parameters['nic_latency'].text}"]).parameters
    hops = [name for name in base.parameters if name.startswith(("nic_hop", "lone_hop"))]
    assert [cloud.parameters.numbers[name] for name in hops] == pytest.approx(
        [slower.numbers[name] for name in hops], rel=1e-12
    )
    assert {source_kind(cloud.parameters[name].source) for name in hops} == {"assumed"}


def test_gpus_that_share_a_nic_have_half_of_it_each_and_all_of_it_alone() -> None:
    """An A100 node with four NICs for eight GPUs, beside one with eight: one GPU sends as fast, two take twice as long,
    but on two NICs they do not."""
    own, shared = load_profile("a100"), load_profile("a100_100g")
    assert (own.ranks_per_nic, shared.ranks_per_nic) == (1, 2)
    alone, of_one_nic, of_two_nics = [(0, 8)], [(0, 8), (1, 9)], [(0, 8), (2, 10)]

    def time_s(profile: Profile, pairs: list[tuple[int, int]]) -> float:
        size = 2**28
        start, goal = np.zeros((16, len(pairs)), bool), np.zeros((16, len(pairs)), bool)
        for block, (a, b) in enumerate(pairs):
            start[a, block] = goal[a, block] = goal[b, block] = True
        step = Step.of([(a, b, 0, block) for block, (a, b) in enumerate(pairs)])
        blocks = Blocks.of_data(np.full(len(pairs), size))
        schedule = Schedule("send", 16, 1, blocks, start, goal, [step])
        machine = profile.machine("2x8", library="ideal")
        return float(simulate(schedule, machine).time_s) - float(machine.topology.route(0, 8).latency_s)

    assert time_s(shared, alone) == pytest.approx(time_s(own, alone))
    assert time_s(shared, of_two_nics) == pytest.approx(time_s(own, of_two_nics))
    assert time_s(shared, of_one_nic) == pytest.approx(2 * time_s(own, of_one_nic))


def test_a_profile_keeps_its_shared_nics_in_its_file(tmp_path: Path) -> None:
    path = tmp_path / "copy.toml"
    path.write_text(profile_document(load_profile("a100_100g")))
    assert load_profile(str(path)).ranks_per_nic == 2


def test_rails_alone_join_gpus_of_one_number_only() -> None:
    topology = load_profile("h100").machine("2x4").topology
    rails_only = member("h100-2x4-rails-only")
    assert rails_only is not None
    joined = {(a, b) for a, b in zip(*np.nonzero(rails_only.topology.linked_pairs), strict=True) if a // 4 != b // 4}
    assert joined == {(a, (a + 4) % 8) for a in range(8)}
    assert topology.linked_pairs.sum() == 8 * 7


@pytest.mark.parametrize(
    ("base", "library", "expected"),
    [
        ("h1000", "nccl", "base 'h1000' is unknown: expected one of a100"),
        ("mi300x", "nccl", "base 'mi300x' is of rccl, expected one of nccl"),
    ],
)
def test_a_base_of_another_library_and_an_unknown_one_are_refused(
    base: str, library: str, expected: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(OWN.replace('library = "gloo"', f'library = "{library}"\nbase = "{base}"'))
    with pytest.raises(ProfileError, match=re.escape(expected)):
        load_profile(str(path))
