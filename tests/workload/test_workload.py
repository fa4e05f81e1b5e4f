"""Workloads: closed forms of what positions and pairs cost, and what is refused."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tasp_lab.core.errors import TaspLabError, WorkloadError
from tasp_lab.prediction.provenance import plain
from tasp_lab.schedules.attention.forward import attention
from tasp_lab.schedules.build import attention_layout
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import ELEMENT_BYTES, MAX_POSITIONS, Workload, documents_of, window_of, window_text
from tasp_lab.workload.sequence_layout import LAYOUTS

BATCH, GROUP, KV_HEADS, HEAD_DIM = 3, 5, 7, 11
GOOD: dict[str, Any] = {"sequence": 64, "batch": BATCH, "heads": GROUP * KV_HEADS, "kv_heads": KV_HEADS}


@pytest.mark.parametrize(("dtype", "element_bytes"), [("fp32", 4), ("bf16", 2), ("fp16", 2), ("fp8", 1)])
def test_positions_and_pairs_cost_what_their_numbers_say(dtype: str, element_bytes: int) -> None:
    """K and V of the KV heads; Q of all heads; two products of head_dim multiply-adds per head and pair."""
    layer = Workload(**GOOD, head_dim=HEAD_DIM, dtype=dtype)
    assert layer.kv_bytes_per_position == 2 * BATCH * KV_HEADS * HEAD_DIM * element_bytes
    assert layer.query_bytes_per_position == BATCH * GROUP * KV_HEADS * HEAD_DIM * element_bytes
    assert layer.flops_per_pair == 2 * 2 * BATCH * GROUP * KV_HEADS * HEAD_DIM


@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from(sorted(ELEMENT_BYTES)))
def test_values_of_another_width_cost_what_their_elements_say(keys: int, values: int, dtype: str) -> None:
    """K and Q have the elements of keys, V and O those of values. Of the products of positions, Q K^T, dS K and dS^T Q
    have the length of keys, P V, dO V^T and P^T dO that of values.
    """
    layer = Workload(**GOOD, head_dim=keys, value_dim=values, dtype=dtype)
    element_bytes, heads = ELEMENT_BYTES[dtype], BATCH * GROUP * KV_HEADS
    assert layer.kv_bytes_per_position == BATCH * KV_HEADS * (keys + values) * element_bytes
    assert layer.query_bytes_per_position == heads * keys * element_bytes
    assert layer.output_bytes_per_position == heads * values * element_bytes
    assert layer.flops_per_pair == heads * (2 * keys + 2 * values)
    assert layer.backward_flops_per_pair == heads * (3 * 2 * keys + 2 * 2 * values)


def test_values_are_as_wide_as_keys_unless_said_otherwise() -> None:
    """And what is not said is in no digest."""
    layer, other = Workload(8, heads=2, head_dim=6), Workload(8, heads=2, head_dim=6, value_dim=4)
    assert (layer.value_size, other.value_size, replace(layer, head_dim=7).value_size) == (6, 4, 7)
    assert (layer.widths, other.widths) == ("6", "6/4")
    assert repr(other) == f"{repr(layer)[:-1]}, value_dim=4)"
    assert {"value_dim"} == set(plain(other)) - set(plain(layer))  # type: ignore[call-overload]


def test_there_are_as_many_kv_heads_as_heads_unless_said_otherwise() -> None:
    assert Workload(sequence=1, heads=6, mask="full") == Workload(sequence=1, heads=6, kv_heads=6, mask="full")
    assert Workload(sequence=1, heads=6, mask="full").kv_heads == 6


@given(st.integers(1, 40), st.integers(-3, 45))
@example(4, 3)
@example(4, 4)
@example(4, -1)
def test_cached_keys_leave_a_query(sequence: int, cached: int) -> None:
    if 0 <= cached < sequence:
        layer = Workload(sequence, heads=1, cached_keys=cached, mask="full")
        assert layer.queries == sequence - cached
    else:
        expected = f"cached keys: {cached}, expected 0 or more and fewer than the sequence of {sequence} positions"
        assert refused(sequence=sequence, cached_keys=cached) == expected


def test_cached_keys_are_shown_where_there_are_some() -> None:
    """Digests of schedules and hashes of inputs, which rest on it, are those of before where there are none."""
    layer = Workload(8, heads=2, mask="full")
    text = "Workload(sequence=8, batch=1, heads=2, kv_heads=2, head_dim=128, dtype='bf16', mask='full', window=None, "
    assert repr(layer) == f"{text}documents=None)"
    assert repr(replace(layer, cached_keys=5)) == f"{text}documents=None, cached_keys=5)"
    assert replace(layer, cached_keys=5) != layer
    assert {"cached_keys"} == set(plain(replace(layer, cached_keys=5))) - set(plain(layer))  # type: ignore[call-overload]


def test_cached_keys_and_documents_exclude_each_other() -> None:
    assert refused(documents=(60, 4), cached_keys=9) == "cached keys: 9 in packed documents, expected one document"


packings = st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(sum)


def refused(**wrong: Any) -> str:
    with pytest.raises(WorkloadError) as told:
        Workload(**GOOD | wrong)
    assert len(str(told.value).splitlines()) == 1
    return str(told.value)


@given(st.sampled_from(["sequence", "batch", "heads", "kv_heads", "head_dim", "value_dim"]), st.integers(max_value=0))
def test_every_number_is_one_or_more(name: str, number: int) -> None:
    assert refused(**{name: number}).startswith(f"{name.replace('_', ' ')}: {number}, expected 1 or more")


@given(st.integers(MAX_POSITIONS + 1))
def test_a_sequence_is_not_too_long_to_count_its_pairs(sequence: int) -> None:
    assert f"expected at most {MAX_POSITIONS}" in refused(sequence=sequence)


@given(st.integers(1, 100), st.integers(1, 100))
def test_heads_are_a_multiple_of_kv_heads(heads: int, kv_heads: int) -> None:
    if heads % kv_heads:
        assert refused(heads=heads, kv_heads=kv_heads) == f"{heads} heads are not a multiple of {kv_heads} KV heads"
    else:
        assert Workload(sequence=1, heads=heads, kv_heads=kv_heads, mask="full").kv_heads == kv_heads


@given(st.text().filter(lambda text: text not in ELEMENT_BYTES))
def test_an_unknown_dtype_lists_the_known(dtype: str) -> None:
    assert refused(dtype=dtype).endswith("expected one of fp32, bf16, fp16, fp8")


@given(st.text().filter(lambda text: text not in ("full", "causal", "ranges")))
def test_an_unknown_mask_lists_the_known(mask: str) -> None:
    assert refused(mask=mask).endswith("expected one of full, causal, ranges")


@given(st.integers(max_value=0))
def test_a_window_has_at_least_the_own_key(window: int) -> None:
    assert refused(mask="causal", window=window).startswith(f"window: {window}, expected 1 or more")


@given(st.integers(1))
def test_a_window_needs_the_causal_mask(window: int) -> None:
    assert "a causal mask" in refused(window=window, mask="full")


sides = st.none() | st.integers(0, 40)


@given(sides, sides, st.sampled_from(["full", "causal"]))
def test_a_pair_is_how_many_keys_before_and_after_a_query(before: int | None, after: int | None, mask: str) -> None:
    """In every form; of a causal mask a pair with 0 keys after is the window that it always had."""
    pair = (before, -1 if after is None else after)
    text = ",".join("-1" if side is None else str(side) for side in (before, after))
    if mask == "causal" and after != 0 and (before, after) != (None, None):
        assert refused(mask=mask, window=pair).endswith("expected 0 keys after a query, or a full mask (--mask full)")
        return
    layers = [Workload(30, heads=1, mask=mask, window=each) for each in (pair, [*pair], text)]  # type: ignore[arg-type]
    assert layers[0] == layers[1] == layers[2]
    for query in range(30):
        first = 0 if before is None else max(0, query - before)
        last = 29 if after is None else min(29, query + after)
        end = last + 1 if mask == "full" or after == 0 else query + 1
        assert layers[0].keys_of(query).tolist() == list(range(first, end))
    if mask == "causal" and before is not None:
        assert layers[0] == Workload(30, heads=1, mask=mask, window=before + 1)
        assert layers[0].window == before + 1
    if window_of(text) is not None:
        assert window_text(window_of(text)) == text


@pytest.mark.parametrize(
    "window", ["1,2,3", "-2,0", "1.5,0", "a,b", ",", "4,", "", (1, 2, 3), (-2, 1), (1, "2"), {3, 4}]
)
def test_what_is_no_window_is_refused_in_one_line(window: object) -> None:
    with pytest.raises(TaspLabError, match=r"\Awindow.*expected .*\Z"):
        Workload(8, mask="full", window=window)  # type: ignore[arg-type]


def test_no_mask_but_a_full_one_has_windows_on_both_sides() -> None:
    assert refused(mask="full", kind="linear", window=(3, 3)).startswith("window: 3,3, expected none for linear")
    assert Workload(8, heads=1, mask="full", kind="linear", window=(None, -1)).window is None


@pytest.mark.parametrize("name", ["contiguous", "zigzag", "striped"])
@given(st.integers(2, 6), st.integers(0, 12), st.integers(0, 12))
def test_layouts_balance_a_window_on_both_sides_up_to_its_ends(name: str, n: int, before: int, after: int) -> None:
    """All queries but the first and last ones of the sequence see as many keys: 1 + before + after."""
    layer = Workload(24 * n, heads=1, mask="full", window=(before, after))
    layout, width = LAYOUTS[name](layer.sequence, n), 1 + before + after
    pairs = [sum(len(layer.keys_of(int(query))) for query in layout.positions(rank)) for rank in range(n)]
    lost = [24 * width - each for each in pairs]
    assert sum(lost) == before * (before + 1) // 2 + after * (after + 1) // 2
    if name == "contiguous":
        assert (lost[0] + lost[-1], lost[1:-1]) == (sum(lost), [0] * (n - 2))
    assert attention_layout("tasp", layer, n).name == "contiguous"


def test_a_window_longer_than_the_sequence_is_no_window() -> None:
    layer = Workload(sequence=16, mask="causal", window=2**64, heads=1)
    pairs = attention("tasp", full_mesh(2), layer).flops().sum() / layer.flops_per_pair
    assert pairs == 16 * 17 / 2


@pytest.mark.parametrize(
    "large",
    [
        {"sequence": MAX_POSITIONS, "heads": 35},
        {"sequence": 2**24, "heads": 70, "head_dim": 128},
        {"head_dim": 2**60},
        {"value_dim": 2**60},
        {"head_dim": 2**26, "value_dim": 2**26, "kind": "linear"},
        {"batch": 2**70},
    ],
    ids=lambda large: ",".join(large),
)
def test_a_layer_whose_bytes_or_flops_do_not_fit_into_64_bits_is_refused(large: dict[str, int]) -> None:
    """Otherwise their sums overflow without a word."""
    assert "too large" in refused(**large)


@given(packings)
def test_document_starts_number_the_document_of_each_position(documents: list[int]) -> None:
    layer = Workload(sum(documents), documents=tuple(documents), heads=1, mask="full")
    numbered = np.searchsorted(layer.document_starts, np.arange(layer.sequence), side="right") - 1
    full = [length for length in documents if length]
    assert numbered.tolist() == [number for number, length in enumerate(full) for _ in range(length)]
    assert layer.document_starts.dtype == np.int64


@given(st.integers(1, 100))
def test_without_documents_the_sequence_is_one(sequence: int) -> None:
    assert Workload(sequence, heads=1, mask="full").document_starts.tolist() == [0]
    assert Workload(sequence, documents=(sequence,), heads=1, mask="full").document_starts.tolist() == [0]


@given(packings)
def test_lengths_of_any_kind_of_integer_become_plain(documents: list[int]) -> None:
    """So that equal layers are equal keys of a cache, here and in another process."""
    layer = Workload(sum(documents), documents=tuple(documents), heads=1, mask="full")
    for same in (documents, np.array(documents, dtype=np.int32), iter(documents)):
        other = Workload(sum(documents), documents=same, heads=1, mask="full")  # type: ignore[arg-type]
        assert (other, hash(other)) == (layer, hash(layer))
        assert other.documents is not None
        assert {type(length) for length in other.documents} == {int}
    assert pickle.loads(pickle.dumps(layer)) == layer
    with pytest.raises(FrozenInstanceError):
        layer.documents = None  # type: ignore[misc]


@given(packings, st.integers(-5, 5).filter(bool))
def test_documents_make_up_the_sequence(documents: list[int], more: int) -> None:
    layer = Workload(sum(documents), documents=tuple(documents), heads=1, mask="full")
    expected = max(1, layer.sequence + more)
    if expected != layer.sequence:
        with pytest.raises(WorkloadError, match=f"{layer.sequence} positions together, expected {expected}"):
            replace(layer, sequence=expected)
    assert replace(layer, sequence=expected, documents=None).document_starts.tolist() == [0]


@pytest.mark.parametrize(
    ("documents", "told"),
    [
        ((), "no documents, expected one or more"),
        ((60, -1, 5), "document 1: -1 positions, expected 0 or more"),
        ((60, 4.0), "document 1: a float, expected a whole number"),
        ("64", "document 0: a str, expected a whole number"),
        (64, "documents: int, expected a sequence of whole numbers"),
        ((60, 5), "documents: 65 positions together, expected 64, the sequence length"),
    ],
    ids=["none", "negative", "float", "text", "one number", "too many"],
)
def test_what_is_wrong_with_documents_is_named(documents: Any, told: str) -> None:
    assert refused(documents=documents) == told


@given(packings)
def test_cumulative_lengths_are_those_of_the_documents(documents: list[int]) -> None:
    cu_seqlens = list(accumulate(documents, initial=0))
    assert documents_of(cu_seqlens) == documents_of(np.array(cu_seqlens).tolist()) == tuple(documents)


@pytest.mark.parametrize(
    ("cu_seqlens", "told"),
    [
        ([], "cumulative lengths start with nothing, expected 0"),
        ([1, 4], "cumulative lengths start with 1, expected 0"),
        ([0, 4, 3], "cumulative length 2: 3, expected 4 or more, the preceding length"),
        ([0, 1.5], "cumulative length 1: a float, expected a whole number"),
    ],
    ids=["none", "no zero", "decreasing", "float"],
)
def test_what_is_wrong_with_cumulative_lengths_is_named(cu_seqlens: Any, told: str) -> None:
    with pytest.raises(WorkloadError) as refusal:
        documents_of(cu_seqlens)
    assert str(refusal.value) == told
