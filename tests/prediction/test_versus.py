"""What changes buy: ratios beside those of the answers, their intervals, and changes that do nothing."""

from __future__ import annotations

import pytest

from tasp_lab.core.errors import TaspLabError
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.prediction.compare import Ranking, compare
from tasp_lab.prediction.versus import UNCHANGED, Versus
from tasp_lab.workload.layer import Workload

LAYER = Workload(65536, heads=32, kv_heads=8, mask="causal")
NAMES = ["zigzag-ring-attention", "kv-all-gather"]
CHANGES = ["nic.bandwidth=x0.5", "nic.bandwidth=x1", "nic.bandwidth=x0.5,layer.kv_heads=4", "b200-2x8", "h100-8"]


@pytest.fixture(scope="module")
def ranking() -> Ranking:
    return compare("h100-2x8", LAYER, NAMES, versus=CHANGES)


def test_a_ratio_is_that_of_the_answers(ranking: Ranking) -> None:
    for found in ranking.versus:
        assert found.answer is not None
        assert found.ratio == pytest.approx(float(found.answer.time_s / found.base.time_s), rel=1e-12)
        assert found.low <= found.ratio <= found.high
        document = found.record
        assert document["time_s"] == float(found.answer.time_s)
        assert document["ratio"] == found.ratio


def test_an_override_is_the_same_as_asking_with_it(ranking: Ranking) -> None:
    asked = compare("h100-2x8", LAYER, NAMES, overrides=("nic.bandwidth=x0.5",))
    halved = ranking.versus[0].answer
    assert halved is not None
    times_s = {each.schedule: each.time_s for each in asked.candidates}
    assert halved.time_s == times_s[halved.schedule]


def test_missing_parts_are_the_same_as_asking_without_them() -> None:
    changes = ["without nic.3", "without nic.3, nic.bandwidth=x2", "without gpu.5"]
    found = compare("h100-2x8", LAYER, NAMES, without=("nic.9",), versus=changes).versus
    for change, (without, overrides) in zip(
        found, [(("nic.9", "nic.3"), ()), (("nic.9", "nic.3"), ("nic.bandwidth=x2",)), (("nic.9", "gpu.5"), ())],
        strict=True,
    ):  # fmt: skip
        asked = compare("h100-2x8", LAYER, NAMES, without=without, overrides=overrides)
        assert change.answer is not None
        assert change.answer.time_s == {each.schedule: each.time_s for each in asked.candidates}[change.answer.schedule]


def test_a_change_that_does_nothing_names_the_bottleneck(ranking: Ranking) -> None:
    same = ranking.versus[1]
    assert (same.ratio, same.low, same.high) == (1, 1, 1)
    assert same.text == f"nothing: bound by {same.bottleneck}"


def test_variants_of_a_machine_are_surer_than_other_machines(ranking: Ranking) -> None:
    widths = {found.change: found.high / found.low for found in ranking.versus}
    assert widths["nic.bandwidth=x0.5"] < widths["b200-2x8"]


def test_half_the_network_is_not_faster_and_less_keys_are_not_slower(ranking: Ranking) -> None:
    halved, with_fewer = ranking.versus[0], ranking.versus[2]
    assert halved.ratio >= 1
    assert with_fewer.ratio <= halved.ratio + UNCHANGED


def test_overrides_of_the_machine_are_not_for_another_one() -> None:
    overrides = ("nic.bandwidth=x0.5", "layer.kv_heads=4")
    found = compare("h100-2x8", LAYER, NAMES[:1], overrides=overrides, versus=["h100-2x8", load_machine("h100-8")])
    plain = compare("h100-2x8", LAYER, NAMES[:1], overrides=overrides[1:])
    answer = found.versus[0].answer
    assert answer is not None
    assert answer.time_s == plain.best.time_s
    assert found.versus[1].change == "h100-8"


def test_ideal_links_are_exact() -> None:
    found = compare("full-mesh:4", Workload(4096, heads=4, mask="full"), NAMES[1:], versus=["full-mesh:2"]).versus[0]
    assert found.ratio != 1
    assert found.low == pytest.approx(found.ratio)
    assert found.high == pytest.approx(found.ratio)


def test_a_schedule_that_does_not_apply_is_named() -> None:
    layer = Workload(4096, heads=4, mask="full")
    [found] = compare("full-mesh:4", layer, ["ulysses"], versus=["full-mesh:6"]).versus
    assert (found.answer, found.text) == (None, "does not apply")
    assert found.reason


@pytest.mark.parametrize("change", ["nic.bandwith=x2", "no-such-machine", "nic.bandwidth=fast"])
def test_wrong_changes_are_refused_before_anything_is_simulated(change: str) -> None:
    with pytest.raises(TaspLabError) as caught:
        compare("h100-2x8", LAYER, NAMES, versus=[change], progress=lambda line: pytest.fail(line))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("ratio", "low", "high", "text"),
    [
        (1.12, 1.08, 1.17, "+12% (8 to 17)"),
        (0.9, 0.85, 1.02, "-10% (-15 to 2)"),
        (1.009, 1.008, 1.01, "+0.9% (0.8 to 1.0)"),
        (0.5, 0.4, 0.625, "2x as fast (1.6x to 2.5x)"),
        (3.0, 2.0, 4.0, "3x slower (2x to 4x)"),
    ],
)
def test_small_changes_are_in_percent_and_large_ones_are_factors(
    ranking: Ranking, ratio: float, low: float, high: float, text: str
) -> None:
    assert Versus("it", ranking.best, ranking.best, ratio, low, high).text == text
