"""Where ranks share cores, nothing is called a prediction."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from runtime.calibration import Calibration
from tasp_lab.core.choices import FabricKind
from tasp_lab.machines.machine import Machine
from tasp_lab.prediction.answer import answer_schedule
from tasp_lab.prediction.predict import predict
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import collective
from tasp_lab.timeline.events import Timeline
from tasp_lab.topology.builders import full_mesh
from tasp_lab.validation import fabrics
from tasp_lab.validation.fabrics import why_not_comparable
from tasp_lab.validation.validate import Comparison, Run, runs_together
from tasp_lab.workload.layer import Workload

CPU = {"device": "cpu"}
MACHINE = Machine(full_mesh(4))
REASON = "4 ranks share 2 cores for their messages, which predictions do not model"


@pytest.mark.parametrize(
    ("fabric", "ranks", "real", "device", "shared"),
    [
        ("local", 9, True, "cpu", True),
        ("local", 3, False, "cpu", True),
        ("local", 2, True, "cpu", False),
        ("emulated", 9, False, "cpu", False),
        ("emulated", 3, True, "cpu", True),
        ("torchrun", 8, True, "NVIDIA H100", False),
        ("torchrun", 16, True, "cpu", True),
    ],
)
def test_fewer_cores_than_ranks(
    monkeypatch: pytest.MonkeyPatch, fabric: FabricKind, ranks: int, real: bool, device: str, shared: bool
) -> None:
    """Messages of local processes need cores, too; waits on shaped links do not."""
    monkeypatch.setattr(fabrics, "usable_cores", lambda: 2)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    reason = why_not_comparable(fabric, ranks, real, {"device": device})
    assert (reason is not None and reason.startswith(f"{ranks} ranks share 2 cores for their ")) == shared


def test_ranks_of_other_hosts_have_other_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fabrics, "usable_cores", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert why_not_comparable("torchrun", 16, True, CPU) is None


def _run(reason: str | None) -> Run:
    prediction = answer_schedule(MACHINE, collective("ring", MACHINE.topology, 1000), 1000)
    return Run(prediction, 1.0, (2.0,), Timeline("measured", "ring", "mesh", 4, ()), 1.0, not_comparable=reason)


@pytest.mark.parametrize("reason", [REASON, None])
def test_the_reason_is_in_the_table_and_in_json(reason: str | None) -> None:
    found = Comparison("local", 1.0, Calibration((), MACHINE), (_run(reason),))
    (row,) = json.loads(json.dumps(found.to_dict()))["runs"]
    assert (row["comparable"], row["not_comparable"]) == (reason is None, reason)
    assert ("not a prediction: " + REASON in " ".join(str(found).split())) == (reason is not None)
    assert ("%" in _run(reason).row(_run(reason))["error"]) == (reason is None)


def test_both_passes_share_the_reason() -> None:
    layer = Workload(8, heads=1, mask="full")
    passes = predict(MACHINE, ["ring-attention"], layer, options=AttentionOptions("both"), compute=1e9)
    runs = [replace(_run(REASON), prediction=each) for each in passes if not each.is_sum]
    assert runs_together(*runs).not_comparable == REASON
