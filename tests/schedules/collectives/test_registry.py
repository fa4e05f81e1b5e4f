"""A schedule is registered once: the help, the bound, the bus bandwidth and the use of rings follow from that."""

from __future__ import annotations

from typing import get_args

import pytest

from tasp_lab.cli.options import schedules_help
from tasp_lab.cli.process import main
from tasp_lab.core.errors import ScheduleError
from tasp_lab.machines.machine import Machine
from tasp_lab.prediction.predict import predict
from tasp_lab.rings.decompose import decompose
from tasp_lab.schedules.build import build_schedules
from tasp_lab.schedules.collectives.all_gather import ring_all_gather
from tasp_lab.schedules.collectives.kinds import KINDS, CollectiveKind
from tasp_lab.schedules.registry import COLLECTIVES, SCHEDULES, ScheduleSpec, attention_names
from tasp_lab.topology.builders import full_mesh, switch
from tasp_lab.workload.layer import Workload


def test_every_collective_has_its_facts() -> None:
    assert set(KINDS) == set(get_args(CollectiveKind)) == {spec.kind for spec in COLLECTIVES.values()}


def test_a_schedule_that_is_registered_is_known_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEDULES, "mine", ScheduleSpec("AllGather", ring_all_gather))
    mine, ring = predict(Machine(switch(4)), ["mine", "ring"], 1000)
    assert mine.time_s == ring.time_s
    assert mine.bound_s == ring.bound_s
    assert "mine" in schedules_help()


def test_the_help_names_every_schedule_once() -> None:
    words, names = schedules_help().replace(",", " ").replace(".", " ").split(), [*COLLECTIVES, *attention_names()]
    assert sorted(word for word in words if word in names) == sorted(names)


def test_the_command_prints_that_help(capsys: pytest.CaptureFixture[str]) -> None:
    main(["predict", "--help"])
    shown = "".join(capsys.readouterr().out.replace("│", " ").split())
    assert all(f"{kind}:{spec.shard}".replace(" ", "") in shown for kind, spec in KINDS.items())
    assert all(name in shown for name in [*COLLECTIVES, *attention_names()])


@pytest.mark.parametrize("name", COLLECTIVES)
def test_only_schedules_that_use_rings_take_those_they_are_given(name: str) -> None:
    mesh = full_mesh(5)
    one = decompose(mesh, lanes=1)
    lanes = [build_schedules(name, mesh, 600, rings)[0].lanes for rings in (None, one)]
    assert (lanes[0] != lanes[1]) == COLLECTIVES[name].uses_rings


@pytest.mark.parametrize(
    ("name", "work", "near"),
    [("rng", 64, "ring"), ("Ring-All-Reduce", 64, "ring-all-reduce"), ("zigzag-ring", Workload(64), "zigzag-ring-at"),
     ("tsap", Workload(64), "tasp")],
)  # fmt: skip
def test_a_misspelt_schedule_is_answered_with_the_nearest(name: str, work: int | Workload, near: str) -> None:
    with pytest.raises(ScheduleError, match=f"unknown schedule '{name}', did you mean '{near}.* expected one of "):
        build_schedules(name, full_mesh(4), work)
