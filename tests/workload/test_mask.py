"""Masks as bands, against the definition for each pair of positions; and a new mask, which is one object."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasp_lab import predict
from tasp_lab.core.errors import WorkloadError
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import attention_layout, attention_schedules
from tasp_lab.topology.builders import full_mesh, torus
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.mask import CAUSAL, FULL, MASKS, Mask, mask_named
from tests.support.mutations import is_right_in_orders
from tests.support.numeric_tasks import numbers_of
from tests.support.world import World

limits = st.none() | st.integers(-6, 6)


@st.composite
def masks(draw: st.DrawFn) -> Mask:
    low, high = draw(limits), draw(limits)
    swap = low is not None and high is not None and low > high
    return Mask("any", *((high, low) if swap else (low, high)))


def sees(mask: Mask, query: int, key: int) -> bool:
    ahead = query - key
    return (mask.low is None or ahead >= mask.low) and (mask.high is None or ahead <= mask.high)


@given(masks(), st.integers(0, 9), st.integers(0, 9), st.integers(1, 6), st.integers(1, 6), st.integers(1, 4))
def test_the_band_between_runs_is_that_of_their_positions(
    mask: str, query: int, key: int, queries: int, keys: int, stride: int
) -> None:
    low, high = mask.band(query - key, queries, keys, stride)
    for i in range(queries):
        for j in range(keys):
            assert (low <= i - j <= high) == sees(mask, query + stride * i, key + stride * j)


@given(masks(), st.integers(0, 4), st.integers(1, 8), st.integers(0, 3), st.data())
def test_keys_of_a_query_and_queries_of_a_key_are_the_pairs(
    mask: Mask, start: int, size: int, rest: int, data: Any
) -> None:
    document = range(start, start + size)
    at = data.draw(st.sampled_from(document))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MASKS, "any", mask)
        layer = Workload(start + size + rest, heads=1, mask="any", documents=(start, size, rest))
        assert layer.keys_of(at).tolist() == [key for key in document if sees(mask, at, key)]
        assert layer.queries_of(at).tolist() == [query for query in document if sees(mask, query, at)]


def test_a_window_ends_a_causal_mask_after_as_many_keys() -> None:
    assert [sees(CAUSAL.within(3), 5, key) for key in range(8)] == [False] * 3 + [True] * 3 + [False] * 2
    assert CAUSAL.within(None) == CAUSAL
    assert Workload(8, mask="causal", window=8).visible == CAUSAL, "a window as long as the sequence is none"
    assert [mask.is_of_order for mask in (FULL, CAUSAL, CAUSAL.within(3), Mask("local", -2, 2))] == [1, 1, 0, 0]


LOCAL = Mask("local", -3, 5)
"""A new mask: a query attends to five keys before its own and to three behind it."""


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> Workload:
    monkeypatch.setitem(MASKS, "local", LOCAL)
    return Workload(sequence=22, heads=4, kv_heads=4, head_dim=2, mask="local")


@pytest.mark.parametrize("name", ["ring-attention", "tasp", "ulysses", "burst", "direct-attention", "grid:2x2"])
@pytest.mark.parametrize("documents", [None, (9, 0, 13)])
def test_a_new_mask_is_one_object(name: str, documents: tuple[int, ...] | None, local: Workload) -> None:
    """Schedules of it are proved when they are built, compute its pairs once, and right in float64."""
    lengths = documents or (local.sequence,)
    pairs = sum(sees(LOCAL, i, j) for length in lengths for i in range(length) for j in range(length))
    layer = Workload(22, heads=4, kv_heads=4, head_dim=2, mask="local", documents=documents)
    forward, backward = attention_schedules(name, full_mesh(4), layer, None, AttentionOptions("both"))
    assert forward.flops().sum() == pairs * layer.flops_per_pair
    assert 2 * backward.flops().sum() == 5 * forward.flops().sum()
    for schedule in (forward, backward):
        world = World.of(schedule)
        assert is_right_in_orders(world, numbers_of(world), 2)


def test_a_new_mask_is_predicted_and_has_its_layout(local: Workload) -> None:
    prediction = predict(torus((2, 2)), "tasp", local, passes="both")
    assert json.dumps(prediction.to_dict()).count('"mask": "local"') >= 2, "of either pass"
    assert attention_layout("tasp", local, 4).name == "contiguous"
    assert repr(local).count("mask='local'") == 1


def test_what_a_new_mask_cannot_be_used_for_is_refused(local: Workload) -> None:
    with pytest.raises(WorkloadError, match="window: 4 with the mask local, expected a causal mask"):
        Workload(8, mask="local", window=4)
    with pytest.raises(WorkloadError, match=r"mask 'local' of linear attention, .* expected full or causal"):
        Workload(8, mask="local", kind="linear")
    with pytest.raises(WorkloadError, match="mask 'x': limits 2 and 1, expected the lower one first"):
        Mask("x", 2, 1)


@pytest.mark.parametrize("name", ["diagonal", "", 3, None])
def test_an_unknown_mask_is_refused(name: Any) -> None:
    with pytest.raises(WorkloadError, match=r"unknown mask .*, expected one of full, causal, ranges"):
        mask_named(name)
    with pytest.raises(
        WorkloadError, match=r"unknown mask .*, expected one of full, causal, ranges|^mask: .*, expected a text"
    ):
        Workload(8, mask=name)
