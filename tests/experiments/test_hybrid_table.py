"""The table of hybrids: what is run, and how runs become rows."""

from __future__ import annotations

from typing import Any

import pytest

from experiments.tables import hybrids
from tasp_lab.core.tables import cells_of
from tasp_lab.schedules.registry import LINEAR


def run(layers: str, processes: int, times_s: list[float], losses: list[float]) -> list[dict[str, Any]]:
    """Documents of the rounds of a case."""
    return [
        {
            "layers": layers, "decay": "none", "tokens": 100, "tokens_per_s": 100 / each, "attention_share": each / 10,
            "relayout_share": 0.0, "sequence_parallel": processes, "losses": losses, "linear_schedule": "lasp",
            "schedule": None,
        }
        for each in times_s
    ]  # fmt: skip


def test_every_linear_schedule_is_run_alone_and_in_a_hybrid() -> None:
    cases = [case for part in ("linear", "softmax") for case in hybrids.PARTS[part]]
    for layers in ("LLLL", "LLLS"):
        assert {case.linear for case in cases if case.layers == layers} == set(LINEAR)
    assert hybrids.ROUNDS.keys() == hybrids.PARTS.keys()
    for cases in hybrids.PARTS.values():
        assert len(set(cases)) == len(cases)
        for case in cases:
            assert case.run.layouts(case.recipe, hybrids.RANKS).keys() == set(case.layers)


def test_rows_are_medians_over_rounds() -> None:
    alone = hybrids._summary(run("LL", 1, [2.0], [5.0, 4.0]))
    found = hybrids._summary(run("LL", 4, [3.0, 9.0, 4.0], [5.0, 4.2]))
    beside = cells_of(found, hybrids.columns({"LL": alone}))
    assert beside[:5] == ["LL: lasp", "4.00", "3.00 to 9.00", "0.50", "40%"]
    assert cells_of(alone, hybrids.columns({}))[:4] == ["LL: one process", "2.00", "2.00 to 2.00", ""]


def test_the_largest_difference_is_between_runs_of_one_stack() -> None:
    runs = [{"layers": "LL", "decay": decay, "losses": losses} for decay, losses in (
        ("none", [[5.0, 4.0], [5.0, 4.1]]), ("none", [[5.0, 4.2]]), ("head", [[9.0, 9.0]]),
    )]  # fmt: skip
    assert hybrids.largest_difference(runs) == pytest.approx(0.05)
