"""The tables of the emulated fabric: their cases, their theory against the simulator, and pages made from records."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.common import RESULTS, write_record
from experiments.tables import fabric
from experiments.tables.fabric import (
    TABLES,
    TIE,
    Case,
    cases_of,
    law,
    main,
    measure,
    out_of_order,
    publish,
)
from sim.simulate import simulate
from tasp_lab.machines.machine import Machine
from tasp_lab.rings.options import RingOptions
from tasp_lab.schedules.build import build_schedules, collective

LINEAR = Case("full-mesh:8", sequence=8, heads=28, head_dim=64, kind="linear", passes="both")


@pytest.mark.parametrize("name", TABLES)
def test_every_listed_schedule_applies_to_its_case(name: str) -> None:
    for part in TABLES[name]["parts"]:
        for case in cases_of(TABLES[name], part):
            for schedule in case.schedules:
                if case.size_bytes is None:
                    assert case.built(schedule)
                else:
                    collective(schedule, case.links, case.size_bytes).check_routes(case.links)


@pytest.mark.parametrize("name", TABLES)
def test_the_page_is_that_of_the_record(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.json").write_text((RESULTS / f"{name}.json").read_text())
    publish(name, tmp_path)
    assert (tmp_path / f"{name}.md").read_text() == (RESULTS / f"{name}.md").read_text()


def states(case: Case, name: str) -> list[Fraction]:
    """The times of the passes without compute and latency, in times of a state on a link, exact."""
    slow = [Fraction(link.bandwidth_bytes_per_s) for link in case.links.links]
    unit = Fraction(case.state_bytes) / slow[0]
    links = case.links.map_links(lambda at, link: replace(link, bandwidth_bytes_per_s=slow[at] * unit, latency_s=0))
    rings = RingOptions(lanes=case.rings).find(links) if case.rings else None
    passes = build_schedules(name, links, case.layer, rings, case.options)
    return [Fraction(simulate(each, Machine(links)).time_s) for each in passes]


@pytest.mark.parametrize("where", ["full-mesh:8", "switch:8", "nodes:2x4"])
@pytest.mark.parametrize("pieces", [1, 2, 7, 28])
def test_a_chain_of_states_takes_n_minus_2_plus_k_hops_of_a_piece(where: str, pieces: int) -> None:
    """Both passes, wherever the links are: tau + (n - 2) tau / K; in one piece All-Scan is LASP."""
    case = replaced(LINEAR, topology=where, pieces=pieces if pieces > 1 else None)
    assert states(case, "all-scan" if pieces > 1 else "lasp") == [1 + Fraction(6, pieces)] * 2


@pytest.mark.parametrize(
    ("where", "name", "rings", "expected"),
    [
        ("full-mesh:8", "lasp-2", None, 7),
        ("full-mesh:8", "multi-ring-lasp-2", None, 1),
        ("full-mesh:8", "multi-ring-lasp-2", 4, Fraction(7, 4)),
        ("full-mesh:8", "direct-lasp-2", None, 1),
        ("full-mesh:8", "trees-lasp-2", None, 1),
        ("switch:8", "direct-lasp-2", None, 7),
        ("nodes:2x4", "multi-ring-lasp-2", None, Fraction(7, 4)),
        ("nodes:2x4", "direct-lasp-2", None, 4),
    ],
)
def test_gathers_take_the_states_of_their_busiest_link(
    where: str, name: str, rings: int | None, expected: Fraction | int
) -> None:
    assert states(replaced(LINEAR, topology=where, rings=rings), name) == [expected] * 2


def replaced(case: Case, **changes: object) -> Case:
    return Case(**{name: getattr(case, name) for name in case.__struct_fields__} | changes)


def test_kernel_calls_take_the_share_that_is_asked_for() -> None:
    case = Case("full-mesh:4", ("ring-attention", "tasp"), sequence=64, mask="full", ccr=0.5)
    links = case.links.scaled(case.scale)
    (ring,) = case.built("ring-attention")
    compute_s = int(ring.flops().sum(axis=0).max()) / case.flops_per_s()
    assert compute_s == pytest.approx(0.5 * float(simulate(ring, Machine(links)).time_s))


def test_the_law_is_that_of_communication_or_of_compute() -> None:
    assert law(1e-9, 7) == pytest.approx(7)
    assert law(1e9, 7) == pytest.approx(1)


TIMES = st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), max_size=6)


@given(TIMES)
def test_pairs_out_of_order_are_those_that_differ_and_cross(times: list[tuple[float, float]]) -> None:
    rows = [{"schedule": str(i), "predicted_s": p, "measured_s": m} for i, (p, m) in enumerate(times)]
    expected = {
        frozenset((str(i), str(j)))
        for (i, a), (j, b) in combinations(enumerate(times), 2)
        if all(abs(x - y) > TIE * max(x, y) for x, y in zip(a, b, strict=True)) and (a[0] < b[0]) != (a[1] < b[1])
    }
    assert {frozenset(pair) for pair in out_of_order(rows)} == expected
    for row in rows:
        row["measured_s"] = row["predicted_s"]
    assert out_of_order(rows) == []


def test_an_unknown_table_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pases"]) == 2
    assert "unknown table 'pases', did you mean 'passes'?" in capsys.readouterr().err


@pytest.mark.fabric
@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.full
def test_small_cases_run_on_the_fabric_and_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    softmax = Case("full-mesh:3", ("zigzag-ring-attention", "tasp"), sequence=72, heads=2, passes="both", repeats=1)
    both = measure(softmax, sums=True)
    assert [row["pass"].partition(",")[0] for row in both] == ["forward", "backward", "both"] * 2
    gathers = {"lasp-2": 2, "direct-lasp-2": 1}
    linear = Case("full-mesh:3", tuple(gathers), sequence=192, heads=28, head_dim=16, kind="linear", repeats=1)
    for row in measure(linear):
        assert row["nominal_s"] / row["state_s"] == pytest.approx(gathers[row["schedule"]], rel=0.02)
        assert row["measured_s"] > 0
    shards = measure(Case("full-mesh:3", ("ring", "multi-ring"), size_bytes=65536, repeats=1))
    for name, rows in (("passes", both), ("all_gather", shards)):
        write_record(tmp_path / f"{name}.json", {"parts": {"all": {"repeats": 1, "rows": rows}}})
        publish(name, tmp_path)
    assert "| full-mesh:3, causal, -, -, tasp | both" in (tmp_path / "passes.md").read_text()
    monkeypatch.setitem(fabric.TABLES["all_gather"]["parts"], "all", {"run": {"topology": "full-mesh:3"}})  # type: ignore[index]
    fabric.measure_part("all_gather", "all", tmp_path)
    assert len(json.loads((tmp_path / "all_gather.json").read_text())["parts"]["all"]["rows"]) == 3
