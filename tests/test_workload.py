"""Workloads: closed forms of what positions and pairs cost, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasp_lab.attention import attention
from tasp_lab.builders import full_mesh
from tasp_lab.errors import WorkloadError
from tasp_lab.workload import ELEMENT_BYTES, MOST_POSITIONS, Workload

BATCH, GROUP, KV_HEADS, HEAD_DIM = 3, 5, 7, 11
GOOD: dict[str, Any] = {"sequence": 64, "batch": BATCH, "heads": GROUP * KV_HEADS, "kv_heads": KV_HEADS}


@pytest.mark.parametrize(("dtype", "element_bytes"), [("fp32", 4), ("bf16", 2), ("fp16", 2)])
def test_positions_and_pairs_cost_what_their_numbers_say(dtype: str, element_bytes: int) -> None:
    """K and V of the KV heads; Q of all heads; two products of head_dim multiply-adds per head and pair."""
    layer = Workload(**GOOD, head_dim=HEAD_DIM, dtype=dtype)
    assert layer.kv_bytes_per_position == 2 * BATCH * KV_HEADS * HEAD_DIM * element_bytes
    assert layer.query_bytes_per_position == BATCH * GROUP * KV_HEADS * HEAD_DIM * element_bytes
    assert layer.flops_per_pair == 2 * 2 * BATCH * GROUP * KV_HEADS * HEAD_DIM


def test_there_are_as_many_kv_heads_as_heads_unless_said_otherwise() -> None:
    assert Workload(sequence=1, heads=6) == Workload(sequence=1, heads=6, kv_heads=6)
    assert Workload(sequence=1, heads=6).kv_heads == 6


def refused(**wrong: Any) -> str:
    with pytest.raises(WorkloadError) as told:
        Workload(**GOOD | wrong)
    assert len(str(told.value).splitlines()) == 1
    return str(told.value)


@given(st.sampled_from(["sequence", "batch", "heads", "kv_heads", "head_dim"]), st.integers(max_value=0))
def test_every_number_is_one_or_more(name: str, number: int) -> None:
    assert refused(**{name: number}).startswith(f"{name.replace('_', ' ')}: {number}, expected 1 or more")


@given(st.integers(MOST_POSITIONS + 1))
def test_a_sequence_is_not_too_long_to_count_its_pairs(sequence: int) -> None:
    assert f"expected at most {MOST_POSITIONS}" in refused(sequence=sequence)


@given(st.integers(1, 100), st.integers(1, 100))
def test_heads_are_a_multiple_of_kv_heads(heads: int, kv_heads: int) -> None:
    if heads % kv_heads:
        assert refused(heads=heads, kv_heads=kv_heads) == f"{heads} heads are not a multiple of {kv_heads} KV heads"
    else:
        assert Workload(sequence=1, heads=heads, kv_heads=kv_heads).kv_heads == kv_heads


@given(st.text().filter(lambda text: text not in ELEMENT_BYTES))
def test_an_unknown_dtype_lists_the_known(dtype: str) -> None:
    assert refused(dtype=dtype).endswith("expected one of fp32, bf16, fp16")


@given(st.text().filter(lambda text: text not in ("full", "causal")))
def test_an_unknown_mask_lists_the_known(mask: str) -> None:
    assert refused(mask=mask).endswith("expected full or causal")


@given(st.integers(max_value=0))
def test_a_window_has_at_least_the_own_key(window: int) -> None:
    assert refused(mask="causal", window=window).startswith(f"window: {window}, expected 1 or more")


@given(st.integers(1))
def test_a_window_needs_the_causal_mask(window: int) -> None:
    assert "the mask causal" in refused(window=window)


def test_a_window_longer_than_the_sequence_is_no_window() -> None:
    layer = Workload(sequence=16, mask="causal", window=2**64)
    pairs = attention("tasp", full_mesh(2), layer).flops().sum() / layer.flops_per_pair
    assert pairs == 16 * 17 / 2


@pytest.mark.parametrize(
    "large",
    [
        {"sequence": MOST_POSITIONS, "heads": 35},
        {"sequence": 2**24, "heads": 70, "head_dim": 128},
        {"head_dim": 2**60},
        {"batch": 2**70},
    ],
    ids=lambda large: ",".join(large),
)
def test_a_layer_whose_bytes_or_flops_do_not_fit_into_64_bits_is_refused(large: dict[str, int]) -> None:
    """Otherwise their sums overflow without a word."""
    assert "too large" in refused(**large)
