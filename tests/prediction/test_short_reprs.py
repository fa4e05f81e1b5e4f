"""`repr` of what a REPL prints: one short line, for every public result."""

from __future__ import annotations

from collections.abc import Iterator

import tasp_lab
from tasp_lab.core.report import Report
from tasp_lab.core.tables import Part
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.schedules.build import build_schedules
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tests.support.outputs import reports

MOST = 200
LAYER = Workload(8192, heads=8, mask="causal")


def objects() -> Iterator[object]:
    """One of each class that users meet, with many events, links or options."""
    predicted = tasp_lab.predict("full-mesh:8", ["ring", "multi-ring"], 2**20, explain=True)
    yield from (predicted, predicted[0], predicted[0].timeline, predicted[0].interval, predicted.provenance)
    yield from (
        predicted.machine,
        predicted.machine.topology,
        load_machine("h100-4x8"),
        load_machine("h100-4x8").topology,
    )
    layers = tasp_lab.predict("full-mesh:8", "tasp", LAYER, passes="both")
    yield from (layers, *layers)
    compared = tasp_lab.compare("full-mesh:8", LAYER, ["tasp", "usp:3x3"], samples=0)
    yield from (compared, compared.best, compared.candidates[-1])
    yield tasp_lab.decompose("full-mesh:8")
    (schedule,) = build_schedules("tasp", full_mesh(8), LAYER)
    yield from (schedule, schedule.steps[0], schedule.steps[0].calls, schedule.blocks)
    yield tasp_lab.predict_step("full-mesh:2", "llama-3-8b", 4096, "ulysses")
    machines = {"name": [f"h100-{nodes}x8" for nodes in range(2, 40)]}
    yield tasp_lab.load_study({"machine": machines, "layer": {"seq": "8Ki"}, "schedule": {"name": "tasp"}})


def test_objects_have_one_short_line() -> None:
    shown = {type(each).__name__: repr(each) for each in objects()}
    assert shown.keys() >= {
        "Predictions",
        "Ranking",
        "Answer",
        "DecompositionReport",
        "Schedule",
        "Topology",
        "Machine",
    }
    too_long = {name: text for name, text in shown.items() if len(text) >= MOST or "\n" in text}
    assert not too_long


def test_every_result_has_the_line_of_reports() -> None:
    """A dataclass would otherwise print all its fields."""
    found = reports()
    assert len(found) > 15
    assert [each.__name__ for each in found if each.__repr__ is not Report.__repr__] == []


class _Long(Report):
    def to_dict(self) -> dict[str, object]:
        return {}

    def records(self) -> list[dict[str, object]]:
        return []

    def parts(self) -> list[Part]:
        return ["a\nb " * 10_000]


def test_a_long_line_is_cut() -> None:
    assert repr(_Long()).startswith("<_Long: a b a b")
    assert len(repr(_Long())) < MOST
