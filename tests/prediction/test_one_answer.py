"""A machine's name means the same machine in Python and on the command line: its links and its library."""

from __future__ import annotations

import json

import pytest

import tasp_lab
from tasp_lab.cli.process import main
from tasp_lab.core.errors import TaspLabError
from tasp_lab.machines.catalogue import catalogue_names, load_machine
from tasp_lab.machines.machine import IDEAL
from tasp_lab.machines.profile import member

SCHEDULES = ("ring", "multi-ring")
SHARD_BYTES = 3 * 2**20
OTHERS = ("full-mesh:8", "nodes:2x4:switch", "h100-2x4", "gh200-3x1")


def asked_on_the_command_line(capsys: pytest.CaptureFixture[str], name: str, *options: str) -> dict[str, object]:
    chosen = [word for schedule in SCHEDULES for word in ("--schedule", schedule)]
    main(["predict", name, *chosen, "--shard-bytes", str(SHARD_BYTES), *options, "--json"])
    document = json.loads(capsys.readouterr().out)
    times = {each["schedule"]: each["time_s"] for each in document["predictions"]}
    return {"library": document["library"]} | times


def asked_in_python(name: str, library: str = "auto") -> dict[str, object]:
    found = tasp_lab.predict(name, SCHEDULES, SHARD_BYTES, library=library)
    return {"library": found.library} | {each.schedule: float(each.time_s) for each in found}


@pytest.mark.parametrize("name", [*catalogue_names(), *OTHERS])
def test_python_and_the_command_line_agree(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert asked_in_python(name) == asked_on_the_command_line(capsys, name)


@pytest.mark.parametrize("library", ["ideal", "gloo", "nccl"])
def test_they_agree_with_every_library(capsys: pytest.CaptureFixture[str], library: str) -> None:
    found = asked_in_python("h100-2x2", library)
    assert found == asked_on_the_command_line(capsys, "h100-2x2", "--library", library)
    assert found["library"] == library


@pytest.mark.parametrize("name", catalogue_names())
def test_a_machine_comes_with_the_library_of_its_profile(name: str) -> None:
    found = member(name)
    assert load_machine(name).comm_library == (IDEAL if found is None else found.comm_library)
    assert load_machine(name, library="ideal").comm_library == IDEAL


@pytest.mark.parametrize("name", ["h100-2x4", "mi300x-8", "torus:3x3", "dgx-1v"])
def test_a_library_changes_no_link_and_no_compute_rate(name: str) -> None:
    own, wires = load_machine(name), load_machine(name, library="ideal")
    assert (own.topology, own.compute) == (wires.topology, wires.compute)


@pytest.mark.parametrize(
    ("machine", "library", "expected"),
    [
        ("h100-8", "mpi", "'mpi' is unknown: expected auto, nccl, rccl, gloo, ideal"),
        ("h100-8", "rccl", "the profile of h100-8 is of nccl"),
        ("torus:3x3", "nccl", "torus:3x3 has no profile"),
    ],
)
def test_libraries_that_a_machine_has_not(machine: str, library: str, expected: str) -> None:
    with pytest.raises(TaspLabError, match=expected):
        load_machine(machine, library=library)
