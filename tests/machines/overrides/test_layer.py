"""Overrides of layers: their fields, what follows from them, and what a layer cannot have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tasp_lab import Workload, compare, predict
from tasp_lab.core.errors import OverrideError
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


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["layer.kv_head=1"], "did you mean 'layer.kv_heads'"),
        (["layer.kv_heads=3"], "16 heads are not a multiple of 3 KV heads"),
        (["layer.kv_heads=x0"], "expected x and a number more than 0"),
        (["layer.kv_heads=0"], "kv heads: 0, expected 1 or more"),
        (["layer.heads=x0.3"], "'4.8': expected a whole number"),
        (["layer.seq=128k"], "is ambiguous"),
        (["layer.seq=1", "layer.sequence=2"], "given twice"),
        (["layer.window=x2"], "the layer has no window"),
        (["layer.dtype=x2"], "expected a new value"),
        (["layer.dtype=fp7"], "unknown dtype 'fp7'"),
    ],
)
def test_bad_overrides_of_a_layer_are_refused(overrides: list[str], expected: str) -> None:
    with pytest.raises(OverrideError, match=expected):
        overridden_layer(LAYER, overrides)


@pytest.mark.parametrize("override", ["layer.kv_heads=1", "compute.rate=x2", "compute_rate_fp32=x2"])
def test_a_collective_has_no_layer(override: str) -> None:
    with pytest.raises(OverrideError, match="a collective has no layer and no kernel calls"):
        predict("h100-8", "ring", "1MiB", overrides=[override])
