"""Which machines have contention, with which constants; and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from tasp_lab.core.errors import ProfileError
from tasp_lab.machines.catalogue import catalogue_names, load_machine
from tasp_lab.machines.contention import NONE, Contention
from tasp_lab.machines.parameters import Parameter, Parameters
from tasp_lab.machines.profile import load_profile, profile_document, profile_names


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # SMs of data sheets; one per channel; 24 channels make 32 of send and receive, 56 make 64. RCCL's wait.
        ("h100-8", (132, 1, 32)),
        ("a100-8", (108, 1, 32)),
        ("b200-8", (148, 1, 32)),
        ("mi300x-8", (304, 1, 64, 0.79)),
        # Two channels per NIC: 16 with eight of them; 2 with one, doubled, and 4 where there is one GPU per node.
        ("h100-10x8", (132, 1, 16)),
        ("h100-2x1", (132, 1, 4)),
    ],
)
def test_constants(name: str, expected: tuple[float, ...]) -> None:
    assert load_machine(name).contention == Contention(*expected)


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_has_contention_below_half_of_a_gpu(name: str) -> None:
    found = load_profile(name).machine("1x2").contention
    assert found.slows
    assert 0 < found.share(10**6, 0) < 0.5


def test_the_most_channels_are_at_least_those_of_a_message() -> None:
    for name in catalogue_names():
        machine = load_machine(name)
        if machine.contention.slows:
            message = machine.comm_library.message(0, 2**34, 1, first=False)
            assert 0 < message.channels <= machine.contention.max_channels


@pytest.mark.parametrize(
    ("name", "library"), [("h100-8", "ideal"), ("h100-8", "gloo"), ("full-mesh:8", "auto"), ("dgx-1v", "auto")]
)
def test_links_alone_and_tcp_have_none(name: str, library: str) -> None:
    machine = load_machine(name, library=library)
    assert machine.contention == NONE
    assert not machine.comm_library.message(0, 2**30, 1, first=False).channels


def test_a_profile_without_multiprocessors_has_none(tmp_path: Path) -> None:
    h100 = load_profile("h100")
    without = h100.with_parameters(Parameters(each for each in h100.parameters.values() if each.name != "sms"))
    path = tmp_path / "mine.toml"
    path.write_text(profile_document(structs.replace(without, accelerator="")))
    assert load_machine(str(path)).contention == NONE


def test_channels_that_would_take_all_of_a_gpu_are_refused(tmp_path: Path) -> None:
    h100 = load_profile("h100")
    few = h100.parameters.with_parameters([Parameter("sms", 32, "a test")])
    path = tmp_path / "mine.toml"
    path.write_text(profile_document(h100.with_parameters(few)))
    with pytest.raises(ProfileError, match=r"profile 'h100': contention: 32 channels take 32 of 32 multiproc"):
        load_machine(str(path))
