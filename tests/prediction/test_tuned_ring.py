"""A fair ring: both schedules with a communicator per pair of ranks, and nothing where that changes no ring."""

from __future__ import annotations

import pytest

from tasp_lab.machines.catalogue import load_machine
from tasp_lab.prediction.compare import compare
from tasp_lab.prediction.inputs import with_pairs
from tasp_lab.prediction.predict import predict
from tasp_lab.prediction.recommend import NAMED, TunedRing
from tasp_lab.workload.layer import Workload

LAYER = Workload(16384, heads=32, mask="causal")
RING = "zigzag-ring-attention"


def of_ranking(machine: str, names: list[str], layer: Workload = LAYER) -> TunedRing | None:
    recommendation = compare(machine, layer, names).recommendation
    assert recommendation is not None
    found = recommendation.tuned_ring
    assert (found is not None) == any("communicator per pair" in line for line in recommendation.lines())
    assert (recommendation.record["tuned_ring"] is None) == (found is None)
    return found


def test_both_have_a_communicator_per_pair() -> None:
    """The times are those of predictions for that machine, and the better way of each counts."""
    found = of_ranking("h100-8", ["tasp", RING])
    assert found is not None
    default, tuned = (
        {each.schedule: float(each.time_s) for each in predict(machine, ["tasp", RING], LAYER)}
        for machine in ("h100-8", with_pairs(load_machine("h100-8")))
    )
    assert found.ring == RING
    assert (found.ring_s, found.tuned_ring_s) == pytest.approx((default[RING], tuned[RING]), rel=1e-9)
    assert found.time_s == pytest.approx(default["tasp"], rel=1e-9)
    assert found.tuned_time_s == pytest.approx(min(default["tasp"], tuned["tasp"]), rel=1e-9)
    assert found.gain == pytest.approx(default[RING] / default["tasp"] - 1)
    assert found.remaining == pytest.approx(found.tuned_ring_s / found.tuned_time_s - 1)
    assert found.ring_s > (1 + NAMED) * found.tuned_ring_s
    assert f"not {1 + found.gain:.1f}x as fast" in found.line


def test_a_recommended_ring_gains_nothing_over_itself() -> None:
    found = of_ranking("h100-8", [RING])
    assert found is not None
    assert (found.gain, found.remaining) == (0, 0)
    assert found.line.endswith("ms.")


@pytest.mark.parametrize(
    ("machine", "names", "layer"),
    [
        ("mi300x-8", ["tasp", RING], LAYER),  # RCCL has as many channels for one peer as for all
        ("full-mesh:4", ["tasp", RING], LAYER),  # no library
        ("h100-8", ["tasp", "ulysses"], LAYER),  # no ring is compared
        ("h100-8", ["tasp", RING], Workload(262144, heads=32, mask="causal")),  # long messages have all channels
    ],
)
def test_nothing_where_no_ring_would_be_faster(machine: str, names: list[str], layer: Workload) -> None:
    assert of_ranking(machine, names, layer) is None
