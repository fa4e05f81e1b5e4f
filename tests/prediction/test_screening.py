"""A ranking without the schedules that a bound rules out recommends what the whole ranking does."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasp_lab import Workload
from tasp_lab.core.choices import Pass
from tasp_lab.core.tables import Table
from tasp_lab.prediction.compare import SINGLE_RINGS, Ranking, compare
from tasp_lab.prediction.paired import Rival, Setting, paired_errors
from tasp_lab.schedules.registry import attention_names_on

MACHINES = ("h100-8", "h100-2x4", "mi300x-4", "torus:2x3", "switch:4", "nodes:2x2", "l20-8-pcie")


def both(machine: str, layer: Workload, passes: Pass) -> tuple[Ranking, Ranking]:
    """The ranking with and without screening."""
    whole, screened = (compare(machine, layer, passes=passes, screen=screen) for screen in (False, True))
    return whole, screened


@given(
    st.sampled_from(MACHINES), st.integers(8, 18), st.sampled_from([(8, 8), (8, 1), (32, 4)]),
    st.sampled_from(["full", "causal"]), st.sampled_from(["forward", "both"]),
)  # fmt: skip
@settings(max_examples=12)
def test_screening_changes_no_recommendation(
    machine: str, length: int, heads: tuple[int, int], mask: str, passes: Pass
) -> None:
    layer = Workload(2**length, heads=heads[0], kv_heads=heads[1], mask=mask)  # type: ignore[arg-type]
    whole, screened = both(machine, layer, passes)
    assert whole.recommendation is not None
    assert screened.recommendation is not None
    assert screened.recommendation.schedule == whole.recommendation.schedule
    assert screened.recommendation.expected_regret == pytest.approx(whole.recommendation.expected_regret, abs=2e-3)
    times_s = {each.schedule: float(each.time_s) for each in whole.candidates}
    for each in screened.candidates:
        assert float(each.time_s) == times_s[each.schedule]
    for each in screened.settled:
        assert each.least_s is not None
        assert float(whole.best.time_s) < each.least_s <= times_s[each.schedule] * (1 + 1e-9)
    left_out = [each.schedule for each in screened.settled]
    names = [*left_out, *(each.schedule for each in screened.candidates)]
    assert sorted(names) == sorted(each.schedule for each in whole.candidates)
    assert screened.single_ring_s == whole.single_ring_s


@pytest.mark.parametrize(("length", "fitting"), [(2**20, "all"), (6 * 2**20, "some"), (2**24, "none")])
def test_what_fits_is_recommended(length: int, fitting: str) -> None:
    """A GPU holds its share of the tensors, and the buffers of some schedules; bounds are compared with those."""
    layer = Workload(length, heads=32, kv_heads=8, mask="causal")
    whole, screened = both("h100-8", layer, "both")
    fits = [each.fits for each in whole.candidates if each.applies]
    assert {"all": all(fits), "some": any(fits) and not all(fits), "none": not any(fits)}[fitting]
    assert fits == sorted(fits, reverse=True)
    for found in (whole, screened):
        assert found.recommendation is not None
        assert found.recommendation.schedule == whole.recommendation.schedule  # type: ignore[union-attr]
        assert found.recommendation.answer.fits is (fitting != "none")
        assert {each.fits for each in found.recommendation.answers} == {fitting != "none"}
        assert fitting == "some" or all(each.fits for each in found.settled)
        assert ("do not fit into a GPU: " in str(found)) == (fitting == "some")
        assert str(found).startswith("No schedule fits into a GPU: ") == (fitting == "none")
    # what does not fit is not simulated, and what fits with some of its options is
    too_large = {each.schedule for each in whole.candidates if each.fits is False}
    assert (
        too_large
        >= {each.schedule for each in screened.settled if each.fits is False}
        >= ({"trees-kv-all-gather", "kv-all-gather"} if fitting == "some" else set())
    )
    rows = whole.to_dict()["results"]
    assert [row["fits"] for row in rows if row["applies"]] == fits  # type: ignore[attr-defined]


def test_short_layers_between_nodes_are_settled_by_bounds() -> None:
    """Messages cost more than kernels there, and schedules send amounts that differ."""
    found = compare("h100-2x8", Workload(16384, heads=32, kv_heads=8, mask="causal"), passes="both", screen=True)
    assert found.settled
    assert not {each.schedule for each in found.settled} & set(SINGLE_RINGS)
    rows = {row["schedule"]: row.get("least_s") for row in found.records()}
    assert rows.keys() == set(attention_names_on(16))
    assert {name: rows[name] for name in rows if rows[name]} == {each.schedule: each.least_s for each in found.settled}
    assert [row["schedule"] for row in found.to_dict()["not_simulated"]] == [  # type: ignore[attr-defined]
        each.schedule for each in found.settled
    ]
    parts, last = found.parts(), f"times the time of {found.best.schedule}: the last {len(found.settled)} rows"
    assert any(isinstance(part, str) and part.endswith(last) for part in parts)
    table = next(part for part in parts if isinstance(part, Table) and "regret" in part.columns)
    for row, each in zip(table.rows[-len(found.settled) :], found.settled, strict=True):
        assert row[0] == each.schedule
        assert "at least" in row[1]
        assert not any("timeline" in vars(passed) for passed in each.passes), "its row needs no simulation"
    assert {each.schedule for each in (*found.settled, *found.candidates)} == set(attention_names_on(16))


@pytest.mark.parametrize(
    ("machine", "layer", "settings"),
    [
        ("h100-2x8", Workload(16384, heads=32, kv_heads=8, mask="causal"), {"screen": True, "passes": "both"}),
        ("h100-8", Workload(4096, heads=8, mask="causal"), {"tune": True}),
        ("mi300x-4", Workload(8192, heads=8, mask="full"), {"samples": 8, "versus": ["link.bandwidth=x0.5"]}),
        ("full-mesh:4", Workload(4096, heads=4, kind="hybrid", layers="LS", mask="causal"), {}),
    ],
)
def test_processes_change_nothing(machine: str, layer: Workload, settings: dict[str, Any]) -> None:
    lines: list[list[str]] = [[], []]
    found = [
        compare(machine, layer, jobs=jobs, progress=shown.append, **settings)
        for jobs, shown in zip((1, 2), lines, strict=True)
    ]
    documents = [each.to_dict() for each in found]
    for document in documents:
        document["provenance"].pop("date", None)  # type: ignore[attr-defined]
    assert documents[0] == documents[1]
    assert [str(part) for part in found[0].parts()] == [str(part) for part in found[1].parts()]
    assert lines[0] == lines[1]


def test_nothing_is_screened_of_schedules_that_are_named() -> None:
    names = ["token-ring", "ulysses", "zigzag-token-ring"]
    found = compare("h100-2x8", Workload(16384, heads=32, kv_heads=8, mask="full"), names, screen=True)
    assert {each.schedule for each in found.candidates} == set(names)


@pytest.mark.parametrize("setting", ["exact", "library", "links alone"])
def test_beyond_the_margin_the_slower_one_is_slower(setting: Setting) -> None:
    errors = paired_errors()
    for measured in (True, False):
        late_s = errors.margin(setting, measured) * 1.000001
        hides, sends = Rival("tasp", 1.0, 0.0, 8, measured), Rival("ulysses", late_s, 1.0, 8, measured)
        assert errors.first_is_faster(hides, sends, setting) >= 0.995
        assert late_s >= 1
