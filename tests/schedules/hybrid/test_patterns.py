"""Patterns of layers: what they expand to, the layers of a hybrid, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasp_lab.core.errors import WorkloadError
from tasp_lab.prediction.provenance import plain
from tasp_lab.workload.layer import MAX_LAYERS, MAX_SUM, Workload, expand_layers

HYBRID = Workload(64, heads=4, kv_heads=2, mask="causal", kind="hybrid", layers="LLS", decay="scalar", window=7)

PARTS = st.lists(st.tuples(st.integers(1, 6), st.text("LS", min_size=1, max_size=5)), min_size=1, max_size=6)


@given(PARTS, st.data())
def test_a_pattern_is_its_parts_each_as_often_as_it_says(parts: list[tuple[int, str]], data: st.DataObject) -> None:
    texts = [letters if count == 1 and data.draw(st.booleans()) else f"{count}x{letters}" for count, letters in parts]
    expected = "".join(letters * count for count, letters in parts)
    assert expand_layers(",".join(texts)) == expected
    assert expand_layers(expected) == expected
    assert replace(HYBRID, layers=",".join(texts)) == replace(HYBRID, layers=expected)


@given(st.text("LSx,0129 l-", max_size=12))
def test_any_other_text_is_refused_in_one_line(text: str) -> None:
    said = ""
    try:
        found = expand_layers(text)
    except WorkloadError as error:
        found, said = "L", str(error)
    assert "\n" not in said
    assert not said or repr(text) in said
    assert found
    assert set(found) <= {"L", "S"}


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("", "layers '': no layers in part 1, expected a pattern such as LLSLLS or 4xLLLS"),
        ("LS,", "layers 'LS,': no layers in part 2"),
        ("3x", "layers '3x': no layers in part 1"),
        ("LXS", "layers 'LXS': unknown layer 'X', expected L .linear. or S .softmax attention."),
        ("l", "unknown layer 'l'"),
        ("-1xL", "unknown layer '-'"),
        ("0xL", "layers '0xL': 0 times L, expected 1 or more"),
        ("000xL", "0.* times L, expected 1 or more"),
        (f"{MAX_LAYERS + 1}xL", f"too many layers, expected at most {MAX_LAYERS}"),
        ("9" * 5000 + "xL", "too many layers"),
        ("1000000000xL", "too many layers"),
        (5, "layers: 5, expected a pattern"),
    ],
)
def test_what_is_no_pattern_is_refused(pattern: Any, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        expand_layers(pattern)


def test_the_longest_pattern_is_accepted() -> None:
    assert len(expand_layers(f"{MAX_LAYERS}xL")) == MAX_LAYERS
    assert len(expand_layers("0" * 20 + f"{MAX_LAYERS // 2}xLS")) == MAX_LAYERS


def test_each_letter_is_a_layer_of_its_kind() -> None:
    """The decay is that of linear layers, the window that of softmax layers; all else they have in common."""
    linear = Workload(64, heads=4, kv_heads=2, mask="causal", kind="linear", decay="scalar")
    softmax = Workload(64, heads=4, kv_heads=2, mask="causal", window=7)
    assert (HYBRID.of("L"), HYBRID.of("S")) == (linear, softmax)
    for letter, layer in (("X", HYBRID), ("L", linear), ("S", softmax)):
        with pytest.raises(WorkloadError, match=f"layer '{letter}' of {layer.kind} attention, expected L or S of a"):
            layer.of(letter)


def test_layers_are_shown_where_there_are_some() -> None:
    """Hashes of inputs of single layers are those of before."""
    single = HYBRID.of("S")
    assert "layers" not in repr(single)
    assert "layers='LLS'" in repr(HYBRID)
    assert "layers" not in plain(single)  # type: ignore[operator]
    assert plain(HYBRID)["layers"] == "LLS"  # type: ignore[index]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "hybrid"}, "a hybrid without layers, expected a pattern such as LLSLLS"),
        ({"layers": "LS"}, "layers 'LS' of softmax attention, expected kind 'hybrid'"),
        ({"kind": "linear", "layers": "LS"}, "layers 'LS' of linear attention, expected kind 'hybrid'"),
        ({"kind": "hybrid", "layers": "LS", "cached_keys": 3}, "cached keys: 3, expected none for a hybrid"),
        (
            {"kind": "hybrid", "layers": "LS", "decay": "head", "mask": "full"},
            "decay 'head' with a full mask has no agreed meaning",
        ),
        (
            {"kind": "hybrid", "layers": "LS", "window": 3, "mask": "full"},
            "window: 3 with the mask full, expected a causal mask",
        ),
    ],
)
def test_what_is_no_hybrid_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        Workload(64, heads=4, **fields)


def test_the_flops_of_all_layers_can_be_counted() -> None:
    """A layer that is just small enough, once and twice."""
    heads = MAX_SUM // (4 * 128 * 2**40)
    layer = Workload(2**20, heads=heads, kind="hybrid", layers="S", mask="full")
    with pytest.raises(WorkloadError, match="layer too large"):
        replace(layer, layers="SS")
