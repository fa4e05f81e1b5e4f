"""Overrides of layers: their fields, what follows from them, and what a layer cannot have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tasp_lab import Workload, compare, predict
from tasp_lab.machines.overrides import overridden_layer

LAYER = Workload(4096, heads=16, kv_heads=8, mask="causal")


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("layer.kv_heads=1", replace(LAYER, kv_heads=1)),
        ("layer.kv_heads=x0.5", replace(LAYER, kv_heads=4)),
        ("layer.seq=8Ki", replace(LAYER, sequence=8192)),
        ("layer.sequence=+1Ki", replace(LAYER, sequence=5120)),
        ("layer.batch=x3", replace(LAYER, batch=3)),
        ("layer.dtype=fp32", replace(LAYER, dtype="fp32")),
        ("layer.mask=full", replace(LAYER, mask="full")),
        ("layer.window=1Ki", replace(LAYER, window=1024)),
        ("layer.heads=x2", replace(LAYER, heads=32)),
        ("layer.value_dim=x0.5", replace(LAYER, value_dim=64)),
        ("layer.head_dim=192", replace(LAYER, head_dim=192)),
        ("layer.documents=100,200", replace(LAYER, sequence=300, documents=(100, 200))),
        ("layer.kind=linear", replace(LAYER, kind="linear")),
        ("nic.bandwidth=x2", LAYER),
    ],
)
def test_a_field_is_changed(override: str, wanted: Workload) -> None:
    assert overridden_layer(LAYER, [override]) == wanted


def test_heads_of_keys_follow_where_there_are_as_many_as_of_queries() -> None:
    assert overridden_layer(Workload(64, heads=8, mask="full"), ["layer.heads=16"]) == Workload(
        64, heads=16, mask="full"
    )
    assert overridden_layer(Workload(64, heads=8, mask="full"), ["layer.kv_heads=2", "layer.heads=16"]).kv_heads == 2


def test_predictions_are_those_of_the_changed_layer() -> None:
    wanted = predict("h100-8", "ulysses", replace(LAYER, kv_heads=16), samples=0)[0]
    found = predict("h100-8", "ulysses", LAYER, overrides=["layer.kv_heads=16"], samples=0)[0]
    assert (found.time_s, found.bound_s, found.topology) == (wanted.time_s, wanted.bound_s, "h100-8")
    wider = compare("full-mesh:4", replace(LAYER, kv_heads=16), ["ulysses", "kv-all-gather"], samples=0)
    overridden = compare("full-mesh:4", LAYER, ["ulysses", "kv-all-gather"], overrides=["layer.kv_heads=16"], samples=0)
    assert [each.time_s for each in overridden.candidates] == [each.time_s for each in wider.candidates]
