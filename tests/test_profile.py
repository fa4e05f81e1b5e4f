"""Profiles: families of machines with their library, files of one's own, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tasp_lab.catalogue import catalogue_names, load_machine, with_library
from tasp_lab.channel_library import ChannelLibrary
from tasp_lab.errors import ProfileError, TaspLabError
from tasp_lab.machine import IDEAL
from tasp_lab.profile import (
    MEANINGS,
    find_profile,
    load_profile,
    member,
    profile_document,
    profile_names,
)

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
    for constant in profile.constants:
        assert MEANINGS[constant.name].parse(constant.value) >= 0
        assert re.search(r"[A-Za-z]/[A-Za-z]|#[0-9]|\d{4}|RFC|assumption", constant.source), constant.name
    assert len({constant.name for constant in profile.constants}) == len(profile.constants)


@pytest.mark.parametrize("name", profile_names())
def test_payload_is_less_than_the_line_and_hops_are_no_shorter_than_the_wire(name: str) -> None:
    of = load_profile(name).number
    assert of("link_many_payload") <= of("link_payload") <= of("link_bandwidth")
    assert of("nic_ring_rate") <= of("nic_bandwidth")
    assert of("nic_payload") <= of("nic_bandwidth")
    for protocol in ("ll", "ll128", "simple"):
        assert of(f"link_hop_{protocol}") >= of("link_latency")
        assert of(f"nic_hop_{protocol}") >= of("nic_latency")


FAMILIES = [name for name in catalogue_names() if name.partition("-")[0] in profile_names()]


@pytest.mark.parametrize("name", FAMILIES)
def test_machines_of_the_catalogue_have_the_wires_of_their_profile(name: str) -> None:
    found = member(name)
    assert found is not None
    assert found.topology == load_machine(name).topology
    assert found.compute == load_machine(name).compute
    stated = {constant.name: constant.value for constant in load_machine(name).constants}
    assert stated.items() <= {constant.name: constant.value for constant in found.constants}.items()


def test_a_machine_is_its_wires_until_a_library_is_asked_for() -> None:
    wires = load_machine("h100-3x5")
    assert wires.transport == IDEAL
    assert wires.topology.world_size == 15
    assert with_library("h100-3x5", wires).transport.name == "nccl"
    assert with_library("h100-3x5", wires, "ideal") == wires
    assert with_library("torus:3x3", load_machine("torus:3x3")).transport == IDEAL
    assert with_library("torus:3x3", load_machine("torus:3x3"), "gloo").transport.name == "gloo"


@pytest.mark.parametrize("nodes", [1, 2, 17, 18])
def test_a_rack_is_one_domain(nodes: int) -> None:
    found = member(f"gb200-{nodes}x4")
    assert found is not None
    assert isinstance(found.transport, ChannelLibrary)
    assert found.transport.domain_ranks == 4 * nodes
    assert len(found.transport.media) == 1


def test_two_racks_are_two_domains() -> None:
    found = member("gb200-36x4")
    assert found is not None
    assert isinstance(found.transport, ChannelLibrary)
    assert found.transport.domain_ranks == 72
    assert len(found.transport.media) == 2
    rack = member("gb200-nvl72")
    assert rack is not None
    assert rack.topology.world_size == 72


def test_one_node_of_a_file_and_several(own: Path) -> None:
    found = member(str(own))
    assert found is not None
    assert (found.topology.world_size, found.transport.name) == (2, "gloo")
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
        ('name = "link_latency"', 'name = "link_bandwidth"', "constant 'link_bandwidth' is there twice"),
        ('"10us"', '"10"', "time '10': expected a number and a unit"),
        ('"1GB/s"', '"-1GB/s"', "expected more than 0"),
        ('library = "gloo"', 'library = "mpi"', "Invalid enum value 'mpi'"),
        ("ranks_per_node = 2", "ranks_per_node = 0", "ranks_per_node"),
        ('name = "mine"', "name = 3", "name"),
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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("h100-2x9", "at most 8 ranks per node"),
        ("h100-9999x8", "in all"),
        ("gb200-19x4", "19 nodes do not fill 2 domains equally"),
    ],
)
def test_sizes_that_do_not_exist(text: str, expected: str) -> None:
    with pytest.raises(ProfileError, match=expected):
        member(text)


@pytest.mark.parametrize("text", ["nothing", "h100x", "missing.toml"])
def test_names_of_nothing(text: str) -> None:
    with pytest.raises(ProfileError, match=r"unknown|cannot be read"):
        load_profile(text)
    with pytest.raises(TaspLabError):
        find_profile(text)


@pytest.mark.parametrize(
    ("machine", "library", "expected"),
    [
        ("h100-8", "mpi", "'mpi' is unknown: expected auto, nccl, rccl, gloo, ideal"),
        ("h100-8", "rccl", "the profile of h100-8 is of nccl"),
        ("torus:3x3", "nccl", "torus:3x3 has no profile"),
    ],
)
def test_libraries_that_a_machine_has_not(machine: str, library: str, expected: str) -> None:
    with pytest.raises(ProfileError, match=expected):
        with_library(machine, load_machine(machine), library)


def test_meanings_are_sentences_without_a_full_stop() -> None:
    assert all(meaning.text and not meaning.text.endswith(".") for meaning in MEANINGS.values())
    json.dumps({name: meaning.unit for name, meaning in MEANINGS.items()})


def test_wires_need_no_constants_of_the_library(own: Path) -> None:
    own.write_text(OWN.replace('"gloo"', '"nccl"'))
    wires = load_machine(str(own))
    assert wires.transport == IDEAL
    assert with_library(str(own), wires, "ideal") == wires
    with pytest.raises(ProfileError, match="is missing; nccl needs it here"):
        with_library(str(own), wires)
